"""Several processes train one model, for every launcher and every kind of sharding."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from learner import learner, values, weights
from packaging.version import Version
from safetensors.torch import load_file

from sft_nb.config.load import load_config, save_config
from sft_nb.extras import sharding as division
from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import Run
from sft_nb.training.arguments import training_arguments
from sft_nb.training.launch import launch
from sft_nb.training.train import resume, train

TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent/"nbs/recipes/train.slurm"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ZERO3 = dict(zero_optimization=dict(stage=3, stage3_param_persistence_threshold=0), bf16=dict(enabled="auto"))


pytestmark = pytest.mark.usefixtures("warm_processes")


divides = pytest.mark.skipif(Version(version("transformers")) < Version("5.19"), reason="FSDP2 needs transformers 5.19")


def small(folder, **how):
    settings = dict(
        runs_dir=str(folder), max_samples=43, max_steps=4, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, logging_steps=1, save_steps=2, eval_samples=9, eval_steps=3, lora_dropout=0.,
        preflight=False, num_processes=2)
    return load_config("demo", **settings | learner() | dict(max_new_tokens=2) | how)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "The same steps in one process"
    cfg = small(tmp_path_factory.mktemp("alone"), run_name="one", num_processes=1, per_device_train_batch_size=8)
    return train(cfg)


def same(run, other):
    for name in ("loss", "eval_loss", "grad_norm"):
        assert values(run, name) == pytest.approx(values(other, name), rel=1e-5), name
    assert values(run, "num_tokens") == values(other, "num_tokens")


def divided(name, folder):
    "zero2, or a file in which ZeRO-3 divides small weights, too"
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'sft_nb[deepspeed]'")
    if name == "zero2": return name
    (folder/"ds.json").write_text(json.dumps(ZERO3))
    return str(folder/"ds.json")


def until(true, seconds=1200):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.05)
    assert true()


def saved(cfg, folder)->str:
    "A file of the config"
    save_config(cfg, folder/"config.json")
    return str(folder/"config.json")


def free_port()->str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def run_all(commands, more=({},)):
    "Run commands at the same time, each with its environment; until all have ended"
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started = [subprocess.Popen(command, env=os.environ | env, **how) for command, env in zip(commands, more)]
    said = [p.communicate(timeout=1200)[0] for p in started]
    return [subprocess.CompletedProcess(p.args, p.returncode, out) for p, out in zip(started, said)]


def killed_and_resumed(cfg)->Run:
    "A run that was killed after its first checkpoint"
    run = launch(cfg)
    until(lambda: run.checkpoints() or run.state not in ("starting", "running"))
    os.kill(run.owner(), signal.SIGKILL)
    until(lambda: run.launched() is None)
    assert run.state in ("killed", "failed") and run.checkpoints(), run.log()   # the other one may say what it lost
    assert run.resume().wait(timeout=1200) == "finished", run.log()
    return run


def test_gradients_that_zero2_divides_are_learned_as_in_one_process(tmp_path, alone):
    "With a preflight, killed in the middle and resumed"
    run = killed_and_resumed(small(tmp_path, deepspeed=divided("zero2", tmp_path), preflight=True))
    same(run, alone)
    assert json.loads((run.path/"trainer.json").read_text())["processes"] == 2


def test_weights_that_zero3_divides_are_learned_as_in_one_process(tmp_path, alone):
    "And byte for byte the same if it is killed after its first checkpoint and resumed"
    whole = launch(small(tmp_path, deepspeed=divided("zero3", tmp_path), preflight=True))
    assert whole.wait(timeout=1200) == "finished", whole.log()
    same(whole, alone)
    run = Run(shutil.copytree(whole.path, tmp_path/"killed"))
    assert [p.name for p in run.checkpoints()] == ["checkpoint-2", "checkpoint-4"]
    for folder in (run.checkpoints()[-1], run.adapter): shutil.rmtree(folder)
    run.set_status("killed", step=3)
    assert run.resume().wait(timeout=1200) == "finished", run.log()
    assert values(run, "loss") == values(whole, "loss") and weights(run) == weights(whole)


@divides
def test_weights_that_fsdp_divides_are_learned_as_in_one_process(tmp_path, alone):
    "With a preflight, killed in the middle and resumed; its checkpoint is one that a process alone goes on from"
    run = killed_and_resumed(small(tmp_path, fsdp=True, preflight=True))
    same(run, alone)
    state = torch.load(run.checkpoints()[-1]/"optimizer.pt", weights_only=True)["state"]
    theirs = torch.load(alone.checkpoints()[-1]/"optimizer.pt", weights_only=True)["state"]
    for k, of_one in theirs.items():
        for name, t in of_one.items(): assert torch.allclose(t, state[k][name], rtol=1e-3, atol=1e-7), (k, name)


@divides
def test_full_training_whose_rows_are_shared_too(tmp_path):
    "Weights and tokens are divided at once; a tied head is saved once"
    how = dict(method="full", per_device_train_batch_size=8)
    whole = train(small(tmp_path, run_name="one", num_processes=1, **how))
    run = launch(small(tmp_path, run_name="two", fsdp=True, sequence_parallel_size=2, **how))
    assert run.wait(timeout=1200) == "finished", run.log()
    same(run, whole)
    mine, theirs = (load_file(r.path/"adapter/model.safetensors") for r in (run, whole))
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[n], theirs[n], atol=1e-5) for n in mine)


def test_rows_that_two_processes_share_are_learned_as_in_one_process(tmp_path, alone):
    "With a preflight, killed in the middle and resumed"
    run = killed_and_resumed(small(tmp_path, sequence_parallel_size=2, per_device_train_batch_size=8, preflight=True))
    same(run, alone)
    assert run.config.padding_free and run.config.attn_implementation == "varlen"


@divides
def test_one_process_goes_on_with_what_two_began(tmp_path):
    "And two with what one began: the steps keep their rows, and the curve is that of one process"
    rows = dict(max_samples=41, logging_steps=2)   # 32 of them are trained
    whole = train(small(tmp_path, run_name="one", num_processes=1, per_device_train_batch_size=8, **rows))
    run = launch(small(tmp_path, run_name="two", fsdp=True, max_time=0., **rows))
    assert run.wait(timeout=1200) == "stopped" and run.step == 1, run.log()
    resume(run, num_processes=1)
    assert (run.state, run.config.gradient_accumulation_steps, run.config.fsdp) == ("finished", 4, False)
    same(run, whole)
    more = small(tmp_path, run_name="more", num_processes=1, gradient_accumulation_steps=4, max_time=0., **rows)
    run = train(more)
    assert run.state == "stopped"
    assert run.resume(num_processes=2).wait(timeout=1200) == "finished", run.log()
    assert run.config.num_processes == 2
    same(run, whole)


def test_of_eight_trainings_of_one_name_one_begins(tmp_path):
    one = saved(small(tmp_path, num_processes=1, max_steps=1, eval_samples=0, eval_steps=None), tmp_path)
    line = [sys.executable, "-m", "sft_nb", "train", "--config", one, "--run-name", "same"]
    done = run_all([line] * 8, [{}] * 8)
    assert sorted(d.returncode for d in done) == [0] + [2] * 7, [d.stdout for d in done]
    says = "run 'same': (another process is about to train it|.* already exists).* Fix: .*--run-name same-2"
    for refused in (d for d in done if d.returncode): assert re.search(says, refused.stdout), refused.stdout
    assert Run(tmp_path/"same").state == "finished"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "same"]


DISTURBED = """
import os, signal, subprocess
from unittest.mock import patch
import torch
from transformers import TrainerCallback
from sft_nb.config.load import load_config
from sft_nb.training.train import resume, train
from sft_nb.training.trainer import SupervisedTrainer

