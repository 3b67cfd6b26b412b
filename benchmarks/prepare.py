"""How fast do rows become tokens and labels? sft_nb against TRL's own preparation, with the tokenizer as the floor.

    python benchmarks/prepare.py [--json] [--times 5] [--growth] [--without-trl]

Same rows, same tokenizer and template (Qwen3), no cache, in turns; TRL in one process and in two
(`dataset_num_proc=2`). `ratio` is sft_nb / the faster of these and `floor` is sft_nb / encode_batch, in rows a second.
--growth prepares 10,000, 100,000 and 1,000,000 generated rows, each in a process of its own, and reports seconds and
peak memory. Writes benchmarks/results/prepare.json. --without-trl leaves TRL out, which takes nine tenths of the time,
and writes nothing.
"""
import argparse, json, resource, shutil, subprocess, sys, tempfile, time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from common import HERE, alternating, median_rate, save, shared, template

SETS = dict(gsm8k="data/gsm8k/train.jsonl",
            fastchat="data/fastchat_chat/dummy_conversation.json",
            glaive="data/glaive_toolcall/glaive_toolcall_en_demo.json")
TINY = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=8)


def conversations(name:str)->list[list[dict]]:
    "The rows of a set as messages; tool calls as text, so that TRL can take them too"
    from sft_nb.rows.readers import to_messages
    from sft_nb.tokens.template import as_text
    from sft_nb.rows.sources import read_rows
    talks = [as_text(to_messages(r)) for r in read_rows(shared(SETS[name])).values()]
    talks = [t[:1 + max(i for i, m in enumerate(t) if m["role"] == "assistant")] for t in talks]
    if len(talks) >= 5000: return talks
    def numbered(t, k): return [t[0] | dict(content=f"{k}: {t[0]['content']}"), *t[1:]]
    return [numbered(talks[k % len(talks)], k) for k in range(5000)]   # repeated: the rate counts, not the start


def trl_job(cfg, tokenizer, talks, folder, processes=None):
    "TRL's preparation of the same conversations: prompt and completion for single turns, else messages"
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    import huggingface_hub.constants
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    single = all(len(t) == 2 for t in talks)
    rows = [dict(prompt=t[:1], completion=t[1:]) for t in talks] if single else [dict(messages=t) for t in talks]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), **TINY))
    args = SFTConfig(output_dir=folder, max_length=cfg.max_length, assistant_only_loss=not single, report_to=[],
                     use_cpu=True, dataset_num_proc=processes)
    def job():
        dataset = Dataset.from_list(rows)   # a fresh one: datasets finds no earlier result
        SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    return job


def qwen3()->dict:
    "Tokenizer, template, and no held-out rows"
    return dict(tokenizer=str(shared("tokenizers/qwen3")), chat_template=str(template("qwen3_training.jinja")),
                eval_samples=0)


def compare(name:str, times:int, with_trl:bool=True)->dict:
    import datasets
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    from sft_nb.tokens.tokenizer import load_tokenizer
    datasets.disable_caching()
    said = dict(qwen3(), max_length=100_000, task="chat")
    cfg = load_config(**said)
    tokenizer = load_tokenizer(cfg)
    talks = conversations(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder)/"rows.jsonl"
        file.write_text("".join(json.dumps(dict(messages=t)) + "\n" for t in talks))
        texts = tokenizer.apply_chat_template(talks, tokenize=False)
        rows = [json.loads(line)["messages"] for line in file.open()]
        def floor(): tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        def ours():
            empty = tempfile.mkdtemp(dir=folder)
            prepare(load_config(**said, train_file=str(file), cache_dir=empty), tokenizer)
        jobs = dict(encode_batch=floor, sft_nb=ours)
        if with_trl: jobs |= dict(trl=trl_job(cfg, tokenizer, rows, folder),
                                  trl_2=trl_job(cfg, tokenizer, rows, folder, processes=2))
        seconds = alternating(jobs, times=times)
    rate = {k: median_rate(len(talks), s) for k, s in seconds.items()}
    ratio = dict(ratio=round(rate["sft_nb"] / max(rate["trl"], rate["trl_2"]), 2)) if with_trl else {}
    return dict(set=name, rows=len(talks), **{f"{k}_rows_per_second": round(v) for k, v in rate.items()}, **ratio,
                floor=round(rate["sft_nb"] / rate["encode_batch"], 3),
                seconds={k: [round(x, 3) for x in s] for k, s in seconds.items()})


