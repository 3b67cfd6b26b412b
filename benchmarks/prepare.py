"""How fast do rows become tokens and labels? sft_nb against TRL's own preparation, and against the tokenizer alone as the floor.

    python benchmarks/prepare.py [--json] [--times 5] [--growth]

Same rows, same tokenizer and template (Qwen3), one process, no cache, in turns. `ratio` is sft_nb / TRL and `floor` is sft_nb / encode_batch, in rows per second.
--growth prepares 10,000, 100,000 and 1,000,000 generated rows, each in a process of its own, and reports seconds and peak memory. Writes benchmarks/results/prepare.json.
"""
import argparse, json, resource, subprocess, sys, tempfile, time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from common import HERE, alternating, median_rate, save, shared, template

SETS = dict(gsm8k="data/gsm8k/train.jsonl", fastchat="data/fastchat_chat/dummy_conversation.json", glaive="data/glaive_toolcall/glaive_toolcall_en_demo.json")


def conversations(name:str)->list[list[dict]]:
    "The rows of a set as messages; tool calls as text, so that TRL can take them too"
    from sft_nb.formats import to_messages
    from sft_nb.labels import as_text
    from sft_nb.rows import read_rows
    talks = [as_text(to_messages(r)) for r in read_rows(shared(SETS[name])).values()]
    talks = [t[:1 + max(i for i, m in enumerate(t) if m["role"] == "assistant")] for t in talks]
    if len(talks) >= 5000: return talks
    numbered = lambda t, k: [t[0] | dict(content=f"{k}: {t[0]['content']}"), *t[1:]]
    return [numbered(talks[k % len(talks)], k) for k in range(5000)]   # a small set again and again: what counts is the rate, not the start


def trl_job(cfg, tokenizer, talks, folder):
    "TRL's preparation of the same conversations: prompt and completion for single turns, messages with its training template for several"
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    import huggingface_hub.constants
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    single = all(len(t) == 2 for t in talks)
    rows = [dict(prompt=t[:1], completion=t[1:]) for t in talks] if single else [dict(messages=t) for t in talks]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8))
    args = SFTConfig(output_dir=folder, max_length=cfg.max_length, assistant_only_loss=not single, report_to=[], use_cpu=True)
    def job():
        dataset = Dataset.from_list(rows)   # a fresh one: datasets finds no earlier result
        SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    return job


def compare(name:str, times:int)->dict:
    import datasets
    from sft_nb.config import load_config
    from sft_nb.data import prepare
    from sft_nb.labels import load_tokenizer
    datasets.disable_caching()
    cfg = load_config(tokenizer=str(shared("tokenizers/qwen3")), chat_template=str(template("qwen3_training.jinja")), eval_samples=0, max_length=100_000, task="chat")
    tokenizer, talks = load_tokenizer(cfg), conversations(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder)/"rows.jsonl"
        file.write_text("".join(json.dumps(dict(messages=t)) + "\n" for t in talks))
        texts = tokenizer.apply_chat_template(talks, tokenize=False)
        rows = [json.loads(l)["messages"] for l in file.open()]
        ours = lambda: prepare(load_config(**{k: getattr(cfg, k) for k in ("tokenizer", "chat_template", "eval_samples", "max_length", "task")}, train_file=str(file), cache_dir=tempfile.mkdtemp(dir=folder)), tokenizer)
        jobs = dict(encode_batch=lambda: tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False), sft_nb=ours, trl=trl_job(cfg, tokenizer, rows, folder))
        seconds = alternating(jobs, times=times)
    rate = {k: median_rate(len(talks), s) for k, s in seconds.items()}
    return dict(set=name, rows=len(talks), **{f"{k}_rows_per_second": round(v) for k, v in rate.items()}, ratio=round(rate["sft_nb"] / rate["trl"], 2), floor=round(rate["sft_nb"] / rate["encode_batch"], 3),
                seconds={k: [round(x, 3) for x in s] for k, s in seconds.items()})


def grow(n:int)->dict:
    "Prepare `n` generated rows in this process: seconds, and peak memory over what the process had before"
    from sft_nb.config import load_config
    from sft_nb.data import prepare
    from sft_nb.labels import load_tokenizer
    cfg = load_config(tokenizer=str(shared("tokenizers/qwen3")), chat_template=str(template("qwen3_training.jinja")), eval_samples=0, cache_dir=tempfile.mkdtemp())
    tokenizer = load_tokenizer(cfg)
    from sft_nb.tasks.arithmetic import make_rows
    base = make_rows(1000, seed=1, evaluation=False)
    file = Path(cfg.cache_dir)/"rows.jsonl"
    with file.open("w") as f:
        for k in range(n): f.write(json.dumps(dict(question=f"Problem {k}. " + base[k % 1000]["question"], answer=base[k % 1000]["answer"])) + "\n")
    began = time.perf_counter()
    data = prepare(load_config(tokenizer=cfg.tokenizer, chat_template=cfg.chat_template, eval_samples=0, cache_dir=cfg.cache_dir, train_file=str(file)), tokenizer)
    seconds = time.perf_counter() - began
    assert data.train.n_kept == n
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    import shutil
    shutil.rmtree(cfg.cache_dir)
    return dict(rows=n, seconds=round(seconds, 2), peak_gib=round(peak, 3), tokens=int(data.train.lengths.sum()))


def growth()->list[dict]:
    run = lambda n: json.loads(subprocess.run([sys.executable, __file__, "--grow", str(n)], check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return [run(n) for n in (10_000, 100_000, 1_000_000)]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--growth", action="store_true", help="also 10 k, 100 k and 1 M generated rows (about five minutes)")
    p.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    if a.grow: return print(json.dumps(grow(a.grow)))
    with redirect_stderr(StringIO() if a.json else sys.stderr), redirect_stdout(StringIO() if a.json else sys.stdout):
        rows = [compare(name, a.times) for name in SETS]
        grown = growth() if a.growth else json.loads((HERE/"results"/"prepare.json").read_text()).get("growth", []) if (HERE/"results"/"prepare.json").exists() else []
    result = save("prepare", ratio=rows[0]["ratio"], floor=rows[0]["floor"], sets=rows, growth=grown)
    if a.json: return print(json.dumps(result))
    print(f"{'set':<10} {'rows':>6} {'sft_nb':>9} {'trl':>9} {'encode_batch':>13}   sft_nb/trl  sft_nb/encode_batch   (rows per second, medians of {a.times})")
    for r in rows: print(f"{r['set']:<10} {r['rows']:>6,} {r['sft_nb_rows_per_second']:>9,} {r['trl_rows_per_second']:>9,} {r['encode_batch_rows_per_second']:>13,}   {r['ratio']:>9.1f}x  {r['floor']:>18.2f}x")
    for g in grown: print(f"{g['rows']:>9,} generated rows: {g['seconds']:>7.1f} s, peak {g['peak_gib']:.2f} GiB")


if __name__ == "__main__": main()
