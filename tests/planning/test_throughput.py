"""The table of operations agrees with a formula, and with what a GPU needed."""
import json
import sys
from dataclasses import replace
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


SIZES = {"0.6b": (H, I, L, HEADS), "4b": (2560, 9728, 36, 32), "8b": (4096, 12_288, 36, 32)}


def facts_of_qwen3(size:str, method:str="lora")->SpeedFacts:
    "What a plan would read of a published model, by a formula"
    hidden, inner, layers, heads = SIZES[size]
    parts = layers * 3 * hidden * inner
    linear = parts + layers * hidden * D * (2 * heads + 2 * KV)
    ends = 2 * (hidden + heads * D) + 2 * (hidden + KV * D) + 3 * (hidden + inner)   # of adapters of rank 16
    return SpeedFacts(layers=layers, linear=linear, parts=parts, quantised=linear * (method == "qlora"),
                      adapter=layers * 16 * ends * (method != "full"), head=hidden * 151_936, width=heads * D,
                      hidden=hidden, full=method == "full")


@pytest.mark.parametrize("case, rows, low, high", [
    ("4b lora, kernels auto, 8,192 tokens", 1024, 1.05, 1.1), ("4b lora, kernels none, 8,192 tokens", 1024, 1.15, 1.2),
    ("4b qlora, kernels auto, 8,192 tokens", 1024, 1.05, 1.1),
    ("4b lora, kernels auto, 8,192 tokens, recomputed", 1024, 1.05, 1.1),
    ("0.6b full, kernels auto, 16,384 tokens", 2048, 1.05, 1.1),
    ("8b lora, kernels auto, 16,384 tokens, recomputed", 2048, .9, .95),
    ("8b qlora, kernels auto, 16,384 tokens, recomputed", 2048, .9, .95)])
def test_the_chapter_compares_what_was_measured_with_what_is_estimated(case, rows, low, high):
    speed = json.loads((ROOT/"benchmarks/results/gpu_speed.json").read_text())
    measured = next(row["tokens_per_second"] for row in speed["rows"] if row["case"] == case)
    size, method = case.partition(",")[0].split()
    again = case.endswith("recomputed")
    seconds = pass_seconds(facts_of_qwen3(size, method), BatchLengths((rows,) * 8, True), DEVICES["h200-141gb"],
                           activations=0, way=MemoryStrategy(method, again, keep=again), fused="none" not in case)
    estimated = 8 * rows / seconds
    assert low < estimated / measured < high
    assert f"| {measured:,} | {estimated:,.0f} |" in (ROOT/"nbs/07_planning/02_throughput.ipynb").read_text()


def test_what_padding_parts_and_python_cost():
    card, facts = DEVICES["h200-141gb"], facts_of_qwen3("4b")
    def seconds(*lengths, flat=True, facts=facts, **how):
        return pass_seconds(facts, BatchLengths(lengths, flat), card, activations=0, way=MemoryStrategy("lora", **how))
    assert seconds(512, 4096) < .7 * seconds(512, 4096, flat=False)   # a padded row costs what the longest costs
    assert seconds(512, 4096, flat=False) == seconds(4096, 4096)
    parts = seconds(4096, checkpointing=True, parts=True) - seconds(4096, checkpointing=True)
    assert parts == pytest.approx(4096 * facts.parts * 2 / (.68 * card.tflops * 1e12))   # forward once more
    small = dict(facts=replace(facts, linear=1, parts=1, adapter=1, head=1, hidden=1, width=1))   # bound by Python
    ways = {}, dict(checkpointing=True), dict(checkpointing=True, keep=True)
    assert [seconds(60, **small, **way) for way in ways] == pytest.approx([36 * ms * 1e-3 for ms in (3, 4, 6)])


def test_what_is_not_computed_again_waits_in_host_memory():
    "34 bytes for each token, layer and hidden number; of layers that are computed again, only what is kept of them"
    facts = facts_of_qwen3("0.6b")
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
