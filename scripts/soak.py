"""Kill processes that write into a run at random moments, and check that nothing is lost: a training that
resumes ends like an undisturbed one, a run that cannot resume says so in one line, and no run hides another.

    python scripts/soak.py --kills 200 --seed 1                  # create, preparation, preflight, training, resume ...
    python scripts/soak.py --kills 60 --moments training         # trainings of four kinds, mostly inside a checkpoint

Exits with 1 at the first run whose adapter differs in a byte, whose metrics.jsonl has a gap or a double line, that
cannot be listed, or that neither resumes nor says why not. `tests/training/test_kill.py` does a dozen."""
import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from sft_nb.config.load import Config, load_config
from sft_nb.base.report import SftError
from sft_nb.runs.directory import Run, can_resume, check_free, create_run
from sft_nb.runs.process import record_launcher
from sft_nb.runs.directory import list_runs

PLACES = ("anywhere", "while weights are written", "before the list of files", "before the rename",
          "after the rename", "while old checkpoints go")
os.environ.setdefault("OMP_NUM_THREADS", "1")   # more threads do not speed up a model of this size
# fork from a process that has only imported torch, so that a start does not take ten seconds
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["sft_nb.training.train", "bitsandbytes", "sft_nb.planning.plan",
                                  "sft_nb.evaluation.evaluate", "sft_nb.proof.merge", "sft_nb.training.trainer",
                                  "deepspeed", "wandb", "matplotlib.pyplot", "peft.tuners.lora.bnb",
                                  "transformers.integrations.bitsandbytes"])   # missing modules are skipped


KINDS = dict(   # of trainings
    qlora={}, full=dict(method="full"),
    packed=dict(method="lora", max_tokens_per_batch=256, gradient_accumulation_steps=1),
    together=dict(method="lora", num_processes=2, gradient_accumulation_steps=1))

def setup(folder:Path)->Config:
    "24 steps in two epochs, with dropout, held-out loss, and log lines that do not coincide with checkpoints"
    return load_config(
        "demo", runs_dir=str(folder), max_samples=96, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, lora_r=4, logging_steps=2, save_steps=3, save_total_limit=2, eval_steps=6,
        eval_samples=8, preflight=False)


def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def deadly(place:str):
    "A context that kills this process with SIGKILL at a place inside a checkpoint"
    from sft_nb.runs import checkpoint
    from sft_nb.training import trainer
    seal, rmtree = checkpoint.write_checksums, checkpoint.shutil.rmtree
    def seal_and_die(folder):
        seal(folder)
        die()
    def half_gone(path, *args, **kwargs):
        if str(path).endswith(".gone") and Path(path).exists():
            next(Path(path).iterdir()).unlink()
            die()
        return rmtree(path, *args, **kwargs)
    at = {"while weights are written": (trainer.SupervisedTrainer, "_save_rng_state", die),
          "before the list of files": (checkpoint, "write_checksums", die),
          "before the rename": (checkpoint, "write_checksums", seal_and_die),
          "after the rename": (trainer, "prune", die),
          "while old checkpoints go": (checkpoint.shutil, "rmtree", half_gone)}
    with patch.object(*at[place]): yield


def part(path:str, place:str, skip:int, group:dict)->None:
    "Run by a process: continue training; with a place, die inside a checkpoint after skipping `skip`"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.environ |= group
    from sft_nb.training.train import train_run, workbench_of_run
    from sft_nb.training.trainer import SupervisedTrainer
    save, count = SupervisedTrainer._save_checkpoint, 0
    def counted(self, *args, **kwargs):
        nonlocal count
        count += 1
        here = place in PLACES[1:] and count > skip
        with deadly(place) if here else nullcontext(): return save(self, *args, **kwargs)
    with patch.object(SupervisedTrainer, "_save_checkpoint", counted):
        train_run(Run(path), workbench_of_run(Run(path)))


