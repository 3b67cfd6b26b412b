"""An untrusted run or config runs code only if the user allows it."""
import json
import sys

import pytest

from sft_nb.cli import main
from sft_nb.config.load import load_config, save_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.directory import Run, _training_command, _training_environment, create_run, open_run

PROOF = "import pathlib; pathlib.Path('it-ran').touch()\n"
CODE = dict(task="stranger:Task", trust_remote_code=True, attn_implementation="stranger/kernel")


@pytest.fixture(params=CODE, ids=str)
def stranger(request, tmp_path, monkeypatch):
    "An untrusted run whose config runs code, in the folder with that code"
    monkeypatch.chdir(tmp_path)
    folder = tmp_path/"runs/theirs"
    for part in ("adapter", "code"): (folder/part).mkdir(parents=True)
    (tmp_path/"stranger.py").write_text(PROOF)
    (folder/"code/config.json").write_text(json.dumps(dict(
        model_type="theirs", auto_map=dict(AutoConfig="theirs.Config", AutoTokenizer=["theirs.Tokenizer", None]))))
    (folder/"code/theirs.py").write_text(PROOF)
    config = dict(model=str(folder/"code"), task="arithmetic", eval_samples=4) | {request.param: CODE[request.param]}
    save_config(load_config(**config), folder/"config.json")
    (folder/"status.json").write_text(json.dumps(dict(state="stopped", step=3)))
    return tmp_path


LINES = [
    "evaluate runs/theirs", "merge runs/theirs", "train --resume runs/theirs", "train --resume runs/theirs --detach",
    "train --config runs/theirs", "train --config runs/theirs/config.json --detach", "data --config runs/theirs",
    "plan --config runs/theirs", "check --config runs/theirs", "train --config runs/theirs --no-trust-remote-code"]


@pytest.mark.parametrize("line", LINES)
def test_no_command_runs_it_without_the_flag(stranger, line, capsys):
    if "trust" in line and load_config("runs/theirs").trust_remote_code: return   # that takes it back
    code, said = main(line.split()), capsys.readouterr()
    assert code == 2 and "which runs Python code" in said.err and "Fix: --trust-remote-code" in said.err, said
    assert not (stranger/"it-ran").exists()


def test_nor_does_python(stranger):
    from sft_nb.panels.batches import bench_of
    from sft_nb.evaluation.evaluate import evaluate
    from sft_nb.proof.merge import merge
    from sft_nb.tokens.prepare import prepare
    from sft_nb.training.launch import launch
    from sft_nb.training.train import resume, train
    cfg = load_config("runs/theirs")
    for f in (evaluate, merge, resume, lambda run: Run(run).resume(), lambda run: launch(cfg), lambda run: train(cfg),
              lambda run: prepare(cfg), lambda run: bench_of(run).make("data", "shape")):
        with pytest.raises(SftError, match="runs Python code|cannot be loaded|there is no tokenizer"): f("runs/theirs")
    assert not (stranger/"it-ran").exists()


def test_looking_at_it_needs_no_word(stranger, capsys):
    assert main(["runs"]) == 0 and main(["config", "runs/theirs"]) == 0
    assert Run("runs/theirs").state == "stopped" and not (stranger/"it-ran").exists()


def test_the_word_is_given_once_for_all_or_for_one_setting(stranger):
    assert load_config("runs/theirs").untrusted
    assert not load_config("runs/theirs", trust_remote_code=True).untrusted
    assert not load_config("runs/theirs", **{k: CODE[k] for k in load_config("runs/theirs").untrusted}).untrusted
    assert load_config("runs/theirs", lora_r=4).untrusted
    assert not open_run("runs/theirs", trust_remote_code=True).config.untrusted


def test_a_python_config_and_an_override_are_words_already(tmp_path):
    (tmp_path/"mine.py").write_text("task = 'mine:Task'\ntrust_remote_code = True\n")
    assert not load_config(tmp_path/"mine.py").untrusted and not load_config(task="mine:Task").untrusted
    assert not load_config(save_config(load_config("demo"), tmp_path/"config.json")).untrusted


def test_a_launched_process_is_told(tmp_path):
    run = create_run(load_config(task="mine:Task", runs_dir=str(tmp_path), run_name="x"))
    assert run.config.task == "mine:Task" and not run.config.untrusted   # whoever made it here trusts it
    assert "--trust-remote-code" in _training_command(run, ()) and Run(run.path).config.untrusted
    plain = create_run(load_config(runs_dir=str(tmp_path), run_name="y"))
    assert "--trust-remote-code" not in _training_command(plain, ())


def test_a_process_of_a_console_script_does_not_import_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    assert _training_environment(1)["PYTHONSAFEPATH"] == "1"
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert "PYTHONSAFEPATH" not in _training_environment(1)


MINE = """from sft_nb.tasks.core import Score
class Capitals:
    name, fields = "capitals", ("country", "capital")
    def rows(self, split, *, n=None, seed=42): return [dict(country="Peru", capital="Lima")] * 8
    def messages(self, row):
        return [dict(role="user", content=row["country"]), dict(role="assistant", content=row["capital"])]
    def score(self, text, row): return Score(text == row["capital"], text, row["capital"])
"""


def test_a_run_of_ones_own_task(tmp_path, monkeypatch):
    "Trained here it is scored here; from its folder alone it needs the word"
    from learner import small
    from sft_nb.evaluation.evaluate import evaluate
    from sft_nb.training.train import resume, train
    (tmp_path/"capitals.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    how = dict(task="capitals:Capitals", max_samples=8, max_steps=2, eval_samples=2, save_steps=1)
    run = train(small(tmp_path/"runs", run_name="x", **how))
    assert evaluate(run, progress=False).base.n == 2
    with pytest.raises(ConfigError, match="which runs Python code"): evaluate(run.path, progress=False)
    assert evaluate(run.path, progress=False, trust_remote_code=True).base.n == 2
    run.set_status("stopped", step=1)
    with pytest.raises(ConfigError, match="which runs Python code"): resume(run.path)
    assert resume(run.path, trust_remote_code=True).state == "finished"
