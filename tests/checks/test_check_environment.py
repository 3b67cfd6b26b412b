"Checks of the machine and the plan: each fires on a planted defect and is quiet without it"
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants as constants
import pytest
import torch
from conftest import SHARED
from learner import learner
from planted import bad, small
from transformers import AutoConfig

import sft_nb.configs
from sft_nb.base.report import SftError
from sft_nb.batches.packing import Extent
from sft_nb.checks import environment
from sft_nb.checks.core import run_check
from sft_nb.checks.environment import (check_device, check_disk, check_extent, check_gpu, check_hub, check_memory,
                                       check_tracking, check_usual, check_versions, check_writable)
from sft_nb.checks.preflight import Evidence, preflight
from sft_nb.checks.step import FirstStep, check_measured
from sft_nb.config.load import load_config
from sft_nb.model.load import load_shape
from sft_nb.planning.plan import plan as make_plan
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench

CONFIGS = Path(sft_nb.configs.__file__).parent


@pytest.fixture(scope="module")
def data(): return prepare(small())


@pytest.fixture(scope="module")
def plan(data): return make_plan(small(), data)


def test_versions(monkeypatch):
    assert check_versions(["torch>=1", "numpy>=2.0", "nothing-of-this-name ; extra == 'track'"]) is None
    old = check_versions(["torch>=99", "nothing-of-this-name>=1"])
    assert old.status == "fail" and "nothing-of-this-name is not installed" in old.says
    assert "'torch>=99'" in str(old.fix)
    assert check_versions(None).status == "skipped"
    monkeypatch.setattr(environment, "version", lambda name: "2.5.0.dev20261101+cu128")   # a nightly build
    assert check_versions(["torch>=2.4"]) is None and "torch is 2.5.0.dev" in check_versions(["torch>=2.5"]).says


def test_device(monkeypatch):
    assert check_device().status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found, = run_check("environment.device", check_device, Evidence(Workbench(small(device="cuda"))))
    assert found.status == "fail"


def test_a_card_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "nvidia_cards", lambda: 2)
    assert check_gpu().status == "warn" and "2 NVIDIA cards are present" in check_gpu().says
    assert check_gpu(device="cpu") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_gpu() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(environment, "nvidia_cards", lambda: 0)
    assert check_gpu() is None


@pytest.mark.parametrize("driver, advice", [
    ("13.0", "whl/cu130 (the driver is for CUDA 13.0)"), ("12.9", "whl/cu128 (the"), ("12.8", "whl/cu128 (the"),
    ("12.4", "whl/cu126 (the"), ("11.8", "a newer driver: this one is for CUDA 11.8"),
    ("", "whl/cu128, for the CUDA that nvidia-smi names")])
def test_the_torch_for_a_driver(monkeypatch, driver, advice):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "nvidia_cards", lambda: 1)
    def smi(command, **how):
        if not driver: raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout=f"| NVIDIA-SMI 570.86  Driver Version: 570.86  CUDA Version: {driver} |")
    monkeypatch.setattr("subprocess.run", smi)
    assert advice in str(check_gpu().fix)


def test_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400))
    cfg = small(runs_dir=str(tmp_path/"not/yet/there"), save_steps=10)   # save_total_limit 2: four of them
    how, extent = cfg.values(check_disk), Extent(rows=400, steps=100, passes=2, rows_in_a_step=8)
    found = [check_disk(n, extent, **how) for n in (134, 101, 100, 51, 50)]
    assert [f.status for f in found] == ["fail", "fail", "warn", "warn", "ok"]
    assert [str(f.fix).startswith("save_total_limit=1") for f in found[:2]] == [False, True]   # else it does not help
    assert [str(check_disk(1, extent, **how | dict(save_steps=every)).says)[0] for every in (10, 51, 200, .25, "epoch")
            ] == ["4", "3", "2", "4", "3"]   # the last step writes one too, and then the result

    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**20, resource.RLIM_INFINITY))
    found = check_disk(2**21, extent, **how)
    assert (found.status, str(found.fix)) == ("warn", "ulimit -f unlimited") and "larger than 1 MiB" in found.says


def test_writable(tmp_path):
    assert check_writable(runs_dir=str(tmp_path/"a/b")) is None and not list(tmp_path.iterdir())
    (tmp_path/"file").write_text("")
    assert check_writable(runs_dir=str(tmp_path/"file/runs")).status == "fail"


