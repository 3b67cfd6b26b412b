"""Flattened rows are processed as if each were alone; everything else is unchanged."""
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings as how, strategies as st
from shapes import SHAPES, model, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils as masks
from transformers.utils import import_utils

from sft_nb.batches.layout import CollatorWithPositions, DataCollatorFlattening, rows_stay_apart
from sft_nb.model import attention as ours
from sft_nb.model.attention import (
    choose_attention, Documents, find_documents, announce_documents, varlen_attention, window_of)
from sft_nb.model.loss import add_supervised_loss
from sft_nb.base.report import ConfigError, SftError

KINDS = [k for k in SHAPES]


def rows(lengths, seed=1):
    return torch.randint(3, 768, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
def positions(lengths): return torch.cat([torch.arange(n) for n in lengths])[None]
def alone(m, ids, lengths): return torch.cat([m(r, use_cache=False).logits for r in ids.split(lengths, 1)], 1)


def model_of(shape, dtype):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="eager").eval()


def both(kind, lengths, dtype=torch.float32, seed=1):
    "Logits and gradients: eager on each row alone, varlen on all of them flattened"
    ids, m, out = rows(lengths, seed), model(kind, dtype=dtype), []
    def flattened(): return m(ids, position_ids=positions(lengths), use_cache=False).logits
    for attention, forward in (("eager", lambda: alone(m, ids, lengths)), ("varlen", flattened)):
        m.set_attn_implementation(attention)
        m.zero_grad()
        logits = forward().float()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        grads = {n: p.grad.float().clone() for n, p in m.named_parameters() if p.grad is not None}
        out.append((logits.detach(), grads))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_eager_on_each_row_alone(kind):
    (want, want_grads), (got, grads) = both(kind, [5, 23, 1, 12])
    assert (want - got).abs().max() < 1e-5 and grads.keys() == want_grads.keys()
    assert all((grads[n] - g).abs().max() <= 1e-5 * max(1, g.abs().max()) for n, g in want_grads.items())


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gemma3_text", "phi3"])
def test_in_bfloat16_as_near_to_float32_as_eager_is(kind):
    """2e-2, or what eager itself is off by: gradients of gemma3's small queries and keys are 3e-2 off either way. Over
    four sets of rows, since rounding scatters, and otherwise on each processor"""
    apart = {}   # parameter -> squares: the gradient, eager's error, ours
    for seed in range(1, 5):
        (exact, exact_grads), _ = both(kind, [5, 23, 1, 12], seed=seed)
        (eager, eager_grads), (got, grads) = both(kind, [5, 23, 1, 12], torch.bfloat16, seed)
        assert (got - eager).norm() < 2e-2 * eager.norm()
        for n, g in exact_grads.items():
            three = torch.stack([x.norm() ** 2 for x in (g, eager_grads[n] - g, grads[n] - g)])
            apart[n] = apart.get(n, 0) + three
    for n, (size, eagers, ours_) in apart.items():
        assert (ours_ / size).sqrt() < max(2e-2, 1.3 * (eagers / size).sqrt()), n


MISTRAL = model("mistral", attention="varlen")


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6))
@how(max_examples=40, deadline=None)
def test_any_lengths(lengths):
    ids = rows(lengths)
    with torch.no_grad():
        got = MISTRAL(ids, position_ids=positions(lengths), use_cache=False).logits
        want = alone(MISTRAL, ids, lengths)
    assert (got - want).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("training", [False, True])
def test_no_gradient_crosses_a_border(kind, training):
    "Scores of the second row do not depend on the first, even with dropout in the attention"
    lengths, dropout = [6, 9, 4], dict(attention_dropout=.3)
    if kind == "gpt2": dropout = dict(attn_pdrop=.3, resid_pdrop=0., embd_pdrop=0.)
    m = model(kind, attention="varlen", **dropout).train(training)
    x = m.get_input_embeddings()(rows(lengths)).detach().requires_grad_()
    m(inputs_embeds=x, position_ids=positions(lengths), use_cache=False).logits[:, 6:15].sum().backward()
    before, inside, after = (x.grad[:, a:b].abs() for a, b in ((0, 6), (6, 15), (15, 19)))
    assert before.max() == 0 == after.max() and inside.min() >= 0 and inside.max() > 0


