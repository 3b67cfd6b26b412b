"""How many exchanged answers are among the rows that `doubtful_rows` names first.

    python benchmarks/mislabelled.py [units nli demo] [--seeds 1 2 3] [--rows 800] [--set num_train_epochs=3 ...]

Of each job, the answers of 1% of the training rows are exchanged in pairs, a model is trained on all rows, and they are
ranked by their doubt, and by what is simpler: the loss of the answer, and its loss per token. `found` is the share of
exchanged rows among the first 3%; the ranks of all of them are kept too. `units` and `nli` are the jobs of real.py,
with smollm2; `demo` are the demo's word problems, with tiny. With --folder, runs are kept and are not trained again.
Writes benchmarks/results/mislabelled.json, in which other jobs keep their results.
"""
import argparse, json, random, tempfile, time
from pathlib import Path

import numpy as np

from common import RESULTS, save
from real import JOBS

SHARE, NAMED = .01, .03   # of the rows: exchanged, and named first


def demo()->tuple[list[dict], list[dict]]:
    from sft_nb.tasks.arithmetic import TASK
    return [[dict(question=r["question"], answer=r["answer"]) for r in TASK.rows(side)] for side in ("train", "eval")]


def rows_of(job:str)->tuple[list[dict], list[dict], dict]:
    "Rows to train on, rows held out, settings"
    if job == "demo": return *demo(), dict(config="demo", task="arithmetic")
    return *JOBS[job].rows(), dict(config=None, task=JOBS[job].settings["task"], model="smollm2")


def exchange(rows:list[dict], pairs:int, seed:int)->tuple[list[dict], list[int]]:
    "The rows with the answers of so many pairs exchanged, which differ, and the numbers of those rows"
    rows, order = [dict(r) for r in rows], random.Random(seed).sample(range(len(rows)), len(rows))
    planted = []
    while len(planted) < 2 * pairs:
        a = order.pop()
        b = next(k for k in reversed(order) if rows[k]["answer"] != rows[a]["answer"])
        order.remove(b)
        rows[a]["answer"], rows[b]["answer"] = rows[b]["answer"], rows[a]["answer"]
        planted += [a, b]
    return rows, sorted(planted)


def measure(job:str, seed:int, n:int, folder:Path, changes:dict)->dict:
    "Train with exchanged answers, and rank the rows"
    from sft_nb.config.load import load_config
    from sft_nb.extras.nearest_rows import measure_rows
    from sft_nb.runs.directory import Run
    from sft_nb.tokens.prepare import prepare
    from sft_nb.training.train import train
    train_rows, held_out, settings = rows_of(job)
    rows, planted = exchange(random.Random(seed).sample(train_rows, n), round(n * SHARE / 2), seed)
    changes = dict(num_train_epochs=1) | changes
    name = "-".join(map(str, (job, n, seed, *(value for pair in sorted(changes.items()) for value in pair))))
    began, trained = time.process_time(), None
    if not (folder/name/"adapter").is_dir():
        cfg = load_config(settings.pop("config"), runs_dir=str(folder), run_name=name, seed=seed, eval_samples=40,
                          preflight=False, **settings | changes)
        train(cfg, prepare(cfg, train=rows, eval=held_out[:40]))
        trained = round(time.process_time() - began, 1)
    began = time.process_time()
    found = measure_rows(Run(folder/name), most=n)
    numbers = found.data.train.stats["row"][found.train.examples]
    is_planted, first = np.isin(numbers, planted), int(np.ceil(NAMED * n))
    scores = dict(doubt=found.train.doubt, loss=found.train.loss, loss_per_token=found.train.loss / found.train.tokens)
    ranks = {by: np.flatnonzero(is_planted[np.argsort(-value, kind="stable")]) + 1 for by, value in scores.items()}
    return dict(job=job, seed=seed, rows=n, settings=changes, planted=int(is_planted.sum()), named=first,
                found={by: round(float((r <= first).mean()), 4) for by, r in ranks.items()},
                ranks={by: r.tolist() for by, r in ranks.items()}, steps=found.run.step, train_cpu_seconds=trained,
                measure_cpu_seconds=round(time.process_time() - began, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("jobs", nargs="*", default=["units", "nli", "demo"])
    p.add_argument("--seeds", type=int, nargs="+", default=[1])
    p.add_argument("--rows", type=int, default=800)
    p.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="other settings")
    p.add_argument("--folder", type=Path, help="where runs are kept")
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    changes = {}
    for name, _, value in (pair.partition("=") for pair in a.set):
        try: changes[name] = json.loads(value)
        except ValueError: changes[name] = value
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(job, seed, a.rows, a.folder or Path(folder), changes) for job in a.jobs for seed in a.seeds]
    def what(run): return [run[name] for name in ("job", "seed", "rows", "settings")]
    file = RESULTS/"mislabelled.json"
    known = json.loads(file.read_text())["runs"] if file.exists() else []
    known = [run for run in known if what(run) not in map(what, runs)]
    result = save("mislabelled", runs=sorted([*known, *runs], key=lambda run: (run["job"], run["rows"], run["seed"])))
    if a.json: return print(json.dumps(result))
    for r in runs:
        print(f"{r['job']}, seed {r['seed']}: of {r['planted']} exchanged among {r['rows']:,} rows, the first "
              f"{r['named']} have {', '.join(f'{share:.0%} by {by}' for by, share in r['found'].items())}")


if __name__ == "__main__": main()
