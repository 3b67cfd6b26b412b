"A small config, and helpers to inspect findings, for the tests of checks"
import copy

import torch

from sft_nb.config.load import load_config

SMALL = dict(max_samples=16, eval_samples=8, drop_duplicates=True, per_device_train_batch_size=4,
             per_device_eval_batch_size=8)
END = 2   # <|im_end|> of the tiny tokenizer


def small(**more): return load_config("demo", **SMALL | more)
def status(found)->str: return "ok" if found is None else found.status
def bad(report)->dict: return {f.check: f for f in report.findings if f.status in ("warn", "fail")}
def statuses(report)->dict: return {f.check: f.status for f in report.findings}


def save_dead(base, tokenizer, path)->str:
    "Save the base with a newly initialised <|im_end|>"
    other = copy.deepcopy(base)
    new = .02 * torch.randn(192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): other.get_input_embeddings().weight[END] = new
    other.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def save_noise(base, tokenizer, path)->str:
    "Save the base with random weights"
    noise = copy.deepcopy(base)
    with torch.no_grad():
        for name, p in noise.named_parameters():
            if "norm" not in name: p.normal_(0, .02)
    noise.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