class Disturbs(TrainerCallback):
    "Something happens to one process as a step begins"
    def on_step_begin(self, args, state, control, **kwargs):
        if (state.global_step + 1, args.process_index) == ({step}, {rank}): {act}

cfg = load_config({config!r})
path = os.path.join(cfg.runs_dir, cfg.run_name)
if os.path.exists(path): resume(path, callbacks=[Disturbs()])
else: train(cfg, callbacks=[Disturbs()])
"""
SEND = "os.kill(os.getpid(), signal.{})"

def disturbed(cfg, folder, step=0, rank=0, act="pass")->list[str]:
    "The command of two processes that begin or continue a run; `act` happens to one of them as `step` begins"
    (folder/"worker.py").write_text(DISTURBED.format(config=saved(cfg, folder), step=step, rank=rank, act=act))
    return [*TORCHRUN, str(folder/"worker.py")]


def test_what_happens_to_one_of_two_processes_does_not_change_the_result(tmp_path):
    "SIGTERM, SIGKILL, no memory, a process that hangs until the run is stopped, and one that is paused"
    cfg = small(tmp_path, run_name="whole", max_steps=12, num_train_epochs=9, eval_steps=None)
    done = run_all([disturbed(cfg, tmp_path)])[0]
    whole, cfg = Run(tmp_path/"whole"), replace(cfg, run_name="parts")
    assert whole.state == "finished", done.stdout

    done, run = run_all([disturbed(cfg, tmp_path, 1, 1, SEND.format("SIGTERM"))])[0], Run(tmp_path/"parts")
    assert (done.returncode, run.state, run.step) == (0, "stopped", 1), done.stdout
    done = run_all([disturbed(cfg, tmp_path, 4, 1, SEND.format("SIGKILL"))])[0]   # the first one: `killed_and_resumed`
    assert done.returncode and run.state in ("failed", "killed"), done.stdout
    assert run.checkpoints()[-1].name == "checkpoint-2"
    no_memory = "patch.object(SupervisedTrainer, 'compute_loss', side_effect=torch.OutOfMemoryError('no')).start()"
    done = run_all([disturbed(cfg, tmp_path, 8, 1, no_memory)])[0]
    assert done.returncode and run.status.reason.startswith("step 8: memory ran out at a micro-batch"), done.stdout
    assert run.status.fix.settings == dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)

    hangs = subprocess.Popen(disturbed(cfg, tmp_path, 10, 1, SEND.format("SIGSTOP")))
    until(lambda: run.state == "running" and run.step == 9)
    assert run.stop(timeout=.1) == "killed" and hangs.wait(240)
    pause = "subprocess.Popen(['sh', '-c', f'sleep 2; kill -CONT {os.getpid()}'])"
    done = run_all([disturbed(cfg, tmp_path, 10, 0, f"{pause}, {SEND.format('SIGSTOP')}")])[0]
    assert run.state == "finished", done.stdout
    assert values(run, "loss") == values(whole, "loss") and weights(run) == weights(whole)


NOT_FINITE = """
import sys
from sft_nb.config.load import load_config
from sft_nb.training.train import train
sys.path[:0] = {folders}
from test_not_finite import not_finite
with not_finite(3, "gradient"): train(load_config({config!r}))
"""

@pytest.mark.parametrize("by", ["zero2", pytest.param("fsdp", marks=divides)])
def test_a_gradient_that_is_not_finite_stops_before_the_step_is_taken(tmp_path, by):
    how = dict(fsdp=True) if by == "fsdp" else dict(deepspeed=divided(by, tmp_path))
    cfg = small(tmp_path, **how, run_name="infinite")
    script = NOT_FINITE.format(folders=[str(TESTS/"training"), str(TESTS)], config=saved(cfg, tmp_path))
    (tmp_path/"worker.py").write_text(script)
    done = run_all([[*TORCHRUN, str(tmp_path/"worker.py")]])
    run = Run(tmp_path/"infinite")
    assert done[0].returncode == 1 and run.status.state == "failed", done[0].stdout
    says = "step 3: the gradient is not finite; no single row reproduces it; the step's rows are"
    assert run.status.reason.startswith(says) and ("on_nan" in str(run.status.fix)) == (by == "fsdp")
    assert len(values(run, "loss")) == 2 and [p.name for p in run.checkpoints()] == ["checkpoint-2"]


BROKEN_WEIGHTS = """
import sys
import torch
from transformers import TrainerCallback
from sft_nb.config.load import load_config
from sft_nb.training.train import train

