"""Gradient checkpointing with the default dropout: recomputed layers drop what they dropped before, in every method."""
import pytest
from learner import small

from sft_nb.checks.preflight import preflight

METHODS = dict(lora={}, qlora={}, full=dict(lora_dropout=0.), dora=dict(use_dora=True))


@pytest.mark.parametrize("name", METHODS)
def test_preflight_lets_it_through(tmp_path, name):
    method = "lora" if name == "dora" else name
    how = dict(method=method, lora_dropout=.05) | METHODS[name]
    checked = preflight(small(tmp_path, gradient_checkpointing=True, max_samples=16, eval_samples=0, **how))
    assert [str(f) for f in checked.failed] == []
