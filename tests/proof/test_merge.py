"""Loaded and exported models equal the trained one, for every kind of adapter."""
import json
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from learner import learner, small

import sft_nb.proof.merge as merging
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_adapter, load_model
from sft_nb.model.load import load_base
from sft_nb.base.progress import progress_listener
from sft_nb.base.report import ConfigError, edit, Report, SftError, warn
from sft_nb.proof.merge import merge, parity, probe
from sft_nb.proof.prove import answer_as_reference
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

FLOAT = learner() | dict(method="lora", learning_rate=1e-2)   # where the weights of the base are not rounded
ADAPTERS = {
    "qlora": dict(max_steps=6, max_samples=24, save_steps=3),
    "fp4, gaussian": dict(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False, init_lora_weights="gaussian"),
    "8bit": dict(load_in_8bit=True),
    "lora": FLOAT,
    "full": FLOAT | dict(method="full"),
    "dora": FLOAT | dict(use_dora=True),
    "pissa": FLOAT | dict(init_lora_weights="pissa"),
    "rslora, olora": FLOAT | dict(use_rslora=True, lora_target_modules=("attention",), init_lora_weights="olora"),
    "head": FLOAT | dict(modules_to_save=("lm_head",)),
    "tokens": dict(train_tokens=("<|im_end|>", "<|new|>")),
}


@pytest.fixture(autouse=True)
def answers_are_short(monkeypatch):
    "Short answers: a barely trained model never ends its answer, and differing models differ from the first token"
    monkeypatch.setattr(merging, "probe", partial(probe, max_new_tokens=8))


def short(tmp_path, **how):
    "A run of four steps without samples"
    small = dict(runs_dir=str(tmp_path), max_steps=4, max_samples=16, per_device_train_batch_size=4, eval_samples=0,
                 save_steps=100, preflight=False, max_new_tokens=8, sample_steps=100)
    return train(load_config("demo", **small | how))


@pytest.fixture
def trained_as(train_once):
    "`trained_as(kind)`: a run of one of `ADAPTERS`; it is trained once"
    return lambda kind: train_once(f"merge-{kind}", lambda folder: short(folder, **ADAPTERS[kind]))


@pytest.fixture
def of_six_steps(trained_as): return trained_as("qlora")


SELDOM = {"fp4, gaussian", "rslora, olora"}   # olora: below; fp4: tests/planning/test_bits.py

@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.soak if kind in SELDOM else []) for kind in ADAPTERS])
@pytest.mark.filterwarnings("ignore")
def test_trained_loaded_merged_and_reloaded_are_one_model(trained_as, kind):
    run = trained_as(kind)
    out = merge(run, dtype="float32", prompts=2)
    report = json.loads((out/"parity.json").read_text())
    assert report["status"] == "ok" and report["figures"]["equal_answers"] == 2
    tok = load_tokenizer(run.config)
    talk = [[dict(role="user", content="Ben has 3 figs. Then Ben buys 4 more. How many figs does Ben have?")]]
    tuned = probe(load_adapter(run.config, tok, run.adapter), tok, talk, max_new_tokens=8)
    base = probe(load_base(run.config, tok), tok, talk, like=tuned, max_new_tokens=1)
    assert parity(tuned, base).status == "fail", "nothing was learned, so nothing is proved"


def test_only_the_rows_of_the_tokens_are_trained(trained_as):
    cfg = load_config("demo", **ADAPTERS["tokens"])
    tok = load_tokenizer(cfg)
    new, end = tok.convert_tokens_to_ids("<|new|>"), tok.convert_tokens_to_ids("<|im_end|>")
    assert len(tok) == len(load_tokenizer(load_config())) + 1 and tok.decode([new]) == "<|new|>"
    before = load_base(cfg, tok).get_input_embeddings().weight
    run = trained_as("tokens")
    from safetensors.torch import load_file
    saved = [w for n, w in load_file(run.adapter/"adapter_model.safetensors").items() if "token" in n]
    assert len(saved) == 1 and saved[0].shape == (2, before.shape[1])
    merge(run, dtype="float32", prompts=2)
    with torch.no_grad(): after = load_file(run.path/"merged"/"model.safetensors")["model.embed_tokens.weight"]
    changed = {i for i in range(len(before)) if not torch.equal(before[i], after[i])}
    assert end in changed and changed <= {end, new}


