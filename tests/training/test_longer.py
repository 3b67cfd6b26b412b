"""Extend a finished run, and train an adapter further on other rows."""
import json
import shutil

import pytest
import torch
from learner import names, small, values

from sft_nb.base.report import ConfigError
from sft_nb.extras.earlier_adapter import find_earlier_adapter
from sft_nb.model.finetuning.optimizer import follow_schedule, make_schedule
from sft_nb.runs.directory import create_run, Run
from sft_nb.runs.locate import Target
from sft_nb.training.train import resume, train
from sft_nb.workbench import Workbench


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    "One epoch of four steps"
    how = dict(max_samples=32, max_steps=-1, num_train_epochs=1)
    return train(small(tmp_path_factory.mktemp("first"), run_name="first", **how))


def test_a_finished_run_goes_on_for_more_epochs(first, tmp_path):
    shutil.copytree(first.path, tmp_path/"longer")
    run = resume(tmp_path/"longer", num_train_epochs=2)
    assert run.state == "finished" and run.step == 8 and names(run.checkpoints())[-1] == "checkpoint-8"
    rates = values(run, "learning_rate")
    assert rates[4] > rates[3]   # the longer schedule is higher at that step
    with pytest.raises(ConfigError, match="num_train_epochs is 2, and it was trained with 2"):
        resume(run, num_train_epochs=2)


def test_the_first_step_after_a_resume_has_the_rate_of_the_new_schedule():
    "A checkpoint's optimiser holds the rate that the old one ended with: 0, at which nothing is learned"
    def made(steps):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
        return optimizer, make_schedule(optimizer, "linear", steps)
    ended, schedule = made(10)
    for _ in range(10):
        ended.step()
        schedule.step()
    for how, rate in ({}, 5e-4), (dict(learning_rate=4e-3), 2e-3):
        optimizer, longer = made(20)
        optimizer.load_state_dict(ended.state_dict())
        longer.load_state_dict(schedule.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0
        follow_schedule(longer, **how)
        assert optimizer.param_groups[0]["lr"] == longer.get_last_lr()[0] == pytest.approx(rate)
        optimizer.step()
        longer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(.9 * rate)


def test_an_unfinished_run_is_no_longer_one(first, tmp_path):
    shutil.copytree(first.path, tmp_path/"stopped")
    Run(tmp_path/"stopped").set_status("stopped")
    with pytest.raises(ConfigError, match="since only those can be extended"): resume(tmp_path/"stopped", max_steps=9)


def test_an_adapter_goes_on_with_its_own_weights(first, tmp_path):
    cfg = small(tmp_path, adapter_name_or_path=str(first.path), max_samples=16)
    second = Target("second", "adapter", cfg, None, create_run(cfg))
    assert second.base_in_words == (f"the base is {cfg.model} without {first.path}, the start; against that: "
                                    f"sft_nb compare {first.path} {second.run.path}")
    mine, theirs = Workbench(cfg), Workbench(first.config, is_resolved=True)
    begun, trained = mine.model.state_dict(), theirs.trained(first.adapter).state_dict()
    learned = [name for name in begun if "lora_B" in name]
    assert learned and all(torch.equal(begun[name], trained[name]) for name in learned)
    assert any(begun[name].any() for name in learned)
    assert small(tmp_path, adapter=str(first.path)).adapter_name_or_path == str(first.path)


def test_what_ended_a_run_is_what_must_grow(tmp_path):
    "Steps end it, whatever its epochs: more epochs alone change nothing"
    run = train(small(tmp_path, max_steps=2, num_train_epochs=3))
    with pytest.raises(ConfigError, match="max_steps is 2, and it was trained with 2. Fix: max_steps=4"):
        resume(run, num_train_epochs=9)
    assert resume(run, num_train_epochs=9, max_steps=4).step == 4


def test_an_adapter_of_another_base_is_refused(first, tmp_path):
    adapter = shutil.copytree(first.path/"adapter", tmp_path/"of-another")
    saved = json.loads((adapter/"adapter_config.json").read_text())
    (adapter/"adapter_config.json").write_text(json.dumps(saved | dict(base_model_name_or_path="Qwen/Qwen3-0.6B")))
    with pytest.raises(ConfigError, match="it belongs to Qwen/Qwen3-0.6B, not to .*learner"):
        find_earlier_adapter(small(tmp_path, adapter_name_or_path=str(adapter)))
