"""DataPanel: what a list shows about its rows, and what it shows if empty."""
import json
import math
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.panels.batches import BatchPanel
from sft_nb.panels.rows import DataPanel, Marks
from sft_nb.rows.sources import Mixture, open_rows, row_key
from sft_nb.runs.directory import create_run
from sft_nb.tokens.prepare import prepare


@pytest.fixture(scope="module")
def data(): return prepare(load_config("demo", max_samples=9, eval_samples=0, max_length=54, on_long="drop"))


def columns_of(panel)->list[str]: return [column["name"] for column in panel.table.head]


def test_a_row_is_known_by_what_the_user_says(data):
    panel = DataPanel(data)
    kept = [cells[3] for cells in panel.table.block()["rows"]]
    assert columns_of(panel)[-1] == "begins with"
    assert all(text and "<|" not in text and not text.startswith("user") for text in kept)
    assert "drag over the bars" in json.dumps(panel.view)   # not `last: tokens 54`, which is nobody's last
    panel.facet.value = "left out"
    gone = panel.table.block()["rows"]
    assert columns_of(panel)[-1] == "why" and gone
    assert all(cells[0].isdigit() for cells in gone)   # not `arithmetic tra…`


def test_an_empty_list_says_why_and_what_to_do(data):
    panel = DataPanel(data)
    n = len(panel.state.entries("kept"))
    panel.text.value = "nothing like that"
    view = json.dumps(panel.view, ensure_ascii=False)
    assert f"kept: none of {n} rows with “nothing like that” in them; clear the search to see the others" in view
    assert '"kind": "table"' not in view and "show as" not in view   # no head of a table without rows
    panel.text.value = ""
    panel.range.value = (1, 2)
    assert "with 1 to 2 tokens; choose a wider range of lengths" in json.dumps(panel.view)
    panel.range.value = (0, panel.range.max)
    assert f"kept: {n} rows" in json.dumps(panel.view)


def test_a_legend_has_no_count_and_a_step_of_one_batch_no_parts(data):
    panel = BatchPanel(data, batch_size=1)
    panel.show()
    view = json.dumps(panel.view, ensure_ascii=False)
    assert "padding × 1<" not in view and "micro-batch" not in view and "; 1 row " in view
    panel.controls.row.value = 9999
    assert "row 9999 is not among the rows" in panel.error and panel.controls.row.value == 9999
    panel.controls.next.click()
    assert panel.error == "" and panel.controls.row.value == 0


def test_each_search_lists_its_own_rows(data):
    panel = DataPanel(data)
    for k in range(len(data.train.tokens)):   # each finds one row: not the list of the search before
        _, row = data.train.row(k)
        panel.text.value = row["question"]
        assert panel.table.total == 1 and panel.state.source()[1] == row


def test_a_search_is_of_the_side_that_is_shown():
    rows = {side: [dict(question=f"{side} {k}", answer="#### 1") for k in range(9)] for side in ("first", "second")}
    data = prepare(load_config("demo", task="chat"), train=rows["first"], eval=rows["second"])
    panel = DataPanel(data)
    panel.text.value = "first 3"
    assert panel.table.total == 1
    panel.split.value = "eval"
    assert panel.table.total == 0, "row 4 of the held-out rows does not hold it"
    panel.text.value = "second 5"
    assert panel.table.total == 1
    panel.split.value = "train"
    assert panel.table.total == 0


def test_the_messages_of_a_row_show_its_calls(tmp_path):
    call = dict(type="function", function=dict(name="weather", arguments=dict(city="Oslo")))
    talk = [dict(role="user", content="Weather in Oslo?"), dict(role="assistant", tool_calls=[call]),
            dict(role="tool", content="7"), dict(role="assistant", content="7 degrees.")]
    cfg = load_config("demo", task="chat", eval_samples=0)
    panel = DataPanel(prepare(cfg, train=[dict(messages=talk)]))
    panel.state.move(face="messages")
    shown = panel.state.render()
    assert "weather" in shown and "Oslo" in shown and "assistant: \n" not in shown


def test_marks_are_kept_and_left_out_of_the_next_run(tmp_path):
    rows = [dict(question=f"{k} + 1?", answer=f"{k + 1}") for k in range(9)]
    cfg = load_config("demo", task="chat", eval_samples=0, runs_dir=str(tmp_path))
    data = prepare(cfg, train=[*rows, rows[4]])
    panel = DataPanel(data)
    panel.text.value = "4 + 1"
    panel.mark_listed.click()   # a row and its repetition
    panel.text.value = ""
    panel.table.value = 7
    assert panel.mark.label == "mark this row"
    panel.mark.click()
    assert panel.mark.label == "remove the mark"
    marked = tmp_path/"marked_rows.jsonl"
    assert [json.loads(line) for line in marked.read_text().splitlines()] == [rows[4], rows[7]]
    assert [cells[0] for cells in panel.table.block()["rows"] if "✗" in cells[0]] == ["✗ 5", "✗ 8", "✗ 10"]
    again = DataPanel(data)   # as after a restart
    again.facet.value = "marked"
    assert [e.row for e in again.state.listed()] == [5, 8, 10]
    assert f"drop_rows='{marked}'" in again.to_html().replace('"', "'").replace("&#x27;", "'").replace("&quot;", "'")
    left = prepare(replace(cfg, drop_rows=str(marked)), train=[*rows, rows[4]])
    assert left.train.reasons == {"listed in drop_rows": 3}
    assert left.train.stats["row"].tolist() == [0, 1, 2, 3, 5, 6, 8]
    assert len(prepare(replace(cfg, train_file=(str(marked),))).train) == 2
    again.mark_listed.click()   # all of them are marked: no longer
    assert marked.read_text() == "" and again.state.listed() == [] and "✗" not in again.to_html()
    unchanged = prepare(replace(cfg, drop_rows=str(marked)), train=rows)
    assert any("none of the rows equals one in" in str(f) for f in unchanged.report.findings)


