"""Faults: what ends a training is told, what was saved is kept, and what is continued ends where an undisturbed run ends."""
import json, os, resource, shutil, signal, struct
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import TrainerCallback

from sft_nb.checkpoint import damage, seal
from sft_nb.config import load_config
from sft_nb.data import prepare
from sft_nb.generate import Generation
from sft_nb.report import ConfigError, Report, SftError
from sft_nb.run import Run, create_run, environment
from sft_nb.train import TokenMeanTrainer, WholeTrainer, check_world, resume, train

module = import_module("sft_nb.train")


def small(folder, **how):
    "Ten steps on 64 rows"
    return load_config("demo", **dict(dict(runs_dir=str(folder), max_samples=64, max_steps=10, num_train_epochs=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1, save_steps=3, save_total_limit=9,
                                           eval_samples=0, preflight=False), **how))


def curve(run, *keys)->list: return [tuple(m[k] for k in ("step", "loss", "grad_norm", *keys)) for m in run.metrics() if "loss" in m]
def weights(run)->bytes: return (run.adapter/"adapter_model.safetensors").read_bytes()
def notes(run)->dict: return {f.check: f for f in Report.from_dict(json.loads((run.path/"guards.json").read_text())).findings} if (run.path/"guards.json").exists() else {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory): return train(small(tmp_path_factory.mktemp("whole")))


def same(run, whole):
    assert run.status["state"] == "finished" and curve(run) == curve(whole) and weights(run) == weights(whole)


