"""Every setting is read somewhere, every number has limits, and a new setting is one line."""
import ast
import os
import shutil
import subprocess
import sys
import typing

from conftest import ROOT

from sft_nb.settings import settings
from sft_nb.training.arguments import _SAME

PACKAGE = ROOT/"sft_nb"
SAY_WHAT_THERE_IS = {p.name for p in PACKAGE.glob("foreign_*.py")} | {
    "settings.py", "config_files.py", "config.py", "options.py"}   # and do nothing with it


def unread(names:list[str])->list[str]:
    "Those that no module reads from a config, and that are not handed to the trainer"
    read = set(_SAME)
    for path in PACKAGE.rglob("*.py"):
        if path.name in SAY_WHAT_THERE_IS or path.parent.name == "configs": continue
        read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return [name for name in names if name not in read]


def test_every_setting_is_read():
    names = [f.name for f in settings()]
    assert unread([*names, "lr_min_ratio"]) == ["lr_min_ratio"]   # as one that was added and forgotten would be


def test_every_number_has_limits():
    numbers = [f for f in settings() if {int, float} & {f.type, *typing.get_args(f.type)}]
    assert len(numbers) > 30 and [f.name for f in numbers if "at_least" not in f.metadata] == []


DOES_IT = """
from pathlib import Path
from sft_nb.config import comments, load_config
from sft_nb.report import ConfigError
from sft_nb.training.arguments import training_arguments
cfg = load_config("demo", torch_empty_cache_steps=50)
assert training_arguments(cfg, Path("run")).torch_empty_cache_steps == 50
assert comments()["torch_empty_cache_steps"] == "steps until the GPU's cache is given back"
try: load_config("demo", torch_empty_cache_steps=0)
except ConfigError as e: assert "torch_empty_cache_steps is at least 1" in str(e)
else: raise AssertionError("0 is accepted")
"""


def test_a_new_setting_is_one_line(tmp_path):
    "As CONTRIBUTING says: checked, shown in the help, and given to the trainer"
    shutil.copytree(PACKAGE, tmp_path/"sft_nb", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (tmp_path/"sft_nb/assets").symlink_to(PACKAGE/"assets")
    schema, anchor = tmp_path/"sft_nb/settings.py", "    max_grad_norm:float="
    line = "torch_empty_cache_steps:int|None=bounded(None, at_least=1)"
    assert line in (ROOT/"CONTRIBUTING.md").read_text()
    text = schema.read_text().replace(
        anchor, f"    {line}  # steps until the GPU's cache is given back\n{anchor}")
    schema.write_text(text)
    env = os.environ | dict(PYTHONPATH=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", DOES_IT], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = subprocess.run([sys.executable, "-m", "sft_nb", "train", "--help"], env=env, cwd=tmp_path,
                          capture_output=True, text=True)
    assert "--torch-empty-cache-steps" in shown.stdout, shown.stderr
