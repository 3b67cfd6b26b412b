"""Train a tiny random model of each causal type of transformers, and report what works.

    python scripts/families.py                                  # every type
    python scripts/families.py qwen3_moe gpt_oss                # only these
    python scripts/families.py --out families.json --jobs 2     # keep results of earlier calls in the file
    python scripts/families.py --only four_bit qwen3_moe        # one column of one type; keep the others
    python scripts/families.py --out families.json --page benchmarks/results/families.json   # train nothing

Each type runs in its own process with a time limit. A column holds the measured value, or the reason for a failure.
"""
import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from tiny_shapes import KINDS, NO_CONFIG, tiny_config

from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.model.adapter import lora_reach
from sft_nb.batches.layout import eval_mode
from sft_nb.model.generation import generate
from sft_nb.model.load import auto_class, load_base, packed_share, quiet
from sft_nb.model.loss import causal_lm
from sft_nb.base.report import Report, error_summary
from sft_nb.proof.merge import merge
from sft_nb.runs.directory import Run
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import resume, train
from sft_nb.workbench import Workbench

LATE = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "matplotlib.pyplot", "networkx", "pandas", "peft",
        "peft.tuners.lora", "scipy.stats", "sympy", "torch._dynamo", "torch._subclasses.fake_tensor",
        "transformers.generation.utils", "transformers.integrations.moe", "transformers.trainer",
        "trl.trainer.sft_trainer", "wandb", "sft_nb.training.trainer")
COLUMNS = ("config", "preflight", "plan", "rows", "apart", "lora", "four_bit", "trains", "cache", "resume", "merge")


