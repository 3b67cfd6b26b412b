"""Base and tuned model on held-out rows, and how sure their accuracies are."""
import fcntl
import json
import shutil
from dataclasses import replace

import pytest
from learner import learner, small_qlora, weights_of_learner

from sft_nb.config.load import load_config
from sft_nb.model.load import load_base
from sft_nb.panels.conversation import GenerationState
from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation.generations import Answer, answer_rows, make_questions, Scores
from sft_nb.evaluation.evaluate import Evaluation, evaluate, make_evaluator
from sft_nb.evaluation.sweep import sweep, Sweep
from sft_nb.evaluation.verdict import verdict
from sft_nb.runs.directory import Run
from sft_nb.tasks.core import Score, task_of
from sft_nb.tokens.conversations import read_split
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import train


def test_an_evaluation_keeps_every_generation(trained):
    e = evaluate(trained, eval_samples=12, progress=False)
    saved = json.loads((trained.path/"eval/adapter.json").read_text())
    assert len(saved["base"]["answers"]) == len(saved["tuned"]["answers"]) == 12
    assert Evaluation.load(trained.path/"eval/adapter.json") == e
    earlier = evaluate(trained, eval_samples=12, checkpoint="checkpoint-30", progress=False)
    assert e.base.answers == earlier.base.answers   # greedy, the same base


def test_what_a_killed_evaluation_left_behind_goes_with_the_next(trained):
    "Found by kill 61 of scripts/soak.py: it died between writing a file aside and renaming it"
    left, written = (trained.path/"eval"/f".adapter.json.{name}.new" for name in ("dead", "alive"))
    evaluate(trained, eval_samples=2, progress=False)
    for path in (left, written): path.write_text("{")   # in this very instant: an evaluation that reuses all is as fast
    with written.open() as held:   # by another evaluation, which lives
        fcntl.flock(held, fcntl.LOCK_EX)
        evaluate(trained, eval_samples=2, progress=False)
        assert (left.exists(), written.exists()) == (False, True)
    written.unlink()


def test_a_checkpoint_that_is_not_there(trained):
    says = ("there is no checkpoint-7 in it .finished at step 60.; one of adapter, checkpoint-30, checkpoint-60. "
            "Fix: checkpoint='checkpoint-60'")
    with pytest.raises(ConfigError, match=says): evaluate(trained, checkpoint="checkpoint-7")
    for name in ("", "..", "."):   # folders, but no checkpoints
        with pytest.raises(ConfigError, match=f"there is no {name or repr('')} in it"): trained.weights(name)
    with pytest.raises(ConfigError, match="eval_samples is 0"): evaluate(trained, eval_samples=0)


def test_a_run_of_all_weights_is_compared_with_the_base_that_it_began_with(tmp_path, tokenizer):
    run = train(small_qlora(tmp_path, method="full", max_steps=2, max_samples=32, eval_samples=4, max_new_tokens=8))
    e = evaluate(run, progress=False)
    base = load_base(run.config, tokenizer)
    rows = read_split(run.config, task_of(run.config), "eval")
    assert e.base == answer_rows(base, tokenizer, rows, run.config, name="base", progress=False)


def test_the_rows_that_preparation_kept_are_the_rows_that_are_scored(tmp_path):
    "Empty answers, lines that are no JSON, duplicates, long rows and rows without a prompt are counted, not asked"
    rows = [dict(messages=[dict(role="user", content=f"{k}+1?"), dict(role="assistant", content=str(k + 1))])
            for k in range(6)]
    rows += [dict(question="7+1?", answer=""), rows[0], dict(question="9+1? " * 300, answer="10"),
             dict(text="A text, which asks nothing.")]
    train_file, file = tmp_path/"train.jsonl", tmp_path/"eval.jsonl"
    train_file.write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    cfg = load_config(train_file=str(train_file), eval_file=str(file), on_bad_row="drop", drop_duplicates=True,
                      **learner() | dict(max_steps=2, save_steps=1, max_new_tokens=4, preflight=False),
                      runs_dir=str(tmp_path/"runs"))
    run = train(cfg)
    e = evaluate(run, progress=False)
    assert [a.where for a in e.tuned.answers] == [f"eval.jsonl line {k}" for k in range(1, 7)]
    assert {"empty answer", "duplicate of an earlier row", "no prompt"} < {*e.left_out}
    assert sum(e.left_out.values()) == 5
    assert "6 held-out rows (" in str(e) and "1 left out: empty answer" in str(e)
    assert Evaluation.load(run.path/"eval/adapter.json") == e
    swept = sweep(run, general=False, progress=False)
    assert swept.base.n == 6 and swept.left_out == e.left_out and "left out: empty answer" in str(swept)
    assert Sweep.load(run.path/"eval/sweep.json").left_out == e.left_out
    assert len(GenerationState(run).rows()) == 7   # one of them is a text
    with pytest.raises(SftError, match="this is not valid JSON"):   # a setting of evaluations too
        evaluate(run, eval_file=str(file), on_bad_row="error", progress=False)


