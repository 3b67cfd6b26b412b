"Defects of rows that train without an error: each is reported where it is planted, and not in clean rows"
import json
import random
import re
import subprocess
from dataclasses import replace

import pytest

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.tasks.core import get_task
from sft_nb.tokens.prepare import prepare

WORDS = ("the a of river light system quickly moves under many stones with careful hands when it rains often people "
         "walk toward green").split()


def sentence(n:int, seed)->str: return " ".join(random.Random(f"{n} {seed}").choices(WORDS, k=n))
def question(k:int)->str: return f"Question {k}: {sentence(6, k)}?"
def rows(answer, n:int=60)->list[dict]: return [dict(question=question(k), answer=answer(k)) for k in range(n)]
def clean(k:int)->str: return sentence(5 + k % 25, k).capitalize() + "."


def findings(train, tokenizer, held_out=None, task="chat", **settings)->dict[str,str]:
    data = prepare(load_config(task=task, **settings), tokenizer, train=train, eval=held_out)
    return {f.check: f.says for f in data.report.findings if f.status in ("warn", "fail")}


CARD, KEY = "4111 1111 1111 1111", "AKIA" + "IOSFODNN7QW3RT5Y"


@pytest.mark.parametrize("check, answer, expected", [
    ("train_alike", lambda k: "yes", "60 of 60 answers looked at are 'yes'"),
    ("train_mojibake", lambda k: clean(k) + (" cafÃ© itâ€™s" if k % 5 == 0 else ""), "12 of 60 rows"),
    ("train_mojibake", lambda k: clean(k) + " \ufffd", "the first is train rows row 1"),
    ("train_key", lambda k: clean(k) + (f" {KEY}" if k == 7 else ""), "the first is train rows row 8"),
    ("train_card", lambda k: clean(k) + (f" {CARD} is mine" if k == 7 else ""), "the first is train rows row 8"),
    ("train_leading_blank", lambda k: " " + clean(k), "60 of 60"),
    ("train_trailing_blank", lambda k: clean(k) + "\n", "60 of 60"),
    ("train_cut_answers", lambda k: sentence(10 + k, k)[:200], "after exactly 200 characters"),
    ("train_cut_answers", lambda k: " ".join(sentence(10 + k, k).split()[:40]), "after exactly 40 words")])
def test_a_flaw_of_the_answers_is_reported(check, answer, expected, tokenizer):
    found = findings(rows(answer), tokenizer)
    assert [*found] == [check] and expected in found[check]


def test_clean_answers_are_not_flagged(tokenizer):
    assert findings(rows(clean), tokenizer) == {}
    assert findings(rows(lambda k: ("yes", "no")[k % 2]), tokenizer) == {}   # labels


@pytest.mark.parametrize("roles, expected", [("uua", True), ("uaua", False), ("uaa", True), ("suauua", True),
                                             ("sua", False), ("ucta", False), ("ucca", False)])
def test_two_messages_of_one_role_in_a_row_are_told(roles, expected, tokenizer):
    def message(role, k):   # c: a call, t: its result
        if role == "c": return dict(role="assistant", tool_calls=[dict(function=dict(name="add", arguments=dict(a=k)))])
        return dict(role=dict(s="system", u="user", a="assistant", t="tool")[role], content=sentence(8 + k, k))
    train = [dict(messages=[message(role, k + i) for i, role in enumerate(roles)]) for k in range(9)]
    found = findings(train, tokenizer)
    assert ("train_same_role" in found) == expected
    assert not expected or found["train_same_role"].startswith("9 of 9 rows looked at have two messages")


def test_calls_without_text_are_not_equal_answers(tokenizer):
    def call(k): return dict(role="assistant", tool_calls=[dict(function=dict(name="add", arguments=dict(a=k)))])
    tools = [dict(name="add", parameters={})]
    train = [dict(messages=[dict(role="user", content=question(k)), call(k)], tools=tools) for k in range(60)]
    found = findings(train, tokenizer)
    assert [*found] == ["train_tools"] and found["train_tools"].startswith("the tools of 60 rows are written as JSON")
    some = findings([dict(row, tools=tools if k % 3 else None) for k, row in enumerate(train)], tokenizer)
    assert some["train_tools"].startswith("the tools of 40 rows and the calls of 20 rows are written as JSON text")


