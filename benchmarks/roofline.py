"""Where the time of a training step goes, by the roofline of a card: products, adapter, attention, small work, loss.

    python benchmarks/roofline.py [--json] [--shape 4b] [--card h200-141gb] [--rows 8] [--tokens 1024] [--again]
                                  [--kernels auto] [--peak]

The real step runs on tensors without numbers, operation by operation (`sft_nb.planning.simulate`). Each takes as long
as its arithmetic, or as its bytes, read and written once, whichever is longer, at the rates that its kind reached on
an H200 (`MEASURED`). Nothing overlaps, and nothing is fused that PyTorch does not fuse. `host` is what Python needs to
start the operations, at 8 microseconds each; it counts only where it is more than all the rest. `--again`: with
checkpointing, attention kept. `--kernels none`: the layers of transformers and peft; `auto`: base and adapter in one
product, and norms, rotary positions and gates in fewer operations; `liger`: each as one operation. Writes
benchmarks/results/roofline.json.

`--peak` takes the rates that large operations can reach instead: 80% of the card's products, 85% of its memory, the
attention kernel's speed on long rows. The difference is what there is to gain. An H200 took, 4B, LoRA, in ms: `auto`
362 (here 354, at the peak 255), `liger` 328 (320), recomputed 506 (487): `tests/planning/test_throughput.py` compares
them. Elsewhere the rates fit less: `none` 517 (632: large operations of float32 come nearer to the memory's speed), all
weights of 0.6B 295 for 16 rows (252: narrow products are slower).
"""
import argparse
import inspect
import json
import math
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import MethodType
from unittest.mock import patch

import torch
import torch.nn.functional as F
from common import save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES = {
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128),
    "4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128),
    "8b": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128)}
VOCABULARY = 151_936
KINDS = ("products", "adapter", "attention", "pointwise", "loss")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")
FREE = frozenset(f"aten::{name}" for name in """view _unsafe_view t transpose slice select expand unsqueeze squeeze
    detach alias split permute as_strided empty empty_like empty_strided unbind reshape _reshape_alias""".split())
START = 8e-6   # seconds of Python and of the driver for an operation
# Shares of the card's figures: arithmetic (of attention: of its kernel on long rows) and memory. Measured from kernel
# to kernel on an H200, 4B, LoRA, 8 rows of 1,024 tokens: products 650 TFLOP/s; adapters, of 118 GB, 40 ms; attention
# 42 ms; small operations, of 148 GB, 71 ms; the loss 18 ms.
MEASURED = dict(products=(.657, .85), adapter=(.657, .61), attention=(.6, .85), pointwise=(.8, .435), loss=(.65, .7))
PEAK = dict.fromkeys(KINDS, (.8, .85)) | dict(attention=(1., .85))


@dataclass
class Cost:
    "Of one kind of operation"
    operations:float = 0
    flops:float = 0
    bytes:float = 0
    seconds:float = 0

    def add(self, other:"Cost", times:float = 1)->None:
        for name in vars(self): setattr(self, name, getattr(self, name) + times * getattr(other, name))


@dataclass
class Card:
    flops:float        # a second
    attention:float    # of its kernel on long rows
    bandwidth:float    # bytes a second
    rates:dict         # kind -> share of the arithmetic and of the bandwidth that it reaches
    rank:int
    lengths:tuple
    costs:dict = field(default_factory=lambda: defaultdict(Cost))


def size(t)->int: return t.numel() * t.element_size()


