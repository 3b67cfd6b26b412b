"""Liger's kernels: inserted into one model only, with the results of the layers they replace."""
import copy
import inspect
import json
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from interpreted import IDS, KINDS, off, out
from shapes import model
from torch import nn

from sft_nb.config.load import load_config
from sft_nb.extras import kernels
from sft_nb.model.adapter import load_model
from sft_nb.extras.kernels import check_kernels, use_liger
from sft_nb.model.finetuning.checkpointing import recompute_parts
from sft_nb.base.report import ConfigError
from sft_nb.training.arguments import check_settings

def equal(a, b)->bool: return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], g) for n, g in b[1].items())


class Stand:
    "A stand-in for the package that replaces classes and functions as Liger does, and counts calls"
    def __init__(self): self.norms = self.rotations = 0

    def forward(self, norm, x):
        self.norms += 1
        return type(norm).forward(norm, x)

    def __call__(self, model, **kwargs):
        self.kwargs = kwargs
        if model.config.model_type != "qwen3": return
        module = inspect.getmodule(type(model))
        rotate = module.apply_rotary_pos_emb
        def counted(*args, **kwargs):
            self.rotations += 1
            return rotate(*args, **kwargs)
        module.apply_rotary_pos_emb, module.Qwen3RMSNorm, module.Qwen3New = counted, nn.LayerNorm, nn.LayerNorm
        for m in model.modules():
            if type(m).__name__ != "Qwen3RMSNorm": continue
            m.forward, m.row_mode, m.offset = types.MethodType(lambda norm, x: self.forward(norm, x), m), None, 0.


@pytest.fixture
def stand(monkeypatch):
    stand = Stand()
    monkeypatch.setattr(kernels, "_liger_function", lambda: stand)
    return stand


def test_one_model_and_no_other_and_undone(stand):
    m, other = model("qwen3").train(), model("qwen3").train()
    want, (names, inside) = out(m), (dict(vars(inspect.getmodule(type(m)))), [dict(vars(x)) for x in m.modules()])
    used = use_liger(m)
    assert vars(inspect.getmodule(type(m))) == names   # what the next model of this kind is made of
    assert equal(out(m), want) and (stand.norms, stand.rotations) == (4 * 4 + 1, 4)
    assert used.n == 4 * 5 + 1 and stand.kwargs["fused_linear_cross_entropy"] is False is stand.kwargs["cross_entropy"]
    out(other)
    out(model("qwen3").train())
    assert (stand.norms, stand.rotations) == (17, 4)
    used.undo()
    assert [dict(vars(x)) for x in m.modules()] == inside
    assert equal(out(m), want) and (stand.norms, stand.rotations) == (17, 4)


def test_a_copy_computes_with_its_own_weights(stand):
    m = model("qwen3").train()
    use_liger(m)
    again = copy.deepcopy(m)
    for p in again.parameters(): p.data.zero_()
    assert not again(IDS).logits.any() and m(IDS).logits.any()


def test_in_parts_it_stays_what_it_was(stand, monkeypatch):
    "Long rows go through Liger's norms, and not through those of the class"
    from sft_nb.model.finetuning import checkpointing
    monkeypatch.setattr(checkpointing, "_FEWEST", 4)
    m = model("qwen3").train()
    want = out(m)
    use_liger(m)
    parts = recompute_parts(m)
    got = out(m)
    assert off(got[0], want[0]) < 1e-6 and max(off(got[1][n], g) for n, g in want[1].items()) < 1e-5
    assert stand.norms > 2 * 17   # in parts, and again on the way back
    parts.undo()
    stand.norms = 0
    assert equal(out(m), want) and stand.norms == 17


def test_a_kind_that_liger_does_not_know(stand):
    with pytest.raises(ConfigError, match="for models of type llama.*Fix: kernels='auto', or kernels='compile'"):
        use_liger(model("llama"))


def test_where_it_cannot_run(stand, monkeypatch, tokenizer):
    with pytest.raises(ConfigError, match="liger needs a CUDA device, and the model is on cpu.*Fix: kernels='auto'"):
        load_model(load_config(kernels="liger", device="cpu"), tokenizer)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="interpreter cannot run them.*unset TRITON_INTERPRET.*kernels='auto'"):
            kernels._check_card("liger", device)
    kernels._check_card("compile", "cuda")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(kernels, "is_installed", lambda name: False)
    says = r"kernels liger: they are not installed.*pip install liger-kernel"
    with pytest.raises(ConfigError, match=says): check_kernels("liger")
    with pytest.raises(ConfigError, match=says): check_settings(load_config(kernels="liger"))
    assert all(check_kernels(other) is None for other in ("auto", "compile", "none"))


HERE = ("gemma2", "mixtral")   # the norm with an offset and gelu; silu, and experts; the others in `make soak`
OTHERS = [kind for kind in KINDS if kind not in HERE]


@pytest.fixture(scope="module")
def found(): return compared_by_the_interpreter(HERE)


def compared_by_the_interpreter(kinds)->dict:
    "The results of `interpreted.py` in a separate process, as Triton must be started in interpreter mode"
    if not find_spec("liger_kernel"): pytest.skip("Liger is not installed here")
    script = Path(__file__).with_name("interpreted.py")
    path = os.pathsep.join([str(script.parent), *sys.path])
    env = os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=path)
    done = subprocess.run([sys.executable, script, *kinds], env=env, capture_output=True, text=True)
    if "only 0-dimensional arrays" in done.stderr: pytest.skip("the interpreter of Triton 3.6 does not know NumPy 2.4")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.soak
def test_liger_computes_what_every_other_layer_does():
    found = compared_by_the_interpreter(OTHERS)
    for kind in OTHERS: test_liger_computes_what_the_layers_do(found, kind)


@pytest.mark.parametrize("kind", HERE)
def test_liger_computes_what_the_layers_do(found, kind):
    "In 32 bits; undone, not a bit differs"
    assert found[kind]["logits"] < 2e-6 and found[kind]["gradients"] < 5e-6
    assert found[kind]["modules"] >= 4 and found[kind]["undone"]


def test_as_a_run_has_it(found):
    "The tiny model with an adapter, its layers computed again: Liger, and one product, and the same numbers"
    assert found["a run"]["logits"] < 1e-5 and found["a run"]["gradients"] < 1e-4
    assert found["a run"]["modules"] == ["base and adapter in one product", "Liger's kernels"]


def compiled_for(folder, capability:int, *most:int)->dict:
    "The results of `ahead_of_time.py` for GPUs of this kind"
    if not find_spec("liger_kernel"): pytest.skip("Liger is not installed here")
    script = Path(__file__).with_name("ahead_of_time.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(TRITON_CACHE_DIR=str(folder))
    done = subprocess.run([sys.executable, script, str(capability), *map(str, most)], env=env, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kernel_is_machine_code_for_a_card(tmp_path):
    assert compiled_for(tmp_path, 90, 1) == dict(compiled=1, wrong={})


@pytest.mark.soak
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_all_kernels_are(tmp_path, capability):
    found = compiled_for(tmp_path, capability)
    assert not found["wrong"] and found["compiled"] == 48
