"""One number, however it is computed."""
import json

import pytest
import torch
from shapes import ODD, SHAPES, folder, model

from sft_nb.config import load_config
from sft_nb.data import prepare
from sft_nb.loss import add_supervised_loss, head_of
from sft_nb.report import SftError
from sft_nb.train import train


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("mib", [512, 0])
def test_loss_and_gradients_are_the_models_own(kind, mib):
    ids = torch.randint(3, 768, (2, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :9], labels[1, 15:] = -100, -100
    n = int((labels[:, 1:] != -100).sum())
    plain, ours = model(kind), model(kind)
    assert add_supervised_loss(ours, max_logits_mib=mib)
    want, got = plain(ids, labels=labels).loss, ours(ids, labels=labels, supervised=True)
    want.backward()
    (got.loss / n).backward()
    assert got.n_tokens == n and got.loss.item() / n == pytest.approx(want.item(), rel=1e-5)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()): assert (p.grad - q.grad).abs().max() <= 1e-5 * max(1, p.grad.abs().max()), name


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_under_autocast(kind):
    ids = torch.randint(3, 768, (1, 20), generator=torch.Generator().manual_seed(0))
    ours = model(kind, dtype=torch.bfloat16)
    add_supervised_loss(ours)
    exact = model(kind)(ids, labels=ids).loss.item()
    with torch.autocast("cpu", torch.bfloat16): assert ours(ids, labels=ids, supervised=True).loss.item() / 19 == pytest.approx(exact, rel=2e-2)


def test_no_supervised_token_is_no_gradient_and_no_nan():
    m = model("qwen3")
    add_supervised_loss(m)
    ids = torch.arange(9)[None]
    out = m(ids, labels=torch.full_like(ids, -100), supervised=True)
    out.loss.backward()
    assert out.loss.item() == 0 == out.n_tokens and all(p.grad is None or p.grad.abs().max() == 0 for p in m.parameters())


def test_a_head_that_scales_in_secret_is_found_out():
    m = model("llama")
    plain = m.forward
    def secret(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out
    m.forward = secret
    assert head_of(m) is None and not add_supervised_loss(m)


def step(tmp_path, **how):
    cfg = load_config("demo", **dict(runs_dir=str(tmp_path), max_steps=2, logging_steps=1, max_samples=16, eval_samples=8, eval_steps=1, per_device_train_batch_size=8) | how)
    lines = train(cfg, data=prepare(cfg)).metrics()
    return [l["loss"] for l in lines if "loss" in l] + [l["eval_loss"] for l in lines if "eval_loss" in l], next(l["grad_norm"] for l in lines if "grad_norm" in l)


@pytest.mark.parametrize("how", [dict(padding_free=False), dict(attn_implementation="sdpa"), dict(attn_implementation="eager", padding_free=True), dict(max_logits_mib=1), dict(per_device_train_batch_size=4, gradient_accumulation_steps=2),
                                 dict(effective_batch_size=8, per_device_train_batch_size=2), dict(gradient_checkpointing=True), dict(method="auto", max_tokens_per_batch=4096, max_samples=8)], ids=str)
def test_every_way_through_a_step_has_the_same_loss(tmp_path, how):
    same = dict(method="lora", max_samples=8) if how.get("method") == "auto" else {}
    (want, norm), (got, other) = step(tmp_path/"a", **same), step(tmp_path/"b", **how)
    assert got[:1] + got[2:3] == pytest.approx(want[:1] + want[2:3], rel=1e-5) and other == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("flat", [True, False])
def test_prompts_that_are_learned_too(tmp_path, flat):
    "The first token of a row is predicted by nothing and counts nowhere"
    a, b = (step(tmp_path/str(p), train_on_prompt=True, padding_free=p)[0] for p in (flat, not flat))
    assert a[:1] == pytest.approx(b[:1], rel=1e-5)


def test_without_a_known_head_trls_loss_runs_and_says_the_same(tmp_path, monkeypatch):
    want, norm = step(tmp_path/"a")
    monkeypatch.setattr("sft_nb.loss.head_of", lambda model: None)
    got, other = step(tmp_path/"b")
    assert [json.loads(f.read_text())["loss"] for f in sorted(tmp_path.rglob("trainer.json"))] == ["sft_nb", "trl"]
    assert got == pytest.approx(want, rel=1e-4) and other == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("kind", list(ODD))
@pytest.mark.filterwarnings("ignore")
def test_models_whose_rows_would_read_each_other_are_padded(tmp_path, kind):
    "OPT takes positions from a mask, ALiBi distances across the border, Mamba carries a state: padded by themselves, refused where packed"
    # wide weights, so that a difference would show
    how = dict(model=folder(tmp_path, kind, **({"init_std": .3} if kind == "opt" else {"initializer_range": .3})), tokenizer="tiny", init="random", method="lora", runs_dir=str(tmp_path/"runs"), max_steps=1, max_samples=8, eval_samples=0, per_device_train_batch_size=8,
               **(dict(lora_target_modules=("in_proj", "x_proj")) if kind == "mamba" else {}))
    alone = train(load_config("demo", **how | dict(per_device_train_batch_size=1, gradient_accumulation_steps=8)))
    run = train(load_config("demo", **how))
    assert run.config.padding_free is False and json.loads((run.path/"trainer.json").read_text())["rows"] == "padded" and run.metrics()[0]["loss"] == pytest.approx(alone.metrics()[0]["loss"], rel=1e-4)
    with pytest.raises(SftError, match="reach from row to row"): train(load_config("demo", **how | dict(max_tokens_per_batch=512)))
    with pytest.raises(SftError, match="reach from row to row"): train(load_config("demo", **how | dict(padding_free=True)))
