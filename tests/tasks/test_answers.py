"""Two hundred answers for each parser, labelled by a person: typical of models, malformed, or meant to
mislead."""
import json

import pytest
from conftest import ROOT, shared
from hypothesis import given, strategies as st

from sft_nb.extras.tasks.nli import read_answer
from sft_nb.tasks.answers import final_number
from sft_nb.extras.tasks.tools import read_calls
from sft_nb.extras.tasks.units import tagged_number

READERS = dict(gsm8k=final_number, units=tagged_number, nli=lambda text: read_answer(text)[0], tools=read_calls)


@pytest.mark.parametrize("name", READERS)
def test_every_answer_is_read_as_a_person_reads_it(name):
    lines = (ROOT/f"tests/tasks/answers_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    read = READERS[name]
    found = [(r["text"][:80], r["read"], read(r["text"])) for r in map(json.loads, lines)]
    wrong = [x for x in found if x[1] != x[2]]
    assert len(lines) >= 200 and wrong == []


@pytest.mark.parametrize("name", READERS)
@given(st.text(alphabet="{}[]\"'<>/=-+,.:0123456789 answernmlt_#$\\^\n½−", max_size=80))
def test_no_text_breaks_a_reader(name, text):
    READERS[name](text)
    READERS[name](f'<answer>{text}</answer> {{"predicted_label": "{text}", "name": "{text}"}}')


def test_zero_to_the_power_of_zero_is_no_number():
    "Found by the test above: `decimal` raises, and an evaluation would have ended there"
    assert final_number("0^0") is None and final_number("The answer is 0.0^0.") is None
    assert (final_number("0^3"), final_number("5^0")) == ("0", "1")
    for read in READERS.values(): read("#### 0^0")


ENDINGS = ["A: {}", "Answer: {}", "The answer is {}.", "The answer is: {}", "**Answer:** {}", "**Answer: {}**",
           "Final answer: {}", "So the final answer is ${}.", "Therefore, the answer is {} dollars.", "answer = {}",
           "ANSWER: {} apples", "The correct answer is **{}**", "Thus the answer is $\\boxed{{{}}}$", "Answer:\n{}",
           "Hence the answer would be {}.", "The answer is {} because there are 7 days in a week.",
           "A: She needs {} of them.", "Answer: {} days (1 week)", "Q: How many?\nA: {}.",
           "The final answer is ${}$. I hope it is correct."]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_solution_is_read_by_what_it_says_is_its_answer(ending):
    "Worked solutions of GSM8K, whose last calculator's note is often another number"
    lines = shared("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:7000:50]
    for answer in (json.loads(line)["answer"] for line in lines):
        steps, _, number = answer.rpartition("#### ")
        expected = final_number(answer)
        assert final_number(steps + ending.format(number)) == expected, (steps[-80:], number)
        assert final_number(f"{steps}{ending.format(number)}\n#### {number}") == expected


def test_a_solution_without_an_ending_is_read_by_its_last_line():
    "The calculator's note of another line is none: 0.8% are read otherwise than their row says, and 5.4% were"
    lines = shared("data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    wrong = sum(final_number(a.rpartition("#### ")[0]) != final_number(a) for a in answers)
    assert wrong / len(answers) < .012, wrong


@pytest.mark.parametrize("word, value", [
    ("hundred", 300), ("thousand", 3e3), ("k", 3e3), ("lakh", 3e5), ("million", 3e6), ("mn", 3e6), ("mln", 3e6),
    ("m", 3e6), ("crore", 3e7), ("billion", 3e9), ("bn", 3e9), ("b", 3e9), ("trillion", 3e12), ("dozen", 36)])
def test_every_scale_of_a_number(word, value):
    assert float(final_number(f"The answer is ${3} {word}." if len(word) > 1 else f"The answer is $3{word}.")) == value
