"""The loss is the same however it is computed."""
import json

import pytest
import torch
import transformers
import torch.nn.functional as F
from learner import learner
from packaging.version import Version
from shapes import ODD, SHAPES, folder, model, short_rows

from sft_nb.config.load import load_config
from sft_nb.tokens.prepare import prepare
from sft_nb.batches.layout import DataCollatorFlattening, DataCollatorForCausalLM
from sft_nb.model import loss as loss_module
from sft_nb.extras.cpu_cross_entropy import blockwise_cross_entropy
from sft_nb.model.loss import add_supervised_loss, batch_loss, chunk_size, head_of
from sft_nb.planning.simulate import MemoryTracker
from sft_nb.base.report import SftError
from sft_nb.training.train import train
from sft_nb.workbench import Workbench


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
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * max(1, p.grad.abs().max()), name


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_under_autocast(kind):
    ids = torch.randint(3, 768, (1, 20), generator=torch.Generator().manual_seed(0))
    ours = model(kind, dtype=torch.bfloat16)
    add_supervised_loss(ours)
    exact = model(kind)(ids, labels=ids).loss.item()
    with torch.autocast("cpu", torch.bfloat16): loss = ours(ids, labels=ids, supervised=True).loss.item()
    assert loss / 19 == pytest.approx(exact, rel=2e-2)
    total, n = batch_loss(ours, dict(input_ids=ids, labels=ids), dtype=torch.bfloat16, supervised=True)
    assert (total.item(), n) == (loss, 19)


def test_no_supervised_token_is_no_gradient_and_no_nan():
    m = model("qwen3")
    add_supervised_loss(m)
    ids = torch.arange(9)[None]
    out = m(ids, labels=torch.full_like(ids, -100), supervised=True)
    out.loss.backward()
    assert out.loss.item() == 0 == out.n_tokens
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in m.parameters())


