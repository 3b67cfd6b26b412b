"A preflight in little time: less is processed, what is left out is said, and planted faults are still found"
import pytest
import torch
from learner import learner
from planted import bad, small

from sft_nb.checks import preflight as chapter
from sft_nb.checks.learning import learn_some
from sft_nb.checks.preflight import Evidence, FEW_TOKENS, IN_PART, preflight
from sft_nb.checks.step import Slope, slopes
from sft_nb.tokens.prepare import prepare
from sft_nb.training.train import describe_preflight
from sft_nb.workbench import Workbench

MANY = dict(max_samples=64, per_device_train_batch_size=32, per_device_eval_batch_size=32, eval_samples=32)


def cfg(**more): return small(**learner() | MANY | more)


@pytest.fixture
def no_time(monkeypatch):
    for name in ("LEAST_SECONDS", "MOST_SHARE"): monkeypatch.setattr(chapter, name, 0.)


def test_what_is_left_out_is_said(no_time):
    bench = Workbench(cfg())
    report = preflight(bench)
    said = report.figures[IN_PART]
    for part in ("largest batch ", " of 32 rows; ", "evaluation ", "few rows 3 of 10 steps"): assert part in said, said
    assert report.figures["tokens_of_the_first_step"] <= FEW_TOKENS
    assert f"{IN_PART.replace('_', ' ')}: {said}" in describe_preflight(bench, report)
    assert "after 3 steps on the same rows" in str([f.says for f in report.findings if f.check == "learning.learns"])
    assert not {"step.gradient", "step.derivative", "step.evaluation"} & {*bad(report)}


@pytest.mark.parametrize("more, check", [(dict(learning_rate=0.), "learning.learns"),
                                         (dict(learning_rate=.9, method="full"), "learning.learns")])
def test_planted_faults_are_found_without_time(no_time, more, check):
    assert check in bad(preflight(cfg(**more)))


def test_a_frozen_adapter_is_found_without_time(no_time):
    from sft_nb.model.adapter import load_model
    data = prepare(cfg())
    model = load_model(cfg(), data.tokenizer).requires_grad_(False)
    assert {"model.trainable", "step.gradient", "step.derivative"} <= {*bad(preflight(cfg(), data=data, model=model))}


def test_there_is_time_for_everything():
    seen = Evidence(Workbench(cfg()))
    vars(seen)["pace"] = 1e-9
    assert (len(seen.largest_rows), len(seen.held_out_rows), seen.partial) == (32, 32, {})
    assert seen.seconds_left() == pytest.approx(1e-9 * sum(seen.work.values()))
    vars(seen)["slopes"] = []
    assert seen.seconds_left() == pytest.approx(1e-9 * (sum(seen.work.values()) - seen.work["slopes"]))


def test_a_gpu_takes_the_largest_batch_whatever_the_time(no_time):
    from dataclasses import replace
    seen = Evidence(Workbench(cfg()))
    vars(seen)["pace"] = 1.
    vars(seen.bench)["hardware"] = replace(seen.hardware, device="cuda")
    assert len(seen.rows_in_time("first_step", seen.rows([*range(32)]), 3)) == 32 and not seen.partial


def row(n, answer=4, after=0):
    return dict(input_ids=[5] * n, labels=[-100] * (n - answer - after) + [5] * answer + [-100] * after)


def test_long_rows_are_cut_to_the_end_of_their_answer(no_time):
    seen = Evidence(Workbench(cfg()))
    seen.rows = lambda numbers: [row(5000, after=3000)] * 3
    assert [len(r["input_ids"]) for r in seen.few_rows] == [FEW_TOKENS // 2] * 2
    assert all(r["labels"][-4:] == [5] * 4 and r["labels"][-5] == -100 for r in seen.few_rows)
    vars(seen)["pace"] = 1.
    (kept,) = seen.rows_in_time("first_step", [row(5000)], 3)
    assert len(kept["input_ids"]) == FEW_TOKENS and seen.partial == dict(first_step="256 of 5,000 tokens")
    with_none = dict(input_ids=[5] * 9, labels=[-100] * 9)
    assert chapter._last_tokens(with_none, 4) == dict(input_ids=[5] * 4, labels=[-100] * 4)


def test_a_batch_is_scored_once_before_any_step():
    seen = Evidence(Workbench(cfg()))
    for _ in range(2): seen.scored(seen.some_batch)
    assert seen.pace > 0 and len(seen.pass_seconds) == 2   # in two orders


def test_steps_end_with_the_time():
    model = torch.nn.Linear(1, 1)
    how = dict(optimizer=torch.optim.SGD(model.parameters(), lr=.1), before=7., **small().values(learn_some))
    def loss(batch): return model(torch.ones(1, 1)).square().sum()
    def score(batch): return float(loss(batch).detach())
    done = learn_some(model, loss, score, {}, seconds=0., **how)
    assert (done.steps, done.before) == (3, 7.) and learn_some(model, loss, score, {}, **how).steps == 10


def test_only_where_all_parts_together_are_off_is_each_measured():
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2, dtype=torch.float64) for _ in range(4)])
    def loss(batch): return model(torch.ones(1, 2, dtype=torch.float64)).square().sum()
    calls = []
    def score(batch):
        calls.append(1)
        return float(loss(batch).detach())
    (together,) = slopes(model, loss, score, {})
    assert together.part == "all 4 parts" and together.off < .005 and len(calls) <= 8
    model[1].weight.register_hook(lambda g: 1.5 * g)   # one part in four
    found = slopes(model, loss, score, {})
    assert len(found) == 4 and max(s.off for s in found) > .04
    endless = Slope("x", float("nan"), 1., 0.)
    assert not endless.agrees(.1)