def test_answers_cut_at_a_number_of_tokens(tokenizer):
    def cut(k): return tokenizer.decode(tokenizer(sentence(10 + 3 * k, k))["input_ids"][1:61], skip_special_tokens=True)
    found = findings(rows(cut), tokenizer)
    assert "they were cut" in found["train_cut_answers"]
    def sums(k): return f"{sentence(40, 1)} so that the sum of both is {k + 100}"   # of one length, and whole
    assert "train_cut_answers" not in findings(rows(sums), tokenizer)


@pytest.mark.parametrize("labels, combined", [
    (["refund", "login", "refund, login", "login,refund"], 2), (["a;b", "b;c", "a"], 2), (["a", "b", "c"], 0),
    (["Oslo, Norway", "Lima, Peru", "Rome, Italy"], 0)])
def test_labels_that_list_others_are_told(labels, combined, tokenizer):
    found = findings(rows(lambda k: labels[k % len(labels)]), tokenizer, task="classify")
    assert ("train_combinations" in found) == bool(combined)
    if combined: assert found["train_combinations"].startswith(f"{combined} of {len(labels)} labels list others")


def test_rows_without_an_answer_are_counted_in_words(tokenizer):
    ends = [dict(messages=[dict(role="user", content=question(k))]) for k in range(3)]
    data = prepare(load_config(task="chat", on_bad_row="drop"), tokenizer, train=rows(clean) + ends)
    assert "without 3 rows with no answer" in " ".join(data.report.summary.split())


def test_texts_have_no_prompt_that_they_could_contradict(tokenizer):
    found = findings([dict(text=f"no {k}") for k in range(60)], tokenizer)
    assert not found.keys() & {"train_contradictions", "train_same_prompt"}


def test_one_prompt_with_contradictory_answers(tokenizer):
    capital = [dict(question="Capital of France?", answer=name) for name in ("Paris", "Lyon", "Paris")]
    found = findings(rows(clean) + capital, tokenizer)
    assert found["train_contradictions"].startswith("1 prompt has different short answers, as in train rows row 61, 62")
    several = [dict(question=question(k % 20), answer=clean(k)) for k in range(60)]   # solutions of one problem
    assert "train_contradictions" not in findings(several, tokenizer)


def test_spellings_of_a_label_are_no_contradiction(tokenizer):
    twice = [dict(question=f"Is {k} even?", answer=word) for k in range(3) for word in ("Yes", "yes", "Yes ")]
    assert "train_contradictions" not in findings([*rows(clean), *twice], tokenizer)
    found = findings([*rows(clean), *twice, dict(question="Is 1 even?", answer="No")], tokenizer)
    assert found["train_contradictions"].startswith("1 prompt has different short answers, as in train rows row 64, 70")
    assert found["train_contradictions"].endswith(": 'Yes' and 'No'")


@pytest.mark.parametrize("task", ["chat", "classify"])
def test_labels_that_are_written_in_several_ways(task, tokenizer):
    labels = ["Spam", "ham", "Spam", "spam", "Spam ", "ham", "Spam", "ham", "ham", "Spam"] * 6
    cfg = load_config(task=task, eval_samples=0)
    data = prepare(cfg, tokenizer, train=rows(lambda k: labels[k]))
    found, = [f for f in data.report.findings if f.check == "train_spellings"]
    assert found.status == "warn" and found.says.startswith(
        "2 of 4 labels differ from another only by case or blanks: 'Spam' (24 rows), 'spam' (6 rows), 'Spam ' (6 rows);"
        " each is learned as it is written")
    assert ("count as one in the score" in found.says) == (task == "classify")
    assert str(found.fix).startswith("write each label in one way: correct train rows row 4, 5, 14, 15, 24,")
    assert data.train.labels == dict(Spam=36, ham=24)   # as the score counts them
    target = get_task("classify").with_rows([dict(prompt="?", completion=label) for label in labels]).labels
    assert {*target.values()} == {*data.train.labels}
    ends = prepare(cfg, tokenizer, train=rows(lambda k: ("Yes.", "yes", "no")[k % 3])).report
    assert "only by case, blanks or punctuation: " in str(ends)
    plain = prepare(cfg, tokenizer, train=rows(lambda k: ("yes", "no")[k % 2])).report
    assert "train_spellings" not in {f.check for f in plain.findings}


