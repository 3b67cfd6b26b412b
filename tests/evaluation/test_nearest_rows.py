"""Training rows near held-out rows, and doubtful rows: figures and gradients are checked against plain computations."""
import json

import numpy as np
import pytest
import torch
from learner import small
from torch.nn import functional as F

from sft_nb.base.report import ConfigError, SftError
from sft_nb.cli.console import main
from sft_nb.evaluation.evaluate import Evaluation
from sft_nb.evaluation.generations import Answer, Scores
from sft_nb.evaluation.sweep import Sweep
from sft_nb.extras import nearest_rows as near
from sft_nb.extras.eval_panel import EvalPanel
from sft_nb.tokens.prepare import prepare
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

FEW = dict(max_samples=12, eval_samples=5, max_steps=2, save_steps=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory): return train(small(tmp_path_factory.mktemp("runs"), **FEW))


@pytest.fixture(scope="module")
def found(run): return near.measure_rows(run)


@pytest.fixture(scope="module")
def model(run): return Workbench(run.config, is_resolved=True).trained(run.adapter)


def exact(model, x, names)->tuple[np.ndarray,np.ndarray]:
    "Loss, entropy and variance of an example, and the gradients of these matrices, by autograd"
    weights = [model.get_parameter(f"{name}.weight").requires_grad_(True) for name in names]
    labels = torch.tensor(x["labels"])[1:]
    log_p = model(torch.tensor([x["input_ids"]])).logits[0, :-1][labels != -100].log_softmax(-1)
    nats = F.nll_loss(log_p, labels[labels != -100], reduction="sum")
    gradients = [g.numpy() for g in torch.autograd.grad(nats, weights)]
    for w in weights: w.requires_grad_(False)
    log_p = log_p.detach()
    entropy = -(log_p.exp() * log_p).sum(-1)
    variance = (log_p.exp() * (log_p + entropy[:, None])**2).sum(-1)
    return np.array([nats.item(), entropy.sum().item(), variance.sum().item(), len(log_p)]), gradients


def test_figures_and_gradients_are_those_of_each_row_alone(found, model):
    names = [*near._last_matrices(model, found.run.config)]
    assert len(names) == 14 and all(".lora_B." in name for name in names)   # both layers, which are the last two
    rows = [exact(model, found.data.train.tokens[int(k)], names) for k in found.train.examples]
    figures = np.array([figures for figures, _ in rows])
    for name, column in zip(("loss", "entropy", "variance", "tokens"), figures.T):
        np.testing.assert_allclose(getattr(found.train, name), column, rtol=2e-3, err_msg=name)
    scale = [np.sqrt(np.mean([(g[k]**2).sum() for _, g in rows])) for k in range(len(names))]
    vectors = np.array([np.concatenate([(g / s).ravel() for g, s in zip(gradients, scale)]) for _, gradients in rows])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    projected, pairs = found.train.gradient.astype(float), np.triu_indices(len(rows), 1)
    cosines, whole = (projected @ projected.T)[pairs], (vectors @ vectors.T)[pairs]
    assert np.abs(cosines - whole).mean() < .1 and np.corrcoef(cosines, whole)[0, 1] > .8


def test_the_nearest_are_those_with_the_largest_cosines(found):
    where = [*found.places][1]
    rows = found.near(where, each=2)
    assert [r.near for r in rows][:4] == ["meaning", "meaning", "gradient", "gradient"]
    cosines = found.train.gradient.astype(float) @ found.held_out.gradient[found.places[where]].astype(float)
    assert rows[2].example == cosines.argmax() and rows[2].cosine == pytest.approx(cosines.max(), abs=1e-3)
    against = [r for r in rows if r.near == "against"]
    assert all(r.cosine < 0 for r in against) and len(against) == min(2, (cosines < 0).sum())
    place, row = found.data.train.row(rows[2].example)
    assert (rows[2].where, rows[2].prompt, rows[2].answer) == (place, row["question"], row["answer"])
    k = [*found.train.examples].index(rows[2].example)
    assert place.endswith(f" {rows[2].row}") and rows[2].doubt == pytest.approx(float(found.train.doubt[k]))
    assert rows[2].loss == pytest.approx(float(found.train.loss[k] / found.train.tokens[k]))


def test_it_is_measured_once_for_these_weights_and_rows(run, found, monkeypatch):
    file = near.measured_file(run, "adapter")
    kept = file.read_bytes()
    monkeypatch.setattr(near, "_measure_sides", lambda *_: pytest.fail("it was measured already"))
    assert near.doubtful_rows(run, n=3).rows == found.doubtful(3)
    for damaged in (b"", kept[:100]):
        file.write_bytes(damaged)
        with pytest.raises(pytest.fail.Exception): near.measure_rows(run)
    file.write_bytes(kept)
    with pytest.raises(pytest.fail.Exception): near.measure_rows(run, most=5)


def test_some_rows_are_drawn_and_it_is_said(run):
    some = near.doubtful_rows(run, n=2, most=5)
    assert (some.measured, len(some.rows)) == (5, 2) and "5 of 12 training rows were measured" in str(some)
    near.measured_file(run, "adapter").unlink()


def answers(found, rights:str)->list[Answer]:
    got = {"0": "7", "1": "8", "?": None}
    return [Answer(where, "q", "7", r == "1", got[r], "8", 2, True) for where, r in zip(found.places, rights)]


