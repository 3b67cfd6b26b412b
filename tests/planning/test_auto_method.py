"`method=\"auto\"`, the default: LoRA in 16 bits where it fits with room, QLoRA where it does not"
import json
from dataclasses import replace

import pytest
from sft_nb.config.load import load_config
from sft_nb.model import hardware, load
from sft_nb.model.adapter import method_of_earlier
from sft_nb.model.hardware import DEVICES
from sft_nb.planning.plan import plan
from sft_nb.workbench import resolve
from sft_nb.planning.search import FREE_BESIDE_16_BITS
from sft_nb.base.report import ConfigError, SftError
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import model_path
from transformers import AutoConfig

SHAPE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=8,
             num_key_value_heads=8,
             vocab_size=2000)
CARD = DEVICES["t4-16gb"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    AutoConfig.for_model("qwen3", **SHAPE).save_pretrained(folder)
    return dict(model=str(folder), tokenizer="tiny", init="random")


def planned(model, gib, **how):
    return plan(load_config(**model | how), device=replace(CARD, gib=gib), lengths=[40] * 16)


def test_sixteen_bits_where_they_fit_with_room_and_four_where_not(model):
    "The memory at which 16 bits are left is the plan's own total and a tenth of the device"
    lora = planned(model, 16.)
    assert lora.settings["method"] == "lora" and "which leaves room" in lora.reasons["method"]
    least = planned(model, 16., method="lora", gradient_checkpointing=True, recompute_parts=False).total / 2**30
    just, short = least / (1 - FREE_BESIDE_16_BITS) + .2, least / (1 - FREE_BESIDE_16_BITS) - .2
    assert planned(model, just).settings["method"] == "lora"
    qlora = planned(model, short)
    assert qlora.settings["method"] == "qlora" and qlora.fits
    assert "it would take" in qlora.reasons["method"] and "10% stay free" in qlora.reasons["method"]
    assert planned(model, .2).reasons["method"] == "auto: takes the least"


def test_a_larger_batch_is_no_reason_for_four_bits(model):
    made = planned(model, 4., max_tokens_per_batch="auto", effective_batch_size=64, max_length=1024)
    assert made.settings["method"] == "lora" and made.fits


@pytest.mark.parametrize("how, method, why", [
    (dict(load_in_8bit=True), "qlora", "load_in_8bit is set"),
    (dict(init_lora_weights="pissa"), "lora", "decomposes the base"),
    (dict(fsdp=True, num_processes=2), "lora", "cannot be sharded"),
    (dict(deepspeed="zero3", num_processes=2), "lora", "cannot be sharded"),
    (dict(method="full"), "full", "as configured"), (dict(method="qlora"), "qlora", "as configured")])
def test_what_other_settings_rule_out(model, how, method, why):
    made = planned(model, 16., **how)
    assert made.settings["method"] == method and why in made.reasons["method"]


@pytest.mark.parametrize("by, method", [
    ("gptq", "lora"), ("fp8", "lora"), ("mxfp4", "lora"), ("bitsandbytes", "qlora")])
def test_a_base_that_is_quantised_already_stays_as_it_is(tmp_path, by, method):
    shape = AutoConfig.from_pretrained(model_path("tiny"))
    shape.quantization_config = dict(quant_method=by, load_in_4bit=True)
    shape.save_pretrained(tmp_path)
    made = planned(dict(model=str(tmp_path), tokenizer="tiny"), 16.)
    assert made.settings["method"] == method and by in made.reasons["method"]
    if method == "qlora": return
    with pytest.raises(ConfigError, match=f"stored quantised by {by}") as e:
        planned(dict(model=str(tmp_path), tokenizer="tiny"), 16., method="qlora")
    assert str(e.value.fix) == "method='lora'"


def test_without_bitsandbytes_there_are_sixteen_bits(model, monkeypatch):
    monkeypatch.setattr(load, "is_installed", lambda package: False)
    assert planned(model, .2).reasons["method"] == "auto: bitsandbytes is not installed"
    with pytest.raises(ConfigError, match="bitsandbytes is not installed"): planned(model, 16., method="qlora")


def test_where_memory_is_not_known_four_bits_take_the_least(monkeypatch):
    def fail(*args): raise OSError("there is no /proc/meminfo")
    monkeypatch.setattr(hardware.psutil, "virtual_memory", fail)
    monkeypatch.setattr(hardware.os, "sysconf", fail)
    cfg = load_config(device="cpu", max_samples=20, eval_samples=4, task="arithmetic")
    data = prepare(cfg)
    with pytest.raises(SftError, match="the free memory of this machine cannot be read"): plan(cfg, data)
    resolved, made = resolve(cfg, data)
    assert made is None and resolved.method == "qlora" and "cannot be read" in resolved.sources["method"]


def test_an_adapter_is_continued_on_the_base_that_it_was_trained_on(model, tmp_path):
    for name in ("run/adapter", "run/checkpoints/checkpoint-8", "alone"):
        (tmp_path/name).mkdir(parents=True)
        (tmp_path/name/"adapter_config.json").write_text("{}")
    (tmp_path/"run/config.json").write_text(json.dumps(dict(config=dict(method="qlora"))))
    for name in ("run", "run/adapter", "run/checkpoints/checkpoint-8"):
        assert method_of_earlier(str(tmp_path/name)) == "qlora"
    assert method_of_earlier(None) == method_of_earlier(str(tmp_path/"alone")) == ""
    made = planned(model, 16., adapter_name_or_path=str(tmp_path/"run"))
    assert made.settings["method"] == "qlora" and "earlier adapter" in made.reasons["method"]
