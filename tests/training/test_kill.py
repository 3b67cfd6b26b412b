"""Six SIGKILLs, five of them inside a checkpoint: each run ends bit for bit where an undisturbed one ends.
`scripts/soak.py` does a hundred."""
import importlib
import random
import shutil
import sys
from dataclasses import replace

import pytest
from conftest import ROOT
from learner import learner

from sft_nb.runs.directory import Run

sys.path.insert(0, str(ROOT/"scripts"))
import soak   # noqa: E402


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    cfg = replace(soak.setup(tmp_path_factory.mktemp("kills")), **learner())   # the soak kills QLoRA
    return cfg, *soak.undisturbed(cfg)


def test_six_kills_and_not_a_bit_is_lost(whole):
    cfg, reference, seconds = whole
    assert [m["step"] for m in reference.metrics() if "loss" in m] == [1, *range(2, 25, 2)]
    assert reference.status.step == 24
    rng, places, k = random.Random(5), [*soak.PLACES], 0
    rng.shuffle(places)
    while places:
        k += 1
        run = soak.disturbed(cfg, f"run-{k}", places, rng, seconds)
        assert soak.differences(run, reference) == [], run.path
        assert k < 10


# in the suite, tests/training/test_train.py stops packed rows, and test_together.py kills each of two processes
@pytest.mark.parametrize("kind", [
    "full", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("packed", "together"))])
def test_two_kills_of_another_kind_of_training(tmp_path, kind):
    "A whole model, packed rows, and one of two processes; `scripts/soak.py` does sixty"
    cfg = replace(soak.setup(tmp_path), **learner() | soak.KINDS[kind])
    reference, seconds = soak.undisturbed(cfg)
    run = soak.disturbed(cfg, "run", ["before the rename", "anywhere"], random.Random(5), seconds)
    assert soak.differences(run, reference) == [], run.path


def other_bytes(run): (run.adapter/"adapter_model.safetensors").write_bytes(b"other")
def a_gap(run): run.rewind(20)
def a_double_line(run): run.record(run.metrics()[3])
def a_folder_left_behind(run): (run.path/"checkpoints/checkpoint-9.aside").mkdir()


@pytest.mark.parametrize("spoil", [other_bytes, a_gap, a_double_line, a_folder_left_behind])
def test_a_difference_would_be_seen(whole, tmp_path, spoil):
    "The comparison itself"
    _, reference, _ = whole
    shutil.copytree(reference.path, tmp_path/"spoilt")
    run = Run(tmp_path/"spoilt")
    assert soak.differences(run, reference) == []
    spoil(run)
    assert len(soak.differences(run, reference)) == 1


def test_every_moment_of_the_soak_is_there():
    "A function that was renamed would end it at its first kill"
    for module, name in soak.MOMENTS.values(): assert callable(getattr(importlib.import_module(module), name)), name