def test_a_new_row_begins_as_the_mean_of_the_others():
    cfg, before = load_config(train_tokens=tuple(f"<|t{i}|>" for i in range(100))), len(load_tokenizer(load_config()))
    tok = load_tokenizer(cfg)
    old, new = load_base(load_config(), load_tokenizer(load_config())), load_base(cfg, tok)
    rows = old.get_input_embeddings().weight   # the base has rows for 23 tokens that no tokenizer makes
    w = new.get_input_embeddings().weight
    assert len(w) == len(tok) == before + 100 > len(rows) and torch.equal(w[:before], rows[:before])
    assert torch.allclose(w[before:], w[:before].mean(0).expand(100, -1), atol=1e-6)
    assert new.get_output_embeddings().weight is w


def test_the_turned_weights_of_gpt2_are_turned_back(tmp_path):
    from shapes import folder
    run = short(tmp_path, model=folder(tmp_path, "gpt2"), tokenizer="tiny", init="random")
    assert json.loads((merge(run, dtype="float32", prompts=2)/"parity.json").read_text())["status"] == "ok"


def test_nothing_of_the_users_is_touched(tmp_path, of_six_steps):
    (tmp_path/"precious.new").mkdir()
    (tmp_path/"precious.new"/"thesis.txt").write_text("x")
    heard = []   # its progress
    with progress_listener(heard.append): out = merge(of_six_steps, out=tmp_path/"precious", prompts=1)
    assert {p.phase for p in heard} >= {"loading", "merging", "comparing", "saving"}
    assert (tmp_path/"precious.new"/"thesis.txt").exists() and not (out/"thesis.txt").exists()
    assert not list(tmp_path.glob(".precious*"))
    assert json.loads((out/"parity.json").read_text())["figures"]["step"] == 6


def test_16_bits_and_a_checkpoint_and_another_folder(tmp_path, of_six_steps):
    run = of_six_steps
    out = merge(run, out=tmp_path/"there", checkpoint="checkpoint-3", prompts=2)
    from safetensors.torch import load_file
    assert {w.dtype for w in load_file(out/"model.safetensors").values()} == {torch.bfloat16}
    config = json.loads((out/"config.json").read_text())
    assert "quantization_config" not in config and "varlen" not in json.dumps(config)
    assert merge(run, checkpoint="checkpoint-3", prompts=1, dtype="float16").name == "merged-checkpoint-3"
    with pytest.raises(ConfigError, match="already exists"): merge(run, out=tmp_path/"there")
    with pytest.raises(ConfigError, match="prompts is 0"): merge(run, prompts=0)
    with pytest.raises(ConfigError, match="there is no checkpoint-7 in it"): merge(run, checkpoint="checkpoint-7")


def test_a_fix_of_a_merge_that_was_made_names_a_folder_that_is_not_there(of_six_steps, monkeypatch):
    run = of_six_steps
    finding = warn("they part in 1 of 2 answers", edit(dtype="float32"), check="parity")
    monkeypatch.setattr(merging, "_write_and_compare", lambda *a: Report("parity", findings=[finding]))
    out = merge(run, checkpoint="checkpoint-3", prompts=1)
    fix = Report.load(out/"parity.json").findings[0].fix.says("shell")
    assert fix == (f"sft_nb merge {run.path} --checkpoint checkpoint-3 --dtype float32 "
                   f"--out {run.path}/merged-checkpoint-3-float32")


