"""What smollm2 (SmolLM2-135M-Instruct) learns on real rows: base, base with examples, and tuned, end to end.

    python benchmarks/real.py [nli ...] [--seeds 1] [--steps N] [--eval-samples N] [--json]

Each job trains in a process of its own with the defaults, except for the settings that its result lists, and is scored
on rows that are not trained on. `share of plan` is the largest resident memory of that process / the plan's figure, and
`chance` the best trivial answer. The rows are in ../shared/data (or SFT_NB_SHARED); the base comes from the hub or from
the package index. Writes benchmarks/results/real_JOB.json.
"""
import argparse, csv, json, random, sys, tempfile, time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO

from common import save, shared


@dataclass(frozen=True)
class Job:
    "Rows of a real problem, and how to train on them"
    rows:Callable[[], tuple[list[dict], list[dict]]]   # rows to train on, and rows held out
    settings:dict                                      # all that differs from the defaults


def nli()->tuple[list[dict], list[dict]]:
    "MED: does the second sentence follow from the first? No first sentence is in both parts"
    with shared("data/med_nli/MED.tsv").open(encoding="utf-8") as file:
        rows = [dict(question=f"Premise: {r['sentence1']}\nHypothesis: {r['sentence2']}\n"
                              "Does the hypothesis follow from the premise? Answer entailment or neutral.",
                     answer=r["gold_label"], group=r["sentence1"])
                for r in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    groups = sorted({r["group"] for r in rows})
    random.Random(0).shuffle(groups)
    held_out, first = set(groups[:len(groups) // 5]), {}
    for r in random.Random(0).sample(rows, len(rows)): first.setdefault(r.pop("group") in held_out, []).append(r)
    return first[False], first[True]


JOBS = {"nli": Job(nli, dict(task="classify", method="lora", learning_rate=3e-4, max_steps=120, eval_samples=200))}


def scores_of(scores)->dict|None:
    "The figures of one model, without its answers"
    if scores is None: return None
    return dict(accuracy=round(scores.accuracy, 4), interval=[round(v, 4) for v in scores.interval], n=scores.n)


def measure(name:str, seed:int, folder:str, **changes)->dict:
    "Train and score one job with one seed"
    from sft_nb.bases import describe_base
    from sft_nb.config import load_config
    from sft_nb.evaluation.evaluate import evaluate
    from sft_nb.files import read_json
    from sft_nb.tokens.prepare import prepare
    from sft_nb.training.launch import launch
    job = JOBS[name]
    train_rows, held_out = job.rows()
    settings = job.settings | changes
    cfg = load_config(model="smollm2", seed=seed, runs_dir=folder, run_name=f"{name}-{seed}", **settings)
    data = prepare(cfg, train=train_rows, eval=held_out)
    began = time.perf_counter()
    run = launch(cfg, data)
    run.wait()
    trained = time.perf_counter()
    e = evaluate(run, progress=False)
    figures, plan = run.metrics(), read_json(run.path/"plan.json")
    losses = [m["loss"] for m in figures if "loss" in m]
    held_out_losses = [round(m["eval_loss"], 4) for m in figures if "eval_loss" in m]
    peak = max(m["peak_memory_gib"] for m in figures if "peak_memory_gib" in m)
    planned = plan["total"] / 2**30
    few = e.baselines and e.baselines.few_shot
    best = e.baselines and e.baselines.best
    return dict(
        job=name, seed=seed, settings=settings, base_model=describe_base(cfg.model), rows=len(data.train.lengths),
        base=scores_of(e.base), few_shot=scores_of(few), shots=e.baselines.shots if few else 0,
        chance=best and dict(what=best.name, answer=best.text, accuracy=round(sum(best.parts) / len(best.parts), 4)),
        tuned=scores_of(e.tuned), first_loss=round(losses[0], 4), last_loss=round(losses[-1], 4),
        held_out_losses=held_out_losses,
        train_seconds=round(trained - began, 1), evaluate_seconds=round(time.perf_counter() - trained, 1),
        peak_gib=round(peak, 3), planned_gib=round(planned, 3), share_of_plan=round(peak / planned, 3),
        findings=[f.says for f in e.findings])


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("jobs", nargs="*", default=[*JOBS], help=", ".join(JOBS))
    p.add_argument("--seeds", type=int, nargs="+", default=[1])
    p.add_argument("--steps", type=int, help="instead of the job's own")
    p.add_argument("--eval-samples", type=int, help="instead of the job's own")
    p.add_argument("--json", action="store_true", help="print one JSON object a job and nothing else")
    a = p.parse_args()
    if unknown := {*a.jobs} - {*JOBS}: p.error(f"there is no job {', '.join(unknown)}; the jobs are {', '.join(JOBS)}")
    changes = dict(max_steps=a.steps, eval_samples=a.eval_samples)
    changes = {setting: value for setting, value in changes.items() if value is not None}
    for name in a.jobs:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO() if a.json else sys.stderr):
            result = save(f"real_{name}", runs=[measure(name, seed, folder, **changes) for seed in a.seeds])
        if a.json:
            print(json.dumps(result))
            continue
        for r in result["runs"]:
            models = {"base": r["base"], f"base, {r['shots']} examples": r["few_shot"], "tuned": r["tuned"]}
            found = [f"{what} {s['accuracy']:.1%}" for what, s in models.items() if s]
            if r["chance"]: found.append(f"{r['chance']['what']} {r['chance']['accuracy']:.1%}")
            print(f"{name}, seed {r['seed']}: {'; '.join(found)}; trained in {r['train_seconds']:.0f} s, scored in "
                  f"{r['evaluate_seconds']:.0f} s; {r['peak_gib']:.2f} GiB, {r['share_of_plan']:.2f} of the plan")


if __name__ == "__main__": main()
