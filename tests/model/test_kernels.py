"""Base and adapter in one product: equal to peft where used, and peft itself elsewhere."""
import copy
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, model

from sft_nb.config.load import load_config
from sft_nb.extras import kernels
from sft_nb.model.adapter import load_model, spare_casts
from sft_nb.extras.kernels import fuse_gates, fuse_lora, fuse_norms, fuse_rotary
from sft_nb.model.loss import causal_lm
from sft_nb.model.precision import swap_forward, use_kernels

IDS = torch.randint(3, 768, (2, 19), generator=torch.Generator().manual_seed(1))


def adapted(kind="qwen3", dtype=torch.float32, **how):
    how = dict(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", bias="none") | how
    torch.manual_seed(3)
    return spare_casts(get_peft_model(model(kind, dtype=dtype).requires_grad_(False), LoraConfig(**how))).train()


def out(m, autocast=None, ids=IDS):
    "Logits and gradients of trained weights"
    m.zero_grad()
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        logits = m(ids).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.requires_grad}


def off(a, b)->float: return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def compare(m, autocast=None, **how)->tuple[int,float,float]:
    "The number of fused layers, and the differences of logits and gradients from peft's"
    want, want_grads = out(m, autocast)
    fused = fuse_lora(m, **how)
    got, grads = out(m, autocast)
    return fused.n, off(got, want), max(off(grads[n], g) for n, g in want_grads.items())


def calls(monkeypatch)->list:
    "Layers that use the fused path"
    seen, products = [], kernels._compute_products
    def noted(layers, *args): return seen.extend(layers) or products(layers, *args)
    monkeypatch.setattr(kernels, "_compute_products", noted)
    return seen


KINDS = [k for k in SHAPES if k not in ("gpt2", "opt", "bloom")]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_peft_to_a_millionth(kind):
    "Each layer by itself; layers that compute together round otherwise, so they are compared in 64 bits"
    n, logits, gradients = compare(adapted(kind), together=False)
    assert n and logits < 1e-6 and gradients < 5e-6
    n, logits, gradients = compare(adapted(kind).double())
    assert n and logits < 1e-12 and gradients < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_says_what_peft_says_to_a_millionth(kind):
    "Of the same vectors, in 32 bits, whether it computes with others or not"
    m, apart = adapted(kind), []
    def look(layer, inputs, got): apart.append(off(got, type(layer).forward(layer, *inputs)))
    fuse_lora(m)
    for layer in m.modules():
        if hasattr(layer, "reads_with"): layer.register_forward_hook(look)
    with torch.no_grad(): m(IDS)
    assert apart and max(apart) < 1e-6


@pytest.mark.parametrize("how", [
    dict(use_rslora=True), dict(lora_dropout=.3), dict(use_dora=True), dict(lora_bias=True), dict(r=1),
    dict(modules_to_save=["lm_head"]), dict(trainable_token_indices=[5, 7]), dict(init_lora_weights="pissa"),
    dict(target_modules=["q_proj"])], ids=str)
def test_equal_to_peft_whatever_the_adapter(how):
    "In 64 bits, so that nothing hides behind rounding"
    _, logits, gradients = compare(adapted(**how).double())
    assert logits < 1e-12 and gradients < 1e-11


def groups(m)->list:
    "Groups of layers that may be computed together"
    return list({id(x.reads_with): x.reads_with for x in m.modules() if getattr(x, "reads_with", None)}.values())


def test_those_that_read_the_same_vectors_read_them_once(monkeypatch):
    computed, products, m = [], kernels._compute_products, adapted()
    def compute(layers, *args):
        computed.append(len(layers))
        return products(layers, *args)
    monkeypatch.setattr(kernels, "_compute_products", compute)
    layers = fuse_lora(m).n // 7
    out(m)
    assert sorted(computed) == sorted(layers * [3, 1, 2, 1])   # q k v, o, gate up, down
    assert all(g.proven and not g.outs and g.asked is None for g in groups(m))   # nothing is held


