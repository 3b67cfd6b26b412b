"""How a plan sees a GPU: its name from `nvidia-smi`, its free memory, and the host memory."""
import math
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from shapes import folder
from transformers import AutoModelForCausalLM

from sft_nb.config.load import load_config
from sft_nb.model import hardware
from sft_nb.model.hardware import DEVICES, find_hardware, this_device
from sft_nb.model.load import load_base
from sft_nb.planning.plan import plan
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.workbench import Workbench

LISTED = [   # name, GiB that PyTorch sees, the card of the list
    ("NVIDIA B200", 178.4, "b200-180gb"), ("NVIDIA H200", 139.8, "h200-141gb"),
    ("NVIDIA H200 NVL", 139.8, "h200-141gb"), ("NVIDIA GH200 144G HBM3e", 140.4, "h200-141gb"),
    ("NVIDIA H100 80GB HBM3", 79.1, "h100-80gb"), ("NVIDIA H100 PCIe", 79.1, "h100pcie-80gb"),
    ("NVIDIA H100 NVL", 93.1, "h100nvl-94gb"), ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", 79.2, "a100-80gb"), ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
    ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.9, "rtxpro6000-96gb"),
    ("NVIDIA RTX 6000 Ada Generation", 47.4, "rtx6000ada-48gb"), ("NVIDIA L40S", 44.4, "l40s-48gb"),
    ("NVIDIA L40", 44.4, "l40-48gb"), ("NVIDIA RTX A6000", 47.4, "a6000-48gb"), ("NVIDIA A40", 44.4, "a40-48gb"),
    ("NVIDIA GeForce RTX 5090", 31.4, "rtx5090-32gb"), ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24gb"),
    ("NVIDIA GeForce RTX 3090", 23.7, "rtx3090-24gb"), ("NVIDIA GeForce RTX 3090 Ti", 23.6, "rtx3090-24gb"),
    ("NVIDIA A30", 23.5, "a30-24gb"), ("NVIDIA A10", 22.1, "a10-24gb"), ("NVIDIA A10G", 22.1, "a10g-24gb"),
    ("NVIDIA L4", 22.0, "l4-24gb"), ("Tesla T4", 14.6, "t4-16gb")]
MEASURED = [
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.2),
    ("NVIDIA GH200 480GB", 94.5), ("NVIDIA H20", 95.1), ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6),
    ("NVIDIA GeForce RTX 4080 SUPER", 15.6), ("NVIDIA GeForce RTX 3060", 11.6), ("Tesla V100-SXM2-32GB", 31.7),
    ("NVIDIA RTX A4000", 15.6), ("Quadro RTX 6000", 23.6), ("NVIDIA GB10", 119.7)]


@pytest.fixture
def card(monkeypatch):
    "`card(name, gib, free, mine)`: set what PyTorch reports about this GPU"
    def put_in(name:str, gib:float, free:float|None=None, mine:float=0., capability=(8, 0)):
        free = gib - .5 if free is None else free
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda *a: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *a: capability)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda *a: (int(free * 2**30), int(gib * 2**30)))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda *a: int(mine * 2**30))
        monkeypatch.setattr(hardware, "_measured_tflops", lambda kind, dtype: 42.)
        monkeypatch.setattr(hardware, "_measured_bandwidth", lambda kind: 123.)
    return put_in


@pytest.mark.parametrize("name, gib, want", LISTED, ids=[name for name, *_ in LISTED])
def test_a_usual_card_is_known_by_its_name(card, name, gib, want):
    card(name, gib)
    found = this_device("cuda", torch.bfloat16)
    assert (found.name, found.tflops, found.taken) == (want, DEVICES[want].tflops, "")
    assert found.gib == pytest.approx(gib) and found.host > 0


@pytest.mark.parametrize("name, gib", MEASURED, ids=[name for name, _ in MEASURED])
def test_another_card_or_a_slice_of_one_is_measured(card, name, gib):
    card(name, gib)
    found = this_device("cuda", torch.bfloat16)
    assert (found.tflops, found.gb_per_second) == (42, 123) and found.gib == pytest.approx(gib)
    assert found.name not in DEVICES


def smi(text:str):
    "A stand-in for `subprocess.run` with the driver's output"
    return lambda command, **how: SimpleNamespace(stdout=text)


