"""User-defined figures and figures of free text: their values, comparisons, and what is refused."""
from dataclasses import replace

import numpy as np
import pytest
from learner import learner

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation.generations import Answer, check_metrics, own_figures, paired, Questions, Scores
from sft_nb.evaluation.evaluate import Evaluation, evaluate
from sft_nb.evaluation.statistics import detectable, Difference, difference, power, rows_needed
from sft_nb.evaluation.sweep import sweep, Sweep
from sft_nb.evaluation.verdict import decide
from sft_nb.extras.compare import compare
from sft_nb.tasks.core import task
from sft_nb.tasks.metrics import measure_answers
from sft_nb.training.train import train

ROWS = [dict(question=f"{k}+1?", answer=f"It is {k + 1}.") for k in range(12)]


def scores(name, losses, f1s, tokens):
    answers = [Answer(f"row {k}", "?", "text", False, "text", "other", 3, True, dict(f1=f, loss=x, supervised=n))
               for k, (x, f, n) in enumerate(zip(losses, f1s, tokens))]
    total = float(np.dot(losses, tokens) / sum(tokens))
    return Scores(name, answers, dict(accuracy=0., answered=1., f1=float(np.mean(f1s)), loss=total))


def test_free_text_leads_with_paired_loss_and_f1():
    "Exact match is 0% before and after, and decides nothing"
    r, tokens = np.random.default_rng(0), [4, 20] * 15
    base = scores("base", r.normal(8.25, .3, 30), r.uniform(0, .06, 30), tokens)
    tuned = scores("tuned", r.normal(2.31, .3, 30), r.uniform(.5, .8, 30), tokens)
    e = Evaluation("tickets-1", "adapter", base, tuned, "loss")
    lines = [line for line in str(e).splitlines() if "one_target" not in line]   # all rows have one answer here
    assert lines[1].lstrip().startswith("base   loss 8.") and "f1 0.0" in lines[1] and "exact match 0.0%" in lines[1]
    assert lines[3].startswith("  loss 8.") and "better on 30 rows, worse on none" in lines[3]
    assert lines[4].startswith("  f1 0.0") and "points" in lines[4]
    assert abs(e.difference.gain - (base.figures["loss"] - tuned.figures["loss"])) < 1e-9   # of the tokens, not of rows
    assert e.difference.sign == -1 and not e.difference.is_share
    said = decide(e.difference)
    assert said.says == "better" and said.reason.startswith("loss -5.")
    assert "exact match" in e._repr_html_() and "loss (it counts)" in e._repr_html_()
    worse = decide(paired(tuned, base, "loss"))
    assert worse.says == "worse" and "loss +5." in worse.reason
    assert "cannot tell" not in str(e)


def test_figures_whose_interval_includes_0_are_not_told_apart_by_p(monkeypatch):
    monkeypatch.setattr("sft_nb.evaluation.statistics.sign_test", lambda *args, **how: .028)
    base = scores("base", [1., 1., 1., 1., 1.], [0.] * 5, [9] * 5)
    tuned = scores("tuned", [.9, 1.1, .9, 1.1, .9], [0.] * 5, [9] * 5)
    line = str(Evaluation("tickets-1", "adapter", base, tuned, "loss"))
    assert "p 0.028), but the interval includes 0: cannot tell" in line




def test_exact_match_keeps_its_name_under_a_figure_of_ones_own():
    s = scores("base", [1., 3.], [0., 0.], [30, 10])
    own = replace(s, answers=[replace(a, figures=a.figures | dict(own=1.)) for a in s.answers],
                  figures=s.figures | dict(own=1.))
    assert "exact match 0.0%" in own.line("own") and "right" not in own.line("own")
    task_only = replace(own, figures=dict(accuracy=0., answered=1., own=1.))
    assert "right 0.0%" in task_only.line("own")   # a task judges its answers


def test_an_interval_and_a_p_that_disagree_leave_it_open():
    by_p, by_interval = Difference(.01, -.001, .02, .028, 8, 4, 18, .02), Difference(.01, .001, .02, .06, 8, 4, 18, .02)
    assert by_p.disagreement == "but the interval includes 0" and by_interval.disagreement == "but p is 0.06"
    for d in (by_p, by_interval): assert decide(d).says == "cannot tell" and f"{d.disagreement};" in decide(d).reason
    for agreed in (replace(by_p, low=.001), replace(by_interval, low=-.001)): assert not agreed.disagreement


