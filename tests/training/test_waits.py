"""At most two device synchronisations per micro-batch, since each empties the GPU's queue."""
import collections
import traceback

import pytest
import torch
from conftest import ROOT
from learner import small
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from sft_nb.runs.directory import create_run
from sft_nb.training.train import build_trainer
from sft_nb.workbench import Workbench

WAIT = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::unique_consecutive",
        "aten::masked_select", "aten::_unique2", "aten::unique_dim"}
LIBRARIES = ("transformers", "trl", "accelerate", "peft")
OURS = (f"{ROOT/'sft_nb'}/", *(f"site-packages/{name}/" for name in LIBRARIES))


class Waits(TorchDispatchMode):
    "Counts, by place, the operators that hand a number of a GPU to the host; optimisers count their steps on the host"
    def __init__(self):
        super().__init__()
        self.on, self.found = False, collections.Counter()
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if self.on and op._schema.name in WAIT:
            stack = traceback.extract_stack()
            if any("torch/optim/" in f.filename for f in stack): return op(*args, **(kwargs or {}))   # on the host
            places = [f for f in stack if any(part in f.filename for part in OURS)]
            self.found[f"{places[-1].filename.rpartition('/')[2]}:{places[-1].name}"] += 1
        return op(*args, **(kwargs or {}))


class InStep(TrainerCallback):
    "Counts in the second step, from its first micro-batch to its end: not the making of batches, which is the host's"
    def __init__(self, waits): self.waits = waits
    def on_step_begin(self, args, state, control, **kwargs): self.waits.on = state.global_step == 1
    def on_step_end(self, args, state, control, **kwargs): self.waits.on = False


def waits_of_a_step(folder, micro_batches:int, **how)->collections.Counter:
    cfg = small(folder, max_steps=3, gradient_accumulation_steps=micro_batches, per_device_train_batch_size=4,
                logging_steps=100, save_steps=1000, eval_steps=None, sample_steps=None, **how)
    bench, waits = Workbench(cfg), Waits()
    trainer = build_trainer(bench, create_run(bench.cfg))
    trainer.add_callback(InStep(waits))
    with waits: trainer.train()
    return waits.found


@pytest.mark.parametrize("how", [dict(padding_free=True), dict(padding_free=False), dict(max_tokens_per_batch=600),
                                 dict(padding_free=True, gradient_checkpointing=True)],
                         ids=["flattened", "padded", "packed", "checkpointing"])
def test_at_most_two_waits_a_micro_batch(tmp_path, how):
    "Two (today one: transformers asks whether positions begin again), and one look a step at what is finite"
    found = waits_of_a_step(tmp_path, 3, **how)
    assert sum(found.values()) <= 2 * 3 + 1, found


def test_what_was_counted_is_added_up_over_processes_once_a_line(tmp_path, monkeypatch):
    "And not in each micro-batch, where every process would wait for the slowest"
    cfg = small(tmp_path, max_steps=4, gradient_accumulation_steps=3, per_device_train_batch_size=2, logging_steps=2,
                save_steps=1000, eval_steps=None, sample_steps=None)
    bench = Workbench(cfg)
    trainer = build_trainer(bench, create_run(bench.cfg))
    shapes, plain = [], trainer.accelerator.reduce
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda t, **how: shapes.append([*t.shape]) or plain(t, **how))
    trainer.train()
    assert shapes == [[3, 3], [3, 3], [6, 3]]   # lines at steps 1, 2 and 4; right, supervised, all tokens


def test_a_batch_is_copied_to_a_gpu_without_a_wait(tmp_path, monkeypatch):
    bench = Workbench(small(tmp_path))
    trainer = build_trainer(bench, create_run(bench.cfg))
    copies = []
    class Pinned(torch.Tensor):
        def to(self, *args, **kwargs):
            copies.append((str(args[0]) if args else str(kwargs["device"]), kwargs.get("non_blocking", False)))
            return self
    tensor = torch.ones(3).as_subclass(Pinned)
    trainer._prepare_inputs(dict(input_ids=tensor, document_lengths=(2, 1)))
    assert copies == [("cpu", False)]
    copies.clear()
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    trainer._prepare_inputs(dict(input_ids=tensor, document_lengths=(2, 1)))
    assert copies[0] == ("cuda", True)   # what follows finds it there


def test_a_wait_is_seen(tmp_path, monkeypatch):
    "The count itself can fail: without what the collator knows, each micro-batch asks for it"
    from sft_nb.training import trainer
    monkeypatch.setattr(trainer, "CollatorWithPositions", lambda collate: collate)
    without = waits_of_a_step(tmp_path, 3, padding_free=True)
    assert without["layout.py:supervised_positions"] == 3
