"""The pages for readers: recipes are in order and define nothing, and like failures ask before they show."""
import ast
import json
import re
import sys
import types

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from measure import Notebook   # noqa: E402

RECIPES = [Notebook(p) for p in sorted((ROOT/"nbs/recipes").glob("*.ipynb"))]
FAILURES = [Notebook(p) for p in sorted((ROOT/"nbs/failures").glob("*.ipynb")) if not p.stem.startswith("00_")]
REPORTS = "01_quickstart", "03_a_run_that_went_wrong"   # they end in a report to send
DEFINES = "00_by_hand", "16_a_judge"   # their subject are functions of one's own
TEN_LINES = "load_config prepare BatchPanel plan preflight launch RunPanel sweep prove".split()


def name(book)->str: return book.path.stem


def test_they_are_all_there(): assert [*map(name, RECIPES)] == [
    "00_by_hand", "01_quickstart", "02_your_own_rows", "03_a_run_that_went_wrong", "04_word_problems",
    "05_unit_conversion",
    "06_translation_by_domain", "07_inference_with_reasoning", "08_very_long_documents", "09_tool_calls",
    "10_reasoning_data", "11_continue_an_adapter", "12_from_here_to_preferences", "13_serve_and_prove", "14_many_gpus",
    "15_your_own_objects", "16_a_judge", "17_experts_hybrids_reasoning",
    "18_replay_of_a_spike", "19_a_card_to_check", "20_a_whole_job",
    "21_a_run_that_disappoints"]


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


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_recipe_opens_on_colab_and_kaggle_and_installs_the_package_only_where_it_is_missing(number):
    book, called = RECIPES[number], []
    badges = re.findall(r"\]\((https://[^)]*/nbs/recipes/([^)]*)\.ipynb)\)", book.cells[3].source)
    assert [page for _, page in badges] == [name(book)] * 2
    assert ["colab.research" in url for url, _ in badges] == [True, False]
    install, _ = book.code[1].source.split("os.chdir")
    run = types.SimpleNamespace(run=lambda command, check: called.append(command))
    for found in (True, None): exec(install, dict(find_spec=lambda _, found=found: found, subprocess=run, sys=sys))
    assert [command[1:4] for command in called] == [["-m", "pip", "install"]]


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


QUESTION = re.compile(r"\*\*Predict\.\*\* .+?\?\s.*?Run\s+the\s+cell,\s+then\s+compare\.\n\n"
                      r"<details><summary>Answer</summary>\n\n(.+?)\n\n</details>", re.S)


def cells_of(book)->list[dict]:
    cells = json.loads(book.path.read_text())["cells"]
    return [cell | dict(source="".join(cell["source"])) for cell in cells]


def shown_next(cells:list[dict], k:int)->str:
    "The text that the first cell with an output after cell k shows, with single spaces"
    for cell in cells[k + 1:]:
        texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
        if texts: return " ".join("".join("".join(text) + " " for text in texts).split())
        if cell["cell_type"] == "markdown": break
    return ""


def quoted(answer:str)->list[str]: return [" ".join(quote.split()) for quote in re.findall(r"`([^`]+)`", answer)]


@pytest.mark.parametrize("book", [*FAILURES, *RECIPES], ids=name)
def test_a_page_asks_before_it_shows_and_its_answer_quotes_what_is_shown(book):
    cells = cells_of(book)
    asked = [k for k, cell in enumerate(cells) if "**Predict.**" in cell["source"]]
    assert 1 <= len(asked) <= 2
    if book in FAILURES: assert any(QUESTION.search(cell["source"].split("## Why")[0]) for cell in cells[:asked[0] + 1])
    for k in asked:
        answer, = QUESTION.findall(cells[k]["source"])
        assert cells[k]["source"].endswith("</details>")
        shown = shown_next(cells, k)
        assert any(quote in shown for quote in quoted(answer)), f"nothing of {quoted(answer)} is in {shown[:200]!r}"


@pytest.mark.parametrize("book", RECIPES, ids=name)
def test_a_recipe_ends_with_what_was_seen_and_where_to_go(book):
    last = cells_of(book)[-1]
    _, _, end = last["source"].partition("## What you have seen\n\n")
    seen, where = end.split("\n\n")
    assert last["cell_type"] == "markdown" and len(seen) > 60 and where.startswith("**Where to go from here.** ")
    assert 2 <= len(re.findall(r"\]\([^)]+\.ipynb\)", where)) and len(end.splitlines()) <= 9


TEACHES = {"12_from_here_to_preferences": "log(2)"}   # an assertion that a reader should copy


@pytest.mark.parametrize("book", [*FAILURES, *RECIPES], ids=name)
def test_tests_are_hidden_and_imports_of_modules_folded(book):
    "On the site by a directive, in JupyterLab by metadata"
    for cell in cells_of(book):
        source = cell["source"]
        if cell["cell_type"] != "code": continue
        folded = source.startswith(("#| hide", "#| code-fold: true"))
        assert cell["metadata"].get("jupyter", {}).get("source_hidden", False) is folded, source
        if "#| hide" in source or TEACHES.get(name(book), "no such") in source: continue
        assert "test_eq(" not in source and not any(isinstance(x, ast.Assert) for x in ast.parse(source).body), source
        if re.search(r"^from sft_nb\.", source, re.M): assert folded, source


def test_no_accuracy_of_a_recipe_goes_from_nothing_to_nothing():
    for book in RECIPES:
        for cell in cells_of(book):
            shown = "".join("".join(o.get("data", {}).get("text/plain", "")) for o in cell.get("outputs", []))
            assert "no row differs" not in shown, f"{name(book)}: {shown[:300]}"


def test_every_failure_has_a_row_in_the_index_and_the_checks_it_names_exist():
    from sft_nb.checks.preflight import all_checks
    text = Notebook(ROOT/"nbs/failures/00_index.ipynb").cells[1].source
    named = {*re.findall(r"`((?:environment|data|plan|model|batch|step|learning)\.\w+)`", text)}
    assert sorted({*re.findall(r"\((\d\d_\w+\.ipynb)\)", text)}) == [book.path.name for book in FAILURES]
    assert len(named) > 10 and named <= {*dict(all_checks())}
