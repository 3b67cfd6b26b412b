"""Methods and private names of its parents that the trainer overrides or uses: each is listed with its reason."""
import ast
import inspect
import json
import re

import pytest
from conftest import ROOT
from transformers import Trainer
from trl import SFTTrainer

from sft_nb.training import trainer
from sft_nb.training.trainer import PARENTS_NAMES, SupervisedTrainer

PARENTS = dict(transformers=Trainer, trl=SFTTrainer)


def is_private(name:str)->bool: return name.startswith("_") and not name.startswith("__")


def is_trainer(node)->bool:
    "`self`, `super(...)`, `trainer` or `self.trainer`"
    if isinstance(node, ast.Name): return node.id in ("self", "trainer")
    if isinstance(node, ast.Call): return getattr(node.func, "id", "") == "super"
    return isinstance(node, ast.Attribute) and node.attr == "trainer"


def touched(source:str)->set[str]:
    "Private names of a trainer that a source reads, writes or overrides"
    tree = ast.parse(source)
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_trainer(n.value)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    methods = {f.name for f in functions if [a.arg for a in f.args.args[:1]] == ["self"]}
    return set(filter(is_private, used | methods))


@pytest.mark.parametrize("name", PARENTS_NAMES)
def test_a_parent_has_the_name(name):
    "An upgrade that renames it fails here, and not in a training"
    parent, _, reason = PARENTS_NAMES[name].partition(": ")
    assert reason and re.search(rf"\b{name}\b", inspect.getsource(inspect.getmodule(PARENTS[parent])))


def test_every_private_name_of_a_parent_is_listed():
    own = {name for name in vars(SupervisedTrainer) if is_private(name) and not hasattr(SFTTrainer, name)}
    found = touched(inspect.getsource(trainer)) - own
    assert sorted(found) == sorted(PARENTS_NAMES)


@pytest.mark.parametrize("source, names", [
    ("def f(self): return self._tr_loss", {"_tr_loss"}),
    ("def f(self): self._metrics['train'] = 1", {"_metrics"}),
    ("def f(self): return super(A, self)._save()", {"_save"}),
    ("def _save(self): pass", {"_save"}),
    ("def f(trainer): return trainer._x", {"_x"}),
    ("def f(model): return model.config._attn", set()),
])
def test_what_is_touched_is_seen(source, names): assert touched(source) == names


def test_the_chapter_lists_each_overridden_method_with_its_reason():
    "An upgrade that drops or renames one of them fails here, too"
    chapter = json.loads((ROOT/"nbs/11_training/05_trainer.ipynb").read_text(encoding="utf-8"))
    prose = "\n\n".join("".join(cell["source"]) for cell in chapter["cells"] if cell["cell_type"] == "markdown")
    table = prose.partition("| overridden method | why |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()]
    assert all(len(row) == 2 and len(row[1].split()) > 3 for row in rows)
    listed = [name for methods, _ in rows for name in re.findall("`(\\w+)`", methods)]
    ours = SupervisedTrainer.__mro__[:SupervisedTrainer.__mro__.index(SFTTrainer)]
    defined = {name for kind in ours for name in vars(kind) if not name.startswith("__")}
    assert sorted(listed) == sorted(name for name in defined if hasattr(SFTTrainer, name))
