"""The notebooks for those who use it: five, in order, that define nothing; `make lab` opens the first."""
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from measure import Notebook   # noqa: E402

RECIPES = [Notebook(p) for p in sorted((ROOT/"nbs/recipes").glob("*.ipynb"))]
TEN_LINES = "load_config prepare BatchPanel plan preflight launch RunPanel sweep prove".split()


def name(book)->str: return book.path.stem


def test_there_are_five(): assert [*map(name, RECIPES)] == [
    "01_quickstart", "02_your_own_rows", "03_a_run_that_went_wrong", "04_many_gpus", "05_very_long_documents"]


@pytest.mark.parametrize("book", RECIPES, ids=name)
def test_a_recipe_defines_nothing_and_was_run(book):
    assert not book.module and not any(c.exported for c in book.code)
    assert not [c for c in book.code if re.search(r"^(def|class) ", c.source, re.M)]
    text = book.path.read_text()
    assert '"output_type": "error"' not in text and "text/html" in text
    assert not re.search(r"/tmp/|/work/|/home/", text)


def test_the_quickstart_is_the_ten_lines_in_order():
    said = "\n".join(c.source for c in RECIPES[0].code)
    found = [re.search(rf"\b{word}\(", said) for word in TEN_LINES]
    assert all(found) and [m.start() for m in found] == sorted(m.start() for m in found)


def test_make_lab_opens_the_first():
    line, = re.findall(r"jupyter lab (.*)", (ROOT/"Makefile").read_text())
    assert line == f"nbs --LabApp.default_url=/lab/tree/recipes/{name(RECIPES[0])}.ipynb"
