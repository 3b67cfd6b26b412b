"""Imports point down the table of the design, and what must stay light stays light."""
import ast, subprocess, sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT/"sft_nb"
ORDER = "report config formats tasks rows labels data collate pack attention loss precision model generate memory preflight checkpoint run guards train launch merge evaluate panels cli".split()
NO_TORCH = {"report", "config", "formats", "tasks", "rows", "labels", "data", "checkpoint", "run", "launch", "cli"}   # at import
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent.name != "configs" and p.name not in ("__init__.py", "_modidx.py"))


def parts(path:Path)->tuple[str, ...]: return path.relative_to(PACKAGE).with_suffix("").parts


def imports(path:Path):
    "Every sft_nb module that a file imports, also inside its functions"
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (n for n in names if n == "sft_nb" or n.startswith("sft_nb."))


def rank(dotted:tuple[str, ...], names_in_folder:list[str])->tuple[int, int]:
    return ORDER.index(dotted[0]), names_in_folder.index(dotted[1]) if len(dotted) > 1 and dotted[1] in names_in_folder else -1


def inside(folder:str)->list[str]:
    "Modules of a folder in the order of their notebooks"
    order = {}
    for nb in sorted((ROOT/"nbs"/folder).glob("[0-9]*.ipynb")):
        name = nb.stem.split("_", 1)[1]
        order[name] = nb.stem
    return [p.stem for p in sorted((PACKAGE/folder).glob("*.py"), key=lambda p: order.get(p.stem, ""))]


def test_every_module_has_its_place_in_the_table():
    assert {parts(m)[0] for m in MODULES} <= set(ORDER)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: ".".join(parts(p)))
def test_imports_point_down(path):
    me = parts(path)
    for name in imports(path):
        target = tuple(name.split(".")[1:])
        if not target or target[0] == "tasks" and len(target) == 1: continue   # the package itself: version and task folder
        names = inside(me[0]) if len(me) > 1 and target[0] == me[0] else []
        assert rank(target, names) < rank(me, names), f"{'.'.join(me)} imports {name}, which stands above it"


def test_the_arrow_test_can_fail(tmp_path):
    wrong = tmp_path/"x.py"
    wrong.write_text("def f():\n    from sft_nb.train import train\n")
    assert list(imports(wrong)) == ["sft_nb.train"] and rank(("train",), []) > rank(("data",), [])


def python(code:str)->str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", ["import sft_nb", "import sft_nb; dir(sft_nb); sft_nb.__all__", "import sft_nb.config, sft_nb.report, sft_nb.run, sft_nb.tasks.gsm8k, sft_nb.tasks.arithmetic",
                                  "import sft_nb.data", "from sft_nb.cli import main; main(['--help'])", "from sft_nb.cli import main; main(['config', 'gsm8k'])",
                                  "from sft_nb.cli import main; main(['train', '--config', 'gms8k'])", "from sft_nb.cli import main; main(['evaluate', 'runs/nothing'])"])
def test_light_things_load_no_torch(code):
    out = python(code + "\nimport sys; print('heavy:', sorted({'torch', 'transformers', 'trl', 'peft', 'bitsandbytes'} & set(sys.modules)))")
    assert "heavy: []" in out


def test_tyro_help_of_a_command_loads_no_torch():
    python("import sys\nfrom sft_nb.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit as e: assert e.code == 0\nassert 'torch' not in sys.modules")


def test_every_public_name_is_there_and_a_function_wins_over_its_module():
    python("import sft_nb.train, sft_nb.generate\nfrom sft_nb import *\nimport sft_nb\n"
           "assert callable(train) and callable(generate) and callable(evaluate)\nassert all(getattr(sft_nb, n) is not None for n in sft_nb.__all__)")


def test_an_unknown_name_is_an_attribute_error():
    import sft_nb
    with pytest.raises(AttributeError, match="no attribute 'nothing'"): sft_nb.nothing