def test_wrong_answers_are_those_of_the_scores(run, found):
    unscored = near.nearest_rows(run, n=2)
    assert unscored.wrong is None and len(unscored.answers) == 2 and "no answers of it are scored" in str(unscored)
    (run.path/"eval").mkdir(exist_ok=True)
    tuned = Scores("tuned", [*answers(found, "10?11"), Answer("elsewhere", "q", "7", False, "7", "8", 2, True)])
    file = Evaluation(run.name, "adapter", None, tuned).save(run.path/"eval/adapter.json")
    scored = run.nearest_rows("adapter")
    assert scored.wrong == 3 and {a.where for a in scored.answers} == {*[*found.places][1:3]}
    assert "1 wrong answer to rows that were not measured" in scored.notes
    assert "answered nothing" in str(scored) and "answered 7" in str(scored) and "Expected 8" in str(scored)
    d = scored.to_dict()
    assert json.loads(json.dumps(d)) == d and d["answers"][0]["near"][0]["near"] == "meaning"
    assert "<table" in scored._repr_html_() and run.doubtful_rows(n=2).to_dict()["rows"][0]["doubt"]
    file.unlink()


def test_the_panel_shows_them_below_the_answer(run, found, monkeypatch):
    tuned = Scores("checkpoint-2", answers(found, "10011"))
    sweep = Sweep(run.name, "accuracy", Scores("base", answers(found, "00000")), {"checkpoint-2": tuned})
    file = sweep.save(run.path/"eval/sweep.json")
    panel = EvalPanel(run)
    panel.filter.value = "both wrong"
    assert "Training rows near it" not in panel.to_html() and not panel.near.disabled
    drawn, measure = [], near._measure_sides
    monkeypatch.setattr(near, "_measure_sides", lambda *how: drawn.append(str(panel.view)) or measure(*how))
    panel.near.click()
    assert "Measuring training rows with checkpoint-2" in drawn[0] and "Measuring" not in panel.to_html()
    shown = found.near(panel.state.pair()[0].where)[0]
    assert "Training rows near it" in panel.to_html() and f">{shown.row}<" in panel.to_html()
    assert near.measure_rows(run).checkpoint == "checkpoint-2"   # the best of the sweep
    panel.state.near_html()
    panel.state.base.answers[1] = Answer("elsewhere", "q", "7", False, "7", "8", 2, True)
    assert "this row was not measured" in panel.state.near_html()
    monkeypatch.setattr("sft_nb.base.extensions.extension", lambda kind: None)
    panel.near.click()
    assert "role='alert'" in panel.to_html()
    file.unlink()


def test_other_runs(tmp_path):
    text = dict(text="Ada has two hats.")
    turns = dict(messages=[dict(role=role, content=f"{role} {k}") for k in range(2) for role in ("user", "assistant")])
    cfg = small(tmp_path, method="full", task="chat", max_steps=1, run_name="full", learning_rate=1e-4)
    run = train(cfg, prepare(cfg, train=[turns, turns | dict(messages=turns["messages"][:2])]))
    rows = near.doubtful_rows(run).rows
    assert {r.prompt for r in rows} == {"user 0", "user 1"} and near.measure_rows(run).train.gradient.any(axis=1).all()
    with pytest.raises(ConfigError, match="no rows are held out"): near.nearest_rows(run)
    for wrong in (dict(most=0), dict(n=-1)):
        with pytest.raises(ConfigError, match="at least one row"): run.nearest_rows(**wrong)
    with pytest.raises(ConfigError, match="n: it is 0; at least one row"): run.doubtful_rows(n=0)
    cfg = small(tmp_path, method="full", task="text", max_steps=1, run_name="ends", eval_samples=1,
                unfrozen_parameters=("model.embed_tokens",))
    run = train(cfg, prepare(cfg, train=[text] * 3, eval=[text]))
    alone = near.nearest_rows(run)
    assert "compared in meaning alone" in str(alone) and {r.near for r in alone.answers[0].near} == {"meaning"}
    assert (alone.answers[0].prompt, alone.answers[0].expected) == ("", text["text"])
    rows = run.path/"rows/train.jsonl"
    rows.write_text(json.dumps(dict(text="Another text.")) + "\n")
    with pytest.raises(ConfigError, match="the training rows have changed"): near.measure_rows(run)
    rows.unlink()
    with pytest.raises(SftError, match="put it back"): near.measure_rows(run)


def test_the_command_lists_them(run, capsys):
    assert main(["evaluate", str(run.path), "--nearest", "1", "--eval-samples", "5", "--examples", "0"]) == 0
    assert "wrong answer" in (said := capsys.readouterr().out) and "against" in said or "gradient" in said
    assert main(["evaluate", "tiny", "--nearest", "1"]) == 2 and "tiny is not a run" in capsys.readouterr().err


@pytest.mark.parametrize("largest, headline", [(.6, "none of 40 training rows stands out"),
                                               (3.1, "the most doubtful of 40 training rows")])
def test_a_model_that_no_answer_surprises_has_found_no_wrong_row(largest, headline):
    rows = [near.MeasuredRow(k + 1, k, f"line {k + 1}", "a?", "yes", largest - k, .7, .7) for k in range(3)]
    text = str(near.DoubtfulRows("r", "adapter", rows, 40))
    assert headline in text and ("has not learned enough to tell" in text) == (largest < 2)
