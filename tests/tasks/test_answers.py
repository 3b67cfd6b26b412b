"""Two hundred answers for each parser, read by a person first: what models write, what is malformed, what is meant to
mislead."""
import json

import pytest
from conftest import ROOT

from sft_nb.tasks.numbers import final_number


def labelled(name:str)->list[dict]:
    lines = (ROOT/f"tests/tasks/answers_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


READERS = dict(gsm8k=final_number)


@pytest.mark.parametrize("name", READERS)
def test_every_answer_is_read_as_a_person_reads_it(name):
    rows = labelled(name)
    wrong = [(r["text"][:80], r["read"], READERS[name](r["text"])) for r in rows if READERS[name](r["text"]) != r["read"]]
    assert len(rows) >= 200 and wrong == []
