"""Questions with choices, as the authors of known datasets write them: the prompt shows all, a letter is learned."""
import pytest

from sft_nb.base.report import as_fix, ConfigError, SftError
from sft_nb.config.load import load_config
from sft_nb.extras.proposals import fix_for_unread, propose_names
from sft_nb.extras.tasks.multiple_choice import read_choices, read_letter, right_choice
from sft_nb.rows.columns import ColumnRenamer
from sft_nb.tasks.core import get_task
from sft_nb.tokens.prepare import prepare

ASKED, TEXTS = "Where do fish live?", ["in trees", "in water", "on Mars"]
SHOWN = "Where do fish live?\nA. in trees\nB. in water\nC. on Mars\nAnswer with the letter."
LETTERS = dict(zip("ABC", TEXTS))
ROWS = dict(
    arc=dict(id="M7", question=ASKED, choices=dict(text=TEXTS, label=["A", "B", "C"]), answerKey="B"),
    arc_numbers=dict(id="M7", question=ASKED, choices=dict(text=TEXTS, label=["1", "2", "3"]), answerKey="2"),
    arc_table=dict(question=ASKED, choices=dict(text=TEXTS, label=["1", "2", "3"]), answerKey=2),
    openbookqa=dict(question_stem=ASKED, choices=dict(text=TEXTS, label=["A", "B", "C"]), answerKey="B"),
    mmlu=dict(question=ASKED, subject="fish", choices=TEXTS, answer=1),
    mmlu_table=dict(question=ASKED, choices='["in trees", "in water", "on Mars"]', answer="1"),
    mmlu_pandas=dict(question=ASKED, choices="['in trees', 'in water', 'on Mars']", answer=1.0),
    mmlu_pro=dict(question_id=7, question=ASKED, options=TEXTS, answer="B", answer_index=1, category="fish", src="x"),
    medqa=dict(question=ASKED, options=LETTERS, answer="in water", answer_idx="B", meta_info="step1"),
    medqa_list=dict(question=ASKED, options=[dict(key=k, value=v) for k, v in LETTERS.items()], answer="in water"),
    labelled_from_0=dict(question=ASKED, choices=[dict(id=k, text=t) for k, t in enumerate(TEXTS)], answer=1),
    medmcqa=dict(id="7", question=ASKED, opa="in trees", opb="in water", opc="on Mars", opd=None, cop=1),
    hellaswag=dict(ind=7, ctx=ASKED, endings=TEXTS, label="1"),
    aqua=dict(question=ASKED, options=["A)in trees", "B)in water", "C)on Mars"], correct="B"),
    ceval=dict(id=7, question=ASKED, **LETTERS, answer="B"),
    logiqa=dict(query=ASKED, options=TEXTS, correct_option=1),
    swag=dict(question=ASKED, ending0="in trees", ending1="in water", ending2="on Mars", label=1),
    piqa=dict(goal=ASKED, sol1="in trees", sol2="in water", sol3="on Mars", label=1),
    cosmos=dict(question=ASKED, answer0="in trees", answer1="in water", answer2="on Mars", label=1),
    winogrande=dict(sentence=ASKED, option1="in trees", option2="in water", option3="on Mars", answer="2"))
TASK = get_task("multiple_choice")


def renamed(row):
    found, = TASK.expand(ColumnRenamer((*TASK.fields, "context"), {}, TASK.aliases)(row))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_every_way_to_write_choices_gives_one_prompt_and_a_letter(name):
    row = renamed(ROWS[name])
    assert [m["content"] for m in TASK.messages(row)] == [SHOWN, "B"]
    for text, right in (("B", True), ("b.", True), ("B. in water", True), ("**B**", True), ("(B) in water", True),
                        ("In water.", True), ("The answer is (B).", True), ("Answer: A", False), ("C", False),
                        ("B cells live in water.", False), ("", False)):
        assert TASK.score(text, row).correct == right, text


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("swag", "hellaswag")])
def test_the_task_is_proposed_where_the_rows_have_choices(name):
    row = ROWS[name]
    if {"question", "answer"} <= row.keys():   # readable without the choices, which the report misses
        unread = [c for c in row if c not in ("question", "answer")]
        said, fix = fix_for_unread(unread, unread, as_fix("ignore"), as_fix("ignore"), format="question_answer",
                                   answers=[], columns={}, fields=())
        assert "of which the answer may be one" in said
    else: fix = propose_names(get_task("chat"), [row])
    assert str(fix).startswith("task='multiple_choice'")


