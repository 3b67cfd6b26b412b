"""Adapters on the experts of mixtures, the loss of their routers, and what is not supported."""
import copy
import re
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from shapes import tiny_config
from transformers import AutoModelForCausalLM

from sft_nb.batches.layout import DataCollatorForCausalLM
from sft_nb.checks.model import check_packed, check_reach
from sft_nb.config.load import load_config
from sft_nb.base.extensions import extension
from sft_nb.model.adapter import add_adapter, lora_reach, read_adapter, targets_as_named
from sft_nb.extras import packed_experts as experts
from sft_nb.extras.packed_experts import packed_experts, restore_experts
from sft_nb.model.experts import balance_loss_of, balance_weight, expert_parameters
from sft_nb.model.load import auto_class, load_base, quiet
from sft_nb.model.loss import add_supervised_loss
from sft_nb.extras.own_model import read_lora_settings
from sft_nb.base.report import ConfigError, SftError
from sft_nb.proof.merge import merge_weights
from sft_nb.runs.directory import Run
from sft_nb.training.train import resume, train

MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "qwen3_next", "llama4_text",
            "jetmoe", "hunyuan_v1_moe")


def base(kind:str):
    torch.manual_seed(0)
    with quiet(): return AutoModelForCausalLM.from_config(tiny_config(kind)).eval()


def adapted(kind:str, tokenizer, **how):
    "A model with a non-zero adapter"
    with quiet(): model = add_adapter(base(kind), tokenizer, load_config(method="lora", **how)).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(p, std=.05)
    return model


@torch.no_grad()
def scores(model): return model(torch.arange(3, 23)[None]).logits


def apart(a, b)->float: return ((a - b).abs().max() / a.abs().max()).item()


@pytest.mark.parametrize("kind", MIXTURES)
def test_all_linear_reaches_the_experts_and_peft_reads_them_again(kind, tokenizer, tmp_path):
    "Shared experts and dense layers too, which peft by itself would take for routed ones; merged, it is the same model"
    model, plain = adapted(kind, tokenizer), base(kind)
    reach = lora_reach(model)
    assert reach.share > .95 and "routers, embeddings and head are frozen" in str(reach)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not [n for n in trained if "router" in n or ".gate." in n or "shared_expert_gate" in n]
    assert {"experts" in n or "linear" in n for n in trained} == {True, False}
    model.save_pretrained(tmp_path)
    said, ours = scores(model), read_adapter(copy.deepcopy(plain), tmp_path).eval()
    assert apart(said, scores(ours)) == 0
    assert apart(said, scores(PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval())) < 1e-5
    assert apart(said, scores(plain)) > 1e-2
    for _ in merge_weights(ours): pass
    assert apart(said, scores(ours.merge_and_unload())) < 1e-5


LOSSES = "qwen3_moe gpt_oss granitemoe jamba jetmoe ernie4_5_moe minimax_m2".split()


@pytest.mark.parametrize("kind", LOSSES)
def test_the_routers_loss_is_that_of_transformers(kind, tokenizer):
    "On a padded batch, whose padding does not count"
    model = base(kind)
    assert balance_loss_of(model) is not None
    rows = [dict(input_ids=list(range(3, 3 + n)), labels=list(range(3, 3 + n))) for n in (9, 17)]
    batch = DataCollatorForCausalLM(tokenizer)(rows)
    with torch.no_grad(): theirs = model(**batch, output_router_logits=True, use_cache=False).aux_loss
    assert add_supervised_loss(model)
    with torch.no_grad():
        ours = model(**batch, output_router_logits=True, supervised=True).aux_loss
        assert model(**batch, supervised=True).aux_loss is None
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6) and ours > 0


@pytest.mark.parametrize("kind", LOSSES)
def test_the_routers_loss_weighs_what_the_config_says(kind):
    "JetMoE has another name for it"
    model = base(kind)
    own = getattr(model, "aux_loss_coef", None) if kind == "jetmoe" else model.router_aux_loss_coef
    model.config.output_router_logits = False
    weight, why = balance_weight(None, model)
    assert weight == 0 and f"router_aux_loss_coef={own:g} would add it" in why
    model.config.output_router_logits = True
    assert balance_weight(None, model)[0] == own > 0
    assert balance_weight(0., model)[0] == 0.


