"""The documentation's pages: nbdev generates them from the notebooks without losing text."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from measure import DEFINITIONS, Cell, Notebook, notebooks   # noqa: E402

BOOKS = notebooks(ROOT)
IMPORTS = (ast.Import, ast.ImportFrom)
MAKE = "from nbdev.serve import proc_nbs\nif __name__ == '__main__': proc_nbs(n_workers=2)\n"


def page(book:Notebook)->str: return str(book.path.relative_to(ROOT/"nbs"))


def mixed(cell:Cell)->bool:
    "Would nbdev, which executes every cell that imports, execute more than imports and definitions?"
    statements = [s for s in cell.tree.body if not (isinstance(s, ast.If) and ast.unparse(s.test) == "TYPE_CHECKING")]
    if any(isinstance(s, IMPORTS) for s in statements): return not all(isinstance(s, IMPORTS) for s in statements)
    inside = not cell.exported and any(isinstance(n, IMPORTS) for n in ast.walk(cell.tree))
    return inside and not all(isinstance(s, DEFINITIONS) for s in statements)


@pytest.mark.parametrize("source, wrong", [
    ("import torch\nfrom sft_nb import prepare", False),
    ("#| export\nimport torch", False),
    ("import torch\nif TYPE_CHECKING: from torch import nn", False),
    ("import torch\ntorch.manual_seed(0)", True),
    ("#| export\nimport torch\ndef f(): return 1", True),
    ("def f():\n    import torch\n    return torch", False),
    ("def f():\n    import torch\n    return torch\nf()", True),
    ("#| export\ndef f():\n    import torch\nNAMES = 1", False),
    ("x = 1", False),
])
def test_what_a_mixed_cell_is(source, wrong): assert mixed(Cell("code", source)) is wrong


def test_imports_stand_in_cells_of_their_own():
    assert {page(b): found for b in BOOKS if (found := [c.source for c in b.code if mixed(c)])} == {}


def test_the_first_cell_holds_only_title_and_quote():
    "nbdev makes front matter of it and drops what else stands there"
    def is_title(cell): return re.fullmatch(r"# \S[^\n]*\n\n> \S[^\n]*", cell.source.strip())
    firsts = {page(book): book.cells[0] for book in BOOKS}
    assert {name: c.source for name, c in firsts.items() if c.kind != "markdown" or not is_title(c)} == {}


def leads_somewhere(folder, target:str)->bool:
    "A file here, or a page of the site, whose name has lost its number: `../07_planning/plan.html`"
    place = folder/target
    if place.suffix != ".html": return place.exists()
    return any(re.fullmatch(rf"(\d+_)?{place.stem}", p.stem) for p in place.parent.glob("*.ipynb"))


def text_of(book:Notebook)->str:
    "The text of a notebook without its blocks of code"
    text = "\n".join(c.source for c in book.cells if c.kind == "markdown")
    return re.sub(r"```.*?```", "", text, flags=re.S)


def test_links_to_other_pages_lead_somewhere():
    broken = {}
    for book in BOOKS:
        targets = re.findall(r"\]\(((?!https?:|#)[^)\s#]+)[^)]*\)", text_of(book))
        broken[page(book)] = [t for t in targets if not leads_somewhere(book.path.parent, t)]
    assert {name: targets for name, targets in broken.items() if targets} == {}


def test_no_link_is_put_into_a_link():
    "nbdev makes a link of every name in backticks that it knows, also of one that stands inside a link already"
    pattern = re.compile(r"\[[^\[\]]*`[A-Za-z_.]+(?:\(\))?`[^\[\]]*\]\([^)]*\)")
    assert {page(book): found for book in BOOKS if (found := pattern.findall(text_of(book)))} == {}


def entries(contents:list)->list[dict]:
    "All pages of a sidebar, in any section"
    found = []
    for x in contents: found += entries(x["contents"]) if "contents" in x else [x]
    return found


def test_every_notebook_stands_once_in_the_sidebar_under_a_title_for_people():
    bar = yaml.safe_load((ROOT/"nbs/sidebar.yml").read_text())["website"]["sidebar"]["contents"]
    pages = entries(bar)
    assert sorted(p["href"] for p in pages) == sorted(map(page, BOOKS))
    titles = [p["text"] for p in pages]
    assert len({*titles}) == len(titles) and not [t for t in titles if "_" in t.replace("sft_nb", "")]
    assert [x.get("section") for x in bar[1:]] == ["Learn", "Recipes", "Failures", "Reference"]


def processed(tree)->subprocess.CompletedProcess:
    "Let nbdev make the pages of a tree, in `_proc`"
    (tree/"make.py").write_text(MAKE)
    env = os.environ | dict(PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, "make.py"], cwd=tree, env=env, capture_output=True, text=True)


def bare(text:str)->str:
    "Text without links, backticks and spaces: nbdev turns names into links"
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)", r"\1", text)
    return re.sub(r"[`\s]+", "", text)


def words_of(path)->str:
    "All text of a processed page, front matter included"
    text = ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown": text += source + "\n"
        if cell["cell_type"] == "raw" and source.startswith("---"):
            front = yaml.safe_load(source.strip().strip("-"))
            text += f"# {front.get('title', '')}\n> {front.get('description', '')}\n"
    return bare(text)


def lost(tree)->dict[str,list[str]]:
    "Page -> the paragraphs of its notebook that the processed page does not have"
    missing = {}
    for book in notebooks(tree):
        name = book.path.relative_to(tree/"nbs")
        there = words_of(tree/"_proc"/name)
        blocks = [b for c in book.cells if c.kind == "markdown" for b in c.source.split("\n\n")]
        missing[str(name)] = [b for b in blocks if bare(b) not in there]
    return {name: blocks for name, blocks in missing.items() if blocks}


def copy_project(folder)->None:
    "The notebooks and what nbdev needs, in `folder`: nothing is written into this tree, and no cell is executed"
    for name, also in (("nbs", "runs"), ("sft_nb", "")):   # what the pages have written
        left_out = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", also)
        shutil.copytree(ROOT/name, folder/name, ignore=left_out)
    for file in ("settings.ini", "setup.py", "pyproject.toml", "_quarto.yml"): shutil.copy(ROOT/file, folder)
    settings = folder/"settings.ini"
    text = re.sub(r"^skip_procs =.*$", "skip_procs = exec_show_docs", settings.read_text(), flags=re.M)
    settings.write_text(text)


@pytest.mark.soak
def test_no_page_loses_text(tmp_path):
    "For `nbdev_docs`; the published pages are those of test_built_site"
    copy_project(tmp_path)
    done = processed(tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert lost(tmp_path) == {}


PLANTED = {   # page -> its cells, of which all are text
    "x.ipynb": ["# a\n\n> b c\n\nAnd what else stands here."],   # lost
    "y.ipynb": ["# a\n\n> b c", "Nothing is lost."],
}

def test_a_page_that_loses_text_is_seen(tmp_path):
    (tmp_path/"nbs").mkdir()
    shutil.copy(ROOT/"settings.ini", tmp_path)
    for page, texts in PLANTED.items():
        made = [dict(cell_type="markdown", id=str(i), metadata={}, source=[text]) for i, text in enumerate(texts)]
        (tmp_path/"nbs"/page).write_text(json.dumps(dict(cells=made, metadata={}, nbformat=4, nbformat_minor=5)))
    assert processed(tmp_path).returncode == 0
    assert lost(tmp_path) == {"x.ipynb": ["And what else stands here."]}
