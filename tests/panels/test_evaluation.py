"""A stored sweep is read, filtered and paged; no model is loaded."""
import json
import shutil
import time
from dataclasses import replace

import pytest
from conftest import ROOT

from sft_nb.config.load import load_config
from sft_nb.extras.eval_panel import EvalPanel, EvalState, FILTERS
from sft_nb.base.report import ConfigError
from sft_nb.evaluation.generations import Answer, Scores
from sft_nb.evaluation.sweep import Sweep
from sft_nb.runs.directory import create_run

EVIL = "<script>1</script></pre><img src=x onerror=alert(1)>\x1b[2J\u202e**bold** [a](javascript:1)"
PLACES = ["wrong", "right"]


def scores(name:str, rights:str, *, prompt:str="What is {}?", ended:str="", text:str="{}")->Scores:
    "`10` is right, then wrong"
    made = []
    for k, right in enumerate(rights):
        says = text.format(PLACES[int(right)])
        over = ended[k:k + 1] != "0"
        made.append(Answer(f"row {k + 1}", prompt.format(k), says, right == "1", says, "right", 2, over))
    return Scores(name, made)


@pytest.fixture
def run(tmp_path): return create_run(load_config("demo", runs_dir=str(tmp_path), run_name="one"))


def swept(run, base:Scores, lowest=None, **checkpoints:Scores)->EvalState:
    (run.path/"eval").mkdir(exist_ok=True)
    named = {name.replace("_", "-"): s for name, s in checkpoints.items()}
    Sweep("one", "accuracy", base, named, lowest_loss=lowest).save(run.path/"eval/sweep.json")
    return EvalState(run, page=3)


def test_a_run_without_a_sweep_says_the_command(run):
    panel = EvalPanel(run)
    assert panel.view and panel.again.id in panel.live   # drawn before the first click
    assert f'sweep(&quot;{run.path}&quot;)' in panel.to_html() and "sweep(" in panel.to_dict()["problem"]
    assert panel.filter.disabled and not panel.again.disabled
    swept(run, scores("base", "01"), checkpoint_1=scores("checkpoint-1", "11"))
    panel.again.click()
    assert "checkpoint-1 and base, all: 2 of 2 rows" in panel.to_html() and not panel.filter.disabled


def test_a_run_that_was_removed_is_not_one_without_scores(run):
    state = swept(run, scores("base", "01"), checkpoint_1=scores("checkpoint-1", "11"))
    shutil.rmtree(run.path)
    state.reload()
    assert "is gone" in state.html() and "not been scored" not in state.html()


def test_a_damaged_sweep_is_a_line(run):
    (run.path/"eval").mkdir()
    (run.path/"eval/sweep.json").write_text('{"run": 3')
    assert "cannot be read" in EvalState(run).html()


def test_rows_are_filtered_by_what_became_of_them(run):
    state = swept(run, scores("base", "0011"), checkpoint_1=scores("checkpoint-1", "0101", ended="1101"))
    found = {name: state.move(filter=name).on_page() for name in FILTERS}
    assert found == {"all": [0, 1, 2], "better": [1], "worse": [2], "both right": [3], "both wrong": [0],
                     "not ended": [2], "changed since base": [1, 2]}
    with pytest.raises(ConfigError, match="there is no filter 'x'; one of all, better"): state.move(filter="x")


def test_what_is_better_goes_by_the_figure(run):
    low, high = (Scores("x", [Answer("row 1", "q", "", False, None, "r", 1, True, dict(loss=x))]) for x in (2., 1.))
    (run.path/"eval").mkdir()
    Sweep("one", "loss", low, {"checkpoint-1": high}).save(run.path/"eval/sweep.json")
    assert EvalState(run).counts()["better"] == 1 and EvalState(run).counts()["both wrong"] == 1


def test_the_best_and_the_lowest_loss_are_named(run):
    two = dict(checkpoint_1=scores("checkpoint-1", "111"), checkpoint_2=scores("checkpoint-2", "011"))
    html = swept(run, scores("base", "001"), "checkpoint-2", **two).html()
    assert "step 1, best: 1 " in html and "step 2, lowest loss: " in html and "corrected for the choice among 2" in html
    assert ", lowest loss: " not in swept(run, scores("base", "001"), "checkpoint-1", **two).html()