def test_rows_that_were_trained_on_are_not_held_out(tmp_path):
    "A line of the training file cannot be read, and one held-out answer is blank"
    def talk(k, answer):
        return dict(messages=[dict(role="user", content=f"{k}+1?"), dict(role="assistant", content=answer)])
    rows = [talk(k, str(k + 1)) for k in range(12)]
    more = dict(messages=[*rows[0]["messages"], *talk(20, " ")["messages"]])
    file = tmp_path/"rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    new = [more, *(talk(k, "9") for k in range(30, 36))]
    (tmp_path/"new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    run = train(load_config(train_file=str(file), eval_samples=0, on_bad_row="drop", runs_dir=str(tmp_path/"runs"),
                            **learner() | dict(max_steps=2, save_steps=1, max_new_tokens=4, preflight=False)))
    e = evaluate(run, eval_file=str(file), eval_samples=9, progress=False)
    assert e.trained_on == 9 and "9 of 9 rows ask what a training row asks: not held out" in str(e)
    made = verdict(run, eval_file=str(file), eval_samples=9, general=False, progress=False)
    assert "9 of 9 rows ask what a training row asks" in made.reason and made.says not in ("better", "worse")
    other = evaluate(run, eval_file=str(tmp_path/"new.jsonl"), eval_samples=9, progress=False)
    assert other.trained_on == 0 and other.tuned.n == 6 and other.left_out == {"empty answer": 1}
    assert "trained_on" not in [f.check for f in other.findings]
    (tmp_path/"case.jsonl").write_text(json.dumps(dict(prompt="3 +  4 IS?", completion="7")) + "\n")
    same = [dict(prompt=f"{k} + 4 is?", completion="7") for k in (3, 5)]
    (tmp_path/"same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in same))
    own = train(load_config(train_file=str(tmp_path/"same.jsonl"), eval_file=str(tmp_path/"case.jsonl"), eval_samples=1,
                            runs_dir=str(tmp_path/"runs"),
                            **learner() | dict(max_steps=1, save_steps=1, max_new_tokens=4, preflight=False)))
    assert evaluate(own, progress=False).trained_on == 1   # the run's own held-out file, and another case
    (tmp_path/"blank.jsonl").write_text(json.dumps(more) + "\n")
    with pytest.raises(ConfigError, match="the last answer of 1 held-out row is empty"):
        evaluate(run, eval_file=str(tmp_path/"blank.jsonl"), eval_samples=9, progress=False)


def test_rows_of_any_length_are_asked_of_a_model_that_no_run_trained(tmp_path):
    file = tmp_path/"long.jsonl"
    file.write_text(json.dumps(dict(question="9+1? " * 200, answer="10")) + "\n")
    assert evaluate("tiny", task="chat", eval_file=str(file), max_new_tokens=2, progress=False).tuned.n == 1
    with pytest.raises(SftError, match="longer than 64 tokens"):
        evaluate("tiny", task="chat", eval_file=str(file), max_length=64, progress=False)


def test_a_model_without_a_run_is_asked_for_rows_to_evaluate_and_for_nothing_else(tmp_path):
    file = tmp_path/"rows.jsonl"
    file.write_text(json.dumps(dict(question="9+1?", answer="10")) + "\n")
    folder = shutil.copytree(weights_of_learner(), tmp_path/"merged")
    load_tokenizer("tiny").save_pretrained(folder)   # without one, that is said first
    how = dict(max_new_tokens=2, progress=False)
    with pytest.raises(ConfigError, match="there are no rows to evaluate it on") as e: evaluate(folder, **how)
    assert e.value.fix.says("shell") == "--eval-file rows.jsonl, or --task gsm8k"
    assert evaluate(folder, eval_file=str(file), **how).tuned.n == 1


def test_a_fix_of_an_evaluation_can_be_done_in_an_evaluation(undisturbed):
    for name in ("max_rows", "n", "max_samples"):
        with pytest.raises(ConfigError, match="is not a setting of an evaluation") as e:
            evaluate(undisturbed, **{name: 6})
        assert str(e.value.fix) == "write eval_samples"
    with pytest.raises(ConfigError, match="is not a setting") as e: evaluate(undisturbed, temperature=6)
    assert str(e.value.fix) == "leave temperature out"


def test_a_figure_that_answers_will_not_have_is_refused_before_they_are_generated(undisturbed, monkeypatch, tmp_path):
    def generated(*args, **how): raise AssertionError("answers were generated")
    monkeypatch.setattr("sft_nb.evaluation.evaluate.answer_prompts", generated)
    with pytest.raises(ConfigError, match="the answers have no 'rougeL'; one of accuracy, answered, ended") as e:
        evaluate(undisturbed, by="rougeL", eval_samples=1, max_new_tokens=2, progress=False)
    assert (e.value.fix.says("shell"), e.value.fix.says("python")) == ("--by accuracy", "by='accuracy'")
    for by in ("loss", "perplexity"):   # of any task, where it is asked for
        with pytest.raises(AssertionError, match="answers were generated"):
            evaluate(undisturbed, by=by, eval_samples=1, max_new_tokens=2, progress=False)
    file = tmp_path/"talks.jsonl"
    file.write_text("".join(json.dumps(dict(question=f"{k}+1?", answer=str(k + 1))) + "\n" for k in range(3)))
    free = dict(task="chat", eval_file=str(file), eval_samples=3, max_new_tokens=2, progress=False)
    for by, fix in (("rougeL", "--by f1"), ("exact match", "--by accuracy"), ("acuracy", "--by accuracy")):
        with pytest.raises(ConfigError, match=r"accuracy \(exact match in a table\), .*loss, perplexity, .*f1") as e:
            evaluate(undisturbed, by=by, **free)
        assert e.value.fix.says("shell") == fix
    for by in ("f1", "perplexity", "ended", "mine"):
        with pytest.raises(AssertionError, match="answers were generated"):
            evaluate(undisturbed, by=by, metrics=dict(mine=lambda answer, row: 1.), **free)


def test_a_task_that_cannot_score_an_empty_answer_is_asked_later(tokenizer):
    class Picky:
        name, fields = "picky", ()
        def score(self, text, row): return Score(True, text[0], "2")
    rows = {"row 1": dict(question="1+1?", answer="2")}
    questions = make_questions(load_config("demo", eval_samples=1), tokenizer, rows)
    questions = replace(questions, figure="of_its_own")
    with pytest.raises(ConfigError, match="have no 'of_its_own'"): questions.check_figure()
    questions.__dict__["task"] = Picky()
    questions.check_figure()


def test_scores_without_a_figure_name_both_places_that_choose_it(tokenizer):
    scores = Scores("tuned", [Answer("row 1", "1+1?", "2", True, "2", "2", 1, True, dict(f1=1.))])
    with pytest.raises(ConfigError, match="the answers have no 'bleu'") as e: scores.values("bleu")
    assert e.value.fix.says("shell") == "--by f1, or --metric-for-best-model f1"


def test_the_base_is_the_named_one_and_the_stored_one_has_a_line_if_it_is_worse(
        undisturbed_qlora, tmp_path, monkeypatch):
    from sft_nb.evaluation import evaluate as chapter
    from sft_nb.planning.bits import BitsCost, in_16_bits
    def scored(name, cost, why=""):
        run = Run(shutil.copytree(undisturbed_qlora.path, tmp_path/name))
        shutil.rmtree(run.path/"eval", ignore_errors=True)
        monkeypatch.setattr(chapter, "cost_of_bits", lambda *args, **how: cost)
        monkeypatch.setattr(chapter, "why_not_in_16_bits", lambda *args: why)
        return run, evaluate(run, eval_samples=4, max_new_tokens=8, progress=False)

    much, nothing = BitsCost(4, (5.,) * 4, (8., 8.1, 8.2, 8.)), BitsCost(4, (5.,) * 4, (5.,) * 4)
    run, e = scored("much", much)
    assert [s.model for s in e.models] == ["base", "base in 4 bits", "tuned"] and "base in 4 bits" in str(e)
    assert "base in 4 bits" in e._repr_html_()
    assert Evaluation.load(run.path/"eval/adapter.json") == replace(e, scored_alike=1)
    alone = evaluate("tiny", task=run.config.task, eval_samples=4, max_new_tokens=8, progress=False)
    assert [a.text for a in alone.tuned.answers] == [a.text for a in e.base.answers]   # in 16 bits, or 32
    monkeypatch.setattr(chapter, "load_base", None)   # all answers are known
    again = evaluate(run, eval_samples=4, max_new_tokens=8, progress=False)
    assert (again.base, again.stored) == (e.base, e.stored)
    monkeypatch.undo()

    run, e = scored("nothing", nothing)
    assert e.stored is None and [s.model for s in e.models] == ["base", "tuned"] and not e.why_stored
    monkeypatch.undo()
    run, e = scored("no room", much, "its weights take 14.2 GiB in bfloat16, and 9.1 GiB are free")
    assert e.stored is None and "in 4 or 8 bits: its weights take 14.2 GiB" in str(e)
    evaluator = make_evaluator(run, eval_samples=4, max_new_tokens=8, progress=False)
    assert evaluator.base_cfg == evaluator.bench.cfg and not evaluator.knows_base(in_16_bits(evaluator.bench.cfg))


def asked(*parts:str, **last)->dict:
    "A conversation that asks and answers in turn; `last`: what else the last message has"
    talk = [dict(role=("user", "assistant")[k % 2], content=text) for k, text in enumerate(parts)]
    return dict(messages=[*talk[:-1], talk[-1] | last])


def test_an_answer_that_a_flag_excludes_is_not_the_one_to_give():
    "As OpenAI's `weight`: what the training leaves out is no reference either"
    rows = {"row 1": asked("1+1?", "2", "2+2?", "5", weight=0), "row 2": asked("1+1?", "2", "2+2?", "4")}
    q = make_questions(load_config(task="chat"), load_tokenizer(load_config()), rows)
    assert [[m["content"] for m in chat] for chat in q.chats] == [["1+1?", "2"], ["1+1?", "2", "2+2?", "4"]]
    assert [q.task.score("", row).expected for row in q.rows.values()] == ["2", "4"]


def test_the_loss_is_of_the_answers_that_are_learned():
    rows, tokenizer = {"row 1": asked("1+1?", "2", "2+2?", "4")}, load_tokenizer(load_config())
    def supervised(turns):
        q = make_questions(load_config(task="chat", train_on_turns=turns), tokenizer, rows)
        return tokenizer.decode([label for _, labels in q.examples[0] for label in labels if label != -100])
    assert (supervised("all"), supervised("last")) == ("2<|im_end|>4<|im_end|>", "4<|im_end|>")


def test_a_call_is_compared_with_a_call():
    "Of a message without words the calls are what is expected, and not an empty text"
    call = dict(type="function", function=dict(name="add", arguments='{"a": 1, "b": 2}'))
    rows = {"row 1": asked("1+2?", "", tool_calls=[call]), "row 2": asked("Hi?", "Hello.")}
    q = make_questions(load_config(task="chat"), load_tokenizer(load_config()), rows)
    first, second = q.rows.values()
    given = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
    assert q.task.score(given, first).correct and not q.task.score("", first).correct
    assert q.task.score("", first).got is None and "add" in q.task.score("", first).expected
    assert q.task.score(given, first).figures.keys() == q.task.score("Hello.", second).figures.keys()
