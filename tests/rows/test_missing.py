"""Missing values stay missing and numbers keep their digits, for every kind of file and table."""
import json
from decimal import Decimal

import datasets
import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.readers import to_messages
from sft_nb.rows.sources import open_rows
from sft_nb.tasks.core import task
from sft_nb.tokens.prepare import prepare

ROWS = [dict(question="1+1?", answer=2), dict(question="1+2?", answer=3), dict(question="1+3?", answer=None),
        dict(question=None, answer=5)]
SETTINGS = dict(model="tiny", task="chat", eval_samples=0)


def answers(data)->list[str]:
    "The supervised text of each example"
    return [data.tokenizer.decode([i for i in x["labels"] if i != -100]) for x in data.train.tokens]


def findings(data)->dict: return {f.check: f for f in data.report.findings}


@pytest.fixture
def kinds(tmp_path):
    "The same four rows in every kind of file, and in memory"
    whole = pd.DataFrame(ROWS).astype(dict(answer="Int64"))   # with NA, and without 2.0
    (tmp_path/"a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path/"b.json").write_text(json.dumps(ROWS))
    whole.to_csv(tmp_path/"c.csv", index=False)
    whole.to_csv(tmp_path/"d.tsv", index=False, sep="\t", na_rep="NaN")
    (tmp_path/"e.csv").write_text("question,answer\n1+1?,2\n1+2?,3\n1+3?,null\n<NA>,5\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path/"f.parquet")
    arrays = [r if r["answer"] is None else r | dict(answer=np.int64(r["answer"])) for r in ROWS]
    memory = dict(records=ROWS, frame=whole, once=iter(whole.to_dict("records")), numpy=arrays,
                  dataset=datasets.Dataset.from_list(ROWS), table=pyarrow.Table.from_pylist(ROWS))
    return {p.name: p for p in tmp_path.iterdir()} | memory


def test_all_kinds_of_rows_are_read_alike(kinds, monkeypatch, tmp_path):
    monkeypatch.setenv("SFT_NB_CACHE", str(tmp_path/"cache"))
    seen = {}
    for name, rows in kinds.items():
        data = prepare(load_config(**SETTINGS), train=rows if not hasattr(rows, "suffix") else str(rows))
        seen[name] = (answers(data), data.train.reasons)
        numbers = {} if str(rows).endswith((".csv", ".tsv")) else dict(answer=3)
        assert data.train.seen.numbers == numbers, name
    assert len(seen) == 12
    for name, found in seen.items():
        assert found == (["2<|im_end|>", "3<|im_end|>"], {"empty answer": 1, "empty question": 1}), name


def test_what_pandas_makes_of_whole_numbers_is_reported():
    frame = pd.DataFrame(dict(question=["a?", "b?", "c?"], answer=[1, 2, None]))
    data = prepare(load_config(**SETTINGS), train=frame)
    found = findings(data)["train_numbers"]
    assert answers(data)[0] == "1.0<|im_end|>" and found.status == "warn" and "1.0" in found.says
    assert "write 1 instead of 1.0" in str(found.fix)
    whole = frame[:2].astype(dict(answer=int))
    assert findings(prepare(load_config(**SETTINGS), train=whole))["train_numbers"].status == "ok"


def test_values_of_numpy_and_pandas_become_those_of_json():
    calls = np.array([dict(x=1, y=None)])
    odd = dict(a=np.float32(.1), b=np.bool_(True), c=pd.NaT, d=calls, e=(1, 2), f=Decimal("1.5"))
    (_, row), = open_rows([odd])[0]
    assert row == dict(a=.1, b=True, c=None, d=[dict(x=1)], e=[1, 2], f=Decimal("1.5"))
    (_, row), = open_rows(iter([dict(answer=pd.NA)]))[0]
    assert row == dict(answer=None)


def test_words_for_nothing_stay_words_in_json():
    "In a table, NaN and null are missing; None, NA and N/A may be answers, as is every JSON string"
    rows = [dict(question="Which?", answer=a) for a in ("None", "NA", "N/A", "null", "nan")]
    data = prepare(load_config(**SETTINGS), train=rows)
    assert [a.removesuffix("<|im_end|>") for a in answers(data)] == ["None", "NA", "N/A", "null", "nan"]


@pytest.mark.parametrize("row, says", [
    (dict(question="a", answer=dict(x=1)), "the answer is {'x': 1}; a string"),
    (dict(messages=3), "messages is 3; a list"), (dict(input_ids=None), "input_ids is None; a list of integers")])
def test_values_are_quoted_as_what_they_are(row, says):
    with pytest.raises(SftError) as e: to_messages(row)
    assert says in str(e.value)


def test_a_context_that_is_missing_is_no_word_of_a_prompt():
    @task("context", "question", "answer")
    def judge(text, row): return text == row["answer"]
    rows = [dict(context=None, question="1+1?", answer=2), dict(context=float("nan"), question="1+2?", answer=None)]
    data = prepare(load_config(**SETTINGS | dict(task="auto")), train=rows, task=judge)
    text = data.tokenizer.decode(data.train.tokens[0]["input_ids"])
    assert "None" not in text and "1+1?" in text and data.train.reasons == {"empty answer": 1}


def test_a_conversation_that_is_missing_has_no_answer():
    talk = [dict(role="Human", content="1+1?"), dict(role="AI", content=2)]
    unasked = [dict(role="Human", content=None), talk[1]]
    rows = [dict(messages=talk), dict(messages=None, system="Be brief."), dict(messages=unasked)]
    data = prepare(load_config(**SETTINGS), train=rows)
    assert answers(data) == ["2<|im_end|>"] and data.train.reasons == {"no answer": 1, "empty question": 1}
    assert data.train.seen.numbers == dict(messages=2)


def test_an_input_of_zero_is_an_input():
    assert to_messages(dict(instruction="Add 1.", input=0, output=1))[0]["content"] == "Add 1.\n0"


def test_text_files_are_documents(tmp_path):
    for name in ("a.txt", "b.txt"): (tmp_path/name).write_text(f"Roses are red in {name}.\n")
    cfg = load_config(model="tiny", task="text", train_file=str(tmp_path), eval_samples=0)
    data = prepare(cfg)
    assert data.train.n_kept == 2 and "red in a.txt.\n" in answers(data)[0]
    (tmp_path/"book.txt").write_text("Roses are red.\n" * 500)
    with pytest.raises(SftError, match="nothing is left to learn") as e:
        prepare(load_config(**SETTINGS, train_file=str(tmp_path/"book.txt")))
    assert e.value.fix.settings == dict(on_long="split")
    (tmp_path/"c.jsonl").write_text('{"text": "Violets are blue."}')
    assert [s.name for s in open_rows(tmp_path)] == ["c.jsonl"]   # beside rows, text files are notes
    (tmp_path/"rows.txt").write_text('{"text": "Violets are blue."}\n{"text": "Roses are red."}\n')
    with pytest.raises(SftError, match="it holds JSON") as e: list(open_rows(tmp_path/"rows.txt")[0])
    assert str(e.value.fix) == f"mv {tmp_path}/rows.txt {tmp_path}/rows.jsonl"
    (tmp_path/"notes.md").write_text("# Notes")
    assert [*open_rows(tmp_path/"notes.md")[0]] == [(1, dict(text="# Notes"))]
    (tmp_path/"notes.rst").write_text("Notes")
    with pytest.raises(SftError, match="or to notes.rst.txt if it is text"): open_rows(tmp_path/"notes.rst")