def test_an_adapter_that_16_bits_cannot_hold_is_an_error_and_leaves_nothing(tmp_path):
    "The fix is tried"
    run = short(tmp_path, **FLOAT | dict(learning_rate=1e-6))
    refused = "the merge was not kept: rounding to bfloat16 changes more than the adapter did"
    with pytest.raises(SftError, match=refused) as e: merge(run, out=tmp_path/"my out", prompts=2)
    assert f"--dtype float32 --out '{tmp_path}/my out'" in e.value.fix.says("shell")
    assert not (tmp_path/"my out").exists()
    assert not [*run.path.glob("merged*"), *run.path.glob(".merged*")]
    assert (run.adapter/"adapter_model.safetensors").exists()
    assert merge(run, out=tmp_path/"my out", dtype="float32", prompts=2).exists()


LAYER = "model.layers.1.self_attn.o_proj.weight"


def base_alone(bench, path, dtype): return merging.dequantise(bench.base(), torch.float32).to(dtype)


def with_adapter_times(scale, only=""):
    "A merged model in which the adapter was scaled, everywhere or in one weight"
    def fault(model, base):
        for name, p in model.named_parameters():
            if only in name: p.data = (base[name] + scale * (p.data.float() - base[name])).to(p.dtype)
    return fault


def changed(change, name=LAYER):
    def fault(model, base): model.get_parameter(name).data = change(model.get_parameter(name).data)
    return fault


def rounded_twice(model, base):
    for p in model.parameters(): p.data = p.data.to(torch.float8_e5m2).to(p.dtype)


def swapped(model, base):
    a, b = (model.get_submodule(f"model.layers.{k}.self_attn.o_proj") for k in (1, 2))
    a.weight, b.weight = b.weight, a.weight


def of_another_base(model, base):
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        other = base[name] * (1 + .02 * torch.randn(base[name].shape))
        p.data = (p.data.float() - base[name] + other).to(p.dtype)


def own_head(model, base):
    "Stored beside the embedding that it was in training"
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data * 1.05)
    model.config.tie_word_embeddings = False


def other_positions(model, base): model.config.rope_parameters["rope_theta"] *= 4


