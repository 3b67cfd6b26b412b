"A gain over the base is not yet a gain over answers that do not depend on the question"
import json
from dataclasses import replace

import pytest

from sft_nb.base.view import as_json
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import Evaluation, evaluate, Evaluator
from sft_nb.evaluation.generations import make_questions, score_generations
from sft_nb.evaluation.sweep import sweep, Sweep
from sft_nb.evaluation.trivial import Baselines, find_trivial, trivial_answers
from sft_nb.evaluation.verdict import decide, verdict
from sft_nb.extras.compare import compare, Comparison
from sft_nb.model.generation import Generation
from sft_nb.extras.eval_panel import EvalState
from sft_nb.tasks.core import task_of
from sft_nb.tasks.metrics import measure_answers

LABELS = ["entailment"] * 32 + ["neutral"] * 28   # 53.3%


def nli_rows(labels=LABELS)->list[dict]:
    return [dict(prompt=f"Premise: {k} dogs ran. Hypothesis: {k % 7} dogs ran.", completion=label)
            for k, label in enumerate(labels)]


def nli_questions(tokenizer, task:str):
    rows = {f"row {k}": row for k, row in enumerate(nli_rows())}
    cfg = load_config("demo", task=task, eval_samples=60, metric_for_best_model="accuracy")
    return make_questions(cfg, tokenizer, rows)


def answered(name, questions, texts): return score_generations(name, questions, [Generation(t, 3, True) for t in texts])


@pytest.mark.parametrize("task", ["chat", "classify"])
def test_a_model_that_always_says_one_word_is_not_better(tokenizer, task):
    "56.7% against 0% of a base that never answers in the expected form; to say one word every time gives 53.3%"
    questions = nli_questions(tokenizer, task)
    base = answered("base", questions, ["The premise says so."] * 60)
    tuned = answered("tuned", questions, ["entailment"] * 58 + ["neutral"] * 2)
    assert (base.accuracy, round(tuned.accuracy, 3)) == (0, .567)
    made = Baselines("accuracy", trivial_answers(questions))
    e = Evaluation("nli", "adapter", base, tuned, "accuracy", baselines=made)
    assert decide(e.difference).says == "better" and e.difference.p < .001   # over the base alone
    best = e.baselines.best
    made = decide(e.difference, over_trivial=e.baselines.over_best(tuned), over=best.name)
    assert made.says == "cannot tell" and made.exit_code == 3 and "always the same answer" in str(made)
    assert json.loads(json.dumps(made.to_dict()))["over_trivial"]["gain"] == pytest.approx(1 / 30)
    for shown in (str(e), e._repr_html_()):
        assert "always the same answer" in shown and "53.3%" in shown and "entailment" in shown
        assert "58 of 60 answers are" in shown and "not better than always the same answer" in shown
    assert [f.check for f in e.findings] == ["one_answer", "trivial"]
    saved = e.to_dict()
    assert saved["baselines"]["trivial"][0]["figures"]["accuracy"] == pytest.approx(32 / 60)
    assert [f["check"] for f in saved["findings"]] == ["one_answer", "trivial"]
    both = Comparison(replace(e, tuned=base), e, e.difference)
    assert both.headline == "cannot tell which is better" and both.to_dict()["says"] == "cannot tell"


def test_one_word_is_no_better_if_another_is_the_most_common_in_training(tokenizer):
    "Labels are even in training, by one row, and held-out rows have more of the other"
    questions = nli_questions(tokenizer, "classify")
    talks = [[dict(role="user", content="?"), dict(role="assistant", content=label)] for label in LABELS[12:]]
    made = trivial_answers(replace(questions, training=[(dict(messages=talk), talk) for talk in talks]))
    assert [t.text for t in made if t.kind == "same answer"] == ["entailment"]
    assert not Baselines("accuracy", made).over_best(answered("tuned", questions, ["entailment"] * 60)).gain


