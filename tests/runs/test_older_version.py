"""A run directory written by an older version still works: it opens, resumes, and is evaluated."""
import shutil
from pathlib import Path

import pytest
from learner import values

from sft_nb.evaluation.evaluate import evaluate
from sft_nb.runs.directory import open_run
from sft_nb.training.train import resume


def test_a_run_that_was_written_by_8189b01_ends_as_it_would_have_ended_there(tmp_path):
    "Four steps of the tiny base, stopped after the first; that version ended with these losses"
    shutil.unpack_archive(Path(__file__).with_name("written_by_8189b01.zip"), tmp_path)
    run = open_run(tmp_path/"old")
    assert (run.state, run.step, [p.name for p in run.checkpoints()]) == ("stopped", 1, ["checkpoint-1"])
    run = resume(run)
    assert values(run, "loss") == pytest.approx([3.805347, 3.060054, 3.051983, 2.718260], rel=1e-3)
    assert values(run, "eval_loss") == pytest.approx([2.201188, 2.098495], rel=1e-3)
    scores = evaluate(run, progress=False)
    assert (run.status.state, scores.base.n, scores.tuned.n) == ("finished", 4, 4)