def test_pages_search_and_another_checkpoint(run):
    both = [scores(f"checkpoint-{k}", "1" * 8) for k in (1, 2)]
    state = swept(run, scores("base", "0" * 8), checkpoint_1=both[0], checkpoint_2=both[1])
    assert state.move(at=3, chosen=2).pair()[0].where == "row 6"
    assert (state.move(at=99).at, state.chosen, state.move(at=-5).at) == (6, 1, 0)
    assert state.move(text="IS 7").on_page() == [7] and state.to_dict()["pair"]["outcome"] == "wrong → right"
    assert state.move(checkpoint="checkpoint-2", text="nobody").pair() is None
    assert "0 of 8 rows" in state.html() and state.classes() == []


def test_ids_are_exported(run):
    state = swept(run, scores("base", "0011"), checkpoint_1=scores("checkpoint-1", "0101")).move(filter="both right")
    lines = [json.loads(line) for line in state.export().read_text().splitlines()]
    assert [line.pop("where") for line in lines] == ["row 4"]
    assert lines == [{"checkpoint": "checkpoint-1", "filter": "both right", "class": "all", "search": ""}]


def test_nothing_that_was_said_is_obeyed(run):
    evil = scores(EVIL, "01", prompt=EVIL.replace("{", ""), text=EVIL + "{}")
    state = swept(run, evil, checkpoint_1=scores("checkpoint-1", "11", text=EVIL + "\u202e{}"))
    html = state.html()
    assert not any(bad in html for bad in ("<script", "<img src=x", "</pre><img", "\x1b", "\u202e"))
    assert "&lt;script&gt;" in html and "≠" in html
    assert json.loads(json.dumps(state.to_dict()))["pair"]["where"] == "row 1"


def test_ten_thousand_rows(run):
    n = 10_000
    made = Sweep("one", "accuracy", scores("base", "01" * (n // 2)), {"checkpoint-1": scores("t", "0110" * (n // 4))})
    (run.path/"eval").mkdir()
    (run.path/"eval/sweep.json").write_text(json.dumps(made.to_dict()))   # `save` looks for secrets in each text
    state = EvalState(run, page=3)
    state.html()
    start = time.process_time()
    assert state.move(filter="worse").on_page() == [3, 7, 11]
    assert len(state.move(filter="all", text="row 9999").numbers()) == 1
    assert len(state.move(text="", at=n).on_page()) == 1 and len(state.html()) < 20_000
    assert time.process_time() - start < 1


def test_the_list_is_clicked(run):
    swept(run, scores("base", "0011"), checkpoint_1=scores("checkpoint-1", "0101"))
    panel = EvalPanel(run)
    panel.filter.value = "changed since base"
    assert [cells[2] for cells in panel.table.block()["rows"]] == ["wrong → right", "right → wrong"]
    panel.table.value = 1
    assert panel.state.pair()[0].where == "row 3" and "expected (row 3)" in panel.to_html()
    panel.filter.value = "worse"
    assert panel.table.value == 0 and panel.table.total == 1
    panel.export.click()
    assert "1 ids are in" in panel.to_html() and "model" not in vars(panel)


def test_no_scores_yet_is_no_error_and_the_table_is_short(run):
    html = EvalState(run).html()
    assert "role='alert'" not in html and "have not been scored yet" in html and "ConfigError" not in html
    state = swept(run, scores("base", "0011"), checkpoint_1=scores("checkpoint-1", "0101"))
    state.base.answers[0] = replace(state.base.answers[0], got=None)
    assert [cells[0] for cells in state.cells([0, 3])] == ["1", "4"] and state.cells([0])[0][4] == "none"
    state.base.answers[3] = replace(state.base.answers[3], prompt="word\n" * 40)
    assert state.cells([3])[0][1] == f"{('word ' * 40)[:119]}…"   # what is cut says so
    block = state.scores_chart()
    assert block["title"] == "accuracy on 4 held-out rows, with 95% intervals"
    assert [m["x"] for m in block["marks"] if m.get("status") == "here"] == [1]   # the checkpoint in view


def test_no_picture_of_a_chapter_says_that_it_is_outdated():
    for file in (ROOT/"nbs"/"14_panels").glob("*.ipynb"):
        for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
            assert "outdated:" not in json.dumps(cell.get("outputs", [])), file.name
