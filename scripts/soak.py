"""Kill a training at random moments, some of them inside a checkpoint, and see that it ends as an undisturbed one ends.

    python scripts/soak.py --kills 100 --seed 1

Exits with 1 at the first run whose adapter differs in a byte or whose metrics.jsonl has a gap or a double line.
`tests/training/test_kill.py` does twelve of them."""
import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from sft_nb.config import Config, load_config
from sft_nb.run.directory import Run, create_run

PLACES = ("anywhere", "while weights are written", "before the list of files", "before the rename",
          "after the rename", "while old checkpoints go")
os.environ.setdefault("OMP_NUM_THREADS", "1")   # a model of this size is not faster with more
# forked from a process that has loaded torch and done nothing with it, so that a start takes no ten seconds
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["sft_nb.training.train", "bitsandbytes", "sft_nb.planning.plan"])


def setup(folder:Path)->Config:
    "24 steps in two epochs, with dropout, held-out loss, and lines of the log that do not fall on checkpoints"
    return load_config(
        "demo", runs_dir=str(folder), max_samples=96, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, lora_r=4, logging_steps=2, save_steps=3, save_total_limit=2, eval_steps=6,
        eval_samples=8, preflight=False)


def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def deadly(place:str):
    "SIGKILL to this very process at a place inside a checkpoint"
    from sft_nb.run import checkpoint
    from sft_nb.training import trainer
    seal, rmtree = checkpoint.seal, checkpoint.shutil.rmtree
    def seal_and_die(folder):
        seal(folder)
        die()
    def half_gone(path, *args, **kwargs):
        if str(path).endswith(".gone") and Path(path).exists():
            next(Path(path).iterdir()).unlink()
            die()
        return rmtree(path, *args, **kwargs)
    at = {"while weights are written": (trainer.SupervisedTrainer, "_save_rng_state", die),
          "before the list of files": (checkpoint, "seal", die),
          "before the rename": (checkpoint, "seal", seal_and_die),
          "after the rename": (trainer, "prune", die),
          "while old checkpoints go": (checkpoint.shutil, "rmtree", half_gone)}
    with patch.object(*at[place]): yield


def part(path:str, place:str, skip:int)->None:
    "What a process does: train on, and die inside its first checkpoint but `skip` if a place is given"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    from sft_nb.training.train import train_run
    from sft_nb.training.trainer import SupervisedTrainer
    save, count = SupervisedTrainer._save_checkpoint, 0
    def counted(self, *args, **kwargs):
        nonlocal count
        count += 1
        here = place in PLACES[1:] and count > skip
        with deadly(place) if here else nullcontext(): return save(self, *args, **kwargs)
    with patch.object(SupervisedTrainer, "_save_checkpoint", counted): train_run(Run(path))


def killed(run:Run, place:str, rng:random.Random, longest:float)->bool:
    "Train on until it is killed, or to the end if the moment comes too late"
    p = PROCESSES.Process(target=part, args=(str(run.path), place, rng.randrange(2)))
    p.start()
    if place == "anywhere":
        p.join(rng.uniform(.1, longest))
        if p.is_alive(): os.kill(p.pid, signal.SIGKILL)
    p.join(300)
    if p.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"{place}: it ended with {p.exitcode}: {run.status}")
    return p.exitcode != 0


def disturbed(cfg:Config, name:str, places:list[str], rng:random.Random, longest:float, say=lambda *a: None)->Run:
    "A run that is killed at up to four of `places`, which it takes from the list; finished"
    run, kills = create_run(replace(cfg, run_name=name), state="starting"), 0
    while run.state != "finished":
        place = places[-1] if places and kills < 4 else "nowhere"
        hit = killed(run, place, rng, longest)
        if hit:
            places.pop()
            kills += 1
        ended = "killed" if hit else "ended"
        say(f"  {place}: {ended}, {run.state} with {[p.name for p in run.checkpoints()]}")
    return run


KEYS = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "eval_loss")

def lines(run:Run)->list[dict]:
    "What must be the same in metrics.jsonl: everything but seconds"
    return [{k: m[k] for k in KEYS if k in m} for m in run.metrics()]


def differences(run:Run, whole:Run)->list[str]:
    "How a run differs from the undisturbed one"
    found = []
    a, b = ((r.adapter/"adapter_model.safetensors").read_bytes() for r in (run, whole))
    if a != b: found.append("the adapter has other bytes")
    a, b = lines(run), lines(whole)
    if a != b:
        first = next(((x, y) for x, y in zip(a, b) if x != y), (len(a), len(b)))
        found.append(f"metrics.jsonl differs: {first}")
    left = [p.name for p in run.path.rglob("*") if p.suffix in (".aside", ".gone")]
    if left: found.append(f"left behind: {left}")
    return found


def undisturbed(cfg:Config)->tuple[Run,float]:
    "The run to compare with, and its seconds"
    run, began = create_run(replace(cfg, run_name="undisturbed"), state="starting"), time.monotonic()
    assert not killed(run, "nowhere", random.Random(), 0) and run.state == "finished", run.status
    return run, time.monotonic() - began


def main()->int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, k = random.Random(options.seed), 0
    cfg = setup(Path(tempfile.mkdtemp(prefix="sft_nb-soak-")))
    whole, seconds = undisturbed(cfg)
    places = [rng.choice(PLACES) for _ in range(options.kills)]
    while places:
        k += 1
        run = disturbed(cfg, f"run-{k}", places, rng, seconds, say=print)
        wrong = differences(run, whole)
        if wrong:
            print(f"run {k}: {'; '.join(wrong)}\n{run.path}")
            return 1
        print(f"run {k}: the same; {options.kills - len(places)} kills so far", flush=True)
    return 0


if __name__ == "__main__": sys.exit(main())
