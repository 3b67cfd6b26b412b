"""Why a run disappoints: planted problems are found, healthy runs are left in peace, and what is gone is said to be."""
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from disappointing import HEALTHY, make_run, ON_REAL, PROBLEMS, REAL, TINY, kinds

from sft_nb.base.report import ConfigError, MissingRunError
from sft_nb.cli.console import main
from sft_nb.evaluation.generations import Answer, Scores
from sft_nb.extras import explain as explaining   # the module
from sft_nb.extras.evidence import _score_of, Losses, Measured, Missing, Pair
from sft_nb.extras.explain import Cause, explain, SURE
from sft_nb.runs.directory import Run


@pytest.fixture(scope="module")
def slow(train_once):
    "A run whose learning rate is 250 times too low"
    def make(folder): return make_run(folder, TINY, "slow", kinds(), kinds(16, held_out=True), task="classify",
                                      max_steps=14, learning_rate=2e-5)
    return train_once("explained-slow", make)


@pytest.fixture(scope="module")
def explained(slow): return explain(slow, budget=600, progress=False)


def test_a_rate_that_is_too_low_is_found_by_trying_another(explained, slow):
    assert explained.best.name == "rate_low" and explained.best.sure == "certain", str(explained)
    assert explained.best.fix.settings == dict(learning_rate=pytest.approx(slow.config.learning_rate * 250, rel=3))
    assert "instead of" in explained.best.evidence[0] and not explained.is_good
    done = [t.name for t in explained.tried if t.seconds is not None]
    assert done[:3] == ["asked", "measured", "heart"] and done[-1].startswith("training_")
    assert sum(t.seconds for t in explained.tried if t.seconds) == pytest.approx(explained.spent)


def test_its_json_and_html_have_what_its_text_has(explained):
    found = json.loads(json.dumps(explained.to_dict()))
    assert found["kind"] == "explanation" and found["causes"][0]["name"] == "rate_low"
    assert found["causes"][0]["fix"].startswith("sft_nb train --config ") and found["status"] == "fail"
    assert {t["name"] for t in found["tried"]} == {t.name for t in explained.tried}
    assert all("the learning rate is too low" in text for text in (str(explained), explained._repr_html_()))