def test_a_model_that_knows_the_labels_is_better(tokenizer):
    questions = nli_questions(tokenizer, "classify")
    base, tuned = (answered(name, questions, texts) for name, texts in (("base", ["?"] * 60), ("tuned", LABELS)))
    made = Baselines("accuracy", trivial_answers(questions))
    assert find_trivial(tuned, made) == []
    d = Evaluation("nli", "adapter", base, tuned, baselines=made).difference
    assert decide(d, over_trivial=made.over_best(tuned), over=made.best.name).exit_code == 0
    worse = answered("tuned", questions, ["neutral"] * 20 + ["entailment"] * 40)   # 20 right of 60
    said = decide(Evaluation("nli", "adapter", base, worse).difference, over_trivial=made.over_best(worse), over="it")
    assert said.says == "not enough" and said.reason.startswith("worse than it: ") and said.exit_code == 1


def test_varied_targets_need_no_line_about_trivial_answers(tokenizer):
    rows = {f"row {k}": dict(prompt=f"Say {k} in words", completion=f"word {k} of many") for k in range(30)}
    cfg = load_config("demo", task="chat", eval_samples=30, metric_for_best_model="f1")
    questions = make_questions(cfg, tokenizer, rows)
    tuned = answered("tuned", questions, [row["completion"] for row in rows.values()])
    made = Baselines("accuracy", trivial_answers(replace(questions, figure="accuracy")))
    assert made.notes(tuned) == [] and len(as_json(made)["trivial"]) == 3
    assert Baselines("f1", trivial_answers(questions)).best.kind == "same answer"   # three words of four


def test_corpus_figures_know_a_copy_of_the_prompt(tokenizer):
    "BLEU of a copy: a task that translates a language into itself is solved by it"
    texts = [f"The {a} dog of house {k} is {b}" for k, (a, b) in enumerate([("old", "here"), ("big", "gone")] * 5)]
    rows = {f"row {k}": dict(source=text, target=text) for k, text in enumerate(texts)}
    questions = make_questions(load_config("demo", task="translate", eval_samples=10), tokenizer, rows)
    made = Baselines(questions.by, trivial_answers(questions))
    assert questions.by == "bleu" and made.best.kind == "copy of the prompt" and made.best.figures["bleu"] > 30
    tuned = answered("tuned", questions, texts)
    assert "a copy of the prompt: bleu" in made.notes(tuned)[0]


def test_a_task_that_raises_or_is_slow_has_no_trivial_answers(tokenizer, monkeypatch):
    questions = nli_questions(tokenizer, "classify")
    class Picky:
        name, fields = "picky", ()
        def score(self, text, row): raise ValueError(text)
    picky = replace(questions)
    picky.__dict__["task"] = Picky()
    assert trivial_answers(picky) == []
    called = []
    judged = replace(questions, metrics=dict(judge=lambda answer, row: called.append(answer) or 1.), figure="judge")
    assert trivial_answers(judged) and len(called) > 60
    called.clear()
    monkeypatch.setattr("sft_nb.evaluation.trivial._SECONDS", -1)
    assert trivial_answers(questions) == trivial_answers(judged) == [] and called == [""]   # a judge is asked once


@pytest.fixture
def says(monkeypatch):
    "What models answer instead of what they would: name -> text of a row"
    texts = {}
    def score(self, name, weights, load, questions=None, *, cfg=None):
        questions = questions or self.questions
        answer = next(f for start, f in texts.items() if name.startswith(start))
        generations = [Generation(answer(talk), 3, True) for talk in questions.chats]
        loss = dict(loss=9. if name == "base" else .23, supervised=3)
        losses = [loss] * len(generations) if questions.examples else None
        return score_generations(name, questions, generations, losses)
    monkeypatch.setattr(Evaluator, "score", score)
    return texts


