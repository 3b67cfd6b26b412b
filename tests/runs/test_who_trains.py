"""Which process trains a run: the lock and its holder. Other containers are created with `unshare`."""
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import cache

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.files import try_lock
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs import process
from sft_nb.runs.locate import find_target
from sft_nb.runs.directory import Run, check_free, check_links, create_run, open_run, reserve_name, start_process
from sft_nb.runs.status import write_json
from sft_nb.runs.summary import summary
from sft_nb.runs.process import (
    SignalListener, SIGNALS, record_launcher, process_of, read_process, reserve, start, take_lock)
from sft_nb.training.launch import launch
from sft_nb.training.train import train
from sft_nb.workbench import Workbench


@pytest.fixture
def run(tmp_path): return create_run(load_config("demo", runs_dir=str(tmp_path), run_name="a"))


def files(run)->dict: return {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()}


HOLD = """
import sys, time
from sft_nb.runs.directory import Run
from sft_nb.runs.process import SignalListener, Interrupted
run = Run(sys.argv[1])
try:
    with run.locked(), SignalListener():
        run.set_status("running", step=3)
        print("held", flush=True)
        time.sleep(600)
except Interrupted as e: run.set_status("stopped", reason=e.by, stopped_by=e.by)
"""


def holder(run, *before:str):
    "A process that holds the run, in whatever `before` makes"
    found = subprocess.Popen([*before, sys.executable, "-c", HOLD, run.path], stdout=subprocess.PIPE, text=True)
    assert found.stdout.readline() == "held\n"
    return found


@pytest.fixture
def bystander():
    "An unrelated process"
    found = subprocess.Popen(["sleep", "600"])
    yield found
    assert found.poll() is None, "a process that does not train was signalled"
    found.kill()
    found.wait()


# --- looking

def test_looking_changes_nothing(run):
    before = files(run)
    for _ in range(3): assert (run.state, run.held(), run.owner(), run.launched()) == ("killed", False, None, None)
    assert files(run) == before and "lock" not in before
    with run.locked():
        held = files(run)
        assert (Run(run.path).held(), Run(run.path).owner()) == (True, os.getpid())
        assert files(run) == held


def test_who_looks_is_in_nobodys_way(run):
    handle = take_lock(run.path)
    process.release_lock(run.path, handle)
    looking = try_lock(run.path/"lock", shared=True)
    assert run.held() is False   # a second one who looks is not told that it is trained
    os.close(looking)


def test_a_lock_that_may_not_be_opened_is_not_known(run, monkeypatch):
    def refused(path, **how): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(process, "try_lock", refused)
    assert run.held() is None and run.state == "running"   # as its status says
    run.set_status("stopped")
    assert run.stop() == "stopped"
    run.set_status("running")
    write_json(run.path/"owner.json", asdict(replace(process_of(), began=1.)))
    assert run.state == "killed"   # whoever held it is dead, whatever the lock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ESTALE])
def test_a_disk_without_locks_is_told_before_the_work(run, monkeypatch, number):
    def without(path, **how): raise OSError(number, os.strerror(number))
    monkeypatch.setattr(process, "try_lock", without)
    says = f"it cannot be locked .{os.strerror(number)}.*Fix: runs_dir='another/folder'"
    with pytest.raises(SftError, match=says): check_free(run.path.parent, None)
    with pytest.raises(SftError, match=says), run.locked(): pass


def test_a_child_of_the_training_does_not_hold_its_run(run):
    handle, (here, there) = take_lock(run.path), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, b".")
        time.sleep(600)
        os._exit(0)
    try:
        os.read(here, 1)
        assert run.held() is True
        process.release_lock(run.path, handle)   # as it is when the parent dies
        assert run.held() is False
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