def test_a_budget_that_is_too_small_names_the_one_that_is_needed(slow, capsys):
    assert main(["explain", str(slow.path), "--budget", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget"] == found["spent"] == 0 and all(t["seconds"] is None for t in found["tried"])
    assert all("--budget" in t["says"] for t in found["tried"]) and len(found["tried"]) >= 3
    assert found["headline"] == "the learning rate is too low (likely)"   # by its distance from what is usual


def test_a_run_whose_rows_and_weights_are_gone_is_still_looked_at(slow, tmp_path):
    copy = Run(shutil.copytree(slow.path, tmp_path/"gone"))
    config = json.loads((copy.path/"config.json").read_text())
    config["config"]["train_file"] = [str(tmp_path/"nowhere.jsonl")]
    (copy.path/"config.json").write_text(json.dumps(config))
    for folder in ("adapter", "checkpoints"): shutil.rmtree(copy.path/folder, ignore_errors=True)
    copy.record(dict(step=14, loss=float("nan")))
    found = explain(copy, budget=60, progress=False)
    assert "nowhere.jsonl" in found.missing["data"] and "no weights were saved" in found.missing["weights"]
    assert found.best.name == "not_finite" and "not looked at: data" in str(found)


def test_what_cannot_be_explained_gets_a_sentence(slow, tmp_path):
    with pytest.raises(MissingRunError, match="there is no such directory"): explain(tmp_path/"none")
    with pytest.raises(ConfigError, match="it is .soon."): explain(slow, budget="soon")
    copy = Run(shutil.copytree(slow.path, tmp_path/"busy"))
    with copy.locked():
        copy.set_status("running")
        with pytest.raises(ConfigError, match="it is running; a run that has ended"): explain(copy)


def lines(*values, name="loss"): return [{"step": k, name: v} for k, v in enumerate(values, 1)]


CFG = dict(warmup_steps=.03, max_length=128, train_on_prompt=False, train_on_turns="all")


@pytest.mark.parametrize("finder, parts, name, sure", [
    ("_find_not_finite", dict(lines=lines(1., float("nan"))), "not_finite", "certain"),
    ("_find_not_finite", dict(lines=lines(1., .5)), None, None),
    ("_find_overfit", dict(lines=lines(2., 1., .1) + lines(1.5, 1., 2., name="eval_loss")), "overfit", "certain"),
    ("_find_overfit", dict(lines=lines(2., 1., .1) + lines(1.5, 1., .9, name="eval_loss")), None, None),
    ("_find_warmup", dict(run=SimpleNamespace(step=60), cfg=SimpleNamespace(warmup_steps=55)), "warmup", "certain"),
    ("_find_warmup", dict(run=SimpleNamespace(step=60), cfg=SimpleNamespace(**CFG)), None, None),
    ("_find_rate", dict(cfg=SimpleNamespace(learning_rate=.3), recommended_rate=1e-3, losses=[3., 5.]),
     "rate_high", "likely"),
    ("_find_rate", dict(cfg=SimpleNamespace(learning_rate=2e-3), recommended_rate=1e-3, losses=[3., 5.]), None, None),
    ("_find_bits", dict(bits=SimpleNamespace(matters=True, cost=1., error=.01)), "bits", "certain"),
    ("_find_bits", dict(bits=SimpleNamespace(matters=False)), None, None)])
def test_what_files_and_measurements_say(finder, parts, name, sure):
    found = getattr(explaining, finder)(**parts) or []
    assert [(c.name, c.sure) for c in found] == ([(name, sure)] if name else [])


def losses(disagrees, gain=5.):
    n = len(disagrees)
    return Losses(np.ones(n), gain + np.linspace(-1, 1, n), np.array(disagrees, bool), np.ones(n))


def test_training_rows_that_a_model_contradicts_are_called_wrong_only_if_held_out_rows_are_not():
    pairs = dict(train=[Pair(k, (1,), (2,)) for k in range(40)])
    def find(own, held): return explaining._find_wrong_answers(
        {("tuned", "train"): losses(own), ("tuned", "eval"): losses(held)}, pairs)
    noisy, clean = [True] * 12 + [False] * 28, [False] * 40
    assert [(c.name, c.sure) for c in find(noisy, clean)] == [("noise", "certain")]
    assert "1, 2, 3, 4, 5" in str(find(noisy, clean)[0].fix)
    assert [(c.name, c.sure) for c in find([True] * 24 + [False] * 16, clean)] == [("unrelated", "certain")]
    assert [c.sure for c in find(noisy, noisy)] == ["possible"]   # as likely a hard task
    assert not find(clean, clean)


def test_rows_are_not_called_unrelated_by_a_model_that_sees_no_relation_in_any_rows():
    def find(held, heart=None, arms=None):
        measured = {("base", "train"): losses([False] * 40, .0), ("base", "eval"): losses([False] * 40, held)}
        return [(c.name, c.sure) for c in explaining._find_unrelated(measured, heart, arms) or []]
    heart, no_help = SimpleNamespace(before=2., after=.1), {1: SimpleNamespace(gain=.02)}
    assert find(5.) == [("unrelated", "certain")] and find(0.) == find(0., heart) == []
    assert find(0., heart, no_help) == [("unrelated", "possible")]   # as likely a task that is too hard
    assert find(0., heart, {1: SimpleNamespace(gain=.4)}) == []


def test_causes_are_ranked_by_certainty_and_then_by_what_they_explain():
    assert sorted(SURE, key=SURE.index) == ["certain", "likely", "possible"]
    assert Cause("cut", "likely", .5, ("3 of 6",), against=("2 of 6",)).finding.says.endswith("Against it: 2 of 6")
    assert {*explaining.CAUSES} >= {p.cause for p in PROBLEMS.values()}


def test_a_lower_loss_is_not_called_a_good_score():
    found = explaining.Explanation("a", "finished", "loss 10.4 → 5.34", True, [], [], {}, 120., 1.)
    assert found.headline.endswith(": its scores are good, or clearly better than the base's")


def test_answers_that_are_not_supervised_are_found_without_a_model(tmp_path):
    run = PROBLEMS["silent-answers"].make(tmp_path, TINY | dict(max_steps=2))
    found = explain(run, budget=0, progress=False)
    assert [(c.name, c.sure) for c in found.causes] == [("answer_not_learned", "certain")], str(found)


def test_a_lower_loss_with_worse_answers_is_not_better():
    def scores(name, losses, f1s):
        pairs = enumerate(zip(losses, f1s))
        return Scores(name, [Answer(f"row {k}", "q", "a", False, "a", f"r{k}", 1, True, dict(f1=f, loss=x))
                             for k, (x, f) in pairs])
    losses = [5. + k / 10 for k in range(20)]
    base = scores("base", losses, [.4] * 20)
    for f1, better in ((.4, True), (.1, False)):
        tuned = scores("tuned", [x - 1 for x in losses], [f1] * 20)
        assert bool(_score_of(dict(base=base, tuned=tuned), "loss").is_better) is better


def check(problem, folder, base):
    found = explain(problem.make(folder, base), budget=600, progress=False)
    assert found.best is not None and found.best.name == problem.cause, str(found)


@pytest.mark.soak
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_planted_problem_is_found(name, tmp_path): check(PROBLEMS[name], tmp_path, TINY)


@pytest.mark.soak
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_cause(name, tmp_path):
    found = explain(HEALTHY[name].make(tmp_path, TINY), budget=600, progress=False)
    assert not [c for c in found.causes if c.sure != "possible"], str(found)


@pytest.mark.real
@pytest.mark.soak
@pytest.mark.parametrize("name", ON_REAL)
def test_a_planted_problem_is_found_on_a_real_model(name, tmp_path, smollm2):
    check(PROBLEMS[name], tmp_path, REAL)


def test_the_pace_is_that_of_the_last_steps_and_for_one_process():
    lines = [dict(seconds=1.), dict(seconds=30.)]
    def of(seconds):
        run = SimpleNamespace(step=10, step_seconds=seconds, config=SimpleNamespace(num_processes=2))
        return SimpleNamespace(lines=lines, run=run)
    pace = Measured.pace.func   # the property of `Measured`, without a run
    assert (pace(of(2.)), pace(of(None))) == (4., 6.)
    with pytest.raises(Missing, match="no times"): pace(SimpleNamespace(lines=[], run=SimpleNamespace(step=10)))


def test_a_base_that_knows_no_such_text_is_a_cause():
    def found(per_token, before=10., after=5., tokens=745):
        parts = {("base", "train"): SimpleNamespace(per_token=per_token)}, SimpleNamespace(tokenizer=range(tokens))
        return explaining._find_unknown_text(*parts, before and SimpleNamespace(before=before, after=after))
    (cause,) = found(11.)   # a guess has 6.61
    assert cause.sure == "likely"
    assert "11 nats a token, where guessing among 745 tokens gives 6.61" in cause.evidence[0]
    assert [found(*of)[0].sure for of in ((11., 10., 2.), (6.2, None))] == ["possible", "possible"]
    assert found(6.) is None and found(8., tokens=50_000) is None
