"""Gradient checkpointing with the default dropout: recomputed layers drop what they dropped before, in every method."""
import pytest
from learner import small

from sft_nb.checks import step   # noqa: F401  registers its checks
from sft_nb.checks.core import CHECKS, run_check
from sft_nb.checks.preflight import Evidence
from sft_nb.workbench import Workbench

METHODS = dict(lora={}, qlora={}, full={}, dora=dict(method="lora", use_dora=True))
LOOKED = ("step.loss", "step.gradient", "step.derivative")


@pytest.mark.parametrize("name", METHODS)
def test_the_first_step_passes(tmp_path, name):
    how = dict(method=name, lora_dropout=.05) | METHODS[name]
    bench = Workbench(small(tmp_path, gradient_checkpointing=True, max_samples=16, eval_samples=0, **how))
    evidence = Evidence(bench)
    found = [f for check in LOOKED for f in run_check(check, CHECKS[check], evidence)]
    assert {f.check: f.status for f in found} == dict.fromkeys(LOOKED, "ok"), found
