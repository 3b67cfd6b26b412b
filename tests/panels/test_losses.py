"""Losses of rows, before training and at each checkpoint."""
import json
from dataclasses import replace

import numpy as np
import pytest
from learner import learner

from sft_nb.config.load import load_config
from sft_nb.panels.batches import bench_of
from sft_nb.extras.losses import LossPanel, LossState, token_costs
from sft_nb.base.report import ConfigError
from sft_nb.tokens.display import SUPERVISED
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


def test_a_token_has_the_colour_of_its_loss_and_the_underline_of_what_is_supervised(state):
    kept, base = state.costs["checkpoint-3"][0], state.costs["base"][0].loss
    state.costs["checkpoint-3"][0] = kept._replace(loss=base + np.where(np.arange(len(base)) % 2, 2, -2))
    state.move(chosen=[r.example for r in state.ranked()].index(0), shows="gain")
    red, blue = "background:rgba(207,34,46,0.40)", "background:rgba(9,105,218,0.40)"
    html = state.html()
    assert html.count(red) > 3 and html.count(blue) > 3 and f"underline 2px {SUPERVISED}" in html
    assert "rgba(45,164,78" not in html and "≤ -3" in html and "below 0 the loss has fallen" in html
    assert f"loss: base {np.nanmax(base):.2f}, tuned" in html
    assert blue not in state.move(shows="base").html()
    state.costs["checkpoint-3"][0] = kept


def test_a_wrong_label_is_marked_for_the_next_run(undisturbed):
    panel, marked = LossPanel(undisturbed, split="train", n=4), undisturbed.path.parent/"marked_rows.jsonl"
    row = panel.state.ranked()[0]
    panel.mark.click()
    place, of_file = panel.state.side.row(row.example)
    assert json.loads(marked.read_text()) == of_file
    assert panel.table.block()["rows"][0][0] == f"✗ {row.row}" and "drop_rows=" in panel.to_html()
    again = LossPanel(undisturbed, split="train", n=4)   # after a restart
    assert again.state.cells(again.state.ranked())[0][0] == f"✗ {row.row}"
    data = prepare(replace(undisturbed.config, drop_rows=str(marked)))
    assert data.train.reasons == {"listed in drop_rows": 1} and row.row - 1 not in data.train.stats["row"]
    again.mark.click()
    assert marked.read_text() == "" and "✗" not in again.to_html()
    marked.unlink()


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


def test_a_measurement_is_announced_before_it_is_made(undisturbed, monkeypatch):
    panel = LossPanel(undisturbed, split="train", n=1)
    drawn = []
    monkeypatch.setattr(panel.state, "measure", lambda name: drawn.append(json.dumps(panel.view, ensure_ascii=False)))
    panel.show(checkpoint="checkpoint-6")
    assert "Measuring 1 train row with checkpoint-6 …" in drawn[0] and "Measuring" not in json.dumps(panel.view)
    assert "> ≥ 3 </span> nats" in panel.to_html() and "the loss has fallen" not in panel.to_html()
    panel.shows.value = "gain"
    assert "> ≤ -3 </span>" in panel.to_html() and "below 0 the loss has fallen" in panel.to_html()