def test_a_head_that_scales_in_secret_is_found_out():
    m = model("llama")
    plain = m.forward
    def secret(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * 1.1
        return out
    m.forward = secret
    assert head_of(m) is None and not add_supervised_loss(m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_a_model_masks_hides_no_secret_of_its_head(dtype):
    "Next to a logit of -1e4 and less, what the others differ by looked like rounding"
    m = model("llama", dtype=dtype)
    head, factor = m.get_output_embeddings(), [1.]
    def mask(scores): return scores.index_fill(-1, torch.tensor([5]), -3e38)
    head.register_forward_hook(lambda module, args, scores: mask(scores))
    plain = m.forward
    def secret(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = mask(out.logits * factor[0])
        return out
    m.forward = secret
    assert head_of(m) is not None
    factor[0] = 1.1
    assert head_of(m) is None


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_the_loss_of_a_batch_is_the_same_in_every_layout_and_either_way(kind, tokenizer):
    "The model's own mean times its tokens, ours as a sum; flattened, padded, and row by row; the mode is left alone"
    draw = torch.Generator().manual_seed(0)
    rows = [dict(input_ids=(ids := torch.randint(3, 768, (n,), generator=draw).tolist()), labels=[-100] * 3 + ids[3:])
            for n in (9, 17, 5)]
    m = model(kind, attention="varlen").train()
    assert add_supervised_loss(m)
    pad, flatten = DataCollatorForCausalLM(tokenizer, 8), DataCollatorFlattening(False)
    alone = [batch_loss(m, flatten([r]), supervised=True) for r in rows]
    total, n = (sum(x).item() for x in zip(*alone))
    assert n == 6 + 14 + 2 and m.training
    for batch in (pad(rows), flatten(rows)):
        for supervised in (True, False):
            got, many = batch_loss(m, batch, supervised=supervised)
            assert got.requires_grad and many == n and got.item() == pytest.approx(total, rel=1e-5)


def step(tmp_path, **how):
    "Losses of two steps and of an evaluation, and the first norm of the gradient"
    small = dict(max_steps=2, logging_steps=1, max_samples=16, eval_samples=8, eval_steps=1)
    small |= dict(per_device_train_batch_size=8, preflight=False) | learner() | dict(max_new_tokens=1)
    cfg = load_config("demo", **small | dict(runs_dir=str(tmp_path)) | how)
    lines = train(cfg, data=prepare(cfg)).metrics()
    found = {name: [line[name] for line in lines if name in line] for name in ("loss", "eval_loss", "grad_norm")}
    return found["loss"] + found["eval_loss"], found["grad_norm"][0]


WAYS = [
    dict(padding_free=False, gradient_checkpointing=True),
    dict(attn_implementation="sdpa", per_device_train_batch_size=4, gradient_accumulation_steps=2),
    dict(attn_implementation="eager", padding_free=True, max_logits_mib=1),
    dict(effective_batch_size=8, per_device_train_batch_size=2),
    dict(method="auto", max_tokens_per_batch=4096, max_samples=8),
]

@pytest.fixture(scope="module")
def usual(tmp_path_factory): return step(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_every_way_through_a_step_has_the_same_loss(tmp_path, usual, how):
    (want, norm), (got, other) = usual, step(tmp_path/"b", **how)
    if how.get("method") == "auto": want, norm = step(tmp_path/"a", method="lora", max_samples=8)
    assert got[:1] + got[2:3] == pytest.approx(want[:1] + want[2:3], rel=1e-5)
    assert other == pytest.approx(norm, rel=1e-3)


def test_prompts_that_are_learned_too(tmp_path):
    "The first token of a row is predicted by nothing and counts nowhere"
    a, b = (step(tmp_path/str(p), train_on_prompt=True, padding_free=p)[0] for p in (True, False))
    assert a[:1] == pytest.approx(b[:1], rel=1e-5)


def test_a_workbench_that_is_made_for_an_evaluation_has_the_loss_of_any_other(tmp_path):
    "Of a head with trained rows, too"
    folder(tmp_path, "qwen3_moe")
    cfg = load_config("demo", model=str(tmp_path/"qwen3_moe"), tokenizer="tiny", init="random", method="lora",
                      device="cpu", train_tokens=("<|im_end|>",))
    losses = []
    for learns in (True, False):
        with torch.set_grad_enabled(learns):
            bench = Workbench(cfg)
            losses.append(bench.loss(bench.layout.collate(bench.rows([0, 1]))).item())
    assert losses[0] == losses[1]


def test_without_a_known_head_trls_loss_runs_and_says_the_same(tmp_path, usual, monkeypatch):
    want, norm = usual
    monkeypatch.setattr("sft_nb.model.loss.head_of", lambda model: None)
    got, other = step(tmp_path/"b")
    assert [json.loads(f.read_text())["loss"] for f in tmp_path.rglob("trainer.json")] == ["trl"]
    assert got == pytest.approx(want, rel=1e-4) and other == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("kind", list(ODD))
@pytest.mark.filterwarnings("ignore")
def test_models_whose_rows_would_read_each_other_are_padded(tmp_path, kind):
    "ALiBi reaches across the border, Mamba carries a state: padded, or refused; the loss is that of each row by itself"
    if kind == "falcon" and Version(transformers.__version__) >= Version("5.24"):
        pytest.skip("since 5.24 transformers gives Falcon's mask the positions, and its rows stay apart")
    wide = {"init_std" if kind == "opt" else "initializer_range": .3}   # weights with which a difference would show
    how = dict(
        model=folder(tmp_path, kind, **wide), tokenizer="tiny", init="random", method="lora", max_steps=1,
        runs_dir=str(tmp_path/"runs"), max_samples=8, eval_samples=0, per_device_train_batch_size=8, preflight=False,
        max_new_tokens=1)
    if kind == "mamba": how |= dict(lora_target_modules=("in_proj", "x_proj"), **short_rows(tmp_path, 8))
    alone = train(load_config("demo", **how | dict(per_device_train_batch_size=1, gradient_accumulation_steps=8)))
    run = train(load_config("demo", **how))
    assert run.metrics()[0]["loss"] == pytest.approx(alone.metrics()[0]["loss"], rel=1e-4)
    if kind == "opt": return   # takes positions from a mask only where it is given none: flattened
    assert run.config.padding_free is False
    assert json.loads((run.path/"trainer.json").read_text())["rows"] == "padded"
    for asked in (dict(max_tokens_per_batch=512), dict(padding_free=True)):
        with pytest.raises(SftError, match="reach across rows"): train(load_config("demo", **how | asked))


# 16 bits

def in_16_bits(sure, dtype, factor):
    "Hidden vectors close to their targets' rows, a head, targets"
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 48, generator=chance)
    targets = torch.randint(0, 300, (80,), generator=chance)
    hidden = sure * weight[targets] / factor + .05 * torch.randn(80, 48, generator=chance)
    return hidden.to(dtype), weight.to(dtype), targets


def gradients(loss_of, *leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(loss_of(*leaves), leaves)


def far(got, exact): return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1, .25])
@pytest.mark.parametrize("sure", [0, .1, .2, .4])
def test_what_is_nearly_sure_is_learned_as_exactly_as_by_pytorch(sure, factor, dtype):
    "At a probability of 0.9999 the gradient is small, and not lost"
    hidden, weight, targets = in_16_bits(sure, dtype, factor)
    def plain(h, w): return F.cross_entropy((factor * h @ w.T).float(), targets, reduction="sum")
    def ours(h, w): return loss_module._ChunkedLinear.apply(h, w, targets, factor, 13)[0]
    exact = gradients(plain, hidden.double(), weight.double())
    for a, b, want in zip(gradients(ours, hidden, weight), gradients(plain, hidden, weight), exact):
        assert far(a, want) <= 1.2 * far(b, want) + 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weights_gradient_from_factors_in_16_bits(dtype, monkeypatch):
    "As a card adds it: products of 16-bit factors, in float32"
    hidden, weight, targets = in_16_bits(.1, dtype, 1)
    def ours(h, w): return loss_module._ChunkedLinear.apply(h, w, targets, 1, 13)[0]
    want, addmm, calls = gradients(ours, hidden, weight)[1], torch.addmm, []

    def on_a_card(total, a, b, *, out_dtype, out):
        calls.append(a.dtype)
        return addmm(total, a.float(), b.float(), out=out)
    monkeypatch.setattr(torch, "addmm", on_a_card)
    monkeypatch.setattr(loss_module, "adds_to_float32", lambda *_: True)
    got = gradients(ours, hidden, weight)[1]
    assert calls == [dtype] * 7 and torch.equal(got, want)


@pytest.mark.parametrize("wrong", [RuntimeError, TypeError, "zero", "rounded", None])
def test_a_product_that_is_wrong_is_not_used(wrong, monkeypatch):
    "Also where it only forgets what was there, or rounds it to 16 bits"
    addmm = torch.addmm

    def on_a_card(total, a, b, *, out_dtype=None, out=None):
        if out_dtype is None: return addmm(total, a, b)
        if isinstance(wrong, type): raise wrong("no such product")
        start = dict(zero=0 * total, rounded=total.to(a.dtype).float()).get(wrong, total)
        return out.copy_(addmm(start, a.float(), b.float()))
    monkeypatch.setattr(torch, "addmm", on_a_card)
    arange, full = torch.arange, torch.full
    monkeypatch.setattr(torch, "arange", lambda *a, device: arange(*a))
    monkeypatch.setattr(torch, "full", lambda *a, device: full(*a))
    found = loss_module.adds_to_float32.__wrapped__(torch.device("cuda"), torch.bfloat16)
    assert found is (wrong is None)


# a vocabulary in blocks

def in_float64(hidden, weight, targets, factor=1):
    "Loss, gradient of the hidden vectors, and how many targets have the highest score"
    h = hidden.double().requires_grad_()
    scores = factor * h @ weight.double().T
    loss = F.cross_entropy(scores, targets, reduction="sum")
    return loss.item(), torch.autograd.grad(loss, h)[0], int((scores.argmax(-1) == targets).sum())


@pytest.mark.parametrize("vocabulary", [5, 512, 513, 1536, 2000])
@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("factor", [1, -.3])
def test_blocks_are_the_whole(vocabulary, chunk, factor):
    draw = torch.Generator().manual_seed(vocabulary)
    weight, hidden = torch.randn(vocabulary, 24, generator=draw), torch.randn(40, 24, generator=draw)
    targets = torch.randint(0, vocabulary, (40,), generator=draw)
    targets[:2] = torch.tensor([0, vocabulary - 1])   # the borders
    hidden[2:9] = factor * 2 * weight[targets[2:9]]   # some are right
    want, gradient, n = in_float64(hidden, weight, targets, factor)
    h = hidden.requires_grad_()
    loss, right = blockwise_cross_entropy(h, weight, targets, factor=factor, chunk=chunk)
    got, = torch.autograd.grad(3 * loss, h)
    assert loss.item() == pytest.approx(want, rel=1e-6) and right.item() == n > 0
    assert far(got, 3 * gradient) < 2e-6
    with torch.no_grad(): assert blockwise_cross_entropy(h, weight, targets, factor=factor, chunk=chunk)[0] == loss


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_blocks_of_very_different_scores(order):
    "What was summed up fades to nothing where a later block is far higher, and the other way around"
    steps = torch.arange(1600.).div(512, rounding_mode="floor")
    weight = 500 * (steps if order == "rising" else 3 - steps)[:, None].expand(-1, 4).clone()
    weight += torch.randn(1600, 4, generator=torch.Generator().manual_seed(0))
    hidden, targets = torch.full((4, 4), .25).requires_grad_(), torch.tensor([3, 600, 1100, 1599])
    want, gradient, n = in_float64(hidden.detach(), weight, targets)
    loss, right = blockwise_cross_entropy(hidden, weight, targets, chunk=3)
    assert loss.item() == pytest.approx(want, rel=1e-6) and right.item() == n
    assert far(torch.autograd.grad(loss, hidden)[0], gradient) < 1e-5


@pytest.mark.parametrize("tied", [(0, 1), (510, 511, 512, 513), (3, 1199), (700, 1100)])
def test_of_tied_targets_the_first_is_right(tied):
    "As `argmax` has it, in blocks and in one piece"
    weight = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    weight[list(tied)] = 2.
    hidden, targets = torch.ones(len(tied), 8), torch.tensor(tied)
    assert (hidden @ weight.T).argmax(-1).tolist() == [tied[0]] * len(tied)
    assert blockwise_cross_entropy(hidden, weight, targets)[1] == 1
    assert loss_module.chunked_cross_entropy(hidden, targets, lambda h: h @ weight.T)[1] == 1
    assert loss_module._ChunkedLinear.apply(hidden, weight, targets, 1, 2)[1] == 1


@pytest.mark.parametrize("target", [600, 1100])
def test_blocks_of_scores_that_are_minus_infinity(target):
    "A vocabulary whose first block is masked, or all of it but the target, has a loss and a gradient"
    for closed in (slice(0, 512), [k for k in range(1200) if k != target]):
        weight = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0)) / 4
        weight[closed, 0] = -torch.inf
        hidden, targets = torch.ones(2, 8).requires_grad_(), torch.tensor([target, target])
        want = F.cross_entropy(torch.ones(2, 8) @ weight.T, targets, reduction="sum")
        loss, _ = blockwise_cross_entropy(hidden, weight, targets, chunk=1)
        assert loss.item() == pytest.approx(want.item(), rel=1e-6, abs=1e-6)