def test_a_right_answer_beside_wrong_ones_stands_in_any_place_among_them():
    rows = [renamed(dict(question=f"{k}+1?", distractor1=f"{k + 2}", distractor2=f"{k + 3}", correct_answer=f"{k + 1}"))
            for k in range(60)]
    for k, row in enumerate(rows):
        asked, letter = (m["content"] for m in TASK.messages(row))
        assert f"{letter}. {k + 1}\n" in asked and f". {k + 2}\n" in asked and f". {k + 3}\n" in asked
    letters = [TASK.target(row) for row in rows]
    assert all(10 < letters.count(letter) < 30 for letter in "ABC")


def test_the_article_stands_above_the_question():
    row = renamed(dict(article="Fish need water.", question=ASKED, options=TEXTS, answer="B"))
    assert TASK.messages(row)[0]["content"] == f"Fish need water.\n\n{SHOWN}"


@pytest.mark.parametrize("answer, says", [
    ("E", "is none of the 4 choices"), (5, "is none of the 4 choices"), (4, "counted from 1"),
    ("4", "counted from 1"), ("", "is none"), (True, "is none"),
    ("1", "may be a choice or its place"), ("in", "is none")])
def test_an_answer_that_may_mean_two_choices_or_none_is_refused(answer, says):
    with pytest.raises(SftError, match=says): right_choice(answer, read_choices(["3", "2", "1", "0"]))


def test_a_number_of_a_column_is_refused_where_the_columns_count_from_one():
    row = renamed(dict(sentence=ASKED, option1="x", option2="y", answer="0"))
    with pytest.raises(SftError, match="is none of the 2 choices"): TASK.messages(row)


def test_a_file_that_counts_from_one_is_not_read_without_the_rows_that_show_it():
    rows = [dict(question=f"{k}?", choices=["a", "b", "c"], answer=k % 3 + 1) for k in range(9)]
    cfg = load_config(task="multiple_choice", on_bad_row="drop", eval_samples=0)
    with pytest.raises(ConfigError, match="an answer is 3 of 3 choices, so they are counted from 1") as e:
        prepare(cfg, train=rows)
    assert "on_bad_row" not in str(e.value)


@pytest.mark.parametrize("value", [["one"], [], {}, "[1", 7, ["a"] * 27])
def test_what_is_no_choice_is_refused(value):
    with pytest.raises(SftError, match="choices"): read_choices(value)


@pytest.mark.parametrize("text, letter", [
    ("A cow lives in a barn.", None), ("I think so.", None), ("D", None), ("A\n\nFish have gills.", "A"), ("(C)", "C"),
    ("`A`", "A"), ("I'd choose option C, as it is dry.", "C"), ("the answer is A. No: the answer is B", "B"),
    ("A) in trees", "A"), ("a", "A"), ("B in water", "B"),
    ("Die Antwort ist B.", "B"), ("答案是C", "C"), ("The answer isn't clear.", None), ("Answer: **C**", "C")])
def test_the_letter_of_an_answer_is_read(text, letter):
    assert read_letter(text, read_choices(TEXTS)) == letter


def test_a_report_says_that_a_letter_is_learned():
    cfg = load_config(task="multiple_choice", eval_samples=0)
    data = prepare(cfg, train=[ROWS["arc"], ROWS["arc"] | dict(answerKey="C")])
    assert "Learned: the letter of the right choice" in " ".join(data.report.summary.split())


def test_the_thought_before_an_answer_is_learned_with_the_letter():
    row = renamed(dict(question=ASKED, options=TEXTS, answer="<think>\nGills.\n</think>\n\nin water"))
    assert TASK.messages(row)[-1]["content"] == "<think>\nGills.\n</think>\n\nB"


def test_a_label_of_0_is_a_label():
    choices = read_choices([dict(id=0, text="a"), dict(id=1, text="b")])
    assert [c.label for c in choices] == ["0", "1"] and right_choice(0, choices) == right_choice("0", choices) == 0