def test_dropout_of_the_attention_is_there_in_training_and_only_there():
    m, ids = model("qwen3", attention="varlen", attention_dropout=.5), rows([6, 9])
    say = lambda: m(ids, position_ids=positions([6, 9]), use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(say(), say())
        m.train()
        assert not torch.equal(say(), say())


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_padded_batches_on_either_side(kind):
    m, ids = model(kind), rows([12, 12])
    batch, mask = torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, 12, dtype=torch.long)
    for b, (row, n, left) in enumerate(((0, 12, 0), (0, 7, 5), (1, 7, 0), (1, 1, 3))):
        batch[b, left:left + n], mask[b, left:left + n] = ids[0, 12 * row:12 * row + n], 1
    out = []
    for attention in ("eager", "varlen"):
        m.set_attn_implementation(attention)
        at = (mask.cumsum(1) - 1).clamp(0)
        with torch.no_grad(): out.append(m(batch, attention_mask=mask, position_ids=at).logits[mask.bool()])
    assert (out[0] - out[1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gemma3_text", "gpt2"])
def test_generation_with_a_cache(kind):
    from transformers import GenerationConfig
    m, ids = model(kind), rows([9, 9])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    how = GenerationConfig(max_new_tokens=25, do_sample=False, pad_token_id=0, eos_token_id=2, use_cache=True)
    told = dict(input_ids=ids.view(2, 9) * mask, attention_mask=mask, generation_config=how)
    out = []
    for attention in ("eager", "varlen"):
        m.set_attn_implementation(attention)
        out.append(m.generate(**told).tolist())
    assert out[0] == out[1]


def test_gradient_checkpointing_changes_nothing():
    ids, lengths, grads = rows([8, 5]), [8, 5], []
    for checkpointing in (False, True):
        m = model("qwen3", attention="varlen").train()
        if checkpointing: m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        m(ids, position_ids=positions(lengths), use_cache=False).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_what_it_cannot_compute_is_refused():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(SftError, match="needs position_bias"):
        varlen_attention(None, q, q, q, None, position_bias=torch.zeros(1))
    shared = Documents(torch.tensor([0, 4]).int(), 4, None, share="a half")
    with pytest.raises(SftError, match="attention sinks.*Fix: sequence_parallel_size=1"):
        varlen_attention(None, q, q, q, shared, s_aux=torch.zeros(2))


@pytest.mark.parametrize("kind, dtype", [
    ("gpt_oss", torch.float32), ("mimo_v2_flash", torch.float32), ("granite_swa", torch.float32),
    ("granite_swa", torch.bfloat16)])   # in 16 bits, a router may choose another expert after a rounding
def test_sinks_are_those_of_eager(kind, dtype):
    "Scores and gradients, the sinks' included: eager on each row alone, varlen flattened, varlen padded"
    shape, lengths = tiny_config(kind, 768), [5, 23, 1, 12]   # windows of 7 and none
    assert choose_attention("auto", "cpu", dtype, shape)[0] == "varlen"
    m, ids, found = model_of(shape, dtype), rows(lengths), {}
    for name, p in m.named_parameters():
        if "sink" in name: torch.nn.init.normal_(p, 1, 2, generator=torch.Generator().manual_seed(1))
    at = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded = torch.zeros(at.shape, dtype=torch.long).masked_scatter(at, ids)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()   # gpt-oss gives positions to no mask
    ways = dict(eager=lambda: alone(m, ids, lengths),
                varlen=lambda: m(ids, position_ids=positions(lengths), cu_seq_lens_q=cu, use_cache=False).logits,
                padded=lambda: m(padded, attention_mask=at.long(), use_cache=False).logits[at][None])
    for way, forward in ways.items():
        m.set_attn_implementation("eager" if way == "eager" else "varlen")
        m.zero_grad()
        logits = forward().float()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found[way] = logits.detach(), {n: p.grad.float().clone() for n, p in m.named_parameters() if p.grad is not None}
    want, gradients = found["eager"]
    assert rows_stay_apart(m)
    assert any("sink" in n and g.abs().max() > 0 for n, g in gradients.items())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for way in ("varlen", "padded"):
        got, grads = found[way]
        assert (got - want).norm() < tolerance * want.norm()
        if dtype == torch.bfloat16: continue   # rounding scatters, and more so in small gradients
        for n, g in gradients.items(): assert (grads[n] - g).norm() <= 1e-4 * g.norm() + 1e-6, n


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.one_of(st.none(), st.integers(1, 12)))
@how(max_examples=80, deadline=None)
def test_documents_and_window_are_read_off_the_mask(lengths, window):
    which = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    causal = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    found = find_documents(masks.and_masks(masks.packed_sequence_mask_function(which), causal), sum(lengths))
    if window == 1: return   # each token a document of its own: the same attention, said differently
    assert found.lengths == tuple(lengths) and found.window == (window if window and window < max(lengths) else None)


@pytest.fixture
def hopper(monkeypatch):
    "An H100, as seen by transformers and `choose_attention`, without cached facts about packages"
    if any(map(find_spec, ("flash_attn", "flash_attn_interface"))): pytest.skip("a flash-attn is installed")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *a: (9, 0))
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    probes = [import_utils._package_distribution_mapping, *(flash.is_available for flash in ours._FLASH.values())]
    for probe in probes: probe.cache_clear()
    yield
    for probe in probes: probe.cache_clear()
    loaded = vars(sys)["modules"]
    for name in [name for name in loaded if name.startswith("flash_attn")]: del loaded[name]


