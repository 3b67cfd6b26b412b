"""Recomputation: attention runs once, results are unchanged, and memory is as planned."""
import gc
import weakref
from collections import deque
from weakref import ref

import pytest
import torch
from learner import small
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, model, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from sft_nb.batches.layout import BatchLengths
from sft_nb.checks.preflight import same_model
from sft_nb.config.load import load_config
from sft_nb.extras import offloading
from sft_nb.extras.offloading import offload_saved_tensors, OnHost
from sft_nb.model.finetuning import checkpointing
from sft_nb.model.adapter import load_model
from sft_nb.model.attention import announce_documents
from sft_nb.model.loss import causal_lm
from sft_nb.model.finetuning.checkpointing import (
    ATTENTION, OnDevice, parts_of, recompute_layers, recompute_parts, save_memory)
from sft_nb.planning.simulate import MemoryTracker, Pass, simulate
from sft_nb.planning.memory import skeleton
from sft_nb.base.report import ConfigError
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.arguments import check_settings
from sft_nb.training.train import train

LENGTHS = (19, 7, 38)
IDS = torch.randint(3, 768, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
AT = torch.cat([torch.arange(n) for n in LENGTHS])[None]
CU = torch.tensor([0, 19, 26, 64], dtype=torch.int32)
PLAIN = [k for k in SHAPES if k not in ("gemma2", "gpt2")]   # open scores are no one operation; positions are learned
FEW = dict(max_samples=16, per_device_train_batch_size=2, max_new_tokens=4)
THOROUGH = ("qwen3", "mistral", "gemma2")   # whose every way is tried; of the others one, and all in `make soak`


def grid(kinds, ways, one):
    "Architecture and option: every option of some architectures, one of each, and the others marked"
    return [pytest.param(kind, way, marks=[] if kind in THOROUGH or way is one else pytest.mark.soak)
            for kind in kinds for way in ways]


class Count(TorchDispatchMode):
    "Counts how often attention runs"
    n = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.n += f.name().partition(".")[0] in ATTENTION
        return f(*args, **(kwargs or {}))


def adapted(kind="qwen3", *, attention="varlen", layers=4, **how):
    how = dict(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM") | how
    torch.manual_seed(3)
    size = {"n_layer" if kind == "gpt2" else "num_hidden_layers": layers}
    base = model(kind, attention=attention, attention_dropout=0., **size).requires_grad_(False)
    return get_peft_model(base, LoraConfig(**how)).train()


def out(m)->tuple[int,list]:
    "The number of attention calls, the loss, and the gradients"
    m.zero_grad()
    torch.manual_seed(5)
    with Count() as attention, announce_documents(CU, max(LENGTHS)):
        loss = m(IDS, position_ids=AT, labels=IDS, use_cache=False).loss
        loss.backward()
    return attention.n, [loss.detach(), *(p.grad.clone() for p in m.parameters() if p.requires_grad)]


def off(got:list, want:list)->float:
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(got, want))


@pytest.mark.parametrize("kind, waiting", grid(PLAIN, [OnDevice, OnHost], OnHost))
def test_attention_runs_once_and_every_number_is_the_same(kind, waiting):
    m = adapted(kind, layers=2, lora_dropout=.2)
    once, want = out(m)
    recompute_layers(m)
    twice, again = out(m)
    recompute_layers(m, keep_attention=True, waiting=waiting)
    kept, got = out(m)
    assert once == 2 * len(LENGTHS) and (twice, kept) == (2 * once, once)
    assert all(map(torch.equal, again, want)) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_what_cannot_be_kept_is_computed_again(kind):
    m = adapted(kind, layers=2)
    want = out(m)[1]
    recompute_layers(m, keep_attention=True)
    assert all(map(torch.equal, out(m)[1], want))


def test_attention_that_draws_random_numbers_is_not_kept():
    "Or what is dropped after it would be drawn otherwise the second time"
    m = adapted(attention="sdpa", lora_dropout=.2)
    for layer in m.modules():
        if hasattr(layer, "attention_dropout"): layer.attention_dropout = .3
    want = out(m)[1]
    recompute_layers(m, keep_attention=True)
    assert all(map(torch.equal, out(m)[1], want))


def test_a_backward_pass_can_be_asked_for_twice():
    m = adapted()
    recompute_layers(m, keep_attention=True)
    loss = m(IDS, labels=IDS, use_cache=False).loss
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in m.parameters() if p.requires_grad]
    m.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip([p for p in m.parameters() if p.requires_grad], first))


