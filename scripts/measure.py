"""Measure the readability of the code, one column per tree. `tests/test_style.py` asserts the goals.

    python scripts/measure.py                   # this repository
    python scripts/measure.py OLD_CLONE .       # before and after
"""
import ast
import json
import re
import statistics
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 120
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Source:
    "A Python file: its text, its lines and its tree"
    path:Path

    @cached_property
    def text(self)->str: return self.path.read_text(encoding="utf-8")
    @cached_property
    def lines(self)->list[str]: return self.text.splitlines()
    @cached_property
    def tree(self)->ast.Module: return ast.parse(self.text)

    @property
    def too_wide(self)->list[str]:
        "Lines over the width, except for `__all__`, which nbdev wraps in its own way"
        long = [(n, line) for n, line in enumerate(self.lines, 1) if len(line) > WIDTH]
        return [f"line {n}: {len(line)} characters" for n, line in long if not line.startswith("__all__ =")]

    def nodes(self, *kinds)->list:
        "Every node of these kinds, including those inside functions"
        return [n for n in ast.walk(self.tree) if isinstance(n, kinds)]


@dataclass
class Cell:
    "A cell of a notebook"
    kind:str        # code or markdown
    source:str

    @property
    def exported(self)->bool: return self.kind == "code" and bool(re.search(r"^#\|\s*exports?\b", self.source, re.M))
    @property
    def lines(self)->list[str]: return self.source.strip().splitlines()

    @cached_property
    def tree(self)->ast.Module:
        "The syntax tree of the code without magics"
        return ast.parse(re.sub(r"^\s*[%!].*", "", self.source, flags=re.M)) if self.kind == "code" else ast.parse("")

    @property
    def definitions(self)->list: return [n for n in self.tree.body if isinstance(n, DEFINITIONS)]

    @property
    def words(self)->set[str]:
        "Names that the code uses"
        named = {n.id for n in ast.walk(self.tree) if isinstance(n, ast.Name)}
        return named | {n.attr for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}


@dataclass
class Notebook:
    "A notebook's cells"
    path:Path

    @cached_property
    def cells(self)->list[Cell]:
        cells = json.loads(self.path.read_text(encoding="utf-8"))["cells"]
        return [Cell(c["cell_type"], "".join(c["source"])) for c in cells]

    @property
    def code(self)->list[Cell]: return [c for c in self.cells if c.kind == "code"]
    @property
    def defining(self)->list[Cell]: return [c for c in self.cells if c.exported and c.definitions]

    @property
    def module(self)->str:
        "`tokens.encode`; empty for a page without a module"
        found = re.search(r"^#\|\s*default_exp\s+(\S+)", "\n".join(c.source for c in self.code), re.M)
        return found[1] if found else ""

    @property
    def public(self)->set[str]:
        "The public names: those in the module's `__all__`"
        statements = [s for c in self.code if c.exported for s in c.tree.body]
        names = {s.name for s in statements if isinstance(s, DEFINITIONS) and not _patches(s)}
        assigned = [s for s in statements if isinstance(s, (ast.Assign, ast.AnnAssign))]
        targets = [t for s in assigned for t in getattr(s, "targets", [getattr(s, "target", None)])]
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
        return {name for name in names if not name.startswith("_")}

    @property
    def never_shown(self)->set[str]:
        "Public names that no example of this notebook uses"
        shown = set().union(*(c.words for c in self.code if not c.exported))
        return self.public - shown


def _patches(definition)->bool:
    "Is this a method added with fastcore's `patch`?"
    return any("patch" in ast.unparse(d) for d in definition.decorator_list)


def modules(root:Path)->list[Source]:
    "The modules generated from notebooks"
    paths = sorted((root/"sft_nb").rglob("*.py"))
    made = [p for p in paths if p.name not in ("__init__.py", "_modidx.py") and p.parent.name != "configs"]
    return [Source(p) for p in made]


def notebooks(root:Path)->list[Notebook]:
    "Every notebook: chapters and pages"
    paths = sorted((root/"nbs").rglob("*.ipynb"))
    return [Notebook(p) for p in paths if ".ipynb_checkpoints" not in p.parts]


