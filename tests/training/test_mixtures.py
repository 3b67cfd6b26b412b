"""Mixtures of experts train, are sampled, evaluated and merged."""
import json
import re
from unittest.mock import patch

import pytest
import torch
from learner import small
from shapes import folder

from sft_nb.checks.preflight import preflight
from sft_nb.model.finetuning import trl_trainer
from sft_nb.base.report import ConfigError, Report, SftError
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.proof import merge as merging
from sft_nb.proof.merge import merge
from sft_nb.proof.prove import prove
from sft_nb.runs.directory import create_run
from sft_nb.training.train import build_trainer, train
from sft_nb.workbench import Workbench


def mixture(tmp_path, kind:str, own:dict|None=None, **how):
    "Four steps of a small mixture with random weights, sampled and evaluated on the way; `own`: for its config"
    sizes = dict(per_device_train_batch_size=2, max_new_tokens=4, sample_steps=2, eval_steps=2)
    return small(tmp_path, model=folder(tmp_path, kind, num_hidden_layers=2, **own or {}), max_steps=4,
                 eval_samples=4, save_steps=4, **sizes | how)


@pytest.mark.parametrize("kind, method", [
    ("glm4_moe", "lora"), ("qwen3_moe", "qlora"), pytest.param("qwen3_moe", "lora", marks=pytest.mark.soak)])
def test_a_mixture_trains_is_sampled_evaluated_and_merged(tmp_path, kind, method, capfd):
    "TRL switches router logits on, and generation with a cache fails; peft keeps all experts in one 3-D parameter"
    own = dict(output_router_logits=True) if kind == "qwen3_moe" else {}
    run = train(mixture(tmp_path, kind, own=own, preflight=True, run_name="run", max_length=256, method=method))
    assert run.state == "finished" and [m["step"] for m in run.metrics() if "eval_loss" in m] == [2, 4]
    assert [json.loads(line)["step"] for line in (run.path/"samples.jsonl").open()] == [2, 4]
    said, has_loss = "".join(capfd.readouterr()), kind == "qwen3_moe"   # the other has a bias that does the same
    assert ("the loss of a step has 0.001 of the routers' load-balancing loss" in said) == has_loss
    assert all(("aux_loss" in m) == has_loss for m in run.metrics() if "loss" in m)
    reach = re.search(r"LoRA reaches 9\d\.\d% of the layer weights; routers, embeddings and head are frozen", said)[0]
    checked = {f.check: f for f in Report.load(run.path/"preflight.json").findings}
    assert checked["learning.answers"].status == "ok" and checked["model.reach"].says == reach
    assert checked.get("model.packed", checked["model.reach"]).status == "ok"
    assert json.loads((run.path/"plan.json").read_text())["reach"] == reach
    assert evaluate(run).tuned.n == 4
    adapter = json.loads((run.adapter/"adapter_config.json").read_text())
    assert {"experts.down_proj", "experts.gate_up_proj"} <= {*adapter["target_parameters"]}
    merged = merge(run, dtype="float32", prompts=2)
    parity = Report.load(merged/"parity.json")
    assert parity.status == "ok" and parity.figures["effect_of_the_adapter"] > 0
    if method == "qlora": assert prove(run, folder=merged, prompts=2, max_new_tokens=4).same
    check_merges_with_a_fault_in_one_expert(run)


def test_a_trainer_leaves_the_model_as_it_was(tmp_path):
    "TRL asks for router logits, with which generation fails, and has adapters of a quantised base in 16 bits"
    bench = Workbench(mixture(tmp_path, "qwen3_moe", method="qlora", dtype="bfloat16"))
    trainer = build_trainer(bench, create_run(bench.cfg))
    assert trainer.aux_loss_enabled and not bench.model.config.output_router_logits
    assert {p.dtype for p in bench.model.parameters() if p.requires_grad} == {torch.float32}


EXPERTS = "model.layers.1.mlp.experts.down_proj"


