"""What smollm2 (SmolLM2-135M-Instruct) learns on real rows: base, base with examples, and every checkpoint.

    python benchmarks/real.py [gsm8k nli units legal tools] [--seeds 1] [--set learning_rate=1e-3 ...] [--json]
    python benchmarks/real.py --memory [nli units ...]

Each job trains with the defaults, except for the settings that its result lists, and is scored on rows that are not
trained on; training and scoring are processes of their own. `cpu_seconds` is what a process computed: with one thread
(OMP_NUM_THREADS=1), its time on a quiet core. `share of plan` is the largest resident memory of the training process
/ the plan's figure. `chance` is the best trivial answer. The rows are in ../shared/data (or SFT_NB_SHARED); the base
comes from the hub or from the package index. Writes benchmarks/results/real_JOB.json.

With --memory, each job trains few steps and is not scored: the preflight computes its largest batch, and answers are
sampled at the end. Writes benchmarks/results/memory_real.json, in which other jobs keep their results.
"""
import argparse, csv, json, multiprocessing, random, sys, tempfile, time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from common import RESULTS, resident_mib, save, shared


@dataclass(frozen=True)
class Job:
    "Rows of a real problem, and how to train on them"
    rows:Callable[[], tuple[list[dict], list[dict]]]   # rows to train on, and rows held out
    settings:dict                                      # all that differs from the defaults
    figures:tuple[str,...]=()                          # figures of the task to keep beside the accuracy


def split(rows:list[dict], key:Callable[[dict],str], *, held_out:int)->tuple[list[dict],list[dict]]:
    "Shuffled rows in two parts without a common key; the second has at least `held_out` rows"
    rows = random.Random(0).sample(rows, len(rows))
    counts = {}
    for r in rows: counts[key(r)] = counts.get(key(r), 0) + 1
    apart, n = set(), 0
    for name in random.Random(0).sample(sorted(counts), len(counts)):
        if n >= held_out: break
        apart.add(name)
        n += counts[name]
    return [r for r in rows if key(r) not in apart], [r for r in rows if key(r) in apart]


def json_lines(path:str)->list[dict]:
    return [json.loads(line) for line in shared(path).read_text(encoding="utf-8").splitlines()]


