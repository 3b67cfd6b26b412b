"""Count what a training step does on a GPU, without a GPU: `tests/fake_cuda` gives PyTorch's CPU build a CUDA
device that computes nothing."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PLACE = Path(__file__).parents[1]/"fake_cuda"
WAYS = {
    "lora": dict(), "qlora": dict(method="qlora"), "full": dict(method="full"),
    "checkpointing": dict(checkpointing=True),
    "attention is kept": dict(checkpointing=True, keep_attention=True),
    "in parts": dict(checkpointing=True, keep_attention=True, parts=True, lengths=[8192]),
    "peft's own layers": dict(kernels="none"),
    "a long row": dict(checkpointing=True, keep_attention=True, parts=True, lengths=[262_144]),
    "many short rows": dict(checkpointing=True, lengths=[79] * 2500),   # too many for one call of attention
}
HERE = ("lora", "qlora", "full")                # the others in `make soak`
BUDGETS = {   # kernels and 10^9 bytes read and written, forward and backward, of one layer of Qwen3-4B, 8,192 tokens
    "lora": (138, 11.8), "qlora": (160, 12), "full": (110, 17), "peft's own layers": (255, 28.6),
    "checkpointing": (186, 15.5), "attention is kept": (186, 15.5)}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    "`counted(names)`: the counts of a step with each of these options, from a process with the fake GPU"
    compiler, parts = shutil.which("g++"), Path(torch.__file__).parent
    if compiler is None or not (parts/"include").exists(): pytest.skip("no C++ compiler, or no headers of torch")
    if torch.version.cuda or sys.platform != "linux": pytest.skip("only a CPU build on Linux has no CUDA of its own")
    guard = tmp_path_factory.mktemp("guard")/"guard.so"
    folders = [f"-I{parts/'include'}", f"-I{parts/'include/torch/csrc/api/include'}", f"-L{parts/'lib'}"]
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", PLACE/"guard.cpp", "-o", guard, *folders, "-lc10",
                    "-ltorch_cpu"], check=True)
    env = os.environ | dict(LD_PRELOAD=str(guard), LD_LIBRARY_PATH=str(parts/"lib"),
                            PYTHONPATH=os.pathsep.join(sys.path))
    def run(names):
        asked = [json.dumps(WAYS[name]) for name in names]
        command = [sys.executable, "-W", "ignore", PLACE/"step.py", *asked]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    return run


def check(found:dict)->None:
    for name, step in found.items():
        assert not step["waits"], (name, step["waits"])
        assert not step["copies"], (name, step["copies"])
        assert not step["too_large"], (name, step["too_large"])
        kernels, gb = BUDGETS.get(name, (10**9, 10**9))
        assert step["kernels"] <= kernels and step["gb"] <= gb, (name, step)


def test_a_step_waits_for_nothing_and_stays_in_its_budget(counted): check(counted(HERE))


@pytest.mark.soak
def test_so_does_every_other_way(counted): check(counted([name for name in WAYS if name not in HERE]))