def test_blocks_and_numbers_that_are_none():
    weight, targets = torch.randn(1200, 8), torch.tensor([5, 1100])
    for wrong in (torch.nan, torch.inf):
        for row in (0, 700, 1199):
            bad = weight.clone()
            bad[row, 0] = wrong
            loss, _ = blockwise_cross_entropy(torch.ones(2, 8), bad, targets, chunk=7)
            assert not loss.isfinite()
    none, right = blockwise_cross_entropy(torch.ones(0, 8).requires_grad_(), weight, targets[:0], chunk=7)
    none.backward()
    assert none == right == 0


WIDE = dict(vocab_size=5000)


@pytest.mark.parametrize("kind", ["qwen3", "granite"])
@pytest.mark.parametrize("mib", [512, 0])
def test_a_frozen_head_of_a_large_vocabulary_never_has_all_scores(kind, mib):
    "Equal to the model's own loss, in a hundredth of the memory of its scores"
    ids = torch.randint(3, 5000, (2, 300), generator=torch.Generator().manual_seed(0))
    plain, ours = model(kind, **WIDE), model(kind, **WIDE)
    for m in (plain, ours): m.get_output_embeddings().requires_grad_(False)
    head = head_of(ours)
    assert head.in_blocks(torch.float32, "cpu") and add_supervised_loss(ours, max_logits_mib=mib)
    want, got = plain(ids, labels=ids).loss, ours(ids, labels=ids, supervised=True)
    want.backward()
    (got.loss / 598).backward()
    assert got.loss.item() / 598 == pytest.approx(want.item(), rel=1e-6)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters()):
        if p.requires_grad: assert (p.grad - q.grad).abs().max() <= 1e-5 * max(1, p.grad.abs().max()), name
    hidden, alive = torch.randn(598, 64, requires_grad=True), MemoryTracker()
    with alive: head.loss(hidden, ids.reshape(-1)[:598], max_logits_mib=1)
    assert alive.peak < 598 * 5000 * 4 / 4