class Breaks(TrainerCallback):
    "The update of step 3 makes what this process has of a trained weight NaN"
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step != 3: return
        weight = next(p for p in model.parameters() if p.requires_grad)
        with torch.no_grad(): getattr(weight, "ds_tensor", weight).mul_(float("nan"))

train(load_config({config!r}), callbacks=[Breaks()])
"""

@pytest.mark.parametrize("by", [   # weights that zero2 leaves whole become NaN as in one process
    *(pytest.param(by, marks=pytest.mark.soak) for by in ("zero2", "zero3")), pytest.param("fsdp", marks=divides)])
def test_weights_that_become_nan_end_a_training_of_two_processes_with_the_last_good_checkpoint(tmp_path, by):
    how = dict(fsdp=True) if by == "fsdp" else dict(deepspeed=divided(by, tmp_path))
    cfg = small(tmp_path, **how, run_name="nan", eval_samples=0, eval_steps=None)
    (tmp_path/"worker.py").write_text(BROKEN_WEIGHTS.format(config=saved(cfg, tmp_path)))
    done = run_all([[*TORCHRUN, str(tmp_path/"worker.py")]])
    run = Run(tmp_path/"nan")
    assert done[0].returncode == 1 and run.status.state == "failed", done[0].stdout
    assert "an earlier step has made the weights NaN or infinite, the first in " in run.status.reason
    assert "finite numbers, as in checkpoint-2" in run.status.reason and "row" not in run.status.reason
    assert [p.name for p in run.checkpoints()] == ["checkpoint-2"] and not run.adapter.exists()
    assert "--resume" in run.status.fix.says("shell")


SRUN = """#!/bin/bash
shift
printf '%s\\0' "$@" > "$TASK"
"""

def by_slurm(folder, *options, name="both"):
    "What the recipe's script hands to srun in a job of that name, in two tasks"
    (folder/"bin").mkdir(exist_ok=True)
    (folder/"bin/srun").write_text(SRUN)
    (folder/"bin/srun").chmod(0o755)
    job = dict(SLURM_JOB_NAME=name, RUNS_DIR=str(folder/"a b"), MASTER_PORT=free_port())
    path = os.pathsep.join([str(folder/"bin"), os.environ["PATH"]])
    script = run_all([["bash", str(SCRIPT), *options]], [job | dict(PATH=path, TASK=str(folder/"task"))])[0]
    assert script.returncode == 0, script.stdout
    program, *line = (folder/"task").read_text().split("\0")[:-1]
    assert program == "sft_nb"
    tasks = [job | dict(SLURM_PROCID=k, SLURM_LOCALID=k, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="localhost")
             for k in "01"]
    done = run_all([[sys.executable, "-m", program, *line]] * 2, tasks)
    return subprocess.CompletedProcess(line, max(d.returncode for d in done), "".join(d.stdout for d in done))

def by_torchrun(folder, *options, name="both"):
    run = folder/"a b"/name
    more = [*options, "--runs-dir", str(run.parent), "--run-name", name]
    if run.exists(): more = ["--resume", str(run), *(options if "--max-steps" in options else ())]
    return run_all([[*TORCHRUN, "-m", "sft_nb", "train", *more]])[0]


@pytest.mark.parametrize("start", [by_torchrun, by_slurm])
def test_who_starts_two_processes_starts_one_training(start, tmp_path, alone):
    "Stopped after a step, and started again"
    line = ["--config", saved(small(tmp_path, num_processes=1), tmp_path)]
    done = start(tmp_path, *line, "--max-time", "0")
    run = Run(tmp_path/"a b/both")
    assert done.returncode == 0 and run.status.state == "stopped", done.stdout
    assert [p.name for p in run.path.parent.iterdir()] == ["both"] and len(values(run, "loss")) == 1
    assert run.config.num_processes == 2
    done = start(tmp_path, *line)
    assert done.returncode == 0 and done.stdout.count("run directory:") == 1, done.stdout   # one tells what came out
    same(run, alone)
    if start is by_slurm: return   # its script begins a run, or continues one that is not finished
    steps = run.step + 1
    done = start(tmp_path, "--max-steps", str(steps))
    assert done.returncode == 0 and (run.state, run.step) == ("finished", steps), done.stdout


def test_an_error_of_the_first_process_is_that_of_all(tmp_path):
    "Nobody waits for who is gone"
    bad = saved(small(tmp_path, learning_rate=0., preflight=True), tmp_path)
    line = ["-m", "sft_nb", "train", "--config", bad, "--run-name", "bad"]
    together = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=free_port())
    for done in run_all([[sys.executable, *line]] * 2, [together | dict(RANK=k, LOCAL_RANK=k) for k in "01"]):
        assert done.returncode == 1 and done.stdout.count("learning_rate is 0: nothing is learned") == 1, done.stdout
    assert Run(tmp_path/"bad").status.state == "failed"


def test_settings_that_cannot_be_divided_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(division, "version", lambda name: "5.19.0")
    for how in (dict(deepspeed="zero2"), dict(fsdp=True)):
        with pytest.raises(ConfigError, match="it shards across processes, and there is only one"):
            train(small(tmp_path, num_processes=1, **how))
    def says(**how):
        with pytest.raises(ConfigError) as said: training_arguments(small(tmp_path, **how), tmp_path)
        return str(said.value)
    assert "it cannot be skipped" in says(deepspeed="zero2", on_nan="skip")
    assert "packed 4-bit weights cannot be sharded" in says(deepspeed="zero3", method="qlora")
    assert "4-bit and 8-bit weights cannot be sharded" in says(fsdp=True, method="qlora")
    assert "both shard the state" in says(fsdp=True, deepspeed="zero2")
    assert "the state of paged_adamw_8bit does not have the shape" in says(fsdp=True, optim="paged_adamw_8bit")
    monkeypatch.setattr(division, "version", lambda name: "5.18.0")
    assert "transformers 5.19 or newer. Fix: pip install -U transformers" in says(fsdp=True)
    assert "a compiled layer" in says(deepspeed="zero3", kernels="compile")
    assert not list(tmp_path.iterdir())


def test_a_number_format_that_deepspeeds_file_and_the_config_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg = small(tmp_path, deepspeed=divided("file", tmp_path), device="cpu")
    (tmp_path/"ds.json").write_text(json.dumps(ZERO3 | dict(bf16=dict(enabled=True))))
    with pytest.raises(ConfigError, match="ds.json: bf16 is True, and the training uses another format.*bfloat16"):
        training_arguments(cfg, tmp_path)