def nli()->tuple[list[dict], list[dict]]:
    "MED: does the second sentence follow from the first? No first sentence is in both parts"
    with shared("data/med_nli/MED.tsv").open(encoding="utf-8") as file:
        pairs = [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return tuple([dict(question=f"Premise: {r['sentence1']}\nHypothesis: {r['sentence2']}\n"
                                "Does the hypothesis follow from the premise? Answer entailment or neutral.",
                       answer=r["gold_label"]) for r in part]
                 for part in split(pairs, lambda r: r["sentence1"], held_out=400))


def units()->tuple[list[dict], list[dict]]:
    "Conversions that DeepMind's generator wrote; its test rows are held out"
    folder = "data/unit_conversion_deepmind"
    return json_lines(f"{folder}/train.jsonl"), json_lines(f"{folder}/test.jsonl")


def gsm8k()->tuple[list[dict], list[dict]]:
    "Word problems of grade school; the test rows are held out"
    return json_lines("data/gsm8k/train.jsonl"), json_lines("data/gsm8k/test.jsonl")


def legal()->tuple[list[dict], list[dict]]:
    "Paragraphs of terms and licences in plain English; no document's title is in both parts"
    rows = json.loads(shared("data/legal_plain_english/all_v1.json").read_text(encoding="utf-8")).values()
    seen = {r["original_text"]: r for r in rows}
    parts = split([*seen.values()], lambda r: r["doc"], held_out=60)
    return tuple([dict(document=r["original_text"], summary=r["reference_summary"]) for r in part] for part in parts)


def tools()->tuple[list[dict], list[dict]]:
    "Glaive's conversations with functions to call; no list of functions is in both parts"
    rows = json.loads(shared("data/glaive_toolcall/glaive_toolcall_en_demo.json").read_text(encoding="utf-8"))
    rows = [r for r in rows if any(m["from"] == "function_call" for m in r["conversations"])]
    return split(rows, lambda r: r["tools"], held_out=30)


JOBS = {
    "gsm8k": Job(gsm8k, dict(task="gsm8k", max_samples=320, num_train_epochs=1, eval_samples=40)),
    "nli": Job(nli, dict(task="classify", max_steps=100, eval_samples=100), ("f1", "majority")),
    "units": Job(units, dict(task="units", max_steps=120, eval_samples=100), ("exact",)),
    "legal": Job(legal, dict(task="summarize", num_train_epochs=2, eval_samples=40), ("rouge1", "rouge2", "rougeL")),
    "tools": Job(tools, dict(task="tools", num_train_epochs=2, max_length=768, eval_samples=30),
                 ("exact", "name", "arguments")),
}


def config_of(name:str, seed:int, folder:str, changes:dict):
    "The config of a job, with its rows in files: three checkpoints, and what is not listed at its default"
    from sft_nb.config.load import load_config
    settings = dict(save_steps=1 / 3, save_total_limit=3) | JOBS[name].settings | changes
    for part, rows in zip(("train", "eval"), JOBS[name].rows()):
        file = Path(folder)/f"{name}_{part}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings[f"{part}_file"] = str(file)
    return load_config(model="smollm2", seed=seed, runs_dir=folder, run_name=f"{name}-{seed}", **settings)


def train_job(name:str, seed:int, folder:str, changes:dict)->dict:
    "Train; memory and times of this process"
    from sft_nb.tokens.prepare import prepare
    from sft_nb.base.files import read_json
    from sft_nb.training.train import train
    cfg = config_of(name, seed, folder, changes)
    data = prepare(cfg)
    before, began, computed = resident_mib() / 1024, time.perf_counter(), time.process_time()
    run = train(cfg, data)
    steps = [m for m in run.metrics() if "loss" in m]
    planned, peak = read_json(run.path/"plan.json")["total"] / 2**30, resident_mib() / 1024
    return dict(
        path=str(run.path), rows=len(data.train.lengths), steps=run.step,
        first_loss=round(steps[0]["loss"], 4), last_loss=round(steps[-1]["loss"], 4),
        train_seconds=round(time.perf_counter() - began, 1),
        train_cpu_seconds=round(time.process_time() - computed, 1),
        before_gib=round(before, 3), peak_gib=round(peak, 3), planned_gib=round(planned, 3),
        share_of_plan=round(peak / planned, 3))


def scores_of(scores, figures:tuple[str,...])->dict:
    "The figures of one model, without its answers"
    low, high = scores.interval
    found = dict(accuracy=round(scores.accuracy, 4), interval=[round(low, 4), round(high, 4)], n=scores.n,
                 in_asked_form=round(scores.in_form, 4), stopped=round(scores.ended, 4))
    return found | {k: round(float(scores.figures[k]), 4) for k in ("loss", *figures) if k in scores.figures}


def score_job(path:str, figures:tuple[str,...])->dict:
    "Score the base, with and without examples, and every checkpoint"
    from sft_nb.evaluation.sweep import sweep
    began, computed = time.perf_counter(), time.process_time()
    s = sweep(path, progress=False)
    forgotten = s.forgotten[s.best]
    few, best, gain = s.baselines and s.baselines.few_shot, s.baselines and s.baselines.best, s.pick.difference
    answers = {a.where: a for a in s.checkpoints[s.best].answers}
    return dict(
        base=scores_of(s.base, figures), few_shot=few and scores_of(few, figures) | dict(shots=s.baselines.shots),
        chance=best and dict(what=best.name, answer=best.text,
                             value=round(float(sum(best.parts) / len(best.parts)), 4)),
        checkpoints={name: scores_of(scores, figures) for name, scores in s.checkpoints.items()}, by=s.by, best=s.best,
        gain=dict(gain=round(float(gain.gain), 4), low=round(float(gain.low), 4), high=round(float(gain.high), 4),
                  p=round(float(gain.p), 4)),
        forgetting={name: round(float(getattr(forgotten, name)), 4) for name in ("rise", "low", "high", "kl")},
        conclusions=s.conclusions, findings=[str(f) for f in s.findings],
        examples=[dict(expected=a.expected, base=a.text[:300], tuned=answers[a.where].text[:300])
                  for a in s.base.answers[:5]],
        score_seconds=round(time.perf_counter() - began, 1),
        score_cpu_seconds=round(time.process_time() - computed, 1))


def in_own_process(call:Callable, *given):
    "The result of a call in a new process, so that its memory is its own"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *given).result()


