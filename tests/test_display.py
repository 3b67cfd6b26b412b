"""How objects and errors look: in plain Python, in IPython, in a notebook."""
import ast
import io
import json
import pickle
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
from conftest import ROOT

from sft_nb.base.display import Html, FAILURE_PAGES, as_html, card_html, cell_text, failure_page, table_html
from sft_nb.extras.html_report import page_html
from sft_nb.base.report import ConfigError, Finding, Report, SftError, edit, ok, skipped, fix_language, warn

HOSTILE = "<script>alert(1)</script> [a](javascript:1) \x1b[2J \u202e gnp.exe"
TRACE = "Traceback"


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    "IPython, as a notebook has it"
    import os
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config
    made = InteractiveShell.instance(config=Config(HistoryManager=dict(enabled=False)))
    yield made
    InteractiveShell.clear_instance()


def said(shell, code:str)->str:
    "What a cell prints, without colours"
    out = io.StringIO()
    with redirect_stdout(out): shell.run_cell(code)
    return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())


RAISE = ("from sft_nb.config.load import load_config\n"
         "load_config('demo', lerning_rate=1)")


def test_ipython_shows_a_card(shell):
    text = said(shell, RAISE)
    assert "lerning_rate is not a setting; the nearest is learning_rate" in text and "write learning_rate" in text
    assert "cell, line 2: load_config('demo', lerning_rate=1)" in text
    assert "failures/a_comma_and_a_typo.html" in text
    assert len(text.splitlines()) < 12 and "load.py" not in text and TRACE not in text


@pytest.mark.parametrize("again", ["%tb", "%tb Verbose"])
def test_the_whole_path_is_there_when_it_is_asked_for(shell, again):
    said(shell, RAISE)
    assert "load.py" in said(shell, again)


def test_raised_anew_it_is_a_card_again(shell):
    "A workbench raises the same error for each part that needs it"
    said(shell, "from sft_nb.base.report import SftError\nerror = SftError('rows', 'none is left')")
    for _ in range(2): assert "%tb shows the full traceback" in said(shell, "raise error")


def test_verbose_and_the_variable_mean_the_whole_path(shell, monkeypatch):
    monkeypatch.setenv("SFT_NB_TRACEBACK", "1")
    assert "load.py" in said(shell, RAISE)
    monkeypatch.delenv("SFT_NB_TRACEBACK")
    assert "load.py" not in said(shell, RAISE)


def test_other_errors_look_as_ever(shell): assert TRACE in said(shell, "1 / 0")


def test_a_script_ends_with_its_traceback():
    done = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.startswith(TRACE) and "Fix: write learning_rate." in done.stderr


def test_a_card_speaks_the_readers_language():
    error = SftError("train", "3 rows are equal", fix=edit(drop_duplicates=True))
    assert error.card()["lines"]["Fix"] == "drop_duplicates=True"
    with fix_language("shell"): assert error.card()["lines"]["Fix"] == "--drop-duplicates"


