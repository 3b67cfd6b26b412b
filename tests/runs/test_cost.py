"""What a run will cost, from an estimate or from measured steps, and what it has cost."""
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from learner import killed_at_eight, small

from sft_nb.cli import main
from sft_nb.planning.plan import plan
from sft_nb.runs.metrics import append_line
from sft_nb.training import recorder
from sft_nb.training.recorder import energy_joules, Recorder
from sft_nb.tokens.prepare import prepare


def test_a_plan_says_hours_and_money_with_evaluations(tmp_path):
    cfg = small(tmp_path, price=2.5, eval_samples=16, eval_steps=2)
    made = plan(prepare(cfg))
    tokens, rate = prepare(cfg).eval.lengths.sum(), made.tokens_per_second
    assert made.evaluation_seconds == pytest.approx(5 * tokens / rate / 2)   # 10 steps, a forward pass is half of one
    hours = (made.seconds + made.evaluation_seconds) / 3600
    assert made.cost == pytest.approx(2.5 * hours) and made.to_dict()["cost"] == made.cost
    assert f"{hours:.3g} h at 2.5 (a rough estimate)" in str(made)
    assert plan(prepare(small(tmp_path))).cost is None and "cost" not in str(plan(prepare(small(tmp_path))))


def test_evaluations_by_share_and_by_epoch(tmp_path):
    def seconds(every): return plan(prepare(small(tmp_path, eval_samples=16, eval_steps=every))).evaluation_seconds
    assert seconds(.5) == pytest.approx(seconds(5)) and seconds(None) == 0
    assert seconds("epoch") > 0


def test_a_run_that_has_begun_is_timed_by_its_steps(tmp_path, undisturbed, capsys):
    run = killed_at_eight(tmp_path, undisturbed)
    lines = [json.loads(line) for line in (run.path/"metrics.jsonl").read_text().splitlines()]
    for line in lines: line["seconds"] = 360. * line["step"]
    (run.path/"metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.step_seconds == 360
    assert main(["plan", "--config", str(run.path), "--price", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2.00: 1 h at 2 (as measured in damaged, evaluations included)" in said   # 10 steps
    assert main(["plan", "--config", str(run.path), "--price", "2", "--lora-r", "4"]) == 0   # another training
    assert "(a rough estimate)" in capsys.readouterr().out


def test_a_run_says_what_it_took(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    assert run.cost == ""
    saved = json.loads((run.path/"config.json").read_text())
    saved["config"]["price"] = 3.
    (run.path/"config.json").write_text(json.dumps(saved))
    append_line(run.path/"metrics.jsonl", dict(step=8, seconds=7200., energy_wh=1500.))
    assert run.cost == "6.00: 2 h at 3, 1.5 kWh" and re.search(r"cost +6.00: 2 h at 3, 1.5 kWh", str(run))
    (run.path/"metrics.jsonl").unlink()
    assert run.cost == "" and run.step_seconds is None


def test_the_driver_is_asked_about_the_card_that_trains(monkeypatch, undisturbed):
    assert recorder.gpu_use_percent() is None or 0 <= recorder.gpu_use_percent() <= 100   # None without a GPU
    card = SimpleNamespace(energy=5_000, use=93)
    driver = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID={"GPU-1a": card}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: card.energy,
        nvmlDeviceGetUtilizationRates=lambda card: SimpleNamespace(gpu=card.use))
    for name in ("is_available", "is_initialized"): monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(uuid="1a"))
    monkeypatch.setattr(recorder, "_start_driver", lambda: driver)
    assert (energy_joules(), recorder.gpu_use_percent()) == (5, 93)
    assert Recorder(undisturbed)._figures(dict(loss=1.)) == dict(peak_memory_gib=1, gpu_use_percent=93)
    monkeypatch.undo()
    for name in ("is_available", "is_initialized"): monkeypatch.setattr(torch.cuda, name, lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", None)   # it is not installed
    assert recorder.gpu_use_percent() is None


def test_the_energy_of_all_parts_is_added_up(monkeypatch, undisturbed):
    assert energy_joules() is None or energy_joules() > 0   # None without a GPU
    counted = iter([5_000., 5_000. + 3_600., None])
    monkeypatch.setattr(recorder, "energy_joules", lambda: next(counted))
    watcher = Recorder(undisturbed)
    watcher.energy, watcher.energy_before = recorder.energy_joules(), 2.
    assert watcher._figures(dict(loss=1.))["energy_wh"] == 3   # 3,600 J are 1 Wh
    assert "energy_wh" not in watcher._figures(dict(loss=1.))  # the card no longer answers
