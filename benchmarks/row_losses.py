"""What the loss of a long held-out row takes beyond the model: seconds and peak GiB, each in a process of its own.

    python benchmarks/row_losses.py [--json] [--tokens 2000 4000 8000]

Two small layers with the vocabulary of Qwen3 (151,936), and a row whose last 100 tokens are supervised. `supervised`
computes the logits of these (`sft_nb.model.loss.supervised_logits`), `all` those of the whole row, as for a model whose
head is unknown. Writes benchmarks/results/row_losses.json.
"""
import argparse
import json
import resource
import subprocess
import sys
import time

from common import save


def measure(way:str, tokens:int)->dict:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from sft_nb.model import loss
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "qwen3", vocab_size=151_936, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=tokens))
    if way == "all": loss.head_of = lambda model: None
    ids = torch.randint(3, 1000, (tokens,)).tolist()
    labels = [-100] * (tokens - 100) + ids[-100:]
    loss.row_losses(model, [(ids[:200], ids[:200])])   # the first call of a process takes longer
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    nats, _ = loss.row_losses(model, [(ids, labels)])
    seconds, peak = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return dict(way=way, tokens=tokens, seconds=round(seconds, 2), gib=round(peak / 2**20, 2), nats=float(nats[0]))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000])
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument("--way", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.way: return print(json.dumps(measure(a.way, a.tokens[0])))
    rows = []
    for tokens in a.tokens:
        for way in ("all", "supervised"):
            command = [sys.executable, __file__, "--way", way, "--tokens", str(tokens)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows.append(json.loads(printed.splitlines()[-1]))
    result = save("row_losses", rows=rows)
    if a.json: return print(json.dumps(result))
    for r in rows:
        print(f"{r['tokens']:8,} tokens  logits of {r['way']:<10}  {r['gib']:6.2f} GiB  {r['seconds']:7.2f} s")


if __name__ == "__main__": main()
