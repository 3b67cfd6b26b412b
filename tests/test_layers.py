"""Imports only point to earlier parts, and light modules stay light."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PARTS = ("base config rows tasks tokens batches model planning workbench checks runs training evaluation proof panels "
         "cli extras").split()
LIGHT = ("base config rows tasks tokens runs cli training.launch "
         "extras.unread_tools extras.shell_scripts extras.other_tools extras.gguf_bases extras.sharding "
         "extras.deepspeed").split()
HEAVY = {"torch", "transformers", "trl", "peft", "bitsandbytes"}
LISTED = {("tasks.core", "tasks"),   # the files of a folder are listed, nothing in it is imported
          ("base.extensions", "extras"),   # the one way to the optional parts, which works without them
          ("base.extensions", "panels")}   # and to the panel of a run
BY_STRING = {   # imports of what no import statement names: the package itself gives names from any part
    "__init__": ["import_module"] * 2,   # public names, loaded on first use; modules of older versions
    "config.__init__": ["import_module"],   # names of `config.load`, as in older versions
    "base.installation": ["import_module"],   # libraries, loaded with the garbage collector off
    "config.files": ["__import__", "import_module"],   # what a config file, a user's program, imports
    "tasks.core": ["import_module"] * 2,   # a user's `module:attribute`; one of the listed files of a folder
    "model.attention": ["import_module"],   # a flash-attn package
    "model.finetuning.optimizer": ["import_module"],   # the package of an optimiser
    "extras.__init__": ["import_module"]}   # an optional part, when the core first asks for it
PACKAGE = ROOT/"sft_nb"


def dotted(path:Path, package:Path=PACKAGE)->str: return ".".join(path.relative_to(package).with_suffix("").parts)


def module_of(notebook:Path)->str:
    "`nbs/06_model/09_finetuning/03_optimizer.ipynb` -> `model.finetuning.optimizer`"
    return ".".join(re.sub(r"^\d\d_", "", name) for name in notebook.relative_to(ROOT/"nbs").with_suffix("").parts)


def chapters()->list[str]:
    "Modules in the order of their notebooks: parts, then numbers in a part"
    found = []
    for part in PARTS:
        top = [p for p in (ROOT/"nbs").iterdir() if re.fullmatch(rf"\d\d_{part}(\.ipynb)?", p.name)]
        for p in top:
            inside = sorted(p.rglob("[0-9]*.ipynb"))
            found += [module_of(q) for q in inside] if p.is_dir() else [part]
    return found


CHAPTERS = chapters()
MODULES = sorted(p for p in PACKAGE.rglob("*.py")
                 if p.parent.name != "configs" and p.name not in ("__init__.py", "__main__.py", "_modidx.py"))


def place(module:str)->tuple[int, int]:
    """The place of `tokens.encode`: its part and number in the part; a part itself counts as its last module

    The settings of a part, which stand beside what reads them, come before those of all parts."""
    part, _, name = module.partition(".")
    if name == "settings" and part != "config": return PARTS.index("config"), .5   # before config.settings
    inside = [m for m in CHAPTERS if m.split(".")[0] == part]
    return PARTS.index(part), inside.index(module) if module in inside else len(inside)


def imports(path:Path, package:Path=PACKAGE):
    "Our modules that a file imports, including relative imports and those inside functions: `tokens.encode`"
    here = ["sft_nb", *dotted(path, package).split(".")]
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        if isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level] if node.level else []
            full = ".".join([*base, *filter(None, [node.module])])
            names = [f"{full}.{a.name}" for a in node.names]
        yield from (ours(name) for name in names if name.split(".")[0] == "sft_nb")


def ours(name:str)->str:
    "The module in which `sft_nb.tokens.encode.end_ids`, or the public `sft_nb.prepare`, stands; the package itself: ''"
    import sft_nb
    parts = name.split(".")[1:]
    if len(parts) == 1 and parts[0] in sft_nb._HOME: return sft_nb._HOME[parts[0]]
    for n in (3, 2, 1):
        module = ".".join(parts[:n])
        if module in CHAPTERS or module in PARTS: return module
    return ""


def by_string(tree)->list[str]:
    "Imports by string, also of one of our modules as a library, and of the whole package"
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): found += [a.name for a in node.names if a.name.split(".")[0] == "sft_nb"]
        if not isinstance(node, ast.Call): continue
        name = ast.unparse(node.func).split(".")[-1]
        texts = [n.value for arg in node.args for n in ast.walk(arg) if isinstance(n, ast.Constant)]
        is_ours = any(isinstance(text, str) and text.startswith("sft_nb.") for text in texts)
        if name in ("import_module", "__import__") or name == "load_libraries" and is_ours: found.append(name)
    return found


def pointing_up(path:Path, package:Path=PACKAGE)->list[str]:
    "Imports of modules that do not come earlier"
    me = dotted(path, package)
    above = [name for name in imports(path, package) if name and place(name) >= place(me)]
    return [f"{me} imports {name}" for name in above if (me, name) not in LISTED]


def test_every_module_is_a_chapter_and_every_part_is_in_the_list():
    assert sorted(map(dotted, MODULES)) == sorted(CHAPTERS)
    numbered = [p.name.removesuffix(".ipynb").split("_", 1) for p in (ROOT/"nbs").iterdir() if p.name[0].isdigit()]
    numbers = {part: int(number) for number, part in numbered}
    assert sorted(numbers) == sorted(PARTS)
    in_order = [numbers[part] for part in PARTS]
    assert in_order == sorted(in_order) and {*in_order} == {*range(17)}   # those before config share 0


def test_numbers_in_a_part_have_no_gap():
    for folder in (p for p in (ROOT/"nbs").rglob("[0-9]*") if p.is_dir()):
        numbers = [int(p.stem.split("_")[0]) for p in sorted(folder.glob("[0-9]*"))]
        assert numbers == [*range(len(numbers))], folder.name


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down(path): assert pointing_up(path) == []


@pytest.mark.parametrize("code, seen", [
    ("importlib.import_module(name)", ["import_module"]), ("def f(): import_module('sft_nb.a').b", ["import_module"]),
    ("__import__('sft_nb')", ["__import__"]), ("import sft_nb", ["sft_nb"]),
    ("def f(): import sft_nb.a as b", ["sft_nb.a"]),
    ("load_libraries('peft', 'sft_nb.a')", ["load_libraries"]), ("load_libraries('peft')", []),
    ("from sft_nb.a import b", []), ("from .. import __version__", []), ("import os, json", [])])
def test_an_import_by_string_is_seen(code, seen): assert by_string(ast.parse(code)) == seen


def test_no_module_is_imported_by_string():
    paths = [*MODULES, PACKAGE/"__init__.py", *PACKAGE.glob("*/__init__.py")]
    found = {dotted(path): sorted(names) for path in paths if (names := by_string(ast.parse(path.read_text())))}
    assert found == BY_STRING


def test_no_private_name_is_imported_from_another_module():
    "The commands are one part in three files"
    found = []
    for path in MODULES:
        if path.parent.name == "cli": continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom): continue
            is_ours = node.level or (node.module or "").startswith("sft_nb")
            found += [f"{dotted(path)}: {n}" for name in node.names if is_ours and re.match("_[^_]", n := name.name)]
    assert found == []


BELOW_THE_WORKBENCH = "rows tokens batches model planning optimizer.py".split()


def configs_for_two_settings(tree)->list[str]:
    "Functions that are given a config, and only read one or two of its settings"
    found = []
    for f in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        if not any(a.arg == "cfg" for a in [*f.args.args, *f.args.kwonlyargs]): continue
        named = [n for n in ast.walk(f) if isinstance(n, ast.Name) and n.id == "cfg"]
        read = [n for n in ast.walk(f) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "cfg"]
        read = [n for n in read if n.attr != "values"]   # `cfg.values(g)` hands on as many as `g` takes
        if len(named) == len(read) and len({n.attr for n in read}) <= 2: found.append(f.name)
    return found


@pytest.mark.parametrize("code, seen", [
    ("def f(cfg): return cfg.a + cfg.b", ["f"]), ("def f(*, cfg): return cfg.a", ["f"]),
    ("def f(cfg): return cfg.a + cfg.b + cfg.c", []), ("def f(cfg): return g(cfg, cfg.a)", []),
    ("def f(cfg):\n    h = cfg\n    return h.a", []), ("def f(cfg): return g(**cfg.values(g))", []),
    ("def f(a, b): return a + b", [])])
def test_what_a_function_does_with_a_config(code, seen): assert configs_for_two_settings(ast.parse(code)) == seen


def test_functions_below_the_workbench_take_values_where_they_need_few():
    below = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] in BELOW_THE_WORKBENCH]
    found = {dotted(path): names for path in below if (names := configs_for_two_settings(ast.parse(path.read_text())))}
    assert found == {}


def calls_without_their_settings(trees)->list[str]:
    "Calls of functions that are elsewhere called with `**cfg.values(f)`, but which are given only some of the settings"
    from sft_nb.config.settings import SETTINGS
    defined, calls, found = {}, [], []
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            defined[node.name] = {a.arg for a in node.args.kwonlyargs} & SETTINGS.keys()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name): calls.append(node)
    def values_of(call)->list[str]:
        "The functions whose settings a call is given: f for `**cfg.values(f)`"
        stars = [k.value for k in call.keywords if k.arg is None and isinstance(k.value, ast.Call)]
        return [ast.unparse(s.args[0]) for s in stars if getattr(s.func, "attr", "") == "values" and s.args]
    by_settings = {call.func.id for call in calls if values_of(call)}
    for call in calls:
        name, given = call.func.id, {k.arg for k in call.keywords}
        if name in by_settings and values_of(call) != [name] and not defined.get(name, set()) <= given:
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("code, seen", [
    ("f(1, **cfg.values(f))", 0), ("f(1, **cfg.values(f)); f(1)", 1), ("f(1, **cfg.values(f)); f(1, seed=3)", 1),
    ("f(1, **cfg.values(f)); f(1, seed=3, dtype=4)", 0), ("f(1, **cfg.values(g))", 1), ("f(1)", 0)])
def test_a_call_that_leaves_a_setting_at_its_default_is_seen(code, seen):
    assert len(calls_without_their_settings([ast.parse(f"def f(x, *, seed=1, dtype='auto'): pass\n{code}")])) == seen


def test_functions_that_take_settings_are_given_all_of_them():
    "One that is left out would silently be the default"
    assert calls_without_their_settings(ast.parse(path.read_text()) for path in MODULES) == []


UP = {   # in tokens/encode.py
    "relative, another part": "from ..training.train import train",
    "relative, a module of another part": "from ..training import train",
    "relative, the folder": "from .prepare import prepare",
    "relative, a module of the folder": "from . import prepare",
    "absolute, another part": "from sft_nb.training.train import train",
    "absolute, a module of another part": "from sft_nb.training import train",
    "absolute, the folder": "from sft_nb.tokens.prepare import prepare",
    "a plain import": "import sft_nb.training.train",
    "a public name": "from sft_nb import train",
    "a whole part": "import sft_nb.training",
    "itself": "from .encode import encode",
    "its own part": "from .. import tokens",
}


@pytest.mark.parametrize("line", UP.values(), ids=UP)
@pytest.mark.parametrize("text", ["{}\n", "def f():\n    {}\n"], ids=["module", "function"])
def test_an_arrow_that_points_up_is_seen(tmp_path, text, line):
    wrong = tmp_path/"tokens/encode.py"
    wrong.parent.mkdir()
    wrong.write_text(text.format(line))
    assert len(pointing_up(wrong, tmp_path)) == 1


def test_settings_of_a_part_import_nothing_of_it(tmp_path):
    wrong = tmp_path/"tokens/settings.py"
    wrong.parent.mkdir()
    above = ["from .turns import x", "from ..rows.settings import RowSettings", "from ..config import settings"]
    wrong.write_text("\n".join(["from ..config.setting import Setting", *above]))
    assert len(pointing_up(wrong, tmp_path)) == 3


@pytest.mark.parametrize("line", [
    "from ..base.report import SftError",
    "from ..model.settings import ModelSettings",
    "from .turns import split_conversation",
    "from sft_nb import SftError",
    "from sft_nb.tokens import turns",
    "from ..base import report",
    "import numpy, os.path",
    "from sft_nb import __version__",
])
def test_an_arrow_that_points_down_is_none_of_them(tmp_path, line):
    right = tmp_path/"tokens/encode.py"
    right.parent.mkdir()
    right.write_text(line)
    assert pointing_up(right, tmp_path) == []


def python(code:str)->str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SEEN = f"\nimport sys\nprint('heavy:', sorted({HEAVY} & set(sys.modules)))"


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_load_no_torch(part):
    modules = [m for m in CHAPTERS if m == part or m.startswith(f"{part}.")]
    assert modules and "heavy: []" in python("\n".join(f"import sft_nb.{m}" for m in modules) + SEEN)


@pytest.mark.parametrize("code", [
    "import sft_nb; dir(sft_nb); sft_nb.__all__",
    "from sft_nb.cli import main; main(['--help'])",
    "from sft_nb.cli import main; main(['config', 'gsm8k'])",
    "from sft_nb.cli import main; main(['train', '--config', 'gms8k'])",
    "from sft_nb.cli import main; main(['evaluate', 'runs/nothing'])",
    "from sft_nb.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit as e: assert e.code == 0",
    "from sft_nb.cli import main\nmain(['runs'])\nassert main(['train', '--learning-rat', '1'])",
    "from sft_nb.cli import main\n"
    "for name in ('data', 'plan', 'check', 'train'): assert main([name, '--train-file', 'missing.csv'])",
])
def test_light_commands_load_no_torch(code): assert "heavy: []" in python(code + SEEN)


def test_every_public_name_is_there(warm_processes):
    python("from sft_nb import *\nimport sft_nb\n"
           "assert all(getattr(sft_nb, name) is globals()[name] is not None for name in sft_nb.__all__)\n"
           "assert all(getattr(sft_nb, name) is not None for name in sft_nb._HOME)")


LATER = ("torch._dynamo torch._inductor.compile_fx torch.distributed.tensor transformers.modeling_utils trl peft "
         "bitsandbytes accelerate datasets pandas scipy.stats matplotlib wandb").split()


def test_a_star_import_loads_no_trainer():
    "Torch is loaded, but none of what only a training, a score or a picture needs"
    seen = f"\nimport sys\nprint('later:', sorted(set({LATER}) & set(sys.modules)))"
    assert "later: []" in python("from sft_nb import *" + seen)


def methods_of_a_run()->set[str]:
    "The methods that all chapters add"
    trees = (ast.parse(file.read_text()) for file in PACKAGE.glob("runs/*.py"))
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.args.args]
    return {f.name for f in functions if f.args.args[0].arg == "self" and f.args.args[0].annotation is not None
            and ast.unparse(f.args.args[0].annotation) == "Run"}


def test_a_run_has_all_of_its_methods_whatever_else_is_imported():
    methods = methods_of_a_run()
    assert len(methods) > 25 and "resume" in methods
    missing = f"print('missing:', sorted(m for m in {sorted(methods)} if not hasattr(Run, m)))"
    assert "missing: []" in python(f"from sft_nb.runs.directory import Run; {missing}")


def bound(init:Path)->set[str]:
    "Names that the `__init__` of a folder gives to it"
    tree = ast.parse(init.read_text())
    taken = [a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names]
    return {*taken, *(t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets)}


def test_no_public_name_hides_a_module_or_a_folder():
    import sft_nb
    assert {p.stem for p in PACKAGE.iterdir()}.isdisjoint(sft_nb.__all__)
    for init in PACKAGE.glob("*/__init__.py"):
        assert {p.stem for p in init.parent.iterdir()}.isdisjoint(bound(init)), init


def reads_modules(tree)->int:
    "How often `sys.modules` is asked whether one of three is loaded, or a test hides a package from it"
    def is_it(node)->bool: return isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"
    def named(node)->bool: return isinstance(node, ast.Constant) and node.value in ("wandb", "torch", "bitsandbytes")
    gets = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "sys.modules.get"]
    asks = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and is_it(n.comparators[0])]
    hides = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "monkeypatch.setitem"
             and is_it(n.args[0]) and ast.unparse(n.args[2]) == "None"]
    return sum(named(n.args[0]) for n in gets) + sum(named(n.left) for n in asks) + len(hides)


def test_nothing_replaces_a_module():
    "But for warm.py, which runs a program as __main__, as the interpreter does"
    for path in (p for folder in ("sft_nb", "tests", "scripts", "benchmarks") for p in (ROOT/folder).rglob("*.py")):
        if path.name == "warm.py": continue
        tree = ast.parse(path.read_text())
        used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "sys.modules"]
        assert len(used) == reads_modules(tree), f"{path.relative_to(ROOT)} does more with sys.modules than look"


@pytest.mark.parametrize("code, seen", [
    ("'torch' in sys.modules", 1), ("sys.modules.get('wandb')", 1), ("sys.modules['torch']", 0),
    ("sys.modules.pop('torch')", 0), ("monkeypatch.setitem(sys.modules, 'gguf', None)", 1),
    ("monkeypatch.setitem(sys.modules, 'gguf', fake)", 0),
    ("sys.modules[__name__].__class__ = 1", 0), ("'numpy' in sys.modules", 0),
])
def test_only_looking_is_allowed(code, seen): assert reads_modules(ast.parse(code)) == seen


def test_an_unknown_name_is_an_attribute_error():
    import sft_nb
    with pytest.raises(AttributeError, match="no attribute 'nothing'"): _ = sft_nb.nothing
