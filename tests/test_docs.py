"""The README describes what the package does."""
import hashlib
import json
import math
import re
import subprocess
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))


def test_the_readme_is_made_from_the_index_notebook():
    from readme import readme
    assert (ROOT/"README.md").read_text() == readme()


def test_the_readmes_python_runs(tmp_path, warm_processes):
    "The ten lines, with a short training"
    blocks = re.findall(r"```python\n(.*?)```", (ROOT/"README.md").read_text(), re.S)
    code = next(c for c in blocks if "from sft_nb import *" in c)
    assert 'load_config("demo")' in code
    few = "max_steps=5, max_samples=200, eval_samples=4, max_new_tokens=8"
    short = f'load_config("demo", {few}, runs_dir={str(tmp_path)!r})'
    code = code.replace('load_config("demo")', short)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("plan for ", "preflight: ", "4 held-out rows"): assert done.stdout.count(line) == 1, line
    commands = re.findall(r"```bash\n(.*)\n", (ROOT/"README.md").read_text())
    assert "sft_nb train --config demo" in commands[:3]   # a wheel has no Makefile


def test_links_of_readme_and_contributing_lead_somewhere():
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(((?!https?:|#)[^)]+)\)", (ROOT/page).read_text()):
            assert (ROOT/target).exists(), (page, target)


def test_the_package_map_links_the_first_chapter_of_every_part():
    text = (ROOT/"CONTRIBUTING.md").read_text()
    for part in sorted(p for p in (ROOT/"nbs").iterdir() if p.name[0].isdigit()):
        for first in part.glob("00_*.ipynb") if part.is_dir() else [part]:   # and its settings
            assert f"]({first.relative_to(ROOT)})" in text, first


def test_the_readme_is_short(): assert len((ROOT/"README.md").read_text().split()) <= 900


def test_the_base_is_small_and_its_log_is_of_these_weights():
    folder = ROOT/"sft_nb/assets/tiny"
    weights, log = folder/"model.safetensors", json.loads((folder/"pretraining.json").read_text())
    assert weights.stat().st_size <= 6_000_000
    assert log["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert 1.5e6 <= log["parameters"] <= 3e6 and log["log"][-1]["loss"] < 1 < 5 < log["log"][0]["loss"]


def test_the_base_has_never_been_asked_the_demos_question():
    from make_tiny import documents
    docs = documents(2)
    chats = [d for d in (next(docs) for _ in range(3000)) if "<|im_start|>" in d]
    assert len(chats) > 500 and not any("How many" in d for d in chats)


def test_the_readmes_ratios_are_those_of_the_benchmarks():
    "Rounded down; and who was measured is who it names"
    says = re.search(r"a LoRA step is ([\d.]+) \(50M\) and ([\d.]+) \(0.5B\) times as fast as transformers'",
                     (ROOT/"README.md").read_text())
    results = [json.loads((ROOT/f"benchmarks/results/{name}.json").read_text())
               for name in ("train_step", "train_step_0.5b")]
    assert [float(x) for x in says.groups()] == [math.floor(10 * r["ratio"]) / 10 for r in results]
    assert [r["ratio"] == r["ratio_plain"] for r in results] == [True, True]   # the faster peer
    assert all(r["ratio_trl_best"] > r["ratio"] for r in results)
    assert all(r["largest_loss_difference"] < 2e-3 for r in results)   # of 12 nats
