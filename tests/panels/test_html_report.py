"""A run on a page: one file without active content, and a broken part does not hide the others."""
import json
import re

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.display import format_bytes
from sft_nb.extras.html_report import memory_part, page_parts, run_page
from sft_nb.base.report import ConfigError, Report, SftError, fail
from sft_nb.runs.directory import create_run

HOSTILE = "<script>alert(1)</script> **a** \x1b[2J \u202e gnp.exe"
SECRET = "sk-abcdefghijklmnop123456"
ELSEWHERE = r"<script|<link|<iframe|@import|url\(|\ssrc=(?!'data:image/png;base64,)|\son\w+="


def answers(correct:int)->list[dict]:
    said = dict(prompt=HOSTILE, text=f"{HOSTILE} {SECRET}", got="1", expected="1", n_tokens=3, ended=True)
    return [dict(where=f"row {k}", correct=k < correct) | said for k in range(4)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "A run with malicious rows, answers and notes"
    folder = tmp_path_factory.mktemp("page")
    talk = [dict(role="user", content=HOSTILE), dict(role="assistant", content=HOSTILE)]
    (folder/"rows.jsonl").write_text(f"{json.dumps(dict(messages=talk))}\n" * 3)
    cfg = load_config(task="chat", train_file=str(folder/"rows.jsonl"), eval_samples=0, runs_dir=str(folder/"runs"),
                      run_name="x", lora_r=4)
    run = create_run(cfg)
    for step in range(1, 30): run.record(dict(step=step, loss=3 / step, peak_memory_gib=.25))
    run.record(dict(step=30, eval_loss=.5))
    run.set_status("failed", reason=f"{HOSTILE} {SECRET}", step=30)
    Report("guards", {}, [fail(HOSTILE, check="collapse")]).save(run.path/"guards.json")
    (run.path/"plan.json").write_text(json.dumps(dict(parts=dict(weights=2**27, outside=2**20), allocated=2**27,
                                                      device=dict(gib=4.))))
    (run.path/"eval").mkdir()
    scores = {name: dict(model=name, answers=answers(n)) for name, n in dict(base=1, tuned=3).items()}
    (run.path/"eval/adapter.json").write_text(json.dumps(dict(run="x", checkpoint="adapter") | scores))
    said = dict(says="cannot tell", reason=HOSTILE)
    (run.path/"eval/verdict.json").write_text(json.dumps(said))
    return run


@pytest.fixture(scope="module")
def page(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_API_KEY", SECRET)
        return run.report(rows=2).read_text()


def test_it_holds_all_there_is(page):
    for heading in ("Status", "2 rows, token by token", "Memory", "Curves", "What the guards saw", "Scores",
                    "Settings", "Versions"): assert f"<h2>{heading}</h2>" in page
    assert "<h2>Preflight</h2>" not in page   # nothing was kept of one
    for said in (format_bytes(2**27), format_bytes(2**28), "75.0%", "lora_r", "override", "cannot tell",
                 "exclamation_marks"):
        assert said in page, said
    assert page.count("<img alt='loss") == 1 and page.count("tokens are supervised") == 2


def test_it_can_do_nothing_and_needs_nothing(page):
    assert not re.search(ELSEWHERE, page) and "default-src 'none'" in page
    assert "\x1b" not in page and "\u202e" not in page and "&lt;script&gt;" in page


def test_it_tells_no_secret(page): assert SECRET not in page and "MY_API_KEY" in page


def test_rows_that_are_gone_hide_nothing_else(run):
    rows = run.path.parent.parent/"rows.jsonl"
    text = rows.read_text()
    rows.unlink()
    try: parts = page_parts(run, 2)
    finally: rows.write_text(text)
    assert "role='alert'" in parts["2 rows, token by token"] and "<img" in parts["Curves"]


@pytest.mark.parametrize("file, heading", [("guards.json", "What the guards saw"), ("plan.json", "Memory"),
                                           ("eval/adapter.json", "Scores"), ("eval/verdict.json", "Scores")])
@pytest.mark.parametrize("written", ["{", "[]", '{"says": "odd"}'])
def test_a_damaged_file_says_so_in_its_place(run, file, heading, written):
    before = (run.path/file).read_text()
    (run.path/file).write_text(written)
    try: parts = page_parts(run, 0)
    finally: (run.path/file).write_text(before)
    assert "role='alert'" in parts[heading] and "lora_r" in parts["Settings"]


def test_it_is_written_where_it_is_asked_for(run, tmp_path):
    assert run_page(run.path, tmp_path/"a.html", rows=0) == tmp_path/"a.html"
    with pytest.raises(SftError, match="cannot be written"): run_page(run, tmp_path/"no"/"a.html", rows=0)
    with pytest.raises(ConfigError): run_page(tmp_path)


def test_from_a_shell(run, tmp_path, capsys):
    from sft_nb.cli import main
    assert main(["report", str(run.path), "--out", str(tmp_path/"b.html"), "--rows", "1"]) == 0
    assert "1 row, token by token" in (tmp_path/"b.html").read_text() and "b.html" in capsys.readouterr().out


def test_a_run_shows_itself(run):
    html, text, said = run._repr_html_(), str(run), run.to_dict()
    assert "✗ failed" in html and "→" in html and "<script" not in html and "\x1b" not in html + text
    assert "x: failed at step 30" in text and json.loads(json.dumps(said))["best_eval_loss"] == .5


def test_the_table_of_runs_has_no_hole(run):
    from sft_nb.runs.directory import list_runs
    html = list_runs(run.path.parent)._repr_html_()
    assert "✗ failed" in html and "nan" not in html.lower() and "None" not in html and "<script" not in html


def test_a_plan_speaks_of_what_can_be_read():
    from sft_nb.model.hardware import Device
    from sft_nb.planning.plan import Plan
    made = Plan(Device(HOSTILE, 4., 10., 100.), dict(method="lora"), dict(method=HOSTILE),
                dict(weights=2**20, outside=0), 2**21, 10.)
    html = made._repr_html_()
    assert "1.0 MiB" in str(made) and "0.00 GiB" not in str(made) + html and "✓ it fits" in html
    assert "<script" not in html and "\u202e" not in html + repr(made) and json.dumps(made.to_dict())


@pytest.fixture(scope="module")
def evaluation(run):
    from sft_nb.evaluation.evaluate import Evaluation
    return Evaluation.load(run.path/"eval/adapter.json")


def test_scores_show_bars_and_words(evaluation):
    html = evaluation._repr_html_()
    assert "75.0%" in html and "95% interval" in html and "<script" not in html and json.dumps(evaluation.to_dict())


def test_a_verdict_is_a_badge(evaluation):
    from sft_nb.evaluation.verdict import decide
    from sft_nb.extras.compare import Comparison
    said = decide(evaluation.difference)
    both = Comparison(evaluation, evaluation, evaluation.difference)
    assert f"– {said.says}" in said._repr_html_() and str(said.difference) in said._repr_html_()
    assert "A: x, adapter" in both._repr_html_() and "<script" not in both._repr_html_()


def test_without_a_plan_the_memory_is_no_part_of_the_page(run, tmp_path):
    assert "128" in memory_part(run)
    assert memory_part(create_run(load_config(task="chat", runs_dir=str(tmp_path), run_name="unplanned"))) == ""
