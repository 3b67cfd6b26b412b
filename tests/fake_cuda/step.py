"""A training step of a large model on fake CUDA tensors: what a GPU would have to do.

    LD_PRELOAD=GUARD.so python tests/fake_cuda/step.py '{"method": "qlora"}' ...   # each prints a line of JSON

The model is the `skeleton` used for planning, on a GPU that `guard.cpp` simulates. The script counts kernels and
the bytes they read and write per additional layer, host synchronisations, copies between devices, and
tensors with more elements than 32 bits can address."""
import collections
import functools
import json
import sys
import tempfile
import traceback
import types

import bitsandbytes
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig

from sft_nb.batches.layout import CollatorWithPositions, DataCollatorFlattening
from sft_nb.config.load import load_config
from sft_nb.model.finetuning.checkpointing import recompute_layers, recompute_parts
from sft_nb.model.precision import use_kernels
from sft_nb.model.loss import Head, _loss_of, _with_supervised, causal_lm
from sft_nb.model.precision import adapters_to_float32
from sft_nb.planning.memory import skeleton
from sft_nb.tokens.tokenizer import load_tokenizer

torch.cuda.is_available = lambda: True
torch.cuda.is_bf16_supported = lambda *args, **how: True
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *args: (9, 0)

QWEN3_4B = dict(vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=262_144, hidden_size=2560,
                intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive",
         "unique_dim", "bincount"}
PARTS = torch.library.Library("card", "DEF")
PARTS.define("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)")
PARTS.define("rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)")

@torch.library.register_fake("card::rms_norm", lib=PARTS)
def _(x, weight): return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)

@torch.library.register_fake("card::rms_norm_backward", lib=PARTS)
def _(gradient, x, scale, weight): return torch.empty_like(x), torch.empty_like(weight)

class RMSNorm(torch.autograd.Function):
    "RMSNorm as in a CUDA build of PyTorch: one kernel forward and one backward, which a CPU build lacks"
    @staticmethod
    def forward(ctx, x, weight):
        out, scale = torch.ops.card.rms_norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return out
    @staticmethod
    def backward(ctx, gradient): return torch.ops.card.rms_norm_backward(gradient, *ctx.saved_tensors)

def rms_norm(x, shape, weight, eps):
    "Replaces `F.rms_norm`; a CUDA build has no kernel either for mixed dtypes or under autocast"
    if not x.is_cuda: return plain_rms_norm(x, shape, weight, eps)
    assert x.dtype == weight.dtype and not torch.is_autocast_enabled("cuda")
    return RMSNorm.apply(x, weight)

plain_rms_norm, torch.nn.functional.rms_norm = torch.nn.functional.rms_norm, rms_norm
VIEWS = set("""device view _unsafe_view t transpose permute expand unsqueeze squeeze slice select alias detach
as_strided split split_with_sizes unbind reshape lift_fresh _reshape_alias unfold diagonal empty empty_like
empty_strided""".split())


