"""What is compared when a run is resumed, and a reader of its output that disappears."""
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from unittest.mock import patch

import pytest
from learner import TEN_STEPS, curve, killed_at_eight, learner, small, weights

from sft_nb.base import progress
from sft_nb.cli import main
from sft_nb.cli.commands import _print_until_end
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.directory import Run, create_run
from sft_nb.runs.status import write_json
from sft_nb.runs.provenance import check_provenance
from sft_nb.training import recorder
from sft_nb.training.train import resume, train


def edit(run:Run, **settings):
    saved = json.loads((run.path/"config.json").read_text())
    saved["config"] |= settings
    write_json(run.path/"config.json", saved)


def test_settings_that_a_checkpoint_was_made_with_cannot_be_edited(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    assert check_provenance(run) == []
    edit(run, learning_rate=1e-3, save_steps=4)
    says = "edited since the run began: learning_rate was 0.005, is 0.001; .*Fix: train.load_config.*restore them"
    with pytest.raises(ConfigError, match=says): resume(run)
    assert run.status.step == 8 and run.status.state == "running"   # nothing was touched


def test_what_may_be_edited_is_taken_and_said(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    edit(run, save_steps=4, logging_steps=2)
    assert check_provenance(run) == [
        "config.json was edited, and the edits are used: logging_steps was 1, is 2, save_steps was 3, is 4"]


def test_other_versions_are_said(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    was = json.loads((run.path/"environment.json").read_text())
    was["packages"]["torch"] = "1.0"
    write_json(run.path/"environment.json", was)
    assert "may not be byte for byte the same: torch was 1.0, is " in check_provenance(run)[0]


def test_a_run_without_an_origin_is_resumed_as_before(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    (run.path/"origin.json").unlink()
    edit(run, learning_rate=1e-3)
    assert check_provenance(run) == []


def test_the_mean_loss_of_a_resumed_run_is_that_of_all_steps(tmp_path, undisturbed):
    "transformers divides by the steps of the last process"
    def mean_loss(run): return [m["train_loss"] for m in run.metrics() if "train_loss" in m][-1]
    resumed = resume(killed_at_eight(tmp_path, undisturbed))
    assert mean_loss(resumed) == pytest.approx(mean_loss(undisturbed), rel=1e-6)
    losses = [m["loss"] for m in undisturbed.metrics() if "loss" in m]
    assert mean_loss(undisturbed) == pytest.approx(sum(losses) / len(losses), rel=1e-3)


# --- readers

@contextmanager
def nobody_reads():
    "Standard output and error are pipes whose reader is closed"
    with ExitStack() as stack:
        for name in ("stdout", "stderr"):
            ours, theirs = os.pipe()
            os.close(ours)
            stack.enter_context(patch.object(sys, name, open(theirs, "w")))
        yield


@pytest.mark.parametrize("hidden", ["", "1"], ids=["with a bar", "in lines"])
def test_a_reader_that_goes_away_ends_no_training(tmp_path, monkeypatch, hidden):
    seen = "" if hidden else "terminal"
    for room in (progress, recorder): monkeypatch.setattr(room, "display_target", lambda: seen)
    monkeypatch.setattr(progress.ProgressBar, "show", partialmethod(_at_once, progress.ProgressBar.show))
    with nobody_reads(): run = train(small(tmp_path, max_steps=2))
    said = (run.path/"log.txt").read_text()
    assert run.state == "finished" and ("step 2 of 2" if hidden else "training 2 of 2 steps") in said


def _at_once(self, show, told):
    "Without the pause between two pictures"
    self._next = 0.
    show(self, told)


def test_nor_that_of_the_command_line(tmp_path):
    settings = TEN_STEPS | learner() | dict(max_steps=2, runs_dir=tmp_path, run_name="a")
    del settings["preflight"]
    words = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    with nobody_reads(): assert main(["train", "--config", "demo", "--no-preflight", *words]) == 0
    assert Run(tmp_path/"a").state == "finished" and "run directory: " in (tmp_path/"a/log.txt").read_text()


def test_a_failure_that_nobody_reads_is_still_a_failure(tmp_path):
    words = ["--runs-dir", str(tmp_path), "--train-file", "nowhere.jsonl", "--no-preflight"]
    with nobody_reads(), patch.object(sys, "stderr", open(os.devnull, "w")):
        assert main(["train", "--config", "demo", *words]) in (1, 2)


def test_a_run_that_was_killed_while_it_was_followed_is_no_success(tmp_path):
    "It was over before anybody could look"
    run = create_run(small(tmp_path))   # running, says its status, and nobody is
    with pytest.raises(SftError, match="its process died without reporting an error"): _print_until_end(run)


def test_a_run_that_is_resumed_at_its_end_takes_no_step_more(tmp_path):
    "in the middle of an epoch; its last sample is there once"
    run = train(small(tmp_path, run_name="ended", max_steps=6))
    before = curve(run), weights(run), (run.path/"samples.jsonl").read_text()
    run.set_status("running", step=6)
    resume(run)
    assert (curve(run), weights(run), (run.path/"samples.jsonl").read_text()) == before
    assert (run.step, run.checkpoints()[-1].name, run.state) == (6, "checkpoint-6", "finished")
