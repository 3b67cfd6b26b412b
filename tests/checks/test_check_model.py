"Checks of the model: each fires on a planted defect and is quiet without it"
import copy

import pytest
import torch
from planted import save_dead, small

from sft_nb.checks import model as model_checks
from sft_nb.checks.model import check_formats, check_special_tokens, check_trainable, check_vocabulary, untrained
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.model.load import load_base
from sft_nb.tokens.prepare import prepare


@pytest.fixture(scope="module")
def data(): return prepare(small())


@pytest.fixture(scope="module")
def base(tokenizer): return load_base(load_config(method="lora"), tokenizer)


@pytest.fixture(scope="module")
def dead(base, tokenizer, tmp_path_factory): return save_dead(base, tokenizer, tmp_path_factory.mktemp("dead"))


def test_trainable(tokenizer):
    cfg, full_cfg = small(), small(method="full")
    def fresh(**more): return load_model(small(method="lora", **more), tokenizer)
    assert check_trainable(fresh(), **cfg.values(check_trainable)).status == "ok"
    for more in (dict(modules_to_save="lm_head"), dict(train_tokens="<|im_end|>")):
        assert check_trainable(fresh(**more), **cfg.values(check_trainable)).status == "ok"
    def says(model, cfg=cfg):
        found = check_trainable(model, **cfg.values(check_trainable))
        assert found.status == "fail"
        return found.says
    assert "no parameter" in says(fresh().requires_grad_(False))
    model = fresh()
    next(p for n, p in model.named_parameters() if "lora_A" in n).requires_grad_(False)
    assert "1 tensors of the adapter are frozen" in says(model)
    model = fresh()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert "of the base are trained" in says(model)
    model = fresh(lora_target_modules="q_proj")
    model.peft_config["default"].target_modules = {"q_proj", "v_proj"}
    assert "4 targeted modules have no adapter" in says(model)
    full = load_model(full_cfg, tokenizer)
    assert check_trainable(full, **full_cfg.values(check_trainable)).status == "ok"
    full.get_input_embeddings().requires_grad_(False)
    assert "1 parameters are frozen" in says(full, full_cfg)
    part_cfg = small(method="full", unfrozen_parameters="model.layers.1.")
    part = load_model(part_cfg, tokenizer)
    assert check_trainable(
        part, **part_cfg.values(check_trainable)).says.endswith("those that unfrozen_parameters names")
    part.get_input_embeddings().requires_grad_(True)
    assert "1 parameters are trained that unfrozen_parameters does not name" in says(part, part_cfg)
    part.requires_grad_(False)
    part.get_input_embeddings().requires_grad_(True)
    assert "parameters are frozen, the first is model.layers.1." in says(part, part_cfg)


def test_formats(tokenizer):
    model = load_model(small(method="lora"), tokenizer)
    assert check_formats(model, torch.float32) is None
    head = model.get_output_embeddings().weight
    head.data = head.data.bfloat16()
    assert check_formats(model, torch.float32).status == "fail"


def test_vocabulary(tokenizer, base):
    assert check_vocabulary(base, tokenizer) is None
    more = copy.deepcopy(tokenizer)
    more.add_tokens([f"<new{k}>" for k in range(40)])
    assert "785 tokens and the embedding 768" in check_vocabulary(base, more).says
    head, said = copy.deepcopy(base), copy.deepcopy(base)
    head.lm_head = torch.nn.Linear(192, 700, bias=False)
    assert "the head 700" in check_vocabulary(head, tokenizer).says
    said.config.vocab_size = 760
    assert "vocab_size 760" in check_vocabulary(said, tokenizer).says


def test_special_tokens(dead, data, tokenizer):
    def look(**more):
        cfg = small(**{"method": "lora"} | more)
        return check_special_tokens(load_model(cfg, tokenizer), tokenizer, data, **cfg.values(check_special_tokens))
    assert look() is None
    assert look(model=dead).status == "fail" and "<|im_end|>" in str(look(model=dead).fix)
    assert look(model=dead, train_tokens="<|im_end|>") is None
    # the head learns to write it; the embedding is read as it was
    assert look(model=dead, modules_to_save="lm_head").status == "warn"
    assert look(model=dead, method="full") is None
    assert look(init="random").status == "skipped"


def test_untrained_rows_by_either_sign():
    random = torch.Generator().manual_seed(0)
    weight = .1 * torch.randn(200, 64, generator=random) + .5
    weight[:20] = -1 + .01 * torch.randn(20, 64, generator=random)   # unused: a cloud of their own
    weight[100] = weight[0] + .01 * torch.randn(64, generator=random)
    weight[101] = .02 * torch.randn(64, generator=random)
    weight[102] = 0
    asked, common, cloud = [100, 101, 102, 103], list(range(120, 170)), [list(range(20))]
    assert untrained(weight, asked, unused=cloud, common=common) == [100, 101, 102]
    assert untrained(weight, asked, unused=[[0, 1]], common=common) == [101, 102]   # too few to make a cloud
    # small rows are common here, so that sign tells nothing
    assert untrained(.03 * weight, asked, unused=cloud, common=common, spread=.02) == [100]
    assert untrained(.03 * weight, asked, unused=[[]], common=common, spread=.02) is None
    assert untrained(weight, asked, unused=[[]], common=[]) is None
    assert untrained(weight, [], unused=[[]], common=common) == []


def test_special_tokens_that_cannot_be_told(data, tokenizer, monkeypatch):
    monkeypatch.setattr(model_checks, "untrained", lambda *args, **kwargs: None)
    assert check_special_tokens(load_model(small(), tokenizer), tokenizer, data).status == "skipped"