def test_the_claim_from_end_to_end(trained, tmp_path, says, capsys):
    "Evaluation, sweep, verdict, panel and report alike: a model that always says one word is not better"
    rows = tmp_path/"rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in nli_rows()))
    says |= {"base, ": lambda talk: "neutral", "base": lambda talk: "The premise says so.",
             "tuned": lambda talk: "entailment", "checkpoint": lambda talk: "entailment"}
    files = dict(eval_file=str(rows), eval_samples=60, task="classify", progress=False)
    e = evaluate(trained, **files)
    assert Evaluation.load(next(trained.path.glob("eval/adapter-rows-classify.json"))) == e
    assert "always the same answer: 53.3%" in str(e)
    made = verdict(trained, checkpoint="adapter", general=False, **files)
    assert made.says != "better" and made.exit_code != 0
    swept = sweep(trained, general=False, **files)
    assert "always the same answer" in str(swept) and swept.over_trivial.gain == 0
    assert Sweep.load(swept.save(tmp_path/"sweep.json")).baselines == swept.baselines
    assert compare(trained, trained, **files).headline != "B is better"
    (trained.path/"eval/sweep.json").write_text((tmp_path/"sweep.json").read_text())
    try:
        state = EvalState(trained)
        assert "→ other" in state.summary_html() and "always the same answer" in str(state.scores_chart())
    finally: (trained.path/"eval/sweep.json").unlink()


def test_the_base_is_asked_again_with_examples_and_both_gains_are_shown(trained, tmp_path, says, monkeypatch):
    "Only a base that lacks the form, only for a model that is better, and at most 100 rows"
    rows = tmp_path/"rows.jsonl"
    labels = LABELS * 3
    of_sources = [dict(row, source="ab"[k % 2]) for k, row in enumerate(nli_rows(labels))]
    rows.write_text("".join(json.dumps(row) + "\n" for row in of_sources))
    talks = [[dict(role="user", content=f"Premise {k}"), dict(role="assistant", content=label)]
             for k, label in enumerate(LABELS)]
    training = [(dict(messages=talk), talk) for talk in talks]
    for module in ("evaluation.evaluate", "extras.few_shot"):
        monkeypatch.setattr(f"sft_nb.{module}.training_rows", lambda target: training)
    says |= {"base, ": lambda talk: "entailment", "base": lambda talk: "The premise says so.",
             "tuned": lambda talk: talk[-1]["content"]}
    files = dict(eval_file=str(rows), eval_samples=180, task="classify", progress=False)
    e = evaluate(trained, **files)
    assert (e.baselines.shots, e.baselines.few_shot.n) == (3, 100)
    assert sum(group.n for group in e.baselines.few_shot.groups.values()) == 100
    line = next(line for line in str(e).splitlines() if "base with 3 examples in its prompt" in line)
    assert "over it +" in line and "100 rows" in line
    assert evaluate(trained, shots=0, **files).baselines.few_shot is None
    says |= {"base": lambda talk: "neutral"}   # in the expected form
    assert evaluate(trained, **files).baselines.few_shot is None
    says |= {"base": lambda talk: "?", "tuned": lambda talk: "?"}   # no better
    assert evaluate(trained, **files).baselines.few_shot is None


def test_a_loss_is_compared_with_the_shares_of_the_labels(trained, tmp_path, says):
    "0.23 nats a token are 0.69 an answer: the entropy of the labels"
    rows = tmp_path/"rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in nli_rows()))
    says |= {"base": lambda talk: "?", "tuned": lambda talk: "entailment"}
    files = dict(eval_file=str(rows), eval_samples=60, task="chat", by="loss", shots=0, progress=False)
    e = evaluate(trained, **files)
    assert e.by == "loss" and e.baselines.best.kind == "label shares"
    said = "loss per answer 0.69 nats; of a guess by the label shares 0.691: it knows the format, not the label"
    assert said in str(e)
    assert "always the same answer: exact match 53.3%" in str(e)
    assert verdict(trained, checkpoint="adapter", general=False, **files).says != "better"


