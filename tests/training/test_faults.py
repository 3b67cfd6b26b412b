"""Full disks and damaged checkpoints: saved state is kept, and a resumed run ends like an undisturbed one."""
import json
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from learner import assert_same, killed_at_eight, names, small, weights
from transformers import TrainerCallback

from sft_nb.base.report import ConfigError, Report, SftError
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.evaluation.generations import GenerationCache
from sft_nb.model.generation import Generation
from sft_nb.runs.checkpoint import cannot_write, find_corruption
from sft_nb.runs.directory import Run, reserve_name
from sft_nb.training import guards
from sft_nb.training.train import resume, train
from sft_nb.training.trainer import SupervisedTrainer

NO_SPACE = OSError(28, "No space left on device")


# --- disks

@contextmanager
def disk_of(n:int):
    "No file may grow beyond `n` bytes: what a full disk does, without one"
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, before[1]))
    try: yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_inside_a_checkpoint(tmp_path, undisturbed):
    "The adapter (69 kB) fits, the optimiser's state (155 kB) does not"
    save = SupervisedTrainer._save_checkpoint
    def on_a_small_disk(self, *args, **kwargs):
        if self.state.global_step != 6: return save(self, *args, **kwargs)
        with disk_of(100_000): return save(self, *args, **kwargs)
    says = r"checkpoint-6: it could not be written .*ulimit -f.*earlier saves are unchanged.*Fix: resume\("
    with patch.object(SupervisedTrainer, "_save_checkpoint", on_a_small_disk), pytest.raises(SftError, match=says):
        train(small(tmp_path, run_name="full"))
    run = Run(tmp_path/"full")
    assert names(run.checkpoints()) == ["checkpoint-3"] == names((run.path/"checkpoints").glob("checkpoint*"))
    assert find_corruption(run.path/"checkpoints/checkpoint-3") == ""
    assert run.status.state == "failed" and "could not be written" in run.status.reason
    assert_same(resume(run), undisturbed)


def test_a_disk_that_is_full_when_a_line_is_written(tmp_path):
    says = r"metrics.jsonl: it cannot be written .No space left on device.*Fix: train\(load_config"
    with patch.object(Run, "record", side_effect=NO_SPACE), pytest.raises(SftError, match=says):
        train(small(tmp_path, run_name="line"))


def test_a_disk_that_is_full_when_another_file_is_written(tmp_path):
    says = r"run 'other': a file could not be written .No space left.*a disk with room.*make room, and then train"
    with patch("sft_nb.training.train.record_provenance", side_effect=NO_SPACE), pytest.raises(SftError, match=says):
        train(small(tmp_path, run_name="other"))
    status = Run(tmp_path/"other").status
    assert status.state == "failed" and "a file could not be written" in status.reason


def test_a_disk_that_is_full_when_the_result_is_written(tmp_path):
    cannot_save = patch.object(SupervisedTrainer, "save_model", side_effect=NO_SPACE)
    says = "adapter: it could not be written"
    with cannot_save, patch.object(SupervisedTrainer, "_save_checkpoint"), pytest.raises(SftError, match=says):
        train(small(tmp_path, run_name="result"))
    assert not (tmp_path/"result/adapter").exists() and not (tmp_path/"result/adapter.aside").exists()


def test_a_disk_on_which_not_even_the_status_fits(tmp_path):
    "What is raised is what came first"
    full = patch.object(Run, "set_status", side_effect=[None, NO_SPACE])
    with patch.object(Run, "record", side_effect=NO_SPACE), full, pytest.raises(SftError, match="metrics.jsonl"):
        train(small(tmp_path, run_name="nothing-fits"))


@pytest.mark.parametrize("nth", [1, 2])
def test_a_receipt_that_cannot_be_written_fails_no_run(tmp_path, undisturbed, nth, capfd):
    "at the beginning and at the end; samples and findings neither"
    save, times = Report.save, []
    def on_a_full_disk(self, path):
        times.append(path.name)
        if path.name in ("receipt.json", "guards.json") and times.count("receipt.json") >= nth: raise NO_SPACE
        return save(self, path)
    with patch.object(Report, "save", on_a_full_disk), patch.object(guards, "append_line", side_effect=NO_SPACE):
        run = train(small(tmp_path, run_name="receipt"))
    assert_same(run, undisturbed)
    said = capfd.readouterr().err
    for name in ("receipt.json", "samples.jsonl"): assert f"{name} cannot be written (No space left on device)" in said


