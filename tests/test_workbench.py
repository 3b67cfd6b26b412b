"""A workbench builds each part once, remembers failures, and forgets both when closed."""
from dataclasses import FrozenInstanceError
from unittest.mock import patch

import pytest
from learner import small

from sft_nb import workbench
from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.planning.plan import DECIDED
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench, cached_part, workbench_for

MAKERS = dict(hardware="find_hardware", tokenizer="load_tokenizer", data="prepare", plan="make_plan", cfg="with_plan",
              alone="division_of", shape="load_shape", model="load_model", supervised="add_supervised_loss",
              layout="choose_layout", batches="batch_sampler")


@pytest.fixture(scope="module")
def data(tmp_path_factory): return prepare(small(tmp_path_factory.mktemp("data")))


def counted(name:str):
    return patch.object(workbench, MAKERS[name], autospec=True, side_effect=getattr(workbench, MAKERS[name]))


def test_the_parts_are_these():
    kinds = reversed(Workbench.__mro__)
    parts = [name for kind in kinds for name, part in vars(kind).items() if isinstance(part, cached_part)]
    assert parts == list(MAKERS)


def test_nothing_is_made_before_it_is_asked_for(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data)
    assert not set(MAKERS) & set(vars(bench))
    assert len(bench.batches[0]) == 4   # needs no model
    assert not {"model", "supervised", "layout"} & set(vars(bench))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "layout"])
def test_a_part_is_made_once(tmp_path, name):
    bench = Workbench(small(tmp_path))
    with counted(name) as maker: first, again = getattr(bench, name), getattr(bench, name)
    assert first is again and maker.call_count == 1


def test_the_layout_is_asked_again_once_the_model_is_there(tmp_path, data):
    "A config alone cannot tell all of it"
    bench = Workbench(small(tmp_path), data=data)
    with counted("layout") as maker:
        assert bench.layout is bench.layout and maker.call_args.args[3] is None
        model = bench.model
        assert bench.layout is bench.layout and maker.call_args.args[3] is model
    assert maker.call_count == 2


def test_what_is_given_is_not_made(tmp_path, data):
    plan, model = object(), object()
    bench = Workbench(small(tmp_path), data=data, plan=plan, model=model)
    assert (bench.data, bench.tokenizer, bench.plan, bench.model) == (data, data.tokenizer, plan, model)


def test_a_resolved_config_is_taken_as_it_is(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data, is_resolved=True)
    assert bench.cfg is bench.requested and bench.plan is None and "a run's own" in bench.no_plan


def decided(bench)->dict:
    resolved = bench.resolve()
    found = {name: getattr(resolved, name) for name in resolved.requested}
    assert "auto" not in found.values() and all(resolved.reasons[name] for name in found)
    return found


@pytest.mark.parametrize("how", [
    dict(method="auto"), dict(method="full", learning_rate="auto"), dict(max_tokens_per_batch="auto")])
def test_nothing_stays_auto(tmp_path, how):
    bench = Workbench(load_config(small(tmp_path), **how))
    found = decided(bench)
    assert {name: found[name] for name in DECIDED} == {name: getattr(bench.cfg, name) for name in DECIDED}


def test_without_a_plan_and_in_a_run_of_an_older_version_nothing_stays_auto_either(tmp_path, data):
    with patch.object(workbench, "make_plan", side_effect=SftError("plan", "it cannot be simulated")):
        bench = Workbench(small(tmp_path), data=data)
        assert decided(bench)["padding_free"] is False and "it cannot be simulated" in str(bench.resolve())
    older = load_config(small(tmp_path), method="lora", learning_rate=1e-4)   # it knows no `keep_attention` ...
    assert decided(Workbench(older, data=data, is_resolved=True))["keep_attention"] is False


def test_a_setting_that_an_older_version_did_not_know_saves_no_memory(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data, is_resolved=True)
    assert bench.cfg.gradient_checkpointing == "auto"
    with patch.object(workbench, "save_memory") as save: bench.save_memory(None)
    assert not any(save.call_args.kwargs.values())


def test_what_was_resolved_stays(tmp_path, data):
    with pytest.raises(FrozenInstanceError): Workbench(small(tmp_path), data=data).resolve().method = "full"


def test_a_failure_is_remembered_where_it_began(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data)
    cannot = ConfigError("model", "it cannot be loaded")
    with patch.object(workbench, "load_model", side_effect=cannot) as load:
        for part in ("model", "supervised", "model"):
            with pytest.raises(ConfigError, match="it cannot be loaded"): getattr(bench, part)
    assert load.call_count == 1 and bench.failures == dict(model=cannot)


def test_close_forgets_the_model_and_every_failure(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data)
    with bench:
        first, batches = bench.make("model", "supervised", "layout").model, bench.batches
        bench.failures["plan"] = SftError("plan", "it was a bad day")
    assert not {"model", "supervised", "layout"} & set(vars(bench)) and bench.failures == {}
    assert bench.batches is batches and bench.data is data   # they stay
    assert bench.model is not first


def test_a_workbench_is_its_own_workbench(tmp_path, data):
    bench = Workbench(small(tmp_path), data=data)
    assert workbench_for(bench) is bench
    made = workbench_for(bench.requested, data=data)
    assert made.requested is bench.requested and made.data is data


@pytest.mark.parametrize("how, tolerance", [
    (dict(method="lora"), 1e-4), (dict(method="lora", dtype="bfloat16"), 2e-2),
    (dict(method="lora", load_in_8bit=True), 1e-4),
    (dict(method="qlora", load_in_8bit=True), 2e-2)])
def test_layers_in_8_bits_round_their_inputs_on_every_device(how, tolerance):
    assert Workbench(load_config("demo", device="cpu", **how), is_resolved=True).tolerance == tolerance