@pytest.mark.parametrize("how", [
    dict(target_modules=["q_proj", "v_proj"]), dict(target_modules=["v_proj", "up_proj"]),
    dict(rank_pattern={"k_proj": 2, "gate_proj": 7}, alpha_pattern={"v_proj": 3}), dict(lora_dropout=.3),
    dict(exclude_modules=["k_proj"])], ids=str)
def test_together_whatever_is_adapted(how):
    _, logits, gradients = compare(adapted(**how).double())
    assert logits < 1e-12 and gradients < 1e-12


def a_group():
    "q, k and v of a layer in 64 bits, their separate results, and inputs"
    m = adapted().double()
    fuse_lora(m)
    group = groups(m)[0]
    x, y = torch.randn(2, 1, 5, group.layers[0].in_features, dtype=torch.float64)
    return group, x, y, lambda layer, x: type(layer).forward(layer, x)


def near(a, b)->bool: return off(a.detach(), b.detach()) < 1e-12


def test_in_any_order_and_of_other_vectors():
    group, x, y, alone = a_group()
    q, k, v = group.layers
    for order in ((v, q, k), (q, k, v), (q, q, k, q, v)):
        for layer in order: assert near(layer(x), alone(layer, x))
    assert group.proven
    assert near(q(x), alone(q, x)) and near(k(y), alone(k, y)) and near(v(x), alone(v, x)) and near(v(y), alone(v, y))


def test_who_reads_something_else_is_not_waited_for(monkeypatch):
    "As in an attention that looks at another text: computed for nothing once"
    group, x, y, alone = a_group()
    q, k, v = group.layers
    seen = calls(monkeypatch)
    assert near(q(x), alone(q, x)) and len(seen) == 3
    seen.clear()
    assert near(k(y), alone(k, y)) and len(seen) == 1
    for layer, z in ((v, y), (q, y), (k, x)): assert near(layer(z), alone(layer, z))
    assert len(seen) == 4 and not group.layers


def test_without_a_gradient_is_not_with_one():
    group, x, _, _ = a_group()
    q, k, _ = group.layers
    with torch.no_grad(): q(x)
    assert k(x).requires_grad


def test_an_adapter_that_is_switched_off_in_between():
    group, x, _, alone = a_group()
    q, k, v = group.layers
    q(x)
    k.enable_adapters(False)
    assert torch.equal(k(x), k.base_layer(x))
    k.enable_adapters(True)
    assert near(v(x), alone(v, x)) and near(k(x), alone(k, x)) and near(q(x), alone(q, x))


def test_one_with_a_hook_computes_for_itself():
    group, x, _, alone = a_group()
    q, k, v = group.layers
    hooked = []
    k.lora_A["default"].register_forward_pre_hook(lambda *args: hooked.append(1))
    for layer in group.layers: assert near(layer(x), alone(layer, x))
    assert len(hooked) == 2   # ours and the one that it was compared with


def errors(seed:int)->list[float]:
    "Errors of logits and gradients in mixed precision, against 64 bits: peft's two, then ours"
    ids = torch.randint(3, 768, (2, 19), generator=torch.Generator().manual_seed(seed))
    m = adapted(dtype=torch.bfloat16)
    for p in m.parameters():
        if p.requires_grad: p.data = p.data.float()
    exact, exact_grads = out(copy.deepcopy(m).double(), ids=ids)
    found = []
    for fuse in (False, True):
        if fuse: assert fuse_lora(m).n
        logits, grads = out(m, torch.bfloat16, ids=ids)
        assert all(g.dtype == torch.float32 for g in grads.values())
        apart = sum((grads[n] - g).norm() for n, g in exact_grads.items()) / sum(g.norm() for g in exact_grads.values())
        found += [((logits - exact).norm() / exact.norm()).item(), apart.item()]
    return found


