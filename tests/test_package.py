"""The published package: an sdist, a wheel built from it, and the content of the wheel."""
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser

import pytest
import yaml
from conftest import ROOT

TOP = "setup.py settings.ini pyproject.toml MANIFEST.in README.md LICENSE constraints.txt".split()


def ini():
    "settings.ini"
    read = ConfigParser(delimiters=["="])
    read.read(ROOT/"settings.ini")
    return read["DEFAULT"]


def ran(*command, cwd, **env)->str:
    call = [sys.executable, *map(str, command)]
    done = subprocess.run(call, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    "A wheel built from the sdist, outside this repository"
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


def test_the_package_index_gets_whole_addresses(wheel):
    with zipfile.ZipFile(wheel) as z:
        metadata = z.read(next(n for n in z.namelist() if n.endswith("METADATA"))).decode()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) >= 13 and [u for u in links if not u.startswith(("https://", "#"))] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", metadata)
    assert pictures and all(u.startswith("https://raw.githubusercontent.com/") for u in pictures)
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.M))
    assert extras == {"lab", "track", "deepspeed", "flash", "hybrid", "prove", "smollm2", "excel",
                      "search", "all", "dev", "docs"}


def test_the_package_index_is_told_who_may_use_it_where(wheel):
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        metadata = z.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "License-Expression: Apache-2.0\n" in metadata and any(n.endswith("licenses/LICENSE") for n in names)
    urls = dict(re.findall(r"^Project-URL: (\w+), (.+)$", metadata, re.M))
    assert {*urls} == {"Documentation", "Source", "Issues", "Changelog"}
    tested = WORKFLOWS["test"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r"^Classifier: Programming Language :: Python :: (3\..+)$", metadata, re.M)
    assert named == tested


def test_a_release_has_one_version(tmp_path):
    version = ini()["version"]
    assert yaml.safe_load((ROOT/"CITATION.cff").read_text())["version"] == version
    check, = [step["run"] for step in WORKFLOWS["release"]["jobs"]["build"]["steps"] if "tag" in step.get("name", "")]
    for tag, code in ((f"v{version}", 0), (version, 0), (f"v{version}1", 1), ("v9", 1)):
        env = os.environ | dict(GITHUB_REF_NAME=tag)
        assert subprocess.run(["bash", "-c", check], cwd=ROOT, env=env).returncode == code, tag


WORKFLOWS = {p.stem: yaml.safe_load(p.read_text()) for p in (ROOT/".github/workflows").glob("*.yml")}


@pytest.mark.parametrize("name", ["test", "docs", "release"])
def test_a_workflow_may_read_and_runs_once(name):
    said = WORKFLOWS[name]
    assert said["permissions"] == {"contents": "read"} and said["concurrency"]["group"]
    for job in said["jobs"].values(): assert job["steps"] and job["runs-on"]


def test_what_is_published_was_tested():
    started = WORKFLOWS["docs"][True]   # YAML reads `on` as true
    assert started["workflow_run"]["workflows"] == [WORKFLOWS["test"]["name"]] and "push" not in started
    assert WORKFLOWS["docs"]["jobs"]["publish"]["needs"] == "build"
    steps = WORKFLOWS["test"]["jobs"]["test"]["steps"]
    assert [s["run"] for s in steps if "run" in s] == [".ci/run"] and (ROOT/".ci/run").is_file()
    assert "id-token" in WORKFLOWS["release"]["jobs"]["publish"]["permissions"]


def test_each_extra_is_resolved_with_the_newest_and_with_the_oldest_versions():
    named = {k.removesuffix("_requirements") for k in ini() if k.endswith("_requirements")}
    matrix = WORKFLOWS["test"]["jobs"]["resolve"]["strategy"]["matrix"]
    assert {*matrix["extra"]} == named - {"dev"} | {"all"} and {*matrix["resolution"]} == {"highest", "lowest-direct"}


def test_the_image_is_pinned_and_runs_as_a_user():
    lines = [x for x in (ROOT/"Dockerfile").read_text().splitlines() if x and not x.startswith("#")]
    base, = [x for x in lines if x.startswith("FROM ")]
    assert re.fullmatch(r"FROM nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d+\.\d+", base)
    assert "USER me" in lines and "USER root" not in lines and lines.index("USER me") < len(lines) - 5
    assert any(x.startswith("HEALTHCHECK") and '"sft_nb", "check"' in x for x in lines)
    installed, = [k for k, x in enumerate(lines) if "constraints.txt" in x and "install" in x]
    assert installed < lines.index("COPY --chown=me . sft_nb")   # or each change of the sources installs torch again
    assert ".env" in (ROOT/".dockerignore").read_text().split()


def test_who_reports_a_defect_is_asked_for_the_check():
    asked = yaml.safe_load((ROOT/".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert any("sft_nb check" in field["attributes"]["label"] for field in asked["body"])
    assert "sft_nb check --json" in (ROOT/".github/PULL_REQUEST_TEMPLATE.md").read_text()


def test_variables_are_not_set_where_torch_has_read_them(monkeypatch):
    import torch   # noqa: F401
    from sft_nb.base.installation import set_torch_environment
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert set_torch_environment() == {} and "GOMP_SPINCOUNT" not in os.environ


def test_variables_of_the_user_are_recorded_also_where_ours_are_not_set(monkeypatch):
    from sft_nb.base import installation
    monkeypatch.delitem(installation._VALUES, "PYTORCH_ALLOC_CONF", raising=False)   # as in WSL
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert installation.torch_environment()["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
