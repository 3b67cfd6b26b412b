"""Atomic files, runs created at the same time, and lists that survive damage."""
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from sft_nb.config.load import load_config
from sft_nb.base import files
from sft_nb.base.files import atomic_folder, remove_temporaries, write_atomically
from sft_nb.base.report import ConfigError, Report
from sft_nb.panels.run_state import RunState
from sft_nb.runs import metrics
from sft_nb.runs.directory import Run, create_run
from sft_nb.runs.directory import list_runs


def killed_at(n:int, code:str, *args)->int:
    "Run a process that is killed just before its `n`th flush to disk"
    head = """
import os, signal, sys
left, sync = [int(sys.argv[1])], os.fsync
def dying(handle):
    left[0] -= 1
    if left[0] < 0: os.kill(os.getpid(), signal.SIGKILL)
    return sync(handle)
os.fsync = dying
"""
    return subprocess.run([sys.executable, "-c", head + code, str(n), *map(str, args)]).returncode


SAVES = """
from pathlib import Path
from sft_nb.config.load import load_config, save_config
from sft_nb.base.report import Report, ok
folder = Path(sys.argv[2])
Report("rows", dict(rows=2), [ok("fine", check="x")]).save(folder/"data.json")
save_config(load_config("demo", max_steps=7), folder/"config.json")
"""

def test_a_report_and_a_config_are_the_old_ones_or_the_new_ones(tmp_path):
    Report("rows", dict(rows=1)).save(tmp_path/"data.json")
    n, seen = 0, set()
    while True:
        code = killed_at(n, SAVES, tmp_path)
        seen.add(Report.load(tmp_path/"data.json").figures["rows"])
        if (tmp_path/"config.json").exists(): assert load_config(tmp_path/"config.json").max_steps == 7
        if code == 0: break
        assert code == -signal.SIGKILL
        n += 1
    assert seen == {1, 2} and n == 4   # two files, each with its folder


MAKES = """
from sft_nb.config.load import load_config
from sft_nb.runs.directory import create_run
create_run(load_config("demo", runs_dir=sys.argv[2], run_name="a"))
"""

@pytest.mark.parametrize("n", [0, 3, 7, 9])
def test_a_run_is_there_with_all_that_it_begins_with_or_its_name_is_free(tmp_path, n):
    assert killed_at(n, MAKES, tmp_path) == -signal.SIGKILL
    if (tmp_path/"a").exists(): assert Run(tmp_path/"a").status.state == "running" and Run(tmp_path/"a").config
    else: create_run(load_config("demo", runs_dir=str(tmp_path), run_name="a"))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]   # what was left is swept


def test_a_name_that_is_taken_in_the_same_instant(tmp_path):
    cfg = load_config("demo", runs_dir=str(tmp_path), run_name="a")
    create_run(cfg)
    with patch("sft_nb.runs.directory.check_free"), pytest.raises(ConfigError, match="already exists"): create_run(cfg)
    assert create_run(load_config("demo", runs_dir=str(tmp_path))).name == "arithmetic-tiny-1"