def test_what_waits_in_host_memory_is_a_copy_of_its_own(monkeypatch):
    "Small things stay, with the very tensor's shape and strides"
    monkeypatch.setattr(checkpointing, "SMALL", 100)
    aside, t, small = checkpointing.KeptAttention(OnHost), torch.randn(8, 16).t(), torch.ones(3)
    aside.put((t, small, None, 7))
    assert [type(x) for x in aside.kept[0]] == [OnHost, OnDevice, type(None), int]
    was = t.clone()
    t.zero_()
    back, one, nothing, seven = aside.take()
    assert torch.equal(back, was) and back.stride() == t.stride() and torch.equal(one, small)
    assert (nothing, seven) == (None, 7)


class Bus(offloading.CopyStream):
    "Copies that run only when the computation waits for them, so that a missing wait is detected"
    def __init__(self):
        self.under_way, self.waiting, self.queue, self.most, self.ahead = deque(), deque(), deque(), 0, 0
        self.early, self.unused_bytes, self.free = 0, 0, 2**30

    def unused_memory(self): return self.free

    def start_copy(self, target, source):
        target.fill_(torch.nan if target.is_floating_point() else 0)
        self.queue.append((ended := object(), ref(target), ref(source)))
        self.most = max(self.most, len(self.queue))
        return ended

    def stop_until(self, ended):
        if not any(e is ended for e, *_ in self.queue): return   # done, with another that came later
        done = None
        while done is not ended:
            done, target, source = self.queue.popleft()
            target().copy_(source())   # both are held until now

    def fetch_ahead(self, taken):
        super().fetch_ahead(taken)
        self.ahead += sum(w().coming is not None for w in self.waiting)


def on_a_card(monkeypatch)->Bus:
    "Treat every tensor as large and on a GPU with such a bus"
    bus = Bus()
    monkeypatch.setattr(checkpointing, "SMALL", 0)
    monkeypatch.setattr(offloading, "_copy_stream", lambda device: bus)
    return bus


@pytest.mark.parametrize("how", [None, dict(), dict(keep_attention=True, waiting=OnHost)], ids=str)
def test_what_autograd_saves_waits_in_host_memory(how, monkeypatch):
    "The same gradients to the last bit, with copies beside the computation that nobody looks at too early"
    m = adapted()
    if how is not None: recompute_layers(m, **how)
    _, want = out(m)
    bus = on_a_card(monkeypatch)
    hooks = offload_saved_tensors(m)
    for left, is_early in ((2**30, False), (100, True), (100, False)):   # memory that is left after this step
        bus.free, bus.ahead = left, 0
        with hooks: _, got = out(m)
        assert all(map(torch.equal, got, want)) and (bus.ahead > 4) is is_early and (not bus.ahead) is not is_early
    assert bus.most <= bus.MOST + 1
    assert not any(w() for w in bus.waiting), "something in host memory outlives its step"


def test_a_backward_pass_that_is_broken_off_leaves_nothing_behind(monkeypatch):
    "As where memory runs out: the step begins again"
    m = adapted()
    recompute_layers(m)
    _, want = out(m)
    on_a_card(monkeypatch)
    hooks = offload_saved_tensors(m)
    def fail(gradient): raise torch.OutOfMemoryError
    with pytest.raises(torch.OutOfMemoryError), hooks:
        loss = m(IDS, labels=IDS, use_cache=False).loss
        loss.register_hook(fail)
        loss.backward()
    del loss
    with hooks: _, got = out(m)
    assert all(map(torch.equal, got, want))


def test_weights_stay_and_a_tensor_is_sent_once(monkeypatch):
    bus, m = on_a_card(monkeypatch), torch.nn.Linear(8, 8)
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    def sent(): return [w() for w in bus.waiting if w() is not None]
    with offload_saved_tensors(m):
        a = m(x)                 # the weight, and x
        assert [tuple(w.there.shape) for w in sent()] == [(4, 8)]
        b, c = x * y, y * x      # x again, and y
        assert len(sent()) == 2
        z = y * 2
        d = x * z
        assert len(sent()) == 3
        e = x * torch.ones(1, 1).expand(4, 8)   # one number
        assert len(sent()) == 3
        (a + b + c + d + e).sum().backward()
    assert torch.allclose(x.grad, m.weight.sum(0) + 4 * y + 1)
    del a, b, c, d, e
    assert not sent()


