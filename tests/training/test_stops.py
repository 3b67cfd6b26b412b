"""A stop request takes effect after the current step, and a resumed run ends like an undisturbed one."""
import shutil
import signal
import sys
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
from learner import assert_same, at_step, killed_at_eight, names, small, training
from transformers import TrainerControl, TrainerState, TrainingArguments

from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import create_run, Run
from sft_nb.runs.process import MOMENT, SIGNALS
from sft_nb.tokens.prepare import prepare
from sft_nb.training import launch as launched
from sft_nb.training.recorder import Interrupted, Stop, StopRequest
from sft_nb.training.train import resume, train, train_run
from sft_nb.workbench import Workbench


def send(number:int): signal.raise_signal(number)   # to this thread: the first of two is heard first


# --- the request itself

@pytest.fixture
def moment(tmp_path):
    "What a callback is told: arguments, the state after step 3 of 10, and a control"
    return TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(global_step=3, max_steps=10), TrainerControl()


def test_the_first_request_wins(moment):
    stop = StopRequest(max_time=0.)
    stop.ask(Stop("guard", "the weights do not move"))
    stop.ask(Stop("SIGTERM", "SIGTERM"))
    control = stop.on_step_end(*moment)   # the time is over too
    assert stop.requested == stop.granted == Stop("guard", "the weights do not move")
    assert control.should_training_stop and control.should_save


def test_nobody_asks(moment):
    stop = StopRequest(max_time=1000.)
    control = stop.on_step_end(*moment)
    assert stop.granted is None and not control.should_training_stop


def test_a_second_signal_is_now(moment):
    before = [*map(signal.getsignal, SIGNALS)]
    with StopRequest() as stop:
        stop.on_train_begin(*moment)
        send(signal.SIGTERM)
        assert stop.requested == Stop("SIGTERM", "SIGTERM")
        time.sleep(MOMENT)
        with pytest.raises(Interrupted) as now: send(signal.SIGINT)
        assert now.value.by == "Ctrl-C" and stop.requested.by == "SIGTERM"
    assert [*map(signal.getsignal, SIGNALS)] == before


@pytest.mark.parametrize("first", SIGNALS, ids=SIGNALS.get)
def test_two_signals_of_one_moment_are_one(moment, first, monkeypatch):
    "A shell and its terminal both say it"
    monkeypatch.setattr("sft_nb.runs.process.MOMENT", 60.)   # this machine may be slow
    with StopRequest() as stop:
        stop.on_train_begin(*moment)
        send(first)
        send(signal.SIGTERM)
        stop.on_step_end(*moment)
    assert stop.granted.by == SIGNALS[first]


def test_who_was_started_with_nohup_hears_no_hangup(moment):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop: send(signal.SIGHUP)
        assert stop.requested is None
    finally: signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_training_is_now():
    with StopRequest() as stop, pytest.raises(Interrupted): send(signal.SIGTERM)
    assert stop.requested is None


# --- in a training

def test_sigterm_at_step_nine(tmp_path, undisturbed):
    with at_step(9, lambda: send(signal.SIGTERM)): run = train(small(tmp_path))
    assert (run.status.state, run.status.reason, run.status.step) == ("stopped", "SIGTERM", 9)
    assert run.status.stopped_by == "SIGTERM" and str(run.status.fix) == f'resume("{run.path}")'
    assert "--resume" in run.status.fix.says("shell")
    assert run.checkpoints()[-1].name == "checkpoint-9"
    assert_same(resume(run), undisturbed)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_twice_is_now(tmp_path, undisturbed):
    with at_step(5, lambda: send(signal.SIGINT)): run = train(small(tmp_path))
    assert (run.status.reason, run.status.stopped_by, run.status.step) == ("Ctrl-C", "Ctrl-C", 5)
    def twice():
        for _ in range(2):
            send(signal.SIGINT)
            time.sleep(MOMENT)
    with at_step(5, twice), pytest.raises(KeyboardInterrupt): train(small(tmp_path, run_name="now"))
    run = Run(tmp_path/"now")
    assert (run.status.state, run.status.step, names(run.checkpoints())) == ("stopped", 4, ["checkpoint-3"])
    assert_same(resume(run), undisturbed)


def test_a_request_at_the_last_step_is_granted_by_the_end(tmp_path, undisturbed):
    with at_step(10, lambda: send(signal.SIGTERM)): assert_same(train(small(tmp_path)), undisturbed)


@pytest.mark.parametrize("phase", [
    "open_run", "_check_new_run", "_prepare_folder", "build_trainer", "record_provenance", "_save_result",
    "_record_end"])
def test_a_stop_in_any_phase_of_a_launched_run(tmp_path, undisturbed, monkeypatch, phase):
    "It goes on from its checkpoint, or says how to begin again"
    run, first = create_run(small(tmp_path, run_name="run"), state="starting"), []
    module = launched if hasattr(launched, phase) else training
    begin = getattr(module, phase)
    def interrupted(*args, **kwargs):
        if not first:
            first.append(phase)
            send(signal.SIGTERM)
        return begin(*args, **kwargs)
    for name in ("stdout", "stderr"): monkeypatch.setattr(sys, name, getattr(sys, name))   # it replaces them
    with patch.object(module, phase, interrupted): assert launched.main([str(run.path)]) == 0
    assert (run.state, run.status.stopped_by) == ("stopped", "SIGTERM")
    assert not [*tmp_path.rglob("*.new"), *tmp_path.rglob("*.aside")]
    if phase in ("_save_result", "_record_end"): return assert_same(resume(run), undisturbed)
    assert str(run.status.fix) == f'train(load_config("{run.path}/config.json", run_name="run-2"))'


def test_a_clock_that_is_set_back(tmp_path, undisturbed, monkeypatch):
    "While it trains, and again before it is resumed"
    now = time.time
    def set_back(days:int): monkeypatch.setattr(time, "time", lambda: now() - 86400 * days)
    with at_step(5, lambda: set_back(1)), at_step(8, lambda: send(signal.SIGTERM)): run = train(small(tmp_path))
    assert (run.state, run.step) == ("stopped", 8)
    set_back(400)
    assert_same(resume(run), undisturbed)
    assert not [*tmp_path.rglob("*.new"), *tmp_path.rglob("*.gone")]


def test_two_processes_on_one_run(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    bench = Workbench(run.config, is_resolved=True, data=prepare(run.config))
    with run.locked():
        with pytest.raises(ConfigError, match="is training it now"): resume(run.path)
        with pytest.raises(ConfigError, match="is training it now"): train_run(Run(run.path), bench)
    assert len(run.metrics()) == len(undisturbed.metrics())   # nothing was touched


def test_the_log_continues_between_two_of_its_lines(tmp_path):
    "A line every four steps, checkpoints every three: what was summed up before the checkpoint is in the next line"
    cfg = small(tmp_path, logging_steps=4, max_steps=9, per_device_train_batch_size=2, max_new_tokens=4)
    whole = train(cfg)
    part = train(replace(cfg, run_name="part"))
    for n in (6, 9): shutil.rmtree(part.path/f"checkpoints/checkpoint-{n}")
    part.set_status("running", step=5)
    resume(part)
    keys = ("step", "loss", "grad_norm", "num_tokens", "mean_token_accuracy")
    def lines(run): return [[m[k] for k in keys] for m in run.metrics() if "loss" in m]
    assert lines(part) == lines(whole) and [line[0] for line in lines(part)] == [1, 4, 8, 9]
    assert len([m for run in (whole, part) for m in run.metrics() if "train_runtime" in m]) == 2
