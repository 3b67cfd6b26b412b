"""Held-out loss of smollm2 (SmolLM2-135M-Instruct) on real rows for several values of a setting: what defaults rest on.

    python benchmarks/grid.py [units ...] [--steps 40] [--folder FOLDER] [--values learning_rate 2e-4 5e-4 1e-3 2e-3]
    python benchmarks/grid.py units --rows 640 --values effective_batch_size 8 16 32

Each job of benchmarks/real.py trains a few steps with each value, otherwise with the defaults, and is scored on 100
held-out rows. With --rows each value trains on so many first rows, whatever steps that takes: for batches and passes.
With --folder, a search that was stopped goes on. Writes benchmarks/results/grid_SETTING.json.
"""
import argparse, json, tempfile
from pathlib import Path

from common import HERE, save
from real import JOBS, config_of


def measure(name:str, folder:Path, setting:str, values:list, length:dict)->dict:
    "The search of one job: the loss of the base and of each value, with its interval"
    from dataclasses import replace
    from sft_nb.extras.search import search
    folder.mkdir(parents=True, exist_ok=True)
    brief = length | dict(eval_steps=.5, save_steps=200, save_total_limit=2, eval_samples=100, preflight=False)
    cfg = replace(config_of(name, 42, str(folder), brief), runs_dir=str(folder/name))
    found = search(cfg, stop_early=False, **{setting: values})
    print(found)
    scores = {str(found.values[run][setting]): s for run, s in found.scores.items()}
    return dict(**length, rows=found.base.n, base=round(float(found.base.overall("loss")), 4),
                losses={value: round(float(s.overall("loss")), 4) for value, s in scores.items()},
                intervals={value: [round(float(v), 4) for v in s.interval_of("loss")] for value, s in scores.items()},
                cannot_be_told_apart=[found.values[run][setting] for run in (found.swept.best, *found.as_good)])


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("jobs", nargs="*", default=["units"], help=", ".join(JOBS))
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--rows", type=int, help="train on all of this many rows; takes the place of --steps")
    p.add_argument("--folder", help="keep the runs here")
    p.add_argument("--values", nargs="+", default=["learning_rate", "2e-4", "5e-4", "1e-3", "2e-3"],
                   help="a setting, and what to try")
    a = p.parse_args()
    length = dict(max_samples=a.rows, max_steps=-1) if a.rows else dict(max_steps=a.steps)
    setting, values = a.values[0], [json.loads(v) for v in a.values[1:]]
    file = HERE/"results"/f"grid_{setting}.json"
    done = json.loads(file.read_text())["jobs"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in a.jobs:
            done[name] = measure(name, Path(a.folder or folder), setting, values, length)
            save(f"grid_{setting}", jobs=done)


if __name__ == "__main__": main()
