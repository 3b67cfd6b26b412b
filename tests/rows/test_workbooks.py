"""Workbooks are read with an extra, and refused with the command that installs it; lists of messages are rows."""
import datetime as dt
import json
import re
import sys
import zipfile

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.sources import read_rows
from sft_nb.tokens.prepare import prepare


def workbook(path, **sheets):
    "A workbook with these sheets of cells; skips the test without openpyxl"
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets.items():
        sheet = book.create_sheet(title)
        for cells in rows: sheet.append(cells)
    book.save(path)
    return str(path)


def test_the_rows_of_a_workbook(tmp_path):
    rows = [["question", "answer", "day"], ["1+1?", 2, dt.date(2024, 5, 1)], [None, None, None], ["1+2?", "3", None]]
    file = workbook(tmp_path/"a.xlsx", Rows=rows, Empty=[])
    assert read_rows(file) == {
        "a.xlsx row 2": dict(question="1+1?", answer=2, day="2024-05-01 00:00:00"),
        "a.xlsx row 4": dict(question="1+2?", answer="3", day=None)}
    data = prepare(load_config(task="chat", train_file=file, eval_samples=0))
    assert data.tokenizer.decode([i for i in data.train.tokens[0]["labels"] if i != -100]) == "2<|im_end|>"


@pytest.mark.parametrize("sheets, found", [
    (dict(A=[["question"], ["1"]], B=[["x"]]), r"it has 2 sheets with cells \(A, B\); one sheet with rows"),
    (dict(A=[]), "it has 0 sheets with cells; one"),
    (dict(A=[["a", "a"], [1, 2]]), "two columns have the same name: a, a"),
    (dict(A=[["a"], [1, 2]]), "row 2: a cell has no column name above it")])
def test_workbooks_that_are_not_one_table(tmp_path, sheets, found):
    with pytest.raises(SftError, match=found): read_rows(workbook(tmp_path/"a.xlsx", **sheets))


def test_a_broken_workbook(tmp_path):
    pytest.importorskip("openpyxl")
    (tmp_path/"a.xlsx").write_bytes(b"PK")
    with pytest.raises(SftError, match=r"a.xlsx: it cannot be read \(.*\); an Excel workbook"):
        read_rows(tmp_path/"a.xlsx")


def test_without_openpyxl_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    (tmp_path/"a.xlsx").write_bytes(b"PK")
    with pytest.raises(SftError, match="openpyxl, which reads it, is not installed") as e: read_rows(tmp_path/"a.xlsx")
    assert str(e.value.fix) == "pip install 'sft_nb[excel]', or export the sheet as CSV"


TALK = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", f"{json.dumps(TALK)}\n{json.dumps(TALK)}\n"), ("a.json", json.dumps([TALK, TALK])),
    ("a.jsonl", json.dumps([{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]) + "\n")])
def test_a_row_that_is_a_list_of_messages_is_a_conversation(tmp_path, name, content):
    (tmp_path/name).write_text(content)
    for rows in (str(tmp_path/name), [TALK]):
        data = prepare(load_config(task="chat", eval_samples=0), train=rows)
        assert data.tokenizer.decode([i for i in data.train.tokens[0]["labels"] if i != -100]) == "2<|im_end|>"


def test_messages_in_the_cells_of_a_table(tmp_path):
    import pandas as pd
    pd.DataFrame(dict(messages=[TALK])).to_csv(tmp_path/"a.csv", index=False)   # as Python writes it
    data = prepare(load_config(task="chat", train_file=str(tmp_path/"a.csv"), eval_samples=0))
    assert data.tokenizer.decode([i for i in data.train.tokens[0]["labels"] if i != -100]) == "2<|im_end|>"


def test_messages_one_by_one_are_refused(tmp_path):
    (tmp_path/"a.json").write_text(json.dumps(TALK))
    with pytest.raises(SftError, match="it has role and content, which is one message, and not a conversation"):
        prepare(load_config(task="chat", train_file=str(tmp_path/"a.json"), eval_samples=0))


def test_a_formula_is_what_it_came_to_when_the_workbook_was_saved(tmp_path):
    file = workbook(tmp_path/"a.xlsx", Rows=[["question", "answer"], ["1+2?", "=1+2"]])
    with zipfile.ZipFile(file) as old: parts = {name: old.read(name) for name in old.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    assert b"<f>1+2</f><v />" in parts[sheet] or b"<f>1+2</f><v></v>" in parts[sheet]   # openpyxl computes nothing
    parts[sheet] = re.sub(rb"<f>1\+2</f><v ?(/>|></v>)", b"<f>1+2</f><v>3</v>", parts[sheet])   # as Excel saves it
    with zipfile.ZipFile(file, "w") as new:
        for name, data in parts.items(): new.writestr(name, data)
    assert read_rows(file) == {"a.xlsx row 2": dict(question="1+2?", answer=3)}