@pytest.mark.parametrize("name", ["../a", "a/b", ".a", "-a", "a b", "a\u202eb", "<b>", "x" * 101, "é"])
def test_what_cannot_be_the_name_of_a_run(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be the name of a run; letters, digits"):
        create_run(load_config("demo", runs_dir=str(tmp_path), run_name=name))
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_written_is_not_swept(tmp_path):
    with atomic_folder(tmp_path/"merged") as aside:
        (aside/"weights").touch()
        assert remove_temporaries(tmp_path) == [] and aside.exists()
    half = tmp_path/".status.json.1.new"
    half.touch()
    assert remove_temporaries(tmp_path) == []
    os.utime(half, (0, 0))
    assert remove_temporaries(tmp_path) == [half.name]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    write_atomically(tmp_path/"a", "old")
    with patch("os.fsync", side_effect=OSError(28, "No space left on device")), pytest.raises(OSError):
        write_atomically(tmp_path/"a", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_a_device_is_not_replaced(tmp_path):
    "As root could, with `sft_nb report RUN --out /dev/stdout`"
    names = dict.fromkeys(["/proc/self/fd/1", f"/proc/{os.getpid()}/fd/2"], "a device")
    if os.getuid() == 0:   # in a folder of its own, as what is tested here may fail
        os.mknod(tmp_path/"full", 0o20666, os.makedev(1, 7))
        names[tmp_path/"full"] = "a device"
    for name, says in (names | {"/": "not the name of a file", "a\0b": "not the name of a file"}).items():
        with pytest.raises(OSError, match=f"it is {says}"): write_atomically(Path(name), "x")
    assert all(path.is_char_device() for path in tmp_path.iterdir())


# --- lists

def pipe(file:Path)->None: os.mkfifo(file)
def device(file:Path)->None: file.symlink_to("/dev/zero")
def loop(file:Path)->None: file.symlink_to(file.name)
def huge(file:Path)->None:
    with file.open("wb") as f: f.truncate(20 * 2**30)

READ = ("config.json", "status.json", "metrics.jsonl", "guards.json", "eval/adapter.json")   # for the line of a run
OTHERS = ("process.json", "owner.json", "progress.json", "lock", "samples.jsonl", "plan.json", "eval/scores.jsonl",
          "adapter/checkpoint.json", "checkpoints/checkpoint-3/checkpoint.json", "log.txt")
DIGITS = "9" * 5000
CONTENTS = [
    ("config.json", "{"), ("config.json", '{"config": {"model": [1]}}'), ("config.json", '{"config": 3}'),
    ("status.json", "[1]"), ("status.json", '{"step": 1e999}'), ("status.json", '{"step": %s}' % DIGITS),
    ("status.json", '{"step": true}'), ("status.json", '{"state": ["x"]}'), ("status.json", '{"reason": {}}'),
    ("metrics.jsonl", "\0\0\n{\n"), ("metrics.jsonl", '{"step": 1e999}\n'), ("metrics.jsonl", '{"step": "x"}\n'),
    ("metrics.jsonl", '{"step": true, "loss": 1}\n'), ("metrics.jsonl", '{"step": -1, "loss": 1}\n'),
    ("metrics.jsonl", '{"step": %s}\n' % DIGITS), ("metrics.jsonl", '{"step": %s}\n' % DIGITS[:400]),
    *(("metrics.jsonl", '{"step": 1, "%s": %s}\n' % (name, value)) for name in ("loss", "seconds", "eval_loss")
      for value in ("true", "null", "{}", "[1]", '"x"', DIGITS[:400])),
    ("guards.json", "[]"), ("guards.json", '{"findings": [3]}'), ("guards.json", '{"findings": "x"}'),
    *(("eval/adapter.json", '{"model": "base", "accuracy": %s}' % value) for value in ("1-1-1", "1e999"))]
HARMLESS = [
    ("process.json", "{"), ("owner.json", "null"), ("environment.json", ""), ("progress.json", '{"phase": {}}'),
    ("progress.json", '{"phase": "training", "done": 1e999}'), ("progress.json", '{"phase": "x", "figures": [1]}'),
    ("progress.json", '{"phase": "training", "done": 1, "of": 2, "seconds_left": "x"}'),
    ("samples.jsonl", '{"step": 1, "answers": [3]}\n'), ("plan.json", '{"allocated": 1, "device": 3}'),
    ("plan.json", '{"allocated": "x", "device": {"gib": "x"}}'),
    ("eval/scores.jsonl", '{"checkpoint": "adapter", "figure": "f1", "rows": "x", "value": %s}\n' % DIGITS[:400])]
BROKEN = [*((name, make, name in READ) for make in (pipe, device, loop, huge, Path.mkdir) for name in (*READ, *OTHERS)),
          *((*case, True) for case in CONTENTS), *((*case, False) for case in HARMLESS)]

@pytest.mark.parametrize("name,damage,is_said", BROKEN)
def test_a_run_with_a_broken_file_hides_no_other(tmp_path, name, damage, is_said):
    "neither in a list nor in a panel, and the line of the run names the file"
    for run_name in ("good", "bad"):
        run = create_run(load_config("demo", runs_dir=str(tmp_path), run_name=run_name))
        run.record(dict(step=3, loss=1.5, seconds=2.))
        run.set_status("finished" if run_name == "good" else "running", step=3)
    file = run.path/name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if callable(damage): damage(file)
    else: file.write_text(damage)
    (tmp_path/".half-1.new").mkdir()
    for table in (list_runs(tmp_path), list_runs(tmp_path, only=("good", "bad"))):
        table = table.set_index("run")
        assert {*table.index} == {"good", "bad"} and table.state["good"] == "finished" and table.loss["good"] == 1.5
        assert table.state["bad"] in ("killed", "failed", "running", "new")
        assert table.damage["good"] == "" and (name in table.damage["bad"] + table.reason["bad"]) == is_said

    panels = [lambda: RunState([run.path.parent/"good", run])]
    if name != "config.json": panels += [lambda: RunState(run), lambda: RunState([run, run.path.parent/"good"])]
    for make in panels:
        state = make()
        json.dumps(state.to_dict())
        drawn = state.html()
        assert state.charts() or state.run.name == "bad"
        if is_said and name == "metrics.jsonl" and callable(damage): assert "bad/metrics.jsonl: " in drawn
    json.dumps(run.to_dict())
    assert run._repr_html_() and len(run.log()) <= 2**20


def test_a_run_that_may_not_be_read_hides_no_other(tmp_path):
    for name in ("good", "bad"): create_run(load_config("demo", runs_dir=str(tmp_path), run_name=name))
    read = files.open_regular
    def denied(path, **how):
        if path.parent.name == "bad": raise PermissionError(13, "Permission denied")
        return read(path, **how)
    with patch.object(files, "open_regular", denied): table = list_runs(tmp_path).set_index("run")
    assert table.damage["bad"].startswith("config.json: Permission denied") and table.model["good"] == "tiny"


def test_figures_are_those_of_the_lines(tmp_path):
    "They are picked out of the bytes, and must be what reading every line says"
    run = create_run(load_config("demo", runs_dir=str(tmp_path), run_name="a"))
    for step in range(1, 9): run.record(dict(step=step, loss=3 / step, seconds=step / 7, epoch=1e-05 * step))
    run.record(dict(step=8, eval_loss=float("nan"), seconds=2.))
    run.record(dict(step=8, eval_loss=1.25e-05, eval_runtime=1., seconds=2.5))
    run.record(dict(step=9, loss=float("inf"), train_loss=7., seconds=3))
    with (run.path/"metrics.jsonl").open("a") as f: f.write('{"step": 10, "loss": 9')
    line, lines = list_runs(tmp_path).iloc[0], run.metrics()
    assert (line.step, line.loss, line.seconds) == (9, lines[-1]["loss"], 3) and line.best_eval_loss == 1.25e-05
    assert metrics.last_line(run.path/"metrics.jsonl") == lines[-1] and run.step == 9


def test_scores_are_those_of_the_evaluation_whatever_a_model_wrote(tmp_path):
    run = create_run(load_config("demo", runs_dir=str(tmp_path), run_name="a"))
    text = '"model": "base", "accuracy": 0.99'
    def score(who, share): return dict(model=who, accuracy=share, answers=[dict(text=text), dict(text=text)])
    (run.path/"eval").mkdir()
    said = dict(base=score("base", .25), tuned=score("tuned", 1e-05))
    for indent in (None, 1):
        write_atomically(run.path/"eval/adapter.json", json.dumps(said, indent=indent))
        assert tuple(list_runs(tmp_path).loc[0, ["base", "tuned"]]) == (.25, 1e-05)


def test_a_long_curve_is_thinned_and_keeps_its_peaks():
    points = [(k, 1.) for k in range(100_000)]
    points[77_777] = (77_777, 50.)
    thin = metrics.downsample(points)
    assert len(thin) <= 2000 and (77_777, 50.) in thin and thin == sorted(thin)


# --- paths

def test_a_run_is_not_lost_when_the_folder_changes(tmp_path, monkeypatch):
    (tmp_path/"rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    (tmp_path/"elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = create_run(load_config(train_file="rows.jsonl", run_name="a"))
    monkeypatch.chdir(tmp_path/"elsewhere")
    assert run.state == "killed" and Path(run.config.train_file[0]) == tmp_path/"rows.jsonl"
    assert list_runs("../runs").run[0] == "a"


def test_a_path_in_a_config_is_looked_for_here_and_then_beside_it(tmp_path, monkeypatch):
    (tmp_path/"conf").mkdir()
    (tmp_path/"conf/rows.jsonl").touch()
    (tmp_path/"conf/mine.py").write_text("train_file = 'rows.jsonl'\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("conf/mine.py").train_file == (str(tmp_path/"conf/rows.jsonl"),)
    (tmp_path/"rows.jsonl").touch()
    assert load_config("conf/mine.py").train_file == ("rows.jsonl",)
    assert load_config(train_file="nowhere.jsonl").train_file == ("nowhere.jsonl",)


@pytest.mark.parametrize("code, of_folder, passes", [
    (errno.EINVAL, True, True), (errno.EOPNOTSUPP, True, True), (errno.EINVAL, False, False), (errno.EIO, True, False)])
def test_only_a_folder_on_a_file_system_that_flushes_none_may_stay_unflushed(tmp_path, code, of_folder, passes):
    path = tmp_path if of_folder else tmp_path/"a"
    (tmp_path/"a").write_text("x")
    with patch("os.fsync", side_effect=OSError(code, "no")):
        if passes: files.fsync(path)
        else:
            with pytest.raises(OSError): files.fsync(path)
