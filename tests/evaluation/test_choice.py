"""The best of several, and how sure that is: sweeps, verdicts, comparisons and searches, on scores made here."""
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import Evaluation
from sft_nb.evaluation.generations import Answer, paired, Scores
from sft_nb.evaluation.perplexity import Forgetting
from sft_nb.evaluation.statistics import correct_for_choice, Difference, pick
from sft_nb.evaluation.sweep import compare_with_lowest_loss, Sweep
from sft_nb.evaluation.trivial import Baselines, Trivial
from sft_nb.evaluation.verdict import decide
from sft_nb.extras.compare import compare, Comparison
from sft_nb.extras.search import cannot_win, Search
from sft_nb.extras.sweeps import mix_adapters


def scores(name, right, clusters=None)->Scores:
    "Scores of right and wrong answers"
    records = [""] * len(right) if clusters is None else [str(c) for c in clusters]
    return Scores(name, [Answer(f"row {k}", "?", "a", bool(x), "a", "a", 1, True, cluster=c)
                         for k, (x, c) in enumerate(zip(right, records))])


def after(wins:int, losses:int, n:int=100)->list[int]:
    "Right and wrong of a model that wins and loses some rows against one that is right on the second half"
    return [1] * wins + [0] * (n // 2 - wins) + [0] * losses + [1] * (n // 2 - losses)


FIRST = after(0, 0)


# --- sweeps

def test_a_sweep_of_rows_in_clusters_is_as_sure_as_of_one_row_of_each():
    r = np.random.default_rng(1)
    base, ckpts = r.random(25) < .4, r.random((3, 25)) < [[.5], [.6], [.8]]
    clusters = [k // 4 for k in range(100)]
    swept = Sweep("run", "accuracy", scores("base", base.repeat(4), clusters),
                  {f"checkpoint-{k}": scores("tuned", c.repeat(4), clusters) for k, c in enumerate(ckpts)})
    once = pick(base.astype(float), ckpts.astype(float), clusters=[*range(25)])
    found = swept.pick
    assert (found.best, found.simplest, found.difference.p) == (once.best, once.simplest, once.difference.p)
    assert (found.difference.low, found.difference.high) == pytest.approx((once.difference.low, once.difference.high))


@pytest.mark.parametrize("wins, losses, status", [(9, 1, "ok"), (10, 1, "warn"), (1, 1, "ok")])
def test_the_lowest_loss_is_worse_if_three_checkpoints_show_it(wins, losses, status):
    "9 to 1 has p .021 of two models and .055 of three; 10 to 1 has .012 and .031"
    checkpoints = {"checkpoint-1": scores("a", FIRST), "checkpoint-2": scores("b", FIRST),
                   "checkpoint-3": scores("c", after(wins, losses))}
    swept = Sweep("run", "accuracy", scores("base", [0] * 100), checkpoints, lowest_loss="checkpoint-2")
    assert compare_with_lowest_loss(swept).status == status


# --- verdicts

@pytest.mark.parametrize("gain, low, high, p, says", [
    (.2, .01, .4, .04, "better"), (.2, .01, .4, .06, "cannot tell"), (.2, -.01, .4, .04, "cannot tell"),
    (-.2, -.4, -.01, .04, "worse"), (-.2, -.4, -.01, .06, "cannot tell"), (-.2, -.4, .01, .04, "cannot tell")])
def test_a_verdict_needs_the_interval_and_p(gain, low, high, p, says):
    assert decide(Difference(gain, low, high, p, 30, 10, 100)).says == says


@pytest.mark.parametrize("gain, low, high, says", [
    (.2, .06, .4, "better"), (.2, .04, .4, "cannot tell"), (.04, .01, .06, "cannot tell"),
    (.03, .01, .04, "not enough")])
def test_a_gain_that_is_required_is_that_of_the_whole_interval(gain, low, high, says):
    assert decide(Difference(gain, low, high, .001, 30, 10, 100), min_gain=.05).says == says


@pytest.mark.parametrize("low, high, limit, says", [
    (.06, .2, None, "better, but forgets general text"), (.04, .2, None, "better"), (.01, .09, .1, "better"),
    (.05, .2, .1, "cannot tell"), (.11, .2, .1, "worse")])
def test_forgetting_counts_by_its_whole_interval(low, high, limit, says):
    forgotten = Forgetting(64, 3., 3.3, .1, low, high, .1)
    assert decide(Difference(.2, .1, .3, .001, 30, 10, 100), max_forgetting=limit, forgotten=forgotten).says == says


@pytest.mark.parametrize("low, high, p, says", [
    (.01, .2, .01, "better"), (-.01, .2, .2, "cannot tell"), (-.2, -.01, .01, "not enough")])
def test_better_than_the_base_is_not_enough_if_a_trivial_answer_is_as_good(low, high, p, says):
    over = Difference((low + high) / 2, low, high, p, 20, 10, 100)
    assert decide(Difference(.2, .1, .3, .001, 30, 10, 100), over_trivial=over).says == says


# --- comparisons

def evaluated(name, right, scored_alike=1, baselines=None)->Evaluation:
    return Evaluation(name, "adapter", scores("base", [0] * len(right)), scores("tuned", right),
                      scored_alike=scored_alike, baselines=baselines)


@pytest.mark.parametrize("alike", [(2, 7), (7, 2)])
def test_a_comparison_is_corrected_for_all_models_that_were_scored_on_its_rows(alike):
    both = [evaluated(name, right, n) for name, right, n in zip("ab", (FIRST, after(10, 1)), alike)]
    with patch("sft_nb.extras.compare.evaluate", side_effect=both): made = compare("tiny", "tiny")
    plain = paired(both[0].tuned, both[1].tuned, "accuracy")
    assert made.of == 7 and made.difference == correct_for_choice(plain, 7) and made.difference.p > .05 > plain.p
    with patch("sft_nb.extras.compare.evaluate", side_effect=both): of_two = compare("tiny", "tiny", among=2)
    assert of_two.difference == plain


def test_the_better_of_two_is_better_only_if_it_is_so_than_a_trivial_answer():
    trivial = Trivial("same answer", dict(accuracy=.72), [1.] * 22 + [0.] * 28 + [1.] * 50, "a")
    a, b = evaluated("a", FIRST), evaluated("b", after(20, 0), baselines=Baselines("accuracy", [trivial]))
    made = Comparison(a, b, paired(a.tuned, b.tuned, "accuracy"))
    assert made.verdict.says == "cannot tell" and made.verdict.over_trivial is not None
    assert Comparison(a, replace(b, baselines=None), made.difference).verdict.says == "better"


# --- searches

def test_runs_that_five_cannot_tell_apart_are_as_good_as_the_best():
    "9 to 1 has p .021 of two models and .14 of five"
    right = dict(best=after(30, 0), near=after(21, 0), far=FIRST, also=FIRST, last=FIRST)
    right["near"][40] = 1   # the best wins 9 rows and loses this one
    found = Search(Path("search"), "accuracy", ("seed",), {n: dict(seed=k) for k, n in enumerate(right)},
                   dict.fromkeys(right, "finished"), dict.fromkeys(right, 1.), scores("base", [0] * 100),
                   {name: scores(name, x) for name, x in right.items()})
    d = paired(found.scores["near"], found.scores["best"], "accuracy")
    assert (d.won, d.lost) == (9, 1) and d.p < .05 and .1 < correct_for_choice(d, 5).p < .2
    assert found.swept.best == "best" and found.as_good == ["near"]


GOOD = [(.2, 2.), (.4, 1.5), (.6, 1.2), (.8, 1.1), (1., 1.)]
POOR = [(.2, 2.2), (.4, 2.1), (.6, 2.05), (.8, 2.), (1., 2.)]


@pytest.mark.parametrize("losses, how, wins", [
    ((9., 9., 9.), {}, False),
    ((1.8, 1.8, 1.8), {}, False),                        # 1.8 - 1.5 * .5 = 1.05, and then 1.8 - 1.5 * .2 = 1.5
    ((1.5, 1.2, 1.6), {}, True),                         # by its measurement before the last: 1.2 - .75
    ((1.9, 1.9, 1.25), dict(own_rate=False), True),      # 1.25 - 1.5 * .2 = .95
    ((3., 2.4, 1.9), {}, True),                          # at its own rate of 2.5 it ends at .9
    ((3., 2.4, 1.9), dict(own_rate=False), False)])
def test_a_run_goes_on_as_long_as_it_may_win(losses, how, wins):
    curve = [*zip((.2, .4, .6), losses)]
    assert (cannot_win(curve, [GOOD, POOR], **how) == "") == wins
    assert cannot_win(curve, []) == cannot_win(curve[:2], [GOOD]) == ""
    assert cannot_win([(.1, 9.), (.2, 9.), (.4, 9.)], [GOOD]) == ""   # its last but one is in the first third


@pytest.mark.parametrize("how, mixed", [
    ({}, True), (dict(device="cpu"), False), (dict(rows=17), False), (dict(checkpoints=1), False),
    (dict(checkpoints=2), True)])
def test_checkpoints_answer_in_one_batch_where_few_rows_leave_room(how, mixed):
    cfg = load_config("demo", per_device_eval_batch_size=8)
    assert mix_adapters(cfg, **dict(device="cuda", rows=16, checkpoints=10) | how)[0] == mixed
