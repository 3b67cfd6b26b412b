"""Memory of a mixture of experts, planned and measured: plain LoRA, and LoRA with its experts in 4 bits.

    python benchmarks/experts.py

100 million random numbers, four layers of 16 experts, 512 random tokens on a CPU in float32. Measured are the bytes of
all tensors that are alive: weights with the scales of their quantisation, then the peak of a forward and backward pass.
"""
import json
import tempfile
import time
from dataclasses import replace

import torch
from common import HERE, processor
from transformers import AutoConfig

from sft_nb.batches.layout import BatchLengths
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.model.attention import assume_documents
from sft_nb.model.loss import Head, backbone, causal_lm, language_model
from sft_nb.model.finetuning.checkpointing import recompute_layers
from sft_nb.planning.simulate import MemoryTracker, footprint
from sft_nb.planning.memory import skeleton, static_bytes
from sft_nb.tokens.tokenizer import load_tokenizer

SHAPE = dict(vocab_size=768, hidden_size=512, intermediate_size=1024, moe_intermediate_size=1024, num_hidden_layers=4,
             num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=4)
BATCH = BatchLengths((200, 180, 132), flat=True)
DTYPE = torch.float32
MIB = 2**20


def size(t)->int: return t.numel() * t.element_size()


def weights_of(model)->int:
    "Bytes of the base, with the scales of packed weights"
    total = sum(map(size, model.buffers()))
    for p in model.parameters():
        if p.requires_grad: continue
        total += size(p)
        state = getattr(p, "quant_state", None)
        if state is None: continue
        total += size(state.absmax) + size(state.code)
        if state.nested: total += size(state.offset) + size(state.state2.absmax) + size(state.state2.code)
    return total


def peak_of(model)->tuple[int,float]:
    "Most bytes alive in a forward and backward pass, beside what was there and the gradients; and its seconds"
    inner, alive = causal_lm(model), MemoryTracker()
    inner.set_attn_implementation("varlen")
    recompute_layers(model)
    for t in (*model.parameters(), *model.buffers()): alive.add(t)
    begin, began = alive.now, time.perf_counter()
    with alive, assume_documents(*BATCH.lengths, cuda=False):
        ids = torch.randint(SHAPE["vocab_size"], (1, BATCH.tokens), generator=torch.Generator().manual_seed(0))
        reads = backbone(language_model(inner))
        hidden = reads(ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state[0]
        supervised = torch.arange(0, BATCH.tokens - 1, 2)   # half of them
        loss = Head(inner).loss(hidden[supervised], ids[0, supervised + 1], max_logits_mib=512)[0]
        forward, alive.peak = alive.peak, alive.now
        loss.backward()
    gradients = sum(size(p.grad) for p in model.parameters() if p.grad is not None)
    return max(forward - begin, alive.peak - begin - gradients), time.perf_counter() - began


def main():
    found = dict(cpu=processor(), shape=SHAPE, tokens=BATCH.tokens)
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen3_moe", **SHAPE).save_pretrained(folder)
        for method in ("lora", "qlora"):
            how = dict(model=folder, tokenizer="tiny", init="random", dtype="float32", device="cpu")
            cfg = load_config(method=method, **how)
            tokenizer = load_tokenizer(cfg)
            whole = skeleton(cfg, tokenizer, dtype=DTYPE)
            planned = static_bytes(whole, "adamw_torch")["weights"]
            step = footprint(cfg, tokenizer, BATCH, whole=whole, attention="varlen", kind="cpu", dtype=DTYPE,
                             checkpointing=True)
            model = load_model(replace(cfg, gradient_checkpointing=True), tokenizer)
            peak, seconds = peak_of(model)
            found[method] = dict(weights_planned_mib=planned / MIB, weights_measured_mib=weights_of(model) / MIB,
                                 step_planned_mib=step.peak / MIB, step_measured_mib=peak / MIB, seconds=seconds)
            print(method, {name: round(value, 1) for name, value in found[method].items()}, flush=True)
    (HERE/"results/experts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__": main()
