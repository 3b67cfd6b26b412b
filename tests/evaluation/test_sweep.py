"""Evaluations that resume, sweeps on one base, a best checkpoint that is never deleted, and a reliable verdict."""
import json
import shutil
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from learner import small
from safetensors.torch import load_file, save_file
from test_statistics import sweep_of

from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation import generations as kept_answers# the module
from sft_nb.evaluation import verdict as verdicts# the module
from sft_nb.evaluation.generations import GenerationCache, make_scores
from sft_nb.evaluation.evaluate import evaluate, make_evaluator, BaseAndTuned
from sft_nb.evaluation.perplexity import Forgetting
from sft_nb.proof.merge import merge
from sft_nb.evaluation.statistics import Difference, difference, pick, power
from sft_nb.extras import sweeps
from sft_nb.evaluation.sweep import compare_with_lowest_loss, checkpoints_of, CheckpointSwapper, sweep
from sft_nb.evaluation.verdict import decide, SEEN, verdict
from sft_nb.extras.compare import compare
from sft_nb.runs.checkpoint import best_steps, keep_score, scored_steps
from sft_nb.runs.directory import Run
from sft_nb.runs.checkpoint import write_checksums
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

FEW = dict(eval_samples=12, progress=False)


@pytest.fixture(scope="module")
def run(undisturbed, tmp_path_factory):
    "A copy of ten steps of the learner, with checkpoints 3, 6, 9 and 10"
    folder = tmp_path_factory.mktemp("swept")/"learner-1"
    shutil.copytree(undisturbed.path, folder)
    return Run(folder)


@pytest.fixture(scope="module")
def swept(run): return sweep(run, **FEW)


def counted(n_before_death:int|None=None):
    "Count generated prompts, and kill the process after `n_before_death`"
    seen, write = [], kept_answers.continue_tokens
    def counting(model, tokenizer, prompts, on_answer, **how):
        def told(number, generation):
            if len(seen) == n_before_death: raise KeyboardInterrupt
            seen.append(number)
            on_answer(number, generation)
        return write(model, tokenizer, prompts, on_answer=told, **how)
    return seen, patch.object(kept_answers, "continue_tokens", counting)


def test_an_evaluation_that_is_killed_at_half_repeats_no_generation(run, tmp_path):
    shutil.copytree(run.path, tmp_path/"killed", ignore=shutil.ignore_patterns("eval"))
    killed = Run(tmp_path/"killed")
    first, dies = counted(12)
    with dies, pytest.raises(KeyboardInterrupt): evaluate(killed, **FEW)
    second, goes_on = counted()
    with goes_on: e = evaluate(killed, **FEW)
    file = killed.path/"eval/answers.jsonl"
    assert (len(first), len(first) + len(second)) == (12, 24) and len(file.read_text().splitlines()) == 24
    nothing, again = counted()
    with again, patch.object(Workbench, "trained", side_effect=AssertionError), \
            patch.object(Workbench, "base", side_effect=AssertionError):
        assert evaluate(killed, **FEW) == e and not nothing   # and no model is loaded
    assert evaluate(killed, reuse=False, **FEW).tuned == e.tuned


def test_a_sweep_says_what_evaluations_say(run, swept):
    assert [*swept.checkpoints] == [p.name for p in run.checkpoints()]
    for name, scores in swept.checkpoints.items():
        alone = evaluate(run, checkpoint=name, reuse=False, **FEW)
        assert (alone.tuned.answers, alone.base) == (scores.answers, swept.base)
    assert {*swept.forgotten} == {*swept.checkpoints}
    assert swept.lowest_loss is None and compare_with_lowest_loss(swept) is None
    table = swept.table()
    assert list(table.checkpoint) == ["base", *swept.checkpoints] and "corrected for the choice among" in str(swept)
    plain, d = swept.pick.difference.number(table.set_index("checkpoint").gain[swept.best]), swept.pick.difference
    assert (f"({plain} as measured)" in str(swept)) == (plain != d.number(d.gain))
    assert "<table" in swept._repr_html_()


