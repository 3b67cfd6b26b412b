"""Two hundred answers for each parser, read by a person first: what models write, what is malformed, what is meant to
mislead."""
import json

import pytest
from conftest import ROOT
from hypothesis import given, strategies as st

from sft_nb.tasks.nli import read_answer
from sft_nb.tasks.numbers import final_number
from sft_nb.tasks.tools import read_calls
from sft_nb.tasks.units import tagged_number

READERS = dict(gsm8k=final_number, units=tagged_number, nli=lambda text: read_answer(text)[0], tools=read_calls)


@pytest.mark.parametrize("name", READERS)
def test_every_answer_is_read_as_a_person_reads_it(name):
    lines = (ROOT/f"tests/tasks/answers_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    read = READERS[name]
    found = [(r["text"][:80], r["read"], read(r["text"])) for r in map(json.loads, lines)]
    wrong = [x for x in found if x[1] != x[2]]
    assert len(lines) >= 200 and wrong == []


@pytest.mark.parametrize("name", READERS)
@given(st.text(alphabet="{}[]\"'<>/=-+,.:0123456789 answernmlt_#$\\^\n½−", max_size=80))
def test_no_text_breaks_a_reader(name, text):
    READERS[name](text)
    READERS[name](f'<answer>{text}</answer> {{"predicted_label": "{text}", "name": "{text}"}}')
