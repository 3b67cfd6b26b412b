"""Untrusted text: nothing in it reaches a terminal or a page as a command."""
import ast
import json

import pytest
from conftest import ROOT

from sft_nb.config.load import load_config, table
from sft_nb.base.escape import escape_html, escape_controls
from sft_nb.base.report import Report, SftError, fail

EVIL = "<script>alert(1)</script>\x1b[2J\x9b31m\u202egnp\u2066.\u200b"
HARMS = ("<script", "\x1b", "\x9b", "\u202e", "\u2066", "\u200b")


def harmless(*texts:str)->bool: return all(harm not in text for text in texts for harm in HARMS)
def cannot_move(*texts:str)->bool: return all(harm not in text for text in texts for harm in HARMS[1:])


def test_every_character_that_is_not_seen_is_written_out():
    import unicodedata
    joiners = "\u200c\u200d"
    for code in [*range(0x20), *range(0x7f, 0xa0), *range(0x2000, 0x2070), 0xfeff, 0xd800, 0xdfff, 0xe0041]:
        char = chr(code)
        hidden = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        if hidden and char not in "\n\t" + joiners: assert escape_controls(char) == json.dumps(char)[1:-1], hex(code)


def test_errors_findings_and_reports():
    error, report = SftError(EVIL, EVIL, EVIL, EVIL), Report(EVIL, {EVIL: EVIL}, [fail(EVIL, EVIL, check=EVIL)])
    assert cannot_move(str(error), str(report), str(report.findings[0])) and harmless(report._repr_html_())
    assert cannot_move(table(load_config(run_name=None, wandb_project=EVIL)))


@pytest.fixture
def hostile(tmp_path):
    "A run in which every file is malicious"
    from sft_nb.runs.directory import create_run
    run = create_run(load_config(runs_dir=str(tmp_path), run_name="x", wandb_project=EVIL))
    status = dict(state=EVIL, reason=EVIL, fix=EVIL, step=3, time=EVIL, host=EVIL, stopped_by=EVIL)
    (run.path/"status.json").write_text(json.dumps(status))
    (run.path/"guards.json").write_text(json.dumps(Report(EVIL, {}, [fail(EVIL, check=EVIL)]).to_dict()))
    answer = dict(where=EVIL, prompt=EVIL, text=EVIL, correct=True, got=EVIL, expected=EVIL, n_tokens=3, ended=True)
    scores = {k: dict(model=EVIL, answers=[answer], accuracy=1.) for k in ("base", "tuned")}
    (run.path/"eval").mkdir()
    (run.path/"eval/adapter.json").write_text(json.dumps(dict(run=EVIL, checkpoint=EVIL) | scores))
    return run


def test_a_run_of_a_stranger(hostile):
    assert harmless(hostile._repr_html_()) and cannot_move(repr(hostile), str(hostile))


def test_an_evaluation_of_a_stranger(hostile):
    from sft_nb.evaluation.evaluate import Evaluation
    evaluation = Evaluation.load(hostile.path/"eval/adapter.json")
    assert harmless(evaluation._repr_html_()) and cannot_move(str(evaluation), evaluation.examples())


def test_the_table_of_a_strangers_runs(hostile, capsys):
    from sft_nb.cli import main
    from sft_nb.runs.directory import list_runs
    assert harmless(list_runs(hostile.path.parent)._repr_html_())
    assert main(["runs", "--runs-dir", str(hostile.path.parent)]) == 0
    assert main(["runs", "--runs-dir", str(hostile.path.parent), "--json"]) == 0
    assert cannot_move(capsys.readouterr().out)


def test_panels():
    from sft_nb.panels.conversation import Turn, turn_html
    from sft_nb.panels.reply_stream import Reply
    from sft_nb.tokens.display import spans_html
    answer = Reply(EVIL, "failed", [1], [EVIL], [.5], [EVIL], EVIL, error=EVIL)
    assert harmless(turn_html(Turn(EVIL, [], {EVIL: answer}, {}, EVIL, EVIL)), spans_html([(EVIL, "context")]))


def test_rows_that_are_printed(tmp_path, capsys):
    from sft_nb.cli import main
    rows = [dict(question="1+1?", answer="2"), dict(question=EVIL + "\ud83d" + "long " * 600, answer=EVIL)]
    (tmp_path/"rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["data", "--train-file", str(tmp_path/"rows.jsonl"), "--eval-samples", "0", "--dropped", "3"]
    assert main([*line, "--on-bad-row", "drop"]) == 0
    out = capsys.readouterr().out
    assert "rows.jsonl line 2" in out and cannot_move(out)
    assert main([*line, "--on-bad-row", "drop", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["dropped"][0]["row"]["answer"] == EVIL and cannot_move(out)


def test_nobody_else_escapes():
    for path in (ROOT/"sft_nb").rglob("*.py"):
        if path.stem in ("escape", "credentials"): continue
        froms = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        assert "html" not in [n.module for n in froms if not n.level], path


def test_html_of_a_number_or_none(): assert (escape_html(3), escape_html(None)) == ("3", "None")
