"""Training steps of small hybrids on a CPU, the same rows padded and flattened: tokens a second, and the loss.

    OMP_NUM_THREADS=1 python benchmarks/hybrid.py

Random weights in float32, 8 layers of width 256, three of four without attention; 16 rows of the demo in a batch.
Seconds are of the CPU, so that other work on the machine counts less.
"""
import time

import torch
import transformers
from common import save
from transformers import AutoConfig, AutoModelForCausalLM

from sft_nb.batches.layout import choose_layout
from sft_nb.config.load import load_config
from sft_nb.model.attention import choose_attention
from sft_nb.model.load import quiet
from sft_nb.model.loss import add_supervised_loss, batch_loss
from sft_nb.workbench import Workbench

SIZE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
            num_hidden_layers=8, vocab_size=1000)
KINDS = dict(
    qwen3_5_text=dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
                      linear_value_head_dim=32),
    granitemoehybrid=dict(mamba_n_heads=16, mamba_d_head=32, mamba_d_state=64, shared_intermediate_size=512,
                          num_local_experts=0, num_experts_per_tok=0,
                          layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2),
    lfm2=dict(layer_types=(["conv"] * 3 + ["full_attention"]) * 2))
ROWS, TIMES = 16, 5


def measure(kind:str)->dict:
    bench = Workbench(load_config("demo", device="cpu", dtype="float32", padding_free=False))
    rows = bench.rows(list(range(ROWS)))
    tokens = sum(len(row["input_ids"]) for row in rows)
    shape = AutoConfig.for_model(kind, **SIZE | KINDS[kind])
    attention, _ = choose_attention("auto", "cpu", torch.float32, shape)
    torch.manual_seed(0)
    with quiet(): model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=attention)
    layouts = {name: choose_layout(attention, shape, bench.tokenizer, model=model, padding_free=flat)
               for name, flat in (("padded", False), ("flattened", True))}
    add_supervised_loss(model)
    batches = {name: layout.collate(rows) for name, layout in layouts.items()}
    seconds, losses = {name: [] for name in batches}, {}
    for _ in range(1 + TIMES):
        for name, batch in batches.items():
            began = time.process_time()
            total, n = batch_loss(model, batch, supervised=True)
            (total / n).backward()
            seconds[name].append(time.process_time() - began)
            losses[name] = (total / n).item()
            model.zero_grad()
    rates = {name: round(tokens / sorted(found[1:])[TIMES // 2]) for name, found in seconds.items()}
    difference = abs(losses["padded"] - losses["flattened"]) / losses["padded"]
    lengths = [len(row["input_ids"]) for row in rows]
    return dict(tokens=tokens, shortest=min(lengths), longest=max(lengths), tokens_per_cpu_second=rates,
                relative_difference_of_losses=difference)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    found = {kind: measure(kind) for kind in KINDS}
    for kind, result in found.items(): print(kind, result)
    save("hybrid", models=found)
