"""The table of operations agrees with a formula, and with what a GPU needed."""
import json
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

from sft_nb.batches.layout import BatchLengths
from sft_nb.model.hardware import DEVICES
from sft_nb.planning.throughput import MemoryStrategy, pass_seconds, SpeedFacts, waiting_bytes

sys.path.insert(0, str(ROOT/"benchmarks"))
import roofline   # noqa: E402

H, I, L, HEADS, KV, D = 1024, 3072, 28, 16, 8, 128
LINEAR = L * (H * D * (2 * HEADS + 2 * KV) + 3 * H * I)   # numbers in the products of Qwen3-0.6B's layers
TOKENS = 4 * 512


@pytest.fixture(scope="module", params=[False, True], ids=["once", "again"])
def made(request):
    asked = SimpleNamespace(shape="0.6b", card="h200-141gb", rows=4, tokens=512, method="lora", rank=16,
                            again=request.param, kernels="auto", peak=True)
    return roofline.table(asked) | dict(again=request.param)


def test_products_attention_and_loss_are_what_a_formula_says(made):
    rows, again = made["rows"], made["again"]
    assert rows["products"]["tflop"] == pytest.approx(TOKENS * LINEAR * (6 if again else 4) / 1e12, rel=.03)
    squares = 4 * 512 ** 2 / 2
    assert rows["attention"]["tflop"] == pytest.approx(L * squares * HEADS * D * 14 / 1e12, rel=.05, abs=.006)   # kept
    assert rows["loss"]["tflop"] == pytest.approx(TOKENS / 2 * H * 151_936 * 4 / 1e12, rel=.05)


def test_kernels_take_bytes_from_small_work_and_leave_the_rest():
    "Norms, then rotary positions and gates, read and write less; products, attention and loss are the same"
    asked = dict(shape="0.6b", card="h200-141gb", rows=4, tokens=512, method="lora", rank=16, again=False, peak=True)
    none, auto, liger = (roofline.table(SimpleNamespace(**asked, kernels=k))["rows"] for k in ("none", "auto", "liger"))
    assert none["pointwise"]["gb"] > 2 * auto["pointwise"]["gb"] > 3 * liger["pointwise"]["gb"] > 0
    for kind in ("products", "attention", "loss"):
        assert none[kind]["tflop"] == auto[kind]["tflop"] == liger[kind]["tflop"]


def test_shares_are_shares_and_the_step_is_as_long_as_its_longer_side(made):
    assert sum(r["share"] for r in made["rows"].values()) == pytest.approx(1, abs=.01)
    assert made["ms"] == max(made["card_ms"], made["host_ms"]) > 0 and 0 < made["mfu"] < 1
    assert all(r["ms"] > 0 and r["gb"] > 0 and r["operations"] > 0 for r in made["rows"].values())


@pytest.mark.parametrize("kernels, again, case", [
    ("auto", False, "4b lora, kernels auto, 8,192 tokens"), ("liger", False, "4b lora, kernels liger, 8,192 tokens"),
    ("auto", True, "4b lora, kernels auto, 8,192 tokens, recomputed")])
def test_a_step_takes_as_long_as_on_an_h200(kernels, again, case):
    "The rates were measured in the first case; the two others are predicted"
    speed = json.loads((ROOT/"benchmarks/results/gpu_speed.json").read_text())
    measured = [row["ms"] for row in speed["rows"] + speed["later"] if row["case"] == case][-1]
    asked = dict(shape="4b", card="h200-141gb", rows=8, tokens=1024, method="lora", rank=16, peak=False)
    made = roofline.table(SimpleNamespace(**asked, kernels=kernels, again=again))
    assert made["ms"] == pytest.approx(measured, rel=.1)


def test_what_is_not_computed_again_waits_in_host_memory():
    "34 bytes for each token, layer and hidden number; of layers that are computed again, only what is kept of them"
    facts = SpeedFacts(layers=L, linear=LINEAR, parts=L * 3 * H * I, quantised=0, adapter=0, head=H * 151_936,
                       width=HEADS * D, hidden=H, full=False)
    batch, numbers = BatchLengths((512,) * 4, True), TOKENS * L * H
    def waiting(**how): return waiting_bytes(facts, batch, MemoryStrategy("lora", offloading=True, **how))
    assert waiting() == 34 * numbers
    assert waiting(checkpointing=True) == 2 * numbers
    assert waiting(checkpointing=True, keep=True) == 2 * numbers + 2 * TOKENS * L * HEADS * D
    assert waiting_bytes(facts, batch, MemoryStrategy("lora")) == 0
    card = DEVICES["rtx4090-24gb"]
    stays, waits = (pass_seconds(facts, batch, card, activations=0, way=MemoryStrategy("lora", offloading=offloading))
                    for offloading in (False, True))
    assert waits - stays == pytest.approx(34 * numbers / (card.bus * 1e9))   # it is copied back before it is needed
