"""Settings arrive where they are meant to: in the trainer's arguments, in the optimiser, in its schedule."""
import pytest
import torch
from learner import small

from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.model.finetuning.optimizer import count_warmup_steps, make_optimizer, make_schedule
from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import create_run
from sft_nb.config.settings import settings_with
from sft_nb.training.arguments import check_settings, training_arguments
from sft_nb.training.train import build_trainer, train
from sft_nb.workbench import Workbench

OTHER = dict(
    per_device_train_batch_size=3, per_device_eval_batch_size=5, gradient_accumulation_steps=7, learning_rate=3e-5,
    num_train_epochs=4.5, max_steps=11, weight_decay=.02, max_grad_norm=.7, warmup_steps=.25, seed=77,
    optim="adafactor", lr_scheduler_type="linear", logging_steps=13, adam_beta1=.8, adam_beta2=.97, adam_epsilon=1e-6,
    router_aux_loss_coef=.03)


@pytest.mark.parametrize("name", settings_with("hf"))
def test_a_setting_of_the_trainer_reaches_it(tmp_path, name):
    if name not in OTHER: pytest.fail(f"which value shows that {name} arrives? Add it to OTHER")
    before = getattr(training_arguments(load_config(), tmp_path), name)
    after = getattr(training_arguments(load_config(**{name: OTHER[name]}), tmp_path), name)
    assert after == OTHER[name] != before


def test_the_optimiser_and_its_schedule_are_the_configured_ones(tmp_path):
    how = dict(optim="adamw_torch", adam_beta1=.8, adam_beta2=.97, adam_epsilon=1e-6, weight_decay=.02,
               learning_rate=3e-3, lr_scheduler_type="linear", warmup_steps=2, max_steps=6)
    cfg = small(tmp_path, **how)
    bench = Workbench(cfg)
    trainer = build_trainer(bench, create_run(bench.cfg))
    trainer.create_optimizer_and_scheduler(6)
    groups = trainer.optimizer.param_groups
    assert all((g["betas"], g["eps"], g["initial_lr"]) == ((.8, .97), 1e-6, 3e-3) for g in groups)
    assert {g["weight_decay"] for g in groups if g["params"]} <= {.02, 0} and groups[0]["weight_decay"] == .02
    assert isinstance(trainer.optimizer, torch.optim.AdamW)

    model = load_model(cfg, bench.data.tokenizer)   # as preflight takes its ten steps
    optimizer = make_optimizer(model, **cfg.values(make_optimizer))
    assert all((g["betas"], g["eps"], g["lr"], g["weight_decay"]) == ((.8, .97), 1e-6, 3e-3, 0)
               for g in optimizer.param_groups)
    schedule, rates = make_schedule(optimizer, "linear", 6, warmup=2), []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0, 1.5e-3, 3e-3, 2.25e-3, 1.5e-3, .75e-3])


def test_a_tracker_is_told_the_name_of_the_run(tmp_path):
    assert training_arguments(load_config(), tmp_path/"runs"/"a-1").run_name == "a-1"
    named = training_arguments(load_config(wandb_name="mine", wandb_project="ours"), tmp_path/"runs"/"a-1")
    assert (named.run_name, named.project) == ("mine", "ours")


@pytest.mark.parametrize("how, says, fix", [
    (dict(optim="galore_adamw", method="full"), "optim_target_modules is not set", "all-linear"),
    (dict(optim="galore_adamw", method="lora"), "method lora trains an adapter", "method='full'"),
    (dict(optim="galore_adamw_layerwise", method="full"), "within the backward pass", "optim='galore_adamw'"),
    (dict(optim="apollo_adamw", method="full", optim_target_modules=("mlp",)), "apollo-torch is not installed",
     "pip install apollo-torch"),
    (dict(optim="adamw_torch", optim_target_modules=("mlp",)), "does not project", "optim_target_modules=None"),
    (dict(optim="stable_adamw"), "torch-optimi is not installed", "pip install torch-optimi"),
    (dict(optim_args=("rank",)), "'rank' is not a pair", "rank=64")])
def test_an_optimiser_that_cannot_train_these_weights_is_refused(tmp_path, how, says, fix, monkeypatch):
    monkeypatch.setattr("sft_nb.training.arguments.is_installed", lambda name: False)
    with pytest.raises(ConfigError, match=says) as e: training_arguments(load_config(**how), tmp_path)
    assert fix in e.value.fix.says("python")


GALORE = """
import torch

class GaLoreProjector:
    "An object in the state: one for each matrix"

class GaLoreAdamW(torch.optim.AdamW):
    def __init__(self, params, **how):
        kept = ("params", "rank", "scale")
        super().__init__([{k: v for k, v in group.items() if k in kept} for group in params], **how)
    def step(self, closure=None):
        found = super().step(closure)
        for group in self.param_groups:
            for p in group["params"] if "rank" in group else (): self.state[p]["projector"] = GaLoreProjector()
        return found

GaLoreAdafactor = GaLoreAdamW8bit = GaLoreAdamW
"""


def test_galore_is_made_as_configured_and_its_state_is_read_again(tmp_path, monkeypatch):
    "With a stand-in for the package: no release of it is required"
    (tmp_path/"galore_torch.py").write_text(GALORE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.trainer_optimizer.is_galore_torch_available", lambda: True)
    monkeypatch.setattr("sft_nb.training.arguments.is_installed", lambda name: True)
    cfg = small(tmp_path, method="full", optim="galore_adamw", optim_args=("rank=8", "scale=0.5"),
                optim_target_modules=("mlp",), max_steps=2)
    run = train(cfg)
    assert run.status.state == "finished"
    made = make_optimizer(load_model(cfg, Workbench(cfg).tokenizer), **cfg.values(make_optimizer))
    of_mlp = [g for g in made.param_groups if "rank" in g]
    assert [(g["rank"], g["scale"]) for g in of_mlp] == [(8, .5)] and all(p.ndim == 2 for p in of_mlp[0]["params"])


def test_device_map_is_kept_for_evaluation(tmp_path, capsys):
    run = train(small(tmp_path, device_map="auto", max_steps=1))
    assert "device_map = 'auto' is kept for evaluation; training keeps a whole model on each" in capsys.readouterr().err
    assert run.config.device_map == "auto"


@pytest.mark.parametrize("settings", [dict(load_best_model_at_end=True), dict(early_stopping_patience=2),
                                      dict(lr_scheduler_type="reduce_lr_on_plateau")])
def test_the_fix_of_a_missing_loss_also_holds_rows_out(settings, tmp_path):
    def fix(**more):
        with pytest.raises(ConfigError, match="eval_steps is not set") as e:
            check_settings(load_config(train_file=("rows.jsonl",), **settings, **more))
        return e.value.fix.settings
    assert fix() == dict(eval_steps=100, eval_fraction=.05)
    assert fix(eval_fraction=.1) == fix(eval_file=("more.jsonl",)) == dict(eval_steps=100)


@pytest.mark.parametrize("warmup, steps, wanted", [
    (.03, 1, 0), (.03, 100, 3), (.99, 10, 9), (1, 1, 1), (5, 3, 5), (0, 9, 0)])
def test_a_share_of_warm_up_leaves_a_step(warmup, steps, wanted):
    assert count_warmup_steps(warmup, steps) == wanted
