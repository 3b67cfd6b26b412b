"""Evaluations and checkpoints after each epoch, and speed, memory and perplexity in a log line."""
import math

import pytest
from learner import names, small, values

from sft_nb.training.train import train


@pytest.fixture(scope="module")
def by_epoch(tmp_path_factory):
    "Two epochs of eight steps"
    folder = tmp_path_factory.mktemp("epochs")
    how = dict(max_steps=-1, num_train_epochs=2, save_steps="epoch", eval_steps="epoch", eval_samples=8)
    return train(small(folder, **how))


def test_each_epoch_is_evaluated_and_saved(by_epoch):
    assert names(by_epoch.checkpoints()) == ["checkpoint-8", "checkpoint-16"]
    assert [m["step"] for m in by_epoch.metrics() if "eval_loss" in m] == [8, 16]


def test_perplexity_stands_beside_the_loss(by_epoch):
    assert values(by_epoch, "eval_perplexity") == [math.exp(loss) for loss in values(by_epoch, "eval_loss")]


def test_each_step_says_its_pace_and_the_memory(by_epoch):
    steps = len([m for m in by_epoch.metrics() if "loss" in m])
    for figure in ("tokens_per_second", "peak_memory_gib"):
        found = values(by_epoch, figure)
        assert len(found) == steps and min(found) > 0