def test_a_training_whose_saved_tensors_wait_elsewhere_ends_with_the_same_weights(tmp_path, monkeypatch):
    from sft_nb.training import trainer
    how = dict(gradient_checkpointing=True, keep_attention=False, max_steps=3, **FEW)
    plain = train(small(tmp_path/"plain", **how))
    bus, made = on_a_card(monkeypatch), trainer.SupervisedTrainer.__init__
    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.offloading = offload_saved_tensors(self.model)
    monkeypatch.setattr(trainer.SupervisedTrainer, "__init__", init)
    moved = train(small(tmp_path/"moved", **how))
    files = [run.adapter/"adapter_model.safetensors" for run in (plain, moved)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert bus.early > 0, "nothing was brought back early"


def shorten(monkeypatch, fewest=8, most=5):
    "64 tokens are a long row"
    monkeypatch.setattr(checkpointing, "_FEWEST", fewest)
    monkeypatch.setattr(checkpointing, "_MOST_PARTS", most)


@pytest.mark.parametrize("kind, kept", grid(SHAPES, [None, False, True], True))
def test_parts_give_the_same_gradients(kind, kept, monkeypatch):
    shorten(monkeypatch)
    m = adapted(kind, layers=2)
    want = out(m)[1]
    if kept is not None: recompute_layers(m, keep_attention=kept)
    seen, whole = [], checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda f, x, **k: seen.append(x.shape[1]) or whole(f, x, **k))
    parts = recompute_parts(m)
    got = out(m)[1]
    assert parts.n == len(parts_of(m)) >= 4 and off(got, want) < 2e-5
    assert seen[:5] == [13, 13, 13, 13, 12]
    parts.undo()
    assert not any("forward" in vars(part) for part in parts_of(m))


@pytest.mark.parametrize("kind, method", [("gpt_oss", "qlora"), ("gpt_oss", "lora"), ("qwen3_moe", "lora")])
def test_all_experts_of_a_layer_take_a_long_row_in_parts(kind, method, tokenizer, tmp_path, monkeypatch):
    "With the adapters around them; an MLP that also returns what its router chose stays whole"
    tiny_config(kind).save_pretrained(tmp_path)
    cfg = load_config(model=str(tmp_path), tokenizer="tiny", init="random", method=method, dtype="float32",
                      device="cpu", lora_dropout=0.)
    m = load_model(cfg, tokenizer).train()
    for name, p in m.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(p, std=.05)
    def step():
        m.zero_grad()
        result = m(IDS % 40 + 3, labels=IDS % 40 + 3, use_cache=False, output_router_logits=True)
        (result.loss + result.aux_loss).backward()
        return [result.loss.detach(), *(p.grad.clone() for p in m.parameters() if p.requires_grad)]
    want, rows = step(), []
    recompute_layers(m)
    shorten(monkeypatch)
    whole = checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda f, *x, **k: rows.append(len(x)) or whole(f, *x, **k))
    recompute_parts(m)
    assert off(step(), want) < 1e-4 and max(rows) == 3   # a token, its experts and their weights
    assert not any(type(part).__name__ == "GptOssMLP" for part in parts_of(m))


def test_parts_are_for_long_rows_that_are_learned_from(monkeypatch):
    calls = []
    monkeypatch.setattr(checkpointing, "checkpoint", lambda f, x, **k: calls.append(x) or f(x))
    m = adapted()
    want = out(m)[1]
    recompute_parts(m)
    assert all(map(torch.equal, out(m)[1], want)) and not calls   # 64 tokens are no long row
    shorten(monkeypatch)
    with torch.no_grad(): m(IDS)
    m.eval()(IDS)
    assert not calls
    m.train()(IDS)
    assert calls


def test_a_module_with_other_arguments_stays_whole(monkeypatch):
    shorten(monkeypatch)

    class Scaled(torch.nn.Module):
        def forward(self, x, scale): return x if scale is None else x * scale
    x = torch.rand(64, 4, requires_grad=True)
    for scale in (None, 2., torch.tensor(2.), torch.rand(4)):
        got = checkpointing._forward_in_parts(Scaled.forward, None, Scaled().train(), x, scale)
        assert torch.equal(got, x if scale is None else x * scale)


def peak(m)->int:
    "Peak bytes of a backward pass, without those allocated before"
    with MemoryTracker() as alive, torch.autocast("cpu", torch.bfloat16):
        for p in m.parameters(): alive.add(p)
        before = alive.now
        loss = causal_lm(m).base_model(IDS.repeat(1, 16), use_cache=False).last_hidden_state.float().square().mean()
        alive.peak = alive.now
        loss.backward()
    return alive.peak - before


