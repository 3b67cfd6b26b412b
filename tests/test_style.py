"""Style rules that ruff has no rule for; `scripts/measure.py` counts, this file asserts."""
import ast
import json
import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
from measure import Cell, Notebook, Source, measure, modules, nested_choices, notebooks   # noqa: E402

FLAG = re.compile(r"(^|\s)--[a-z]")
MODULES = modules(ROOT)
PAGES = notebooks(ROOT)
BOOKS = [b for b in PAGES if b.module]


def name(source:Source)->str: return str(source.path.relative_to(ROOT))
def chapter(book:Notebook)->str: return str(book.path.relative_to(ROOT/"nbs"))


def test_lines_end_by_column_120_and_choices_are_not_nested():
    assert {name(s): s.too_wide for s in MODULES if s.too_wide} == {}
    assert {name(s): found for s in MODULES if (found := nested_choices(s))} == {}


def test_no_page_shows_a_folder_of_the_machine_that_made_it():
    found = []
    for page in PAGES:
        cells = json.loads(page.path.read_text(encoding="utf-8"))["cells"]
        shown = json.dumps([cell.get("outputs", []) for cell in cells])
        own = re.findall(r"(?:/work/|/root/|/home/(?!you/)|site-packages).{0,40}", shown)
        found += [f"{chapter(page)}: {text}" for text in own]
    assert found == []


def test_every_public_name_is_shown_in_its_chapter():
    assert {chapter(b): sorted(b.never_shown) for b in BOOKS if b.never_shown} == {}


QUESTION = re.compile("(What|How|Whether|Where|Why|When|Who) ")


def test_docstrings_name_the_thing_and_not_a_question():
    found = []
    for source in MODULES:
        module = name(source).removeprefix("sft_nb/")
        tree = ast.parse(source.path.read_text(encoding="utf-8"))
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        found += [f"{module} {n.name}" for n in nodes if QUESTION.match(ast.get_docstring(n) or "")]
    assert found == []


def test_prose_between_two_pieces_of_code_is_one_cell():
    found = []
    for page in PAGES:
        cells = json.loads(page.path.read_text(encoding="utf-8"))["cells"][1:]   # nbdev drops all after a title
        pairs = [a["id"] for a, b in zip(cells, cells[1:]) if a["cell_type"] == b["cell_type"] == "markdown"]
        if pairs: found.append(f"{chapter(page)}: {pairs}")
    assert found == []


def given_as_fix(call:ast.Call)->list:
    "The arguments of a call that are a fix"
    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
    place = dict(SftError=3, ConfigError=3, Finding=3, warn=1, fail=1, skipped=1).get(called)
    if place is None: return []
    return [*call.args[place:place + 1], *(k.value for k in call.keywords if k.arg == "fix")]


def flags(tree)->list[str]:
    "Strings given as a fix that spell an option; what `command` is given is a shell's own"
    found = []
    for fix in (f for call in ast.walk(tree) if isinstance(call, ast.Call) for f in given_as_fix(call)):
        commands = [n for n in ast.walk(fix) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "command"]
        shell = {id(n) for c in commands for n in ast.walk(c)}
        texts = [n for n in ast.walk(fix) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found += [t.value for t in texts if id(t) not in shell and FLAG.search(t.value)]
    return found


@pytest.mark.parametrize("code, seen", [
    ("SftError('a', 'b', 'c', '--max-length 3')", ["--max-length 3"]),
    ("fail('a', fix=f'--max-length {n}')", ["--max-length "]),
    ("warn('a', 'leave out --max-length')", ["leave out --max-length"]),
    ("fail('--max-length is 3', edit(max_length=4))", []),
    ("fail('a', command('sft_nb train --resume x', 'resume(x)'))", []),
])
def test_what_a_flag_in_a_fix_is(code, seen): assert flags(ast.parse(code)) == seen


def test_no_fix_spells_an_option_itself():
    assert {name(s): found for s in MODULES if (found := flags(s.tree))} == {}


@pytest.fixture(scope="module")
def options()->set[str]:
    "Every name that a command or `load_config` takes"
    import contextlib
    import io

    from sft_nb.cli import COMMANDS, main
    from sft_nb.config.settings import ALIASES, defaults
    from sft_nb.extras.other_tools import FOREIGN
    said = io.StringIO()
    for command in COMMANDS:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit): main([command, "--help"])
    own = re.findall(r"--([a-z][\w-]+)", said.getvalue())
    return {*defaults(), *ALIASES, *FOREIGN, *(o.replace("-", "_") for o in own)}


def test_a_fix_edits_what_exists(options):
    unknown = {}
    for source in MODULES:
        edits = [c for c in source.nodes(ast.Call) if getattr(c.func, "id", "") == "edit"]
        unknown[name(source)] = sorted({k.arg for c in edits for k in c.keywords if k.arg} - options)
    assert {file: names for file, names in unknown.items() if names} == {}


def test_a_cell_is_read_as_nbdev_reads_it():
    cell = Cell("code", "#| export\n%matplotlib inline\ndef f(): return 1\n@patch\ndef g(self:f): return 2")
    assert cell.exported and [d.name for d in cell.definitions] == ["f", "g"]
    assert not Cell("code", "#| exporti_not\nx = 1").exported and not Cell("markdown", "#| export").exported


def test_what_is_never_shown_is_seen(tmp_path):
    import json
    code = ["#| default_exp x", "#| export\ndef shown(): ...", "#| export\ndef hidden(): ...", "shown()"]
    made = [dict(cell_type="code", source=c) for c in code]
    (tmp_path/"x.ipynb").write_text(json.dumps(dict(cells=made)))
    assert Notebook(tmp_path/"x.ipynb").never_shown == {"hidden"}


def test_the_table_of_figures_can_be_made(monkeypatch):
    "Of what the other tests have parsed"
    monkeypatch.setattr("measure.modules", lambda root: MODULES)
    monkeypatch.setattr("measure.notebooks", lambda root: PAGES)
    figures = measure(ROOT)
    assert figures["conditional expressions inside another"].isdigit() and "longest module" in figures


SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "num_key_value_heads", "max_position_embeddings", "layer_types", "initializer_range"}


def reads_a_size_past_the_text_config(source:str)->list[int]:
    "Lines that read a size from a model's config itself, which has none where a vision tower stands beside the text"
    def is_whole_config(node):
        return getattr(node, "attr", getattr(node, "id", "")) in ("config", "shape")
    return [node.lineno for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute) and node.attr in SIZES and is_whole_config(node.value)]


def test_sizes_of_a_model_are_read_from_its_text_config():
    assert reads_a_size_past_the_text_config("n = model.config.hidden_size\nm = text_config(shape).hidden_size") == [1]
    for path in (ROOT/"sft_nb").rglob("*.py"):
        source = path.read_text()
        if path.name == "layout.py": continue
        assert not reads_a_size_past_the_text_config(source), path
        assert "get_text_config" not in source, f"{path}: text_config of sft_nb.batches.layout asks it"
