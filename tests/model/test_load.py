"Loading the base: broken weights are named, and new ones are made by every process"
import pytest
import torch
from learner import learner
from torch.testing._internal.distributed.fake_pg import FakeStore

from sft_nb.checks.preflight import preflight
from sft_nb.config import load_config
from sft_nb.model.load import load_base
from sft_nb.report import ConfigError


@pytest.fixture
def second_of_two():
    "This process believes that it is the second of two"
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_new_weights_in_a_second_process(second_of_two, tokenizer):
    "transformers writes a model on the first process alone"
    assert torch.distributed.get_rank() == 1
    base = load_base(load_config("demo", **learner()), tokenizer)
    assert all(p.isfinite().all() for p in base.parameters())


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_base_with_broken_weights_is_named(tmp_path, tokenizer, method, number):
    base = load_base(load_config("demo", **learner()), tokenizer)
    with torch.no_grad(): base.model.layers[1].mlp.up_proj.weight[3, 5] = number
    base.save_pretrained(tmp_path)
    cfg = load_config("demo", model=str(tmp_path), tokenizer="tiny", method=method)
    with pytest.raises(ConfigError, match="1 of .* hold NaN or infinity, the first is model.layers.1.mlp.up_proj"):
        load_base(cfg, tokenizer)
    if (method, number) == ("lora", float("inf")):
        failed = preflight(cfg).failed
        assert [f.check for f in failed] == ["model"] and "hold NaN or infinity" in failed[0].says