def test_what_others_hold_is_not_planned_with(card, monkeypatch, tmp_path):
    card("NVIDIA GeForce RTX 4090", 23.6, free=9.)
    monkeypatch.setattr(subprocess, "run", smi(f"17, python, 13000 MiB\n{os.getpid()}, pytest, 500 MiB\n"))
    found = this_device("cuda", torch.bfloat16)
    assert found.gib == pytest.approx(9.6)
    assert found.taken == "other programs hold 14.0 of 23.6 GiB: python (pid 17, 13000 MiB)"
    shape = dict(vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, head_dim=128,
                 num_attention_heads=32, num_key_value_heads=8)
    cfg = load_config(model=folder(tmp_path, "qwen3", **shape), tokenizer="tiny", init="random", method="lora",
                      max_length=1024, attn_implementation="sdpa")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)   # the step is simulated, as for a card elsewhere
    made = plan(cfg, device=found, lengths=[1024] * 4)
    assert not made.fits and "python (pid 17" in made.findings[0].sentence
    assert found.taken in str(made)


def test_memory_of_this_process_is_its_own(card):
    card("NVIDIA GeForce RTX 4090", 23.6, free=3., mine=20.)   # a model is loaded
    found = this_device("cuda", torch.bfloat16)
    assert found.gib == pytest.approx(23.6, abs=.01) and not found.taken


def test_without_the_drivers_tool_the_others_have_no_names(card, monkeypatch):
    card("NVIDIA GeForce RTX 4090", 23.6, free=9.)
    def absent(*args, **how): raise FileNotFoundError("nvidia-smi")
    monkeypatch.setattr(subprocess, "run", absent)
    assert "nvidia-smi on the host" in this_device("cuda", torch.bfloat16).taken


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_what_its_group_and_all_groups_above_leave(tmp_path, version, monkeypatch):
    names = [("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             ("memory.max", "memory.current", "inactive_file")][version - 1]
    root = tmp_path/"memory" if version == 1 else tmp_path
    for place, limit, used, cache in (("", 2**63 - 4096, 1, 0), ("job", 8 * 2**30, 6 * 2**30, 2**30),
                                      ("job/step", 2**63 - 4096, 1, 0)):
        (root/place).mkdir(parents=True, exist_ok=True)
        for name, text in zip(names[:2], (limit, used)): (root/place/name).write_text(f"{text}\n")
        (root/place/"memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    if version == 2: (root/"job/step/memory.max").write_text("max\n")
    (tmp_path/"own").write_text(["7:cpu:/other\n4:memory:/job/step\n", "0::/job/step\n"][version - 1])
    assert hardware._left_in_container(tmp_path, tmp_path/"own") == 3 * 2**30
    assert hardware._left_in_container(tmp_path/"none", tmp_path/"own") == math.inf
    assert hardware._left_in_container(tmp_path, tmp_path/"nowhere") == math.inf
    monkeypatch.setattr(hardware, "_left_in_container", lambda: 3 * 2**30)
    assert hardware._free_gib() <= 3


def test_processes_share_the_host(card, monkeypatch):
    card("NVIDIA H200", 139.8)
    monkeypatch.setattr(hardware, "_free_gib", lambda: 64.)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert [this_device("cuda", torch.bfloat16, processes=n).host for n in (1, 2, 8)] == [64, 32, 16]   # 8: 2 hosts


def test_float32_means_tf32_where_a_card_has_it(card, monkeypatch):
    cfg = load_config("demo", device="cuda", dtype="float32", method="lora", attn_implementation="sdpa")
    card("Tesla T4", 14.6, capability=(7, 5))
    assert not find_hardware(**cfg.values(find_hardware)).tf32 and not Workbench(cfg).low_precision
    card("NVIDIA A100-SXM4-40GB", 39.4, capability=(8, 0))
    assert not find_hardware(**replace(cfg, dtype="bfloat16").values(find_hardware)).tf32
    assert find_hardware(**cfg.values(find_hardware)).tf32 and Workbench(cfg).low_precision
    here, found = this_device("cuda", torch.float32), find_hardware(**cfg.values(find_hardware))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    there = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr("sft_nb.planning.plan.torch", there)
    monkeypatch.setattr("sft_nb.planning.plan.find_hardware", lambda **how: found)
    made = plan(cfg, device=here, lengths=[64] * 4)
    assert made.settings["dtype"] == "float32" and "TF32" in made.reasons["dtype"]


@pytest.fixture
def tf32_as_before():
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32_as_before")
def test_products_of_a_base_are_in_tf32_or_not_as_the_hardware_says(monkeypatch):
    cfg = load_config("demo", device="cpu", dtype="float32", method="lora")
    real = find_hardware(**cfg.values(find_hardware))
    for tf32 in (True, False):
        as_card = SimpleNamespace(device="cuda", dtype=real.dtype, tf32=tf32)
        monkeypatch.setattr("sft_nb.model.load.find_hardware", lambda as_card=as_card, **how: as_card)
        load = AutoModelForCausalLM.from_pretrained
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained",   # there is no such card here
                            lambda *args, load=load, device_map, **how: load(*args, device_map=None, **how))
        load_base(cfg, load_tokenizer(cfg))
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