def killed(run:Run, place:str, rng:random.Random, longest:float)->bool:
    "Continue training until one of its processes is killed, or to the end if the kill comes too late"
    n, group = run.config.num_processes, {}
    victim = rng.randrange(n) if place == "anywhere" else 0   # only the first writes checkpoints
    if n > 1:   # as srun starts them: nobody ends the others
        with socket.socket() as free:
            free.bind(("localhost", 0))
            group = dict(WORLD_SIZE=str(n), MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    processes = [
        PROCESSES.Process(target=part, args=(
            str(run.path), place if k == victim else "nowhere", rng.randrange(2),
            group and group | dict(RANK=str(k), LOCAL_RANK=str(k))))
        for k in range(n)]
    for p in processes: p.start()
    p = processes[victim]
    if place == "anywhere":
        p.join(rng.uniform(.1, longest))
        if p.is_alive(): os.kill(p.pid, signal.SIGKILL)
    for p in processes: p.join(300)
    codes = [p.exitcode for p in processes]
    died = codes[victim] == -signal.SIGKILL
    if any(code not in ((0, 1) if died else (0,)) for k, code in enumerate(codes) if not (died and k == victim)):
        raise AssertionError(f"{place}: they ended with {codes}: {run.status}")
    return died


def disturbed(cfg:Config, name:str, places:list[str], rng:random.Random, longest:float, say=lambda *a: None)->Run:
    "A finished run that was killed at up to four of `places`, which are removed from the list"
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
    "The lines of metrics.jsonl without timings, which must be the same"
    return [{k: m[k] for k in KEYS if k in m} for m in run.metrics()]


def differences(run:Run, whole:Run)->list[str]:
    "How a run differs from the undisturbed one"
    found = []
    a, b = (next(r.adapter.glob("*model.safetensors")).read_bytes() for r in (run, whole))
    if a != b: found.append("the adapter has other bytes")
    for state in sorted(whole.checkpoints()[-1].glob("*.pt*")):   # of the optimiser, the schedule, the random numbers
        if (run.checkpoints()[-1]/state.name).read_bytes() != state.read_bytes():
            found.append(f"{state.name} has other bytes")
    a, b = lines(run), lines(whole)
    if a != b:
        first = next(((x, y) for x, y in zip(a, b) if x != y), (len(a), len(b)))
        found.append(f"metrics.jsonl differs: {first}")
    left = [p.name for p in run.path.rglob("*") if p.suffix in (".aside", ".gone", ".new")]
    if left: found.append(f"left behind: {left}")
    return found


def undisturbed(cfg:Config)->tuple[Run,float]:
    "The run to compare with, and the seconds it took"
    run, began = create_run(replace(cfg, run_name="undisturbed"), state="starting"), time.monotonic()
    assert not killed(run, "nowhere", random.Random(), 0) and run.state == "finished", run.status
    return run, time.monotonic() - began


# --- the other moments

MOMENTS = dict(   # moment -> the function at which it begins
    create=("sft_nb.runs.directory", "_create_directory"), preparation=("sft_nb.workbench", "prepare"),
    preflight=("sft_nb.training.train", "preflight"), training=("sft_nb.training.train", "_prepare_folder"),
    resume=("sft_nb.training.train", "check_provenance"), evaluate=("sft_nb.evaluation.evaluate", "make_evaluator"),
    merge=("sft_nb.proof.merge", "_write_and_compare"))


def act(moment:str, path:Path, cfg:Config)->None:
    "Do the work that is interrupted at `moment`"
    if moment == "create": create_run(replace(cfg, run_name=path.name))
    elif moment == "evaluate": importlib.import_module("sft_nb.evaluation.evaluate").evaluate(Run(path), progress=False)
    elif moment == "merge": importlib.import_module("sft_nb.proof.merge").merge(Run(path), prompts=2)
    else:
        training = importlib.import_module("sft_nb.training.train")
        training.train_run(Run(path), training.workbench_of_run(Run(path)))


@contextmanager
def dying(moment:str, after:float, writes:int):
    "From the start of a moment: SIGKILL after `after` seconds, or just before a file is flushed to disk"
    module, name = MOMENTS[moment]
    module, sync = importlib.import_module(module), os.fsync
    begin, left = getattr(module, name), None
    def counted(handle):
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0: die()
        return sync(handle)
    def begun(*args, **kwargs):
        nonlocal left
        if writes: left = writes - 1
        else: threading.Timer(after, die).start()
        return begin(*args, **kwargs)
    with patch.object(module, name, begun), patch.object(os, "fsync", counted): yield


def doomed(moment:str, path:Path, cfg:Config, after:float, writes:int)->None:
    "Run by the process to be killed"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    if path.exists(): record_launcher(path)   # as `launch` records the process
    with dying(moment, after, writes): act(moment, path, cfg)
    os._exit(0)   # a timer may still be pending


def in_a_process(target, *args)->int:
    p = PROCESSES.Process(target=target, args=args)
    p.start()
    p.join(600)
    return p.exitcode


def whole_again(path:Path, cfg:Config)->None:
    "Resume the run to its end in an undisturbed process"
    sys.stdout = sys.stderr = open(os.devnull, "w")
    record_launcher(path)
    act("training", path, cfg)


def one_line(error:SftError)->str:
    "What is wrong with the error's message; empty if nothing"
    says = str(error)
    return "" if "\n" not in says and len(says) < 600 and error.fix else f"no line with a way out: {says}"


def going_on(run:Run, whole:Run, cfg:Config)->list[str]:
    "Problems of a killed run, which must resume, or say in one line what to do, and that must work"
    try: can_resume(run)
    except SftError as e:
        if wrong := one_line(e): return [wrong]
        anew = create_run(replace(load_config(run.path), run_name=f"{run.name}-anew"), state="starting")
        return going_on_at(anew, whole, cfg)
    return going_on_at(run, whole, cfg)


def going_on_at(run:Run, whole:Run, cfg:Config)->list[str]:
    code = in_a_process(whole_again, run.path, cfg)
    if code or run.state != "finished": return [f"it ended with {code}: {run.status}"]
    return differences(run, whole)


def made_or_not(path:Path, cfg:Config)->list[str]:
    "Problems of a run killed during creation: it must be complete, or its name must be free"
    if path.exists():
        first = {"config.json", "environment.json", "status.json"}
        missing = first - {p.name for p in path.iterdir()}
        return [f"it is half made, without {missing}"] if missing else []
    check_free(cfg.runs_dir, path.name)
    create_run(replace(cfg, run_name=path.name))
    return [f"left behind: {p.name}" for p in path.parent.glob(".*.new")]


def results_again(moment:str, run:Run, cfg:Config)->list[str]:
    "Problems after a killed evaluation or merge: repeating it must work and leave nothing of the first"
    code = in_a_process(act, moment, run.path, cfg)
    if code: return [f"{moment} ended with {code} when it was done again"]
    if moment == "evaluate": json.loads((run.path/"eval/adapter.json").read_text())
    shutil.rmtree(run.path/"merged", ignore_errors=True)
    return [f"left behind: {p}" for p in run.path.rglob("*") if p.suffix == ".new"]


def subject(moment:str, whole:Run, cfg:Config, name:str)->tuple[Path, Config]:
    "The run in which the kill happens, and its config"
    path = whole.path.parent/name
    if moment == "create": return path, cfg
    if moment in ("evaluate", "merge", "resume"): shutil.copytree(whole.path, path)
    if moment == "resume":   # stopped at the last checkpoint but one
        shutil.rmtree(path/"adapter")
        shutil.rmtree(Run(path).checkpoints()[-1])
        Run(path).set_status("running", step=22)
    if moment in ("evaluate", "merge", "resume"): return path, cfg
    cfg = replace(cfg, run_name=name, preflight=moment == "preflight", cache_dir=f"{path}-cache")
    return create_run(cfg, state="starting").path, cfg


LONGEST = dict.fromkeys(MOMENTS, 5.)   # seconds, until one finished without being killed

def one_kill(moment:str, whole:Run, cfg:Config, name:str, rng:random.Random)->tuple[bool, list[str]]:
    "Was the process killed, and what is wrong afterwards?"
    path, cfg = subject(moment, whole, cfg, name)
    after, writes = rng.uniform(0, LONGEST[moment]), rng.choice((0, 0, 1, 2, 3, 5, 8))
    if moment == "create": writes = rng.randrange(1, 16)
    began = time.monotonic()
    code = in_a_process(doomed, moment, path, cfg, after, writes)
    if code not in (0, -signal.SIGKILL): return False, [f"it ended with {code}"]
    if code == 0 and not writes: LONGEST[moment] = min(LONGEST[moment], time.monotonic() - began)
    listed = set(list_runs(whole.path.parent).run)
    hidden = {p.parent.name for p in whole.path.parent.glob("[!.]*/config.json")} - listed
    if hidden: return bool(code), [f"not listed: {hidden}"]
    if moment == "create": return bool(code), made_or_not(path, cfg)
    if moment in ("evaluate", "merge") and not code: return False, []   # it finished before it could be killed
    if moment in ("evaluate", "merge"): return True, results_again(moment, Run(path), cfg)
    if code == 0: return False, differences(Run(path), whole)
    return True, going_on(Run(path), whole, cfg)


def all_moments(whole:Run, cfg:Config, kills:int, moments:list[str], rng:random.Random, say=print)->list[str]:
    "Kill at each moment in turn; return the problems of the first run that has any"
    done = k = 0
    while done < kills:
        k += 1
        moment = moments[k % len(moments)]
        hit, wrong = one_kill(moment, whole, cfg, f"run-{k}", rng)
        done += hit
        say(f"{k}: {moment}: {'killed' if hit else 'ended'}; {'; '.join(wrong) or 'sound'}; {done} kills", flush=True)
        if wrong: return [f"run-{k}", moment, *wrong]
        for p in whole.path.parent.glob(f"run-{k}*"): shutil.rmtree(p, ignore_errors=True)
    return []


def trainings(whole:Run, cfg:Config, seconds:float, kills:int, rng:random.Random)->list[str]:
    "Kill only trainings, most of them inside a checkpoint, up to four times each; return the problems"
    places, k = [rng.choice(PLACES) for _ in range(kills)], 0
    while places:
        k += 1
        run = disturbed(cfg, f"run-{k}", places, rng, seconds, say=print)
        if wrong := differences(run, whole): return [str(run.path), *wrong]
        print(f"run {k}: the same; {kills - len(places)} kills so far", flush=True)
    return []


def main()->int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of trainings alone")
    options = parser.parse_args()
    kinds, rng = options.kinds if options.moments == ["training"] else ["qlora"], random.Random(options.seed)
    for kind in kinds:
        folder = Path(tempfile.mkdtemp(prefix=f"sft_nb-soak-{kind}-"))
        cfg = replace(setup(folder), **KINDS[kind])
        whole, seconds = undisturbed(cfg)
        if options.moments == ["training"]: wrong = trainings(whole, cfg, seconds, options.kills // len(kinds), rng)
        else: wrong = all_moments(whole, cfg, options.kills, options.moments, rng)
        if wrong: break
        print(f"{kind}: sound", flush=True)
        shutil.rmtree(folder)
    if wrong: print("; ".join(wrong), cfg.runs_dir, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__": sys.exit(main())
