"""Device and number format, each with its reason."""
import json
import os
import platform
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch

from sft_nb.config.load import load_config
from sft_nb.model import hardware
from sft_nb.model.hardware import Hardware, find_hardware, free_memory
from sft_nb.base.report import ConfigError, fix_language


def test_on_this_machine():
    found = find_hardware(device="cpu", dtype="bfloat16")
    assert found == Hardware("cpu", "requested", torch.bfloat16, "requested")
    assert str(found) == "cpu (requested), bfloat16 (requested)" and found.name == "cpu"


@pytest.mark.parametrize("emulated, dtype", [(False, torch.bfloat16), (True, torch.float32)])
def test_on_a_card(monkeypatch, emulated, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: including_emulation or not emulated)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *a: "Some Card")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *a: (9, 0))
    found = find_hardware()
    assert (found.device, found.name, found.dtype) == ("cuda", "Some Card", dtype)
    assert "Some Card" in found.dtype_reason and str(found).startswith("Some Card (auto: cuda is available), ")


def test_what_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device cuda.*Fix: device='auto'"): find_hardware(device="cuda")
    with pytest.raises(ConfigError, match="a CPU cannot train in it"):
        find_hardware(device="cpu", dtype="float16")
    with fix_language("shell"), pytest.raises(ConfigError) as e: find_hardware(device="cuda")
    with fix_language("shell"): assert "Fix: --device auto." in str(e.value)


def test_a_processor_decides_by_its_products(monkeypatch, tmp_path):
    shape = dict(model_type="qwen3", hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=32_000)
    (tmp_path/"config.json").write_text(json.dumps(shape))
    cfg = load_config(model=str(tmp_path), device="cpu", method="lora")
    seconds = {torch.float32: 1., torch.bfloat16: .25}   # of each product
    monkeypatch.setattr(hardware, "_product_seconds", lambda rows, hidden, out, dtype, times: seconds[dtype])
    monkeypatch.setattr(hardware, "_measured_gain", hardware._measured_gain.__wrapped__)   # without what is remembered
    found = find_hardware(**cfg.values(find_hardware))
    assert (found.dtype, found.gain) == (torch.bfloat16, 4.) and "4.0 times as fast" in found.dtype_reason
    for slow, in_words in ((.8, "1.2 times as fast"), (50., "less than a 20th as fast")):   # no clear gain; emulated
        seconds[torch.bfloat16] = slow
        again = find_hardware(**cfg.values(find_hardware))
        assert again.dtype == torch.float32 and again.gain == 1 / slow
        assert in_words in again.dtype_reason
    asked = [replace(cfg, dtype="bfloat16"), replace(cfg, method="full"), replace(cfg, model="tiny"),
             replace(cfg, model=str(tmp_path/"none"))]   # a choice, a head that learns, a small model, none at all
    assert [find_hardware(**c.values(find_hardware)).gain for c in asked] == [None] * 4
    (tmp_path/"broken").mkdir()
    assert find_hardware(**replace(cfg, model=str(tmp_path/"broken")).values(find_hardware)).dtype == torch.float32


def test_a_busy_machine_does_not_decide(monkeypatch):
    transpose = torch.Tensor.t
    monkeypatch.setattr(torch.Tensor, "t", lambda x: time.sleep(.05) or transpose(x))   # the processor works for others
    assert hardware._product_seconds(8, 8, 8, torch.float32, 2) < .05


def test_measuring_leaves_no_trace():
    torch.manual_seed(0)
    before, was = torch.get_rng_state(), torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gain = hardware._measured_gain.__wrapped__(256, 512, 2, 2048)
    assert gain > 0 and torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled() == was


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library returns what is freed by itself")
def test_memory_that_is_freed_is_returned():
    "glibc keeps pieces below others that are still in use; a merge would hold three times its weights"
    pieces = [torch.ones(2**14) for _ in range(3000)]   # 64 KiB each, of the heap
    kept = pieces[-1]
    del pieces
    before = psutil.Process().memory_info().rss
    free_memory()
    assert before - psutil.Process().memory_info().rss > 100 * 2**20 and kept.sum() == 2**14


def test_a_forked_process_computes():
    "Threads of libgomp do not exist in it, and a computation that is divided among them would wait for ever"
    threads, x = torch.get_num_threads(), torch.randn(600, 600)
    torch.set_num_threads(2)
    try:
        x @ x
        pid = os.fork()
        if pid == 0:
            x @ x
            os._exit(7)
        until, ended = time.time() + 30, (0, 0)
        while ended == (0, 0) and time.time() < until:
            time.sleep(.01)
            ended = os.waitpid(pid, os.WNOHANG)
        if ended == (0, 0): os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(ended[1]) == 7 and ended[0] == pid
    finally: torch.set_num_threads(threads)
