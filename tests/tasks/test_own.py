"""User-defined tasks: a file, a module, an object, a function; none runs just because an untrusted run names it."""
import json

import pytest
from learner import small

from sft_nb.config.load import load_config, save_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.runs.directory import Run
from sft_nb.tasks.core import get_task, Score, task, task_of
from sft_nb.tokens.prepare import prepare
from sft_nb.training.launch import launch
from sft_nb.training.train import resume, train

MINE = '''
import pathlib
from helper import CAPITAL
from sft_nb.tasks.core import Score
from sft_nb.tasks.gsm8k import GSM8K
pathlib.Path({ran!r}).touch()
class Capitals:
    name, fields = "capitals", ("country", "capital")
    def rows(self, split, *, n=None, seed=42): return [dict(country="Peru", capital=CAPITAL)] * 8
    def messages(self, row):
        return [dict(role="user", content=row["country"]), dict(role="assistant", content=row["capital"])]
    def score(self, text, row): return Score(text == row["capital"], text, row["capital"])
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    "A file with one task, next to a module that it imports, used from another folder"
    (tmp_path/"tasks").mkdir()
    (tmp_path/"tasks/helper.py").write_text("CAPITAL = 'Lima'\n")
    (tmp_path/"tasks/mine.py").write_text(MINE.format(ran=str(tmp_path/"ran")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["tasks/mine.py", "tasks/mine.py:Capitals", "./tasks/mine.py"])
def test_a_file_is_a_task(mine, name, tokenizer):
    cfg = load_config(task=name, max_samples=4, eval_samples=2)
    assert task_of(cfg).name == "capitals"
    assert prepare(cfg, tokenizer).train.n_kept == 4


def test_an_edited_file_is_read_again_and_its_rows_are_prepared_again(mine, tokenizer):
    import os
    cfg, file = load_config(task="tasks/mine.py", max_samples=4, eval_samples=0), mine/"tasks/mine.py"
    before = prepare(cfg, tokenizer).train.fingerprint
    assert prepare(cfg, tokenizer).train.fingerprint == before
    file.write_text(file.read_text().replace('content=row["country"]', 'content="Capital?"'))
    os.utime(file, ns=(1, 1))
    assert prepare(cfg, tokenizer).train.fingerprint != before


@pytest.mark.parametrize("text,name,says", [
    ("", "x.py", "the tasks in it are none"), ("1/0", "x.py", "ZeroDivisionError"), ("x = (", "x.py", "SyntaxError"),
    ("raise SystemExit(3)", "x.py", "SystemExit"), ("import no_such_module_here", "x.py", "No module named"),
    ("open('nothing')", "x.py", "FileNotFoundError"), ("class NLI: pass", "x.py:NLI", "it has no name, fields, rows"),
    ("class NLI:\n name = fields = rows = messages = score = 1\n def __init__(self, n): ...", "x.py", "TypeError"),
    ("A = 1", "x.py:B", "it has no B; the tasks in it are none"), (None, "x.py", "there is no file x.py"),
    (None, "gone/x.py:NLI", "there is no file gone/x.py")])
def test_what_is_wrong_with_a_file_is_said(tmp_path, monkeypatch, text, name, says):
    monkeypatch.chdir(tmp_path)
    if text is not None: (tmp_path/"x.py").write_text(text)
    with pytest.raises(ConfigError, match=says): get_task(name)


def test_a_saved_run_that_names_a_file_does_not_run_it(mine):
    path = save_config(load_config(task="tasks/mine.py:Capitals"), mine/"config.json")
    for asked in (lambda: task_of(load_config(path)), lambda: prepare(load_config(path))):
        with pytest.raises(ConfigError, match="which runs Python code"): asked()
    assert not (mine/"ran").exists()
    assert task_of(load_config(path, trust_remote_code=True)).name == "capitals" and (mine/"ran").exists()
    (mine/"mine.py").write_text("task = 'tasks/mine.py'\n")
    assert task_of(load_config(mine/"mine.py")).name == "capitals"


def test_a_run_finds_its_file_from_every_folder(mine, monkeypatch):
    run = train(small(mine/"runs", task="tasks/mine.py:Capitals", max_samples=8, max_steps=1, eval_samples=2))
    monkeypatch.chdir("/")
    assert Run(run.path).config.task == f"{mine}/tasks/mine.py:Capitals"
    assert evaluate(run.path, progress=False, trust_remote_code=True).base.n == 2


@task("country", "capital", prompt="Capital of {country}?", system="Be brief.")
def rivers(text, row):
    if text == "half": return .5
    return Score(True, text, "x") if text == "score" else text.strip() == row["capital"]


def test_a_function_is_a_task():
    row = dict(country="Peru", capital="Lima")
    assert [m["content"] for m in rivers.messages(row)] == ["Be brief.", "Capital of Peru?", "Lima"]
    assert [rivers.score(t, row).correct for t in ("Lima\n", "Quito", "half", "score")] == [True, False, False, True]
    assert rivers.score("half", row).figures == dict(score=.5) and rivers("Lima", row) is True
    assert get_task(load_config(task=rivers).task) is rivers
    with pytest.raises(ConfigError, match="it was given 1 of them"): task("country")
    with pytest.raises(SftError, match="this task has no rows of its own"): rivers.rows("train")


@pytest.mark.parametrize("value", [85.0, -0.5, 2])
def test_a_number_that_is_no_share_is_refused(value):
    "Percent count as percent of nothing: 1.0 would be right and 85 wrong"
    @task("q", "a")
    def percent(text, row): return value
    with pytest.raises(SftError, match=f"task 'percent': it returned {value:g}; True, False, or a number from 0 to 1"):
        percent.score("x", dict(q="1", a="2"))


def test_tasks_of_a_notebook_are_found_in_their_process_alone(tokenizer):
    names = {"__name__": "__main__", "task": task}
    exec("@task('q', 'a')\ndef twins(text, row): return True\n", names)
    exec("@task('q', 'a', prompt='{q}!')\ndef others(text, row): return True\n", names)
    cfg = load_config(task=names["twins"])
    assert cfg.task == "memory:twins" and task_of(cfg) is names["twins"]
    with pytest.raises(ConfigError, match="a separate process would not find it"): launch(cfg)
    with pytest.raises(ConfigError, match="it was an object in another process"): get_task("memory:nobody")
    rows = [dict(q="1", a="2")]
    assert prepare(cfg, tokenizer, train=rows).task is names["twins"]
    both = [prepare(load_config(), tokenizer, task=names[n], train=rows) for n in ("twins", "others")]
    assert len({data.train.fingerprint for data in both}) == 2   # nothing of the one is found for the other


def test_rows_from_memory_are_what_is_scored_later(tmp_path):
    rows = [dict(question=f"{k}?", answer=str(k)) for k in range(12)]
    cfg = small(tmp_path/"runs", max_steps=2, save_steps=1, eval_samples=3, task="auto")
    run = train(cfg, data=prepare(cfg, train=rows[:8], eval=rows[8:]))
    kept = [json.loads(line) for line in (run.path/"rows/eval.jsonl").read_text().splitlines()]
    assert kept == rows[8:11]
    scored = evaluate(run, progress=False).base.answers
    assert [a.expected for a in scored] == ["8", "9", "10"]
    moved = run.path.rename(tmp_path/"elsewhere")
    assert [a.expected for a in evaluate(moved, progress=False).base.answers] == ["8", "9", "10"]
    Run(moved).set_status("stopped", step=1)
    assert resume(moved).state == "finished"


def test_a_module_is_looked_for_where_the_call_is_made_and_in_no_folder_of_before(tmp_path, monkeypatch):
    import sys
    before = [*sys.path]
    for folder in ("first", "second"):
        (tmp_path/folder).mkdir()
        (tmp_path/folder/f"{folder}_capitals.py").write_text("from sft_nb.tasks.gsm8k import TASK\n")
        monkeypatch.chdir(tmp_path/folder)
        assert get_task(f"{folder}_capitals:TASK").name == "gsm8k"
    assert [p for p in sys.path if p not in before] == [str(tmp_path/"second")]
