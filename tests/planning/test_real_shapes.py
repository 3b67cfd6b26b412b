"""Plans of published models, as committed in `real_shapes.json`, and their peaks beside published ones.

Published, in GB: the least that Unsloth states for a model of this size (unsloth.ai/docs, "Unsloth Requirements";
for gpt-oss its post of August 2025; for Qwen3-30B-A3B in 16 bits a report on its kernels for mixtures). A plan is for
the fastest way that fits, with rows of 2,048 tokens; only plans that recompute their layers are compared.

| | method | published, GB | planned, GB |
|---|---|---|---|
| gpt-oss-20b | qlora | 14 | 16.0 |
| Qwen3-30B-A3B | lora | 63 | 65.6 |
| Gemma-3-27B | qlora | 22 | 22.3 |
| Gemma-3-27B | lora | 64 | 60.3 |"""
import json

import pytest
from real_shapes import CARDS, CASES, FILE, line_of

COMMITTED = json.loads(FILE.read_text())
IN_THE_SUITE = [("gpt-oss-20b", "qlora", 16_384)]   # the others are in `make soak`
PUBLISHED = {("gpt-oss-20b", "qlora"): (14, 16.), ("Qwen3-30B-A3B", "lora"): (63, 65.6),
             ("Gemma-3-27B", "qlora"): (22, 22.3), ("Gemma-3-27B", "lora"): (64, 60.3)}


def check(name, method, tokens):
    made, was = line_of(name, method, tokens), COMMITTED[f"{name} {method} {tokens}"]
    assert made["gib"] == pytest.approx(was["gib"], rel=.02)
    assert made["weights"] == pytest.approx(was["weights"], abs=.1)
    assert (made["fits"], made["left_out"]) == (was["fits"], [])


@pytest.mark.parametrize("name, method, tokens", IN_THE_SUITE)
def test_gpt_oss_is_planned_for_a_card_of_24_gib(name, method, tokens):
    check(name, method, tokens)
    assert all(COMMITTED[f"{name} {method} {n}"]["fits"] for n in (2048, tokens, 65_536))


@pytest.mark.soak
@pytest.mark.parametrize("name, method, tokens", [case for case in CASES if " ".join(map(str, case)) in COMMITTED])
def test_every_plan_is_the_committed_one(name, method, tokens): check(name, method, tokens)


def test_every_committed_plan_was_made_in_full():
    "No way was left out, and what is said to fit does"
    assert {key.split(" ")[1] for key in COMMITTED} == {*CARDS}
    assert not [key for key, line in COMMITTED.items() if "error" in line or line["left_out"]]


@pytest.mark.parametrize("name, method", PUBLISHED)
def test_a_plan_is_near_what_is_published(name, method):
    line, (published, planned) = COMMITTED[f"{name} {method} 2048"], PUBLISHED[name, method]
    assert "gradient_checkpointing" in line["savings"]
    assert line["gib"] * 2**30 / 1e9 == pytest.approx(planned, abs=.1) and .9 < planned / published < 1.2
