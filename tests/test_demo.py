"""The promise of the README's first command, kept in CI."""
import json
import re
import subprocess

from test_cli import SFT_NB


def test_the_demo_learns(tmp_path):
    command = [*SFT_NB, "train", "--config", "demo", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr   # as nanobind says at the end
    result = json.loads((tmp_path/"arithmetic-tiny-1/eval/adapter.json").read_text())
    assert result["base"]["n"] >= 200 and result["base"]["accuracy"] <= .02 and result["tuned"]["accuracy"] >= .95
    assert re.search(r"✓ \d+ checks passed", done.stdout) and "run directory" in done.stdout
    assert done.stdout.count("  tuned  ") >= 5
    assert "linear4bit" in _layers(tmp_path/"arithmetic-tiny-1").lower()


def _layers(run)->str:
    "The class of the base's first projection, loaded as the run loads it"
    from sft_nb.tokens.tokenizer import load_tokenizer
    from sft_nb.model.load import load_base
    from sft_nb.runs.directory import Run
    cfg = Run(run).config
    return type(load_base(cfg, load_tokenizer(cfg)).model.layers[0].self_attn.q_proj).__name__


def test_no_problem_of_the_evaluation_is_trained_on():
    from sft_nb.tasks.arithmetic import TASK
    for seed in (1, 2, 42):
        train, test = TASK.rows("train", n=3000, seed=seed), TASK.rows("eval", n=300, seed=seed)
        assert not {r["problem"] for r in train} & {r["problem"] for r in test}
        assert not {r["question"] for r in train} & {r["question"] for r in test}