def measure(name:str, seed:int, folder:str, changes:dict)->dict:
    "Train and score one job with one seed"
    from sft_nb.config.bases import describe_base
    trained = in_own_process(train_job, name, seed, folder, changes)
    path = trained.pop("path")
    return dict(job=name, seed=seed, settings=JOBS[name].settings | changes,
                base_model=describe_base(config_of(name, seed, folder, changes).model), **trained,
                **in_own_process(score_job, path, JOBS[name].figures))


def train_with_whole_preflight(name:str, seed:int, folder:str, changes:dict)->dict:
    "`train_job` whose preflight computes the largest batch as a whole: the time for that would depend on the training"
    from sft_nb.checks import preflight
    preflight.LEAST_SECONDS = 86400.
    return train_job(name, seed, folder, changes)


def measure_memory(name:str, seed:int, folder:str, changes:dict)->dict:
    "Train one job for few steps: the plan by part, and the most that the process held"
    from sft_nb.base.files import read_json
    changes = dict(max_steps=1, save_steps=1) | changes
    trained = in_own_process(train_with_whole_preflight, name, seed, folder, changes)
    plan = read_json(Path(trained["path"])/"plan.json")
    figures = ("rows", "steps", "train_cpu_seconds", "peak_gib", "planned_gib", "share_of_plan")
    return dict(job=name, settings=changes, method=plan["settings"]["method"],
                recomputes=plan["settings"]["gradient_checkpointing"],
                parts_gib={part: round(n / 2**30, 3) for part, n in plan["parts"].items()},
                **{figure: trained[figure] for figure in figures})


def save_memory(runs:list[dict])->dict:
    "Write memory_real.json; runs of other jobs, or with other settings, stay"
    file = RESULTS/"memory_real.json"
    def what(run): return run["job"], run["settings"]
    known = json.loads(file.read_text())["runs"] if file.exists() else []
    kept = [run for run in known if what(run) not in map(what, runs)]
    return save("memory_real", runs=sorted([*kept, *runs], key=lambda run: (run["method"], run["job"])))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("jobs", nargs="*", default=[*JOBS], help=", ".join(JOBS))
    p.add_argument("--seeds", type=int, nargs="+", default=[1])
    p.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="other settings than the job's")
    p.add_argument("--memory", action="store_true", help="few steps, to compare their memory with the plan")
    p.add_argument("--json", action="store_true", help="print one JSON object a job and nothing else")
    a = p.parse_args()
    if unknown := {*a.jobs} - {*JOBS}: p.error(f"there is no job {', '.join(unknown)}; the jobs are {', '.join(JOBS)}")
    changes = {}
    for pair in a.set:
        name, _, value = pair.partition("=")
        try: changes[name] = json.loads(value)
        except ValueError: changes[name] = value
    for name in a.jobs:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO() if a.json else sys.stderr):
            runs = [(measure_memory if a.memory else measure)(name, seed, folder, changes) for seed in a.seeds]
            result = save_memory(runs) if a.memory else save(f"real_{name}", runs=runs)
        if a.json:
            print(json.dumps(result))
            continue
        for r in runs:
            memory = f"{r['peak_gib']:.2f} GiB, {r['share_of_plan']:.2f} of the plan"
            if a.memory:
                print(f"{name}, {r['method']}: {memory}")
                continue
            models = {"base": r["base"], "base with examples": r["few_shot"]} | r["checkpoints"]
            key = r["by"] if r["by"] in r["base"] else "accuracy"
            found = [f"{what} {s[key]:.3g}" for what, s in models.items() if s]
            if r["chance"]: found.append(f"{r['chance']['what']} {r['chance']['value']:.3g}")
            print(f"{name}, seed {r['seed']}, {key}: {'; '.join(found)}; "
                  f"trained in {r['train_cpu_seconds']:.0f} CPU s, scored in {r['score_cpu_seconds']:.0f}; "
                  f"{memory}")


if __name__ == "__main__": main()
