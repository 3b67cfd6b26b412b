"""Peculiarities of model families: how they count positions, layers that are more than one product,
layers that text never reaches."""
import json

import pytest
import torch
from safetensors.torch import load_file
from shapes import short_rows, tiny_config

from sft_nb.checks.model import check_vocabulary
from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model, target_modules
from sft_nb.model.attention import choose_attention
from sft_nb.model.experts import balance_weight, count_experts
from sft_nb.model.generation import continue_tokens, choose_decoding, reads_padding
from sft_nb.model.load import auto_class, load_base
from sft_nb.model.loss import add_supervised_loss, batch_loss
from sft_nb.batches.layout import DataCollatorForCausalLM
from sft_nb.planning.plan import plan
from sft_nb.proof.merge import merge
from sft_nb.base.report import ConfigError, Report
from sft_nb.training.train import train


def settings(tmp_path, kind:str, *, own:dict|None=None, **how):
    "Settings with a random model in a folder; `own`: values of its config"
    shape = tiny_config(kind, 745)
    shape.update(own or {})
    torch.manual_seed(0)
    auto_class(shape).from_config(shape, dtype=torch.float32).save_pretrained(tmp_path/kind)
    base = dict(model=str(tmp_path/kind), tokenizer="tiny", method="lora", device="cpu", dtype="float32",
                max_samples=16, eval_samples=0, max_steps=2, per_device_train_batch_size=2, preflight=False,
                gradient_accumulation_steps=1, max_new_tokens=4, runs_dir=str(tmp_path/"runs"))
    return load_config("demo", **base | how)


def without_a_cache(model, ids:list[int], n:int)->list[int]:
    "Greedy continuation without a cache, with the model's own positions"
    for _ in range(n):
        with torch.no_grad(): ids = ids + [int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return ids[-n:]


@pytest.mark.parametrize("kind", ["roberta", "data2vec-text"])
def test_positions_that_begin_behind_the_pad_token(tmp_path, tokenizer, kind):
    "With a cache, alone and in a batch, as without one; a pad token in a prompt is not counted"
    model = load_base(settings(tmp_path, kind), tokenizer)
    model.generation_config.eos_token_id = None
    prompts = [[5, 0, 7, 9, 11, 4], [8, 6]]   # 0 is what the config pads with; the tokenizer has another
    assert tokenizer.pad_token_id != model.config.pad_token_id == 0
    want = [tokenizer.decode(without_a_cache(model, ids, 6), skip_special_tokens=True) for ids in prompts]
    for n in (1, 2):
        found = continue_tokens(model, tokenizer, prompts, max_new_tokens=6, batch_size=n)
        assert [answer.text for answer in found] == want


@pytest.mark.parametrize("kind", [
    "roberta", "youtu", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("xglm", "prophetnet"))])
def test_a_merged_model_is_built_with_the_pad_token_of_its_base(tmp_path, kind):
    "RoBERTa, XGLM and ProphetNet count positions with its number, and Youtu empties its row in the tied head"
    run = train(settings(tmp_path, kind, learning_rate=1e-2, **short_rows(tmp_path)))
    parity = Report.load(merge(run, dtype="float32", prompts=2)/"parity.json")
    assert parity.status != "fail" and parity.figures["largest_difference"] < 1e-5


@pytest.mark.parametrize("kind", ["zamba2", pytest.param("zamba", marks=pytest.mark.soak)])
def test_layers_that_share_a_weight_share_its_adapter(tmp_path, kind):
    "Two adapters would both be added to the weight of a merged model"
    run = train(settings(tmp_path, kind, learning_rate=3e-2, **short_rows(tmp_path)))
    parity = Report.load(merge(run, dtype="float32", prompts=2)/"parity.json")
    assert parity.status != "fail" and parity.figures["largest_difference"] < 1e-5
    saved = load_file(run.adapter/"adapter_model.safetensors")
    first, second = (saved[name] for name in saved if "shared_transf" in name and "q_proj.lora_B" in name)
    assert torch.equal(first, second) and first.any()