def test_a_loss_and_its_interval_are_those_of_the_tokens():
    s = scores("base", [1., 3.], [0., 0.], [30, 10])
    assert s.overall("loss") == 1.5 == s.figures["loss"] and s.overall("f1") == 0
    low, high = s.interval_of("loss")
    assert low <= 1.5 <= high


def test_a_figure_that_is_no_yes_or_no_needs_the_rows_that_its_spread_needs():
    "Two points of ROUGE with a spread of 11: some 240 rows, where the formula for yes and no says 58,000"
    r = np.random.default_rng(1)
    d = difference(np.zeros(200), r.normal(.02, .11, 200))
    assert d.differing == 1 and 180 < rows_needed(.02, d.differing, sd=d.sd) < 320
    assert rows_needed(.02, 1.) > 15_000
    assert power(200, .05, 1., sd=d.sd) > .99
    found = np.mean([difference(np.zeros(240), r.normal(.02, .11, 240)).p < .05 for _ in range(120)])
    assert abs(found - power(240, .02, sd=.11)) < .12
    assert abs(detectable(240, sd=.11) - .02) < .001
    skewed = r.exponential(.1, (120, 80)) - .06   # loss has long tails: the mean decides all the same
    found = np.mean([difference(np.zeros(80), x).p < .05 for x in skewed])
    assert abs(found - power(80, .04, sd=.1)) < .13


