"""A training in processes of its own: two are one, a crash says why, and who is asked to stop does."""
import json, os, signal, subprocess, sys, time
from dataclasses import replace

import pytest

from sft_nb.config import load_config
from sft_nb.launch import launch
from sft_nb.report import SftError
from sft_nb.run import Run
from sft_nb.train import train


@pytest.fixture(autouse=True)
def one_thread_each(monkeypatch): monkeypatch.setenv("OMP_NUM_THREADS", "1")


def small(folder, **how):
    return load_config("demo", **dict(dict(runs_dir=str(folder), max_samples=75, max_steps=6, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1, save_steps=3,
                                           eval_samples=9, eval_steps=3, lora_dropout=0., preflight=False), **how))


def curve(run): return [m["loss"] for m in run.metrics() if "loss" in m]


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.1)
    assert true()


def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    "75 rows do not divide by 16: the last batches are cut, one rank gets rows without labels, and the means are the same"
    two = launch(small(tmp_path, run_name="two", max_steps=-1), num_processes=2)
    one = train(small(tmp_path, run_name="one", max_steps=-1, per_device_train_batch_size=8))
    more = train(small(tmp_path, run_name="more", max_steps=-1, gradient_accumulation_steps=4))
    assert two.wait(timeout=240) == "finished", two.log()
    assert json.loads((two.path/"trainer.json").read_text())["processes"] == 2 and len(curve(two)) == len(curve(one)) == 10
    assert curve(two) == pytest.approx(curve(one), rel=1e-5) and curve(more) == pytest.approx(curve(one), rel=1e-5)
    held_out = lambda r: [m["eval_loss"] for m in r.metrics() if "eval_loss" in m]
    assert held_out(two) == pytest.approx(held_out(one), rel=1e-5)
    tokens = lambda r: [m["num_tokens"] for m in r.metrics() if "num_tokens" in m]
    assert tokens(two)[:4] == tokens(one)[:4]
    assert {p.name for p in two.checkpoints()[-1].glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_two_processes_stop_together_and_go_on(tmp_path):
    whole = launch(small(tmp_path, run_name="whole", max_steps=24, num_train_epochs=20, eval_steps=None), num_processes=2)
    assert whole.wait(timeout=240) == "finished"
    run = launch(small(tmp_path, run_name="parts", max_steps=24, num_train_epochs=20, eval_steps=None), num_processes=2)
    until(lambda: len(run.metrics()) > 2 or run.state not in ("starting", "running"))
    assert run.stop() == "stopped" and run.launched() is None, run.log()
    assert 2 < run.status["step"] < 24 and run.checkpoints()[-1].name == f"checkpoint-{run.status['step']}"
    assert run.resume().wait(timeout=240) == "finished", run.log()
    assert curve(run) == curve(whole)
    assert (run.adapter/"adapter_model.safetensors").read_bytes() == (whole.adapter/"adapter_model.safetensors").read_bytes()


def test_a_crash_says_why_in_the_parent(tmp_path):
    run = launch(small(tmp_path, run_name="shot", max_steps=5000, num_train_epochs=900))
    until(run.checkpoints)
    os.kill(run.owner(), signal.SIGKILL)
    with pytest.raises(SftError, match=r"run 'shot': its process ended without a word at step [1-9].*sft_nb train --resume") as said: run.wait(timeout=60)
    assert "step 3 of 5000: loss" in said.value.__notes__[0]
    assert run.state == "killed" and Run.attach(run.path).resume(max_time=0.).wait(timeout=120) == "stopped"
    refused = launch(small(tmp_path, run_name="refused", learning_rate=0., preflight=True))
    with pytest.raises(SftError, match="preflight: .*learning"): refused.wait(timeout=240)
    assert refused.status["state"] == "failed"
    (run.path/"data.json").write_text('{"figures": {"train: fingerprint": "another"}}')
    with pytest.raises(SftError, match="the training rows are not those it began with"): run.resume().wait(timeout=120)
    assert run.status["state"] == "failed" and run.status["step"] > 0 and json.loads((run.path/"environment.json").read_text())["device"] == "cpu"


def test_a_process_that_does_not_listen_is_killed(tmp_path):
    run = launch(small(tmp_path, run_name="deaf", max_steps=5000, num_train_epochs=900))
    until(lambda: len(run.metrics()) > 1)
    os.kill(run.owner(), signal.SIGSTOP)
    assert run.stop(timeout=1.) == "killed" and run.launched() is None


def test_the_command_line_detaches_lists_compares_and_stops(tmp_path, capsys):
    from sft_nb.cli import main
    root = tmp_path/"runs"
    line = f"train --config demo --runs-dir {root} --run-name a --detach --max-steps 3000 --num-train-epochs 600 --logging-steps 1 --no-preflight --eval-samples 0"
    done = subprocess.run([sys.executable, "-c", "import sys; from sft_nb.cli import main; sys.exit(main())", *line.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "a trains in process" in done.stdout   # and its parent is gone
    until(lambda: len(Run(root/"a").metrics()) > 1)
    assert main(["train", "--resume", str(root/"a")]) == 2 and "is training it now" in capsys.readouterr().err
    assert main(["stop", str(root/"a")]) == 0 and "a: stopped at step" in capsys.readouterr().out
    train(replace(Run(root/"a").config, run_name="b", learning_rate=1e-3, max_steps=2))
    assert main(["runs", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "stopped" in out and "finished" in out
    assert main(["runs", "a", f"{root}/b", "--root", str(root)]) == 0
    assert "learning_rate" in capsys.readouterr().out
    assert main(["runs", "a", "--root", str(root), "--json"]) == 0 and json.loads(capsys.readouterr().out)[0]["state"] == "stopped"
