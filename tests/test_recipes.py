"""The notebooks for users are in order and define nothing; `make lab` opens the quickstart."""
import json
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from measure import Notebook   # noqa: E402

RECIPES = [Notebook(p) for p in sorted((ROOT/"nbs/recipes").glob("*.ipynb"))]
REPORTS = "01_quickstart", "03_a_run_that_went_wrong"   # they end in a report to send
DEFINES = "00_by_hand", "16_a_judge"   # their subject are functions of one's own
TEN_LINES = "load_config prepare BatchPanel plan preflight launch RunPanel sweep prove".split()


def name(book)->str: return book.path.stem


def test_they_are_all_there(): assert [*map(name, RECIPES)] == [
    "00_by_hand", "01_quickstart", "02_your_own_rows", "03_a_run_that_went_wrong", "04_word_problems",
    "05_unit_conversion",
    "06_translation_by_domain", "07_inference_with_reasoning", "08_very_long_documents", "09_tool_calls",
    "10_reasoning_data", "11_continue_an_adapter", "12_from_here_to_preferences", "13_serve_and_prove", "14_many_gpus",
    "15_your_own_objects", "16_a_judge", "17_experts_hybrids_reasoning", "19_a_card_to_check"]


@pytest.mark.parametrize("book", RECIPES, ids=name)
def test_a_recipe_is_short_has_a_command_for_a_shell_and_ends_in_a_figure(book):
    shown = [c for c in book.code if "#| hide" not in c.source]
    assert len(shown) <= 15
    text = "\n".join(c.source for c in book.cells if c.kind == "markdown")
    assert "sft_nb " in text or name(book) in REPORTS
    last = json.loads(book.path.read_text())["cells"]
    outputs = [o for c in last for o in c.get("outputs", [])]
    assert {"text/html", "image/png"} & {*outputs[-1].get("data", {})} or name(book) in REPORTS


@pytest.mark.parametrize("book", RECIPES, ids=name)
def test_a_recipe_defines_nothing_and_was_run(book):
    assert not book.module and not any(c.exported for c in book.code)
    assert name(book) in DEFINES or not [c for c in book.code if re.search(r"^(def|class) ", c.source, re.M)]
    text = book.path.read_text()
    assert '"output_type": "error"' not in text and ("text/html" in text or "image/png" in text)
    assert not re.search(r"/tmp/|/work/|/home/", text)


def test_the_quickstart_is_the_ten_lines_in_order():
    said = "\n".join(c.source for c in RECIPES[1].code)
    found = [re.search(rf"\b{word}\(", said) for word in TEN_LINES]
    assert all(found) and [m.start() for m in found] == sorted(m.start() for m in found)


def test_make_lab_opens_the_quickstart():
    line, = re.findall(r"jupyter lab (.*)", (ROOT/"Makefile").read_text())
    assert line == "nbs --LabApp.default_url=/lab/tree/recipes/01_quickstart.ipynb"


@pytest.mark.parametrize("job,recipe,figures", [
    ("legal", "02_your_own_rows", ("base rougeL", "best rougeL", "chance")),
    ("gsm8k", "04_word_problems", ("best accuracy", "base accuracy", "chance")),
    ("units", "05_unit_conversion", ("best accuracy",)),
    ("tools", "09_tool_calls", ("best accuracy", "best name", "base accuracy")),
    ("nli", "07_inference_with_reasoning", ("best accuracy", "few_shot accuracy", "chance"))])
def test_recipes_show_the_figures_of_a_real_model(job, recipe, figures):
    "As they were measured last"
    measured = json.loads((ROOT/f"benchmarks/results/real_{job}.json").read_text())["runs"][0]
    measured |= dict(best=measured["checkpoints"][measured["best"]])
    cells = json.loads((ROOT/f"nbs/recipes/{recipe}.ipynb").read_text())["cells"]
    text = " ".join("".join(c["source"]) for c in cells).partition("## On a real model")[2]
    for figure in figures:
        of, _, name = figure.partition(" ")
        assert f"{measured[of][name or 'value']:.1%}" in text, figure
