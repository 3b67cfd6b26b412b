"""Does the demo keep its promise with other seeds? Accuracy of base and tuned model, and seconds, for three of them.

    python benchmarks/demo.py [--seeds 1 2 3] [--json]

Writes benchmarks/results/demo.json with date, processor and versions.
"""
import argparse, json, platform, sys, tempfile, time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path


def processor()->str:
    "The CPU's name where Linux tells it"
    info = Path("/proc/cpuinfo")
    names = [l.split(":", 1)[1].strip() for l in info.read_text().splitlines() if l.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


def measure(seed:int, folder:str)->dict:
    "Train and score the demo with one seed"
    from sft_nb.config import load_config
    from sft_nb.data import prepare
    from sft_nb.evaluate import evaluate
    from sft_nb.train import train
    began = time.perf_counter()
    cfg = load_config("demo", seed=seed, runs_dir=folder)
    data = prepare(cfg)
    assert not {tuple(r["problem"]) for r in data.train.rows} & {tuple(r["problem"]) for r in data.eval.rows}, "a held-out problem is trained on"
    run = train(cfg, data=data)
    trained = time.perf_counter()
    e = evaluate(run, progress=False)
    return dict(seed=seed, base=e.base.accuracy, tuned=e.tuned.accuracy, interval=e.tuned.interval, n=e.base.n, train_seconds=round(trained - began, 1), evaluate_seconds=round(time.perf_counter() - trained, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    from sft_nb.run import environment
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO() if a.json else sys.stderr): rows = [measure(s, folder) for s in a.seeds]
    result = dict(benchmark="demo", date=time.strftime("%Y-%m-%d"), processor=processor(), **{k: v for k, v in environment("cpu").items() if k in ("python", "cpus", "packages")}, rows=rows)
    out = Path(__file__).parent/"results"/"demo.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if a.json: return print(json.dumps(result))
    print("seed    base   tuned   train s   evaluate s")
    for r in rows: print(f"{r['seed']:>4}  {r['base']:6.1%}  {r['tuned']:6.1%}  {r['train_seconds']:>8}  {r['evaluate_seconds']:>11}")


if __name__ == "__main__": main()
