"""Not one Python traceback, whatever is typed and whatever lies on the disk: a sentence answers every wrong line."""
import contextlib
import io
import time

import pytest
from wrong_lines import wrong_lines

from sft_nb.cli import commands, main


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("wrong")


@pytest.fixture
def light(folder, monkeypatch):
    "In that folder; a line that is not wrong is told, and trains nothing"
    import transformers  # noqa: F401   its log keeps the stream that it finds first
    def right(*args): raise AssertionError("this line is not wrong")
    monkeypatch.setattr(commands, "_new_run", right)
    monkeypatch.setattr("sft_nb.training.launch.launch", right)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TQDM_DISABLE", "1")


def answer(line:list[str])->tuple[object, str]:
    "Exit code and all that was said"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try: code = main(line)
        except SystemExit as e: code = e.code
        except Exception as e: code = f"{type(e).__name__} came through: {e}"
    return code, said.getvalue()


def fault(line:list[str], code, said:str)->str:
    "What is wrong with an answer; empty if nothing is"
    if code not in (0, 1, 2, 130): return f"exit code {str(code)[:300]!r}"
    if "Traceback" in said or "not foreseen" in said: return said[:600]
    if code and not said.strip(): return "nothing is said"
    return "" if max(map(len, said.splitlines()), default=0) < 1500 else f"{len(said)} characters"


def test_no_wrong_line_ends_in_a_traceback(folder, light):
    lines, began, faults = wrong_lines(folder), time.process_time(), {}
    for line in lines:
        if found := fault(line, *answer(line)): faults[" ".join(line)[:80]] = found
    assert faults == {} and len(lines) >= 200
    assert time.process_time() - began < 60   # 18 s, of which torch takes 8 to load
