"""Full fine-tuning of some parameters, on rows in their order: the others stay as they were, and it is resumed."""
import shutil
from dataclasses import replace

import pytest
from learner import curve, small
from safetensors.torch import load_file

from sft_nb.base.report import ConfigError
from sft_nb.training.arguments import check_settings
from sft_nb.training.train import resume, train


def test_only_the_named_parameters_learn_and_a_resumed_run_ends_with_the_same_bytes(tmp_path):
    cfg = small(tmp_path, method="full", unfrozen_parameters=("model.layers.1.", "model.norm"), shuffle=False,
                max_steps=4, save_steps=2, max_samples=16, gradient_checkpointing=True, preflight=True)
    whole = train(cfg)
    saved = [load_file(folder/"model.safetensors") for folder in (*whole.checkpoints(), whole.adapter)]
    first, last = saved[0], saved[-1]
    changed = {name for name in first if not first[name].equal(last[name])}
    assert changed == {name for name in first if name.startswith(("model.layers.1.", "model.norm"))}
    part = train(replace(cfg, run_name="part"))
    shutil.rmtree(part.checkpoints()[-1])
    shutil.rmtree(part.adapter)
    part.set_status("failed", reason="killed", step=2)
    resume(part.path)
    assert curve(part) == curve(whole)
    again = load_file(part.adapter/"model.safetensors")
    assert all(again[name].equal(last[name]) for name in last)


@pytest.mark.parametrize("settings, says", [
    (dict(method="lora", unfrozen_parameters="lm_head"), "method lora trains an adapter. Fix: "),
    (dict(method="lora", load_in_8bit=True), "load_in_8bit: method is lora"),
    (dict(method="full", load_in_8bit=True), "load_in_8bit: method is full"),
    (dict(group_by_length=True, shuffle=False), "group_by_length is set too")], ids=lambda x: str(x)[:20])
def test_what_does_not_go_together_is_refused(tmp_path, settings, says):
    with pytest.raises(ConfigError, match=says): check_settings(small(tmp_path, **settings))
