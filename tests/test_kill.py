"""Twelve SIGKILLs, ten of them inside a checkpoint: each run ends bit for bit where an undisturbed one ends. `scripts/soak.py` does a hundred."""
import random, sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
import soak


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    cfg = soak.setup(tmp_path_factory.mktemp("kills"))
    return cfg, *soak.undisturbed(cfg)


def test_twelve_kills_and_not_a_bit_is_lost(whole):
    cfg, reference, seconds = whole
    assert [m["step"] for m in reference.metrics() if "loss" in m] == [1, *range(2, 25, 2)] and reference.status["step"] == 24
    rng, places, k = random.Random(5), [*soak.PLACES] * 2, 0
    rng.shuffle(places)
    while places:
        k += 1
        run = soak.disturbed(cfg, f"run-{k}", places, rng, seconds)
        assert soak.differences(run, reference) == [], run.path
        assert k < 20


def test_a_difference_would_be_seen(whole, tmp_path):
    "The comparison itself: another seed, a lost line, a double line, a folder left behind"
    import shutil
    from sft_nb.run import Run
    cfg, reference, _ = whole
    for name, spoil in dict(adapter=lambda r: (r.adapter/"adapter_model.safetensors").write_bytes(b"other"), gap=lambda r: r.rewind(20), double=lambda r: r.record(r.metrics()[3]),
                            left=lambda r: (r.path/"checkpoints/checkpoint-9.aside").mkdir()).items():
        shutil.copytree(reference.path, tmp_path/name)
        run = Run(tmp_path/name)
        assert soak.differences(run, reference) == []
        spoil(run)
        assert len(soak.differences(run, reference)) == 1, name
