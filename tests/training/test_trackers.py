"""Trackers receive the lines of metrics.jsonl, and no file contains a secret."""
import json
import os
import shutil
import struct
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
from learner import small

from sft_nb.evaluation.evaluate import evaluate, Evaluation
from sft_nb.runs.directory import Run
from sft_nb.training.train import train
from sft_nb.training.trainer import SupervisedTrainer

BLOCK, HEAD = 32768, 7   # of LevelDB's log format
SECRET, KEY = "hf_very_secret_word", "a1b2c3d4e5" * 4


def records(data:bytes):
    "Records behind wandb's header of 7 bytes: blocks of 32 KiB, pieces with crc, length and kind"
    at, whole = HEAD, b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD: at += left
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + HEAD + length > len(data): return   # it is being written
        whole += data[at + HEAD:at + HEAD + length]
        at += HEAD + length
        if kind in (1, 4):   # a full record, or the last piece of one
            yield whole
            whole = b""


def lines_of_wandb(folder, last:str, n:int)->list[dict]:
    "The history in an offline wandb file; wandb may still write it, so `n` lines of its last scalar are waited for"
    late, found = time.monotonic() + 60, read_wandb(folder)
    while sum(last in line for line in found) < n and time.monotonic() < late:
        time.sleep(.2)
        found = read_wandb(folder)
    return found


def read_wandb(folder)->list[dict]:
    from wandb.proto import wandb_internal_pb2
    found = []
    newest = max(folder.rglob("*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    for data in records(newest.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history": continue
        found.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return found


def events_of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(next(folder.rglob("events*")).parent))
    events.Reload()
    return events


@pytest.fixture
def secrets(tmp_path, monkeypatch):
    "Secrets in the environment and in a file .env"
    for name in ("HF_TOKEN", "MY_API_KEY"): monkeypatch.setenv(name, SECRET)
    (tmp_path/".env").write_text(f"WANDB_API_KEY={KEY}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def assert_no_secret(folder)->None:
    for file in folder.rglob("*"):
        if not file.is_file(): continue
        for secret in (SECRET, KEY): assert secret.encode() not in file.read_bytes(), file


def test_trackers_have_the_lines_of_metrics_and_no_file_has_a_secret(tmp_path, monkeypatch, secrets):
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train(small(tmp_path/"runs", report_to=("wandb", "tensorboard"), eval_steps=2, eval_samples=4,
                      max_steps=4, save_steps=4, max_new_tokens=4))
    events, history = events_of_tensorboard(run.path/"tensorboard"), lines_of_wandb(run.path/"wandb", "eval/loss", 2)
    for name, scalar in dict(loss="train/loss", eval_loss="eval/loss", learning_rate="train/learning_rate").items():
        ours = [(m["step"], pytest.approx(m[name], rel=1e-6)) for m in run.metrics() if name in m]
        assert [(e.step, e.value) for e in events.Scalars(scalar)] == ours
        assert [(line["train/global_step"], line[scalar]) for line in history if scalar in line] == ours
    assert wandb.run is None and "WANDB_RUN_ID" not in os.environ and "TENSORBOARD_LOGGING_DIR" not in os.environ
    assert_no_secret(tmp_path/"runs")
    e = evaluate(run, eval_samples=4, progress=False)
    events = events_of_tensorboard(run.path/"tensorboard")
    told = lines_of_wandb(run.path/"wandb", "eval/accuracy", 1)[-1]
    assert [(s.step, s.value) for s in events.Scalars("eval/accuracy")] == [(run.step, pytest.approx(e.tuned.accuracy))]
    assert (told["train/global_step"], told["eval/accuracy"]) == (run.step, e.tuned.accuracy)
    table, = (run.path/"wandb").rglob("*.table.json")
    rows = json.loads(table.read_text())["data"]
    assert [row[3] for row in rows] == [a.text for a in e.tuned.answers] and wandb.run is None


def test_a_tracker_that_fails_costs_a_line_and_no_score(undisturbed, tmp_path, capfd):
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"learner-1"))
    run.keep(replace(run.config, report_to=("tensorboard",)))
    (run.path/"tensorboard").write_text("a file where a folder should be")
    e = evaluate(run, eval_samples=4, progress=False)
    assert "tensorboard did not get the scores" in capfd.readouterr().err
    assert Evaluation.load(run.path/"eval/adapter.json") == e


def test_an_error_with_a_secret_is_written_without_it(tmp_path, secrets):
    refused = RuntimeError(f"https://me:{SECRET}@hub refused")
    with patch.object(SupervisedTrainer, "compute_loss", side_effect=refused), pytest.raises(RuntimeError):
        train(small(tmp_path/"runs", run_name="said"))
    reason = Run(tmp_path/"runs/said").status.reason
    assert reason == "RuntimeError: https://me:<HF_TOKEN>@hub refused" or "<MY_API_KEY>" in reason
    assert_no_secret(tmp_path/"runs")
