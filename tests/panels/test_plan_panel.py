"""PlanPanel's state: each setting changes its part, plans are cached, and impossible ones are reported."""
import json
from dataclasses import replace

import pytest
from learner import small

from sft_nb.extras import plan_panel as chapter
from sft_nb.extras.plan_panel import PlanPanel, PlanState
from sft_nb.planning.plan import plan


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    return small(tmp_path_factory.mktemp("plan"), gradient_checkpointing=False, max_length=256)


@pytest.fixture(scope="module")
def state(cfg): return PlanState(cfg, device="l4-24gb", lengths=[30, 60, 90])


def test_it_is_the_plan_of_the_planning_part(state, cfg):
    wanted = plan(cfg, device="l4-24gb", lengths=[256, 30, 60, 90])
    assert state.plan.parts == wanted.parts and state.plan.fits == wanted.fits
    assert state.html().count("<tr>") >= len(wanted.parts) and "l4-24gb" in state.html()


def test_each_setting_moves_its_part(state, cfg):
    first = state.plan.parts
    for settings, part in ((dict(lora_r=64), "adapter"), (dict(max_length=512), "activations"),
                           (dict(per_device_train_batch_size=8), "activations")):
        assert state.change(**settings).plan.parts[part] > first[part], settings
        state.change(**{name: getattr(cfg, name) for name in settings})
    assert state.plan.parts == first and state.lines() == []


def test_what_was_planned_is_not_planned_again(state, monkeypatch):
    made = []
    monkeypatch.setattr(chapter, "plan", lambda *args, **how: made.append(how) or plan(*args, **how))
    state.change(max_length=200).change(max_length=256).change(max_length=200).change(gib=.01)
    assert len(made) == 1 and not state.plan.fits and state.plan.findings[0].status == "fail"
    assert [fits for _, _, fits in state.cards()].count(True) > 5
    state.change(max_length=256, device="l4-24gb")


def test_what_cannot_be_is_said_beside_the_last_plan(state):
    before = state.plan
    state.change(max_length=0)
    assert state.error is not None and state.plan is before and "role='alert'" in state.html()
    state.change(max_length=256)
    assert state.error is None and "role='alert'" not in state.html()


def test_what_is_written_is_escaped(state):
    odd = PlanState(replace(state.asked), device="l4-24gb", lengths=[9])
    odd.device = replace(odd.device, name="<script> # **b** \x1b[31m \u202e")
    odd.plan = replace(odd.plan, device=odd.device, reasons={k: "<script>\u202e" for k in odd.plan.reasons})
    html = odd.html()
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html
    json.dumps(odd.to_dict())


def test_settings_are_named_in_words_and_the_card_is_drawn_once(cfg):
    panel = PlanPanel(cfg, device="l4-24gb", lengths=[30, 60, 90])
    assert not any("_" in c.label for c in panel.controls.values())
    assert panel.controls["max_length"].title == "max_length"   # the name in a config is under the mouse
    assert panel.controls["method"].to_dict()["options"][0] == "LoRA"
    html = panel.to_html()
    assert html.count("role='img'") == 1 and "there: l4-24gb" not in html   # no second bar, which would be cut
    panel.controls["max_length"].value = 0
    assert "these settings cannot be planned" in panel.to_html() and "demo.py" not in panel.to_html()
    panel.controls["max_length"].value = 256
    panel.controls["gib"].value = .1
    assert "<b>Fix</b> <code>" in panel.to_html()
