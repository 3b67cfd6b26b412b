"""Training in separate processes: two train together, a crash reports its reason, and a stop request works."""
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from learner import learner, values, weights

from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.base.report import Report, SftError
from sft_nb.runs.directory import Run
from sft_nb.training.launch import launch
from sft_nb.training.train import train


pytestmark = pytest.mark.usefixtures("warm_processes")


def six_steps(folder, **how):
    "Of the demo's 4-bit model, with evaluations and without dropout"
    settings = dict(
        runs_dir=str(folder), max_samples=75, max_steps=6, num_train_epochs=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, logging_steps=1, save_steps=3, eval_samples=9, eval_steps=3, lora_dropout=0.,
        preflight=False, max_new_tokens=4)
    return load_config("demo", **settings | how)


def small(folder, **how):
    "The same of the synthetic learner"
    return six_steps(folder, **learner() | dict(max_new_tokens=4) | how)


def until(true, seconds=1200):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end: time.sleep(.1)
    assert true()


def test_two_processes_are_one_with_twice_the_batch(tmp_path):
    "34 rows do not divide by 16: the last batches are cut, one rank gets rows without labels, the means are the same"
    how = dict(max_samples=43, max_steps=-1)
    two = launch(six_steps(tmp_path, run_name="two", **how), num_processes=2)
    one = train(six_steps(tmp_path, run_name="one", per_device_train_batch_size=8, **how))
    more = train(six_steps(tmp_path, run_name="more", gradient_accumulation_steps=4, **how))
    assert two.wait(timeout=1200) == "finished", two.log()
    assert json.loads((two.path/"trainer.json").read_text())["processes"] == 2
    assert len(values(two, "loss")) == len(values(one, "loss")) == 6
    assert values(two, "loss") == pytest.approx(values(one, "loss"), rel=1e-5)
    assert values(more, "loss") == pytest.approx(values(one, "loss"), rel=1e-5)
    assert values(two, "eval_loss") == pytest.approx(values(one, "eval_loss"), rel=1e-5)
    assert values(two, "num_tokens")[:2] == values(one, "num_tokens")[:2]
    states = {p.name for p in two.checkpoints()[-1].glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}


def test_two_processes_stop_together_and_continue(tmp_path):
    long = dict(max_steps=24, num_train_epochs=20, eval_steps=None, save_steps=12)
    whole = launch(small(tmp_path, run_name="whole", **long), num_processes=2)
    assert whole.wait(timeout=1200) == "finished"
    run = launch(small(tmp_path, run_name="parts", **long), num_processes=2)
    until(lambda: len(run.metrics()) > 2 or run.state not in ("starting", "running"))
    assert run.stop() == "stopped" and run.launched() is None, run.log()
    assert 2 < run.status.step < 24 and run.checkpoints()[-1].name == f"checkpoint-{run.status.step}"
    assert run.resume().wait(timeout=1200) == "finished", run.log()
    assert values(run, "loss") == values(whole, "loss")
    assert weights(run) == weights(whole)


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_going_to_happen_is_said_once_by_one_process_and_by_two(tmp_path, capfd, n):
    (tmp_path/"rows.csv").write_text("q,a\n" + "".join(f"What is {k}?,{k}\n" for k in range(30)))
    code = main(["train", "--model", "tiny", "--train-file", str(tmp_path/"rows.csv"),
                 "--fields", "question=q", "answer=a", "--runs-dir", str(tmp_path), "--max-steps", "1",
                 "--num-processes", str(n), "--method", "lora", "--max-new-tokens", "4"])
    said = capfd.readouterr().out
    assert code == 0, said
    for line in ("rows kept", "memory: ", "lora on cpu", "attention varlen", "preflight: ready", "run directory"):
        assert said.count(line) == 1, (line, said)


def test_a_crash_says_why_in_the_parent(tmp_path):
    run = launch(small(tmp_path, run_name="shot", max_steps=5000, num_train_epochs=900))
    until(run.checkpoints)
    os.kill(run.owner(), signal.SIGKILL)
    says = r"run 'shot': its process died without reporting an error at step [1-9].*Fix: resume\("
    with pytest.raises(SftError, match=says) as said: run.wait(timeout=1200)
    assert "step 3 of 5000: loss" in said.value.__notes__[0]
    assert run.state == "killed"
    assert Run.attach(run.path).resume(max_time=0.).wait(timeout=1200) == "stopped"
    report = Report.load(run.path/"data.json")
    report.figures["train"]["fingerprint"] = "another"
    report.save(run.path/"data.json")
    with pytest.raises(SftError, match="rows have changed since the run started"): run.resume().wait(timeout=1200)
    assert run.status.state == "failed" and run.status.step > 0
    assert json.loads((run.path/"environment.json").read_text())["device"] == "cpu"


def test_a_preflight_that_fails_says_so_in_the_parent(tmp_path):
    refused = launch(small(tmp_path, run_name="refused", learning_rate=0., preflight=True))
    with pytest.raises(SftError, match="preflight: .*learning"): refused.wait(timeout=1200)
    assert refused.status.state == "failed"


def test_a_suspended_process_is_continued_and_stops_and_one_that_stays_suspended_is_killed(tmp_path, monkeypatch):
    run = launch(small(tmp_path, run_name="deaf", max_steps=5000, num_train_epochs=900))
    until(lambda: len(run.metrics()) > 1)
    os.kill(run.owner(), signal.SIGSTOP)
    assert run.stop(timeout=120.) == "stopped" and run.launched() is None
    before, again = len(run.metrics()), run.resume()
    until(lambda: len(run.metrics()) > before and again.owner())
    os.kill(again.owner(), signal.SIGSTOP)
    monkeypatch.setattr(psutil.Process, "send_signal", lambda self, number: None)   # nothing reaches it
    assert again.stop(timeout=1.) == "killed" and again.launched() is None


COMMAND = [sys.executable, "-c", "import sys; from sft_nb.cli import main; sys.exit(main())"]

def test_the_command_line_detaches_lists_compares_and_stops(tmp_path, capsys):
    root = tmp_path/"runs"
    line = (f"train --config demo --runs-dir {root} --run-name a --detach --max-steps 3000 --num-train-epochs 600 "
            "--logging-steps 1 --no-preflight --eval-samples 0 --max-new-tokens 4")
    done = subprocess.run([*COMMAND, *line.split()], capture_output=True, text=True)
    assert done.returncode == 0 and "a trains in process" in done.stdout   # and its parent is gone
    until(lambda: len(Run(root/"a").metrics()) > 1)
    assert main(["train", "--resume", str(root/"a")]) == 2 and "is training it now" in capsys.readouterr().err
    assert main(["stop", str(root/"a")]) == 0 and "a: stopped at step" in capsys.readouterr().out
    train(replace(Run(root/"a").config, run_name="b", learning_rate=1e-3, max_steps=2))
    assert main(["runs", "--runs-dir", str(root)]) == 0
    out = capsys.readouterr().out
    assert "stopped" in out and "finished" in out
    assert main(["runs", "a", f"{root}/b", "--runs-dir", str(root)]) == 0
    assert "learning_rate" in capsys.readouterr().out
    assert main(["runs", "a", "--runs-dir", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "stopped"
