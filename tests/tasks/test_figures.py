"""Figures equal those of rouge-score, sacrebleu and scikit-learn."""
import json
import random

import pytest
from conftest import shared

from sft_nb.tasks.core import get_task, Score
from sft_nb.tasks.metrics import headline_figure, measure_answers
from sft_nb.extras.tasks.nli import class_figures
from sft_nb.extras.tasks.summarize import format_document, rouge, TASK as SUMMARIZE
from sft_nb.extras.tasks.translate import corpus_figures, sentence_figures
from sft_nb.tokens.conversations import conversation

WORDS = ("the network memory program reads writes files, a user's data is fast; slow – cars run running 12 3.5 "
         "الشبكة سريعة")


def sentences(n:int, seed:int=0)->list[str]:
    r = random.Random(seed)
    return [" ".join(r.choices(WORDS.split(), k=r.randint(0, 14))) for _ in range(n)]


def noisy(texts:list[str])->list[str]:
    "The same with a few words gone or moved"
    r = random.Random(1)
    return [" ".join(w for w in t.split() if r.random() < .8) for t in texts]


def test_rouge_is_rouge_scores():
    from rouge_score.rouge_scorer import RougeScorer
    direct = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    expected = [t for t in sentences(60) if t]
    for a, b in zip(noisy(expected), expected):
        if 2 * sum(w.isascii() for w in b.split()) < len(b.split()): continue   # mostly of another script
        assert rouge(a, b) == {k: v.fmeasure for k, v in direct.score(b, a).items()}


def test_a_summary_in_another_script_is_not_worth_nothing():
    for text in ("الشبكة سريعة جدا", "сеть очень быстрая", "网络很快"): assert rouge(text, text)["rougeL"] == 1
    assert 0 < rouge("网络很慢", "网络很快")["rouge1"] < 1


def test_bleu_and_chrf_are_sacrebleus():
    import sacrebleu
    expected = [t or "one" for t in sentences(50, 2)]
    texts = noisy(expected)
    for some in ([*range(50)], random.Random(3).choices(range(50), k=50), [0]):
        got, want = [texts[k] for k in some], [expected[k] for k in some]
        found = corpus_figures(got, want)
        assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(got, [want]).score, abs=1e-9)
        assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(got, [want]).score, abs=1e-9)
    one = sentence_figures(texts[0], expected[0])
    assert one["sentence_bleu"] == sacrebleu.sentence_bleu(texts[0], [expected[0]]).score
    assert one["sentence_chrf"] == sacrebleu.sentence_chrf(texts[0], [expected[0]]).score


@pytest.mark.parametrize("classes", [("0", "1"), ("0", "1", "2")])
def test_classes_are_scikit_learns(classes):
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
    r = random.Random(4)
    truth = r.choices(classes, k=80)
    said = [r.choices([t, *classes, None, "7"], (6, *[1] * len(classes), 2, 1))[0] for t in truth]
    found = class_figures([Score(a == b, b, a) for a, b in zip(truth, said)])
    given = [s or "none" for s in said]
    for average, names in (("macro", [""]), (None, [f"_{c}" for c in classes])):
        sums = precision_recall_fscore_support(truth, given, labels=list(classes), average=average, zero_division=0)
        for figure, x in zip(("precision", "recall", "f1"), sums):
            want = [x] if average else list(x)
            assert [found[figure + n] for n in names] == pytest.approx(want)
    columns = [*classes, "7", "none"]
    table = confusion_matrix(truth, given, labels=columns)
    assert [[found[f"confusion_{a}_{b}"] for b in columns] for a in classes] == table[:len(classes)].tolist()


def test_an_unreadable_answer_is_no_label():
    nli = get_task("nli")
    rows = nli.rows("eval", n=40)
    texts = ["I think so." for _ in rows]
    found = measure_answers(nli, texts, [nli.score(t, r) for t, r in zip(texts, rows)], rows)
    assert found["accuracy"] == found["f1"] == found["answered"] == found["valid_json"] == 0 and found["unparsed"] == 1
    assert found["confusion_0_1"] == found["confusion_1_0"] == 0
    assert found["confusion_0_none"] + found["confusion_1_none"] == 40


def test_accuracy_by_the_length_of_the_thought():
    nli, row = get_task("nli"), dict(premise="A", hypothesis="B", label=1)
    def answer(words, label): return json.dumps(dict(thought_process="word " * words, predicted_label=label))
    texts = [answer(0, 1), answer(100, 0), answer(101, 1), answer(300, 1), answer(301, 0), "none"]
    found = measure_answers(nli, texts, [nli.score(t, row) for t in texts], [row] * 6)
    assert {k: v for k, v in found.items() if k.startswith("accuracy_")} == dict(
        accuracy_0_100=.5, accuracy_101_200=1., accuracy_201_300=1., accuracy_301_more=0.)
    assert [found[f"answers_{k}"] for k in ("0_100", "101_200", "201_300", "301_more")] == [2, 1, 1, 1]


