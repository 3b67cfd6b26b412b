"""How a plan sees a GPU: its name from `nvidia-smi`, its free memory, and the host memory."""
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from shapes import folder
from transformers import AutoModelForCausalLM

from sft_nb.base.installation import why_fixed_segments
from sft_nb.base.report import ConfigError
from sft_nb.checks.environment import check_device, check_gpu
from sft_nb.config.load import load_config
from sft_nb.model import hardware, load
from sft_nb.model.hardware import choose_device, DEVICES, find_hardware, this_device
from sft_nb.model.load import load_base
from sft_nb.planning.plan import plan
from sft_nb.planning.search import memory_strategies
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
    def put_in(name:str, gib:float, free:float|None=None, mine:float=0., capability=(8, 0), others=(),
               host=500.):
        free = gib - .5 if free is None else free
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda *a: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *a: capability)
        cards = [SimpleNamespace(name=n, total_memory=int(size * 2**30)) for n, size in ((name, gib), *others)]
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(cards))
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda k: cards[k])
        monkeypatch.setattr(hardware, "_free_gib", lambda: host)
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
    card("NVIDIA H200", 139.8, others=[("NVIDIA H200", 139.8)] * 3)
    monkeypatch.setattr(hardware, "_free_gib", lambda: 64.)
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


def test_one_memory_counts_once_and_nothing_is_offloaded(card):
    "A DGX Spark and a Jetson; what the file cache holds is free, though CUDA does not say so"
    for name, gib, capability in (("NVIDIA GB10", 119.7, (12, 1)), ("Orin", 61.3, (8, 7))):
        card(name, gib, free=20., capability=capability, host=100.)
        found = this_device("cuda", torch.bfloat16)
        assert (found.host, found.taken) == (0, "") and found.gib == pytest.approx(min(gib, 100)) and found.holds(2**30)
    cfg = load_config("demo", method="lora", activation_offloading=True, gradient_checkpointing=True)
    assert not any(way.offloading for way in memory_strategies(replace(cfg, activation_offloading="auto"), found))
    with pytest.raises(ConfigError, match="no memory to offload to on orin.*activation_offloading=False"):
        memory_strategies(cfg, found)


def test_a_grace_hoppers_gpu_memory_is_not_counted_as_the_hosts_too(card, monkeypatch):
    card("NVIDIA GH200 480GB", 94.5, capability=(9, 0))
    monkeypatch.setattr(hardware, "_free_gib", lambda: 500.)
    found = this_device("cuda", torch.bfloat16)
    assert found.gib == pytest.approx(94.5) and found.host == pytest.approx(500 - 94.5)
    monkeypatch.setattr(hardware, "_free_gib", lambda: 90.)
    assert this_device("cuda", torch.bfloat16).host == 0


def test_of_unequal_cards_the_smallest_decides(card, monkeypatch):
    card("NVIDIA GeForce RTX 4090", 23.6, others=[("NVIDIA GeForce RTX 3060", 11.6), ("NVIDIA L4", 22.)])
    assert this_device("cuda", torch.bfloat16).name == "rtx4090-24gb"
    both = this_device("cuda", torch.bfloat16, processes=2)
    assert (both.name, both.tflops) == ("rtx3060", 42) and both.gib == pytest.approx(11.6)
    card("NVIDIA L4", 22., free=9., others=[("NVIDIA GeForce RTX 4090", 23.6)])
    assert this_device("cuda", torch.bfloat16, processes=2).gib == pytest.approx(9.6)   # what is free of the smallest
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda k=None: (7, 5) if k else (8, 9))
    assert this_device("cuda", torch.bfloat16).flash and not this_device("cuda", torch.bfloat16, processes=2).flash


def test_a_gpu_of_amd_is_measured_and_not_looked_up(card, monkeypatch):
    "Its name may contain that of another maker's card, and its compute capability is a number of AMD's own"
    monkeypatch.setattr("torch.version.hip", "6.4.43482")
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["gfx90a", "gfx942"])
    card("AMD Instinct MI300X A10", 22., free=9., capability=(9, 4))
    monkeypatch.setattr(subprocess, "run", smi(""))
    found = this_device("cuda", torch.bfloat16)
    assert (found.tflops, found.gb_per_second, found.flash) == (42, 123, True) and "rocm-smi" in found.taken
    cfg = load_config("demo", device="cuda", dtype="float32")
    assert not find_hardware(**cfg.values(find_hardware)).tf32


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]

@pytest.mark.parametrize("name, capability, built, advice", [
    ("Tesla V100-SXM2-32GB", (7, 0), CUDA_13, "whl/cu126 (the last"),
    ("Tesla P100-PCIE-16GB", (6, 0), CUDA_13, "whl/cu126"), ("Tesla V100-SXM2-32GB", (7, 0), CUDA_12, ""),
    ("NVIDIA GeForce RTX 5090", (12, 0), CUDA_12, "whl/cu130 (the driver"),
    ("NVIDIA GB10", (12, 1), CUDA_13, ""), ("NVIDIA L4", (8, 9), CUDA_12, ""), ("NVIDIA B300", (10, 3), CUDA_13, "")])