class Family:
    "A tiny model of one type in a folder, and the experiments with it"
    def __init__(self, kind:str, folder:Path):
        self.kind, self.folder, self.results = kind, folder, {}
        self.run:Run|None = None

    def settings(self, **more):
        base = dict(
            model=str(self.folder/"model"), tokenizer="tiny", method="lora", device="cpu", dtype="float32",
            max_samples=32, max_steps=3, save_steps=1, save_total_limit=9, logging_steps=1, eval_samples=2,
            per_device_train_batch_size=4, gradient_accumulation_steps=1, max_new_tokens=8, sample_steps=2,
            learning_rate=1e-3, runs_dir=str(self.folder/"runs"), run_name="run")
        return load_config("demo", **base | more)

    def config(self)->str:
        tokenizer = load_tokenizer(load_config(model="tiny"))
        shape = tiny_config(self.kind, len(tokenizer))
        torch.manual_seed(0)
        with quiet():
            model = auto_class(shape).from_config(shape, dtype=torch.float32)
            with torch.no_grad():   # weights initialised to zero are not zero in a trained model
                for p in model.parameters():
                    if not p.any(): p.normal_(std=.02)
            model.save_pretrained(self.folder/"model")
        self.bench = Workbench(self.settings())
        return f"{sum(p.numel() for p in model.parameters()):,}"

    def preflight(self)->str:
        report = preflight(self.bench)
        found = [f for f in report.findings if f.status in ("fail", "warn")]
        self.findings = [dict(status=f.status, check=f.check, says=f.says, fix=str(f.fix or "")) for f in found]
        self.results["findings"] = self.findings
        failed = [f for f in found if f.status == "fail"]
        if failed: raise RuntimeError("; ".join(f"{f.check}: {f.says}" for f in failed))
        return ", ".join(f.check for f in found) or "ready"

    def plan(self)->str:
        plan = self.bench.plan
        if plan is None: raise RuntimeError(self.bench.no_plan)
        return f"{plan.total / 2**20:.0f} MiB"

    def rows(self)->str: return self.bench.layout.name

    def apart(self)->str:
        "Relative difference between our loss of a batch and stock transformers' loss, row by row"
        bench = self.bench
        bench.make("model", "layout")
        rows = bench.rows([0, 1, 2, 3, 4])
        long = {name: [i for row in bench.rows([5, 6, 7]) for i in row[name]] for name in ("input_ids", "labels")}
        rows.append(long)   # longer than any window or convolution
        with eval_mode(bench.model), torch.no_grad(): ours = bench.loss(bench.layout.collate(rows)).item()
        with quiet(): stock = auto_class(bench.model.config).from_pretrained(self.folder/"model", dtype=torch.float32)
        total, n = 0., 0
        for row in rows:
            with torch.no_grad(): logits = stock.eval()(torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
            labels = torch.tensor(row["labels"])[1:]
            total += torch.nn.functional.cross_entropy(logits[:-1].float(), labels, reduction="sum").item()
            n += int((labels != -100).sum())
        return f"{abs(ours - total / n) / (total / n):.1e}"

    def lora(self)->str:
        "Share of the weights used by text, without embeddings and head, that an adapter covers"
        return f"{lora_reach(self.bench.model).share:.1%}"

    def four_bit(self)->str:
        "Share of the matrices stored in 4 bits"
        return f"{packed_share(load_base(self.settings(method='qlora'), self.bench.tokenizer))[0]:.1%}"

    def trains(self)->str:
        self.bench.close()
        self.run = train(self.settings(preflight=False))
        losses = [m["loss"] for m in self.run.metrics() if "loss" in m]
        if self.run.state != "finished": raise RuntimeError(self.run.state)
        return f"{len(losses)} steps"

    def cache(self)->str:
        "Compare greedy answers with the cache, alone and in a batch, to answers without"
        model = self.bench.trained(self.run.adapter).eval()
        talks = [[dict(role="user", content=text)] for text in ("What is 2 + 3?", "Tom has 4 apples and eats 1.")]
        def answers_in(n):
            return [a.text for a in generate(model, self.bench.tokenizer, talks, max_new_tokens=8, batch_size=n)]
        answers, together = answers_in(1), answers_in(2)
        if answers != together: raise RuntimeError(f"answers are {answers} alone and {together} in a batch")
        model.config.use_cache = False
        inner = causal_lm(model)
        from sft_nb.tokens.encode import encode_prompts
        for ids, answer in zip(encode_prompts(talks, self.bench.tokenizer), answers):
            ids = torch.tensor([ids])
            with torch.no_grad():
                for _ in range(8):
                    new = inner(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
                    ids = torch.cat([ids, new], 1)
                    if new.item() in set(inner.generation_config.eos_token_id): break
            plain = self.bench.tokenizer.decode(ids[0, -8:], skip_special_tokens=True)
            if answer.strip() not in self.bench.tokenizer.decode(ids[0], skip_special_tokens=True):
                raise RuntimeError(f"with the cache {answer!r}, without it {plain!r}")
        return "same"

    def resume(self)->str:
        "Check that a run killed after its second checkpoint ends with the same bytes"
        again = Run(shutil.copytree(self.run.path, self.folder/"runs/again"))
        shutil.rmtree(again.path/"checkpoints/checkpoint-3")
        shutil.rmtree(again.adapter)
        again.set_status("running", step=2)
        resume(again)
        name = "adapter_model.safetensors"
        if (again.adapter/name).read_bytes() != (self.run.adapter/name).read_bytes(): raise RuntimeError("other bytes")
        return "same bytes"

    def merge(self)->str:
        parity = Report.load(merge(self.run, dtype="float32", prompts=2)/"parity.json")
        return f"{parity.figures['largest_difference']:.0e}"

    def try_all(self, columns:tuple[str,...], report)->None:
        "Try each column, and report each result at once"
        for column in columns:
            began = time.monotonic()
            needs = dict(cache="trains", resume="trains", merge="trains").get(column, "config")
            if column != "config" and "!" in self.results.get(needs, ""): continue
            try: self.results[column] = getattr(self, column)()
            except Exception as e:   # failures are results too
                self.results[column] = f"! {type(e).__name__}: {error_summary(e)[:300]}"
            self.results.setdefault("seconds", {})[column] = round(time.monotonic() - began, 1)
            report(self.results)


def try_type(kind:str, file:Path, columns:tuple[str,...])->None:
    "Try a type; runs in its own process"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SFT_NB_CACHE"] = f"{folder}/cache"
        os.chdir(folder)
        with open(file.with_suffix(".log"), "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            Family(kind, Path(folder)).try_all(columns, lambda found: file.write_text(json.dumps(found)))


def import_all()->None:
    "Import the libraries of training once instead of in each process"
    for name in LATE:
        with contextlib.suppress(ImportError): importlib.import_module(name)


def try_types(kinds:list[str], columns:tuple[str,...], out:Path, jobs:int, limit:int)->None:
    "Fork a process for each type, `jobs` at a time; results are written to `out` at once"
    parts = out.with_suffix("")
    parts.mkdir(parents=True, exist_ok=True)
    waiting, running = list(kinds), {}
    import_all()
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop(0)
            file = parts/f"{kind}.json"
            file.write_text("{}")
            pid = os.fork()
            if pid == 0:
                try: try_type(kind, file, columns)
                finally: os._exit(0)
            running[pid] = (kind, time.monotonic())
        time.sleep(.2)
        for pid, (kind, began) in list(running.items()):
            slow = time.monotonic() - began > limit
            if slow: os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0 if slow else os.WNOHANG)[0] == 0: continue
            del running[pid]
            found = json.loads((parts/f"{kind}.json").read_text())
            if slow: found["stopped"] = f"! it took longer than {limit} s"
            found["total_seconds"] = round(time.monotonic() - began)
            keep(out, kind, found, anew=columns == COLUMNS)
            print(kind, " | ".join(str(found.get(c, "-")) for c in COLUMNS), flush=True)


def commit()->str:
    "Commit of the code under test"
    how = dict(cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], **how).stdout.strip()


def keep(out:Path, kind:str, found:dict, *, anew:bool)->None:
    "Add the results of a type, or some of its columns, to the file"
    known = json.loads(out.read_text()) if out.exists() else {}
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    found |= dict(date=time.strftime("%Y-%m-%d"), versions=versions, commit=commit())
    known[kind] = found if anew else known.get(kind, {}) | found
    out.write_text(json.dumps(known, indent=1))


def page(found:dict, known:dict)->dict:
    "The data for the site's page: columns without timings and local folders, and the types not tried"
    def cell(text): return re.sub(r"'?/tmp/[^' ]*'?", "model", text)[:200]
    def is_complete(result): return "merge" in result or any(str(result.get(c, "")).startswith("!") for c in COLUMNS)
    tried = [kind for kind in KINDS if is_complete(found.get(kind, {}))]   # others were interrupted
    types = dict(known.get("types", {}))
    for kind in tried:
        versions = ", ".join(f"{name} {version}" for name, version in found[kind]["versions"].items())
        types[kind] = {c: cell(found[kind][c]) for c in COLUMNS if c in found[kind]}
        types[kind] |= dict(date=found[kind]["date"], versions=versions)
        if "commit" in found[kind]: types[kind]["commit"] = found[kind]["commit"]
    types = {kind: types[kind] for kind in KINDS if kind in types}
    return dict(types=types, not_tried=NO_CONFIG | {kind: "not yet" for kind in KINDS if kind not in types | NO_CONFIG})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="types of transformers; none: all")
    parser.add_argument("--out", type=Path, default=Path("families.json"))
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a type")
    parser.add_argument("--only", nargs="*", default=[], choices=COLUMNS, help="columns; none: all")
    parser.add_argument("--page", type=Path, help="write what the page shows into this file; try nothing")
    args = parser.parse_args()
    if unknown := {*args.kinds} - {*KINDS}: sys.exit(f"families.py: no causal type of transformers: {sorted(unknown)}")
    out, columns = args.out.absolute(), ("config", *args.only) if args.only else COLUMNS
    if args.page:   # types that are not in `out` stay unchanged
        known = json.loads(args.page.read_text()) if args.page.exists() else {}
        args.page.write_text(json.dumps(page(json.loads(out.read_text()), known), indent=0) + "\n")
    else: try_types([k for k in args.kinds or KINDS if k not in NO_CONFIG], columns, out, args.jobs, args.limit)


if __name__ == "__main__": main()
