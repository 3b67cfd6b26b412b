"""Kill a training at random moments, some of them inside a checkpoint, and see that it ends where an undisturbed one ends.

    python scripts/soak.py --kills 100 --seed 1

Exits with 1 at the first run whose adapter differs in a byte or whose metrics.jsonl has a gap or a double line. `tests/test_kill.py` does twelve of them."""
import argparse, multiprocessing, os, random, signal, sys, tempfile, time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from sft_nb.config import Config, load_config
from sft_nb.run import Run

PLACES = ("anywhere", "while weights are written", "before the list of files", "before the rename", "between two renames", "while old checkpoints go")
# forked from a process that has loaded torch and done nothing with it, so that a start takes no ten seconds
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["sft_nb.train", "bitsandbytes", "sft_nb.memory"])


def setup(folder:Path)->Config:
    "A run of 24 steps in two epochs, with dropout, held-out loss, and lines of the log that do not fall on checkpoints"
    return load_config("demo", runs_dir=str(folder), max_samples=96, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, lora_r=4,
                       logging_steps=2, save_steps=3, save_total_limit=2, eval_steps=6, eval_samples=8, preflight=False)


@contextmanager
def deadly(place:str):
    "SIGKILL to this very process at a place inside a checkpoint"
    import sft_nb.checkpoint as c
    from sft_nb.train import WholeTrainer
    def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
    def after(function): return lambda *a, **k: (function(*a, **k), die())
    where = {"while weights are written": (WholeTrainer, "_save_rng_state", die), "before the list of files": (c, "seal", die), "before the rename": (c, "seal", after(c.seal)),
             "between two renames": (c, "_sync_folder" if hasattr(c, "_sync_folder") else "place", die), "while old checkpoints go": (c.shutil, "rmtree", None)}
    if place == "while old checkpoints go":
        whole = c.shutil.rmtree
        def half(path, *a, **k):
            if str(path).endswith(".gone") and Path(path).exists(): next(p for p in Path(path).iterdir()).unlink(), die()
            return whole(path, *a, **k)
        with patch.object(c.shutil, "rmtree", half): yield
    elif place in where:
        owner, name, how = where[place]
        with patch.object(owner, name, how): yield
    else: yield


def part(path:str, place:str, skip:int)->None:
    "What a process does: train on, and die at the `skip`-th checkpoint if a place is given"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    from sft_nb.train import WholeTrainer, train_run
    if place == "anywhere": return void(train_run(Run(path)))
    save, count = WholeTrainer._save_checkpoint, [0]
    def counted(self, *args, **kwargs):
        count[0] += 1
        if count[0] <= skip: return save(self, *args, **kwargs)
        with deadly(place): return save(self, *args, **kwargs)
    with patch.object(WholeTrainer, "_save_checkpoint", counted): train_run(Run(path))


def void(x)->None: pass


def killed(run:Run, place:str, rng:random.Random, longest:float)->str:
    "Train on until it is killed, or to the end if the moment comes too late; says what happened"
    p = PROCESSES.Process(target=part, args=(str(run.path), place, rng.randrange(2)))
    p.start()
    if place == "anywhere":
        p.join(rng.uniform(.2, longest))
        if p.is_alive(): os.kill(p.pid, signal.SIGKILL)
    p.join(300)
    assert not p.is_alive(), "it hangs"
    return "killed" if p.exitcode == -signal.SIGKILL else f"ended ({p.exitcode})"


def disturbed(cfg:Config, name:str, n:int, rng:random.Random, longest:float, say=lambda *a: None)->tuple[Run,int]:
    "A run that is killed `n` times on its way, or as often as it takes; finished, and how often it was"
    from sft_nb.run import create_run
    run, kills, places = create_run(replace(cfg, run_name=name), state="starting"), 0, [*PLACES]
    while run.state != "finished":
        place = rng.choice(places) if kills < n else "nowhere"
        what = killed(run, place, rng, longest)
        kills += what == "killed"
        say(f"  {place}: {what}, {run.state} with {[p.name for p in run.checkpoints()]}")
        if what == "ended (1)": raise AssertionError(run.status)
    return run, kills


def differences(run:Run, whole:Run)->list[str]:
    "How a run differs from the undisturbed one"
    found = []
    if (run.adapter/"adapter_model.safetensors").read_bytes() != (whole.adapter/"adapter_model.safetensors").read_bytes(): found.append("the adapter has other bytes")
    keys = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "eval_loss")
    lines = lambda r: [{k: m[k] for k in keys if k in m} for m in r.metrics()]
    a, b = lines(run), lines(whole)
    if a != b: found.append(f"metrics.jsonl differs: {next(((x, y) for x, y in zip(a, b) if x != y), (len(a), len(b)))}")
    if left := [p.name for p in (run.path/"checkpoints").glob("*") if p.suffix]: found += [f"left behind: {left}"] if any(n.endswith((".aside", ".gone")) for n in left) else []
    return found


def undisturbed(cfg:Config)->tuple[Run,float]:
    "The run to compare with, and its seconds"
    from sft_nb.run import create_run
    run, began = create_run(replace(cfg, run_name="undisturbed"), state="starting"), time.monotonic()
    p = PROCESSES.Process(target=part, args=(str(run.path), "anywhere", 0))
    p.start(), p.join(600)
    assert run.state == "finished", run.status
    return run, time.monotonic() - began


def main()->int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--each", type=int, default=4, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, folder, kills, k = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="sft_nb-soak-")), 0, 0
    cfg = setup(folder)
    whole, seconds = undisturbed(cfg)
    while kills < options.kills:
        k += 1
        run, n = disturbed(cfg, f"run-{k}", min(options.each, options.kills - kills), rng, seconds, say=print)
        kills += n
        if wrong := differences(run, whole):
            print(f"run {k}: {'; '.join(wrong)}\n{run.path}")
            return 1
        print(f"run {k}: the same after {n} kills ({kills} in all)", flush=True)
    return 0


if __name__ == "__main__": sys.exit(main())