def test_parts_and_offloading_hold_less(monkeypatch):
    "Counted with real numbers: a wide MLP is most of what a layer holds"
    shorten(monkeypatch, fewest=64, most=16)
    torch.manual_seed(0)
    wide = get_peft_model(model("llama", attention="sdpa", intermediate_size=768).requires_grad_(False),
                          LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    recompute_layers(wide)
    whole = peak(wide)
    recompute_parts(wide)
    assert peak(wide) < .75 * whole


@pytest.mark.parametrize("how", [{}, dict(keep_attention=True), dict(recompute_parts=True), dict(keep_attention=True,
                                 recompute_parts=True)], ids=str)
def test_living_bytes_are_as_planned(how, monkeypatch):
    "Of a real step on a CPU, and of the same step without numbers"
    shorten(monkeypatch, fewest=16, most=8)
    cfg, tok = load_config(lora_dropout=0., method="lora"), load_tokenizer(load_config())
    fake = simulate(skeleton(cfg, tok, dtype=torch.float32), BatchLengths(LENGTHS, True),
                    Pass(kind="cpu", dtype=torch.float32, checkpointing=True, **how))
    real = held(cfg, tok, how)
    assert abs(fake.activations - real) < .03 * real


def held(cfg, tok, how:dict)->int:
    "Bytes alive after a real forward pass, without those allocated before"
    from sft_nb.model.adapter import load_model
    from sft_nb.planning.simulate import _forward_and_loss, _pass_context, _save_memory
    m = load_model(cfg, tok)
    inner = causal_lm(m)
    inner.set_attn_implementation("varlen")
    how = Pass("varlen", "cpu", torch.float32, checkpointing=True, **how)
    _save_memory(m, how)
    with MemoryTracker() as alive, _pass_context(m, BatchLengths(LENGTHS, True), how):
        for t in (*m.parameters(), *m.buffers()): alive.add(t)
        before = alive.now
        _loss = _forward_and_loss(inner, BatchLengths(LENGTHS, True), "varlen", torch.float32, 512)   # holds the graph
        return alive.now - before


def test_a_config_says_what_is_done_and_preflight_leaves_no_trace():
    m = adapted()
    how = dict(gradient_checkpointing=True, keep_attention=True, in_parts=True, activation_offloading=False)
    with same_model(m): assert [c.n for c in save_memory(m, **how)] == [4 + 4 * 4]   # MLPs, and four norms a layer
    assert not any("forward" in vars(part) for part in parts_of(m)) and not m.base_model.model.is_gradient_checkpointing
    for name in ("keep_attention", "recompute_parts"):
        with pytest.raises(ConfigError, match=f"{name}.*kernels is compile.*decides for itself"):
            check_settings(load_config(kernels="compile", **{name: True}))


def test_a_training_keeps_attention_and_ends_in_the_same_weights(tmp_path, monkeypatch):
    "Through train: checkpointing with and without, and without any; dropout is on"
    counts, weights = {}, {}
    dispatch = checkpointing._AttentionMode.__torch_dispatch__
    for name, how in dict(plain=dict(gradient_checkpointing=False), again=dict(keep_attention=False),
                          kept=dict(keep_attention=True)).items():
        seen = counts[name] = []
        def watch(self, f, types, args=(), kwargs=None, seen=seen):
            if f.name().partition(".")[0] in ATTENTION: seen.append(self.is_recomputation)
            return dispatch(self, f, types, args, kwargs)
        monkeypatch.setattr(checkpointing._AttentionMode, "__torch_dispatch__", watch)
        cfg = small(tmp_path, max_steps=2, **FEW, lora_dropout=.1, device="cpu", run_name=name,
                    **dict(gradient_checkpointing=True) | how)
        weights[name] = (train(cfg).path/"adapter"/"adapter_model.safetensors").read_bytes()
    assert weights["plain"] == weights["again"] == weights["kept"]
    assert not counts["plain"] and not counts["again"]
    assert counts["kept"].count(False) == counts["kept"].count(True) > 0


def test_nothing_is_held_after_the_backward_pass(monkeypatch):
    "What attention gave goes with its layer"
    asides, made = [], checkpointing.KeptAttention
    def remembered(waiting): return asides.append(weakref.ref(a := made(waiting))) or a
    monkeypatch.setattr(checkpointing, "KeptAttention", remembered)
    m = adapted()
    recompute_layers(m, keep_attention=True)
    out(m)
    gc.collect()
    assert len(asides) == 4 and not any(ref() for ref in asides)
