"""What is published: an sdist, a wheel that is built from it, and what the wheel carries."""
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT

TOP = "setup.py settings.ini pyproject.toml MANIFEST.in README.md LICENSE constraints.txt".split()


def ran(*command, cwd, **env)->str:
    call = [sys.executable, *map(str, command)]
    done = subprocess.run(call, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "The wheel that a stranger builds: from the sdist, outside of this repository"
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for file in TOP: shutil.copy(ROOT/file, tree)
    shutil.copytree(ROOT/"sft_nb", tree/"sft_nb", ignore=shutil.ignore_patterns("__pycache__"))
    ran("setup.py", "-q", "sdist", "-d", out, cwd=tree)
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist: sdist.extractall(out, filter="data")
    source = next(p for p in out.iterdir() if p.is_dir())
    ran("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    return next(out.glob("*.whl"))


def test_the_wheel_carries_every_module_the_base_and_the_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    here = [p.relative_to(ROOT) for p in (ROOT/"sft_nb").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert len(here) > 60 and {str(p) for p in here} <= names


def test_the_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = ("import sft_nb\nfrom sft_nb import *\n"
            "data = prepare(load_config('demo', max_samples=4))\n"
            "print(sft_nb.__file__, config_names(), [data.train.n_kept])")
    said = ran("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert said.startswith(str(tmp_path)) and "demo" in said and "[4]" in said


def test_the_docs_find_the_source_of_a_name(wheel):
    "nbdev asks installed packages for their index"
    with zipfile.ZipFile(wheel) as z:
        entries = z.read(next(n for n in z.namelist() if n.endswith("entry_points.txt"))).decode()
        index = {}
        exec(z.read("sft_nb/_modidx.py"), index)
    assert "[nbdev]\nsft_nb = sft_nb._modidx:d" in entries
    assert "[console_scripts]\nsft_nb = sft_nb.cli:main" in entries.replace("sft_nb=", "sft_nb = ")
    assert "sft_nb.tokens.encode.encode" in index["d"]["syms"]["sft_nb.tokens.encode"]