def test_an_error_while_a_name_is_reserved_is_not_hidden_by_the_disk(tmp_path):
    unlink = Path.unlink
    def read_only(path, **how):
        if path.name == ".a.new": raise OSError(30, "Read-only file system")
        return unlink(path, **how)
    with patch.object(Path, "unlink", read_only), pytest.raises(SftError, match="the sentence"):
        with reserve_name(tmp_path, "a"): raise SftError("preflight", "the sentence")


@pytest.mark.parametrize("error, wanted", [
    (OSError(28, "No space left on device"), "a disk with room"), (OSError(27, "File too large"), "ulimit -f"),
    (PermissionError(13, "Permission denied"), "a folder that you can write to"),
    (OSError(30, "Read-only file system"), "a folder that you can write to"),
    (RuntimeError("I/O error: Permission denied (os error 13)"), "a folder that you can write to"),
    (RuntimeError("I/O error: No space left on device (os error 28)"), "a disk with room"),
    (RuntimeError("I/O error: File too large (os error 27)"), "ulimit -f"),
    (ValueError("other"), "nothing else in its place")])
def test_what_a_disk_lacks(tmp_path, error, wanted):
    assert wanted in str(cannot_write(tmp_path/"checkpoint-3", error, ""))
    if not isinstance(error, OSError): return
    of_torch = RuntimeError("unexpected pos 64 vs 0")   # as it closes the file
    of_torch.__context__ = error
    assert wanted in str(cannot_write(tmp_path/"checkpoint-3", of_torch, ""))


def test_scores_are_shown_although_the_disk_is_full(tmp_path, undisturbed, capfd):
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"scored"))
    with patch("sft_nb.evaluation.evaluate.keep_score", side_effect=NO_SPACE):
        assert evaluate(run, eval_samples=2, progress=False).tuned.n == 2
    assert "eval cannot be written (No space left on device). Fix: make room" in capfd.readouterr().err


def test_answers_are_kept_in_memory_although_the_disk_is_full(tmp_path, capfd):
    cache = GenerationCache(tmp_path/"answers.jsonl")
    with patch.object(Path, "open", side_effect=NO_SPACE):
        for key in "ab": cache.add(key, Generation("text", 1, True))
    assert [*cache.known] == ["a", "b"] and not (tmp_path/"answers.jsonl").exists()
    assert capfd.readouterr().err.count("answers.jsonl cannot be written (No space left") == 1   # not for each


