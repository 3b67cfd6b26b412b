"""A task with many figures: those that do not lead are a table below the line of each model."""
from dataclasses import replace

import pytest

from sft_nb.evaluation.evaluate import Evaluation
from sft_nb.evaluation.generations import Answer, Scores
from sft_nb.tasks.metrics import ClassTable


def scores(model, **figures):
    answers = [Answer("row 1", "2+2?", "4", True, "4", "4", 2, True)] * 4
    return Scores(model, answers, dict(precision=.5, recall=.25, **figures))


def test_a_line_of_many_figures_becomes_a_table():
    few, many = scores("base"), scores("base", valid_json=1., thought_words=7., unparsed=0., accuracy_0_100=.75)
    assert few.more_figures() == {} and "recall 0.25" in few.line(short=True)
    assert {*many.more_figures()} == {*many.figures} - {"accuracy"}
    assert "thought_words" in many.line() and "thought_words" not in many.line(short=True)
    lines = str(Evaluation("r", "adapter", many, replace(many, model="tuned"), by="accuracy")).splitlines()
    row = next(line for line in lines if "thought_words" in line)
    assert row.split() == ["thought_words", "7", "7"], lines


@pytest.mark.parametrize("labels, rest", [(["refund", "other"], "no label"), (["refund", "delivery"], "other")])
def test_other_answers_are_not_mixed_up_with_a_label_of_that_name(labels, rest):
    table = ClassTable.of(labels * 10, [*labels * 9, None, "what?"])
    lines = table.view().parts[0].lines
    assert [*lines[0]][-3:] == [*(f"→ {label}" for label in table.labels), f"→ {rest}"]
    assert [line[f"→ {rest}"] for line in lines] == [1, 1]