def test_routers_that_are_trained_are_not_called_frozen(tokenizer):
    how = dict(lora_target_modules=("attention",))
    assert "routers, embeddings and head are frozen" in str(lora_reach(adapted("qwen3_moe", tokenizer, **how)))
    trained = adapted("qwen3_moe", tokenizer, lora_target_parameters=("gate.weight",), **how)
    assert "; embeddings and head are frozen" in str(lora_reach(trained))


def test_parameters_alone(tokenizer):
    "As peft with target_modules=[]: no linear layer has an adapter"
    how = dict(lora_target_modules=("none",), lora_target_parameters=("experts.down_proj",))
    model = adapted("qwen3_moe", tokenizer, **how)
    trained = {n.partition(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"experts"}
    again = read_lora_settings(model)
    assert {name: again[name] for name in how} == how
    with pytest.raises(ConfigError, match="it is none, and lora_target_parameters names nothing"):
        adapted("qwen3_moe", tokenizer, lora_target_modules=("none",))
    assert check_reach(model, method="lora", lora_target_modules=("none",)).status == "ok"   # as requested


def test_a_word_that_means_nothing_is_answered_with_those_of_experts_too(tokenizer):
    with pytest.raises(ConfigError, match="no linear layer 'down_projs'.*gate_up_proj") as e:
        adapted("gpt_oss", tokenizer, lora_target_modules=("down_projs",))
    assert e.value.fix.settings == dict(lora_target_modules=("down_proj",))


def test_the_rank_is_divided_among_the_experts_of_a_token(tokenizer):
    "Two of four experts: 8 of 16; scaled as every other adapter"
    model = adapted("qwen3_moe", tokenizer)
    layers = {n: m for n, m in model.named_modules() if getattr(m, "lora_A", None)}
    ranks = {m.r["default"] for n, m in layers.items() if hasattr(m, "get_param")}
    assert ranks == {8} and {m.scaling["default"] for m in layers.values()} == {2.}
    assert len(expert_parameters(base("qwen3_moe"))) == 8


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_the_adapter_of_a_model_that_is_handed_over_is_described_by_settings(kind, tokenizer):
    "Settings from which the same adapter is made: with its experts, and its shared experts beside them"
    model = adapted(kind, tokenizer, lora_r=8, lora_alpha=32, use_rslora=True)
    again = adapted(kind, tokenizer, **read_lora_settings(model))
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert again.peft_config["default"].to_dict() == model.peft_config["default"].to_dict()


@pytest.mark.parametrize("how, says", [
    (dict(target_parameters=["experts.down_proj"]), "rank 8 and scale 1 beside .*experts, not 4 and 1"),
    (dict(target_modules=["down_proj", "q_proj"]), "leaves experts.down_proj out")])
def test_an_adapter_that_settings_cannot_describe_is_refused(how, says):
    adapter = LoraConfig(**dict(target_modules=["q_proj"]) | how)
    with targets_as_named(): model = get_peft_model(base("glm4_moe"), adapter)
    with pytest.raises(ConfigError, match=says): read_lora_settings(model)


@pytest.mark.parametrize("how, fix", [
    (dict(lora_dropout=.1), "lora_dropout=0.0"), (dict(use_dora=True), "use_dora=False"),
    (dict(init_lora_weights="orthogonal"), "init_lora_weights='default'")])
def test_what_peft_cannot_do_beside_experts_is_refused_with_an_edit_that_helps(how, fix, tokenizer):
    with pytest.raises(ConfigError, match=f"which are parameters, not layers. Fix: .*{fix}"):
        add_adapter(base("qwen3_moe"), tokenizer, load_config(method="lora", **how))
    only = load_config(method="lora", lora_target_modules=("attention",), **how)
    assert lora_reach(add_adapter(base("qwen3_moe"), tokenizer, only)).share < .5


def test_names_that_no_expert_has(tokenizer):
    wrong = load_config(method="lora", lora_target_parameters=("experts.up",))
    with pytest.raises(ConfigError, match="no matrix 'experts.up'"): add_adapter(base("qwen3_moe"), tokenizer, wrong)
    with pytest.raises(ConfigError, match="no linear layer 'down_projj'"):
        add_adapter(base("qwen3_moe"), tokenizer, load_config(method="lora", lora_target_modules=("down_projj",)))


def test_attention_alone_leaves_the_experts_out_which_is_reported(tokenizer):
    few = load_config(method="lora", lora_target_modules=("attention",))
    found = check_reach(add_adapter(base("qwen3_moe"), tokenizer, few), **few.values(check_reach))
    assert found.status == "warn" and "experts.gate_up_proj" in found.says
    assert str(found.fix) == "lora_target_modules=('all-linear',)"


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h", "falcon_h1"])
def test_a_state_space_model_trains_and_the_fix_for_its_projections_works(kind, tokenizer):
    "Their kernels take the weight of out_proj, past an adapter beside it; trained in full, it is reached"
    cfg = load_config(method="lora")
    model = add_adapter(base(kind), tokenizer, cfg)
    found = check_reach(model, **cfg.values(check_reach))
    assert found.status == "warn" and str(found.fix) == "modules_to_save=('out_proj',)"
    cfg = load_config(method="lora", modules_to_save=("out_proj",))
    model = add_adapter(base(kind), tokenizer, cfg)
    assert check_reach(model, **cfg.values(check_reach)).status == "ok"
    ids = torch.arange(3, 23)[None]
    model(ids, labels=ids).loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def in_4_bits(tmp_path, tokenizer, kind:str, dtype:str="float32", **how):
    "A base loaded from files, and the config of its training"
    if not (tmp_path/"config.json").exists():
        torch.manual_seed(0)
        with quiet(): AutoModelForCausalLM.from_config(tiny_config(kind, len(tokenizer))).save_pretrained(tmp_path)
    cfg = load_config(model=str(tmp_path), tokenizer="tiny", method="qlora", device="cpu", dtype=dtype, **how)
    return load_base(cfg, tokenizer), cfg


def pass_through(model):
    "Logits and the gradient of the embedded tokens"
    ids = torch.arange(3, 43).view(2, 20)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    out = model(inputs_embeds=embedded, labels=ids, use_cache=False)
    return out.logits, *torch.autograd.grad(out.loss, embedded)


PACKED = ["qwen3_moe", "gpt_oss", "nemotron_h", "aria_text"]   # gate and up; biases, transposed; no gate; transposed


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("double", [True, False])
def test_packed_experts_compute_what_their_numbers_do(kind, dtype, double, tokenizer, tmp_path):
    "To the last digit, in both directions, with all of a layer's experts at a time and with one"
    packed, _ = in_4_bits(tmp_path, tokenizer, kind, dtype, bnb_4bit_use_double_quant=double)
    plain = copy.deepcopy(packed)
    restore_experts(plain, getattr(torch, dtype))
    assert packed_experts(packed) and not packed_experts(plain) and check_packed(packed, method="qlora").status == "ok"
    for ours, theirs in zip(pass_through(packed), pass_through(plain)): assert torch.equal(ours, theirs)


def test_one_expert_at_a_time_and_none_that_has_no_tokens(tokenizer, tmp_path, monkeypatch):
    packed, _ = in_4_bits(tmp_path, tokenizer, "qwen3_moe")
    together, unpacked, whole = pass_through(packed), [], experts.unpack_experts
    def counted(module, name, first, last):
        unpacked.append(range(first, last))
        return whole(module, name, first, last)
    monkeypatch.setattr(experts, "unpack_experts", counted)
    monkeypatch.setattr(experts, "_UNPACKED_BYTES", 1)
    for one, all_of_them in zip(pass_through(packed), together): assert torch.equal(one, all_of_them)
    assert {len(group) for group in unpacked} == {1}
    unpacked.clear()
    with torch.no_grad(): packed(torch.tensor([[5]]))   # one token goes to two of four experts, in each of four layers
    assert len(unpacked) == 2 * 2 * 4


@pytest.mark.parametrize("kind", PACKED)
def test_lora_beside_packed_experts(kind, tokenizer, tmp_path):
    "As peft's, beside the numbers that the experts stand for; saved, read, switched off, and read by peft itself"
    packed, cfg = in_4_bits(tmp_path/"base", tokenizer, kind)
    plain, alone = copy.deepcopy(packed), scores(packed)
    restore_experts(plain, torch.float32)
    model = add_adapter(packed, tokenizer, cfg).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(p, std=.05)
    model.save_pretrained(tmp_path/"adapter")
    theirs = read_adapter(plain, tmp_path/"adapter").eval()
    for name, p in theirs.named_parameters(): p.requires_grad_("lora_" in name)
    assert apart(scores(theirs), scores(model)) < 1e-5 and apart(alone, scores(model)) > 1e-2
    with model.disable_adapter(): assert torch.equal(scores(model), alone)
    ids = torch.arange(3, 43).view(2, 20)
    for m in (model, theirs): m(ids, labels=ids, use_cache=False).loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, p in theirs.named_parameters():
        if p.requires_grad: assert apart(p.grad, ours[name]) < 1e-4, name
    again = read_adapter(in_4_bits(tmp_path/"base", tokenizer, kind)[0], tmp_path/"adapter").eval()
    assert torch.equal(scores(again), scores(model))


@pytest.mark.parametrize("kind, how, says, fix", [
    ("llama4_text", {}, ", but not feed_forward.experts.gate_up_proj, .*: their forward pass is one of their own",
     "method='lora'"),
    ("qwen3_moe", dict(load_in_8bit=True), "is stored in 8 bits, but not mlp.experts", "load_in_8bit=False")])
def test_experts_that_stay_in_16_bits_are_reported(kind, how, says, fix, tokenizer, tmp_path):
    packed, cfg = in_4_bits(tmp_path, tokenizer, kind, **how)
    found = check_packed(packed, method="qlora", load_in_8bit=cfg.load_in_8bit)
    assert found.status == "warn" and re.search(says, found.says) and str(found.fix) == fix


def test_a_base_whose_layers_are_others_than_linear_ones_is_reported(tokenizer, tmp_path):
    "Falcon's inherit from `nn.Linear`, and bitsandbytes replaces that class alone; a vision tower is left as it is"
    found = check_packed(in_4_bits(tmp_path/"falcon", tokenizer, "falcon")[0], method="qlora")
    assert found.status == "warn" and found.says.startswith("0.0% of the base") and str(found.fix) == "method='lora'"
    found = check_packed(in_4_bits(tmp_path/"got_ocr2", tokenizer, "got_ocr2")[0], method="qlora")
    assert found.status == "ok" and not found.says.startswith("100")


def test_routers_stay_as_they_are_in_4_bits(tokenizer, tmp_path):
    "LongCat's is a linear layer whose weight is read past the layer: packed, it would have no shape"
    packed, cfg = in_4_bits(tmp_path, tokenizer, "longcat_flash")
    assert packed.model.layers[0].mlp.router.classifier.weight.dtype == torch.float32
    scores(add_adapter(packed, tokenizer, cfg))


@pytest.fixture
def no_extras(monkeypatch):
    "As if the folder were not there"
    monkeypatch.setitem(sys.modules, "sft_nb.extras", None)
    extension.cache_clear()
    yield
    monkeypatch.undo()
    extension.cache_clear()


def test_without_the_extras_experts_stay_in_16_bits_and_routers_too(no_extras, tokenizer, tmp_path):
    plain, cfg = in_4_bits(tmp_path/"base", tokenizer, "qwen3_moe")
    found = check_packed(plain, method="qlora")
    assert found.status == "warn" and found.says.endswith("sft_nb.extras, which packs experts, is missing")
    layer = plain.model.layers[0]
    assert layer.self_attn.q_proj.weight.dtype == torch.uint8 and layer.mlp.gate.weight.dtype == torch.float32
    model = add_adapter(plain, tokenizer, cfg).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(p, std=.05)
    model.save_pretrained(tmp_path/"adapter")
    again = read_adapter(in_4_bits(tmp_path/"base", tokenizer, "qwen3_moe")[0], tmp_path/"adapter").eval()
    assert torch.equal(scores(again), scores(model))


@pytest.mark.parametrize("kind", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.soak)])
def test_a_resumed_run_with_packed_experts_ends_with_the_same_bytes(kind, tmp_path, tokenizer):
    "Killed after its second checkpoint: the experts are packed anew, to the same numbers"
    shape = tiny_config(kind, len(tokenizer))
    torch.manual_seed(0)
    auto_class(shape).from_config(shape, dtype=torch.float32).save_pretrained(tmp_path/"base")
    run = train(load_config(
        "demo", model=str(tmp_path/"base"), tokenizer="tiny", method="qlora", device="cpu", dtype="float32",
        max_samples=16, eval_samples=0, max_steps=3, save_steps=1, save_total_limit=9, per_device_train_batch_size=2,
        gradient_accumulation_steps=1, learning_rate=1e-2, preflight=False, max_new_tokens=4,
        runs_dir=str(tmp_path/"runs")))
    killed = Run(shutil.copytree(run.path, tmp_path/"runs/killed"))
    shutil.rmtree(killed.path/"checkpoints/checkpoint-3")
    shutil.rmtree(killed.adapter)
    killed.set_status("running", step=2)
    resume(killed)
    name = "adapter_model.safetensors"
    assert (killed.adapter/name).read_bytes() == (run.adapter/name).read_bytes()
    assert (run.adapter/name).read_bytes() != (run.path/"checkpoints/checkpoint-2"/name).read_bytes()
    assert any("experts" in n for n in load_file(run.adapter/name))