def test_a_card_is_harmless(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sk-abcdefghijklmnop123456")
    error = SftError(HOSTILE, "sk-abcdefghijklmnop123456", HOSTILE, HOSTILE)
    error.add_note(HOSTILE)
    text, html = "\n".join(error._render_traceback_()), error._repr_html_()
    for drawn in (text.replace("\x1b[1m", "").replace("\x1b[0m", ""), html):
        assert "\x1b" not in drawn and "\u202e" not in drawn and "abcdefghijklmnop" not in drawn
    assert "<script" not in html


def test_an_error_keeps_its_page_on_its_way():
    error = pickle.loads(pickle.dumps(ConfigError("a", "b", page="double_bos")))
    assert error.page == "double_bos" and "double_bos.html" in error._repr_html_()


def pages_of_errors(path)->set[str]:
    "What a module gives its errors as their page"
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    errors = [c for c in calls if getattr(c.func, "id", "") in ("SftError", "ConfigError") and len(c.args) > 4]
    return {c.args[4].value for c in errors if isinstance(c.args[4], ast.Constant)}


def test_pages_that_errors_name_exist():
    there = {p.stem.partition("_")[2] for p in (ROOT/"nbs/failures").glob("[0-9]*.ipynb")}
    named = {page for path in (ROOT/"sft_nb").rglob("*.py") for page in pages_of_errors(path)}
    assert len(named) >= 5 and named | {*FAILURE_PAGES} <= there


def test_findings_of_a_group_have_the_page_of_their_check():
    assert failure_page("data.train_ends") == failure_page("ends") == "never_stops" and failure_page("unheard of") == ""


def test_a_report_says_first_what_counts():
    findings = [ok("a", check="a"), warn("b", edit(max_length=9), check="data.ends"), skipped("c", check="c")]
    report = Report("t", {"train: rows": 7473, "eval: rows": 20, "pad": "<p>"}, findings, good="ready")
    html, text = report._repr_html_(), str(report)
    assert report.verdict == "ready, 1 warning, 1 skipped" == report.to_dict()["verdict"]
    assert html.index("ready, 1 warning") < html.index("data.ends") < html.index("<details")
    assert "max_length=9" in html and "never_stops.html" in html and "7,473" in html
    assert text.splitlines()[1] == "  ! ready, 1 warning, 1 skipped" and text.index("! data.ends") < text.index("✓ a")
    assert Report.from_dict(report.to_dict()) == report


def test_what_only_was_skipped_is_fine():
    assert "✓ fine, 1 skipped" in str(Report("t", {}, [skipped("c", check="c")]))


@pytest.mark.parametrize("draw", [
    lambda: table_html([[HOSTILE]], head=[HOSTILE]), lambda: card_html(HOSTILE, HOSTILE, lines={HOSTILE: HOSTILE}),
    lambda: page_html(HOSTILE, {HOSTILE: as_html(HOSTILE)}),
    lambda: Report(HOSTILE, {HOSTILE: HOSTILE}, [Finding(HOSTILE, "warn", HOSTILE, HOSTILE)])._repr_html_(),
    lambda: as_html(cell_text(HOSTILE, 200))])
def test_what_others_wrote_is_harmless(draw):
    html = draw()
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html and "&lt;script&gt;" in html


def test_what_is_html_is_taken_as_it_is(): assert as_html(Html("<b>")) == "<b>" != as_html("<b>")


def test_a_page_can_do_nothing():
    page = page_html("a", dict(b="<p>c</p>"))
    assert "default-src 'none'" in page and not re.search(r"<script|<link|<iframe|@import|url\(|\ssrc=", page)


@pytest.fixture(scope="module")
def data():
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    talk = [dict(role="user", content=HOSTILE), dict(role="assistant", content=HOSTILE)]
    rows = [dict(messages=talk), dict(messages=[*talk, *talk, *talk, *talk])]
    return prepare(load_config(task="chat", max_length=300, on_long="drop"), train=rows)


def test_an_example_shows_its_tokens_and_its_row(data):
    first, html, text = data.train[0], data.train[0]._repr_html_(), str(data.train[0])
    assert first.where in html and "[[" in text and f"{first.supervised} of {len(first.ids)} tokens" in text
    assert "<script" not in html and "\x1b" not in html + text and "\u202e" not in html + text
    assert json.loads(json.dumps(first.to_dict()))["row"]["messages"][0]["content"] == HOSTILE
    assert "1 example of 2 rows" in repr(data.train) and len(data.train) == len(data.train[:9]) == 1


@pytest.mark.parametrize("number", [1, -2])
def test_there_are_as_many_examples_as_there_are(data, number):
    with pytest.raises(IndexError, match="of 1"): data.train[number]
    assert [x.number for x in data.train] == [0]


def test_what_was_left_out_shows_itself(data):
    assert "1 row left out" in repr(data.dropped) and "longer than max_length 300" in repr(data.dropped)
    html = data.dropped._repr_html_()
    assert "longer than max_length 300" in html and "<script" not in html and "\u202e" not in html + repr(data.dropped)
    assert data.dropped == [*data.train.dropped] and data.dropped.to_dict()["lines"][0]["tokens"] > 300
    assert data.to_dict() == data.report.to_dict()
