"""Mixtures of experts train, are sampled, evaluated and merged."""
import json

import pytest
from learner import small
from shapes import folder

from sft_nb.checks.preflight import preflight
from sft_nb.model import trl_trainer
from sft_nb.report import Report
from sft_nb.results.evaluate import evaluate
from sft_nb.results.merge import merge
from sft_nb.training.train import train


def mixture(tmp_path, kind:str, **how):
    "Four steps of a small mixture with random weights, sampled and evaluated on the way"
    return small(tmp_path, model=folder(tmp_path, kind, num_hidden_layers=2), max_steps=4, sample_steps=2, eval_steps=2,
                 eval_samples=4, save_steps=4, **how)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_a_mixture_trains_is_sampled_evaluated_and_merged(tmp_path, kind, capfd):
    "TRL switches router logits on, and generation with a cache fails; peft keeps all experts in one 3-D parameter"
    run = train(mixture(tmp_path, kind, preflight=True, run_name="run", max_length=256))
    assert run.state == "finished" and [m["step"] for m in run.metrics() if "eval_loss" in m] == [2, 4]
    assert [json.loads(line)["step"] for line in (run.path/"samples.jsonl").open()] == [2, 4]
    left_out = "the load-balancing loss of the routers (router_aux_loss_coef 0.001) is not part of the loss"
    assert (left_out in "".join(capfd.readouterr())) == (kind == "qwen3_moe")   # the other has none
    checked = Report.load(run.path/"preflight.json")
    assert {f.check: f.status for f in checked.findings}["learning.answers"] == "ok"
    assert evaluate(run, max_new_tokens=8).tuned.n == 4
    adapter = json.loads((run.adapter/"adapter_config.json").read_text())
    assert "gate_up_proj" in adapter["target_parameters"]   # peft maps gate_proj and up_proj to all experts
    parity = Report.load(merge(run, dtype="float32", prompts=2)/"parity.json")
    assert parity.status == "ok" and parity.figures["effect_of_the_adapter"] > 0


def test_preflight_answers_with_the_model_as_the_trainer_holds_it(tmp_path, monkeypatch):
    "What breaks the first sample of a training is found before it"
    monkeypatch.setattr(trl_trainer, "withhold_router_logits", lambda model: None)   # as TRL leaves the model
    report = preflight(mixture(tmp_path, "qwen3_moe"))
    failed = {f.check: f.says for f in report.failed}
    assert "it could not be made: RuntimeError: The size of tensor" in failed["answers"]
