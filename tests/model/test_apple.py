"""What a Mac with an Apple GPU changes, as far as it can be tried without one: the platform is patched, and a tensor
refuses what MPS refuses, which is float64."""
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sft_nb.checks.learning import _tensor_sums
from sft_nb.checks.preflight import same_rng_state
from sft_nb.config.load import load_config
from sft_nb.model import loss
from sft_nb.model.hardware import choose_device, choose_dtype, find_hardware, free_memory, this_device
from sft_nb.evaluation import perplexity
from sft_nb.extras.workers import _worker_count
from sft_nb.training.arguments import training_arguments
from sft_nb.training.guards import weight_norms
from sft_nb.training.recorder import peak_memory_gib


class OnApple(torch.Tensor):
    "A CPU tensor that claims to be on MPS and rejects float64"
    @property
    def device(self): return torch.device("mps")
    def cpu(self): return self.as_subclass(torch.Tensor)
    def to(self, *args, **kwargs): return self
    def double(self): raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    def sum(self, *args, dtype=None, **kwargs):
        if dtype == torch.float64: self.double()
        return super().sum(*args, dtype=dtype, **kwargs)


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    emptied = []
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "mps", SimpleNamespace(
        recommended_max_memory=lambda: 2**30, driver_allocated_memory=lambda: 64 * 2**40, get_rng_state=lambda: state,
        set_rng_state=lambda state: emptied.append("rng"), empty_cache=lambda: emptied.append("cache")))
    return emptied


def test_the_device_and_its_formats(mac, tmp_path):
    assert choose_device() == ("mps", "auto: mps is available")
    assert choose_dtype(device="mps")[0] == torch.float32 and choose_dtype("float16", "mps")[0] == torch.float16
    hardware = find_hardware()
    assert (hardware.device, hardware.name, hardware.dtype) == ("mps", "mps", torch.float32)
    args = training_arguments(load_config("demo", device="cpu"), tmp_path)   # a Mac may train on its CPU
    assert args.use_cpu and not args.dataloader_pin_memory


def test_memory_is_that_of_the_gpu(mac, monkeypatch):
    for name in ("_measured_tflops", "_measured_bandwidth"):
        monkeypatch.setattr(f"sft_nb.model.hardware.{name}", lambda *a: 1.)
    assert this_device("mps", torch.float32).gib <= 1
    assert peak_memory_gib() == 64 * 2**10
    free_memory()
    assert mac == ["cache"]


def test_random_numbers_are_put_back(mac):
    with same_rng_state(): pass
    assert mac == ["rng"]


def test_rows_are_prepared_by_one_process(mac): assert _worker_count(8) == 1


def test_no_float64_on_the_gpu(monkeypatch):
    tensor = torch.ones(2, 2).as_subclass(OnApple)
    with pytest.raises(TypeError, match="float64"): tensor.double()
    model = SimpleNamespace(named_parameters=lambda: [("w", tensor.requires_grad_())])
    assert weight_norms(model).tolist() == [2] and weight_norms(model).dtype == torch.float64
    assert _tensor_sums(dict(weight=tensor)) == dict(weight=(4, 4))

    def on_apple(*tensors): return [t.as_subclass(OnApple) for t in tensors]
    logits = torch.tensor([[0., 0.], [0., 0.]])
    chunk = on_apple(torch.tensor([0, 1]), torch.tensor([0, 1]), logits)
    for module in (loss, perplexity): monkeypatch.setattr(module, "supervised_logits", lambda *a: iter([chunk]))
    model = torch.nn.Linear(1, 1)
    model.device, rows = torch.device("cpu"), [([1, 2], [1, 2])] * 2
    assert loss.row_losses(model, rows)[0] == pytest.approx([math.log(2)] * 2)
    both = perplexity._losses_before_and_after(model, model, rows, 64)
    assert both == pytest.approx(np.array([[math.log(2)] * 2] * 2 + [[0, 0]]))