def test_a_directory_that_is_renamed_while_it_is_trained(tmp_path, undisturbed):
    class Renames(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4: (tmp_path/"old").rename(tmp_path/"new")
    with pytest.raises(SftError, match="resume it under its new name"):
        train(small(tmp_path, run_name="old"), callbacks=[Renames()])
    assert not (tmp_path/"old").exists()
    assert_same(resume(Run(tmp_path/"new")), undisturbed)


# --- what was learned until an error

class Fails(TrainerCallback):
    "A callback of the user that fails at step 4"
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4: raise ValueError("no such metric")


def test_what_was_learned_until_an_error_is_kept(tmp_path, undisturbed, capfd):
    with pytest.raises(ValueError, match="no such metric"): train(small(tmp_path, run_name="kept"), callbacks=[Fails()])
    run = Run(tmp_path/"kept")
    assert (run.state, run.status.step) == ("failed", 4) and find_corruption(run.adapter) == ""
    assert "the weights of step 4 are kept in" in "".join(capfd.readouterr())
    assert weights(run) != (run.path/"checkpoints/checkpoint-3/adapter_model.safetensors").read_bytes()
    assert_same(resume(run), undisturbed)   # from checkpoint-3, as if nothing had happened


def test_no_step_no_weights(tmp_path):
    with patch.object(SupervisedTrainer, "training_step", side_effect=ValueError("broken")), pytest.raises(ValueError):
        train(small(tmp_path, run_name="none"))
    assert not (tmp_path/"none/adapter").exists()


def test_weights_that_are_not_finite_are_not_kept(tmp_path, capfd):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            next(p for p in model.parameters() if p.requires_grad).data.fill_(float("nan"))
            raise ValueError("broken")
    with pytest.raises(ValueError, match="broken"): train(small(tmp_path, run_name="nan"), callbacks=[Breaks()])
    assert not (tmp_path/"nan/adapter").exists()
    assert "the weights of step 1 are not kept: " in "".join(capfd.readouterr())


# --- damaged checkpoints

def cut(file:Path)->None: file.write_bytes(file.read_bytes()[:-100])


def flip(file:Path)->None:
    "One bit in the middle"
    b = bytearray(file.read_bytes())
    b[len(b) // 2] ^= 1
    file.write_bytes(bytes(b))


def assert_the_one_before_is_used(run:Run, undisturbed:Run, says:str, capfd)->None:
    assert_same(resume(run), undisturbed)
    err = capfd.readouterr().err
    assert "checkpoint-6 is not used" in err and says in err
    assert find_corruption(run.path/"checkpoints/checkpoint-6") == ""   # written again, whole


@pytest.mark.parametrize("file,spoil,says", [
    ("adapter_model.safetensors", cut, "bytes, not"),
    ("rng_state.pth", Path.unlink, "is missing"),
    ("checkpoint.json", Path.unlink, "never finished"),
])
def test_a_damaged_checkpoint_is_seen_and_the_one_before_it_is_used(tmp_path, undisturbed, capfd, file, spoil, says):
    run = killed_at_eight(tmp_path, undisturbed)
    spoil(run.path/"checkpoints/checkpoint-6"/file)
    assert_the_one_before_is_used(run, undisturbed, says, capfd)


def test_a_damaged_checkpoint_of_a_quantised_model(tmp_path, undisturbed_qlora, capfd):
    run = killed_at_eight(tmp_path, undisturbed_qlora)
    flip(run.path/"checkpoints/checkpoint-6/optimizer.pt")
    assert_the_one_before_is_used(run, undisturbed_qlora, "has changed since it was written", capfd)


def test_no_checkpoint_is_whole(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    for n in (3, 6): flip(run.path/f"checkpoints/checkpoint-{n}/optimizer.pt")
    says = "no complete checkpoint: checkpoint-6: optimizer.pt has changed since.*checkpoint-3: .*run_name=.damaged-2"
    with pytest.raises(ConfigError, match=says): resume(run)


def test_checkpoints_with_a_file_less_are_named_not_forgotten(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    for n in (3, 6): (run.path/f"checkpoints/checkpoint-{n}/optimizer.pt").unlink()
    missing = "checkpoint-6: optimizer.pt is missing; checkpoint-3: optimizer.pt is missing"
    with pytest.raises(ConfigError, match=f"no complete checkpoint: {missing}.*save_steps=1"): resume(run)
    with pytest.raises(ConfigError, match="there is no adapter in it.*one of checkpoint-3, checkpoint-6"): run.weights()


# --- what is kept

def held_out_losses(*losses:float):
    "Evaluations that find these"
    left, loop = iter(losses), SupervisedTrainer.evaluation_loop
    def told(self, *args, **kwargs):
        out = loop(self, *args, **kwargs)
        out.metrics["eval_loss"] = next(left)
        return out
    return patch.object(SupervisedTrainer, "evaluation_loop", told)


def test_what_is_kept(tmp_path):
    "The best checkpoint and the newest, whatever save_total_limit says; the best becomes the result"
    cfg = small(tmp_path, eval_steps=1, eval_samples=4, save_steps=100, save_total_limit=1, early_stopping_patience=3)
    with held_out_losses(1., .5, .7, .8, .9, .95): run = train(cfg)
    assert run.status.state == "finished" and run.status.step == 5 and "the best was at step 2" in run.status.reason
    assert "checkpoint-2" in names(run.checkpoints())
    assert weights(run) == (run.path/"checkpoints/checkpoint-2/adapter_model.safetensors").read_bytes()
    assert json.loads((run.adapter/"adapter_config.json").read_text())["inference_mode"] is False
    assert not (run.adapter/"optimizer.pt").exists() and find_corruption(run.adapter) == ""
    with pytest.raises(ConfigError, match="checkpoint-2"):
        evaluate(run, checkpoint="checkpoint-77", eval_samples=2, progress=False)


def test_a_failure_before_there_is_a_trainer_is_written_down(tmp_path, monkeypatch):
    def no_tracker(run, names, project): raise OSError("no room for a tracker")
    monkeypatch.setattr("sft_nb.training.arguments._tracker_environment", no_tracker)
    with pytest.raises(OSError, match="no room"): train(small(tmp_path, run_name="untracked"))
    run = Run(tmp_path/"untracked")
    assert run.status.state == "failed" and "no room for a tracker" in run.status.reason
