"""Out of memory in a step or an evaluation: smaller parts with the same loss, or an error that says what fits."""
import json
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from learner import curve, notes, small, values, weights

from sft_nb.base.report import SftError
from sft_nb.runs.directory import Run
from sft_nb.training.train import train
from sft_nb.training.trainer import SupervisedTrainer


def rows_in(inputs:dict)->int:
    "Rows of a batch, padded or flattened"
    if "attention_mask" in inputs: return len(inputs["input_ids"])
    return int((inputs["position_ids"] == 0).sum())


def out_of_memory(*, rows:int, step:int=1, evaluation:bool=False):
    "A device on which a pass over more than `rows` rows does not fit, from optimiser step `step` on"
    honest = SupervisedTrainer.compute_loss
    def compute_loss(self, model, inputs, *args, **kwargs):
        n = rows_in(inputs)
        loss = honest(self, model, inputs, *args, **kwargs)   # memory runs out late, as in a backward pass
        if n > rows and self.state.global_step + 1 >= step and self.model.training != evaluation:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return loss
    return patch.object(SupervisedTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize("how", [{}, dict(padding_free=False)], ids=["flattened", "padded"])
def test_out_of_memory_at_step_five(tmp_path, how):
    cfg = small(tmp_path, lora_dropout=0., max_steps=6, save_steps=6, max_new_tokens=4, **how)
    whole = train(cfg)
    with out_of_memory(rows=1, step=5): run = train(replace(cfg, run_name="short"))
    for a, b in zip(curve(run, "num_tokens"), curve(whole, "num_tokens")): assert a == pytest.approx(b, rel=1e-4)
    note = notes(run)["out_of_memory"]
    assert note.step == 5 and note.says.startswith("memory ran out at a micro-batch of 4 rows")
    assert "per_device_train_batch_size=1, gradient_accumulation_steps=8" in str(note.fix)
    meters = json.loads((run.checkpoints()[-1]/"meters-0.json").read_text())
    assert meters["parts"] == 4 and run.status.state == "finished"


def test_memory_for_not_even_one_row(tmp_path):
    says = ("step 2: memory ran out at a micro-batch of 4 rows.*cannot be split further"
            ".*gradient_checkpointing=True")
    with out_of_memory(rows=0, step=2), pytest.raises(SftError, match=says): train(small(tmp_path))


def test_another_error_is_not_about_memory(tmp_path):
    other = patch.object(SupervisedTrainer, "compute_loss", side_effect=RuntimeError("mat1 and mat2"))
    with other, pytest.raises(RuntimeError, match="mat1"): train(small(tmp_path))


def test_an_evaluation_that_does_not_fit_shrinks_itself_only(tmp_path):
    cfg = small(tmp_path, max_steps=4, eval_steps=2, save_steps=4, eval_samples=12, per_device_eval_batch_size=8,
                max_new_tokens=4)
    whole = train(cfg)
    with out_of_memory(rows=2, evaluation=True): run = train(replace(cfg, run_name="short"))
    assert curve(run) == curve(whole) and weights(run) == weights(whole)
    assert values(run, "eval_loss") == pytest.approx(values(whole, "eval_loss"), rel=1e-5)
    assert "2 rows together from now on" in notes(run)["evaluation_out_of_memory"].says
    none_fits = out_of_memory(rows=0, evaluation=True)
    with none_fits, pytest.raises(torch.OutOfMemoryError): train(replace(cfg, run_name="none"))
    assert Run(tmp_path/"none").status.state == "failed"