def install(folder, monkeypatch, package:str, module:str, code:str="", version:str="2.8.3"):
    "Install a package named `package` for pip"
    name = package.replace("-", "_")
    file = folder/package/module.replace(".", "/")/"__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    about = folder/package/f"{name}-{version}.dist-info"
    about.mkdir()
    (about/"METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    (about/"top_level.txt").write_text(module.split(".")[0] + "\n")
    monkeypatch.syspath_prepend(str(folder/package))


def chosen(wanted="auto", dtype=torch.bfloat16)->tuple[str, str]:
    return choose_attention(wanted, "cuda", dtype, AutoConfig.for_model("qwen3"))


PACKAGES = dict(flash_attention_2=("flash-attn", "flash_attn"),
                flash_attention_3=("flash-attn-3", "flash_attn_interface"),
                flash_attention_4=("flash-attn-4", "flash_attn.cute"))


@pytest.mark.parametrize("name", PACKAGES)
def test_flash_attention_is_taken_where_it_is(name, hopper, monkeypatch, tmp_path):
    assert chosen() == ("varlen", "auto: PyTorch's own variable-length kernel")
    missing = f"needs the package {PACKAGES[name][0]}, which is not installed"
    with pytest.raises(ConfigError, match=missing): chosen(name)
    for probe in ours._FLASH.values(): probe.is_available.cache_clear()
    import_utils._package_distribution_mapping.cache_clear()

    install(tmp_path, monkeypatch, *PACKAGES[name])
    assert chosen(name) == (name, "requested")
    auto = name if name == "flash_attention_3" else "varlen"   # PyTorch's kernel is that of version 2
    assert chosen()[0] == auto
    soft = choose_attention("auto", "cuda", torch.bfloat16, AutoConfig.for_model("gemma2"))   # its scores have a cap
    assert soft[0] == ("varlen" if name == "flash_attention_4" else name)   # not in the folder that 4 shares with 2
    assert chosen(dtype=torch.float32)[0] == "varlen"
    if name == "flash_attention_4":
        with pytest.raises(ConfigError, match="needs the package flash-attn, which"): chosen("flash_attention_2")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *a: (7, 5))
    assert chosen()[0] == "varlen"


def test_flash_attention_that_cannot_be_imported_is_not_taken(hopper, monkeypatch, tmp_path):
    broken = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"
    install(tmp_path, monkeypatch, "flash-attn", "flash_attn", broken)
    name, reason = chosen()
    assert name == "varlen" and "flash-attn cannot be imported (ImportError: flash_attn_2_cuda.so: undefined" in reason
    with pytest.raises(ConfigError, match="cannot be imported.*undefined symbol.*Fix: attn_implementation='auto'"):
        chosen("flash_attention_2")


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "gemma3_text"])
def test_what_the_collator_says_is_what_the_mask_says(kind):
    "Equal logits, and no mask is asked"
    lengths = [5, 23, 1, 12]
    ids, m = rows(lengths), model(kind, attention="varlen")
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    asked = []
    with torch.no_grad():
        want = m(ids, position_ids=positions(lengths), use_cache=False).logits
        with pytest.MonkeyPatch.context() as patch, announce_documents(cu, 23):
            patch.setattr(ours, "find_documents", lambda *args: asked.append(1) or find_documents(*args))
            got = m(ids, position_ids=positions(lengths), use_cache=False).logits
    assert torch.equal(got, want) and not asked