def test_all_checkpoints_in_one_batch_say_the_same(run, swept, monkeypatch):
    examiner = make_evaluator(run, reuse=False, **FEW)
    assert sweeps.score_mixed(examiner, None, checkpoints_of(run)) is None   # on a CPU it would be no faster
    monkeypatch.setattr(sweeps, "mix_adapters", lambda *args: (True, "as on a GPU"))
    mixed = sweeps.score_mixed(examiner, CheckpointSwapper(examiner.bench, checkpoints_of(run)[0]), checkpoints_of(run))
    assert {name: s.answers for name, s in mixed.items()} == \
        {name: s.answers for name, s in dict(base=swept.base, **swept.checkpoints).items()}


def test_a_swapped_adapter_leaves_nothing_behind(run):
    examiner = make_evaluator(run, **FEW)
    swapped = CheckpointSwapper(examiner.bench, checkpoints_of(run)[0])
    def size(): return sum(p.numel() for p in swapped.model.parameters())
    before = size()
    for folder in checkpoints_of(run):
        with swapped.tuned(folder) as model: assert list(model.peft_config) == ["default"]
    assert size() == before and swapped.model.active_adapters == ["default"]


def test_a_run_without_checkpoints_cannot_be_swept(run, tmp_path):
    shutil.copytree(run.path, tmp_path/"bare", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(ConfigError, match="it has no checkpoint"): sweep(tmp_path/"bare", **FEW)


def test_a_checkpoint_with_nan_takes_no_part(run, tmp_path, capsys):
    "by name it is refused, in a sweep, a merge and wherever else its weights are needed"
    shutil.copytree(run.path, tmp_path/"nan")
    broken = Run(tmp_path/"nan")
    for folder in broken.checkpoints()[2:]:
        file = folder/"adapter_model.safetensors"
        weights = load_file(file)
        next(iter(weights.values()))[0] = np.nan
        save_file(weights, file, metadata=dict(format="pt"))
        write_checksums(folder)
    assert [p.name for p in checkpoints_of(broken)] == ["checkpoint-3", "checkpoint-6"]
    assert "checkpoint-9 is left out: it holds NaN or infinity in 1 tensor" in capsys.readouterr().err
    says = "checkpoint-9: it holds NaN or infinity in 1 tensor, the first is base_model"
    with pytest.raises(SftError, match=says): sweep(broken, checkpoints=("checkpoint-9",), **FEW)
    with pytest.raises(SftError, match=says): merge(broken, checkpoint="checkpoint-9")
    with pytest.raises(SftError, match=says): evaluate(broken, checkpoint="checkpoint-9", **FEW)
    (broken.path/"checkpoints/checkpoint-3/adapter_model.safetensors").write_bytes(b"{")
    with pytest.raises(SftError, match="adapter_model.safetensors: it cannot be read"):
        evaluate(broken, checkpoint="checkpoint-3", **FEW)


def test_the_best_is_never_deleted(tmp_path):
    "It was scored while the training went on, and save_total_limit is 1"
    from learner import at_step
    cfg = small(tmp_path, run_name="kept", save_total_limit=1, save_steps=2)
    folder = tmp_path/"kept"
    def scored_now():
        for name, value in (("checkpoint-2", .3), ("checkpoint-4", .6)):
            if (folder/"checkpoints"/name).exists(): keep_score(folder, name, "accuracy", value, "rows")
    with at_step(5, scored_now): run = train(cfg)
    assert [p.name for p in run.checkpoints()] == ["checkpoint-4", "checkpoint-10"]
    assert Run(run.path).best == "checkpoint-4" and best_steps(run.path/"checkpoints") == {4}


def test_the_best_by_loss_need_not_be_the_best_by_score(swept):
    from dataclasses import replace
    worst = min(swept.checkpoints, key=lambda name: swept.checkpoints[name].accuracy)
    def marked(name, scores):
        return replace(scores, answers=[replace(a, correct=name != worst) for a in scores.answers])
    all_but_one = {name: marked(name, scores) for name, scores in swept.checkpoints.items()}
    right = replace(swept, checkpoints=all_but_one, lowest_loss=worst)
    found = compare_with_lowest_loss(right)
    assert found.status == "warn" and worst in found.says and right.best != worst
    assert compare_with_lowest_loss(replace(right, lowest_loss=right.best)).status == "ok"
    assert found in right.findings and str(found) in str(right)
    assert "best_by_loss" in [f["check"] for f in right.to_dict()["findings"]]
    assert right.to_dict()["status"] == "warn" and "best_by_loss" in right._repr_html_()
    def behind_by_a_row(name, scores):
        right = [replace(a, correct=True) for a in scores.answers]
        return replace(scores, answers=[replace(right[0], correct=name != worst), *right[1:]])
    a_row = replace(right, checkpoints={name: behind_by_a_row(name, s) for name, s in swept.checkpoints.items()})
    assert compare_with_lowest_loss(a_row).status == "ok"
    assert f"cannot be told apart from {a_row.best} (+8.3 points, p 1)" in compare_with_lowest_loss(a_row).says
    assert f"best {a_row.best}, and 2 equal to it: " in str(a_row)   # three of four checkpoints


def test_an_adapter_that_took_the_base_apart_is_compared_with_the_true_base(tmp_path, tokenizer):
    from sft_nb.model.load import load_base
    from sft_nb.evaluation.generations import answer_rows
    from sft_nb.tasks.core import task_of
    from sft_nb.tokens.conversations import read_split
    run = train(small(tmp_path, init_lora_weights="olora", max_steps=2, save_steps=1, eval_samples=6))
    e = evaluate(run, progress=False)
    cfg = run.config
    true = answer_rows(load_base(cfg, tokenizer), tokenizer, read_split(cfg, task_of(cfg), "eval"), cfg, progress=False)
    assert e.base.answers == true.answers
    made = sweep(run, progress=False, general=False)
    assert made.base.answers == true.answers and made.checkpoints["checkpoint-2"].answers == e.tuned.answers


# --- the verdict

def test_equal_models_are_told_apart_in_at_most_one_of_twenty_and_a_loss_is_found_as_often_as_is_said():
    "400 experiments: a true 5% shows more than 7.8% once in a hundred times; the limit is 5%. Power within 6 points"
    r, n = np.random.default_rng(11), 400
    def says(won, lost): return decide(difference(np.zeros(n), np.repeat([1, -1, 0], [won, lost, n - won - lost]))).says
    equal = [says(a, b) for a, b, _ in r.multinomial(n, [.1, .1, .8], 400)]
    assert sum(word != "cannot tell" for word in equal) <= 20
    for lost in (.1, .15):
        worse = [says(a, b) for a, b, _ in r.multinomial(n, [lost - .05, lost, 1.05 - 2 * lost], 400)]
        assert worse.count("better") == 0
        assert abs(worse.count("worse") / 400 - power(n, .05, 2 * lost - .05)) < .06


def test_a_picked_checkpoint_is_judged_as_one():
    r = np.random.default_rng(12)
    picks = [pick(*sweep_of(r, rows=100)) for _ in range(300)]
    assert sum(decide(p.difference).says != "cannot tell" for p in picks) <= 15


def test_a_verdict_takes_the_pick_of_the_sweep_and_a_comparison_the_same_rows(run, swept, tmp_path):
    made = verdict(run, progress=False)
    assert (made.checkpoint, made.of) == (swept.best, len(swept.checkpoints)) and made.exit_code in (0, 1, 3)
    alone = verdict(run, checkpoint="checkpoint-10", max_forgetting=.01, **FEW)
    assert (alone.checkpoint, alone.of, alone.forgotten.texts) == ("checkpoint-10", 1, 64)
    same = compare(run.path/"checkpoints/checkpoint-10", run, **FEW)
    assert same.difference.gain == 0 and "cannot tell" in str(same)
    assert same.of >= 4 and f"among the {same.of} models that were scored on these rows" in str(same)   # checkpoints
    two = compare(run.path/"checkpoints/checkpoint-10", run, among=2, **FEW)
    assert (two.of, "--among" in str(two)) == (2, False) and two.difference.high < same.difference.high
    rows = tmp_path/"rows.jsonl"
    rows.write_text("".join(json.dumps(dict(question=f"{k}+1?", answer=f"#### {k + 1}")) + "\n" for k in range(4)))
    files = dict(eval_file=str(rows), eval_samples=4, progress=False)
    compare(run.path/"checkpoints/checkpoint-10", run, **files)   # the rows of a file have their own count
    assert compare(run.path/"checkpoints/checkpoint-9", run, **files).of == 3
    with pytest.raises(ConfigError, match="no held-out row has a column 'meeting'"):
        make_evaluator(run, cluster="meeting", **FEW)
    assert set(make_evaluator(run, cluster="row", **FEW).questions.clusters) == {""}
    other = [same.a, evaluate(run, eval_samples=5, progress=False)]
    with patch("sft_nb.extras.compare.evaluate", side_effect=other):
        with pytest.raises(ConfigError, match="and not the same ones"): compare(run, run)


def test_a_gain_that_costs_general_text_has_both_in_its_headline():
    gain = difference(np.zeros(100), np.repeat([1, 0], [40, 60]))
    lost = Forgetting(64, 3., 4.2, .4, .35, .45, 1.)
    made = decide(gain, forgotten=lost)
    assert str(made).startswith("better, but forgets general text: +40.0 points") and made.exit_code == 0
    assert "forgets: loss on general text 3.00 → 4.20 (+40%)" in made.reason and SEEN[made.says] == "warn"
    assert decide(gain, forgotten=replace(lost, low=.01)).says == "better"   # it may be as little as 1%
    assert decide(gain, forgotten=lost, max_forgetting=.5).says == "better"
    assert decide(gain, forgotten=lost, max_forgetting=.1).says == "worse"
    undecided = Difference(-.2, -.4, -.01, .06, 1, 7, 30)   # the interval is below 0, and p is not below 5%
    assert decide(undecided).says == "cannot tell" and ", but p is 0.06; about" in decide(undecided).reason


def test_a_figure_of_the_whole_set_has_an_interval_and_a_comparison(run):
    "A task that ranks by a corpus figure, which no single answer has"
    from sft_nb.tasks.core import Score
    class Capitals:
        name, fields, headline = "capitals", (), "share"
        def corpus(self, texts, scores, rows): return dict(share=sum(t.isupper() for t in texts) / len(texts))
    some = evaluate(run, **FEW).tuned.answers
    made = make_scores("tuned", Capitals(), some, [Score(False, "", "")] * 12, [{}] * 12, by="share")
    assert made.values("share").mean() == pytest.approx(made.figures["share"])


def test_what_is_kept_survives_a_line_that_was_cut(tmp_path, run):
    file = tmp_path/"answers.jsonl"
    file.write_bytes(b'{"key": "a", "text": "x", "n_tokens": 1, "ended": true}\n{"key": "b", "te\n[]\n\xff\n')
    assert [*GenerationCache(file).known] == ["a"]
    assert BaseAndTuned(Workbench(run.config, is_resolved=True), None).weights is None


# --- a training that was continued after its checkpoints were scored

def test_a_verdict_does_not_quote_a_sweep_that_knows_fewer_checkpoints_than_the_run(undisturbed, tmp_path):
    from sft_nb.extras.eval_panel import EvalState
    from sft_nb.extras.html_report import scores_part
    from sft_nb.runs.summary import summary
    from sft_nb.training.train import resume
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"learner-1"))
    evaluate(run, **FEW)
    sweep(run, checkpoints=("checkpoint-3", "checkpoint-6"), **FEW)   # some of four, on purpose
    made = verdict(run)
    assert made.of == 2 and summary(run)["tuned"] is not None and "outdated" not in scores_part(run)

    resume(run, max_steps=12)
    with pytest.raises(ConfigError, match="its sweep is outdated: checkpoint-12 was saved after it") as e: verdict(run)
    assert e.value.fix.says("shell") == f"sft_nb sweep {run.path}, or --checkpoint adapter"
    page, panel = scores_part(run), EvalState(run).summary_html()
    assert "the sweep: checkpoint-12 was saved after it" in page and "the scores: adapter has changed since" in page
    assert "outdated: checkpoint-12 was saved after it" in panel
    assert summary(run)["tuned"] is None   # of the adapter that was
    assert verdict(run, checkpoint="adapter", **FEW).of == 1
    assert "the scores:" not in scores_part(run)
    swept = sweep(run, **FEW)
    assert verdict(run).of == 5 and swept.outdated(run) == ""

    folder = run.path/"checkpoints"/swept.best
    (folder/"adapter_model.safetensors").write_bytes((folder/"adapter_model.safetensors").read_bytes() + b" ")
    write_checksums(folder)
    with pytest.raises(ConfigError, match=f"{swept.best} has changed since"): verdict(run)
    assert f"the verdict: {swept.best} has changed since" in scores_part(run)
    assert run.best != swept.best   # its score is one of other weights
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=f"{swept.best}, the best of it, is no longer there"): verdict(run)
    assert f"the verdict: {swept.best} is no longer there" in scores_part(run)
    assert run.weights(run.best).exists()