def size(source:Source, node)->int:
    "Characters of a definition without indentation"
    return sum(len(line.strip()) for line in source.lines[node.lineno - 1:node.end_lineno])


def sizes(source:Source)->dict[str,int]:
    "`encode.py:12 encode` -> characters"
    where = "{}:{} {}"
    functions = source.nodes(*FUNCTIONS)
    return {where.format(source.path.name, n.lineno, n.name): size(source, n) for n in functions}


def nested_choices(source:Source)->list[int]:
    "Lines of nested conditional expressions"
    def holds(node)->bool: return sum(isinstance(n, ast.IfExp) for n in ast.walk(node)) > 1
    return [n.lineno for n in source.nodes(ast.IfExp) if holds(n)]


def calls(source:Source, *names:str)->bool:
    "Does the source call a function with one of these names?"
    called = {getattr(c.func, "id", getattr(c.func, "attr", "")) for c in source.nodes(ast.Call)}
    return not called.isdisjoint(names)


def computes_a_loss(source:Source)->bool:
    "Does the source compute the loss of a batch with a model or its head?"
    for call in source.nodes(ast.Call):
        given = {k.arg: k.value for k in call.keywords}
        asked = isinstance(given.get("supervised"), ast.Constant) and given["supervised"].value is True
        head = getattr(call.func, "attr", "") == "loss" and "max_logits_mib" in given
        if asked or head: return True
    return False


def percentile(values:list[int], share:float)->int: return sorted(values)[int(share * (len(values) - 1))]


def measure(root:Path)->dict[str,str]:
    "Name of a measure -> its formatted value"
    made, books = modules(root), notebooks(root)
    lines = [line for s in made for line in s.lines if line.strip()]
    functions = [n for s in made for n in sizes(s).values()]
    cells = [c for b in books for c in b.defining]
    public = [n for b in books for n in b.public]
    long = [line for s in made for line in s.too_wide]
    choices = sum(len(s.nodes(ast.IfExp)) for s in made)
    longest = max(made, key=lambda s: len(s.lines))
    figures = {
        "modules": f"{len(made)}",
        "lines, empty ones not counted": f"{len(lines):,}",
        f"lines over {WIDTH}": f"{len(long)} ({len(long) / len(lines):.1%})",
        "characters in a function: median": f"{statistics.median(functions):.0f}",
        "characters in a function: 90%": f"{percentile(functions, .9)}",
        "characters in a function: longest": f"{max(functions)}",
        "conditional expressions per 1000 lines": f"{1000 * choices / len(lines):.0f}",
        "conditional expressions inside another": f"{sum(len(nested_choices(s)) for s in made)}",
        "defining cells over 25 lines": _share(sum(len(c.lines) > 25 for c in cells), cells),
        "defining cells over 40 lines": _share(sum(len(c.lines) > 40 for c in cells), cells),
        "defining cells with one definition": _share(sum(len(c.definitions) == 1 for c in cells), cells),
        "public names never shown": _share(sum(len(b.never_shown) for b in books), public),
        "longest module": f"{longest.path.relative_to(root/'sft_nb')}, {len(longest.lines)} lines",
    }
    asked = {
        "call choose_device or choose_dtype": lambda s: calls(s, "choose_device", "choose_dtype"),
        "build a collator": lambda s: calls(s, "DataCollatorForCausalLM", "DataCollatorFlattening", "collator_for"),
        "compute the loss of a batch": computes_a_loss,
    }
    return figures | {f"modules that {what}": f"{sum(map(does, made))}" for what, does in asked.items()}


def _share(n:int, of:list)->str: return f"{n} of {len(of)} ({n / len(of):.0%})"


def main(*trees:str):
    columns = [measure(Path(t).resolve()) for t in trees or (ROOT,)]
    print(f"| | {' | '.join(trees or ('this tree',))} |\n|---|{'---|' * len(columns)}")
    for what in columns[0]: print(f"| {what} | {' | '.join(c[what] for c in columns)} |")


if __name__ == "__main__": main(*sys.argv[1:])
