"""Errors before a run is created: a failed preflight; rows, settings or processes that make no sense."""
import json, re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from learner import assert_same, learner, notes, small, small_qlora
from safetensors.torch import load_file

from sft_nb import workbench
from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.distributed import check_processes, main_process_first
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

SHORT = dict(preflight=True, max_samples=16, max_steps=2, save_steps=2)


def test_a_refusal_writes_nothing_and_a_force_is_written_down(tmp_path):
    cfg = small(tmp_path/"runs", learning_rate=0., preflight=True, max_steps=1)
    with pytest.raises(SftError, match="preflight: .*learning"): train(cfg)
    assert not (tmp_path/"runs").exists()
    run = train(replace(cfg, force=True))
    said = json.loads((run.path/"preflight.json").read_text())
    assert said["status"] == "fail" and "despite learning" in said["figures"]["forced"]


def test_a_preflight_leaves_no_trace_in_the_training(tmp_path, undisturbed_qlora, monkeypatch):
    "It trains the model that is trained afterwards, which is loaded once"
    loads, load = [], workbench.load_model
    monkeypatch.setattr(workbench, "load_model", lambda *args: loads.append(1) or load(*args))
    run = train(small_qlora(tmp_path, preflight=True))
    assert_same(run, undisturbed_qlora)
    assert len(loads) == 1
    assert json.loads((run.path/"preflight.json").read_text())["status"] != "fail"
    without = json.loads((undisturbed_qlora.path/"preflight.json").read_text())
    assert without["findings"][0]["status"] == "skipped"


def test_a_model_is_kept_for_a_training_that_may_begin(tmp_path):
    for keep, rate, kept in ((True, 1e-3, True), (True, 0., False), (False, 1e-3, False)):
        bench = workbench.Workbench(small(tmp_path, learning_rate=rate, max_samples=16, max_steps=2))
        report = preflight(bench, keep_model=keep)
        assert bool(report.failed) == (rate == 0) and "model" not in vars(bench)
        assert (bench.given["model"] is not None) == kept


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


@pytest.mark.parametrize("how, says", [
    (dict(lr_scheduler_type="warmup_stable_decay"), r"warmup_stable_decay cannot be made.*num_decay_steps=100"),
    (dict(lr_scheduler_type="cosine_with_min_lr"), r"cosine_with_min_lr cannot be made.*Fix: .*min_lr_rate=0.1"),
    (dict(lr_scheduler_kwargs=("min_lr=0.1",)), "cosine cannot be made.*'min_lr'.*Fix: lr_scheduler_kwargs=None"),
    (dict(lr_scheduler_kwargs=("min_lr_rate",)), "lr_scheduler_kwargs: 'min_lr_rate' is not a pair"),
    (dict(lr_scheduler_type="polynomial", learning_rate=1e-8), "'polynomial' cannot run at 1e-08"),
    (dict(optim="lomo"), "'lomo': the package lomo-optim is not installed. .*optim='adamw_torch'"),
    (dict(num_train_epochs=0, max_steps=-1), "num_train_epochs: .*there are no steps to train"),
    (dict(method="qlora", modules_to_save=("q_proj",)), "q_proj is stored in 4 or 8 bits.*method='lora'")])
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, how, says):
    with pytest.raises(SftError, match=says): train(small(tmp_path/"runs", **SHORT | how))
    assert not (tmp_path/"runs").exists()


@pytest.mark.parametrize("how", [
    dict(method="qlora", modules_to_save=("lm_head",)),
    dict(method="lora", modules_to_save=("norm",), dtype="bfloat16", preflight=False)], ids=str)
def test_settings_that_met_badly_train_now(tmp_path, how):
    "TRL rounds what is trained beside 4 bits; an answer has no autocast"
    run = train(small(tmp_path, **SHORT | how))
    assert run.status.state == "finished" and "first_loss" not in notes(run)


def test_a_head_that_is_trained_begins_as_the_bases_own_numbers(tmp_path):
    run = train(small(tmp_path, **SHORT | dict(method="qlora", modules_to_save=("lm_head",), learning_rate=1e-9,
                                               preflight=False)))
    head = load_file(run.adapter/"adapter_model.safetensors")["base_model.model.lm_head.weight"]
    assert not torch.equal(head, head.bfloat16().float())


def test_a_row_that_no_batch_can_hold_is_said_before_anything_is_written(tmp_path):
    cfg = load_config("demo", runs_dir=str(tmp_path/"runs"), max_samples=50, max_tokens_per_batch=20)
    with pytest.raises(SftError, match="a batch holds 20.*max_tokens_per_batch="): train(cfg)
    assert not (tmp_path/"runs").exists()


def test_processes_that_are_not_what_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    says = "2 were requested, 2 were started, and 1 train together.*launch"
    with pytest.raises(SftError, match=says): check_processes(2, 1, [])
    monkeypatch.setenv("WORLD_SIZE", "1")
    says = "2 were requested, 1 were started, and 1 train together.*num_processes=1"
    with pytest.raises(SftError, match=says): check_processes(2, 1, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    def gather(everyone, own): everyone[:] = [own, ([5, 6], dict(one_product=7, liger=0))]   # rows, kernels
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    check_processes(2, 2, [1, 2], 1, dict(one_product=7, liger=0))
    with pytest.raises(SftError, match="the processes use different ones: .*'liger': 3.*'liger': 0.*kernels='none'"):
        check_processes(2, 2, [1, 2], 1, dict(one_product=7, liger=3))
    with pytest.raises(SftError, match=r"same rows: \[\[5, 6\], \[5, 6\]\]"):
        check_processes(2, 2, [5, 6], 1, dict(one_product=7, liger=0))
    monkeypatch.setenv("WORLD_SIZE", "1")
    says = "2 processes are requested, but this is one.*launch"
    with pytest.raises(ConfigError, match=says): train(small(tmp_path, num_processes=2))


@pytest.mark.parametrize("processes, order", [(1, ["prepares"]), (2, ["waits for the first", "prepares"])])
def test_rows_are_prepared_once_for_all_processes(monkeypatch, processes, order):
    done = []
    class SecondProcess:   # of accelerate's group
        @contextmanager
        def main_process_first(self):
            done.append("waits for the first")
            yield
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr("accelerate.PartialState", SecondProcess)
    with main_process_first(): done.append("prepares")
    assert done == order


def test_the_model_that_a_preflight_keeps_is_as_a_new_one():
    "accelerate would take it for prepared: without processes around it, and without autocast"
    bench = Workbench(load_config("demo", **learner()))
    assert not preflight(bench, keep_model=True).failed
    kept, new = bench.model, load_model(bench.cfg, bench.tokenizer)
    for (name, a), (_, b) in zip(kept.named_modules(), new.named_modules(), strict=True):
        assert {k for k in vars(a) if "forward" in k or "accelerate" in k} == \
            {k for k in vars(b) if "forward" in k or "accelerate" in k}, name
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (kept, new)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("checks", [True, False])
def test_one_paragraph_precedes_a_training(tmp_path, checks, capfd):
    run = train(small(tmp_path, **SHORT | dict(preflight=checks)))
    said = "".join(capfd.readouterr())
    expected = "Learned: answer, as the answer to question. From all 16 rows (max_samples). Not used: problem."
    assert expected in said
    how = "by a measured step" if checks else "a rough estimate"
    assert re.search(rf"2 steps, 1 pass over 16 examples, 8 in a step, (about .+|under a second) \({how}\)", said)
    report = json.loads((run.path/"preflight.json").read_text())
    assert report["summary"].startswith(expected) and report["facts"]["steps"] == 2
