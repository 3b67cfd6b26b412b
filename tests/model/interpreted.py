"""Compare Liger's kernels with the layers they replace, without a GPU: with TRITON_INTERPRET=1, print the differences
of logits and gradients of the given small models as JSON. `test_liger.py` runs it in a separate
process."""
import json
import sys

import torch
from shapes import SMALL, model
from transformers import AutoConfig, AutoModelForCausalLM

IDS = torch.randint(3, 768, (2, 9), generator=torch.Generator().manual_seed(1))
KINDS = ("qwen3", "llama", "gemma2", "phi3", "mixtral")


def out(m):
    "Logits and the gradients of all weights"
    m.zero_grad()
    logits = m(IDS).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


def off(a, b)->float: return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


def apart(got, want)->dict:
    return dict(logits=off(got[0], want[0]), gradients=max(off(got[1][n], g) for n, g in want[1].items()))


def let_floats_be_scalars():
    "Treat floats as 32-bit scalars, as on a GPU, and replace three functions of the GPU's own library"
    import numpy as np
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter
    plain = interpreter._implicit_cvt
    def converted(x):
        if type(x) is not float: return plain(x)
        return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)
    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)
    geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def small(kind:str):
    "A model of one layer; with experts, two of three are used"
    if kind != "mixtral": return model(kind, num_hidden_layers=1).train()
    shape = AutoConfig.for_model(kind, **SMALL | dict(num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape, attn_implementation="eager").train()


def compared(kind:str)->dict:
    from sft_nb.extras.kernels import use_liger
    m = small(kind)
    want = out(m)
    used = use_liger(m)
    got = out(m)
    used.undo()
    again = out(m)
    undone = torch.equal(again[0], want[0]) and all(torch.equal(again[1][n], g) for n, g in want[1].items())
    return apart(got, want) | dict(modules=used.n, undone=undone)


def as_a_run_has_it()->dict:
    "The tiny model with an adapter and checkpointing"
    from sft_nb.config.load import load_config
    from sft_nb.model.adapter import load_model
    from sft_nb.extras.kernels import fuse_lora, use_liger
    from sft_nb.model.finetuning.checkpointing import recompute_layers
    from sft_nb.tokens.tokenizer import load_tokenizer
    cfg = load_config(kernels="none", method="lora", dtype="float32")
    m = load_model(cfg, load_tokenizer(cfg)).train()
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "lora_B" in name: p.copy_(torch.linspace(-.02, .02, p.numel()).view_as(p))
    want = out(m)
    used = [fuse_lora(m), use_liger(m)]   # `use_kernels` refuses the interpreter
    recompute_layers(m)
    return apart(out(m), want) | dict(modules=[repair.what.split(":")[0] for repair in used])


if __name__ == "__main__":
    let_floats_be_scalars()
    print(json.dumps({kind: compared(kind) for kind in sys.argv[1:]} | {"a run": as_a_run_has_it()}))
