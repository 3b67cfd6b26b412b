"""What a very long row takes: GiB and estimated speed of each way to train, by the plan. No GPU is needed, nor weights.

    python benchmarks/long_rows.py [--json] [--tokens 200000] [--card h200-141gb]

Qwen3-4B with LoRA (r 64, all linear layers), a row a pass. Every way runs on tensors without numbers
(`sft_nb.planning`). Speeds are a rough estimate, and ratios of them are what to look at: `time` is 1 for plain
checkpointing with 16 bits. Writes benchmarks/results/long_rows.json.
"""
import argparse
import json
import tempfile

from common import save

QWEN3_4B = dict(vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, head_dim=128,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1_048_576,
                tie_word_embeddings=True)
WAYS = {   # name -> what is kept, computed in parts, offloaded
    "checkpointing": (False, False, False), "attention kept": (True, False, False),
    "offloaded": (False, False, True), "attention kept, offloaded": (True, False, True),
    "attention kept, in parts, offloaded": (True, True, True)}


def planner(folder:str, tokens:int, card:str):
    from transformers import AutoConfig
    from sft_nb.config.load import load_config
    from sft_nb.model.hardware import find_device
    from sft_nb.planning.search import Planner, RowLengths
    from sft_nb.tokens.tokenizer import load_tokenizer
    AutoConfig.for_model("qwen3", **QWEN3_4B).save_pretrained(folder)
    cfg = load_config(model=folder, tokenizer="tiny", init="random", method="lora", lora_r=64, max_length=tokens,
                      per_device_train_batch_size=1, attn_implementation="varlen")
    return Planner(cfg, find_device(card), load_tokenizer(cfg), RowLengths.like([tokens]))


def measure(planner)->list[dict]:
    from sft_nb.planning.search import MemoryStrategy
    rows = []
    for method in ("lora", "qlora"):
        for name, (keep, parts, offloading) in WAYS.items():
            c = planner.candidate(MemoryStrategy(method, True, keep, parts, offloading), None)
            gib = {part: round(n / 2**30, 2) for part, n in c.parts.items()}
            rows.append(dict(method=method, way=name, gib=round(c.total / 2**30, 1), parts=gib,
                             host_gib=round(c.host / 2**30, 1), tokens_per_second=round(c.rate)))
    return [row | dict(time=round(rows[0]["tokens_per_second"] / row["tokens_per_second"], 3)) for row in rows]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=200_000)
    p.add_argument("--card", default="h200-141gb")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder: rows = measure(planner(folder, a.tokens, a.card))
    result = save("long_rows", tokens=a.tokens, card=a.card, rows=rows)
    if a.json: return print(json.dumps(result))
    print(f"one row of {a.tokens:,} tokens, Qwen3-4B, LoRA r 64, {a.card}")
    for r in rows:
        speed = f"{r['tokens_per_second']:6,} tokens/s  {r['time']:.2f}"
        there = f"{r['host_gib']:6.1f} GiB on the host" if r["host_gib"] else ""
        print(f"{r['method']:<6} {r['way']:<36} {r['gib']:6.1f} GiB  {speed}  {there}")


if __name__ == "__main__": main()
