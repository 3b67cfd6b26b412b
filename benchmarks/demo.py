"""Does the demo keep its promise with other seeds? Accuracy of base and tuned model, and seconds, for three of them.

    python benchmarks/demo.py [--seeds 1 2 3] [--json]

Writes benchmarks/results/demo.json with date, processor and versions.
"""
import argparse, json, sys, tempfile, time
from contextlib import redirect_stderr
from io import StringIO

from common import save


def measure(seed:int, folder:str)->dict:
    "Train and score the demo with one seed"
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    from sft_nb.evaluation.evaluate import evaluate
    from sft_nb.training.train import train
    began = time.perf_counter()
    cfg = load_config("demo", seed=seed, runs_dir=folder)
    data = prepare(cfg)
    def problems(split): return {tuple(r["problem"]) for _, r in split.source}
    assert not problems(data.train) & problems(data.eval), "a held-out problem is trained on"
    run = train(cfg, data=data)
    trained = time.perf_counter()
    e = evaluate(run, progress=False)
    return dict(seed=seed, base=e.base.accuracy, tuned=e.tuned.accuracy, interval=e.tuned.interval, n=e.base.n,
                train_seconds=round(trained - began, 1), evaluate_seconds=round(time.perf_counter() - trained, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    quiet = redirect_stderr(StringIO() if a.json else sys.stderr)
    with tempfile.TemporaryDirectory() as folder, quiet: rows = [measure(s, folder) for s in a.seeds]
    result = save("demo", rows=rows)
    if a.json: return print(json.dumps(result))
    print("seed    base   tuned   train s   evaluate s")
    line = "{seed:>4}  {base:6.1%}  {tuned:6.1%}  {train_seconds:>8}  {evaluate_seconds:>11}"
    for r in rows: print(line.format(**r))


if __name__ == "__main__": main()
