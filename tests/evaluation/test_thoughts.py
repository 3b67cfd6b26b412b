"""A thought is not scored as the answer: every task, every form of thought, every way to a score."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate, Evaluation, scored_with_thoughts
from sft_nb.evaluation.generations import answer_rows, generation_keys, make_questions, score_generations, Scores
from sft_nb.extras.openai_client import as_generation, ServerReply
from sft_nb.model.generation import Decoder, Generation
from sft_nb.model.load import load_base
from sft_nb.tasks.core import get_task, Score, task, task_names
from sft_nb.tasks.metrics import score_answer
from sft_nb.rows.thoughts import BLOCKS, decode_answer, opens_thought, split_thought, without_thoughts
from sft_nb.tokens.tokenizer import load_tokenizer

HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
THINKS = "<think>\n{}\n</think>\n\n{}"
CALL = dict(name="add", arguments=dict(a=1))
ROWS = dict(   # task -> a row, its target, and a draft that is wrong
    arithmetic=(dict(question="6*7?", answer="6 * 7 = 42\n#### 42"), "6 * 7 = 42\n#### 42", "It is 40. #### 40"),
    gsm8k=(dict(question="6*7?", answer="6*7 = <<6*7=42>>42\n#### 42"), "#### 42", "The answer is 40. #### 40"),
    units=(dict(question="m?", answer="42"), "<answer>42</answer>", "<answer>40</answer>?"),
    units_rft=(dict(question="m?", answer="42", reasoning="6 * 7"), "6 * 7 <answer>42</answer>", "<answer>40</answer>"),
    nli=(dict(premise="p", hypothesis="h", label=1), '{"thought_process": "", "predicted_label": 1}',
         '{"thought_process": "", "predicted_label": 0}'),
    summarize=(dict(document="A long text.", summary="Short."), "Short.", "Perhaps: Long."),
    translate=(dict(source="It is raining again today.", target="Es regnet heute schon wieder."),
               "Es regnet heute schon wieder.", "Heute regnet es."),
    tools=(dict(messages=[dict(role="user", content="1+?"), dict(role="assistant", content="", tool_calls=[CALL])]),
           json.dumps(CALL), json.dumps(CALL | dict(arguments=dict(a=2)))),
    chat=(dict(question="Hello?", answer="Hello, I am here."), "Hello, I am here.", "Bye."),
    classify=(dict(question="Does it follow?", answer="entailment"), "entailment", "contradiction"),
    multiple_choice=(dict(question="6*7?", choices=["40", "42"], answer="B"), "B. 42", "The answer is A."),
    text=(dict(text="Hello?### Hello, I am here."), "Hello, I am here.", "Bye."))


def task_for_rows(name):
    found = get_task(name)
    if name == "text": found = found.with_settings(SimpleNamespace(response_template="### "))
    return found


def test_every_shipped_task_is_here(): assert {*ROWS} == {*task_names()}


@pytest.mark.parametrize("name", ROWS)
def test_a_draft_inside_a_thought_changes_no_score(name):
    row, target, draft = ROWS[name]
    found = task_for_rows(name)
    plain = found.score(target, row)
    assert plain.correct
    for text in (THINKS.format(draft, target), THINKS.format("", target), HARMONY.format(draft, target),
                 f"[THINK]{draft}[/THINK]{target}", f"<seed:think>{draft}</seed:think>{target}",
                 f"analysis{draft}assistantfinal{target}", f"{draft}\n</think>\n\n{target}"):
        assert found.score(text, row) == score_answer(found, split_thought(text), row) == plain, text
    for text in (f"<think>\n{target}", f"<|channel|>analysis<|message|>{target}", f"[THINK]{target}"):
        score = score_answer(found, split_thought(text), row)
        assert not score.correct and score.got is None, text
    score = score_answer(found, split_thought(target, opened=True), row)   # the prompt opened it, and it never closes
    assert not score.correct and score.got is None


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("nli", "tools")])
def test_the_thought_of_a_row_is_not_compared(name):
    row, target, draft = ROWS[name]
    key = [*row][-1] if name not in ("units_rft",) else "answer"
    value = row[key]
    inside = THINKS.format(draft, value) if name != "text" else value.replace("### ", f"### {THINKS.format(draft, '')}")
    found = task_for_rows(name)
    assert found.score(target, row | {key: inside}).correct


def test_tasks_and_metrics_of_ones_own_see_the_answer_alone():
    seen = []

    @task("question", "answer")
    def mine(text, row):
        seen.append((text, row["answer"]))
        return text == row["answer"]

    row = dict(question="6*7?", answer=THINKS.format("Hm.", "42"))
    assert mine.score(THINKS.format("40?", "42"), row).correct

    class Own:
        name, fields = "own", ("question", "answer")
        def score(self, text, row): return Score(text == row["answer"], text, row["answer"], credit=1.)
    assert score_answer(Own(), split_thought(THINKS.format("40?", "42")), row).correct
    assert score_answer(Own(), split_thought("<think>42"), row).credit == 0.

    cfg, tokenizer = load_config(task="gsm8k"), load_tokenizer("tiny")
    questions = make_questions(cfg, tokenizer, {"row 1": row})
    questions = replace(questions, metrics=dict(same=lambda answer, row: answer == row["answer"]))
    scores = score_generations("tuned", questions, [Generation(THINKS.format("40?", "42"), 9, True)])
    assert scores.figures["same"] == 1 and seen == [("42", "42")]


def test_what_is_reported_and_what_is_kept():
    rows = {f"row {k}": dict(question="6*7?", answer="42") for k in range(4)}
    questions = make_questions(load_config(task="gsm8k"), load_tokenizer("tiny"), rows)
    texts = [THINKS.format("40? No.", "42"), THINKS.format("", "42"), "<think>42", "42"]
    scores = score_generations("tuned", questions, [Generation(text, 9, True) for text in texts])
    assert [a.text for a in scores.answers] == texts
    assert [a.thought for a in scores.answers] == [7, 0, 2, None] and scores.accuracy == .75 and scores.answered == .75
    assert scores.thoughts == ("2 of 4 think first (median 7 characters), 1 of 4 begin with an empty thought, "
                               "1 thought never ends: unanswered")
    assert Scores.from_dict(json.loads(json.dumps(scores.to_dict()))) == scores
    assert score_generations("base", questions, [Generation("42", 2, True)] * 4).thoughts == ""


@pytest.mark.parametrize("opening", BLOCKS)
def test_forms_of_blocks(opening):
    closing = BLOCKS[opening]
    assert split_thought(f"{opening}\nhm\n{closing}\n\n42") == ("42", "hm", True)
    assert split_thought(f"hm\n{closing}\n\n42", opened=True) == ("42", "hm", True)
    assert split_thought(f"{opening}\nhm 42") == ("", "hm 42", False)
    assert split_thought(f"{opening}a{closing}{opening}b{closing} 42") == ("42", "a\nb", True)
    assert opens_thought(f"<|im_start|>assistant\n{opening}\n") and not opens_thought(f"{opening}{closing}\n")


@pytest.mark.parametrize("text", [
    "Write `<think>` before and `</think>` after it.", "The tags <think> and </think> enclose the reasoning.",
    "The tag </think> closes it.", "It answers \"</think>\" at once.", "a <b and c> d", "analysis of the assistant",
    "It uses <think>…</think>. The answer is 42.", "First <think>, and then </think>, and the answer 42.",
    "```html\n<think>\n```\nis a tag.", "```\nhm </think>\nx\n```\nis cut"])
def test_a_text_that_mentions_tags_is_whole(text): assert split_thought(text) == (text, None, True)


@pytest.mark.parametrize("text, opened, answer, thought", [
    ("<think>hm</think>42</think>", False, "42", "hm"), ("42</think>\n", False, "42", None),
    ("</think>42", False, "42", ""), ("42\n<think>why</think>", False, "42", "why"),
    ("a</think>\n<think>\n\n</think>\n42", True, "42", "a"), ("Sure. <think>40</think> 42", False, "42", "40"),
    ("<Thinking>40</Thinking>42", False, "42", "40"),
    ("<think>`</think>` ends it</think>42", False, "42", "`</think>` ends it"),
    ("40 </think> 42", False, "42", "40"), ("the tag </think> ends</think>42", True, "42", "the tag \n ends"),
    ("<think>a <think>b</think> c</think>\n42", False, "42", "a <think>b\n c"),
    ("Here is my thought process: 40. Here is my response: 42", False, "42", "40."),
    ("assistantanalysis40assistantfinal42", False, "42", "40"),
    ("<|START_THINKING|>40<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>", False, "42", "40")])
def test_odd_blocks(text, opened, answer, thought):
    assert split_thought(text, opened=opened) == (answer, thought, True)


def test_channels():
    assert split_thought(HARMONY.format("a", "42") + "<|return|>") == ("42", "a", True)
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
    assert split_thought(preamble + "<|start|>assistant<|channel|>final<|message|>42").answer.endswith("42")
    call = ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}')
    row = ROWS["tools"][0]
    assert get_task("tools").score(call, row).correct
    assert split_thought("hm<|end|><|start|>assistant<|channel|>final<|message|>42", opened=True) == ("42", "hm", True)
    assert split_thought("<|channel|>final<|message|>42") == ("42", None, True)


@pytest.mark.parametrize("text", ["[THINK]40 [/THINK]42", HARMONY.format("40", "42"), "<seed:think>40</seed:think>2"])
def test_special_tokens_that_delimit_a_thought_survive_decoding(text):
    tokenizer = load_tokenizer("tiny")
    special = "[THINK] [/THINK] <seed:think> </seed:think> <|channel|> <|message|> <|start|> <|end|>".split()
    tokenizer.add_special_tokens(dict(extra_special_tokens=special))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert decode_answer(ids, tokenizer) == text and split_thought(text).thought.strip() == "40"
    ids = tokenizer("It is 42<|end|>", add_special_tokens=False)["input_ids"]
    assert decode_answer(ids, tokenizer) == "It is 42"   # the end of a turn, not of a thought


def test_reasoning_that_a_server_separates():
    reply = ServerReply("42", "stop", 3, "40? No.", None, None, 9)
    parts = split_thought(as_generation(reply, load_tokenizer("tiny")).text)
    assert parts == ("42", "40? No.", True)
    cut = reply._replace(text="", finish="length")
    assert not split_thought(as_generation(cut, load_tokenizer("tiny")).text).closed


def test_rows_of_other_kinds_stay_as_they_are():
    row = dict(question="<think>?", answer=3, messages=[dict(role="user", content=None)], tags=["a"])
    assert without_thoughts(row) == row


OPENS = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}")


def force(monkeypatch, tokenizer, text):
    "Every answer is `text`: the next token of each row is forced"
    script, read = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id], Decoder.read

    def forced(self, running):
        logits = read(self, running)
        for k, number in enumerate(running.rows): logits[k, script[len(self.written[number])]] = 1e4
        return logits
    monkeypatch.setattr(Decoder, "read", forced)


def test_rows_of_text_end_to_end(monkeypatch):
    cfg, tokenizer = load_config(task="text", response_template="### ", max_new_tokens=99), load_tokenizer("tiny")
    force(monkeypatch, tokenizer, THINKS.format("Bye.", "Hello, I am here."))
    scores = answer_rows(load_base(cfg, tokenizer), tokenizer, {"row 1": ROWS["text"][0]}, cfg, progress=False)
    assert scores.accuracy == 1 and scores.figures["f1"] == 1 and scores.answers[0].thought == 4


@pytest.mark.parametrize("form", [THINKS, HARMONY, "[THINK]{}[/THINK]{}", "opened"])
@pytest.mark.parametrize("name", [name for name in ROWS if name != "text"])
def test_a_model_that_repeats_its_targets_behind_a_thought_scores_100(name, form, tmp_path, monkeypatch):
    "Prompt, loop, decoding and scoring are those of any model"
    row, target, draft = ROWS[name]
    file, settings = tmp_path/"rows.jsonl", {}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    tokenizer = load_tokenizer("tiny")
    written = f"{draft}\n</think>\n\n{target}" if form == "opened" else form.format(draft, target)
    force(monkeypatch, tokenizer, written)
    if form == "opened":
        template = tmp_path/"opens.jinja"
        template.write_text(OPENS)
        settings = dict(chat_template=str(template))
    e = evaluate("tiny", task=name, eval_file=str(file), max_new_tokens=200, progress=False, **settings)
    headline = {"bleu": 100, "chrf": 100, "rougeL": 1}
    assert e.tuned.accuracy == 1 and e.tuned.answered == 1 and e.tuned.answers[0].text == written
    for figure, value in headline.items(): assert e.tuned.figures.get(figure, value) == pytest.approx(value)
    assert f"3 of 3 think first (median {len(draft)} characters)" in str(e)


# scores and answers of older versions, which dropped the special tokens of a thought

def test_answers_that_were_saved_without_the_tokens_of_a_thought_are_generated_again(tmp_path):
    tokenizer = load_tokenizer("tiny")
    before = generation_keys([[1]], ["w"], 8)
    assert generation_keys([[1]], ["w"], 8, tokenizer) == before   # as ever where no token marks a thought
    tokenizer.add_special_tokens(dict(additional_special_tokens=["[THINK]", "[/THINK]"]))
    assert generation_keys([[1]], ["w"], 8, tokenizer) != before
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<|start|>", "<|end|>"]))   # ends of turns
    assert generation_keys([[1]], ["w"], 8, tokenizer) == before


def older(scores):
    "As a version without thoughts wrote them"
    d = scores.to_dict()
    del d["thoughts"]
    return Scores.from_dict(json.loads(json.dumps(d)))


def test_scores_of_an_older_version_are_not_taken_for_those_of_answers(tmp_path):
    plain, thinks = (score_of(text) for text in ("42", "<think>40</think>42"))
    assert plain.splits_thoughts and thinks.splits_thoughts and Scores.from_dict(thinks.to_dict()).splits_thoughts
    tokenizer = load_tokenizer("tiny")
    assert not older(plain).scores_thoughts(tokenizer) and older(thinks).scores_thoughts(tokenizer)
    tokenizer.add_special_tokens(dict(additional_special_tokens=["[THINK]", "[/THINK]"]))
    assert older(plain).scores_thoughts(tokenizer) and not plain.scores_thoughts(tokenizer)
    run = SimpleNamespace(config=load_config(None))
    assert scored_with_thoughts(run, [older(thinks)]) and not scored_with_thoughts(run, [thinks, older(plain)])
    lost = SimpleNamespace(config=load_config(None, tokenizer=str(tmp_path/"nothing")))
    assert not scored_with_thoughts(lost, [older(plain)])


def score_of(text):
    cfg = load_config(None, task="units")
    rows = {"row 1": dict(question="m?", answer="42")}
    questions = make_questions(cfg, load_tokenizer(cfg), rows)
    return score_generations("tuned", questions, [Generation(text, 3, True)])


def test_an_evaluation_of_a_server_says_that_its_base_saw_no_examples():
    says = "a base that a server serves is not asked with examples"
    tuned = score_of("<answer>42</answer>")
    def notes(base, **how): return str(Evaluation("r", "adapter", score_of(base), tuned, **how))
    assert says in notes("I do not know.", server="http://localhost:1")
    assert says not in notes("<answer>42</answer>", server="http://localhost:1") + notes("I do not know.")


def test_tokens_that_a_server_does_not_count_are_those_of_the_text_alone():
    def words(text, add_special_tokens=True): return dict(input_ids=[0] * (len(text.split()) + 2 * add_special_tokens))
    assert as_generation(ServerReply("40 and 2", "stop", None, "", None, None), words).n_tokens == 3
