"What storing a base in 4 or 8 bits costs, and where that is not known"
import math

import pytest
import torch
from sft_nb.checks.core import CHECKS, run_check
from sft_nb.checks.model import check_bits
from sft_nb.checks.preflight import Evidence
from sft_nb.config.load import load_config
from sft_nb.model.hardware import DEVICES
from sft_nb.model.load import load_base
from sft_nb.planning import bits
from sft_nb.planning.bits import BitsCost, cost_of_bits, few_rows, in_16_bits
from sft_nb.planning.plan import Plan
from sft_nb.base.report import edit, SftError
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench

RUINED = BitsCost(4, (5.2, 5.4, 5.3), (8.1, 8.6, 8.3))


@pytest.fixture(scope="module")
def data(): return prepare(load_config("demo", max_samples=60, eval_samples=10))


@pytest.mark.parametrize("how", [dict(), dict(load_in_8bit=True), dict(bnb_4bit_quant_type="fp4")], ids=str)
def test_tiny_loses_nothing_in_any_format(data, how):
    cfg = load_config("demo", **how)
    rows = few_rows(data.train.tokens, data.train.lengths)
    cost = cost_of_bits(cfg, data.tokenizer, load_base(cfg, data.tokenizer), rows)
    assert len(rows) > 8 and not cost.matters and cost.bits == (8 if how.get("load_in_8bit") else 4)
    assert 0 < cost.error < .1 and len(cost.plain) == len(rows)


@pytest.mark.parametrize("how, matters", [(dict(), True), (dict(bnb_4bit_quant_type="fp4"), True),
                                          (dict(method="lora"), None)], ids=str)
def test_a_base_that_cannot_be_packed_is_found_out(data, tmp_path, how, matters):
    "Inputs 50 times smaller and their weights 50 times larger: the same in 32 bits, and one of them uses up each scale"
    cfg = load_config("demo")
    base = load_base(in_16_bits(cfg), data.tokenizer)
    with torch.no_grad():
        for layer in base.model.layers:
            layer.post_attention_layernorm.weight[::64] /= 50
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj): linear.weight[:, ::64] *= 50
    base.save_pretrained(tmp_path)
    data.tokenizer.save_pretrained(tmp_path)
    bench = Workbench(load_config(cfg, model=str(tmp_path), tokenizer="tiny", max_samples=60, eval_samples=10, **how))
    found, = run_check("model.bits", CHECKS["model.bits"], Evidence(bench))
    if matters is None: assert found.status == "ok"   # nothing is stored in 4 bits
    else: assert found.status == "warn" and found.fix == edit(method="lora") and "4 bits cost this base" in found.says


def test_rows_are_short_few_and_have_something_to_learn():
    def row(n, learned=True): return dict(input_ids=[5] * n, labels=[-100] * (n - 1) + [5 if learned else -100])
    tokens = [row(10 + k, learned=k % 2 == 0) for k in range(200)]
    found = few_rows(tokens, [len(r["input_ids"]) for r in tokens])
    assert 1 < len(found) <= 16 and all(labels[-1] == 5 and len(ids) <= 110 for ids, labels in found)
    assert few_rows([row(3, learned=False)] * 4, [3] * 4) == []
    (ids, labels), *_ = few_rows([row(9_000)] * 4, [9_000] * 4)   # the end of a long row, four of them at most
    assert len(ids) == len(labels) == 512 and labels[-1] == 5
    assert len(few_rows([row(9_000)] * 40, [9_000] * 40)) == 4


@pytest.mark.parametrize("why, how, free", [
    ("the weights are random", dict(init="random"), 2**40),
    ("are free", dict(), 2**20), ("the free memory of this machine cannot be read", dict(), None)])
def test_where_it_is_not_known_a_reason_is_given(data, monkeypatch, why, how, free):
    def free_bytes(kind):
        if free is None: raise SftError("plan", "the free memory of this machine cannot be read")
        return free
    monkeypatch.setattr(bits, "free_bytes", free_bytes)
    cfg = load_config("demo", **how)
    cost = cost_of_bits(cfg, data.tokenizer, None, few_rows(data.train.tokens, data.train.lengths))
    assert isinstance(cost, str) and why in cost
    found = check_bits(cost, None)
    assert found.status == "skipped" and why in found.says
    assert "no short row" in cost_of_bits(load_config("demo"), data.tokenizer, None, [])


def test_a_base_that_another_library_has_quantised_is_not_loaded_again(data, tmp_path):
    from transformers import AutoConfig
    from sft_nb.tokens.tokenizer import model_path
    shape = AutoConfig.from_pretrained(model_path("tiny"))
    shape.quantization_config = dict(quant_method="bitsandbytes", load_in_4bit=True)
    shape.save_pretrained(tmp_path)
    cfg = load_config("demo", model=str(tmp_path), tokenizer="tiny")
    assert "bitsandbytes has quantised it" in cost_of_bits(cfg, data.tokenizer, None, [([1, 2], [-100, 2])])


def test_lora_is_proposed_where_its_plan_fits():
    card = DEVICES["rtx4090-24gb"]
    fits, does_not = (Plan(card, {}, {}, dict(weights=n), 0, 1.) for n in (2**33, 2**35))
    assert check_bits(RUINED, fits).fix == edit(method="lora")
    assert "4 bits cost this base 3.0 nats a token on your rows (5.30 → 8.33)" in check_bits(RUINED, fits).says
    eight = BitsCost(8, RUINED.plain, RUINED.stored)
    assert check_bits(eight, fits).fix == edit(method="lora", load_in_8bit=False)
    found = check_bits(RUINED, does_not)
    assert found.status == "warn" and "32.00 GiB of 23.5 GiB" in found.says and "smaller one" in str(found.fix)
    assert "smaller one" in str(check_bits(RUINED, None).fix)
    assert check_bits(None, None) is None
    assert check_bits(BitsCost(4, (5.,) * 4, (math.nan,) * 4), None).status == "warn"