def test_an_older_sweep_knows_that_a_later_checkpoint_is_new(run, swept):
    old = replace(swept, weights={}, checkpoints={"checkpoint-3": swept.checkpoints["checkpoint-3"]})
    assert old.outdated(run) == "checkpoint-6, checkpoint-9, checkpoint-10 were saved after it"


def test_scores_of_a_killed_run_say_that_its_adapter_is_from_before(undisturbed, tmp_path):
    from sft_nb.runs.directory import earlier_adapter
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"learner-1"))
    assert earlier_adapter(run) == ""
    run.set_status("running", step=13)
    assert run.state == "killed" and earlier_adapter(run) == ""   # no checkpoint is newer
    shutil.copytree(run.path/"checkpoints/checkpoint-3", run.path/"checkpoints/checkpoint-12")
    e = evaluate(run, **FEW)
    assert "its adapter is from before the training was continued (killed at step 13)" in str(e)
    assert "newer weights are in checkpoint-12" in str(e)
    assert "continued" not in str(evaluate(run, checkpoint="checkpoint-12", **FEW))


def test_points_are_given_as_shares(run, swept):
    for how, fix in ((dict(min_gain=2), "--min-gain 0.02"), (dict(max_forgetting=1.), "--max-forgetting 0.01")):
        with pytest.raises(ConfigError, match="a share below 1") as e: verdict(run, progress=False, **how)
        assert e.value.fix.says("shell") == fix