def test_labels_are_found_through_case_blanks_and_a_full_stop():
    task = task_of(load_config("demo", task="classify"))
    rows = [dict(question="a", answer="Spam"), dict(question="b", answer="spam."), dict(question="c", answer="ham")] * 4
    known = task.with_rows(rows)
    scores = [known.score(text, row) for text, row in zip(["SPAM", " spam", "**ham**.", "It is spam"] * 3, rows)]
    found = measure_answers(known, ["x"] * 12, scores, rows)
    assert {s.expected for s in scores} == {"Spam", "ham"} and found["other_answers"] == .25
    assert found["majority"] == pytest.approx(2 / 3)


def test_a_target_that_one_row_has_is_no_constant_answer_for_that_row(tokenizer):
    "Eight different targets, each unlike the others: the constant must not score with the row that it is from"
    words = "sun moon sea wind tree road cloud stone".split()
    rows = {f"row of {word}": dict(source=f"{word} in the north", target=" ".join([word] * 6)) for word in words}
    cfg = load_config("demo", task="translate", eval_samples=8)
    questions = make_questions(cfg, tokenizer, rows)
    same = next(t for t in trivial_answers(questions) if t.kind == "same answer")
    assert same.figures["accuracy"] == 0 and same.figures["bleu"] < 1
    base = answered("base", questions, ["no"] * 8)
    tuned = answered("tuned", questions, [row["target"] for row in rows.values()])
    e = Evaluation("t", "adapter", base, tuned, questions.by, baselines=Baselines("bleu", trivial_answers(questions)))
    assert not find_trivial(tuned, e.baselines) and decide(e.difference).says == "better"


def test_thoughts_that_never_end_are_named_and_not_called_one_answer(tokenizer):
    questions = nli_questions(tokenizer, "classify")
    tuned = answered("tuned", questions, ["<think> I wonder"] * 60)
    assert [f.check for f in find_trivial(tuned, None)] == ["endless_thoughts"]
    assert "60 of 60 answers are a thought that never ends" in str(find_trivial(tuned, None)[0])
    assert "max_new_tokens" in str(find_trivial(tuned, None)[0])


def test_a_long_constant_answer_is_shown_with_its_end(tokenizer):
    rows = {f"row {k}": dict(premise=f"A {k}", hypothesis="B", label=k % 2) for k in range(12)}
    questions = make_questions(load_config("demo", task="nli", eval_samples=12), tokenizer, rows)
    same = next(t for t in trivial_answers(questions) if t.kind == "same answer")
    assert '"predicted_label": ' in same.text and same.text[-4:] in same.about


def test_the_best_constant_answer_is_named_beside_the_shares_only_if_it_is_ever_right(trained, tmp_path, says):
    rows = tmp_path/"rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in nli_rows()))
    says |= {"base": lambda talk: "?", "tuned": lambda talk: "entailment"}
    e = evaluate(trained, eval_file=str(rows), eval_samples=60, task="chat", by="loss", shots=0, progress=False)
    made = e.baselines
    assert any(line.startswith("always the same answer: exact match 53.3%") for line in made.notes(e.tuned))
    never = [replace(t, figures=t.figures | dict(accuracy=0.)) if t.kind == "same answer" else t for t in made.trivial]
    none = [t for t in made.trivial if t.kind != "same answer"]
    for trivial in (never, none):
        lines = replace(made, trivial=type(made.trivial)(trivial)).notes(e.tuned)
        assert not any("exact match" in line for line in lines) and any("loss per answer" in line for line in lines)


def test_one_right_answer_for_all_rows_tells_nothing(tokenizer):
    "Rows of questions and answers under task tools: no row wants a call, and every text without one is right"
    rows = {f"row {k}": dict(question=f"What is {k}?", answer=f"{k}.") for k in range(6)}
    questions = make_questions(load_config("demo", task="tools"), tokenizer, rows)
    scores = answered("base", questions, ["Grass is green."] * 6)
    found = {f.check: f.says for f in find_trivial(scores, None)}
    assert scores.accuracy == 1 and "'no call' in all 6 rows" in found["one_target"]
    others = make_questions(load_config("demo", task="chat"), tokenizer, rows)
    assert "one_target" not in {f.check for f in find_trivial(answered("base", others, ["x"] * 6), None)}