def grow(n:int)->dict:
    "Prepare `n` generated rows in this process: seconds, and peak memory over what the process had before"
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    from sft_nb.tokens.tokenizer import load_tokenizer
    cfg = load_config(**qwen3(), cache_dir=tempfile.mkdtemp())
    tokenizer = load_tokenizer(cfg)
    from sft_nb.tasks.arithmetic import TASK
    base = TASK.make_rows(1000, seed=1, evaluation=False)
    file = Path(cfg.cache_dir)/"rows.jsonl"
    with file.open("w") as f:
        for k in range(n):
            row = base[k % 1000]
            f.write(json.dumps(dict(question=f"Problem {k}. {row['question']}", answer=row["answer"])) + "\n")
    began = time.perf_counter()
    data = prepare(load_config(**qwen3(), cache_dir=cfg.cache_dir, train_file=str(file)), tokenizer)
    seconds = time.perf_counter() - began
    assert data.train.n_kept == n
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shutil.rmtree(cfg.cache_dir)
    return dict(rows=n, seconds=round(seconds, 2), peak_gib=round(peak, 3), tokens=int(data.train.lengths.sum()))


def growth()->list[dict]:
    "Three sizes, each in a process of its own"
    def run(n):
        call = [sys.executable, __file__, "--grow", str(n)]
        return json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return [run(n) for n in (10_000, 100_000, 1_000_000)]


def grown_before()->list[dict]:
    "What was measured last time"
    file = HERE/"results"/"prepare.json"
    return json.loads(file.read_text()).get("growth", []) if file.exists() else []


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--growth", action="store_true", help="also 10 k, 100 k and 1 M generated rows (about five minutes)")
    p.add_argument("--without-trl", action="store_true", help="sft_nb against encode_batch alone; writes no results")
    p.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    if a.grow: return print(json.dumps(grow(a.grow)))
    with redirect_stderr(StringIO() if a.json else sys.stderr), redirect_stdout(StringIO() if a.json else sys.stdout):
        rows = [compare(name, a.times, with_trl=not a.without_trl) for name in SETS]
        grown = growth() if a.growth else grown_before()
    if a.without_trl:
        if a.json: return print(json.dumps(dict(floor=rows[0]["floor"], sets=rows)))
        for r in rows:
            print("{set:<10} {rows:>6,} rows: sft_nb {sft_nb_rows_per_second:,} rows/s, encode_batch "
                  "{encode_batch_rows_per_second:,}: {floor:.2f}x".format(**r))
        return
    result = save("prepare", ratio=rows[0]["ratio"], floor=rows[0]["floor"], sets=rows, growth=grown)
    if a.json: return print(json.dumps(result))
    print(f"rows per second, medians of {a.times}")
    print(f"{'set':<10} {'rows':>6} {'sft_nb':>9} {'trl':>9} {'trl (2)':>9} {'encode_batch':>13}   "
          "sft_nb/trl  sft_nb/encode_batch")
    line = ("{set:<10} {rows:>6,} {sft_nb_rows_per_second:>9,} {trl_rows_per_second:>9,} "
            "{trl_2_rows_per_second:>9,} "
            "{encode_batch_rows_per_second:>13,}   {ratio:>9.1f}x  {floor:>18.2f}x")
    for r in rows: print(line.format(**r))
    for g in grown: print(f"{g['rows']:>9,} generated rows: {g['seconds']:>7.1f} s, peak {g['peak_gib']:.2f} GiB")


if __name__ == "__main__": main()