@pytest.mark.parametrize("names", [(), ("adapter",)])
def test_a_sweep_without_checkpoints_is_refused(run, names):
    with pytest.raises(ConfigError, match="no checkpoint is named; some of checkpoint-3, .*Fix: leave checkpoints out"):
        sweep(run, checkpoints=names, **FEW)


def test_one_checkpoint_on_other_rows_replaces_no_sweep(run, swept, tmp_path):
    "Neither as the best of the run, nor in its files"
    copy = Run(shutil.copytree(run.path, tmp_path/"copy"))
    best, scores = copy.best, scored_steps(copy.path, swept.by)
    assert len(scores) == len(swept.checkpoints)
    first = copy.checkpoints()[0].name
    before = (copy.path/"eval"/f"{first}.json").read_bytes()
    evaluate(copy, checkpoint=first, eval_samples=5, progress=False)
    assert (copy.best, scored_steps(copy.path, swept.by)) == (best, scores)
    (copy.path/"eval"/f"{first}.json").write_bytes(before)
    evaluate(copy, checkpoint=first, task="units", eval_samples=5, progress=False)
    assert (copy.best, scored_steps(copy.path, swept.by)) == (best, scores)
    assert (copy.path/"eval"/f"{first}.json").read_bytes() == before
    assert (copy.path/"eval"/f"{first}-units.json").exists()
    keep_score(copy.path, first, swept.by, 7., "newer rows")
    assert scored_steps(copy.path, swept.by) == scores
    for k, folder in enumerate(copy.checkpoints()): keep_score(copy.path, folder.name, swept.by, k, "newer rows")
    assert [*scored_steps(copy.path, swept.by).values()] == [0, 1, 2, 3]   # as many checkpoints, on newer rows


@pytest.mark.parametrize("how", [dict(eval_samples=1), dict(max_new_tokens=1), dict(reuse=False)])
def test_a_verdict_with_other_settings_does_not_read_the_last_sweep(run, swept, tmp_path, how):
    copy = Run(shutil.copytree(run.path, tmp_path/"copy"))
    with patch.object(verdicts, "evaluate", side_effect=InterruptedError) as asked, pytest.raises(InterruptedError):
        verdict(copy, **how)
    assert asked.call_args.kwargs.items() >= how.items()


def test_a_setting_of_an_evaluation_that_is_wrong_is_corrected_where_it_was_given(run):
    with pytest.raises(ConfigError, match="override: max_new_tokens = 0; .* Fix: max_new_tokens=256"):
        evaluate(run, max_new_tokens=0)


def test_general_texts_whose_answers_are_out_of_reach_are_refused(run, tmp_path):
    (tmp_path/"long.jsonl").write_text(json.dumps(dict(question="word " * 900, answer="yes")))
    with pytest.raises(SftError, match="no answer begins within the first 512 tokens"):
        evaluate(run, general=str(tmp_path/"long.jsonl"), eval_samples=2, progress=False)