def test_rows_of_one_cluster_count_as_fewer():
    r = np.random.default_rng(2)
    shared = np.repeat(r.normal(.1, .3, 30), 10)
    alone = difference(np.zeros(300), shared)
    together = difference(np.zeros(300), shared, clusters=[k // 10 for k in range(300)])
    assert 2.8 < together.sd / alone.sd < 3.6   # the root of ten


def test_a_verdict_of_a_figure_in_its_own_unit():
    r = np.random.default_rng(3)
    d = replace(difference(np.zeros(40), r.normal(.02, .2, 40)), figure="loss", is_share=False, sign=-1)
    said = decide(d)
    assert said.says == "cannot tell" and "40 rows can show a difference of 0.1" in str(said)
    equal = Difference(0., -.1, .1, 1., 3, 3, 40, .2, "loss", False, -1)
    assert "too small for any number of rows" in decide(equal).reason
    tiny = Difference(1e-6, -.1, .1, 1., 3, 3, 40, .2, "loss", False, -1)
    assert "too small for any number of rows" in decide(tiny).reason


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    "Two steps on rows of free text"
    folder = tmp_path_factory.mktemp("free")
    few = dict(max_steps=2, save_steps=1, max_new_tokens=4, preflight=False, runs_dir=str(folder))
    cfg = load_config(task="chat", **learner() | few)
    from sft_nb.tokens.prepare import prepare
    return train(cfg, data=prepare(cfg, train=ROWS[:8], eval=ROWS[8:]))


def test_a_figure_of_ones_own_is_kept_and_compared_by(chat):
    seen = []
    def graded(answer, row):
        seen.append(row)
        row["answer"] = "changed"   # in a copy
        return .5 if len(seen) % 2 else True
    e = evaluate(chat, metrics=dict(graded=graded), progress=False)
    assert e.by == "graded" and seen[0]["question"] == "8+1?" and e.tuned.answers[0].expected == "It is 9."
    assert {a.figures["graded"] for a in e.tuned.answers} == {.5, 1.} and e.tuned.figures["graded"] == .75
    assert Evaluation.load(chat.path/"eval/adapter.json") == e and "graded 0.75" in str(e)
    swept = sweep(chat, metrics=dict(graded=lambda answer, row: np.float32(.25)), general=False, progress=False)
    assert swept.by == "graded" and Sweep.load(chat.path/"eval/sweep.json").best == swept.best
    assert evaluate(chat, by="f1", progress=False).by == "f1" and evaluate(chat, progress=False).by == "loss"
    both = compare(chat.path/"checkpoints/checkpoint-1", chat, by="accuracy", progress=False)
    assert both.difference.figure == "accuracy"


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.5", [1, 2]])
def test_what_is_no_number_is_refused_with_its_row(value):
    with pytest.raises(SftError, match="metric 'mine', a.jsonl line 7: it returned"):
        own_figures(dict(mine=lambda answer, row: value), ["text"], [{}], ["a.jsonl line 7"])


def test_a_function_that_fails_is_refused_with_its_row_and_takes_no_answer_along(chat):
    kept = (chat.path/"eval/answers.jsonl").read_bytes() if (chat.path/"eval/answers.jsonl").exists() else None
    found = "eval.jsonl line 1: it raised KeyError: 'nothing'; the row has question, answer.*no answer is"
    with pytest.raises(SftError, match=found):
        evaluate(chat, metrics=dict(mine=lambda answer, row: row["nothing"]), progress=False)
    assert (chat.path/"eval/answers.jsonl").read_bytes().startswith(kept or b"")


@pytest.mark.parametrize("metrics, found", [([len], "it is a list"), (dict(mine=3), "'mine' is a int"),
                                            (dict(loss=len), "'loss' is the name of another figure")])
def test_metrics_that_are_none(metrics, found):
    with pytest.raises(ConfigError, match=found): check_metrics(metrics)


def test_a_function_under_another_name_is_told_where_it_belongs(chat):
    def exact(answer, row): return True
    with pytest.raises(ConfigError, match=r"metrics=\{'exact': exact\}"): evaluate(chat, metric=exact)


def test_an_object_may_be_the_task(chat):
    "And one that is none is named, not the run's config.json"
    @task("question", "answer")
    def half(text, row): return .5
    e = evaluate(chat, task=half, progress=False)
    assert e.tuned.accuracy == .5 and e.tuned.correct == 0 and "mean of 4, 0 in full" in str(e)
    with pytest.raises(ConfigError, match="task: int has no name"): evaluate(chat, task=3)


def test_graded_credit_is_what_accuracy_counts():
    @task("question", "answer")
    def graded(text, row): return float(text)
    found = [graded.score(text, ROWS[0]) for text in ("0.5", "1", "0")]
    assert measure_answers(graded, ["0.5", "1", "0"], found, ROWS[:3])["accuracy"] == .5
    @task("question", "answer")
    def nothing(text, row): return None
    with pytest.raises(SftError, match="task 'nothing': it returned None"): nothing.score("x", ROWS[0])


def test_two_models_are_compared_on_the_rows_that_both_were_asked(monkeypatch):
    "One of them left a row out; losses of other tokens are not compared"
    a, b = scores("tuned", [3, 2, 1], [.1, .2, .3], [5, 5, 5]), scores("tuned", [2, 1, .5], [.5, .6, .7], [5, 5, 5])
    fewer = replace(b, answers=b.answers[1:])
    other_model = "Qwen/Qwen3-0.6B"
    made = {"tiny": Evaluation("a", "adapter", a, a, "loss"),
            other_model: Evaluation("b", "adapter", fewer, fewer, "loss", left_out={"longer than max_length 64": 1})}
    monkeypatch.setattr("sft_nb.extras.compare.evaluate", lambda what, **how: made[what])
    both = compare("tiny", other_model)
    assert both.a.tuned.n == both.b.tuned.n == both.difference.n == 2
    assert both.a.left_out == {"left out by the other": 1}
    assert both.difference.figure == "loss" and abs(both.difference.gain - .75) < 1e-9
    other = scores("tuned", [2, 1, .5], [.5, .6, .7], [9, 9, 9])   # another tokenizer
    made[other_model] = Evaluation("b", "adapter", other, other, "loss")
    assert compare("tiny", other_model).difference.figure == "f1"
    silent = replace(a, answers=[replace(x, n_tokens=0) for x in a.answers])
    made["tiny"] = Evaluation("a", "adapter", silent, silent, "loss")
    with pytest.raises(ConfigError, match="their tokenizers differ"): compare("tiny", other_model)


def test_a_server_cannot_be_asked_for_a_loss_and_is_asked_for_f1():
    cfg = load_config(task="chat")
    assert Questions(cfg, {}, [], [[1]], [], []).by == "loss"
    assert Questions(cfg, {}, [], [[1]], [], [], figure="f1").by == "f1"


def test_a_function_under_a_wrong_name_is_told_how_to_write_it():
    def contains(answer, row): return 1.
    for function, fix in ((lambda answer, row: 1., "metrics={'name': function}"),
                          (contains, "metrics={'contains': contains}")):
        with pytest.raises(ConfigError, match="metric is a function") as e: evaluate("no-run", metric=function)
        assert str(e.value.fix) == fix