def test_lengths_that_the_host_knows_are_not_asked_of_the_device():
    "On GPUs before Ampere each document is computed separately, in every layer, in the forward pass and again"
    lengths, asked = [5, 23, 1, 12], []
    ids, m = rows(lengths), model("qwen3", attention="varlen").train()
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    class Borders(torch.Tensor):
        def diff(self):
            asked.append(1)
            return super().diff()
    cu = torch.tensor([0, *lengths]).cumsum(0).int().as_subclass(Borders)
    for known in (None, lengths):
        asked.clear()
        with announce_documents(cu, 23, lengths=known):
            m(ids, position_ids=positions(lengths), use_cache=False).logits.sum().backward()
        assert len(asked) == (0 if known else 2 * 4)
    batch = CollatorWithPositions(DataCollatorFlattening())([dict(input_ids=[5] * n, labels=[5] * n) for n in lengths])
    add_supervised_loss(m)
    asked.clear()
    m(**batch | dict(cu_seq_lens_q=cu), supervised=True).loss.backward()   # as the trainer calls it
    assert batch["document_lengths"] == tuple(lengths) and not asked


def test_the_window_of_every_mask_that_is_known_is_the_one_that_is_found():
    at, T = positions([9, 4, 11]), 24
    packed = masks.find_packed_sequence_indices(at)
    def made(f):
        now = getattr(masks, "packed_sequence_compatibility_function", None)
        if now: return now(f, at, packed)
        return masks.and_masks(f, masks.packed_sequence_mask_function(packed))   # transformers 5.17
    for f in (masks.causal_mask_function, *(masks.sliding_window_causal_mask_function(w) for w in (2, 7, 10))):
        assert window_of(made(f)) == find_documents(made(f), T).window
    chunked = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    for f in (chunked, masks.bidirectional_mask_function,
              masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(packed)), lambda *at: at[0] >= 0):
        assert window_of(made(f)) is False


@pytest.fixture
def kernel(monkeypatch):
    "A stand-in for PyTorch's kernel, computed by its definition; records its arguments"
    import torch.nn.attention.varlen as stock
    seen = []
    def played(q, k, v, cu, cu_k, longest, longest_k, *, scale, window_size, **how):
        assert q.shape[-1] % 8 == 0, "the kernel takes multiples of 8"
        seen.append(q.shape[1])
        groups = q.shape[1] // k.shape[1]
        docs = Documents(cu, longest, None if window_size[0] < 0 else window_size[0] + 1)
        q, k, v = q.transpose(0, 1)[None], *(x.transpose(0, 1)[None].repeat_interleave(groups, 1) for x in (k, v))
        return ours._attend_to_each_document(q, k, v, docs, scale=scale, dropout=0., softcap=None)[0].transpose(0, 1)
    monkeypatch.setattr(stock, "varlen_attn", played)
    monkeypatch.setattr(ours, "_flash_can_compute", lambda *args: True)
    return seen


@pytest.mark.parametrize("size, most, calls", [(16, 2**31, [8]), (16, 30_000, [4, 4]), (16, 1, [2] * 4),
                                              (20, 2**31, [8]), (12, 1, [2] * 4)])
def test_heads_are_called_in_groups_that_the_kernel_can_address(kernel, monkeypatch, size, most, calls):
    "8 heads in 4 groups, 40 tokens in 3 documents; equal to one call on each document"
    monkeypatch.setattr(ours, "_MOST", most)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 40, size, generator=draw, dtype=torch.float64, requires_grad=True) for h in (8, 4, 4))
    docs = Documents(torch.tensor([0, 7, 30, 40]).int(), 23, 9)
    want = ours._attend_to_each_document(q, k, v, docs, scale=.3, dropout=0., softcap=None)
    want_grads = torch.autograd.grad(want.square().sum(), (q, k, v))
    got = ours._attend_by_flash(q, k, v, docs, .3)
    assert kernel == calls and torch.allclose(got, want)
    assert all(map(torch.allclose, torch.autograd.grad(got.square().sum(), (q, k, v)), want_grads))


@pytest.mark.parametrize("window, sinks", [(None, False), (9, False), (9, True)])
def test_a_long_document_with_a_window_is_computed_in_blocks_of_linear_memory(window, sinks, monkeypatch):
    "Equal to one mask for all, forward and backward; no mask has more columns than a block and its window"
    monkeypatch.setattr(ours, "_FEWEST_QUERIES", 16)
    draw, seen = torch.Generator().manual_seed(0), []
    q, k, v = (torch.randn(1, h, 61, 8, generator=draw, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    def attend(q, k, v, mask):
        seen.append(k.shape[2])
        return ours._attention_from_scores(q, k, v, mask, scale=.3, dropout=0., softcap=None)
    at = torch.arange(61)
    mask = at <= at[:, None]
    if window: mask = mask & ((at > at[:, None] - window) | (sinks & (at == 0)))
    results = []
    for out in (attend(q, k, v, mask), ours._attend_in_blocks(attend, q, k, v, window, sinks=sinks)):
        results.append([out, *torch.autograd.grad(out.sin().sum(), [q, k, v])])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results))
    assert max(seen[1:]) <= (61 if window is None else 16 + window - 1 + sinks)


