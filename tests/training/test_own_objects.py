"""Callbacks, a model and a tokenizer object of the caller are used; a later process can score and resume the run."""
import copy
import gc
import json
import tempfile

import pytest
import torch
from learner import learner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.trainer_callback import EarlyStoppingCallback, TrainerCallback

from sft_nb import evaluate, load_config, merge, prepare, resume, train
from sft_nb.extras.own_model import make_trainable, with_model
from sft_nb.base.report import ConfigError
from sft_nb.tokens.tokenizer import load_tokenizer, model_path
from sft_nb.workbench import Workbench

SUMS = [dict(prompt=f"{a} plus {b}?", completion=str(a + b)) for a in range(8) for b in range(8)]


def small(tmp_path, **changes):
    return load_config(**dict(runs_dir=str(tmp_path/"runs"), cache_dir=str(tmp_path/"cache"), max_steps=4, save_steps=2,
                              per_device_train_batch_size=2, gradient_accumulation_steps=1, max_length=64,
                              logging_steps=1, max_new_tokens=4, preflight=False) | changes)


def quick(tmp_path, **changes):
    "The synthetic learner, where the model is no object of the caller"
    return small(tmp_path, **learner() | dict(max_new_tokens=4) | changes)


def data_of(cfg, tokenizer=None): return prepare(cfg, tokenizer, train=SUMS[:60], eval=SUMS[60:])


class Stops(TrainerCallback):
    def __init__(self, step): self.step, self.events = step, []
    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        control.should_training_stop |= state.global_step >= self.step


def test_a_callback_sees_the_steps_and_may_end_the_training(tmp_path):
    mine = Stops(2)
    run = train(data_of(quick(tmp_path)), callbacks=[mine])
    assert (mine.events, run.state, run.status.step) == ([1, 2], "finished", 2)
    assert run.status.reason == "a callback ended the training at step 2"


def test_a_callback_that_fails_fails_the_run(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs): raise RuntimeError("the disk of the callback is full")
    with pytest.raises(RuntimeError, match="the disk of the callback"):
        train(data_of(quick(tmp_path)), callbacks=[Fails()])
    (status,) = (tmp_path/"runs").glob("*/status.json")
    status = json.loads(status.read_text())
    assert status["state"] == "failed" and "the disk of the callback" in status["reason"]


def test_early_stopping_of_ones_own(tmp_path):
    stops = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=1e9)   # nothing is good enough
    cfg = quick(tmp_path, eval_steps=1, load_best_model_at_end=True, max_steps=6)
    run = train(data_of(cfg), callbacks=[stops])
    assert run.state == "finished" and run.status.step < 6 and "callback" in run.status.reason


def test_callbacks_are_given_again_when_a_run_is_resumed(tmp_path):
    run = train(data_of(quick(tmp_path, max_time=0.)))
    assert run.state == "stopped"
    mine = Stops(100)
    assert resume(run, callbacks=[mine]).state == "finished"
    assert mine.events == [2, 3, 4]


@pytest.mark.parametrize("use", [evaluate, merge, resume])
def test_a_config_is_no_run(use):
    with pytest.raises(ConfigError, match="run: it is of type Config; a run, or the name of its directory"):
        use(load_config())


def test_a_model_from_a_folder_is_trained_as_it_is_and_found_again(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32)
    with torch.no_grad(): before = model.lm_head.weight.clone()
    run = train(data_of(small(tmp_path)), model=model)
    assert run.config.model == model_path("tiny") and run.config.method == "lora"
    assert torch.equal(model.lm_head.weight, before)
    assert len(evaluate(run).tuned.answers) == 4
    assert run.config.dtype == "float32"
    named = train(data_of(small(tmp_path, model="tiny", method="lora")))
    assert [m["loss"] for m in named.metrics() if "loss" in m] == [m["loss"] for m in run.metrics() if "loss" in m]


@pytest.mark.parametrize("how, wanted", [
    (dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"), ("fp4", False, False)),
    (dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), ("nf4", True, False)),
    (dict(load_in_8bit=True), ("nf4", True, True))])
def test_how_a_model_is_quantised_is_kept(how, wanted):
    "A later process loads the same numbers"
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"), quantization_config=BitsAndBytesConfig(**how))
    cfg = with_model(load_config(), model)
    assert cfg.method == "qlora"
    assert (cfg.bnb_4bit_quant_type, cfg.bnb_4bit_use_double_quant, cfg.load_in_8bit) == wanted


