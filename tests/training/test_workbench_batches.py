"""The batches that the training loop hands to the model are `workbench.batches[k]`, laid as `workbench.batch(k)` lays
them: in both epochs, and where the last step of an epoch has fewer of them."""
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
from learner import small

from sft_nb.training.train import train
from sft_nb.training.trainer import SupervisedTrainer
from sft_nb.workbench import Workbench


@dataclass
class Handed:
    "What the training loop was given"
    steps:list[list[list[int]]]=field(default_factory=list)   # of each step, the rows of each micro-batch
    rows:list[list[int]]=field(default_factory=list)          # of each forward pass
    inputs:list[dict]=field(default_factory=list)             # of each forward pass, the model's own


def trained_on(cfg)->tuple[Handed,Workbench]:
    "Train, and write down every batch; with a workbench of the run's own config"
    handed, loss, samples = Handed(), SupervisedTrainer.compute_loss, SupervisedTrainer.get_batch_samples
    def compute_loss(self, model, inputs, *args, **kwargs):
        handed.rows.append(self.step.rows[self.step.micro_batch])
        handed.inputs.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return loss(self, model, inputs, *args, **kwargs)
    def get_batch_samples(self, *args, **kwargs):
        found = samples(self, *args, **kwargs)
        handed.steps.append(self.step.rows)
        return found
    with (patch.object(SupervisedTrainer, "compute_loss", compute_loss),
          patch.object(SupervisedTrainer, "get_batch_samples", get_batch_samples)): run = train(cfg)
    assert run.status.state == "finished"
    return handed, Workbench(run.config, is_resolved=True)


LAYOUTS = dict(padded=dict(padding_free=False), flattened=dict(padding_free=True),
               packed=dict(max_tokens_per_batch=100), grouped=dict(padding_free=False, group_by_length=True))


@pytest.fixture(scope="module", params=LAYOUTS)
def trained_and_bench(request, tmp_path_factory):
    "22 rows in micro-batches of 4 are 6 an epoch: a step of 4 of them, and one of 2"
    how = dict(max_samples=22, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=4)
    return trained_on(small(tmp_path_factory.mktemp(request.param), **how | LAYOUTS[request.param]))


def test_the_model_is_given_the_batches_of_the_workbench(trained_and_bench):
    handed, bench = trained_and_bench
    each = len(bench.batches)
    assert each % 4 and len(handed.steps) == bench.batches.steps(4) and len(handed.rows) == 2 * each
    assert handed.rows == [bench.batches[k] for k in range(2 * each)]
    for step, rows in enumerate(handed.steps, 1):
        assert rows == [bench.batches[k] for k in bench.batches.micro_batches(step, 4)], step


def test_the_tensors_are_those_of_the_workbench(trained_and_bench):
    "Tokens, labels, positions or mask, of a workbench that has loaded no model"
    handed, bench = trained_and_bench
    assert bench.layout.flat == ("position_ids" in handed.inputs[0]) and "model" not in vars(bench)
    for k, inputs in enumerate(handed.inputs):
        batch = bench.batch(k)
        told = inputs.pop("supervised_at")   # of the trainer alone, so that no GPU is asked for it
        assert torch.equal(told, (batch["labels"][:, 1:].flatten() != -100).nonzero()[:, 0])
        assert inputs.keys() == {name for name, v in batch.items() if isinstance(v, torch.Tensor)}
        assert all(torch.equal(inputs[name], batch[name]) for name in inputs), k