def test_in_mixed_precision_as_near_to_the_truth_as_peft():
    "Over six batches: of one of them, rounding may say anything"
    logits, gradients, our_logits, our_gradients = (sum(each) for each in zip(*map(errors, range(6))))
    most = 1.4 if torch.__version__ >= (2, 13) else 1.6   # products of 16 bits on a CPU round otherwise in torch 2.11
    assert our_logits < 1.4 * logits and our_gradients < most * gradients


def test_which_layers_go_the_short_way(monkeypatch):
    seen = calls(monkeypatch)
    m = adapted()
    n = fuse_lora(m).n
    out(m)
    assert len(seen) == n
    for way in (m.disable_adapter, lambda: merged(m)):
        seen.clear()
        with way(): m(IDS)
        assert not seen
    seen.clear()
    dora = adapted(use_dora=True)
    fuse_lora(dora)
    out(dora)
    assert not seen
    m.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    m.base_model.set_adapter(["default", "second"])
    m(IDS)
    assert 0 < len(seen) < n   # not where two are at work


class merged:
    def __init__(self, m): self.m = m
    def __enter__(self): self.m.merge_adapter()
    def __exit__(self, *error): self.m.unmerge_adapter()


def test_a_hook_is_called(monkeypatch):
    "Sharded training gathers weights by hooks: a layer that has one is peft's"
    seen, hooked, m = calls(monkeypatch), [], adapted(target_modules=["q_proj"])
    n = fuse_lora(m).n
    first = next(x for x in m.modules() if hasattr(x, "lora_A") and len(x.lora_A))
    first.lora_A["default"].register_forward_pre_hook(lambda *args: hooked.append(1))
    out(m)
    assert len(seen) == n - 1 and hooked


