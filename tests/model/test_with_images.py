"""Models that are published with a vision tower, trained on rows of text."""
import json
from pathlib import Path

import pytest
import torch
from learner import small
from peft import AutoPeftModel, AutoPeftModelForCausalLM
from safetensors.torch import load_file
from shapes import VISION, with_images
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from sft_nb.batches.layout import model_class, supports_flattening
from sft_nb.checks.model import check_trainable
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model, name_base, target_modules, text_path
from sft_nb.model.load import auto_class, load_base, load_shape
from sft_nb.model.loss import add_supervised_loss, causal_lm
from sft_nb.extras.own_model import read_lora_settings
from sft_nb.planning.memory import skeleton
from sft_nb.base.report import ConfigError, Report
from sft_nb.proof.merge import merge
from sft_nb.training.train import train

INSIDE = dict(gemma3="model.language_model", mistral3="model.language_model", llama4="language_model")


def published(tmp_path, kind:str)->str:
    "A folder with random weights, as saved by the published class"
    torch.manual_seed(0)
    shape = with_images(kind)
    auto_class(shape).from_config(shape, dtype=torch.float32).save_pretrained(tmp_path/kind)
    return str(tmp_path/kind)


def settings(tmp_path, kind:str, **how):
    base = dict(model=published(tmp_path, kind), tokenizer="tiny", method="lora", dtype="float32", device="cpu")
    return load_config("demo", **base | how)


@pytest.mark.parametrize("kind", INSIDE)
def test_only_the_language_model_is_adapted_under_the_names_of_the_published_class(tmp_path, tokenizer, kind):
    cfg = settings(tmp_path, kind)
    model = load_model(cfg, tokenizer)
    assert type(causal_lm(model)).__name__.endswith("ForConditionalGeneration") and text_path(model) == INSIDE[kind]
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all(n.startswith(f"base_model.model.{INSIDE[kind]}.") for n in trained)
    assert not any("router" in n or "vision" in n or "lm_head" in n for n in trained)
    assert f"all of them in {INSIDE[kind]}: rows are text" in check_trainable(model, **cfg.values(check_trainable)).says
    planned = [n for n, p in skeleton(cfg, tokenizer).named_parameters() if p.requires_grad]
    assert sorted(planned) == sorted(trained)
    assert add_supervised_loss(model)   # the head is known
    if kind == "gemma3": assert read_lora_settings(model)["lora_r"] == cfg.lora_r   # exclude_modules is our own
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n: p.normal_(std=.1)
    name_base(model, cfg.model, **cfg.values(name_base))
    model.save_pretrained(tmp_path/"adapter")
    by_name = json.loads((tmp_path/"adapter/adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    assert by_name == (kind == "gemma3")
    kind_of_peft = AutoPeftModelForCausalLM if by_name else AutoPeftModel
    theirs = kind_of_peft.from_pretrained(tmp_path/"adapter", dtype=torch.float32).eval()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        ours, again = model.eval()(input_ids=ids).logits, theirs(input_ids=ids).logits
        with theirs.disable_adapter(): base = theirs(input_ids=ids).logits
    assert type(theirs.get_base_model()) is type(causal_lm(model))
    assert (ours - again).abs().max() < 1e-5 < 1e-2 < (ours - base).abs().max()


def test_a_published_gemma_trains_in_4_bits_and_is_merged_with_its_vision_tower(tmp_path, capfd):
    "The tower is stored in 4 bits too, and nothing has learned to make up for that: it is merged as it was published"
    base = Path(published(tmp_path, "gemma3"))
    (base/"preprocessor_config.json").write_text('{"size": 28}')
    run = train(small(tmp_path, model=str(base), init="pretrained", method="qlora", preflight=True, max_steps=2,
                      run_name="run", eval_samples=4, per_device_train_batch_size=2, max_new_tokens=4))
    assert "rows are text, so only model.language_model is trained" in "".join(capfd.readouterr())
    assert Report.load(run.path/"preflight.json").status != "fail"
    merged = merge(run, dtype="float32", prompts=2)
    was, now = (load_file(folder/"model.safetensors") for folder in (base, merged))
    moved = [n for n in was if not torch.equal(was[n], now[n])]
    assert was.keys() == now.keys() and moved and all("language_model" in n and ".layers." in n for n in moved)
    assert (merged/"preprocessor_config.json").read_text() == '{"size": 28}'


def test_full_training_leaves_the_tower_alone(tmp_path, tokenizer):
    cfg = settings(tmp_path, "mistral3", method="full")
    model = load_model(cfg, tokenizer)
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen and all("vision_tower" in n or "projector" in n for n in frozen)
    assert check_trainable(model, **cfg.values(check_trainable)).status == "ok"


def test_random_weights_of_a_config_in_parts(tmp_path, tokenizer):
    with_images("mistral3").save_pretrained(tmp_path/"shape")
    cfg = load_config(model=str(tmp_path/"shape"), tokenizer="tiny", init="random", method="lora", dtype="float32")
    assert load_shape(cfg, tokenizer).text_config.eos_token_id == tokenizer.eos_token_id
    assert type(load_base(cfg, tokenizer)).__name__ == "Mistral3ForConditionalGeneration"


def test_which_class_is_loaded():
    both = with_images("llama4")
    assert model_class(both).__name__ == "Llama4ForConditionalGeneration"
    assert auto_class(both) is AutoModelForImageTextToText
    both.architectures = None
    assert model_class(both).__name__ == "Llama4ForCausalLM" and auto_class(both) is AutoModelForCausalLM
    assert auto_class(with_images("gemma3")) is AutoModelForCausalLM
    assert not supports_flattening(with_images("llama4"))   # its chunks would be counted from the first row of a batch


def test_a_model_that_continues_no_text_is_refused(tmp_path, tokenizer):
    AutoConfig.for_model("siglip_vision_model", **VISION).save_pretrained(tmp_path/"tower")
    cfg = load_config(model=str(tmp_path/"tower"), tokenizer="tiny")
    with pytest.raises(ConfigError, match="no causal language model of type siglip_vision_model.*Fix: another model"):
        load_shape(cfg, tokenizer)


def test_names_of_the_tower_are_no_layers_of_the_language_model(tmp_path, tokenizer):
    model = load_base(settings(tmp_path, "gemma3"), tokenizer)
    with pytest.raises(ConfigError, match="no linear layer 'fc1'"): target_modules(model, ("fc1",))
    assert target_modules(model, ("q_proj",)) == ["q_proj"]
