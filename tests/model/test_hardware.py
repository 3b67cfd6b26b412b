"""Device and number format, each with its reason."""
import pytest
import torch

from sft_nb.config import load_config
from sft_nb.model.hardware import Hardware, find_hardware
from sft_nb.report import ConfigError, speaking


def test_on_this_machine():
    found = find_hardware(load_config(device="cpu", dtype="bfloat16"))
    assert found == Hardware("cpu", "asked for", torch.bfloat16, "asked for")
    assert str(found) == "cpu (asked for), bfloat16 (asked for)" and found.name == "cpu"


@pytest.mark.parametrize("emulated, dtype", [(False, torch.bfloat16), (True, torch.float32)])
def test_on_a_card(monkeypatch, emulated, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: including_emulation or not emulated)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *a: "Some Card")
    found = find_hardware(load_config())
    assert (found.device, found.name, found.dtype) == ("cuda", "Some Card", dtype)
    assert "Some Card" in found.dtype_reason and str(found).startswith("Some Card (auto: cuda is available), ")


def test_what_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device cuda.*Fix: device='auto'"): find_hardware(load_config(device="cuda"))
    with pytest.raises(ConfigError, match="a CPU does not train in it"):
        find_hardware(load_config(device="cpu", dtype="float16"))
    with speaking("shell"), pytest.raises(ConfigError) as e: find_hardware(load_config(device="cuda"))
    with speaking("shell"): assert "Fix: --device auto." in str(e.value)