@pytest.mark.parametrize("method", ["qlora", "full"])
def test_a_model_without_a_name_is_kept_with_the_run(method, tmp_path):
    tokenizer = load_tokenizer(load_config())
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False))
    run = train(data_of(small(tmp_path, method=method, preflight=True, force=True)), model=model)
    assert run.config.model == str(run.path/"base") and (run.path/"base"/"config.json").exists()
    assert run.config.method == ("full" if method == "full" else "lora")
    assert len(evaluate(run).tuned.answers) == 4
    resumed = resume(run, max_steps=6)
    assert (resumed.state, resumed.status.step) == ("finished", 6)
    if method != "full": assert merge(run)


def test_an_adapter_that_is_there_already_is_trained_on(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model_path("tiny"))
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    run = train(data_of(small(tmp_path)), model=model)
    assert (run.config.lora_r, run.config.lora_target_modules) == (2, ("q_proj",))
    weights = load_file(run.adapter/"adapter_model.safetensors")
    assert all("q_proj" in name for name in weights)
    assert any(w.abs().sum() > 0 for name, w in weights.items() if "lora_B" in name)
    assert len(evaluate(run).tuned.answers) == 4


def test_a_tokenizer_of_ones_own_is_kept_with_the_run(tmp_path):
    cfg = quick(tmp_path)
    tokenizer = copy.deepcopy(load_tokenizer(cfg))
    tokenizer.chat_template = tokenizer.chat_template.replace("message['role']", "message['role'] + ':'")
    assert "+ ':'" in tokenizer.chat_template
    run = train(cfg, data_of(cfg, tokenizer), tokenizer=tokenizer)
    assert "+ ':'" in load_tokenizer(run.config).chat_template
    assert len(evaluate(run).tuned.answers) == 4
    with pytest.raises(ConfigError, match="data was prepared with a different one"):
        train(cfg, data_of(cfg), tokenizer=tokenizer)


def test_objects_are_refused_where_a_launcher_started_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"))
    with pytest.raises(ConfigError, match="passed to several processes"):
        train(small(tmp_path, num_processes=2), model=model)


@pytest.mark.parametrize("again", [False, True])
def test_rows_prepared_with_a_tokenizer_bring_it_to_a_model_object(tmp_path, again):
    "And the base is written into the run, or goes with the workbench if there is no run"
    folder = tmp_path/"tokenizer"
    load_tokenizer(load_config(train_tokens=("<own>",))).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16))
    data = data_of(small(tmp_path, method="lora"), tokenizer)
    run = train(data, model=model, **(dict(tokenizer=AutoTokenizer.from_pretrained(folder)) if again else {}))
    assert "<own>" in load_tokenizer(run.config).get_vocab()
    assert (resume(run, max_steps=6).status.step, len(evaluate(run).tuned.answers)) == (6, 4)
    with pytest.raises(ConfigError, match="this object has LoRA layers from an earlier training"):
        train(data, model=model)


def test_a_base_that_became_no_run_is_not_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path/"temporary"))
    (tmp_path/"temporary").mkdir()
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16))
    with pytest.raises(ConfigError): train(data_of(small(tmp_path, method="lora")), model=model)
    gc.collect()
    assert not [*(tmp_path/"temporary").rglob("*.safetensors")]


def test_a_tokenizer_is_used_with_one_config_after_another():
    "The second config counts, and tokens that the first one added are still new to a model"
    tokenizer = load_tokenizer(load_config(train_tokens=("<own>",)))
    Workbench(load_config(train_tokens=("<own>",)), tokenizer=tokenizer)
    assert tokenizer.new_tokens == ["<own>"]
    Workbench(load_config(train_tokens=("<own>",), chat_template="none"), tokenizer=tokenizer)
    assert tokenizer.chat_template is None and tokenizer.new_tokens == ["<own>"]


def test_a_handed_over_model_with_broken_weights_is_refused(tmp_path):
    "Before the first step, and not by a loss of NaN after it"
    model = AutoModelForCausalLM.from_pretrained(model_path("tiny"))
    with torch.no_grad(): model.lm_head.weight[0, 0] = float("nan")
    cfg = with_model(load_config(method="lora", device="cpu"), model)
    with pytest.raises(ConfigError, match="tensors hold NaN or infinity"):
        make_trainable(model, load_tokenizer(load_config()), cfg)