def test_tracking(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path/"netrc"))
    assert check_tracking() is None
    monkeypatch.setattr(environment, "is_installed", lambda name: False)
    assert "not installed" in check_tracking(wandb=True).says
    monkeypatch.setattr(environment, "is_installed", lambda name: True)
    assert "ask for one" in check_tracking(wandb=True).says
    (tmp_path/"netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check_tracking(wandb=True) is None
    (tmp_path/"netrc").unlink()
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x")):
        monkeypatch.setenv(name, value)
        assert check_tracking(wandb=True) is None
        monkeypatch.delenv(name)


def test_hub(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check_hub() is None and check_hub(model=str(tmp_path)) is None
    assert check_hub(model="nobody/nothing").status == "fail"
    assert "nobody/other" in check_hub(tokenizer="nobody/other").says
    downloaded, commit = tmp_path/"models--nobody--nothing", "0" * 40
    for file, text in (("refs/main", commit), (f"snapshots/{commit}/config.json", "{}")):
        (downloaded/file).parent.mkdir(parents=True)
        (downloaded/file).write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert check_hub(model="nobody/nothing") is None
    assert check_hub(model="nobody/nothing", revision="v2").status == "fail"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path/"empty"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert check_hub(model="nobody/nothing") is None


def test_memory(data, plan):
    tight = replace(plan, device=replace(plan.device, gib=.1), findings=[])
    assert check_memory(plan, "")[0].status == "ok"
    assert check_memory(tight, "").status == "fail"
    assert check_memory(None, "it was odd").says == "it was odd" and check_memory(None, "").status == "skipped"
    assert bad(preflight(small(**learner()), data=data, plan=tight))["plan.memory"].status == "fail"


def test_measured(plan):
    step = FirstStep(1., {}, 1, 1., int(plan.allocated - plan.parts["optimiser"]))
    assert check_measured(plan, step).status == "ok"
    assert check_measured(plan, replace(step, peak_bytes=2 * step.peak_bytes)).status == "warn"
    assert check_measured(plan, replace(step, peak_bytes=None)).status == check_measured(None, step).status == "skipped"


# how long a training is

@pytest.mark.parametrize("more, expected, fix", [
    ({}, "", ""), (dict(num_train_epochs=1000), "1,000 passes over 16 examples", "num_train_epochs=3"),
    (dict(max_steps=1000), "250 passes over 16 examples", "max_steps=12"),
    (dict(per_device_train_batch_size=5000), "a step asks for more rows than there are",
     "per_device_train_batch_size=2, gradient_accumulation_steps=1"),
    (dict(gradient_accumulation_steps=500), "a step asks for more rows than there are", "")])
def test_many_passes_and_large_steps_are_seen(data, more, expected, fix):
    report = preflight(small(**learner() | dict(num_train_epochs=1) | more), data=data)
    found = {f.check: f for f in report.findings}["plan.extent"]
    assert found.status == ("warn" if expected else "ok") and expected in found.says and fix in str(found.fix)
    assert report.figures["steps"] >= 1 and report.figures["estimated_seconds_of_all_steps"] >= 0


@pytest.mark.parametrize("name, value, says", [
    ("lora_r", 4096, "more than full rank; usual are 8 to 64"), ("lora_dropout", .99, "more is dropped than kept"),
    ("weight_decay", .9, "usual are 0 to 0.1"), ("max_length", 1_500_000, "the longest row has"),
    ("max_new_tokens", 1, "what is generated is cut off"), ("num_train_epochs", 1e-9, "1 step; usual are 1 to 5"),
    ("save_steps", 5000, "no checkpoint is written before the end"), ("eval_steps", 5000, "nothing is evaluated")])
def test_values_that_are_hardly_meant_are_seen(data, name, value, says):
    extent = Extent(16, 1 if name == "num_train_epochs" else 100, 3, 16)
    def found(**more):
        cfg = load_config("demo", **more)
        return check_usual(data, load_shape(cfg, data.tokenizer), extent, **cfg.values(check_usual))
    finding, = found(**{name: value})
    assert finding.check == f"plan.{name}" and says in finding.says and f"{name}=" in str(finding.fix)
    assert found() is None and found(method="full", max_steps=100, **{name: value} if name == "lora_r" else {}) is None


OTHERS = sorted((SHARED/"foreign_configs").rglob("*.y*ml"))
@pytest.mark.parametrize("path", [*sorted(CONFIGS.glob("[!_]*.py")), *OTHERS],
                         ids=lambda path: path.name)
def test_no_usual_config_is_unusual(path, data):
    try: cfg = load_config(str(path), model="tiny")
    except SftError as e: pytest.skip(f"it is refused: {str(e)[:80]}")
    shape = AutoConfig.for_model("qwen3", hidden_size=1024, max_position_embeddings=131_072)
    assert check_usual(data, shape, Extent(50_000, 9_000, 3, 16), **cfg.values(check_usual)) is None
    assert check_extent(Extent(50_000, 9_000, 3, 16), **cfg.values(check_extent)).status == "ok"


def test_a_step_that_takes_most_of_the_rows_is_seen():
    found = check_extent(Extent(800, 3, 3, 800), per_device_train_batch_size=5000)
    assert found.status == "warn" and "takes a large part of the rows; usual are 16 to 128" in found.says
    assert check_extent(Extent(800, 75, 3, 32)).status == check_extent(Extent(60, 3, 3, 60)).status == "ok"


def test_a_step_of_packed_batches_that_asks_for_more_than_there_are():
    assert check_extent(Extent(16, 3, 3, 16)).status == "ok"
    assert check_extent(Extent(16, 3, 3, 16, is_short=True)).status == "warn"
    packed = check_extent(Extent(16, 3, 3, 16, is_short=True), max_tokens_per_batch=4096)
    assert "each step takes all of them" in packed.says and "no packing" in str(packed.fix)