def test_an_adapter_keeps_the_names_it_was_saved_with(tmp_path, tokenizer):
    "transformers renames `shared_expert.` of Laguna's checkpoints; the pattern meets `shared_experts` of adapters too"
    model = adapted("laguna", tokenizer)
    model.save_pretrained(tmp_path)
    again = read_adapter(base("laguna"), tmp_path).eval()
    assert torch.equal(scores(again), scores(model))
    weights = load_file(tmp_path/"adapter_model.safetensors")
    name = next(name for name in weights if "shared_experts" in name)
    save_file({n: w for n, w in weights.items() if n != name}, tmp_path/"adapter_model.safetensors")
    with pytest.raises(SftError, match="tensors are missing.*shared_experts"): read_adapter(base("laguna"), tmp_path)


@pytest.mark.parametrize("kind", ["bart", "phi4_multimodal"])
def test_what_text_never_reaches_gets_no_adapter(kind, tokenizer):
    "A decoder without its encoder, a language model with towers: every factor has a gradient"
    model = adapted(kind, tokenizer).train()
    ids = torch.arange(3, 43).view(2, 20)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert lora_reach(model).share > .9


def full_training(tmp_path, kind:str, **how)->Run:
    tiny_config(kind, 745).save_pretrained(tmp_path/kind)
    return train(load_config("demo", **dict(
        model=str(tmp_path/kind), tokenizer="tiny", init="random", method="full", device="cpu", max_steps=3,
        max_samples=64, per_device_train_batch_size=4, learning_rate=.01, warmup_steps=0, save_steps=1,
        save_total_limit=9, eval_samples=0, preflight=False, max_new_tokens=4, runs_dir=str(tmp_path), run_name="run")
        | how))


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("granitemoehybrid", marks=pytest.mark.soak)])
def test_full_training_goes_on_with_weights_that_its_files_call_otherwise(tmp_path, kind):
    "The files of a mixture name each expert, and the model all of them together"
    run = full_training(tmp_path, kind)
    again = Run(shutil.copytree(run.path, tmp_path/"again"))
    shutil.rmtree(again.path/"checkpoints/checkpoint-3")
    shutil.rmtree(again.adapter)
    again.set_status("running", step=2)
    resume(again)
    assert (again.adapter/"model.safetensors").read_bytes() == (run.adapter/"model.safetensors").read_bytes()


def test_the_best_checkpoint_of_a_mixture_is_loaded_whole(tmp_path):
    "A rate that grows far too large: an early checkpoint is the best"
    run = full_training(tmp_path, "mixtral", load_best_model_at_end=True, eval_samples=8, eval_steps=1,
                        learning_rate=.9, warmup_steps=3)
    result = (run.adapter/"model.safetensors").read_bytes()
    scores = [line["eval_loss"] for line in run.metrics() if "eval_loss" in line]
    best = scores.index(min(scores)) + 1
    assert best < 3, scores
    assert result == (run.path/f"checkpoints/checkpoint-{best}/model.safetensors").read_bytes()
