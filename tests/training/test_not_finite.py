"""A loss or gradient that is not finite: the step is not taken, its rows are named, and `on_nan` decides."""
import json
from unittest.mock import patch

import pytest
import torch
from learner import assert_same, curve, killed_at_eight, notes, small
from transformers import TrainerCallback

from sft_nb.base.report import edit, SftError
from sft_nb.cli import main
from sft_nb.runs.checkpoint import write_checksums
from sft_nb.runs.directory import Run
from sft_nb.tokens.prepare import prepare
from sft_nb.training import guards
from sft_nb.training.train import resume, train
from sft_nb.training.trainer import SupervisedTrainer

NAN = float("nan")


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g * float("inf")


def not_finite(at:int, what:str="loss"):
    "A loss that is NaN at optimiser step `at`, or finite with a gradient that is not"
    honest = SupervisedTrainer.compute_loss
    def compute_loss(self, *args, **kwargs):
        loss = honest(self, *args, **kwargs)
        if not self.model.training or self.state.global_step + 1 != at: return loss
        if what == "loss": return loss * NAN
        return InfiniteGradient.apply(loss)
    return patch.object(SupervisedTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_nan_at_step_seven(tmp_path, undisturbed, what):
    says = (f"step 7: the {what} is not finite; no single row reproduces it; the step's rows are "
            ".*weights are unchanged.*on_nan='skip'")
    with not_finite(7, what), pytest.raises(SftError, match=says): train(small(tmp_path, run_name="nan"))
    run = Run(tmp_path/"nan")
    assert (run.status.state, run.checkpoints()[-1].name) == ("failed", "checkpoint-6")
    assert curve(run) == curve(undisturbed)[:6]
    rows = [json.loads(line) for line in (run.path/"rows-step-7.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(r["where"].startswith("arithmetic train") and r["text"] for r in rows)
    assert all(r["tokens"] > r["supervised"] > 0 for r in rows)
    assert_same(resume(run), undisturbed)


def test_the_row_that_does_it_is_named(tmp_path):
    "One row of the data in whose presence the model's loss is NaN, also without gradient"
    bad = list(prepare(small(tmp_path)).train.tokens[41]["input_ids"])
    def factor(batch):
        ids = batch["input_ids"].flatten().tolist()
        return NAN if any(bad == ids[k:k + len(bad)] for k in range(len(ids))) else 1
    honest, plain = SupervisedTrainer.compute_loss, guards.row_loss
    def compute_loss(self, model, inputs, *args, **kwargs):
        return honest(self, model, inputs, *args, **kwargs) * factor(inputs)
    def row_loss(model, batch, **how):
        total, n = plain(model, batch, **how)
        return total * factor(batch), n
    says = "it comes from row 41 alone .in rows-step-.*correct or drop row 41"
    with (patch.object(SupervisedTrainer, "compute_loss", compute_loss), patch.object(guards, "row_loss", row_loss),
          pytest.raises(SftError, match=says)): train(small(tmp_path, run_name="row"))


def test_rows_that_are_removed_meanwhile_have_a_number(tmp_path):
    file = tmp_path/"sums.jsonl"
    file.write_text("".join(json.dumps(dict(question=f"{k} + 1?", answer=f"{k + 1}")) + "\n" for k in range(24)))
    cfg = small(tmp_path, run_name="a", task="chat", train_file=str(file), max_samples=None, on_nan="skip", max_steps=2)
    data = prepare(cfg)
    file.unlink()
    with not_finite(1): run = train(cfg, data)
    rows = [json.loads(line) for line in (run.path/"rows-step-1.jsonl").read_text().splitlines()]
    assert run.state == "finished" and len(rows) == 8
    assert all(r["where"] == f"row {r['row'] + 1} of the training rows" for r in rows)


def leaves_steps_out(folder, **how):
    return small(folder, on_nan="skip", max_steps=14, save_steps=1, num_train_epochs=9, save_total_limit=20, **how)


def test_a_step_that_is_left_out_moves_nothing(tmp_path):
    with not_finite(3): run = train(leaves_steps_out(tmp_path))
    lines = [m for m in run.metrics() if "learning_rate" in m]
    assert [m.get("skipped_steps") for m in lines] == [None, None] + [1] * 12
    assert [m["step"] for m in lines if "loss" not in m] == [3]
    note = notes(run)["skipped_steps"]
    assert note.step == 3 and note.says.startswith("the loss is not finite")
    def at(n, file): return run.path/f"checkpoints/checkpoint-{n}"/file
    def adapter(n): return at(n, "adapter_model.safetensors").read_bytes()
    assert adapter(2) == adapter(3) and adapter(8) != adapter(9)
    before, after = (torch.load(at(n, "optimizer.pt"))["state"][0]["step"] for n in (8, 9))
    assert before + 1 == after == 8   # nine steps, one of them left out


def test_ten_steps_in_a_row_end_it(tmp_path):
    honest = SupervisedTrainer.compute_loss
    def compute_loss(self, *args, **kwargs): return honest(self, *args, **kwargs) * NAN
    patched = patch.object(SupervisedTrainer, "compute_loss", compute_loss)
    with patched, pytest.raises(SftError, match="step 10: the loss is not finite"): train(leaves_steps_out(tmp_path))


def test_a_held_out_loss_that_is_nan_at_every_evaluation(tmp_path, monkeypatch):
    "it is said, with its row; early stopping does not say that no loss was lower"
    cfg = small(tmp_path, eval_samples=4, eval_steps=1, early_stopping_patience=2, save_steps=9)
    bad = list(prepare(cfg).eval.tokens[2]["input_ids"])
    def is_there(batch): return str(bad)[1:-1] in str(batch["input_ids"].flatten().tolist())
    honest, plain = SupervisedTrainer.compute_loss, guards.row_loss
    def compute_loss(self, model, inputs, *args, **kwargs):
        return honest(self, model, inputs, *args, **kwargs) * (NAN if is_there(inputs) else 1)
    def row_loss(model, batch, **how):
        total, n = plain(model, batch, **how)
        return total * (NAN if is_there(batch) else 1), n
    monkeypatch.setattr(SupervisedTrainer, "compute_loss", compute_loss)
    monkeypatch.setattr(guards, "row_loss", row_loss)
    run = train(cfg)
    said = notes(run)["held_out_loss"]
    assert said.status == "fail" and "nan at 3 of 3 evaluations; it comes from held-out row 2 alone" in said.says
    assert (run.status.state, run.status.reason) == ("finished", "the held-out loss was never finite")


class BreaksWeights(TrainerCallback):
    "The update of step `at` makes a trained weight NaN"
    def __init__(self, at:int): self.at = at
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.at: next(p for p in model.parameters() if p.requires_grad).data[0] = NAN


def test_weights_that_become_nan_are_never_saved(tmp_path):
    "at the last step, and late with steps that may be skipped: it fails, and blames no row"
    few = dict(max_steps=4, save_steps=2, eval_samples=4, eval_steps=4)
    for name, at, how in (("last", 4, {}), ("late", 3, dict(on_nan="skip"))):
        says = (f"step {at}: an earlier step has made the weights NaN or infinite, the first in .*lora_A.*; "
                "finite numbers, as in checkpoint-2. Fix: resume.*learning_rate=")
        with pytest.raises(SftError, match=says):
            train(small(tmp_path, run_name=name, **few | how), callbacks=[BreaksWeights(at)])
        run = Run(tmp_path/name)
        assert (run.status.state, [p.name for p in run.checkpoints()]) == ("failed", ["checkpoint-2"])
        assert not run.adapter.exists() and "row" not in run.status.reason
    note = notes(Run(tmp_path/"last"))["held_out_loss"]
    assert "the weights hold NaN or infinity, the first in " in note.says and "row" not in note.says
    assert str(note.fix) == str(edit(learning_rate=run.config.learning_rate / 2))


def test_the_best_checkpoint_is_kept_when_the_last_step_breaks_the_weights(tmp_path):
    how = dict(max_steps=4, save_steps=2, eval_samples=4, eval_steps=2, load_best_model_at_end=True)
    with pytest.raises(SftError, match="an earlier step has made the weights NaN"):
        train(small(tmp_path, run_name="best", **how), callbacks=[BreaksWeights(4)])
    result, best = (Run(tmp_path/"best").path/f for f in ("adapter", "checkpoints/checkpoint-2"))
    assert (result/"adapter_model.safetensors").read_bytes() == (best/"adapter_model.safetensors").read_bytes()


# --- the optimiser's state

class SetsState(TrainerCallback):
    "A part of the optimiser's state is `value` after step `at`"
    def __init__(self, at:int, part:str, value:float): self.at, self.part, self.value = at, part, value
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step != self.at: return
        for parameter in optimizer.state.values(): parameter[self.part].fill_(self.value)


@pytest.mark.parametrize("part, value", [("exp_avg", NAN), ("exp_avg_sq", float("inf"))])
def test_a_state_that_is_not_finite_is_not_sealed(tmp_path, undisturbed, part, value):
    says = (f"step 6: an earlier step has made the optimiser's state NaN or infinite, the first in {part} of .*lora_A.*"
            "; finite numbers, as in checkpoint-3. Fix: resume\\(.*nan.\\), or train.*learning_rate=")
    with pytest.raises(SftError, match=says):
        train(small(tmp_path, run_name="nan"), callbacks=[SetsState(6, part, value)])
    run = Run(tmp_path/"nan")
    assert [p.name for p in run.checkpoints()] == ["checkpoint-3"]
    assert_same(resume(run), undisturbed)


def test_a_checkpoint_with_such_a_state_names_the_one_before(tmp_path, undisturbed, capsys):
    "as an earlier version sealed it"
    run = killed_at_eight(tmp_path, undisturbed)
    newest = run.path/"checkpoints/checkpoint-6"
    saved = torch.load(newest/"optimizer.pt")
    saved["state"][0]["exp_avg"].fill_(NAN)
    torch.save(saved, newest/"optimizer.pt")
    write_checksums(newest)
    for _ in range(2):
        with pytest.raises(SftError, match="step 6: .*optimiser's state NaN.*as in checkpoint-3"): resume(run)
    assert run.status.fix.says("shell").startswith(f"sft_nb train --resume {run.path} --from checkpoint-3, or ")
    assert main(["train", "--resume", str(run.path), "--from", "checkpoint-4"]) == 2
    assert "there is no complete checkpoint-4 in it; one of checkpoint-3, checkpoint-6" in capsys.readouterr().err
    assert main(["train", "--config", "demo", "--from", "checkpoint-4"]) == 2
    assert "--from: it is given without --resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(run.path), "--from", "checkpoint-3"]) == 0
    assert "1 later checkpoint is removed" in capsys.readouterr().out
    assert_same(run, undisturbed)
    assert sorted(p.name for p in (run.path/"checkpoints").iterdir()) == [f"checkpoint-{n}" for n in (10, 3, 6, 9)]


def test_a_first_step_of_a_resume_that_is_not_finite_names_the_checkpoint_before(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    with not_finite(7), pytest.raises(SftError, match="step 7: the loss is not finite") as e: resume(run)
    assert str(e.value.fix).startswith(f'resume("{run.path}", checkpoint="checkpoint-3"), or ')
    with not_finite(9), pytest.raises(SftError) as e: resume(run)   # not what the checkpoint led to
    assert "checkpoint=" not in str(e.value.fix)
    assert_same(resume(run, checkpoint=3), undisturbed)


def test_weights_that_stop_moving_after_a_checkpoint(tmp_path):
    "compared with those of the last checkpoint: since the start they have moved"
    cfg = small(tmp_path, max_steps=46, save_steps=22, num_train_epochs=9, weight_decay=0.)
    run = train(cfg, callbacks=[SetsState(22, "exp_avg_sq", 1e38)])
    found = notes(run)["nothing_moves"]
    assert (found.step, found.status) == (44, "fail") and found.says.startswith("in the last 22 steps not one of ")
