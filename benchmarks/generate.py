"""How fast are many answers written? sft_nb's loop against transformers' three ways.

    python benchmarks/generate.py [--json] [--times 3] [--rows 64]

The shipped base in float32 continues the demo's questions, greedily. Each answer has a length of its own, drawn once
from a log-normal distribution with the spread of GSM8K's worked answers (in words: median 49, sigma 0.53, at most
173), so that no loop is lucky with an end token. The contenders: `generate` for one prompt after the other, `generate`
for batches of 16 in the order of the file (`plain`), and `generate_batch`, transformers' continuous batching, with
torch's attention and without CUDA graphs. `ratio` is sft_nb / the fastest of them, in answers a second. All must write
the same tokens. Medians, in turns. Writes benchmarks/results/generate.json.
"""
import argparse, json

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria

from common import alternating, median_rate, save
from sft_nb.config.load import load_config
from sft_nb.batches.layout import eval_mode
from sft_nb.model.generation import Decoder, left_pad
from sft_nb.model.load import load_base
from sft_nb.tasks.core import task_of
from sft_nb.tokens.conversations import conversation, read_split
from sft_nb.tokens.encode import encode_prompts
from sft_nb.tokens.tokenizer import load_tokenizer

BATCH, LONGEST = 16, 173


class Fixed(Decoder):
    "Each answer has its length"
    def is_over(self, row): return len(self.written[row]) == self.lengths[row]


class Lengths(StoppingCriteria):
    "The same for transformers' loop: which rows are done"
    def __init__(self, n_prompt:int, lengths:list[int]):
        self.ends = torch.tensor([n_prompt + n for n in lengths])
    def __call__(self, input_ids, scores, **kwargs): return self.ends <= input_ids.shape[1]


def workload(n:int):
    "Model, tokenizer, prompts in the order of the file, and the length of each answer"
    cfg = load_config("demo", method="lora", dtype="float32", device="cpu", eval_samples=n)
    tokenizer, task = load_tokenizer(cfg), task_of(cfg)
    rows = read_split(cfg, task, "eval")
    prompts = encode_prompts([conversation(task, row, where, cfg)[:-1] for where, row in rows.items()], tokenizer)
    drawn = np.random.default_rng(0).lognormal(np.log(49), .53, len(prompts))
    return load_base(cfg, tokenizer), tokenizer, prompts, np.clip(drawn, 2, LONGEST).astype(int).tolist()


def ours(model, tokenizer, prompts, lengths)->list[list[int]]:
    decoder = Fixed(model, tokenizer, max_new_tokens=LONGEST, batch_size=BATCH)
    decoder.lengths, kept = lengths, {}
    decoder.answer = list   # the ids themselves
    with torch.no_grad(), eval_mode(model): kept = dict(decoder.answers(prompts))
    return [kept[i] for i in range(len(prompts))]


def theirs(model, tokenizer, prompts, lengths, batch:int)->list[list[int]]:
    how = GenerationConfig(do_sample=False, max_new_tokens=LONGEST, pad_token_id=tokenizer.pad_token_id, use_cache=True)
    found = []
    for at in range(0, len(prompts), batch):
        some, n = prompts[at:at + batch], lengths[at:at + batch]
        ids, mask = left_pad(some, tokenizer.pad_token_id)
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=how,
                             stopping_criteria=[Lengths(ids.shape[1], n)])
        found += [row[:k] for row, k in zip(out[:, ids.shape[1]:].tolist(), n)]
    return found


def continuous(model, tokenizer, prompts, lengths)->list[list[int]]:
    "Sized for this work: pages for all rows that are written at once, each request with its own length"
    how = GenerationConfig(do_sample=False, max_new_tokens=LONGEST, pad_token_id=tokenizer.pad_token_id,
                           eos_token_id=-1)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512, use_async_batching=False,
                                        use_cuda_graph=False)
    own_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")   # ours is none that it knows
    manager = model.init_continuous_batching(generation_config=how, continuous_batching_config=batching)
    manager.start()
    try:
        for i, (ids, n) in enumerate(zip(prompts, lengths)):
            manager.add_request(ids, request_id=str(i), max_new_tokens=n, eos_token_id=-1)
        written = {}
        while len(written) < len(prompts):
            if result := manager.get_result(timeout=60): written[int(result.request_id)] = result.generated_tokens
    finally:
        manager.stop(block=True)
        model.set_attn_implementation(own_attention)
    return [written[i] for i in range(len(prompts))]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=3)
    p.add_argument("--rows", type=int, default=64)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    work = workload(a.rows)
    model, n = work[0], a.rows
    model.generation_config.eos_token_id = None   # the lengths decide
    written = {}
    def job(name, write, *how):
        def run(): written[name] = write(*work, *how)
        return run
    jobs = dict(sft_nb=job("sft_nb", ours), one_by_one=job("one_by_one", theirs, 1), plain=job("plain", theirs, BATCH),
                generate_batch=job("generate_batch", continuous))
    seconds = alternating(jobs, times=a.times)
    assert all(tokens == written["sft_nb"] for tokens in written.values()), "the answers differ"
    rate = {name: round(median_rate(n, s), 2) for name, s in seconds.items()}
    best = max((name for name in jobs if name != "sft_nb"), key=rate.get)
    result = save("generate", ratio=round(rate["sft_nb"] / rate[best], 2), best_of_transformers=best,
                  answers=n, batch=BATCH,
                  tokens=dict(mean=round(float(np.mean(work[3])), 1), longest=max(work[3])), answers_per_second=rate)
    if a.json: return print(json.dumps(result))
    for name, r in rate.items(): print(f"{name:<16} {r:>8} answers/s")
    print(f"sft_nb: {result['ratio']}x {best}, the fastest of transformers' ways, the same tokens")


if __name__ == "__main__": main()