@pytest.mark.parametrize("dtype, size, flash, window, repeated", [
    (torch.bfloat16, 64, True, None, False), (torch.float32, 64, True, None, True),
    (torch.bfloat16, 64, False, None, True),
    (torch.bfloat16, 512, True, None, True), (torch.bfloat16, 64, True, 3, True)])
def test_keys_are_repeated_where_no_kernel_reads_groups(dtype, size, flash, window, repeated, monkeypatch):
    "On a T4, in float32, with heads of 512 and with a window: PyTorch would compute all scores otherwise"
    seen, stock = [], F.scaled_dot_product_attention
    def counted(q, k, v, *, enable_gqa, **how):
        seen.append((k.shape[1], enable_gqa))
        return stock(q, k, v, enable_gqa=enable_gqa, **how)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q, k, v = (torch.randn(1, h, 9, size, dtype=dtype) for h in (8, 2, 2))
    docs, how = Documents(torch.tensor([0, 4, 9]).int(), 5, window), dict(scale=.1, dropout=0., softcap=None)
    with ours.assume_documents(4, 5, cuda=True, flash=flash):
        there = ours._attend_to_each_document(q, k, v, docs, **how)
    assert seen == [(8, False) if repeated else (2, True)] * 2
    here = ours._attend_to_each_document(q, k, v, docs, **how)
    assert seen[2:] == [(2, True)] * 2 and torch.allclose(there, here, rtol=.02, atol=.02)


@pytest.fixture
def untried(monkeypatch):
    "Nothing was tried in this process"
    monkeypatch.setattr(ours, "_FASTEST", {})
    ours._try_kernels.cache_clear()
    yield
    ours._try_kernels.cache_clear()


@pytest.mark.usefixtures("untried")
def test_every_kernel_of_a_cpu_is_right():
    for kind in ("qwen3", "mistral", "gpt_oss", "deepseek_v3", "mamba", "gemma3_text"):
        for dtype in (torch.float32, torch.bfloat16):
            assert ours.try_attention("cpu", dtype, AutoConfig.for_model(kind)) == ""
    assert not ours._FASTEST


def fails(*args, **how): raise RuntimeError("no kernel image is available")
def crosses_borders(q, k, v, docs, scale):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
def forgets_gradients(q, k, v, mask, **how):
    return F.scaled_dot_product_attention(q, k, v.detach() + 0 * v, is_causal=True, enable_gqa=True)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("flash, sdpa, says, fastest", [
    (fails, None, "its variable-length kernel fails (RuntimeError: no kernel image is available): scaled_dot_", "sdpa"),
    (crosses_borders, None, "its variable-length kernel is off by", "sdpa"),
    (crosses_borders, forgets_gradients, "scaled_dot_product_attention is off by 100%: the definition", "scores")])
def test_the_fastest_kernel_that_is_right_is_used_and_the_others_are_named(flash, sdpa, says, fastest, monkeypatch):
    calls = []
    def counted(f): return lambda *args, **how: calls.append(f) or f(*args, **how)
    monkeypatch.setattr(ours, "_flash_can_compute", lambda *args: True)
    monkeypatch.setattr(ours, "_attend_by_flash", counted(flash))
    if sdpa: monkeypatch.setattr(ours, "_attend_by_sdpa", counted(sdpa))
    m = model("qwen3", attention="varlen").eval()
    name, reason = choose_attention("auto", "cpu", torch.float32, m.config)
    assert name == "varlen" and says in reason and "head size 16" in reason
    assert set(ours._FASTEST.values()) == {fastest}
    assert choose_attention("varlen", "cpu", torch.float32, m.config)[1] == "requested" + reason[reason.index(";"):]
    calls.clear()
    lengths = [5, 23, 1, 12]
    ids = rows(lengths)
    with torch.no_grad():
        got = m(ids, position_ids=positions(lengths), use_cache=False).logits
        m.set_attn_implementation("eager")
        want = alone(m, ids, lengths)
    assert not calls and torch.allclose(got, want, atol=1e-5)