@pytest.mark.parametrize("in_memory", [False, True])
def test_rows_that_were_written_anew_are_not_shown_beside_the_earlier_tokens(in_memory, tmp_path):
    rows, file = [dict(question=f"{k} + 1?", answer=f"{k + 1}") for k in range(3)], tmp_path/"sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = load_config("demo", task="chat", train_file=None if in_memory else str(file), eval_samples=0,
                      runs_dir=str(tmp_path))
    panel = DataPanel(prepare(cfg, **dict(train=rows) if in_memory else {}))
    del rows[2]   # a list that the caller still holds
    file.write_text("".join(json.dumps(dict(row, answer="7")) + "\n" for row in rows))
    says = "no longer in it" if in_memory else "sums.jsonl: its rows have changed"
    with pytest.raises(SftError, match=says): panel.state.move(at=0, chosen=2).render()
    with pytest.raises(SftError, match=says): str(panel.state.data.train[2].row)
    if in_memory: return
    with pytest.raises(SftError, match="have changed since"): panel.state.mark()   # another row would be marked
    assert not (tmp_path/"marked_rows.jsonl").exists()


@pytest.mark.parametrize("row", [
    dict(a=(1, 2)), dict(a={1: 2, "b": 3}), dict(a=math.nan, b=-0.), dict(a=np.float32(.1), b=[np.int64(3)]),
    dict(a=date(2024, 1, 1), b="\ud800 \u2028")], ids=str)
def test_a_row_is_known_again_after_it_was_written(row, tmp_path):
    marks = Marks(tmp_path/"marked.jsonl")
    (_, row), = Mixture(open_rows([row]))
    marks.toggle([row])
    assert row in Marks(marks.file) and [row_key(r) for _, r in Mixture(open_rows(marks.file))] == [row_key(row)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_rows_to_drop_are_those_that_the_run_left_out(in_memory, tmp_path, monkeypatch):
    rows = [dict(question=f"{k}?", answer=f"{k}") for k in range(5)]
    file, train = tmp_path/"wrong.jsonl", tmp_path/"train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file.write_text(json.dumps(rows[1]))
    given = dict(train=rows) if in_memory else {}
    cfg = load_config("demo", task="chat", eval_samples=0, runs_dir=str(tmp_path), drop_rows=str(file),
                      train_file=None if in_memory else str(train))
    data = prepare(cfg, **given)
    run = create_run(data.cfg, data=data)
    with monkeypatch.context() as m:
        m.setattr("sft_nb.tokens.prepare._write_side", lambda *_: pytest.fail("its tokens are there already"))
        assert prepare(run.config).train.fingerprint == data.train.fingerprint
    for change in (lambda: file.write_text(train.read_text()), file.unlink):   # between preparation and start
        change()
        run = create_run(data.cfg, data=data)
        assert prepare(run.config).train.fingerprint == data.train.fingerprint
    file.write_text(train.read_text())
    with pytest.raises(SftError, match="5 listed in drop_rows; .* Fix: drop_rows=None"): prepare(data.cfg, **given)
    with pytest.raises(SftError, match="there is no such file"): prepare(replace(cfg, drop_rows="no.jsonl"), **given)
    file.write_text('{"question": "6?", "answer": "6"}')
    data = prepare(cfg, **given)
    assert create_run(data.cfg, data=data).config.drop_rows is None   # nothing was left out
    if in_memory: return
    file.write_text(json.dumps(rows[2]))
    data = prepare(cfg)
    train.write_text(json.dumps(rows[0]))   # other rows now
    run = create_run(data.cfg, data=data)
    assert prepare(run.config).train.fingerprint != data.train.fingerprint == run.fingerprint("train")


def test_lengths_of_several_magnitudes_are_in_bars_of_equal_ratio():
    def lengths_of(*words):
        rows = [dict(question="a " * n, answer="b") for n in words]
        state = DataPanel(prepare(load_config("demo", task="chat", eval_samples=0, max_length=8000), train=rows)).state
        return (*state.histogram(), state)
    edges, counts, state = lengths_of(3, 3, 30, 300, 3000)
    ratios = [b / a for a, b in zip(edges, edges[1:])]
    assert state.log_lengths and 15 < len(counts) <= 30 and max(ratios) < 1.3 * min(ratios) and sum(counts) == 5
    assert sum(n > 0 for n in counts) == 4   # each magnitude has a bar of its own
    edges, counts, state = lengths_of(*range(3, 12))
    assert not state.log_lengths and {b - a for a, b in zip(edges, edges[1:])} == {1} and counts == [1] * 9


@pytest.mark.parametrize("odd", [None, [], "rows.jsonl", load_config("demo")], ids=lambda odd: type(odd).__name__)
def test_what_is_not_prepared_is_told_how_it_is(odd):
    with pytest.raises(SftError, match=rf"given a {type(odd).__name__}; .* Fix: DataPanel\(prepare\(cfg\)\)"):
        DataPanel(odd)