class Watch(TorchDispatchMode):
    "Counts the operations on the GPU"
    def __init__(self):
        super().__init__()
        self.kernels, self.bytes = collections.Counter(), collections.Counter()
        self.waits, self.copies, self.too_large = [], [], []

    def place(self)->str:
        lines = [f for f in traceback.extract_stack() if __file__ not in f.filename and "/torch/" not in f.filename]
        return " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in lines[:-4:-1])

    def __torch_dispatch__(self, op, kinds, args=(), kwargs=None):
        kwargs, name = kwargs or {}, op.name().split("::")[1].split(".")[0]
        read = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_card = any(t.is_cuda for t in read) or str(kwargs.get("device", "")).startswith("cuda")
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            self.waits.append(self.place())
            return 1
        if on_card and name in WAITS: self.waits.append(f"{name}: {self.place()}")
        if on_card and name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.waits.append(f"a mask as an index: {self.place()}")
        out = op(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            if source.device.type != target.device.type: self.copies.append(f"{tuple(source.shape)}: {self.place()}")
        if not on_card or name in VIEWS: return out
        written = [t for t in tree_iter(out) if isinstance(t, torch.Tensor)]
        touched = {id(t): t for t in read + written if t.is_cuda}.values()
        self.kernels[name] += 1
        self.bytes[name] += sum(t.numel() * t.element_size() for t in touched)
        self.too_large += [f"{name} {tuple(t.shape)}: {self.place()}" for t in touched if t.numel() >= 2**31]
        return out


def packed(p)->torch.nn.Parameter:
    "A 4-bit weight, as bitsandbytes stores it on a GPU"
    from bitsandbytes.functional import QuantState
    blocks = p.numel() // 64
    def room(n, dtype=torch.float32): return torch.empty(n, dtype=dtype, device="cuda")
    scales = QuantState(absmax=room(-(-blocks // 256)), code=room(256), blocksize=256, dtype=torch.float32)
    state = QuantState(absmax=room(blocks, torch.uint8), shape=torch.Size(p.shape), code=room(16), blocksize=64,
                       quant_type="nf4", dtype=torch.bfloat16, offset=torch.empty((), device="cuda"), state2=scales)
    weight = torch.nn.Parameter(room((p.numel() // 2, 1), torch.uint8), requires_grad=False)
    weight.quant_state, weight.bnb_quantized = state, True
    return weight


def put_on_card(model)->None:
    "Replace meta tensors by fake CUDA tensors; tied weights stay tied"
    made = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, p in store.items():
                if p is None: continue
                four_bits = isinstance(module, bitsandbytes.nn.Linear4bit) and name == "weight"
                if p not in made and four_bits: made[p] = packed(p)
                if p not in made:
                    t = torch.empty(p.shape, dtype=p.dtype, device="cuda")
                    made[p] = torch.nn.Parameter(t, requires_grad=p.requires_grad) if store is module._parameters else t
                store[name] = made[p]
                if four_bits: module.quant_state = made[p].quant_state


def make_model(cfg, layers:int, *, kernels:str, checkpointing:bool, keep_attention:bool, parts:bool):
    "A model ready to train, as set up by `load_model` and the trainer"
    with unset_fake_temporarily(): model = skeleton(cfg, load_tokenizer(cfg), layers=layers)
    if cfg.method != "full": adapters_to_float32(model)
    put_on_card(model)
    model.train()
    with unset_fake_temporarily(): use_kernels(model, kernels)   # again, now on a GPU
    if checkpointing: recompute_layers(model, keep_attention=keep_attention)
    if parts: recompute_parts(model)
    inner = causal_lm(model)
    learns = [(inner.lm_head, "weight")] if cfg.method == "full" else []
    loss = functools.partial(_loss_of, head=Head(inner), max_logits_mib=cfg.max_logits_mib, learns=learns)
    inner.forward = types.MethodType(_with_supervised(inner, loss), inner)
    return model


def make_batch(lengths:list[int])->dict:
    "A batch as made by the trainer's collator, on the GPU"
    with unset_fake_temporarily():
        rows = [dict(input_ids=[5] * n, labels=[5] * n) for n in lengths]
        batch = CollatorWithPositions(DataCollatorFlattening())(rows)
    def moved(v): return torch.empty(v.shape, dtype=v.dtype, device="cuda") if torch.is_tensor(v) else v
    return {name: moved(v) for name, v in batch.items()}


def watch_step(cfg, layers:int, lengths:list[int], **how)->Watch:
    "Run forward and backward passes of a micro-batch as the trainer does"
    watch = Watch()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = make_model(cfg, layers, **how), make_batch(lengths)
        with watch, torch.autocast("cuda", torch.bfloat16): out = model(**batch, supervised=True, use_cache=False)
        with watch: (out.loss / out.n_tokens.clamp(min=1)).backward()
        if missing := [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]:
            raise AssertionError(f"no gradient: {missing}")
    return watch


def count(method="lora", kernels="auto", checkpointing=False, keep_attention=False, parts=False,
          lengths=(1024,) * 8, shape=None)->dict:
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen3", **QWEN3_4B | (shape or {})).save_pretrained(folder)
        cfg = load_config(model=folder, tokenizer="tiny", init="random", method=method, kernels=kernels,
                          lora_dropout=0., max_length=max(lengths))
        how = dict(kernels=kernels, checkpointing=checkpointing, keep_attention=keep_attention, parts=parts)
        two, three = (watch_step(cfg, n, list(lengths), **how) for n in (2, 3))
    added, more = three.kernels - two.kernels, three.bytes - two.bytes
    return dict(kernels=sum(added.values()), gb=round(sum(more.values()) / 1e9, 2),
                outside=sum(two.kernels.values()) - 2 * sum(added.values()), waits=three.waits, copies=three.copies,
                too_large=three.too_large, names=dict(added.most_common(16)),
                traffic={name: round(n / 1e9, 2) for name, n in more.most_common(12)})


if __name__ == "__main__":
    for how in sys.argv[1:]: print(json.dumps(count(**json.loads(how))), flush=True)