def test_a_prompt_without_its_question(tokenizer):
    same = [dict(question="Answer the question.", answer=clean(k)) for k in range(60)]
    assert "60 of 60 examples have one prompt" in findings(same, tokenizer)["train_same_prompt"]


@pytest.mark.parametrize("n, share", [(60, .2), (1000, .1), (4000, .05)])
def test_the_share_to_hold_out_is_a_hundred_rows_and_at_most_a_fifth(n, share, tokenizer):
    data = prepare(load_config(task="chat"), tokenizer, train=[dict(question=f"{k}?", answer=str(k)) for k in range(n)])
    found, = [f for f in data.report.findings if f.check == "held_out"]
    assert found.fix.settings == dict(eval_fraction=share)
    data = prepare(load_config(task="chat", eval_samples=0), tokenizer, train=[dict(question="1?", answer="1")] * 60)
    found, = [f for f in data.report.findings if f.check == "held_out"]
    assert found.fix.settings == dict(eval_samples=200, eval_fraction=.2)   # one alone would hold out none


def test_prompts_that_are_too_long_can_be_cut_at_their_start(tokenizer):
    long = [dict(question=sentence(200, k), answer=f"{k}") for k in range(20)]
    def too_long(**how):
        data = prepare(load_config(task="chat", max_length=64, on_long="cut", **how), tokenizer,
                       train=[*rows(str), *long])
        return data.train.n_kept, {f.check: f.fix for f in data.report.findings if f.status == "warn"}
    kept, fixes = too_long()
    assert kept < 80 and fixes["train_too_long"].otherwise[-1].settings == dict(cut_side="start")
    kept, fixes = too_long(cut_side="start")
    assert kept == 80 and re.fullmatch(r"--max-length \d+", fixes["train_cut"].says("shell"))


def test_leaks_are_found_through_case_blanks_and_punctuation(tokenizer):
    train = [dict(question=f"What is {k}.5 plus 2 , and why?", answer=clean(k)) for k in range(20)]
    same = [dict(question=f"what  is {k}.5 plus 2, and WHY", answer=clean(k)) for k in range(3)]
    other = [dict(question=f"what is {k}5 plus 2, and WHY", answer=clean(k)) for k in range(3)]
    found = findings(train, tokenizer, [*same, *other])
    assert found["held_out"].startswith("3 held-out prompts are training prompts too, but for case")
    found = findings(train, tokenizer, [*same, train[9]])
    assert found["held_out"].startswith(
        "4 held-out prompts are training prompts too (eval rows row 4), 3 of them but for case, blanks and punctuation "
        "(eval rows row 1, 2, 3)")
    assert "held_out" not in findings(train, tokenizer, other)
    texts = [[dict(text=t) for t in side] for side in (["One river moves.", "Two stones."], ["one  river, moves"])]
    assert "too, but for case" in findings(texts[0], tokenizer, texts[1])["held_out"]


def test_the_same_in_worker_processes(tokenizer, monkeypatch):
    from sft_nb.tokens import pipeline
    monkeypatch.setattr(pipeline, "_FEW", 1)
    monkeypatch.setattr(pipeline, "_BATCH", 16)
    train, held_out = rows(lambda k: clean(k) + (f" {KEY}" if k > 40 else "")), [rows(clean)[50]]
    held_out[0]["question"] = held_out[0]["question"].upper()
    found = findings(train, tokenizer, held_out, num_workers=2)
    assert "held_out" in found and "train_key" in found


# the paragraph before a training

TALK = [dict(role="user", content="Hi?"), dict(role="assistant", content="Yes.")]