def test_with_checkpointing_and_a_frozen_copy():
    m = adapted()
    fuse_lora(m)
    want, want_grads = out(m)
    m.enable_input_require_grads()
    causal_lm(m).gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    again = copy.deepcopy(m)
    got, grads = out(again)
    assert torch.equal(got, want) and all(torch.equal(grads[n], g) for n, g in want_grads.items())
    assert all(torch.equal(p.grad, want_grads[n]) for n, p in m.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_models_that_we_load(tokenizer, method):
    "Of a real base, in 32 and in 4 bits: the same loss to rounding as peft's own layers"
    losses = {}
    for kind in ("auto", "none"):
        m = load_model(load_config(method=method, kernels=kind, dtype="float32"), tokenizer)
        with torch.no_grad():
            for name, p in m.named_parameters():
                if "lora_B" in name: p.copy_(torch.linspace(-.02, .02, p.numel()).view_as(p))
        losses[kind], grads = out(m)
        losses[kind + " gradient"] = torch.stack([g.norm() for g in grads.values()])
    assert off(losses["auto"], losses["none"]) < 1e-5
    assert off(losses["auto gradient"], losses["none gradient"]) < 1e-5


OTHERWISE = {fuse_rotary: ("gpt2", "cohere"), fuse_gates: ("gpt2", "gemma2", "gemma3_text", "phi3")}   # they compute


@pytest.mark.parametrize("kind", list(SHAPES))
@pytest.mark.parametrize("change, exact", [(fuse_norms, 2e-5), (fuse_rotary, 2e-6), (fuse_gates, 2e-6)])
def test_fewer_operations_say_what_the_classes_say(kind, change, exact):
    "In 32 bits, and under autocast with weights in 16 and in 32 bits, as in training; other layers stay as they are"
    for dtype, autocast, near in ((torch.float32, None, exact), (torch.bfloat16, torch.bfloat16, 3e-2),
                                  (torch.float32, torch.bfloat16, 3e-2)):
        m = model(kind, dtype=dtype).train()
        with torch.no_grad():
            for name, p in m.named_parameters():   # or a weight that is left out would not be seen
                if "norm" in name: p.add_(torch.linspace(-.3, .3, len(p)).to(dtype))
        want, want_grads = out(m, autocast)
        changed = change(m)
        layers = 0 if kind in OTHERWISE.get(change, ()) else 4
        norms = sum(type(x).__name__.endswith("RMSNorm") for x in m.modules())
        assert changed.n == (norms if change is fuse_norms else layers)
        if not changed.n: continue
        got, grads = out(m, autocast)
        assert got.dtype == want.dtype and off(got.float(), want.float()) < near
        assert max(off(grads[n].float(), g.float()) for n, g in want_grads.items()) < 10 * near
        changed.undo()
        again, _ = out(m, autocast)
        assert torch.equal(again, want)


def test_a_norm_of_another_formula_is_left_alone():
    class GatedRMSNorm(torch.nn.RMSNorm):
        def forward(self, x, gate): return super().forward(x) * gate
    class HalfRMSNorm(torch.nn.RMSNorm):
        def forward(self, x): return super().forward(x) / 2
    class OtherName(torch.nn.RMSNorm): pass
    hooked = torch.nn.RMSNorm(8, eps=1e-6)
    hooked.register_forward_hook(lambda *_: None)
    kinds = [GatedRMSNorm, HalfRMSNorm, OtherName, torch.nn.LayerNorm]
    left = torch.nn.ModuleList([kind(8, eps=1e-6) for kind in kinds] + [hooked, torch.nn.RMSNorm(8)])
    assert fuse_norms(left).n == 0
    assert fuse_norms(torch.nn.ModuleList([torch.nn.RMSNorm(8, eps=1e-6)])).n == 1


def test_queries_in_any_layout_are_turned_and_keep_it():
    "As a view of one product of queries, keys and values, in two formats; the gradient too"
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as theirs
    rotate = kernels._rotation_like(theirs)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    for layout in (lambda x: x.transpose(1, 2), lambda x: x.transpose(1, 2).contiguous()):
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.randn(2, 5, 6, 8, dtype=dtype, requires_grad=True)
            results = []
            for f in (theirs, rotate):
                q, k = layout(whole[:, :, :4]), layout(whole[:, :, 4:])
                q_out, k_out = f(q, k, cos, sin)
                grad, = torch.autograd.grad(q_out.pow(2).sum() * 3 + k_out.pow(3).sum(), [whole])
                results.append((q_out, k_out, grad))
            close = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=5e-2)
            for a, b in zip(*results): torch.testing.assert_close(a, b, **close)
    whole = torch.randn(2, 5, 6, 8).transpose(1, 2)
    assert rotate(whole, whole, cos, sin)[0].transpose(1, 2).is_contiguous()   # as attention's kernel wants it
    learned = angles.clone().requires_grad_()
    rotate(whole, whole, learned.cos(), learned.sin())[0].sum().backward()
    assert learned.grad.any()
    half = cos[..., :4], sin[..., :4]   # of a part of each vector: not ours
    with pytest.raises(RuntimeError): rotate(whole, whole, *half)


def test_an_mlp_of_another_formula_is_left_alone():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
    class Doubled(Qwen3MLP):
        def forward(self, x): return 2 * super().forward(x)
    class Told(Qwen3MLP):
        def forward(self, x, more): return super().forward(x) + more
    shape = model("qwen3").config
    hooked, plain = Qwen3MLP(shape), Qwen3MLP(shape)
    hooked.register_forward_pre_hook(lambda *_: None)
    found = fuse_gates(torch.nn.ModuleList([Doubled(shape), Told(shape), hooked, plain]))
    assert found.n == 1 and "forward" in vars(plain)


def on_a_card(monkeypatch, m):
    "The changes of `auto` in a model that claims to be on a GPU"
    monkeypatch.setattr(type(m), "device", torch.device("cuda"), raising=False)
    return [r.what.split(":")[0] for r in use_kernels(m, "auto")]