RESERVE = """
import sys, time
from sft_nb.runs.directory import reserve_name
with reserve_name(sys.argv[1], "same"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_name_that_another_training_is_about_to_take_is_refused_before_the_rows_are_read(tmp_path):
    cfg = load_config("demo", runs_dir=str(tmp_path/"runs"), run_name="same")
    other = subprocess.Popen([sys.executable, "-c", RESERVE, cfg.runs_dir], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        bench = Workbench(cfg)
        says = "run 'same': another process is about to train it.*Fix: run_name='same-2'"
        for begin in (lambda: train(bench), lambda: launch(cfg)):
            with pytest.raises(ConfigError, match=says): begin()
        assert "data" not in vars(bench)
        with reserve_name(cfg.runs_dir, "other"), reserve_name(cfg.runs_dir, None): pass
    finally:
        other.kill()
        other.wait()
    with reserve_name(cfg.runs_dir, cfg.run_name): run = create_run(cfg)   # a dead process holds nothing
    assert [p.name for p in run.path.parent.iterdir()] == ["same"]


def test_a_name_is_held_where_nothing_can_be_written(tmp_path):
    "Whoever makes the directory says what is wrong there"
    (tmp_path/"file").touch()
    with reserve(tmp_path/"file"/"run") as is_free: assert is_free


# --- starting

def test_what_is_announced_is_starting_for_everybody(tmp_path):
    run = create_run(load_config("demo", runs_dir=str(tmp_path), run_name="a"), state="starting")
    assert Run(run.path).state == "starting"   # from the first instant
    write_json(run.path/"process.json", asdict(replace(process_of(), began=1.)))   # who announced it has died
    assert run.state == "killed"
    write_json(run.path/"process.json", asdict(replace(process_of(), space="pid:[1]")))   # in another container
    assert run.state == "starting"
    for then in (0, time.time() + 9999):   # a minute is over; the clock has been set back since
        os.utime(run.path/"process.json", (then, then))
        assert run.state == "killed"


def test_a_run_whose_process_could_not_be_started_has_failed(run, monkeypatch):
    def none(*args, **kwargs): raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(subprocess, "Popen", none)
    run.set_status("stopped")
    with pytest.raises(SftError, match="no process could be started .Resource temporarily unavailable"):
        start_process(run)
    assert run.state == "failed"


# --- stopping

def test_the_process_that_holds_it_is_asked(run, bystander):
    training = holder(run)
    assert (run.state, run.owner()) == ("running", training.pid)
    assert run.stop(timeout=300) == "stopped" and training.wait() == 0
    assert (run.status.stopped_by, run.status.reason) == ("SIGTERM", "a stop was requested")
    run.set_status("stopped", reason="SIGTERM", stopped_by="SIGTERM")   # sent by the system, at another time
    assert run.status.reason == "SIGTERM"


def test_one_that_is_suspended_says_so_and_is_stopped_at_once(run):
    "Ctrl-Z: a request would not be noticed, and stop would wait, then kill it without a checkpoint"
    training = holder(run)
    training.send_signal(signal.SIGSTOP)
    while not run.trainer().is_suspended: time.sleep(.05)
    assert summary(run)["reason"] == f"suspended; kill -CONT {training.pid} continues it" and run.state == "running"
    says = f"process {training.pid} trains it and is suspended .*Fix: kill -CONT {training.pid}"
    with pytest.raises(ConfigError, match=says): run.checkpoint(timeout=60)
    assert run.stop(timeout=60) == "stopped" and training.wait() == 0
    assert run.status.reason == "a stop was requested" and summary(run)["reason"] == run.status.reason


def test_a_number_that_another_process_has_now_is_not_signalled(run, bystander):
    "The file says that it trains; it is not it"
    write_json(run.path/"owner.json", asdict(replace(process_of(bystander.pid), began=1.)))
    write_json(run.path/"process.json", asdict(replace(process_of(bystander.pid), began=1.)))
    run.set_status("running", step=3)
    assert (run.owner(), run.launched(), run.stop()) == (None, None, "killed")


def test_stopping_a_copy_leaves_the_original_alone(run, bystander, tmp_path):
    write_json(run.path/"owner.json", {})
    run.set_status("running", step=3)
    process._write_process(run.path, "owner.json", process_of(bystander.pid))
    process._write_process(run.path, "process.json", process_of(bystander.pid))
    assert (run.state, run.launched()) == ("running", bystander.pid)
    copied = Run(shutil.copytree(run.path, tmp_path/"copied"))
    assert (copied.state, copied.launched(), copied.stop()) == ("killed", None, "killed")
    (tmp_path/"linked").symlink_to(run.path)
    assert Run(tmp_path/"linked").launched() == bystander.pid   # the same directory by another name


def test_links_out_of_a_run_are_not_followed(run, tmp_path):
    "for writing or removing; a link to the whole run, or inside of it, is no harm"
    outside = tmp_path/"outside"
    outside.mkdir()
    (outside/"mine").write_text("mine")
    (tmp_path/"linked").symlink_to(run.path)
    (run.path/"adapter").symlink_to("kept")
    (run.path/"kept").mkdir()
    with Run(tmp_path/"linked").locked(): pass
    for name in ("log.txt", "metrics.jsonl", "lock", "samples.jsonl", "checkpoints", "eval", "eval/scores.jsonl",
                 "checkpoints/checkpoint-3", "status.json"):
        link = run.path/name
        link.parent.mkdir(exist_ok=True)
        before = link.read_bytes() if link.is_file() else None
        if link.is_dir(): link.rmdir()
        else: link.unlink(missing_ok=True)
        link.symlink_to(outside/"mine" if "." in name else outside)
        with pytest.raises(ConfigError, match=f"{name} is a link to .*outside the run"):
            with run.locked(): pass
        with pytest.raises(ConfigError, match="is a link"): open_run(run.path)
        with pytest.raises(ConfigError, match="is a link"): start_process(run)
        with pytest.raises(ConfigError, match="is a link"): check_links(tmp_path/"linked")
        link.unlink()
        if before is not None: link.write_bytes(before)
    assert [p.name for p in outside.iterdir()] == ["mine"] and (outside/"mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "adapter/tokenizer", "adapter/a/b/x.json",
                                  "checkpoints/checkpoint-3/optimizer.pt", "checkpoints/checkpoint-3/a/b/x.bin"])
def test_weights_of_a_run_are_its_own_files(run, tmp_path, name):
    "A stranger's run would read, and a training would change, a file that lies elsewhere"
    outside, link = tmp_path/"outside", run.path/name
    outside.mkdir()
    (outside/"mine").write_text("mine")
    link.parent.mkdir(parents=True)
    link.symlink_to(outside/"mine" if "." in link.name else outside)
    uses = (lambda: open_run(run.path), lambda: find_target(run.path), lambda: start_process(run),
            run.locked().__enter__)
    for use in uses:
        with pytest.raises(ConfigError, match=f"{name} is a link to .*outside the run.*Fix: remove the link"): use()
    link.unlink()
    (link.parent/"own").write_text("own")
    link.symlink_to("own")
    with run.locked(): assert open_run(run.path).path == run.path and link.read_text() == "own"


def test_a_folder_of_runs_may_be_a_link_to_another_disk(run, tmp_path):
    "so may the folder above it; and a link that stays inside of the run is followed"
    disk = tmp_path/"disk"/"runs"
    disk.mkdir(parents=True)
    (tmp_path/"runs").symlink_to(disk)
    (tmp_path/"home").symlink_to(tmp_path)
    for above in (tmp_path, tmp_path/"home"):
        there = create_run(replace(run.config, runs_dir=str(above/"runs"), run_name=None))
        (there.path/"checkpoints"/"checkpoint-3").mkdir(parents=True)
        (there.path/"best").symlink_to("checkpoints/checkpoint-3")
        (there.path/"checkpoints"/"last").symlink_to(there.path/"checkpoints"/"checkpoint-3")
        with there.locked(): there.set_status("running", step=1)
        assert open_run(there.path).step == 1 and (disk/there.name/"config.json").exists()


def test_while_somebody_looks_nobody_is_signalled(run, bystander):
    "The instant in which another process polls looked like a lock that is held, by the process of the status"
    looking = try_lock((run.path/"lock").with_name("config.json"), shared=True)
    (run.path/"lock").touch()
    polled = try_lock(run.path/"lock", shared=True)
    run.set_status("running", step=3)
    assert run.stop() == "killed"
    for handle in (looking, polled): os.close(handle)


def test_on_another_machine_it_says_where(run, monkeypatch, bystander):
    monkeypatch.setattr(process, "_PATIENCE", .1)
    with run.locked():
        run.set_status("running", step=3)
        write_json(run.path/"owner.json", asdict(replace(process_of(bystander.pid), host="node-7", user="ada")))
        says = r"process \d+ of ada on node-7 is training it and cannot be stopped from here.*, as ada on node-7"
        with pytest.raises(ConfigError, match=says): Run(run.path).stop()
        (run.path/"owner.json").unlink()   # it holds the lock and has not said who it is
        with pytest.raises(ConfigError, match="an unknown process is training it"): Run(run.path).stop()


def test_another_users_training_is_left_alone(run, monkeypatch):
    import psutil
    training = holder(run)
    def denied(self, number): raise psutil.AccessDenied(self.pid)
    with monkeypatch.context() as m:
        m.setattr(psutil.Process, "send_signal", denied)
        with pytest.raises(ConfigError, match=f"process {training.pid} is training it and cannot be stopped from here"):
            run.stop()
    assert training.poll() is None and run.stop(timeout=300) == "stopped"
    training.wait()


def test_a_process_that_is_being_prepared_is_stopped(run):
    record_launcher(run.path)
    run.set_status("starting")
    slow = ("import time; from sft_nb.runs.process import SignalListener; time.sleep(.2); "
            "SignalListener().__enter__(); time.sleep(600)")
    start(run.path, [sys.executable, "-c", slow], os.environ, listens=True)
    assert run.state == "starting"
    assert run.stop(timeout=300) == "stopped" and run.status.stopped_by == "SIGTERM"


# --- another container

@cache
def why_not()->str:
    "Why `unshare` cannot be tried here; empty if it can"
    if not shutil.which("unshare"): return "there is no unshare"
    done = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, text=True)
    return done.stderr.strip()


@pytest.fixture
def container():
    if why_not(): pytest.skip(f"no container can be made: {why_not()}")
    return ("unshare", "--pid", "--fork", "--mount-proc")


STOP = """
import os, sys
from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import Run
run = Run(sys.argv[1])
print(os.getpid(), run.state, run.owner())
try: print(run.stop(timeout=300))
except ConfigError as e: print(e)
"""

def stopped_in(container, run)->str:
    asked = [*container, sys.executable, "-c", STOP, run.path]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_container_does_not_stop_what_is_trained_outside(run, container, bystander):
    training = holder(run)
    said = stopped_in(container, run)
    assert "running" in said and "in another container is training it and cannot be stopped from here" in said
    assert training.poll() is None and run.stop(timeout=300) == "stopped"
    training.wait()


def test_what_is_trained_in_a_container_is_not_stopped_from_outside(run, container):
    "There it has number 1, which is the first process of this machine here"
    training = holder(run, *container, "--kill-child")
    assert read_process(run.path/"owner.json").pid in (1, 2) and run.state == "running"
    with pytest.raises(ConfigError, match="process [12] of .* in another container is training it"): run.stop()
    assert run.state == "running"
    training.kill()
    training.wait()
    deadline = time.monotonic() + 300
    while run.state == "running" and time.monotonic() < deadline: time.sleep(.05)
    assert run.state == "killed"


def test_the_handlers_that_were_there_are_there_again():
    def mine(number, frame): pass
    before = {s: signal.getsignal(s) for s in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, mine)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with SignalListener():
            assert signal.getsignal(signal.SIGTERM) != mine and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for s, handler in before.items(): signal.signal(s, handler)