FAULTS = {
    "the adapter is added twice": (with_adapter_times(2), "have the adapter 2.00 times"),
    "half of its scale": (with_adapter_times(.5), "have the adapter 0.50 times"),
    "not added": (with_adapter_times(0), "are the base's: the adapter is not in them"),
    "subtracted": (with_adapter_times(-1), "have the adapter -1.00 times"),
    "not in one layer": (with_adapter_times(0, LAYER), f"is the base's: the adapter is not in it, as in {LAYER}"),
    "twice in one layer": (with_adapter_times(2, LAYER), f"has the adapter 2.00 times, as in {LAYER}"),
    "transposed": (changed(torch.t), f"{LAYER} differs by"),
    "zeros": (changed(torch.zeros_like), f"{LAYER} is all zeros"),
    "NaN": (changed(lambda w: w / 0), f"{LAYER} is not finite"),
    "two layers are swapped": (swapped, "o_proj.weight holds model.layers."),
    "a norm is off": (changed(lambda w: 1.05 * w, "model.norm.weight"), "model.norm.weight differs by 0.05"),
    "tokens are others": (changed(lambda w: w.roll(1, 0), "model.embed_tokens.weight"), "embed_tokens.weight differs"),
    "rounded twice": (rounded_twice, "differ from the run's"),
    "another base": (of_another_base, "differ from the run's"),
    "a head of its own": (own_head, "lm_head.weight differs by 0.05"),
    "other positions": (other_positions, "it does not answer as what was trained does"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_went_wrong_in_a_merge_is_named_and_nothing_is_left(tmp_path, trained_as, fault, monkeypatch):
    run, (plant, says), merged_model = trained_as("qlora"), FAULTS[fault], merging.merged_model

    def planted(bench, path, dtype):
        model = merged_model(bench, path, dtype)
        before = {name: p.data.float() for name, p in base_alone(bench, path, dtype).named_parameters()}
        with torch.no_grad(): plant(model, before)
        return model
    monkeypatch.setattr(merging, "merged_model", planted)
    with pytest.raises(SftError, match="the merge was not kept: ") as e: merge(run, out=tmp_path/"out", prompts=2)
    assert says in e.value.found, e.value.found
    assert e.value.fix and not (tmp_path/"out").exists()


def test_a_weight_that_is_not_there_is_named(trained_as):
    run = trained_as("qlora")
    bench = Workbench(run.config, is_resolved=True)
    prints = merging.weight_prints(merging._with_adapter(bench, run.adapter), torch.bfloat16)
    merged = merging.merged_model(bench, run.adapter, torch.bfloat16)
    assert merging.compare_weights(prints, merged).status == "ok"
    del merged.model.layers[1].self_attn.o_proj.weight
    assert merging.compare_weights(prints, merged).says == f"1 of {len(prints)} weights missing: {LAYER}"


def test_an_answer_that_became_unlikely_is_a_failure():
    "Also where all logits are close, since only a few of them are the answer's"
    ids = [0, 1, 2]
    def logits(lead): return lead * torch.nn.functional.one_hot(torch.tensor([*ids[1:], 0]), 50)
    def probe_of(lead): return merging.Probe([], [ids] * 4, [1] * 4, [logits(lead + k / 9) for k in range(4)])
    found, figures = merging._loss_finding(probe_of(9.), probe_of(1.), probe_of(0.))
    assert found.status == "fail" and "training lowered it by" in found.says
    assert figures["loss_rise_low"] > 0
    assert merging._loss_finding(probe_of(9.), probe_of(8.9), probe_of(0.))[0].status == "ok"


def test_answers_that_differ_come_first():
    a, b = (merging.Probe(["3", text], [[0, 1, 2]] * 2, [1] * 2, [torch.ones(3, 50)] * 2) for text in ("4", "5"))
    both = "the merged model and the adapter"
    found = parity(a, b).findings[0]
    assert found.status == "fail" and found.says.startswith(f"1 of 2 greedy answers of {both} differ; where they ")
    found = parity(a, b, has_ties=True).findings[0]
    assert found.status == "warn" and "agree" not in found.says and "a concern if" in found.says
    assert parity(a, a).findings[0].says.startswith(f"{both} agree, up to rounding: 2 of 2 greedy answers are equal")


def test_another_answer_is_a_failure_in_32_bits_and_a_warning_in_16(trained_as, tmp_path, monkeypatch):
    "With logits as close as rounding makes them: only 16 bits cannot tell the two best tokens from each other"
    run = trained_as("lora")
    def another(a, b, **how): return parity(a, replace(b, texts=["other", *b.texts[1:]]), **how)
    monkeypatch.setattr(merging, "parity", another)
    with pytest.raises(SftError, match="1 of 2 greedy answers of the merged model and the adapter differ"):
        merge(run, out=tmp_path/"32", dtype="float32", prompts=2)
    assert not (tmp_path/"32").exists()
    made = Report.load(merge(run, out=tmp_path/"16", dtype="bfloat16", prompts=2)/"parity.json")
    assert made.status == "warn" and made.findings[0].says.startswith("1 of 2 greedy answers of the merged model ")


def test_a_run_in_16_bits_is_merged_in_32(tmp_path):
    "The adapter's own sums are of 16 bits, so no more than that can be asked of the comparison"
    from safetensors.torch import load_file
    run = short(tmp_path, **FLOAT, dtype="bfloat16")
    out = merge(run, dtype="float32", prompts=2)
    assert {w.dtype for w in load_file(out/"model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["bf16", "auto", "int8", "float64"])
def test_a_dtype_that_no_model_is_merged_in_is_refused(dtype, of_six_steps, tmp_path):
    with pytest.raises(ConfigError, match="bfloat16, float16 or float32"):
        merge(of_six_steps, out=tmp_path/"out", dtype=dtype)


def test_a_merge_that_has_no_room_on_the_card_goes_on_in_host_memory(of_six_steps, monkeypatch, capsys):
    "A layer at a time, with the same numbers"
    bench, adapter = Workbench(of_six_steps.config, is_resolved=True), of_six_steps.adapter
    want = merging.merged_model(bench, adapter, torch.float32).state_dict()
    plain, tried = merging._dequantised_weight, []
    def small_card(layer):
        tried.append(1)
        if len(tried) == 5: raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(layer)
    monkeypatch.setattr(merging, "_dequantised_weight", small_card)
    with pytest.raises(torch.OutOfMemoryError): merging.merged_model(bench, adapter, torch.float32)   # of a host
    bench.hardware = replace(bench.hardware, device="cuda")
    tried.clear()
    merged = merging.merged_model(bench, adapter, torch.float32)
    assert "no room for the merged model" in capsys.readouterr().err and len(tried) > 5
    got = merged.state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_what_was_merged_is_compared_on_the_host_if_the_card_has_no_room(of_six_steps, tmp_path, monkeypatch):
    bench, devices, load = Workbench(of_six_steps.config, is_resolved=True), [], merging.load_merged
    bench.hardware = replace(bench.hardware, device="cuda")
    def small_card(folder, dtype, device):
        devices.append(device)
        if device == "cuda": raise torch.OutOfMemoryError("CUDA out of memory")
        return load(folder, dtype, device)
    monkeypatch.setattr(merging, "load_merged", small_card)
    found = merging._write_and_compare(bench, of_six_steps.adapter, tmp_path, "float32", {})
    assert not found.failed and devices == ["cuda", "cpu"]
    monkeypatch.setattr(merging, "load_merged", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merging._write_and_compare(bench, of_six_steps.adapter, tmp_path, "float32", {})


@pytest.mark.parametrize("how, says", [
    (dict(method="qlora", init_lora_weights="pissa"), "decomposes the base"),
    (dict(init_lora_weights="nonsense", method="lora"), "no such initialisation"),
    (dict(method="qlora", use_dora=True, lora_target_modules=("attention",), modules_to_save=("q_proj",)),
     "stored in 4 or 8 bits"),
    (dict(modules_to_save=("lmhead",)), "no module 'lmhead'"),
    (dict(lora_target_modules=("q_projj",)), "no linear layer"),
    (dict(tokenizer="small"), "rows for 768"),
])
def test_wrong_adapters_are_refused(tokenizer, how, says, tmp_path):
    if "tokenizer" in how:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "e": 2}, unk_token="a"))
        small = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="e", pad_token="b")
        small.save_pretrained(tmp_path/"small")
        how = dict(tokenizer=str(tmp_path/"small"))
        tokenizer = load_tokenizer(load_config(**how))
    with pytest.raises(ConfigError, match=says): load_model(load_config(**how), tokenizer)


def test_checkpointing_asks_for_gradients_of_the_input_and_not_reentrantly(tokenizer, tmp_path):
    from pathlib import Path
    from sft_nb.training.arguments import training_arguments
    cfg = load_config("demo", gradient_checkpointing=True)
    model = load_model(cfg, tokenizer)
    ids = torch.arange(5)[None]
    assert model(ids).logits.requires_grad and model.get_input_embeddings()(ids).requires_grad
    assert training_arguments(cfg, Path("runs/x")).gradient_checkpointing_kwargs == dict(use_reentrant=False)


@pytest.mark.parametrize("start", ["olora", "pissa"])
def test_the_base_of_an_adapter_whose_start_changed_it_is_the_base_itself(tmp_path, start):
    "These subtract the adapter's start from the weights beside it. Nothing is learned here, so nothing differs"
    run = train(small(tmp_path, init_lora_weights=start, learning_rate=1e-12, max_steps=1, eval_samples=4))
    bench = Workbench(run.config, is_resolved=True)
    assert answer_as_reference(bench, run, run.adapter, prompts=2, max_new_tokens=4).effect < 1e-3
    with patch.object(merging, "parity", wraps=parity) as compared: merge(run, dtype="float32", prompts=2)
    base, trained = compared.call_args.kwargs["base"], compared.call_args.args[0]
    for a, b in zip(base.logits, trained.logits): assert torch.allclose(a[-len(b):], b[-len(a):], atol=1e-3)
