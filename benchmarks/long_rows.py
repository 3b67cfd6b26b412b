"""What a very long row takes: GiB and estimated speed of each way to train, by the plan. No GPU is needed, nor weights.

    python benchmarks/long_rows.py [--json] [--tokens 200000] [--card h200-141gb]
    python benchmarks/long_rows.py --preparation     # seconds to prepare a row of many messages, or of much text

Qwen3-4B with LoRA (r 64, all linear layers), a row a pass. Every way runs on tensors without numbers
(`sft_nb.planning`). Speeds are a rough estimate, and ratios of them are what to look at: `time` is 1 for plain
checkpointing with 16 bits. Writes benchmarks/results/long_rows.json.

The preparation of one row by `prepare`, with the tokenizer of `tiny`: chats and agents of 50 to 20,000 messages of 60
characters, and rows of two messages with 1 and 10 MB. `most_messages` and `most_mb` leave larger rows out, for versions
whose time grows with the square.
"""
import argparse
import json
import tempfile
import time

from common import RESULTS, save

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


def chat(n:int, characters:int)->list[dict]:
    words = "word " * (characters // 5)
    return [dict(role=("user", "assistant")[k % 2], content=f"Message {k} {words}") for k in range(n)]


def agent(n:int, characters:int)->list[dict]:
    found, words = [dict(role="user", content="Do it.")], "word " * (characters // 5)
    for k in range(n // 2 - 1):
        call = dict(type="function", id=f"call{k:05}", function=dict(name="run", arguments=dict(command=f"ls {k}")))
        found += [dict(role="assistant", content=f"Step {k} {words}", tool_calls=[call]),
                  dict(role="tool", name="run", tool_call_id=f"call{k:05}", content=f"Result {words}")]
    return [*found, dict(role="assistant", content="Done.")]


def preparation(most_messages:int, most_mb:int)->list[dict]:
    "Seconds to prepare one row, and those of its tokenizer alone"
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    from sft_nb.tokens.tokenizer import load_tokenizer
    rows = [(kind.__name__, kind(n, 60)) for n in (50, 500, 1600, 5000, 20_000) if n <= most_messages
            for kind in (chat, agent)]
    rows += [("text", chat(2, mb * 500_000)) for mb in (1, 10) if mb <= most_mb]
    measured, tokenizer = [], load_tokenizer(load_config(model="tiny"))
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_config(model="tiny", max_length=10**8, eval_samples=0, cache_dir=folder)
        prepare(cfg, tokenizer, train=[dict(messages=chat(2, 60))])   # imports
        for kind, messages in rows:
            text = "\n".join(m["content"] for m in messages)
            began = time.process_time()
            tokenizer(text)
            encoded = time.process_time()
            data = prepare(cfg, tokenizer, train=[dict(messages=messages)])
            seconds = dict(cpu_seconds=round(time.process_time() - encoded, 2),
                           cpu_seconds_of_the_tokenizer=round(encoded - began, 2))
            measured.append(dict(kind=kind, messages=len(messages), megabytes=round(len(text) / 1e6, 2),
                                 tokens=int(data.train.lengths.sum())) | seconds)
    return measured


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=200_000)
    p.add_argument("--card", default="h200-141gb")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument("--preparation", action="store_true", help="measure the preparation instead")
    p.add_argument("--most-messages", type=int, default=20_000)
    p.add_argument("--most-mb", type=int, default=10)
    a = p.parse_args()
    file = RESULTS/"long_rows.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    names = ("tokens", "card", "rows", "preparation", "preparation_before")
    kept = {name: known[name] for name in names if name in known}
    if a.preparation:
        found = preparation(a.most_messages, a.most_mb)
        save("long_rows", **kept | dict(preparation=found))
        return print(json.dumps(found, indent=1))
    with tempfile.TemporaryDirectory() as folder: rows = measure(planner(folder, a.tokens, a.card))
    result = save("long_rows", **kept | dict(tokens=a.tokens, card=a.card, rows=rows))
    if a.json: return print(json.dumps(result))
    print(f"one row of {a.tokens:,} tokens, Qwen3-4B, LoRA r 64, {a.card}")
    for r in rows:
        speed = f"{r['tokens_per_second']:6,} tokens/s  {r['time']:.2f}"
        there = f"{r['host_gib']:6.1f} GiB on the host" if r["host_gib"] else ""
        print(f"{r['method']:<6} {r['way']:<36} {r['gib']:6.1f} GiB  {speed}  {there}")


if __name__ == "__main__": main()
