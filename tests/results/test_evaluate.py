"""Base and tuned model on held-out rows, and how sure their accuracies are."""
import fcntl
import json

import pytest

from sft_nb.config import load_config
from sft_nb.model.load import load_base
from sft_nb.report import ConfigError
from sft_nb.results.answers import answer_rows
from sft_nb.results.evaluate import Evaluation, evaluate
from sft_nb.tasks.core import task_of
from sft_nb.tokens.conversations import read_split
from sft_nb.training.train import train


def test_an_evaluation_keeps_every_generation(trained):
    e = evaluate(trained, eval_samples=12, progress=False)
    saved = json.loads((trained.path/"eval/adapter.json").read_text())
    assert len(saved["base"]["answers"]) == len(saved["tuned"]["answers"]) == 12
    assert Evaluation.load(trained.path/"eval/adapter.json") == e
    earlier = evaluate(trained, eval_samples=12, checkpoint="checkpoint-30", progress=False)
    assert e.base.answers == earlier.base.answers   # greedy, the same base


def test_what_a_killed_evaluation_left_behind_goes_with_the_next(trained):
    "Found by kill 61 of scripts/soak.py: it died between writing a file aside and renaming it"
    left, written = (trained.path/"eval"/f".adapter.json.{name}.new" for name in ("dead", "alive"))
    evaluate(trained, eval_samples=2, progress=False)
    for path in (left, written): path.write_text("{")   # in this very instant: an evaluation that reuses all is as fast
    with written.open() as held:   # by another evaluation, which lives
        fcntl.flock(held, fcntl.LOCK_EX)
        evaluate(trained, eval_samples=2, progress=False)
        assert (left.exists(), written.exists()) == (False, True)
    written.unlink()


def test_a_checkpoint_that_is_not_there(trained):
    says = ("there is no checkpoint-7 in it .finished at step 60.; one of adapter, checkpoint-30, checkpoint-60. "
            "Fix: checkpoint='checkpoint-60'")
    with pytest.raises(ConfigError, match=says): evaluate(trained, checkpoint="checkpoint-7")
    with pytest.raises(ConfigError, match="eval_samples is 0"): evaluate(trained, eval_samples=0)


def test_a_run_of_all_weights_is_compared_with_the_base_that_it_began_with(tmp_path, tokenizer):
    few = dict(method="full", max_steps=2, max_samples=32, eval_samples=4, preflight=False)
    run = train(load_config("demo", runs_dir=str(tmp_path), **few))
    e = evaluate(run, progress=False)
    base = load_base(run.config, tokenizer)
    rows = read_split(run.config, task_of(run.config), "eval")
    assert e.base == answer_rows(base, tokenizer, rows, run.config, name="base", progress=False)
