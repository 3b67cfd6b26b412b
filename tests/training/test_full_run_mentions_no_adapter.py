"""A run of method full has no adapter, and no text about it mentions one."""
import re
import warnings

import pytest
from learner import small, weights_of_learner

from sft_nb.cli import main
from sft_nb.model.adapter import load_model, lora_reach
from sft_nb.config.load import load_config
from sft_nb.extras.plan_panel import PlanState
from sft_nb.planning.plan import plan
from sft_nb.training.train import train
from sft_nb.workbench import Workbench


@pytest.fixture(scope="module")
def full(train_once):
    how = dict(model=weights_of_learner(), init="pretrained", method="full", max_steps=3, eval_samples=4)
    return train_once("full_words", lambda folder: train(small(folder, **how)))


@pytest.mark.parametrize("line", ["evaluate", "verdict", "merge", "prove"])
def test_commands_call_the_result_a_model(full, capfd, line):
    main([line, str(full.path)])
    said = capfd.readouterr()
    text = (said.out + said.err).replace(str(full.path/"adapter"), "")
    assert not re.search("adapter", text, re.IGNORECASE), text
    assert "Traceback" not in text and text.strip()


def test_plans_list_no_adapter_and_no_setting_without_a_value(full):
    made = plan(full.config, lengths=[20, 40])
    for shown in (str(made), made._repr_html_(), PlanState(full.config, lengths=[20, 40]).html()):
        assert "adapter<" not in shown and "  adapter  " not in shown
        assert "max_tokens_per_batch" in shown and "not set" in shown and "None" not in shown


def test_random_weights_are_saved_without_a_word_of_peft(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = train(small(tmp_path, max_steps=2, save_steps=1))
    assert not [str(w.message) for w in seen if "config file" in str(w.message)]
    assert run.status.state == "finished"


@pytest.mark.parametrize("how,says", [
    (dict(), "embeddings and head are frozen"),
    (dict(train_tokens=("<|im_end|>",)), "embeddings and head are frozen, but for those of 1 token"),
    (dict(train_tokens=("<|im_end|>", "<|new|>")), "embeddings and head are frozen, but for those of 2 tokens"),
    (dict(modules_to_save=("lm_head",), tokenizer="tiny"), "embeddings are frozen")])
def test_the_reach_of_lora_names_what_is_trained_beside_it(how, says):
    if "modules_to_save" in how: how |= dict(model=untied())
    cfg = load_config("demo", method="lora", device="cpu", **how)
    assert str(lora_reach(load_model(cfg, Workbench(cfg).tokenizer))).endswith(f"; {says}")


def untied()->str:
    "The learner with a head of its own"
    from pathlib import Path
    from transformers import AutoConfig, AutoModelForCausalLM
    folder = Path(weights_of_learner())
    other = folder.with_name("untied")
    if not other.exists():
        shape = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(shape).save_pretrained(other)
    return str(other)