def test_what_does_not_go_in_blocks():
    wide = head_of(model("qwen3", **WIDE))
    assert not wide.in_blocks(torch.float32, "cpu")   # it learns
    wide.layer.requires_grad_(False)
    assert wide.in_blocks(torch.float32, "cpu")
    assert wide.in_blocks(torch.bfloat16, "cpu") and not wide.in_blocks(torch.float16, "cpu")
    assert not wide.in_blocks(torch.float32, "cuda") and not wide.in_blocks(torch.bfloat16, "cuda")
    bent, small = head_of(model("gemma2", **WIDE)), head_of(model("qwen3"))
    for head in (bent, small):
        head.layer.requires_grad_(False)
        assert not head.in_blocks(torch.float32, "cpu")


def test_rows_of_a_chunk_whose_vocabulary_passes_by_in_blocks_do_not_depend_on_the_vocabulary():
    head = head_of(model("qwen3", **WIDE))
    head.layer.requires_grad_(False)
    sizes = [head.chunk(torch.float32, "cpu", mib) for mib in (1, 64)]
    assert sizes == [512, 2048]   # 4 bytes for each of 512 tokens; never more than fit the cache
    head.layer.weight = torch.nn.Parameter(torch.empty(151_936, 64, device="meta"), requires_grad=False)
    assert [head.chunk(torch.float32, "cpu", mib) for mib in (1, 64)] == sizes
    assert chunk_size(151_936, 64) == 110