def test_a_card_without_kernels_in_this_torch_is_refused_with_the_right_wheel(
        card, monkeypatch, name, capability, built, advice):
    "PyTorch's own message is `no kernel image is available for execution on the device`, in the middle of a step"
    card(name, 22., capability=capability)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: built)
    monkeypatch.setattr(subprocess, "run", smi("Driver Version: 580.1  CUDA Version: 13.0"))
    if not advice:
        for wanted in ("auto", "cuda"): assert choose_device(wanted)[0] == "cuda"
        return
    with pytest.raises(ConfigError, match="has no kernels for it; one of sm_") as e: choose_device()
    assert advice in str(e.value.fix) and e.value.fix.otherwise
    assert choose_device("cpu")[0] == "cpu"


def test_a_new_card_needs_a_driver_that_knows_it(monkeypatch):
    monkeypatch.setattr(subprocess, "run", smi("Driver Version: 550.1  CUDA Version: 12.4"))
    assert "torch needs 12.8 or newer" in hardware.torch_for_driver((12, 0))
    assert "whl/cu126 (the driver" in hardware.torch_for_driver((8, 9))


def test_float16_is_offered_where_it_is_measured_to_be_faster(card, monkeypatch):
    "A T4 computes float32 at an eighth of the speed; its loss is then scaled"
    card("Tesla T4", 14.6, capability=(7, 5))
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    speed = {torch.float16: 24., torch.float32: 4.}
    monkeypatch.setattr(hardware, "_measured_tflops", lambda kind, dtype: speed[dtype])
    found = check_device(method="lora")
    assert found.status == "warn" and "6.0 times as fast in float16" in found.says
    assert found.fix.settings == dict(dtype="float16")
    assert check_device(method="lora", dtype="float32").status == "ok"
    speed[torch.float16] = 4.   # Pascal
    assert check_device(method="lora").status == "ok"
    assert this_device("cuda", torch.float32).flash is False


def test_unequal_cards_are_named(card, monkeypatch):
    card("NVIDIA GeForce RTX 4090", 23.6, others=[("NVIDIA GeForce RTX 3060", 11.6)])
    names = ["RTX 4090", "RTX 3060"]
    monkeypatch.setattr("torch.cuda.get_device_name", lambda k=0: names[k])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "the GPUs differ (RTX 3060, RTX 4090)" in check_gpu(num_processes=2).says
    names[1] = names[0]
    assert check_gpu(num_processes=2) is None


def test_bitsandbytes_without_kernels_is_found_before_a_weight_is_loaded(monkeypatch, tmp_path):
    load._why_not_packed.cache_clear()
    load.check_packing("cpu", torch.float32)
    load._why_not_packed.cache_clear()
    def absent(*args, **how): raise RuntimeError("no kernel for this device")
    monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", absent)
    with pytest.raises(ConfigError, match="does not work on cpu .RuntimeError: no kernel for this device") as e:
        load_base(load_config("demo", method="qlora", device="cpu"), load_tokenizer(load_config("demo")))
    assert e.value.fix.settings == dict(method="lora")
    with pytest.raises(ConfigError, match="bitsandbytes does not work"): check_device(method="qlora", device="cpu")
    load._why_not_packed.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr("bitsandbytes.matmul_4bit", lambda x, packed, quant_state: 2 * x)
    with pytest.raises(ConfigError, match="its products are wrong"): load.check_packing("cpu", torch.float32)
    load._why_not_packed.cache_clear()


def test_the_bandwidth_of_an_apple_gpu_is_measured(monkeypatch):
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 24 * 2**30)
    monkeypatch.setattr(hardware, "_measured_tflops", lambda kind, dtype: 14.)
    monkeypatch.setattr(hardware, "_measured_bandwidth", lambda kind: 380.)
    monkeypatch.setattr(hardware, "_free_gib", lambda: 30.)
    found = this_device("mps", torch.float32)
    assert (found.gib, found.tflops, found.gb_per_second) == (24, 14, 380)


@pytest.mark.parametrize("files, release, why", [
    ({}, "6.8.0-45-generic", ""), ({}, "5.15.153.1-microsoft-standard-WSL2", "WSL"),
    ({"etc/nv_tegra_release": "# R36"}, "5.15.148-tegra", "Jetson"),
    ({"proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit"}, "6.8.12-tegra", "Jetson"),
    ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA A40-48Q\nIRQ: 40\n"}, "6.8.0", "vGPU"),
    ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t GRID A100-10C\nIRQ: 40\n"}, "6.8.0", "vGPU"),
    ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA A100-SXM4-40GB\n"}, "6.8.0", ""),
    ({"proc/device-tree/model": "NVIDIA DGX Spark"}, "6.11.0-nvidia", ""), ({"dev/kfd": ""}, "6.8.0", "ROCm")])
def test_memory_segments_do_not_grow_where_a_driver_cannot_map_them(files, release, why, tmp_path):
    for name, text in files.items():
        (tmp_path/name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/name).write_text(text)
    if sys.platform == "linux": assert why_fixed_segments(str(tmp_path), release) == why
    else: assert why_fixed_segments() == "not Linux"