@pytest.mark.parametrize("train, settings, expected", [
    ([dict(query="Hi?", reply="Yes.", id=7)] * 2, dict(fields=("question=query", "answer=reply")),
     "Learned: reply, as the answer to query. From all 2 rows. Not used: id. No system prompt in the rows."),
    ([dict(query=f"{k} + {k}?", reply=str(2 * k), id=k) for k in range(20)],   # a number that is in some answers
     dict(fields=("question=query", "answer=reply")),
     "Learned: reply, as the answer to query. From all 20 rows. Not used: id. No system prompt in the rows."),
    ([dict(messages=[dict(role="system", content="Be brief."), dict(role="user", content="Hi?"),
                     dict(role="assistant", content=text)]) for text in ("Yes.", "No.", "")], {},
     "Learned: the answers in messages. From 2 of 3 rows, without 1 empty answer. System prompt: 'Be brief.'."),
    ([dict(system="Be kind.", conversations=[{"from": "User", "value": "Hi?"}, {"from": "Assistant", "value": "Yes."}])]
     * 2, {}, "Learned: the answers in conversations. From all 2 rows. System prompt: 'Be kind.'."),
    ([dict(systemInstruction=dict(parts=[dict(text="Be kind.")]), contents=[
        dict(role="user", parts=[dict(text="Hi?")]), dict(role="model", parts=[dict(text="Yes.")])])] * 2, {},
     "Learned: the answers in contents. From all 2 rows. System prompt: 'Be kind.'."),
    ([{"question": "Hi?", "answer": "Yes.", "Unnamed: 0": k} for k in range(2)], dict(system_prompt="Be kind."),
     "Learned: answer, as the answer to question. From all 2 rows. Not used: Unnamed: 0. System prompt: 'Be kind.'."),
    ([dict(question="Hi?", answer="Yes.", options=dict(A="Yes.", B="No."))] * 2, {},
     "Learned: answer, as the answer to question. From all 2 rows. Not used: options. No system prompt in the rows."),
    ([dict(prompt="Hi?", messages=TALK, chosen=TALK, rejected=[TALK[0], dict(role="assistant", content="No.")])] * 2,
     {}, "Learned: the answers in chosen. From all 2 rows. No system prompt in the rows."),
    ([dict(query="And?", response="No.", history=[["Hi?", "Yes."]])] * 2,
     dict(fields=("instruction=query", "output=response")),
     "Learned: history, response, as the answer to query. From all 2 rows. No system prompt in the rows."),
    ([dict(text="One river."), dict(text="Two stones.")], {}, "Learned: all of text. From all 2 rows."),
    ([dict(prompt="Hi?", completion="Yes.", chat_template_kwargs=dict(enable_thinking=False))] * 2, {},
     "Learned: completion, as the answer to prompt. From all 2 rows. No system prompt in the rows. "
     'Template arguments: {"enable_thinking": false} of rows.'),
    ([dict(prompt="Hi?", completion="Yes.")] * 2, dict(train_on_prompt=True, system_prompt="Be kind."),
     "Learned: completion, as the answer to prompt; prompts are learned too. From all 2 rows. "
     "System prompt: 'Be kind.'.")])
def test_a_paragraph_names_what_is_learned(train, settings, expected, tokenizer):
    report = prepare(load_config(task="chat", **settings), tokenizer, train=train).report
    assert report.summary == expected
    rows = report.to_dict()["facts"]["rows"]
    assert expected.split(".")[0] in str(report) and re.search(rf"From (all )?{rows} ", expected)
    assert "Learned: " in report._repr_html_()


def test_the_paragraph_tells_what_is_learned_in_each_form_of_rows(tokenizer):
    mixed = [dict(vraag=f"{k}?", antwoord=clean(k), bron="x") for k in range(60)] + [
        dict(question="Which?", answer="This."), dict(instruction="Say it.", output="It."), dict(messages=TALK)]
    cfg = load_config(task="chat", fields=("question=vraag", "answer=antwoord"), ignore_columns=("bron", "absent"))
    assert prepare(cfg, tokenizer, train=mixed).report.summary == (
        "Learned: in 61 rows (question_answer) antwoord or answer, as the answer to vraag or question; "
        "in 1 row (alpaca) output, as the answer to instruction; in 1 row (messages) the answers in messages. "
        "From all 63 rows. Ignored (ignore_columns): bron. No system prompt in the rows.")


