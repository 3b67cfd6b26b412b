"""Losses of rows, before training and at each checkpoint."""
import json

import numpy as np
import pytest
from learner import learner

from sft_nb.config.load import load_config
from sft_nb.panels.batches import bench_of
from sft_nb.extras.losses import LossPanel, LossState, token_costs
from sft_nb.base.report import ConfigError
from sft_nb.tokens.prepare import prepare

EVIL = "<script>1</script></pre><img src=x onerror=alert(1)>\x1b[2J\u202e**bold**"


@pytest.fixture(scope="module")
def state(undisturbed): return LossState(undisturbed, split="train", checkpoint="checkpoint-3", n=5)


def test_each_checkpoint_is_measured_once_and_keeps_the_row_in_view(state, monkeypatch):
    assert state.names == ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-10", "adapter"]
    before = [*state.rows]
    row = state.move(rank="loss", chosen=2).to_dict()["row"]
    state.move(checkpoint="adapter")
    assert (state.checkpoint, state.to_dict()["row"]) == ("adapter", row)
    assert [r.base for r in state.rows] == [r.base for r in before]
    assert [r.tuned for r in state.rows] != [r.tuned for r in before]
    monkeypatch.setattr(LossState, "_all", lambda *_: pytest.fail("it was measured already"))
    assert state.move(checkpoint="checkpoint-3").rows == before
    with pytest.raises(ConfigError, match="checkpoint-7"): state.move(checkpoint="checkpoint-7")
    assert state.checkpoint == "checkpoint-3"


def test_the_costs_are_those_of_the_model_of_that_checkpoint(state, undisturbed):
    model, x = state.workbench.trained(undisturbed.weights("checkpoint-3")), state.side.tokens[0]
    cost = token_costs(model, x["input_ids"], x["labels"])
    np.testing.assert_allclose(cost.loss, state.costs["checkpoint-3"][0].loss, rtol=1e-5)
    with model.disable_adapter(): base = token_costs(model, x["input_ids"], x["labels"])
    np.testing.assert_allclose(base.loss, state.costs["base"][0].loss, rtol=1e-5)


def test_won_and_lost_are_told_by_form(state):
    nan = np.full_like(state.costs["base"][0].loss, np.nan)
    assert nan.shape == state.costs["checkpoint-3"][0].loss.shape
    kept = state.costs["checkpoint-3"][0]
    change = np.where(np.arange(len(nan)) % 2, 1, -1)
    state.costs["checkpoint-3"][0] = kept._replace(loss=state.costs["base"][0].loss + change)
    html = state.move(chosen=[r.example for r in state.ranked()].index(0), shows="gain").html()
    assert "underline wavy" in html and "underline solid" in html
    assert "underline wavy" not in state.move(shows="base").html()
    state.costs["checkpoint-3"][0] = kept


def test_the_ranking_is_exported(state, undisturbed):
    lines = [json.loads(line) for line in state.export().read_text().splitlines()]
    assert len(lines) == 5 and {*lines[0]} == {"where", "base", "tuned", "gain", "doubt"}
    assert state.export().parent == undisturbed.path/"eval"
    state.export().unlink()


def test_what_a_row_says_is_not_obeyed(undisturbed, tmp_path):
    state = LossState(undisturbed, split="train", n=1)
    cfg = load_config("demo", task="chat", eval_samples=0, **learner())
    state.workbench = bench_of(prepare(cfg, train=[dict(question=EVIL, answer=EVIL)]))
    state.costs.clear()
    state.measure()
    html = state.html()
    assert not any(bad in html for bad in ("<script", "<img", "</pre><img", "\x1b", "\u202e"))


def test_a_checkpoint_that_is_gone_is_a_line(undisturbed):
    panel = LossPanel(undisturbed, split="train", n=1)
    panel.show(checkpoint="checkpoint-77")
    assert "role='alert'" in panel.to_html() and panel.state.checkpoint == "adapter"
    panel.export.click()
    assert "losses-adapter.jsonl" in panel.to_html()
    (undisturbed.path/"eval/losses-adapter.jsonl").unlink()


def test_a_measurement_is_announced_before_it_is_made(undisturbed, monkeypatch):
    panel = LossPanel(undisturbed, split="train", n=1)
    drawn = []
    monkeypatch.setattr(panel.state, "measure", lambda name: drawn.append(json.dumps(panel.view, ensure_ascii=False)))
    panel.show(checkpoint="checkpoint-6")
    assert "Measuring 1 train row with checkpoint-6 …" in drawn[0] and "Measuring" not in json.dumps(panel.view)
    assert ">≥ 3</span> nats" in panel.to_html() and "the loss has fallen" not in panel.to_html()
    panel.shows.value = "gain"
    assert ">≤ -3</span>" in panel.to_html() and "below 0 the loss has fallen" in panel.to_html()
