"""Runs that disappoint for one reason that is known, and what `sft_nb explain` says of each; and healthy runs.

    python benchmarks/explain.py              # on `tiny`: all of tests/disappointing.py
    python benchmarks/explain.py --real       # on SmolLM2-135M: ten of them
    python benchmarks/explain.py rate-low shuffled

Each run is trained, scored where the problem needs it, and explained with a budget of ten minutes. Right is the planted
cause as the first one; wrong and confident is another one that is called certain. A healthy run is right if no cause is
called certain or likely. The results of single calls are merged into results/explain.json; the seconds are CPU time."""
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent/"tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from disappointing import HEALTHY, ON_REAL, PROBLEMS, REAL, TINY   # noqa: E402
from sft_nb.extras.explain import explain   # noqa: E402

FILE = HERE/"results/explain.json"


def tell(name:str, base:dict)->dict:
    problem, began = (PROBLEMS | HEALTHY)[name], time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()): run = problem.make(folder, base)
        trained = time.process_time()
        found = explain(run, budget=600, progress=False)
    first = found.best
    named = first is not None and first.sure != "possible"
    right = first is not None and first.name == problem.cause if problem.cause else not named
    wrong = not right and first is not None and first.sure == "certain"
    return dict(base=base["model"], problem=name, planted=problem.cause, first=first and first.name,
                sure=first and first.sure, right=right, confident_and_wrong=wrong,
                evidence=list(first.evidence) if first else [], fix=first.finding.to_dict()["fix"] if first else "",
                others=[f"{c.name} ({c.sure})" for c in found.causes[1:]],
                experiments=[t.name for t in found.tried if t.seconds is not None],
                seconds_of_training=round(trained - began, 1), seconds=round(time.process_time() - trained, 1))


def main(args:list[str])->None:
    base = REAL if "--real" in args else TINY
    names = [a for a in args if not a.startswith("-")] or (ON_REAL if base is REAL else [*PROBLEMS, *HEALTHY])
    for name in names:
        made = tell(name, base)
        print(f"{made['base']:<12} {name:<20} {made['planted'] or 'healthy':<18} "
              f"{made['first'] or 'nothing'} {made['sure'] or ''}  {'right' if made['right'] else 'WRONG'}", flush=True)
        known = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
        known = [k for k in known if (k["base"], k["problem"]) != (made["base"], name)] + [made]
        planted = [k for k in known if k["planted"]]
        about = dict(planted=len(planted), right=sum(k["right"] for k in planted),
                     confident_and_wrong=sum(k["confident_and_wrong"] for k in known),
                     healthy=len(known) - len(planted),
                     left_in_peace=sum(k["right"] for k in known if not k["planted"]))
        FILE.write_text(json.dumps(about | dict(runs=known, cpus=os.cpu_count(), python=platform.python_version()),
                                   indent=1, ensure_ascii=False) + "\n")
    print(", ".join(f"{name} {value}" for name, value in about.items()))


if __name__ == "__main__": main(sys.argv[1:])