class Roofline(TorchDispatchMode):
    "Adds up what each operation would cost"
    def __init__(self, card:Card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        name = f.name().partition(".")[0]
        if name in FREE or name.startswith("prim::"): return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        tensors = inputs + [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if tensors: self.count(name, args, inputs, tensors)
        return out

    def count(self, name:str, args:tuple, inputs:list, tensors:list)->None:
        card, kind, flops, peak = self.card, "pointwise", 0., self.card.flops
        if name in PRODUCTS:
            a, b = args[1:3] if "add" in name else args[:2]
            flops = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * math.prod(a.shape[:-2])
            narrow = {card.rank, 2 * card.rank, 3 * card.rank}   # the A of up to three layers are one matrix
            kind = "adapter" if narrow & {*a.shape, *b.shape} else "products"
        elif "varlen_attn" in name:
            q, kind, peak = next(t for t in inputs if t.dim() == 3), "attention", card.attention
            squares = sum(n * n for n in card.lengths) / 2   # causal
            flops = (10 if "backward" in name else 4) * squares * q.shape[-2] * q.shape[-1]
        if any(VOCABULARY in t.shape for t in tensors): kind = "loss"
        moved, (arithmetic, memory) = sum(map(size, tensors)), card.rates[kind]
        card.costs[kind].add(Cost(1, flops, moved, max(flops / (arithmetic * peak), moved / (memory * card.bandwidth))))


LIBRARY = torch.library.Library("roofline", "DEF")
LIBRARY.define("fused(Tensor[] read, int[] like) -> Tensor[]")

@torch.library.register_fake("roofline::fused", lib=LIBRARY)
def fused(read, like):
    "One kernel: it reads some tensors, and writes others of the shapes of some of them"
    return [torch.empty_like(read[i]) for i in like]


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.ops.roofline.fused([x, weight], [0])[0]
    @staticmethod
    def backward(ctx, d):
        out = torch.ops.roofline.fused([d, *ctx.saved_tensors], [1, 2] if ctx.needs_input_grad[1] else [1])
        return out[0], out[1] if ctx.needs_input_grad[1] else None


class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(torch.ops.roofline.fused([q, k, cos, sin], [0, 1]))
    @staticmethod
    def backward(ctx, d_q, d_k): return *torch.ops.roofline.fused([d_q, d_k, *ctx.saved_tensors], [0, 1]), None, None


class GateAndUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.ops.roofline.fused([gate, up], [0])[0]
    @staticmethod
    def backward(ctx, d): return tuple(torch.ops.roofline.fused([d, *ctx.saved_tensors], [1, 2]))


def put_in_liger(model, **_)->None:
    "What Liger puts in, in what it reads and writes; norms are there already"
    def rotate(q, k, cos, sin, *args, **kwargs): return Rotation.apply(q, k, cos, sin)
    def mlp(m, x): return m.down_proj(GateAndUp.apply(m.gate_proj(x), m.up_proj(x)))
    inspect.getmodule(type(model)).apply_rotary_pos_emb = rotate
    for m in model.modules():
        if type(m).__name__.endswith("MLP"): m.forward = MethodType(mlp, m)


def put_in(model, kernels:str):
    "Let a model compute as with these kernels on a GPU, inside of what is returned"
    from sft_nb.extras.kernels import fuse_norms, fuse_pointwise, use_liger
    if kernels == "none": return nullcontext()
    if kernels == "auto": fuse_pointwise(model)
    else:
        fuse_norms(model)
        use_liger(model, put_in=put_in_liger)
    return patch.object(F, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight))


def run(cfg, tokenizer, batch, how, card:Card, layers:int, kernels:str)->dict:
    "Costs of a step of a model with as many layers"
    from torch._subclasses.fake_tensor import FakeTensorMode
    from sft_nb.model.load import quiet
    from sft_nb.planning import simulate as s
    from sft_nb.planning.memory import skeleton
    card = replace(card, costs=defaultdict(Cost))
    model = skeleton(cfg, tokenizer, layers=layers, attention=how.attention, dtype=how.dtype)
    with put_in(model, kernels), FakeTensorMode(), quiet():
        alive = s._prepare_model(model, how)
        with Roofline(card): s._run_pass(model, batch, how, alive)
    inner = s.causal_lm(model)
    n, chunk = s._supervised_positions(inner, batch, how.dtype, how.max_logits_mib, how.kind)
    once, card.costs["loss"] = card.costs["loss"], Cost()
    card.costs["loss"].add(once, max(1, n / min(n, 2 * chunk)))   # two of its chunks were run
    return card.costs


def whole(cfg, tokenizer, batch, how, card:Card, layers:int, kernels:str)->dict[str,Cost]:
    "Costs of a step of the whole model: what the third layer adds, as often as there are layers"
    two, three = (run(cfg, tokenizer, batch, how, card, n, kernels) for n in (2, 3))
    total = {}
    for kind in KINDS:
        total[kind] = Cost()
        total[kind].add(two[kind], 3 - layers)
        total[kind].add(three[kind], layers - 2)
    return total


def table(a)->dict:
    from transformers import AutoConfig
    from sft_nb.batches.layout import BatchLengths
    from sft_nb.config.load import load_config
    from sft_nb.model.hardware import find_device
    from sft_nb.planning.simulate import Pass
    from sft_nb.tokens.tokenizer import load_tokenizer
    shape, device, lengths = SHAPES[a.shape], find_device(a.card), (a.tokens,) * a.rows
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen3", vocab_size=VOCABULARY, tie_word_embeddings=True, **shape).save_pretrained(folder)
        cfg = load_config(model=folder, tokenizer="tiny", init="random", method=a.method, lora_r=a.rank,
                          max_length=a.tokens, kernels="none" if a.kernels == "none" else "auto")
        peak = device.tflops * 1e12
        card = Card(peak, device.attention * peak, 1e9 * device.gb_per_second, PEAK if a.peak else MEASURED, a.rank,
                    lengths)
        how = Pass(checkpointing=a.again, keep_attention=a.again)
        layers, batch = shape["num_hidden_layers"], BatchLengths(lengths, True)
        costs = whole(cfg, load_tokenizer(cfg), batch, how, card, layers, a.kernels)
    busy = sum(c.seconds for c in costs.values())
    host = START * sum(c.operations for c in costs.values())
    flops = sum(c.flops for c in costs.values())
    rows = {kind: dict(ms=round(1e3 * c.seconds, 1), share=round(c.seconds / busy, 3), operations=round(c.operations),
                       tflop=round(c.flops / 1e12, 2), gb=round(c.bytes / 1e9, 1)) for kind, c in costs.items()}
    return dict(rows=rows, ms=round(1e3 * max(busy, host), 1), card_ms=round(1e3 * busy, 1),
                host_ms=round(1e3 * host, 1), tokens_per_second=round(sum(lengths) / max(busy, host)),
                mfu=round(flops / max(busy, host) / device.tflops / 1e12, 3))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shape", choices=SHAPES, default="4b")
    p.add_argument("--card", default="h200-141gb")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--tokens", type=int, default=1024, help="of each row")
    p.add_argument("--method", choices=("lora", "qlora", "full"), default="lora")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--again", action="store_true", help="layers are computed again, but for their attention")
    p.add_argument("--kernels", choices=("none", "auto", "liger"), default="auto")
    p.add_argument("--peak", action="store_true", help="rates that large operations can reach, not the measured ones")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    asked = {k: v for k, v in vars(a).items() if k != "json"}
    result = save("roofline", asked=asked, **table(a))
    if a.json: return print(json.dumps(result))
    print(f"{a.shape} {a.method}, {a.rows} rows of {a.tokens:,} tokens on {a.card}, kernels {a.kernels}")
    for kind, r in result["rows"].items():
        print(f"{kind:<10} {r['ms']:8.1f} ms {r['share']:6.1%} {r['tflop']:9.2f} TFLOP {r['gb']:8.1f} GB"
              f" {r['operations']:7,} operations")
    print(f"{'card':<10} {result['card_ms']:8.1f} ms\n{'host':<10} {result['host_ms']:8.1f} ms")
    print(f"{result['tokens_per_second']:,} tokens/s, MFU {result['mfu']:.0%}")


if __name__ == "__main__": main()
