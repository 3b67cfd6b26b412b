"""Every wrong command line or damaged file is answered by a sentence, never by a Python traceback."""
import contextlib
import io
import random
import subprocess
import sys
import time

import pytest
from wrong_lines import wrong_lines

from sft_nb.cli import commands, main


@pytest.fixture
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
    "What is wrong with an answer; empty if nothing"
    if code not in (0, 1, 2, 130): return f"exit code {str(code)[:300]!r}"
    if "Traceback" in said or "This is unexpected" in said: return said[:600]
    if code and not said.strip(): return "nothing is said"
    return "" if max(map(len, said.splitlines()), default=0) < 1500 else f"{len(said)} characters"


def faults_of(lines:list[list[str]])->dict[str, str]:
    "Line -> what is wrong with its answer"
    found = {" ".join(line)[:80]: fault(line, *answer(line)) for line in lines}
    return {line: said for line, said in found.items() if said}


@pytest.mark.parametrize("part", [0, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 2))])
def test_no_wrong_line_ends_in_a_traceback(folder, light, part):
    "A third of them; the others in `make soak`"
    lines, began = wrong_lines(folder), time.process_time()
    random.Random(0).shuffle(lines)   # so that a third has every kind
    assert faults_of(lines[part::3]) == {} and len(lines) >= 200
    assert time.process_time() - began < 30   # 6 s, and 8 more where torch is to be loaded


def test_a_python_without_packages_is_no_traceback():
    ended = subprocess.run([sys.executable, "-S", "-m", "sft_nb", "runs"], capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "there is no package fastcore" in ended.stderr and "Fix: pip install" in ended.stderr
