"""Training whose checkpoints are scored in parallel: it keeps the best, stops early by it, and returns it."""
import shutil
from unittest.mock import patch

import pytest
from learner import small
from safetensors.torch import load_file

from sft_nb.base.report import ConfigError
from sft_nb.extras.sweeps import follow, Follower
from sft_nb.runs.checkpoint import keep_score, mark_followed
from sft_nb.runs.directory import Run
from sft_nb.training import trainer as trainers   # the module
from sft_nb.training.train import train

BY_SCORE = dict(metric_for_best_model="accuracy", save_steps=1, save_total_limit=1, eval_samples=4)


def scored_at_once(values:dict[int, float]):
    "Score each checkpoint as soon as it is written, like a fast follower"
    write = trainers.SupervisedTrainer.write_checkpoint
    def written(self, target, *args):
        write(self, target, *args)
        mark_followed(self.run.path)
        step = self.state.global_step
        if step in values: keep_score(self.run.path, f"checkpoint-{step}", "accuracy", values[step], "rows")
    return patch.object(trainers.SupervisedTrainer, "write_checkpoint", written)


def weights(folder): return {k: v.tolist() for k, v in load_file(folder/"adapter_model.safetensors").items()}


def test_a_training_ends_when_its_answers_get_no_better_and_its_result_is_the_best(tmp_path):
    cfg = small(tmp_path, early_stopping_patience=2, **BY_SCORE)
    with scored_at_once({1: .2, 2: .7, 3: .5, 4: .7, 5: .9}): run = train(cfg)
    assert (run.state, run.step) == ("finished", 4)
    assert "2 later checkpoints had no better accuracy than step 2" in run.status.reason
    assert run.best == "checkpoint-2" and [p.name for p in run.checkpoints()] == ["checkpoint-2", "checkpoint-4"]
    assert weights(run.adapter) == weights(run.weights("checkpoint-2")) != weights(run.weights("checkpoint-4"))


def test_without_scores_a_training_goes_to_its_end(tmp_path, capfd):
    run = train(small(tmp_path, max_steps=4, early_stopping_patience=2, load_best_model_at_end=True, **BY_SCORE))
    assert (run.state, run.step, run.best) == ("finished", 4, None)
    assert weights(run.adapter) == weights(run.weights("checkpoint-4"))
    assert "--follow` scores each checkpoint as it comes" in capfd.readouterr().err


def test_what_a_follower_has_not_seen_is_not_deleted(tmp_path):
    with scored_at_once({1: .2, 2: .7}): run = train(small(tmp_path, max_steps=5, **BY_SCORE))
    assert [p.name for p in run.checkpoints()] == [f"checkpoint-{k}" for k in (2, 3, 4, 5)]   # 2 is the best


def test_rows_to_score_are_needed(tmp_path):
    with pytest.raises(ConfigError, match="eval_samples is 0, so there is no accuracy"):
        train(small(tmp_path, **BY_SCORE | dict(eval_samples=0, early_stopping_patience=2)))


def test_a_follower_scores_what_comes_until_the_run_has_ended(undisturbed, tmp_path):
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"learner-1"))
    ahead = [p.rename(tmp_path/p.name) for p in run.checkpoints()]
    states = ["running"] * len(ahead) + ["finished"]
    def comes(self):
        "A checkpoint appears with each look"
        if ahead: ahead[0].rename(self.path/"checkpoints"/ahead.pop(0).name)
        return states.pop(0)
    loaded = []
    base = Follower.base.func
    def counted(self):
        loaded.append(self)
        return base(self)
    with patch.object(Run, "state", property(comes)), patch.object(Follower.base, "func", counted):
        made = follow(run, every=0, progress=False, general=False, eval_samples=4)
    assert [*made.checkpoints] == ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-10"]
    lines = (run.path/"eval/scores.jsonl").read_text().splitlines()
    assert len(lines) == 8 and len(loaded) == 1   # as they came, and in the sweep; the base answered once


def test_the_command_follows(undisturbed, tmp_path, capsys):
    from sft_nb.cli.console import main
    run = shutil.copytree(undisturbed.path, tmp_path/"learner-1")
    assert main(["sweep", str(run), "--follow", "--eval-samples", "4", "--no-general"]) in (0, None)
    assert "best checkpoint-" in capsys.readouterr().out


def test_a_follower_that_was_started_again_outlives_the_checkpoints_it_knows(tmp_path, undisturbed):
    "Their answers are known, so no model was loaded with them, and the training has removed them since"
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"again", ignore=shutil.ignore_patterns("eval")))
    first, *others, last = run.checkpoints()
    aside = last.rename(tmp_path/last.name)
    few = dict(eval_samples=2, max_new_tokens=4, progress=False)
    assert len([*Follower(run, **few).score_new()]) == 1 + len(others)
    again = Follower(run, **few)
    assert len([*again.score_new()]) == 1 + len(others)
    shutil.rmtree(first)
    aside.rename(last)
    assert [line.partition(":")[0] for line in again.score_new()] == [last.name]


def test_a_server_does_not_get_the_checkpoints_of_a_training(tmp_path, undisturbed):
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"served"))
    with pytest.raises(ConfigError, match="a server has the checkpoints that it was started with"):
        follow(run, server="http://localhost:9")
