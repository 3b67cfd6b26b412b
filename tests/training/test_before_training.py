"""What is said before a run is written: a preflight that fails; rows, settings or processes that cannot be meant."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from learner import assert_same, small, small_qlora

from sft_nb.config import load_config
from sft_nb.report import ConfigError, SftError
from sft_nb.training.train import check_world, train


def test_a_refusal_writes_nothing_and_a_force_is_written_down(tmp_path):
    cfg = small(tmp_path/"runs", learning_rate=0., preflight=True, max_steps=1)
    with pytest.raises(SftError, match="preflight: .*learning"): train(cfg)
    assert not (tmp_path/"runs").exists()
    run = train(replace(cfg, force=True))
    said = json.loads((run.path/"preflight.json").read_text())
    assert said["status"] == "fail" and "in spite of learning" in said["figures"]["forced"]


def test_a_preflight_leaves_no_trace_in_the_training(tmp_path, undisturbed_qlora):
    run = train(small_qlora(tmp_path, preflight=True))
    assert_same(run, undisturbed_qlora)
    assert json.loads((run.path/"preflight.json").read_text())["status"] != "fail"
    without = json.loads((undisturbed_qlora.path/"preflight.json").read_text())
    assert without["findings"][0]["status"] == "skipped"


def test_bad_data_leaves_no_run_behind(tmp_path):
    (tmp_path/"empty.jsonl").touch()
    cfg = load_config("demo", runs_dir=str(tmp_path/"runs"), train_file=str(tmp_path/"empty.jsonl"))
    with pytest.raises(SftError, match="there is no row in it"): train(cfg)
    assert not (tmp_path/"runs").exists()


def test_an_optimiser_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    runs = tmp_path/"runs"
    cfg = load_config("demo", runs_dir=str(runs), optim="adam_but_better", max_samples=16, eval_samples=0)
    with pytest.raises(ConfigError, match="optim"): train(cfg)
    assert not runs.exists()


def test_a_row_that_no_batch_can_hold_is_said_before_anything_is_written(tmp_path):
    cfg = load_config("demo", runs_dir=str(tmp_path/"runs"), max_samples=50, max_tokens_per_batch=20)
    with pytest.raises(SftError, match="a batch holds 20.*max_tokens_per_batch="): train(cfg)
    assert not (tmp_path/"runs").exists()


def test_processes_that_are_not_what_was_asked_for(tmp_path, monkeypatch):
    bench = SimpleNamespace(cfg=load_config("demo", num_processes=2))
    alone = SimpleNamespace(bench=bench, accelerator=SimpleNamespace(num_processes=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "2 were asked for, 2 were started, and 1 train together.*launch"
    with pytest.raises(SftError, match=says): check_world(alone)
    monkeypatch.setenv("WORLD_SIZE", "1")
    says = "2 were asked for, 1 were started, and 1 train together.*num_processes=1"
    with pytest.raises(SftError, match=says): check_world(alone)
    says = "2 processes are asked for, and this is one.*launch"
    with pytest.raises(ConfigError, match=says): train(small(tmp_path, num_processes=2))
