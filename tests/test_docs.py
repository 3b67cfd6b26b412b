"""What the README says is what the package does."""
import re, subprocess, sys, zipfile

from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))


def test_the_readme_is_made_from_the_index_notebook():
    from readme import readme
    assert (ROOT/"README.md").read_text() == readme()


def test_the_readmes_python_runs(tmp_path):
    "The ten lines, with a short training"
    code = next(c for c in re.findall(r"```python\n(.*?)```", (ROOT/"README.md").read_text(), re.S) if "from sft_nb import *" in c)
    assert 'load_config("demo")' in code
    code = code.replace('load_config("demo")', f'load_config("demo", max_steps=5, eval_samples=4, runs_dir={str(tmp_path)!r})')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(((?!https?:|#)[^)]+)\)", (ROOT/"README.md").read_text()): assert (ROOT/target).exists(), target


def test_the_table_lists_every_module():
    text = (ROOT/"README.md").read_text()
    for nb in (ROOT/"nbs").glob("[0-9]*.ipynb"): assert nb.name in text, nb.name


def test_the_wheel_carries_model_and_configs(tmp_path):
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    for file in ("assets/tiny/model.safetensors", "assets/tiny/tokenizer.json", "assets/tiny/chat_template.jinja", "assets/tiny/pretraining.json", "configs/demo.py", "tasks/gsm8k.py", "panels/views.py"):
        assert f"sft_nb/{file}" in names, file


def test_the_base_is_small_and_its_log_is_of_these_weights():
    import hashlib, json
    weights, log = ROOT/"sft_nb/assets/tiny/model.safetensors", json.loads((ROOT/"sft_nb/assets/tiny/pretraining.json").read_text())
    assert weights.stat().st_size <= 6_000_000 and log["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert 1.5e6 <= log["parameters"] <= 3e6 and log["log"][-1]["loss"] < 1 < 5 < log["log"][0]["loss"]


def test_the_base_has_never_been_asked_the_demos_question():
    from make_tiny import documents
    docs = documents(2)
    chats = [d for d in (next(docs) for _ in range(3000)) if "<|im_start|>" in d]
    assert len(chats) > 500 and not any("How many" in d for d in chats)