@pytest.mark.parametrize("name", ["arithmetic", "units", "units_rft", "nli"])
def test_generated_rows_are_right_by_their_own_answer_and_held_out(name):
    task = get_task(name)
    train, held = task.rows("train", n=300), task.rows("eval", n=60)
    for row in [*train, *held]: assert task.score(task.messages(row)[-1]["content"], row).correct, row
    prompts = [{task.messages(r)[0]["content"] for r in rows} for rows in (train, held)]
    assert not prompts[0] & prompts[1] and held == task.rows("eval", n=60, seed=7)
    assert task.rows("train", n=5, seed=1) != task.rows("train", n=5, seed=2)
    assert headline_figure(task) == "accuracy"


def test_corpora_are_resampled_fast():
    import time
    expected = [t or "one" for t in sentences(300, 5)]
    texts = noisy(expected)
    corpus_figures(texts, expected)
    began = time.process_time()
    for _ in range(20): corpus_figures(texts, expected)
    assert time.process_time() - began < 2   # 1000 in 100 s at the very most; 1 to 2 s here


def rows_of(path:str, n:int|None=None)->list[dict]:
    file = shared(f"data/{path}")
    text = file.read_text()
    rows = [json.loads(line) for line in text.splitlines()[:n]] if file.suffix == ".jsonl" else json.loads(text)
    return rows[:n] if isinstance(rows, list) else list(rows.values())[:n]


@pytest.mark.parametrize("name,path,n", [
    ("units", "unit_conversion_deepmind/test.jsonl", 844), ("nli", "mistral_nli_sample/sample_ft.jsonl", 100),
    ("chat", "fastchat_chat/dummy_conversation.json", 50)])
def test_real_rows_are_right_by_their_own_answer(name, path, n):
    task = get_task(name)
    for row in rows_of(path, n):
        for part in getattr(task, "expand", lambda r: [r])(row):
            assert task.score(conversation(task, part, "row")[-1]["content"], part).correct, part


def test_a_real_prompt_of_nli_has_the_tasks_words_and_no_special_token():
    nli = get_task("nli")
    for row in rows_of("mistral_nli_sample/sample_ft.jsonl"):
        user, answer = nli.expand(row)[0]["messages"]
        asked = user["content"].removeprefix("Premise: ").split("\n\nUse chain")[0]
        premise, hypothesis = asked.split("\nHypothesis: ")
        made = nli.messages(dict(premise=premise, hypothesis=hypothesis, label=0))[0]
        assert made == user and "<s>" not in user["content"] + answer["content"]


def test_real_calls_are_worth_their_own_answer_in_every_form():
    tools = get_task("tools")
    wanted = 0
    for row in rows_of("glaive_toolcall/glaive_toolcall_en_demo.json"):
        last = tools.messages(row)[-1]
        calls = [c["function"] for c in last.get("tool_calls", [])]
        wanted += bool(calls)
        text = "\n".join(f"<tool_call>{json.dumps(c)}</tool_call>" for c in calls) or last["content"]
        assert tools.score(text, row).correct, row
        llama = "".join(json.dumps(dict(name=c["name"], parameters=c["arguments"])) for c in calls)
        assert tools.score(llama, row).correct
        if calls: assert tools.score("Sorry.", row).figures == dict(exact=0., name=0., arguments=0.)
    assert wanted == 153


@pytest.mark.parametrize("document, text", [
    (dict(name="Terms", pages=3), "name: Terms\n\npages: 3"),   # somebody's name, but no words of theirs
    (dict(title="Terms", notes=[], text=" Be kind. "), "title: Terms\n\nBe kind."),
    (dict(speaker="Ada", text=" Hello. "), "Ada: Hello."),
    ([dict(speaker="Ada", text="Hello."), dict(name="Ben", pages=1)], "Ada: Hello.\n\n---\n\nname: Ben\n\npages: 1")])
def test_a_record_is_a_turn_only_if_somebody_says_something(document, text): assert format_document(document) == text


def test_a_record_with_a_title_is_no_turn():
    turn = dict(speaker="Ada", text="We buy apples.", emotion="happy", start="00:12", utterance_id="u one two")
    assert format_document(turn) == "Ada: We buy apples."
    record = dict(name="Ada Ray", title="A bridge for Oslo", text="It opens today.", date="2 May 2024")
    assert format_document(record) == ("name: Ada Ray\n\ntitle: A bridge for Oslo\n\nIt opens today.\n\n"
                                       "date: 2 May 2024")


def test_each_query_of_a_meeting_is_asked_and_what_was_thought_is_not_scored():
    turns = [dict(speaker="Ada", content="We buy apples.")]
    queries = [dict(query="What is bought?", answer="<think>Fruit.</think>Apples."), dict(answer="Ada buys apples.")]
    rows = SUMMARIZE.expand(dict(meeting_transcripts=turns, general_query_list=queries))
    assert [SUMMARIZE.messages(row)[0]["content"] for row in rows] == [
        f"{query}\n\nAda: We buy apples." for query in ("What is bought?", "Summarize the following text.")]
    score = SUMMARIZE.score("<think>Pears, or apples?</think>\n\nApples.", rows[0])
    assert score.correct and score.figures["rougeL"] == 1 and score.expected == "Apples."
    assert not SUMMARIZE.score("Pears.", rows[0]).correct
    assert SUMMARIZE.expand(plain := dict(document="We buy apples.", summary="Apples.")) == [plain]