POINTWISE = ["norms as one operation", "rotary positions in four operations", "gates kept once"]


def test_a_gpu_alone_has_fewer_operations(monkeypatch):
    m = adapted()
    assert [r.what.split(":")[0] for r in use_kernels(m, "auto")] == ["base and adapter in one product"]
    monkeypatch.setattr(kernels, "is_installed", lambda name: False)
    assert on_a_card(monkeypatch, m)[1:] == POINTWISE


@pytest.mark.parametrize("how, used", [("right", ["Liger's kernels"]), ("wrong", []), ("broken", [])])
def test_auto_takes_liger_where_it_is_proven(how, used, monkeypatch):
    "In Liger's place something that this machine can run"
    def put_in(model, **_):
        for m in model.modules():
            if not type(m).__name__.endswith("RMSNorm"): continue
            def forward(norm, x): return type(norm).forward(norm, x) * (1.2 if how == "wrong" else 1)
            m.forward = types.MethodType(forward, m)
        if how == "broken": raise RuntimeError("no kernel image is available for execution on the device")
    m = adapted()
    want = out(m)
    monkeypatch.setattr(kernels, "is_installed", lambda name: True)
    monkeypatch.setattr(kernels, "_liger_function", lambda: put_in)
    real = kernels.use_if_proven
    def proven_here(model, change):
        with monkeypatch.context() as here:
            here.setattr(type(model), "device", torch.device("cpu"), raising=False)
            return real(model, change)
    monkeypatch.setattr(kernels, "use_if_proven", proven_here)
    assert on_a_card(monkeypatch, m)[1:] == used + POINTWISE[bool(used):]   # Liger has the norms
    monkeypatch.undo()
    got = out(m)
    assert off(got[0], want[0]) < 1e-5 and all(off(got[1][n], g) < 1e-4 for n, g in want[1].items())


def test_what_somebody_put_into_an_attention_stays(monkeypatch):
    "A patch of the user's, a hook of accelerate's, a script; and changes on top of changes are undone"
    m, called = model("qwen3").train(), []
    attentions = [x for x in m.modules() if type(x).__name__ == "Qwen3Attention"]
    for x in attentions[:2]:
        x.forward = types.MethodType(lambda self, *a, **k: called.append(1) or type(self).forward(self, *a, **k), x)
    m.extra = torch.jit.script(torch.nn.ReLU())
    assert fuse_rotary(m).n == 2
    out(m)
    assert len(called) == 2
    m = model("qwen3").train()
    want = out(m)
    repairs = [fuse_rotary(m), swap_forward(attentions_of(m), lambda self, *a, **k: type(self).forward(
        self, *a, **k), "on top"), fuse_gates(m)]
    for repair in reversed(repairs): repair.undo()
    assert torch.equal(out(m)[0], want[0]) and not any("forward" in vars(x) for x in m.modules())


def attentions_of(m)->list: return [x for x in m.modules() if type(x).__name__ == "Qwen3Attention"]


def test_an_mlp_that_is_told_more_has_its_own_forward():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
    class Masked(Qwen3MLP):
        def forward(self, x, mask=None): return super().forward(x) * (1 if mask is None else mask)
    mlp, x = Masked(model("qwen3").config), torch.randn(2, 3, 64)
    want = mlp(x, 2.), mlp(x)
    state = torch.get_rng_state()
    assert fuse_gates(torch.nn.ModuleList([mlp])).n == 1 and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(mlp(x, 2.), want[0]) and torch.allclose(mlp(x), want[1]) and torch.equal(mlp(x=x), mlp(x))


def test_a_proof_leaves_modes_and_random_numbers_as_they_were():
    m = adapted()
    m.base_model.model.model.layers[1].eval()
    modes, state = [x.training for x in m.modules()], torch.get_rng_state()
    for change in (fuse_norms, lambda m: 1 / 0): kernels.use_if_proven(m, change)
    assert [x.training for x in m.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in m.parameters())