def test_a_roberta_that_is_trained_in_full_is_loaded_as_it_was_trained(tmp_path, tokenizer):
    "Also when it is resumed: transformers gives its config the tokenizer's pad token as a training begins"
    cfg = settings(tmp_path, "roberta", method="full", save_steps=1, save_total_limit=9)
    run = train(cfg)
    for folder in (run.path/"checkpoints/checkpoint-1", run.adapter):
        assert json.loads((folder/"config.json").read_text())["pad_token_id"] == 0 != tokenizer.pad_token_id
    assert json.loads((run.adapter/"generation_config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id


def test_a_grouped_product_has_no_adapter_and_no_4_bits(tmp_path, tokenizer):
    cfg = settings(tmp_path, "deepseek_v4")
    assert "o_b_proj" in target_modules(load_base(cfg, tokenizer), ("all-linear",))
    assert "o_a_proj" not in target_modules(load_base(cfg, tokenizer), ("all-linear",))
    rows = [dict(input_ids=[*range(5, 25)], labels=[*range(5, 25)])]
    for method in ("lora", "qlora"):
        model = load_model(settings(tmp_path, "deepseek_v4", method=method), tokenizer)
        layer = next(m for name, m in model.named_modules() if name.endswith("o_a_proj"))
        assert type(layer).__name__ == "DeepseekV4GroupedLinear"
        loss, n = batch_loss(model, DataCollatorForCausalLM(tokenizer)(rows), supervised=False)
        assert 5 < float(loss.detach() / n) < 9   # ln 745 is 6.6


def test_a_value_that_reads_what_the_key_wrote(tmp_path, tokenizer):
    "In RWKV's MLP the layers have names of an attention's, and other widths"
    model = load_model(settings(tmp_path, "rwkv"), tokenizer)
    rows = [dict(input_ids=[*range(5, 25)], labels=[*range(5, 25)])]
    loss, n = batch_loss(model, DataCollatorForCausalLM(tokenizer)(rows), supervised=False)
    assert 5 < float(loss.detach() / n) < 9


def test_a_head_that_reads_twice_the_hidden_size():
    shape = tiny_config("reformer", 745)
    assert add_supervised_loss(auto_class(shape).from_config(shape))


def test_a_model_that_passes_no_gradient_to_an_adapter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="reformer trains on rows of a multiple of its chunks.* Fix: another model"):
        train(settings(tmp_path, "reformer"))


def test_a_doge_without_experts_trains_without_the_loss_of_routers(tmp_path, tokenizer):
    "Its config has a number of experts and a weight of that loss all the same"
    cfg = settings(tmp_path, "doge")
    inner = load_base(cfg, tokenizer)
    assert inner.config.num_experts and inner.config.router_aux_loss_coef and count_experts(inner.config) == 0
    assert train(cfg).state == "finished"
    with pytest.raises(ConfigError, match="doge has no load-balancing loss"): balance_weight(.1, inner)


def test_a_mixture_in_which_no_layer_has_experts(tmp_path):
    run = train(settings(tmp_path, "qwen3_moe", own=dict(mlp_only_layers=[0, 1, 2, 3])))
    assert run.state == "finished" and not any("aux_loss" in line for line in run.metrics())


def test_a_loss_that_is_not_that_of_the_next_token(tmp_path):
    rows = short_rows(tmp_path)
    report = preflight(settings(tmp_path, "prophetnet", **rows))
    found = {f.check: f for f in report.findings}["step.own_loss"]
    assert found.status == "fail" and "computes its own loss" in found.says
    another = preflight(settings(tmp_path, "cpmant", **rows))   # which reads ahead
    assert {f.check: f.status for f in another.findings}["step.own_loss"] == "ok"


@pytest.mark.parametrize("kind", ["jetmoe", "longcat_flash", "xmod", "xlm", "prophetnet"])
def test_plans_of_models_that_branch_on_numbers(tmp_path, kind):
    "Which tokens an expert has, which rows are of a language, how long the longest row is"
    assert plan(settings(tmp_path, kind, init="random"), lengths=[20, 40]).total > 0


def test_an_attention_that_reads_its_mask_is_left_to_transformers():
    name, why = choose_attention("auto", "cpu", torch.float32, tiny_config("doge"))
    assert name is None and "its own attention" in why


@pytest.mark.parametrize("kind", ["falcon", "gptj", "bloom", "mamba", "openai-gpt", "doge"])
def test_plans_of_models_that_make_their_mask_or_choose_their_attention_themselves(tmp_path, kind):
    assert plan(settings(tmp_path, kind, init="random"), lengths=[20, 40]).total > 0


def test_llama_3_2_vision_is_trained_where_text_passes(tmp_path, tokenizer):
    "Its layers that read images are skipped for text, and the embedding has rows for images that the head has not"
    model = load_model(settings(tmp_path, "mllama"), tokenizer)
    inner = model.get_base_model()
    assert len(inner.get_input_embeddings().weight) > len(inner.get_output_embeddings().weight)
    assert check_vocabulary(model, tokenizer) is None
    rows = [dict(input_ids=[*range(5, 25)], labels=[*range(5, 25)])]
    batch_loss(model, DataCollatorForCausalLM(tokenizer)(rows), supervised=False)[0].backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad is not None for p in trained.values())


