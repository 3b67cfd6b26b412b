"""An adapter names its base so that peft finds it from any working directory."""
import json
import shutil

import torch
from learner import small
from peft import AutoPeftModelForCausalLM
from shapes import model

from sft_nb.model.adapter import base_name, load_model
from sft_nb.runs.locate import find_target
from sft_nb.tokens.tokenizer import load_tokenizer, model_path
from sft_nb.training.train import resume, train


def test_a_base_that_was_named_by_a_relative_path_is_found_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path/"elsewhere").mkdir()
    model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path/"bases/small")
    monkeypatch.chdir(tmp_path)
    relative = dict(model="bases/small", init="pretrained", runs_dir="runs", run_name="run")
    run = train(small(tmp_path, **relative | dict(max_time=0.)))   # stopped after a step
    monkeypatch.chdir(tmp_path/"elsewhere")
    run = resume(run.path)
    assert run.state == "finished"
    for folder in (run.adapter, run.checkpoints()[0]):
        named = json.loads((folder/"adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(tmp_path/"bases/small")
        assert AutoPeftModelForCausalLM.from_pretrained(folder).get_base_model().config.hidden_size == 64
    shutil.copytree(run.adapter, tmp_path/"alone")
    assert find_target(tmp_path/"alone").config.model == str(tmp_path/"bases/small")
    monkeypatch.chdir(tmp_path)   # the name in the settings may be the relative one again
    again = small(tmp_path, **relative | dict(run_name=None, adapter_name_or_path=str(tmp_path/"alone")))
    load_model(again, load_tokenizer(again))


def test_the_adapter_of_tiny_loads_in_peft(tmp_path):
    run = train(small(tmp_path, model="tiny", init="pretrained", max_steps=1, run_name="run"))
    assert AutoPeftModelForCausalLM.from_pretrained(run.adapter, dtype=torch.float32).config.vocab_size == 768
    shutil.copytree(run.adapter, tmp_path/"alone")
    file = tmp_path/"alone/adapter_config.json"
    assert json.loads(file.read_text())["base_model_name_or_path"] == model_path("tiny") == base_name("tiny")
    file.write_text(file.read_text().replace(model_path("tiny"), "/another/venv/sft_nb/assets/tiny"))
    assert find_target(tmp_path/"alone").config.model == "tiny"   # of an installation that is gone
    cfg = small(tmp_path, model="tiny", init="pretrained", adapter_name_or_path=str(tmp_path/"alone"))
    load_model(cfg, load_tokenizer(cfg))