def test_the_paragraph_names_every_column_that_is_not_used(tokenizer):
    names = [f"c{k}" for k in range(12)]
    report = prepare(load_config(task="chat"), tokenizer,
                     train=[dict(question="Hi?", answer="Yes.") | dict.fromkeys(names, 7)] * 2).report
    assert f"Not used: {', '.join(names)}." in report.summary and "more" not in report.summary


def test_the_paragraph_tells_that_only_some_of_the_held_out_rows_are_used(tokenizer):
    def summary(n): return prepare(load_config(task="chat", eval_fraction=.5, eval_samples=n), tokenizer,
                                   train=rows(clean)).report.summary
    assert ". Held out: the first 2 rows (eval_samples); any others are not used. " in summary(2)
    assert "Held out" not in summary(1000)


def test_columns_to_ignore_are_proposed_together_and_a_mistyped_one_is_named(tokenizer):
    more = [row | dict(zeta=f"foo {k} bar", note=f"a note of {k}", rating="bad") for k, row in enumerate(rows(clean))]
    cfg = load_config(task="chat", eval_samples=0, ignore_columns=("zeta", "notes"))
    found = {f.check: f.fix for f in prepare(cfg, tokenizer, train=more).report.findings}
    assert found["ignore_columns"].settings == dict(ignore_columns=("zeta", "note"))
    assert found["train_columns"].settings == dict(ignore_columns=("zeta", "note"))
    assert found["train_rejected"].otherwise[-1].settings == dict(ignore_columns=("zeta", "note", "rating"))
    with pytest.raises(SftError, match="it has image") as e:   # the second would replace the first
        prepare(replace(cfg, ignore_columns=("zeta",)), tokenizer, train=[more[0] | dict(image="x.png")])
    assert e.value.fix.settings == dict(ignore_columns=("zeta", "image"))


def test_a_column_that_says_no_to_rows_can_leave_them_out(tokenizer):
    tickets = [row | dict(resolved="no" if k % 4 == 0 else "yes") for k, row in enumerate(rows(clean))]
    report = prepare(load_config(task="chat", eval_samples=0), tokenizer, train=tickets).report
    fix = {f.check: f.fix for f in report.findings}
    assert fix["train_rejected"].settings == dict(fields=("train=resolved",))
    data = prepare(load_config(task="chat", eval_samples=0, **fix["train_rejected"].settings), tokenizer, train=tickets)
    assert data.train.reasons == {"train is no": 15}


def test_single_placeholders_are_named_and_left_out_by_the_proposed_command(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{question(k)},{clean(k)}" for k in range(60)]
    lines[3], lines[8] = f"{question(3)},TODO", f"{question(8)},n/a"
    (tmp_path/"tickets.csv").write_text("\n".join(["Ticket,Reply", *lines]) + "\n")
    fields = ("question=Ticket", "answer=Reply")
    cfg = load_config(task="chat", eval_samples=0, train_file="tickets.csv", fields=fields)
    found = next(f for f in prepare(cfg, tokenizer).report.findings if f.check == "train_placeholders")
    assert found.says == "2 answers are placeholders: 'TODO' in tickets.csv line 5, 'n/a' in tickets.csv line 10"
    command, _, rest = str(found.fix).partition(", then ")
    subprocess.run(command, shell=True, check=True)
    assert rest == "drop_rows placeholders.csv"
    data = prepare(replace(cfg, drop_rows="placeholders.csv"), tokenizer)   # whose columns have their names of the file
    assert data.train.reasons == {"listed in drop_rows": 2}
    assert "train_placeholders" not in {f.check for f in data.report.findings}


def test_repeated_prompts_are_said_to_be_held_out_together(tokenizer, tmp_path):
    file = tmp_path/"rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows(clean, 40), *[rows(clean, 1)[0]] * 60]))
    cfg = load_config(task="chat", train_file=str(file), eval_fraction=.2)
    summary = " ".join(prepare(cfg, tokenizer).report.summary.split())
    assert re.search(r"Held out: \d+ of 100 rows \(\d+%\) instead of 20: a hash of the prompt decides, and rows with "
                     r"the same prompt go together \(40 different prompts\)", summary)
