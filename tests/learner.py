"""The synthetic learner: two layers, width 32, new weights, the tokenizer of `tiny`. It tests what does not depend on
size or 4-bit weights in a fraction of the time. Also helpers that inspect runs in training tests."""
import atexit
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, TrainerCallback

from sft_nb.config.load import load_config
from sft_nb.base.report import Report
from sft_nb.runs.directory import Run
from sft_nb.training import train as training   # the module, not the function

TEN_STEPS = dict(
    max_samples=64, max_steps=10, num_train_epochs=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    logging_steps=1, save_steps=3, save_total_limit=9, eval_samples=0, preflight=False)


@cache
def shape()->str:
    "A folder with only the model's config, shared by all workers"
    folder = Path(os.environ["SFT_NB_CACHE"])/"learner"
    if not folder.exists():
        config = Qwen3Config(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = tempfile.mkdtemp(dir=folder.parent)
        config.save_pretrained(aside)
        try: os.rename(aside, folder)
        except OSError: shutil.rmtree(aside)   # another worker was faster
    return str(folder)


@cache
def weights_of_learner()->str:
    "A folder with the model's config and new weights, for tests that read a base from files"
    folder = Path(tempfile.mkdtemp(prefix="sft_nb-learner-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape(), vocab_size=768)   # the tokenizer of `tiny` has 745 tokens
    AutoModelForCausalLM.from_config(config).save_pretrained(folder/"learner")
    return str(folder/"learner")


def learner()->dict:
    "Settings that replace the demo's model by the synthetic learner"
    return dict(model=shape(), tokenizer="tiny", init="random", method="lora", max_new_tokens=8)


def small(folder, **how):
    "Ten steps of the learner on 64 rows"
    return load_config("demo", **dict(runs_dir=str(folder)) | TEN_STEPS | learner() | how)


def small_qlora(folder, **how):
    "The same ten steps of the demo's model: pretrained, in 4 bits"
    return load_config("demo", **dict(runs_dir=str(folder), max_new_tokens=8) | TEN_STEPS | how)


def values(run:Run, name:str)->list: return [m[name] for m in run.metrics() if name in m]
def weights(run:Run)->bytes: return (run.adapter/"adapter_model.safetensors").read_bytes()
def names(checkpoints)->list[str]: return [p.name for p in checkpoints]


def curve(run:Run, *more:str)->list[tuple]:
    "Step, loss, gradient norm and the columns in `more`, for each line with a loss"
    return [tuple(m[k] for k in ("step", "loss", "grad_norm", *more)) for m in run.metrics() if "loss" in m]


def notes(run:Run)->dict:
    "Findings of the guards: check -> finding"
    file = run.path/"guards.json"
    if not file.exists(): return {}
    return {f.check: f for f in Report.from_dict(json.loads(file.read_text())).findings}


def assert_same(run:Run, undisturbed:Run)->None:
    "Assert that a run ended bit for bit like the undisturbed one"
    assert run.status.state == "finished"
    assert curve(run) == curve(undisturbed)
    assert weights(run) == weights(undisturbed)


@contextmanager
def at_step(n:int, act):
    "Call `act()` when optimiser step `n` begins"
    class At(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == n - 1: act()
    build = training.build_trainer
    def built(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(At())
        return trainer
    with patch.object(training, "build_trainer", built): yield


def killed_at_eight(folder:Path, undisturbed:Run)->Run:
    "A copy of a run with checkpoints 3 and 6, killed after the second"
    shutil.copytree(undisturbed.path, folder/"damaged")
    run = Run(folder/"damaged")
    for n in (9, 10): shutil.rmtree(run.path/f"checkpoints/checkpoint-{n}")
    shutil.rmtree(run.adapter)
    run.set_status("running", step=8)
    return run
