"""One process on a machine where transformers and torch see two GPUs. The tensors stay on the CPU: what is patched is
what the machine says of itself, which is all that `Trainer` looks at when it chooses `nn.DataParallel`."""
import os
from types import SimpleNamespace

import pytest
import transformers.training_args
from learner import assert_same, killed_at_eight, small

from sft_nb.checks import environment
from sft_nb.checks.environment import check_gpu
from sft_nb.base.report import Report
from sft_nb.runs.distributed import init_distributed
from sft_nb.training.train import resume, train

IDLE = "training uses the first of 2 visible GPUs; the other is idle"


def see_gpus(monkeypatch, n:int):
    "What `check_gpu` learns of torch"
    cuda = SimpleNamespace(is_available=lambda: n > 0, device_count=lambda: n, get_device_name=lambda k: "H200")
    monkeypatch.setattr(environment, "torch", SimpleNamespace(cuda=cuda))
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "WORLD_SIZE"): monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_gpus(monkeypatch):
    see_gpus(monkeypatch, 2)
    monkeypatch.setattr(transformers.training_args.TrainingArguments, "n_gpu", property(lambda self: 2))


def test_one_process_trains_as_on_one_gpu_and_reports_the_idle_one(tmp_path, two_gpus, undisturbed, capfd):
    run = train(small(tmp_path))   # without a preflight
    assert_same(run, undisturbed)
    finding, = (f for f in Report.load(run.path/"preflight.json").findings if f.check == "environment.gpu")
    assert finding.says == IDLE
    printed = capfd.readouterr()
    assert f"{IDLE}  Fix: num_processes=2, or set CUDA_VISIBLE_DEVICES" in printed.out + printed.err
    assert not (run.adapter/"training_args.bin").exists()   # a pickle that needs this package to be read


@pytest.mark.parametrize("reach_each_other", [True, False])
def test_cards_that_cannot_reach_each_other_are_told_so(monkeypatch, tmp_path, reach_each_other):
    "Two RTX 40 with an old driver: accelerate refuses to begin without NCCL's variables, which only its launcher sets"
    names = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
    for name in names: monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")   # what is set stays
    monkeypatch.setenv("WORLD_SIZE", "2")
    begun = []
    def begin(**how): begun.append([os.environ.get(name) for name in names])
    monkeypatch.setattr("accelerate.state.PartialState", begin)
    monkeypatch.setattr("accelerate.utils.check_cuda_p2p_ib_support", lambda: reach_each_other)
    monkeypatch.setattr("sft_nb.model.hardware.choose_device", lambda wanted: ("cuda", "requested"))
    init_distributed()
    assert begun == [[None if reach_each_other else "1", "0"]]
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)


def test_a_resumed_run_reports_it_too(tmp_path, two_gpus, undisturbed, capfd):
    run = resume(killed_at_eight(tmp_path, undisturbed))
    assert_same(run, undisturbed)
    printed = capfd.readouterr()
    assert IDLE in printed.out + printed.err


def test_how_many_are_idle(tmp_path, monkeypatch):
    see_gpus(monkeypatch, 4)
    assert "the first of 4 visible GPUs; the other 3 are idle" in check_gpu().says
    assert check_gpu(device="cuda").fix.settings == dict(num_processes=4)
    assert "uses 3 of 4 visible GPUs; the other is idle" in check_gpu(num_processes=3).says
    assert check_gpu(num_processes=4) is None
    assert check_gpu(device="cpu") is None
    see_gpus(monkeypatch, 1)
    assert check_gpu() is None


def test_processes_that_a_launcher_started_use_a_gpu_each(tmp_path, monkeypatch):
    see_gpus(monkeypatch, 4)
    monkeypatch.setenv("WORLD_SIZE", "16")         # of several machines
    assert check_gpu(num_processes=16) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    finding = check_gpu(num_processes=16)
    assert "2 of 4 visible GPUs" in finding.says and "torchrun --nproc-per-node 4" in str(finding.fix)