def test_a_cache_forgets_nothing_that_its_model_reads(tmp_path, tokenizer):
    "Moshi's config has a window, of 7 tokens here, and its mask has none"
    model = load_base(settings(tmp_path, "moshi"), tokenizer)
    model.generation_config.eos_token_id = None
    prompts = [[*range(5, 25)], [8, 6]]
    want = [tokenizer.decode(without_a_cache(model, ids, 6), skip_special_tokens=True) for ids in prompts]
    found = continue_tokens(model, tokenizer, prompts, max_new_tokens=6)
    assert [answer.text for answer in found] == want


def test_what_gemma_3n_clamps_is_left_as_it_is(tmp_path, tokenizer):
    "In training it reads the weight of these layers, past an adapter, and writes into it, packed or not"
    for method in ("lora", "qlora"):
        model = load_model(settings(tmp_path, "gemma3n_text", method=method), tokenizer).train()
        weights = {name: p for name, p in model.named_parameters() if "_coefs." in name}
        assert not any("correction_coefs.lora_" in name for name in weights)
        assert all(p.is_floating_point() for p in weights.values())
        rows = [dict(input_ids=[*range(5, 25)], labels=[*range(5, 25)])]
        loss, n = batch_loss(model, DataCollatorForCausalLM(tokenizer)(rows), supervised=False)
        assert 5 < float(loss.detach() / n) < 9


@pytest.mark.parametrize("kind", ["bart", "rwkv", "deepseek_v4"])
def test_rows_that_would_read_their_padding_are_answered_one_at_a_time(tmp_path, tokenizer, kind):
    "RWKV's state is another one in a batch even without padding"
    model = load_base(settings(tmp_path, kind), tokenizer)
    assert reads_padding(model)
    prompts = [[5, 8, 7], [9, 11, 4, 6, 12], [10, 9, 13], [14, 5, 15, 16, 17], [6, 7, 8]]
    alone = [continue_tokens(model, tokenizer, [ids], max_new_tokens=6)[0] for ids in prompts]
    assert continue_tokens(model, tokenizer, prompts, max_new_tokens=6, batch_size=2) == alone
    assert len({answer.text for answer in alone}) > 1


def test_each_row_has_its_adapter_in_transformers_loop_too(tmp_path, tokenizer):
    "A hybrid's cache is none that rows can leave"
    model = load_model(settings(tmp_path, "lfm2"), tokenizer)
    model.add_adapter("other", model.peft_config["default"])
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n: p.normal_(std=.5 if "other" in n else .1)
    assert choose_decoding(model)[0] == "transformers"
    prompts, how = [[5, 8, 7]] * 2, dict(max_new_tokens=8)
    alone = []
    for name in ("default", "other"):
        model.set_adapter(name)
        alone += continue_tokens(model, tokenizer, prompts[:1], **how)
    assert alone[0] != alone[1]
    assert continue_tokens(model, tokenizer, prompts, adapters=["default", "other"], **how) == alone
