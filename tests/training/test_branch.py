"""A branch goes on from a checkpoint as its parent did, or with what was changed, and says where it comes from."""
import json
import shutil
from dataclasses import replace

import pytest
from learner import assert_same, curve, names, values, weights

from sft_nb.cli import main
from sft_nb.panels.live import RunState
from sft_nb.panels.run import RunPanel
from sft_nb.report import ConfigError
from sft_nb.run.branch import Run, make_branch
from sft_nb.training.train import resume


@pytest.fixture(scope="module")
def parent(undisturbed, tmp_path_factory):
    "A copy of the undisturbed run, beside which branches have room"
    folder = tmp_path_factory.mktemp("branches")
    shutil.copytree(undisturbed.path, folder/"parent")
    run = Run(folder/"parent")
    run.keep(replace(run.config, runs_dir=str(folder), run_name="parent"))
    return run


@pytest.fixture(scope="module")
def lower(parent):
    "From step 6 on with a tenth of the learning rate and another schedule"
    rate = parent.config.learning_rate / 10
    return resume(make_branch(parent, 6, run_name="lower", learning_rate=rate, lr_scheduler_type="constant",
                              warmup_steps=0, weight_decay=.1))


def test_without_a_change_it_ends_as_its_parent(parent):
    run = resume(make_branch(parent, 6, run_name="same"))
    assert_same(run, parent)
    assert run.branched().changes == {}
    assert names(run.checkpoints()) == ["checkpoint-6", "checkpoint-9", "checkpoint-10"]
    assert parent.state == "finished" and len(parent.checkpoints()) == 4   # nothing of it has changed


def test_with_a_change_it_parts_from_there(parent, lower):
    assert lower.state == "finished" and lower.step == 10
    assert curve(lower)[:7] == curve(parent)[:7] and curve(lower)[8:] != curve(parent)[8:]   # step 7: the same weights
    assert weights(lower) != weights(parent)
    rate = lower.config.learning_rate
    assert values(lower, "learning_rate")[6:] == [rate] * 4 and rate == parent.config.learning_rate / 10
    said = json.loads((lower.path/"branch.json").read_text())
    assert (said["parent"], said["step"]) == (str(parent.path), 6)
    assert said["changes"]["learning_rate"] == [parent.config.learning_rate, rate] and len(said["changes"]) >= 3


def test_it_can_be_stopped_and_resumed_as_any_run(parent, lower):
    shutil.copytree(lower.path, parent.path.parent/"broken")
    run = Run(parent.path.parent/"broken")
    shutil.rmtree(run.path/"checkpoints/checkpoint-10")
    run.set_status("stopped", step=9)
    assert_same(resume(run), lower)


@pytest.mark.parametrize("changes, says", [
    (dict(lora_r=3), "lora_r is 3, it was .*, and the checkpoint was made with it"),
    (dict(gradient_accumulation_steps=1), "and the checkpoint was made with it"),
    (dict(seed=7), "seed is 7, it was .*, and the checkpoint was made with it"),
    (dict(max_samples=9), "and other rows would come next"),
    (dict(lr_scheduler_type="reduce_lr_on_plateau"), "lr_scheduler_type is reduce_lr_on_plateau"),
    (dict(max_steps=6), "it ends at step 6, and the checkpoint is of step 6"),
    (dict(learning_rat=1.), "learning_rat"),
    (dict(run_name="parent"), "exists already"),
])
def test_what_cannot_change_is_refused(parent, changes, says):
    before = sorted(p.name for p in parent.path.parent.iterdir())
    with pytest.raises(ConfigError, match=says): make_branch(parent, 6, **changes)
    assert sorted(p.name for p in parent.path.parent.iterdir()) == before


def test_a_checkpoint_that_is_not_there_or_not_whole(parent, tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint-5 in it.*checkpoint-6"): make_branch(parent, 5)
    shutil.copytree(parent.path, tmp_path/"parent")
    file = tmp_path/"parent/checkpoints/checkpoint-6/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="has other bytes than were written"): make_branch(Run(tmp_path/"parent"), 6)


def test_the_panel_draws_a_fork(parent, lower):
    state = RunState(lower)
    series = state.series("loss")
    assert {name: points[0][0] for name, points in series.items()} == {"lower loss, from step 6": 6, "parent loss": 1}
    assert "branches off parent at step 6: learning_rate" in state.html()
    assert [*RunState(parent).series("loss")] == ["loss"]


def test_a_press_branches(parent, monkeypatch):
    asked = []
    monkeypatch.setattr(Run, "branch", lambda self, step, **changes: asked.append((step, changes)) or self)
    panel = RunPanel(parent)
    assert panel.fork.options == (3, 6, 9, 10)
    panel.fork.value, panel.rate.value = 9, 1e-5
    panel.branch.click()
    assert asked == [(9, dict(learning_rate=1e-5))] and len(panel.state.runs) == 2


def test_the_command(parent, capsys):
    how = ["--step", "9", "--learning-rate", "1e-5", "--run-name", "by-command"]
    assert main(["branch", str(parent.path), *how]) == 0
    run = Run(parent.path.parent/"by-command")
    assert run.state == "finished" and run.branched().step == 9 and run.config.learning_rate == 1e-5
    assert "it branches off parent at step 9" in capsys.readouterr().out
    assert main(["branch", str(parent.path), "--lora-r", "3"]) == 2
    assert main(["checkpoint", str(parent.path)]) == 2
    assert "a run that is being trained" in capsys.readouterr().err


def test_settings_that_other_programs_call_otherwise_are_changed_too(parent, monkeypatch):
    asked = []
    def noted(run, step, **changes):
        asked.append(changes)
        raise ConfigError("branch", "seen", "", "")
    monkeypatch.setattr("sft_nb.run.branch.make_branch", noted)
    for line in (["--bf16", "True"], ["--learning-rate", "1e-4", "--save-strategy", "epoch"], ["--seed", "3"],
                 ["--output-dir", "there/it"]):
        assert main(["branch", str(parent.path), *line]) == 2
    assert asked == [dict(dtype="bfloat16"), dict(learning_rate=1e-4, save_steps="epoch"), dict(seed=3),
                     dict(runs_dir="there", run_name="it")]
