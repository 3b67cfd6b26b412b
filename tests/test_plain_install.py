"""An installation without extras. Optional packages are hidden: a `None` in the table of loaded modules
makes both `import name` and `find_spec(name)` answer as if it were not installed.

All are hidden at once in one process that imports every module and trains: a module that needs any of them fails there
as it would with that one missing. Hiding them one at a time would cost an import of torch and TRL for each. What a
*setting* asks of a package is tested for each package alone. `scripts/plain_install.py` does the same with a real
installation, in CI."""
import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from sft_nb.config.load import load_config
from sft_nb.base.installation import SUPPORTED
from sft_nb.base.report import ConfigError

sys.path.insert(0, str(ROOT/"scripts"))
from plain_install import OPTIONAL, ten_lines  # noqa: E402

WITHOUT = [*OPTIONAL, "liger_kernel"]   # which only Linux requires

PROGRAM = """
import importlib, pathlib, sys
for name in sys.argv[1].split(): sys.modules[name] = None
import sft_nb
root = pathlib.Path(sft_nb.__file__).parent
for file in sorted(root.rglob("*.py")):
    if file.name in ("_modidx.py", "__main__.py") or file.parent.name == "configs": continue
    importlib.import_module(".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"))
from sft_nb import evaluate, load_config, train
run = train(load_config("demo", runs_dir=sys.argv[2], max_samples=32, max_steps=2, eval_samples=2, max_new_tokens=4))
evaluate(run)
print(run.state)
"""


def imported_at_the_top(tree:ast.Module)->set[str]:
    "The packages that a module imports when it is imported itself"
    found = set()
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)): continue
        if isinstance(node, ast.Import): found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level: found.add(node.module.split(".")[0])
        nodes += ast.iter_child_nodes(node)
    return found


def test_no_module_needs_an_optional_package_to_be_imported():
    for file in sorted((ROOT/"sft_nb").rglob("*.py")):
        assert not imported_at_the_top(ast.parse(file.read_text())) & {*WITHOUT}, file


def test_every_module_imports_and_a_training_runs_without_the_optional_packages(tmp_path):
    command = [sys.executable, "-c", PROGRAM, " ".join(WITHOUT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "finished"


def use_deepspeed(folder):
    from sft_nb.model.finetuning.parallelism import check_division
    check_division(load_config("demo", deepspeed="zero2"))

def use_trackers(name):
    def use(folder):
        from sft_nb.training.arguments import tracker_names
        tracker_names(load_config("demo", report_to=(name,)))
    return use

def use_gguf(folder):
    from sft_nb.extras.gguf_checks import Gguf
    (folder/"model.gguf").touch()
    Gguf(folder/"model.gguf")


EXTRAS = dict(deepspeed=(use_deepspeed, "deepspeed"), gguf=(use_gguf, "prove"),
              **{name: (use_trackers(name), "track") for name in ("wandb", "tensorboard", "trackio")})


@pytest.mark.parametrize("package", EXTRAS)
def test_what_needs_a_missing_package_names_the_extra_that_has_it(package, monkeypatch, tmp_path):
    use, extra = EXTRAS[package]
    monkeypatch.setitem(vars(sys)["modules"], package, None)
    with pytest.raises(ConfigError, match=rf"installed.*pip install 'sft_nb\[{extra}\]'"): use(tmp_path)


def test_the_way_out_of_a_missing_tracker_is_the_option_that_was_given(monkeypatch):
    from sft_nb.training.arguments import tracker_names
    monkeypatch.setitem(vars(sys)["modules"], "wandb", None)
    for given, fix in ((dict(wandb=True), "leave --wandb out"), (dict(report_to=("wandb",)), "no --report-to")):
        with pytest.raises(ConfigError, match=f"which {next(iter(given))} asks for") as e:
            tracker_names(load_config("demo", **given))
        assert e.value.fix.says("shell").endswith(f", or {fix}")


def test_a_folder_of_the_right_name_is_not_a_package(monkeypatch, tmp_path):
    "./wandb stays behind after a run that was logged offline; Python takes it for a package"
    (tmp_path/"trackio").mkdir()
    monkeypatch.setitem(vars(sys)["modules"], "trackio", None)
    monkeypatch.delitem(vars(sys)["modules"], "trackio")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not (Path(p)/"trackio").exists())])
    assert find_spec("trackio") is not None
    with pytest.raises(ConfigError, match="trackio: it is not installed"): use_trackers("trackio")(tmp_path)


SYSTEM = "import sys; sys.platform = sys.argv[1]; sys.modules['fcntl'] = None; import sft_nb; print('imported')"

@pytest.mark.parametrize("system", ["win32", "cygwin", "emscripten"])
def test_a_system_without_locks_is_refused_by_what_the_readme_says(system):
    done = subprocess.run([sys.executable, "-c", SYSTEM, system], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1] == f"ImportError: {SUPPORTED} This Python runs on {system}."
    assert " ".join(SUPPORTED.split()) in " ".join((ROOT/"README.md").read_text().split())


def steps(*options)->str:
    "What make would do"
    return subprocess.run(["make", "-B", "-n", *options], cwd=ROOT, capture_output=True, text=True).stdout


def test_make_can_install_a_torch_without_cuda():
    cpu = "pip install -q -c constraints.txt torch --index-url https://download.pytorch.org/whl/cpu"
    assert cpu not in steps("demo") and "whl/cpu" not in steps("newest")
    assert steps("demo", "TORCH=cpu").index(cpu) < steps("demo", "TORCH=cpu").index("-e '.[dev,docs]'")
    assert steps("newest", "TORCH=cpu").index("whl/cpu") < steps("newest", "TORCH=cpu").index("--newest")


def test_the_newest_releases_are_installed_without_bounds_and_tested_by_files_that_exist():
    done = steps("newest")
    assert "constraints.txt" not in done and "plain_install.py --newest --environment .venv-newest" in done
    named = re.findall(r"tests/\S+", done)
    assert len(named) > 5 and all((ROOT/name).exists() for name in named)


def test_ci_installs_the_wheel_without_extras():
    assert re.search(r"^\.venv/bin/python scripts/plain_install\.py$", (ROOT/".ci/run").read_text(), re.M)
    jobs = yaml.safe_load((ROOT/".github/workflows/test.yml").read_text())["jobs"]
    steps = [step.get("run", "") for step in jobs["plain"]["steps"]]
    assert "python scripts/plain_install.py" in steps


def test_the_ten_lines_are_the_readmes():
    lines = ten_lines()
    assert "max_steps=5" in lines and all(f"{name}(" in lines for name in ("prepare", "plan", "preflight", "launch"))