def check_merges_with_a_fault_in_one_expert(run):
    "No prompt may be routed to it, so that logits need not show it"
    bench = Workbench(run.config, is_resolved=True)
    before = merging.dequantise(bench.base(), torch.float32).get_parameter(EXPERTS)[0].data.float()
    merged_model = merging.merged_model
    def planted(fault):
        def with_fault(bench, path, dtype):
            merged = merged_model(bench, path, dtype)
            weight = merged.get_parameter(EXPERTS).data
            weight[0] = fault(weight[0].float()).to(dtype)
            return merged
        return with_fault
    for fault in (lambda w: w.t().reshape(w.shape), lambda w: before):
        with patch.object(merging, "merged_model", planted(fault)), pytest.raises(SftError) as e:
            merge(run, out=run.path/"faulty", prompts=1)
        assert f"weights differ from the run's: {EXPERTS} differs by" in e.value.found
        assert not (run.path/"faulty").exists()


def test_preflight_answers_with_the_model_as_the_trainer_holds_it(tmp_path, monkeypatch):
    "What breaks the first sample of a training is found before it"
    monkeypatch.setattr(trl_trainer, "withhold_router_logits", lambda model: None)   # as TRL leaves the model
    report = preflight(mixture(tmp_path, "qwen3_moe"))
    failed = {f.check: f.says for f in report.failed}
    assert "it could not be created: RuntimeError: The size of tensor" in failed["answers"]


def test_the_routers_loss_is_added_as_trl_adds_it(tmp_path):
    "Weight 0 leaves it out; with a large one, the loss of the first step is larger by just that"
    def first(coefficient):
        run = train(mixture(tmp_path, "qwen3_moe", router_aux_loss_coef=coefficient, run_name=f"run{coefficient}"))
        return next(m for m in run.metrics() if "loss" in m)
    without, with_it = first(0.), first(.5)
    assert "aux_loss" not in without
    assert with_it["loss"] == pytest.approx(without["loss"] + .5 * with_it["aux_loss"], rel=1e-4)


@pytest.mark.parametrize("switch, setting, has_loss", [(False, None, False), (True, None, True), (False, .9, True),
                                                       (True, 0., False)])
def test_the_models_own_switch_decides_and_the_setting_overrides(tmp_path, switch, setting, has_loss, capfd):
    "gpt-oss is published with a weight of 0.9 and output_router_logits false; TRL turns it on"
    own = dict(output_router_logits=switch, router_aux_loss_coef=.9)
    run = train(mixture(tmp_path, "qwen3_moe", own, router_aux_loss_coef=setting, eval_steps=None, sample_steps=None))
    assert all(("aux_loss" in m) == has_loss for m in run.metrics() if "loss" in m)
    said = "".join(capfd.readouterr())
    why = dict.fromkeys([False, True], "router_aux_loss_coef is set") if setting is not None else {
        True: "from the model's config", False: "output_router_logits is false in the model's config; "
                                                "router_aux_loss_coef=0.9 would add it"}
    assert f"of the routers' load-balancing loss ({why[has_loss]})" in said


def test_a_large_load_balancing_loss_is_a_warning(tmp_path):
    "As in gpt-oss with TRL: 1.8 of 8.8"
    def found(**more):
        report = preflight(mixture(tmp_path, "qwen3_moe", dict(router_aux_loss_coef=.9), **more))
        return {f.check: f for f in report.findings}["step.balance"]
    assert found().says == "the load-balancing loss of the experts is a small part of the loss"   # there is none
    large = found(router_aux_loss_coef=.9)
    assert large.status == "warn" and "which is more than a tenth of it" in large.says
    assert found(router_aux_loss_coef=.001).status == "ok"


def test_a_dense_model_has_no_such_loss(tmp_path):
    with pytest.raises(ConfigError, match="qwen3 has no load-balancing loss.*router_aux_loss_coef=None"):
        train(small(tmp_path, router_aux_loss_coef=.1, max_steps=1))