@contextmanager
def at_step(n, act):
    "Call `act(trainer)` when optimiser step `n` begins"
    class At(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == n - 1: act()
    build = module.build_trainer
    def built(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(At())
        return trainer
    with patch.object(module, "build_trainer", built): yield


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


def test_a_disk_that_fills_up_inside_a_checkpoint(tmp_path, whole):
    run, save = tmp_path/"full", WholeTrainer._save_checkpoint
    def on_a_small_disk(self, *args, **kwargs):
        with disk_of(200_000 if self.state.global_step == 6 else 2**40): return save(self, *args, **kwargs)
    with patch.object(WholeTrainer, "_save_checkpoint", on_a_small_disk), pytest.raises(SftError, match=r"checkpoint-6: it could not be written .*MiB are free.*what was saved before is as it was.*--resume"): train(small(tmp_path, run_name="full"))
    assert [p.name for p in Run(run).checkpoints()] == ["checkpoint-3"] == [p.name for p in (run/"checkpoints").glob("checkpoint*")]
    assert damage(run/"checkpoints/checkpoint-3") == "" and Run(run).status["state"] == "failed" and "could not be written" in Run(run).status["reason"]
    same(resume(run), whole)


def test_a_disk_that_is_full_when_a_line_or_the_result_is_written(tmp_path, whole):
    with patch.object(Run, "record", side_effect=OSError(28, "No space left on device")), pytest.raises(SftError, match="metrics.jsonl: it cannot be written .No space left on device.*sft_nb train --resume"): train(small(tmp_path, run_name="line"))
    with patch.object(WholeTrainer, "save_model", side_effect=OSError(28, "No space left on device")), patch.object(WholeTrainer, "_save_checkpoint"), pytest.raises(SftError, match="adapter: it could not be written"): train(small(tmp_path, run_name="result"))
    assert not (tmp_path/"result/adapter").exists() and not (tmp_path/"result/adapter.aside").exists()
    full = patch.object(module.Run, "set_status", side_effect=[None, None, OSError(28, "No space left on device")])
    with patch.object(Run, "record", side_effect=OSError(28, "No space")), full, pytest.raises(SftError, match="metrics.jsonl"): train(small(tmp_path, run_name="nothing-fits"))


def test_half_a_line_of_metrics_is_no_line(tmp_path, whole):
    shutil.copytree(whole.path, tmp_path/"half")
    run = Run(tmp_path/"half")
    with (run.path/"metrics.jsonl").open("a") as f: f.write('{"step": 11, "lo')
    assert curve(run) == curve(whole)
    run.rewind(9)
    assert [m["step"] for m in run.metrics()] == [*range(1, 10)] and (run.path/"metrics.jsonl").read_text().endswith("}\n")


# --- damaged checkpoints

def stopped_at_six(folder, whole)->Run:
    "A run with checkpoints 3 and 6, which was killed behind the second"
    shutil.copytree(whole.path, folder/"damaged")
    run = Run(folder/"damaged")
    for n in (9, 10): shutil.rmtree(run.path/f"checkpoints/checkpoint-{n}")
    shutil.rmtree(run.adapter)
    run.set_status("running", step=8)
    return run


def cut(file): file.write_bytes(file.read_bytes()[:-100])
def flip(file):
    b = bytearray(file.read_bytes()); b[len(b) // 2] ^= 1
    file.write_bytes(bytes(b))


@pytest.mark.parametrize("file,spoil,says", [("adapter_model.safetensors", cut, "bytes, not"), ("optimizer.pt", flip, "has other bytes than were written"), ("rng_state.pth", Path.unlink, "is missing"), ("checkpoint.json", Path.unlink, "never finished")])
def test_a_damaged_checkpoint_is_seen_and_the_one_before_it_is_used(tmp_path, whole, capfd, file, spoil, says):
    run = stopped_at_six(tmp_path, whole)
    spoil(run.path/"checkpoints/checkpoint-6"/file)
    same(resume(run), whole)
    err = capfd.readouterr().err
    assert "checkpoint-6 is not used" in err and says in err
    assert damage(run.path/"checkpoints/checkpoint-6") == ""   # written again, whole


def test_no_checkpoint_is_whole(tmp_path, whole):
    run = stopped_at_six(tmp_path, whole)
    for n in (3, 6): flip(run.path/f"checkpoints/checkpoint-{n}/optimizer.pt")
    with pytest.raises(ConfigError, match="no whole checkpoint: checkpoint-6: optimizer.pt has other bytes.*checkpoint-3: .*--run-name damaged-2"): resume(run)


def test_checkpoints_with_a_file_less_are_named_not_forgotten(tmp_path, whole):
    run = stopped_at_six(tmp_path, whole)
    for n in (3, 6): (run.path/f"checkpoints/checkpoint-{n}/optimizer.pt").unlink()
    with pytest.raises(ConfigError, match="no whole checkpoint: checkpoint-6: optimizer.pt is missing; checkpoint-3: optimizer.pt is missing.*--save-steps 1"): resume(run)
    with pytest.raises(ConfigError, match="there is no adapter in it.*one of checkpoint-3, checkpoint-6"): run.weights()


@contextmanager
def nobody():
    "Not root, who may read everything"
    if os.geteuid() != 0: yield
    else:
        os.seteuid(65534)
        try: yield
        finally: os.seteuid(0)


def test_a_folder_that_may_not_be_read_or_written(tmp_path):
    closed = tmp_path/"closed"
    (closed/"checkpoint-1").mkdir(parents=True)
    (closed/"checkpoint-1/weights").write_bytes(b"w")
    seal(closed/"checkpoint-1")
    for p in (tmp_path, *tmp_path.parents[:3]): p.chmod(p.stat().st_mode | 0o055)
    (closed/"checkpoint-1").chmod(0)
    try:
        with nobody():
            assert "it cannot be read (Permission denied)" == damage(closed/"checkpoint-1")
            with pytest.raises(SftError, match="it cannot be written .Permission denied.*--runs-dir another/folder"): create_run(small(closed/"runs"))
    finally: (closed/"checkpoint-1").chmod(0o755)


def test_what_is_kept(tmp_path):
    "The best checkpoint and the newest, whatever save_total_limit says; the best becomes the result"
    losses = iter([1., .5, .7, .8, .9, .95])
    loop = TokenMeanTrainer.evaluation_loop
    def told(self, *args, **kwargs):
        out = loop(self, *args, **kwargs)
        out.metrics["eval_loss"] = next(losses)
        return out
    cfg = small(tmp_path, eval_steps=1, eval_samples=4, save_steps=100, save_total_limit=1, early_stopping_patience=3)
    with patch.object(TokenMeanTrainer, "evaluation_loop", told): run = train(cfg)
    assert run.status["state"] == "finished" and run.status["step"] == 5 and "the best was at step 2" in run.status["reason"]
    assert "checkpoint-2" in [p.name for p in run.checkpoints()]
    best = run.path/"checkpoints/checkpoint-2"
    assert weights(run) == (best/"adapter_model.safetensors").read_bytes() and json.loads((run.adapter/"adapter_config.json").read_text())["inference_mode"] is False
    assert not (run.adapter/"optimizer.pt").exists() and damage(run.adapter) == ""
    from sft_nb.evaluate import evaluate
    with pytest.raises(ConfigError, match="checkpoint-2"): evaluate(run, checkpoint="checkpoint-77", eval_samples=2, progress=False)


# --- wishes

def test_sigterm_at_step_nine(tmp_path, whole):
    with at_step(9, lambda: os.kill(os.getpid(), signal.SIGTERM)): run = train(small(tmp_path))
    assert (run.status["state"], run.status["reason"], run.status["step"]) == ("stopped", "SIGTERM", 9) and "--resume" in run.status["fix"]
    assert run.checkpoints()[-1].name == "checkpoint-9"
    same(resume(run), whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_twice_is_now(tmp_path, whole):
    with at_step(5, lambda: os.kill(os.getpid(), signal.SIGINT)): run = train(small(tmp_path))
    assert (run.status["reason"], run.status["step"]) == ("Ctrl-C", 5)
    def twice():
        for _ in range(2): os.kill(os.getpid(), signal.SIGINT)
    with at_step(5, twice), pytest.raises(KeyboardInterrupt): train(small(tmp_path, run_name="now"))
    run = Run(tmp_path/"now")
    assert (run.status["state"], run.status["step"], [p.name for p in run.checkpoints()]) == ("stopped", 4, ["checkpoint-3"])
    same(resume(run), whole)


def test_a_wish_at_the_last_step_is_granted_by_the_end(tmp_path, whole):
    with at_step(10, lambda: os.kill(os.getpid(), signal.SIGTERM)): same(train(small(tmp_path)), whole)


def test_two_processes_on_one_run(tmp_path, whole):
    run = stopped_at_six(tmp_path, whole)
    with run.locked():
        with pytest.raises(ConfigError, match="is training it now"): resume(run.path)
        with pytest.raises(ConfigError, match="is training it now"): module._run_training(run.config, Run(run.path), prepare(run.config))
    assert len(run.metrics()) == len(whole.metrics())   # nothing was touched


def test_the_log_goes_on_between_two_of_its_lines(tmp_path):
    "A line every four steps, checkpoints every three: what was summed up before the checkpoint is in the next line"
    cfg = small(tmp_path, logging_steps=4, max_steps=9)
    whole = train(cfg)
    part = train(replace(cfg, run_name="part"))
    for n in (6, 9): shutil.rmtree(part.path/f"checkpoints/checkpoint-{n}")
    part.set_status("running", step=5)
    resume(part)
    keys = ("step", "loss", "grad_norm", "num_tokens", "mean_token_accuracy")
    lines = lambda r: [[m[k] for k in keys] for m in r.metrics() if "loss" in m]
    assert lines(part) == lines(whole) and [l[0] for l in lines(part)] == [1, 4, 8]
    summary = [m for r in (whole, part) for m in r.metrics() if "train_runtime" in m]
    assert len(summary) == 2


# --- guards

def not_finite(at, what="loss"):
    "A loss that is NaN at optimiser step `at`, or finite with a gradient that is not"
    honest = TokenMeanTrainer.compute_loss
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return g * float("inf")
    def compute_loss(self, *args, **kwargs):
        loss = honest(self, *args, **kwargs)
        if not self.model.training or self.state.global_step + 1 != at: return loss
        return loss * float("nan") if what == "loss" else Infinite.apply(loss)
    return patch.object(TokenMeanTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_nan_at_step_seven(tmp_path, whole, what):
    with not_finite(7, what), pytest.raises(SftError, match=f"step 7: the {what} is not finite; no row alone does it; the step's rows are .*weights are as they were.*--on-nan skip"): train(small(tmp_path, run_name="nan"))
    run = Run(tmp_path/"nan")
    assert (run.status["state"], run.checkpoints()[-1].name) == ("failed", "checkpoint-6") and curve(run) == curve(whole)[:6]
    rows = [json.loads(l) for l in (run.path/"rows-step-7.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(r["where"].startswith("arithmetic train") and r["tokens"] > r["learned"] > 0 and r["text"] for r in rows)
    same(resume(run), whole)


def test_the_guilty_row_is_named(tmp_path):
    "One row of the data in whose presence the model's loss is NaN, also without gradient"
    data = prepare(small(tmp_path))
    bad = data.train.tokens[41]["input_ids"]
    honest = TokenMeanTrainer.compute_loss
    holds = lambda ids: any(list(bad) == ids[k:k + len(bad)] for k in range(len(ids)))
    guards = import_module("sft_nb.guards")
    plain = guards.row_loss
    def compute_loss(self, model, inputs, *args, **kwargs): return honest(self, model, inputs, *args, **kwargs) * (float("nan") if holds(inputs["input_ids"].flatten().tolist()) else 1)
    def row_loss(model, batch, **how):
        total, n = plain(model, batch, **how)
        return total * (float("nan") if holds(batch["input_ids"].flatten().tolist()) else 1), n
    with patch.object(TokenMeanTrainer, "compute_loss", compute_loss), patch.object(guards, "row_loss", row_loss), pytest.raises(SftError, match="alone it comes from row 41 .in rows-step-.*mend or drop"): train(small(tmp_path, run_name="row"))


def test_steps_that_are_left_out_move_nothing_and_ten_in_a_row_end_it(tmp_path):
    cfg = small(tmp_path, on_nan="skip", max_steps=14, save_steps=1, num_train_epochs=9)
    with not_finite(3): run = train(replace(cfg, run_name="one"))
    lines = [m for m in run.metrics() if "learning_rate" in m]
    assert [m.get("skipped_steps") for m in lines] == [None, None] + [1] * 12 and [m["step"] for m in lines if "loss" not in m] == [3]
    a, b = ((run.path/f"checkpoints/checkpoint-{n}/adapter_model.safetensors").read_bytes() for n in (8, 9))
    assert a != b and notes(run)["skipped_steps"].says.startswith("step 3: the loss is not finite")
    before, after = (torch.load(run.path/f"checkpoints/checkpoint-{n}/optimizer.pt") for n in (8, 9))
    assert before["state"][0]["step"] + 1 == after["state"][0]["step"] == 8   # nine steps, one of them left out
    honest = TokenMeanTrainer.compute_loss
    with patch.object(TokenMeanTrainer, "compute_loss", lambda self, *a, **k: honest(self, *a, **k) * float("nan")), pytest.raises(SftError, match="step 10: the loss is not finite"): train(replace(cfg, run_name="many"))


def out_of_memory(*, rows:int, step:int=1, evaluation:bool=False):
    "A device on which a pass over more than `rows` rows does not fit, from optimiser step `step` on"
    honest = TokenMeanTrainer.compute_loss
    def compute_loss(self, model, inputs, *args, **kwargs):
        n = len(inputs["input_ids"]) if "attention_mask" in inputs else int((inputs["position_ids"] == 0).sum())
        loss = honest(self, model, inputs, *args, **kwargs)   # the memory runs out late: in the backward pass of the next layer, so to say
        if n > rows and self.state.global_step + 1 >= step and self.model.training != evaluation: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return loss
    return patch.object(TokenMeanTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize("how", [{}, dict(padding_free=False)], ids=["end to end", "padded"])
def test_out_of_memory_at_step_five(tmp_path, how):
    cfg = small(tmp_path, lora_dropout=0., **how)
    whole = train(cfg)
    with out_of_memory(rows=1, step=5): run = train(replace(cfg, run_name="short"))
    for a, b in zip(curve(run, "num_tokens"), curve(whole, "num_tokens")): assert a == pytest.approx(b, rel=1e-4)
    says = notes(run)["out_of_memory"]
    assert says.says.startswith("step 5: memory ran out at a micro-batch of 4 rows") and "--batch-size 1 --gradient-accumulation-steps 8" in says.fix
    meters = json.loads((run.checkpoints()[-1]/"meters-0.json").read_text())
    assert meters["parts"] == 4 and run.status["state"] == "finished"


def test_memory_for_not_even_one_row(tmp_path):
    with out_of_memory(rows=0, step=2), pytest.raises(SftError, match="step 2: memory ran out at a micro-batch of 4 rows.*cannot be made in smaller parts.*--gradient-checkpointing"): train(small(tmp_path))
    with patch.object(TokenMeanTrainer, "compute_loss", side_effect=RuntimeError("mat1 and mat2")), pytest.raises(RuntimeError, match="mat1"): train(small(tmp_path))


def test_an_evaluation_that_does_not_fit_shrinks_itself_only(tmp_path):
    cfg = small(tmp_path, eval_steps=5, eval_samples=12, per_device_eval_batch_size=8)
    whole = train(cfg)
    with out_of_memory(rows=2, evaluation=True): run = train(replace(cfg, run_name="short"))
    held_out = lambda r: [m["eval_loss"] for m in r.metrics() if "eval_loss" in m]
    assert curve(run) == curve(whole) and weights(run) == weights(whole) and held_out(run) == pytest.approx(held_out(whole), rel=1e-5)
    assert "2 rows together from now on" in notes(run)["evaluation_out_of_memory"].says
    with out_of_memory(rows=0, evaluation=True), pytest.raises(torch.OutOfMemoryError): train(replace(cfg, run_name="none"))
    assert Run(tmp_path/"none").status["state"] == "failed"


def test_a_collapse_is_seen_and_can_end_the_run(tmp_path):
    answers = lambda text: patch("sft_nb.guards.continue_tokens", lambda model, tokenizer, prompts, **how: [Generation(text, 80, False)] * len(prompts))
    with answers("!" * 80): run = train(small(tmp_path, sample_steps=2))
    assert run.status["state"] == "finished" and notes(run)["collapse"].status == "fail" and "'!!!'" in notes(run)["collapse"].says and notes(run)["collapse"].says.startswith("step 2 to 10: ")
    with answers("!" * 80): run = train(small(tmp_path, sample_steps=2, on_collapse="stop"))
    assert (run.status["state"], run.status["step"]) == ("stopped", 4) and "'!!!'" in run.status["reason"] and run.checkpoints()[-1].name == "checkpoint-4"
    with answers("on and off it goes, and never the same"): run = train(small(tmp_path, sample_steps=2))
    assert notes(run)["never_ends"].status == "warn"
    looks = iter(["!" * 80, "fine"] * 9)
    with patch("sft_nb.guards.continue_tokens", lambda *a, **k: [Generation(t := next(looks), 3, t == "fine")] * 4): run = train(small(tmp_path, sample_steps=5))
    assert "collapse" not in notes(run)   # it was over at the last look


def test_a_look_that_runs_out_of_memory_is_the_last_one(tmp_path, whole):
    with patch("sft_nb.guards.continue_tokens", side_effect=torch.OutOfMemoryError("CUDA out of memory")) as looks: run = train(small(tmp_path, sample_steps=2))
    assert weights(run) == weights(whole) and looks.call_count == 1 and notes(run)["look_out_of_memory"].status == "warn"
    with patch("sft_nb.guards.continue_tokens", side_effect=ValueError("something else")), pytest.raises(ValueError): train(small(tmp_path, sample_steps=2))


def test_weights_that_do_not_move(tmp_path):
    run = train(small(tmp_path, learning_rate=0., max_steps=24, num_train_epochs=9, on_collapse="stop"))
    assert (run.status["state"], run.status["step"]) == ("stopped", 20) and notes(run)["nothing_moves"].status == "fail" and run.status["fix"].startswith("--learning-rate above 0")


def test_a_curve_that_stays_flat(tmp_path):
    run = train(small(tmp_path, learning_rate=1e-8, max_steps=51, num_train_epochs=20, save_steps=100))
    assert notes(run)["flat_loss"].says.startswith("step 50")


def test_the_guards_are_silent_in_a_good_run(trained):
    assert notes(trained) == {}
    receipt = json.loads((trained.path/"receipt.json").read_text())
    assert receipt["status"] == "ok" and receipt["figures"]["steps"] == 60 and receipt["figures"]["version of torch"] == environment()["packages"]["torch"]
    data = json.loads((trained.path/"data.json").read_text())
    assert receipt["figures"]["labels (fingerprint)"] == data["figures"]["train: fingerprint"]


def test_a_status_that_cannot_be_read_hides_no_other_run(tmp_path, whole):
    from sft_nb.run import runs
    for name in ("good", "bad"): shutil.copytree(whole.path, tmp_path/name)
    (tmp_path/"bad/status.json").write_text('{"state": "runn')
    table = runs(tmp_path).set_index("run")
    assert dict(table.state) == dict(good="finished", bad="failed") and table.reason["bad"] == "status.json cannot be read"


def test_a_look_changes_nothing(tmp_path, whole): assert weights(train(small(tmp_path, sample_steps=1))) == weights(whole)


# --- preflight and training

def test_a_refusal_writes_nothing_and_a_force_is_written_down(tmp_path):
    cfg = small(tmp_path/"runs", learning_rate=0., preflight=True, max_steps=1)
    with pytest.raises(SftError, match="preflight: .*learning"): train(cfg)
    assert not (tmp_path/"runs").exists()
    run = train(replace(cfg, force=True))
    said = json.loads((run.path/"preflight.json").read_text())
    assert said["status"] == "fail" and "in spite of learning" in said["figures"]["forced"]


def test_a_preflight_leaves_no_trace_in_the_training(tmp_path, whole):
    run = train(small(tmp_path, preflight=True))
    same(run, whole)
    assert json.loads((run.path/"preflight.json").read_text())["status"] != "fail"
    assert json.loads((whole.path/"preflight.json").read_text())["findings"][0]["status"] == "skipped"


# --- trackers and secrets

def records(data:bytes):
    "Records of a file in LevelDB's log format behind wandb's header of 7 bytes: blocks of 32 KiB, pieces with crc, length and kind"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7: at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4): yield whole   # a full record, or the last piece of one
        if kind in (1, 4): whole = b""


def lines_of_wandb(folder):
    "The history in an offline wandb file"
    from wandb.proto import wandb_internal_pb2
    found = []
    for data in records(next(folder.rglob("*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history": found.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return found


def test_trackers_have_the_lines_of_metrics_and_no_file_has_a_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb"), pytest.importorskip("tensorboard")
    for name in ("HF_TOKEN", "MY_API_KEY"): monkeypatch.setenv(name, "hf_very_secret_word")
    (tmp_path/".env").write_text("WANDB_API_KEY=" + "a1b2c3d4e5" * 4 + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline"), monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(small(tmp_path/"runs", report_to=("wandb", "tensorboard"), eval_steps=5, eval_samples=8))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(next((run.path/"tensorboard").rglob("events*")).parent))
    events.Reload()
    theirs = lines_of_wandb(run.path/"wandb")
    for mine, scalar, key in [("loss", "train/loss", "train/loss"), ("eval_loss", "eval/loss", "eval/loss"), ("learning_rate", "train/learning_rate", "train/learning_rate")]:
        ours = [(m["step"], m[mine]) for m in run.metrics() if mine in m]
        assert [(e.step, e.value) for e in events.Scalars(scalar)] == [(s, pytest.approx(v, rel=1e-6)) for s, v in ours]
        assert [(l["train/global_step"], l[key]) for l in theirs if key in l] == [(s, pytest.approx(v, rel=1e-6)) for s, v in ours]
    import wandb
    assert wandb.run is None and "WANDB_RUN_ID" not in os.environ and "TENSORBOARD_LOGGING_DIR" not in os.environ
    with patch.object(TokenMeanTrainer, "compute_loss", side_effect=RuntimeError("https://me:hf_very_secret_word@hub refused")), pytest.raises(RuntimeError): train(small(tmp_path/"runs", run_name="said"))
    assert Run(tmp_path/"runs/said").status["reason"] == "RuntimeError: https://me:<HF_TOKEN>@hub refused" or "<MY_API_KEY>" in Run(tmp_path/"runs/said").status["reason"]
    for file in (tmp_path/"runs").rglob("*"):
        if file.is_file():
            for secret in (b"hf_very_secret_word", b"a1b2c3d4e5" * 4): assert secret not in file.read_bytes(), file


# --- worlds

def test_processes_that_are_not_what_was_asked_for(tmp_path, monkeypatch):
    class Alone:
        class accelerator: num_processes = 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SftError, match="2 were asked for, 2 were started, and 1 train together"): check_world(Alone, load_config("demo", num_processes=2))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SftError, match="2 were asked for, 1 were started, and 1 train together.*--num-processes 1"): check_world(Alone, load_config("demo", num_processes=2))
    with pytest.raises(ConfigError, match="2 processes are asked for, and this is one.*launch"): train(small(tmp_path, num_processes=2))
