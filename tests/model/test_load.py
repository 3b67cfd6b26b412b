"Loading the base: broken weights are named, and new ones are made by every process"
import json
import os

import pytest
import torch
from learner import learner
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.model.adapter import check_trained, load_model, read_adapter
from sft_nb.model.load import check_weights, load_base
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.provenance import weights_of
from sft_nb.tokens.tokenizer import load_tokenizer, model_path


@pytest.fixture
def second_of_two():
    "Make this process believe that it is the second of two"
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_new_weights_in_a_second_process(second_of_two, tokenizer):
    "transformers writes a model on the first process alone"
    assert torch.distributed.get_rank() == 1
    base = load_base(load_config("demo", **learner()), tokenizer)
    assert all(p.isfinite().all() for p in base.parameters())


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_base_with_broken_weights_is_named(tmp_path, tokenizer, method, number):
    base = load_base(load_config("demo", **learner()), tokenizer)
    with torch.no_grad(): base.model.layers[1].mlp.up_proj.weight[3, 5] = number
    base.save_pretrained(tmp_path)
    cfg = load_config("demo", model=str(tmp_path), tokenizer="tiny", method=method)
    with pytest.raises(ConfigError, match="1 of .* hold NaN or infinity, the first is model.layers.1.mlp.up_proj"):
        load_base(cfg, tokenizer)
    if (method, number) == ("lora", float("inf")):
        failed = preflight(cfg).failed
        assert [f.check for f in failed] == ["model"] and "hold NaN or infinity" in failed[0].says


@pytest.mark.parametrize("dtype, settings", [(torch.float16, dict(dtype="bfloat16")), (torch.float32, {}),
                                             (torch.bfloat16, {})])
def test_another_format_is_proposed_only_where_numbers_may_have_been_too_large(dtype, settings):
    "float16 ends at 65,504; what is broken in another one is broken on disk"
    layer = torch.nn.Linear(2, 2).to(dtype)
    with torch.no_grad(): layer.weight[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="1 of 2 tensors hold NaN or infinity, the first is weight") as e:
        check_weights(layer, "mine")
    assert e.value.fix.settings == settings and "download it again" in str(e.value.fix)


def test_rows_that_end_inside_a_block_get_their_own_scale(tmp_path, tokenizer):
    "A base whose rows have 96 numbers, blocks of 64: as the blocks are, one after the other"
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import QuantState, dequantize_4bit
    shape = AutoConfig.for_model("llama", hidden_size=96, intermediate_size=160, num_hidden_layers=1,
                                 num_attention_heads=4, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    cfg = load_config(model=str(tmp_path), tokenizer="tiny", method="qlora", bnb_4bit_use_double_quant=False)
    loaded = load_base(cfg, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name in ("q_proj", "o_proj"):
        layer, before = (getattr(m.model.layers[0].self_attn, name) for m in (loaded, plain))
        state = layer.weight.quant_state
        blocks = QuantState(state.absmax, (len(state.absmax), 64), state.code, 64, "nf4", torch.float32)
        rows = dequantize_4bit(layer.weight.data, blocks).view(96, 96)
        assert torch.equal(dequantize_4bit(layer.weight.data, state), rows)
        assert (rows - before.weight).abs().max() < .25 * before.weight.abs().max()
        x = torch.randn(5, 96)
        torch.testing.assert_close(layer(x), x @ rows.T, rtol=1e-4, atol=1e-4)


def test_a_folder_without_weights(tmp_path):
    "A config and a tokenizer: a shape to begin with, and no model"
    tokenizer = load_tokenizer(load_config())
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.from_pretrained(model_path("tiny")).save_pretrained(tmp_path)
    cfg = load_config(model=str(tmp_path), method="lora")
    with pytest.raises(ConfigError, match="there are no weights in this folder") as e: load_base(cfg, tokenizer)
    assert e.value.fix.settings == dict(init="random", method="full")
    load_base(load_config(cfg, **e.value.fix.settings), tokenizer)


def test_memory_that_runs_out_is_not_called_a_wrong_model(monkeypatch):
    def fails(*args, **how): raise MemoryError
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    cfg = load_config(method="lora")
    with pytest.raises(ConfigError, match="memory ran out .*ulimit -v.* a smaller"): load_base(cfg, load_tokenizer(cfg))


def test_a_model_in_4_bits_can_be_saved_whole_and_loaded_in_another_process(tmp_path, tokenizer):
    "transformers' own can; a class that exists only while a model is loaded must not be in the file"
    cfg = load_config("demo", kernels="none")
    model = load_model(cfg, tokenizer).eval()
    torch.save(model, tmp_path/"model.pt")
    ids = torch.arange(9)[None]
    again = torch.load(tmp_path/"model.pt", weights_only=False)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert type(again.base_model.model.hf_quantizer).__module__.startswith("transformers.")


@pytest.mark.parametrize("said", [dict(r=10 ** 9), dict(r=2, rank_pattern=dict(k_proj=10 ** 9))])
def test_a_rank_that_the_weights_do_not_have_is_refused_before_it_is_allocated(tmp_path, said):
    from safetensors.torch import save_file
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(2, 8)}, tmp_path/"adapter_model.safetensors")
    (tmp_path/"adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(SftError, match="it has rank 1,000,000,000, and the weights 2"): check_trained(tmp_path, "lora")
    (tmp_path/"adapter_config.json").write_text(json.dumps(dict(r=2, rank_pattern=dict(k_proj=4))))
    check_trained(tmp_path, "lora")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\x80", b'{"peft_type": {}}', None])
def test_an_adapter_with_another_config(content, tmp_path):
    config, base = tmp_path/"adapter_config.json", torch.nn.Sequential(torch.nn.Linear(2, 2))
    if content is None: os.mkfifo(config)   # whose writer must not be waited for
    else: config.write_bytes(content)
    with pytest.raises(SftError, match="adapter_config.json: it cannot be read .*; the one that was saved with these"):
        read_adapter(base, tmp_path)
    os.mkfifo(tmp_path/"adapter_model.safetensors")
    with pytest.raises(SftError, match="adapter_model.safetensors: it cannot be read .it is not a regular file"):
        check_trained(tmp_path, "lora")
    assert weights_of(tmp_path) == {}
