"""What servers and scripts have done to experts in merged folders: seven planted faults, seven named."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from shapes import tiny_config
from transformers import AutoModelForCausalLM

from sft_nb.config.load import load_config
from sft_nb.model.adapter import add_adapter
from sft_nb.model.load import quiet
from sft_nb.extras.folder_checks import folder_weights
from sft_nb.proof.folder import Expected, Folder, _state_by_file_name
from sft_nb.proof.merge import merge_weights

LAYER = "model.layers.2.mlp."
EXPERT = LAYER + "experts.3."


@pytest.fixture(scope="module")
def mixture(tokenizer, tmp_path_factory):
    "The weights of a base, and a folder with a merged adapter on all of its experts"
    torch.manual_seed(0)
    shape = tiny_config("glm4_moe")
    shape.moe_intermediate_size = 64   # shares of an adapter are measured from 2,500 numbers on
    with quiet():
        base = AutoModelForCausalLM.from_config(shape)
        before = _state_by_file_name(base)
        model = add_adapter(base, tokenizer, load_config(method="lora"))
        for name, p in model.named_parameters():
            if "lora_B" in name: torch.nn.init.normal_(p, std=.05)
        for _ in merge_weights(model): pass
        merged = model.merge_and_unload()
        folder = tmp_path_factory.mktemp("merged")
        merged.save_pretrained(folder)
    return before, _state_by_file_name(merged), folder


def look(mixture, folder:Path):
    before, merged, _ = mixture
    bench = SimpleNamespace(cfg=SimpleNamespace(method="lora"))
    x = Expected(bench=bench, source=None, run=Path("run"), reference=None)
    x.base, x.merged = before, merged
    return folder_weights(x, Folder(folder))


def of_expert(w): return [name for name in w if name.startswith(EXPERT)]
def without_adapter(w, before): return w | {name: before[name] for name in of_expert(w)}
def transposed(w, before): return w | {name: w[name].t() for name in w if ".experts." in name}
def twice(w, before): return w | {name: 2 * w[name] - before[name] for name in of_expert(w)}
def other_router(w, before): return w | {LAYER + "gate.weight": w[LAYER + "gate.weight"].flip(0)}
def zeros(w, before): return w | {name: torch.zeros_like(w[name]) for name in w if ".shared_experts." in name}
def gone(w, before): return {name: w[name] for name in w if name not in of_expert(w)}


def swapped(w, before):
    gate, up = EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"
    return w | {gate: w[up].clone(), up: w[gate].clone()}


FAULTS = {
    "the adapter of one expert is left out": (without_adapter, "adapter", "3 tensors are the base's: the adapter"),
    "matrices of experts are transposed": (transposed, "weights", r"36 of .*\.experts\.\d.*; it is transposed"),
    "gate and up of one expert are swapped": (swapped, "weights", f"2 of .*; it holds {EXPERT}(gate|up)_proj.weight"),
    "the adapter of one expert is in it twice": (twice, "weights", f"3 of .*{EXPERT}.*adapter is in them 2.00 times"),
    "a router is another": (other_router, "weights", f"1 of .*{LAYER}gate.weight"),
    "shared experts are lost": (zeros, "weights", "shared_experts.*; it is all zeros"),
    "an expert is not in the file": (gone, "weights", f"3 tensors are not in it, the first is {EXPERT}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_experts_is_named(mixture, fault, tmp_path):
    change, check, says = FAULTS[fault]
    before, _, folder = mixture
    (tmp_path/"config.json").write_text((folder/"config.json").read_text())
    weights = load_file(folder/"model.safetensors")
    save_file({name: w.contiguous() for name, w in change(weights, before).items()}, tmp_path/"model.safetensors")
    stage = look(mixture, tmp_path)
    assert stage.is_broken and stage.finding.check == check
    assert re.search(says, stage.finding.says), stage.finding.says


def test_a_right_folder_is_no_fault(mixture):
    "Each matrix of each expert is compared, by its name in the file"
    stage = look(mixture, mixture[2])
    assert stage.finding.status == "ok" and stage.figures["compared"] == len(Folder(mixture[2]).tensors)
