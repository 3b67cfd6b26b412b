"""Settings of other programs: each is translated, accepted with a note, or refused with a fix; never ignored."""
import contextlib
import io

import pytest
import torch

from sft_nb.cli import main
from sft_nb.config.load import config_names, load_config, table
from sft_nb.base.report import ConfigError
from sft_nb.config.settings import defaults
from sft_nb.extras.meanings import Meaning
from sft_nb.extras.other_tools import FOREIGN, translate_setting

SETS = [   # what others write, and what it is here
    (dict(bf16=True), dict(dtype="bfloat16")), (dict(fp16=True), dict(dtype="float16")),
    (dict(bf16=True, fp16=False), dict(dtype="bfloat16")),
    (dict(torch_dtype=torch.bfloat16), dict(dtype="bfloat16")), (dict(torch_dtype="float32"), dict(dtype="float32")),
    (dict(torch_dtype="auto"), {}), (dict(dtype=torch.float16), dict(dtype="float16")),
    (dict(bnb_4bit_compute_dtype="torch.bfloat16", torch_dtype="bfloat16"), dict(dtype="bfloat16")),
    (dict(load_in_4bit=True), dict(method="qlora")), (dict(load_in_4bit=False), dict(method="lora")),
    (dict(load_in_4bit=False, load_in_8bit=True), dict(load_in_8bit=True)),
    (dict(use_4bit=False, method="full"), dict(method="full")),
    (dict(eval_strategy="steps"), dict(eval_steps=100)),
    (dict(eval_strategy="steps", eval_steps=7), dict(eval_steps=7)),
    (dict(evaluation_strategy="epoch"), dict(eval_steps="epoch")), (dict(eval_strategy="no"), {}),
    (dict(save_strategy="epoch"), dict(save_steps="epoch")), (dict(save_strategy="steps"), {}),
    (dict(save_strategy="best"), dict(load_best_model_at_end=True)),
    (dict(report_to="wandb"), dict(report_to=("wandb",))), (dict(report_to="none"), {}),
    (dict(metric_for_best_model="eval_loss"), {}),
    (dict(metric_for_best_model="bleu"), dict(metric_for_best_model="bleu")),
    (dict(packing=False), {}), (dict(dataset_text_field="content"), dict(fields=("text=content",))),
    (dict(data_dir="data/prepared"), dict(train_file=("data/prepared",))),
    (dict(packing=True, batch_size=2, max_length=100),
     dict(max_tokens_per_batch=200, per_device_train_batch_size=2, max_length=100)),
    (dict(pad_to_multiple_of=8, dataloader_num_workers=4, remove_unused_columns=False, label_names=["labels"]), {}),
    (dict(gradient_checkpointing_kwargs=dict(use_reentrant=False), bias="none", task_type="CAUSAL_LM"), {}),
    (dict(padding_side="right", return_tensors="pt", logging_dir="logs", bf16_full_eval=True), {}),
    (dict(completion_only_loss=False), dict(train_on_prompt=True)), (dict(use_peft=False), dict(method="full")),
    (dict(num_gpus=2, distributed_training=True), dict(num_processes=2)),
    (dict(fsdp=True, fsdp_version=2, fsdp_config=dict(
        fsdp_offload_params=False, transformer_layer_cls_to_wrap="Qwen3DecoderLayer")), dict(fsdp=True)),
    (dict(fsdp_config=dict(min_num_params=0, xla=False)), {}),
    (dict(output_dir="out/x", run_name="y"), dict(runs_dir="out", run_name="x", wandb_name="y")),
    (dict(output_dir="out/x", wandb_name="y"), dict(runs_dir="out", run_name="x", wandb_name="y")),
    (dict(adapter="lora"), dict(method="lora")), (dict(adapter="lora", load_in_8bit=True),
                                                                       dict(method="qlora", load_in_8bit=True)),
    (dict(lora_target_modules="q_proj,v_proj"), dict(lora_target_modules=("q_proj", "v_proj"))),
]


@pytest.mark.parametrize("given, wanted", SETS, ids=lambda x: str(x)[:60])
def test_what_it_sets(given, wanted):
    cfg = load_config(**given)
    assert {k: getattr(cfg, k) for k in defaults() if getattr(cfg, k) != defaults()[k]} == wanted


def test_what_sets_nothing_is_said():
    given = dict(remove_unused_columns=False, label_names=["labels"], pad_to_multiple_of=8, bias="none",
                 push_to_hub=True, save_strategy="no", gradient_checkpointing_kwargs=dict(use_reentrant=True))
    said = table(load_config(**given))
    assert all(name in said for name in given) and len(said.splitlines()) == 1 + len(given)


REFUSED = [   # and what the error says
    (dict(padding_side="left"), "training pads on the right"), (dict(bias="all"), "modules_to_save"),
    (dict(label_names=["y"]), "labels are made by sft_nb"),
    (dict(gpu=1), "--gpu 1"), (dict(bf16=True, fp16=True), "dtype is set twice"),
    (dict(bf16=True, dtype="float32"), "dtype is set twice"), (dict(task_type="SEQ_CLS"), "models are causal"),
    (dict(load_in_4bit=True, method="lora"), "method is set twice"), (dict(resume_from_checkpoint="x"), "--resume"),
    (dict(distributed_training=True), "num_processes=2"),
    (dict(fsdp_config="fsdp.json"), "a file of its own is not read"),
    (dict(fsdp_config=dict(sharding="full")), "known are version, reshard_after_forward"),
    (dict(return_tensors="np"), "torch tensors"),
    (dict(greater_is_better=True), "a lower loss is better"),
    (dict(special_tokens=dict(eos="x")), "eos is not a special token"),
    (dict(datasets=[dict(path="x", type="input_output")]), "type input_output"),
    (dict(load_in_3bit=True), "is not a setting. Fix: leave"), (dict(quantization=True), "is not a setting"),
    (dict(num_cards=2), "is not a setting. Fix: leave"),
    (dict(eval_fraction=5), "Fix: eval_fraction=0.05")]


@pytest.mark.parametrize("given, says", REFUSED, ids=lambda x: str(x)[:60])
def test_what_is_refused(given, says):
    from sft_nb.base.report import fix_language
    with pytest.raises(ConfigError) as e, fix_language("shell" if "--" in says else "python"): load_config(**given)
    text = str(e.value) if "--" not in says else e.value.fix.says("shell")
    assert says in text and len(text) <= 300


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_no_value_of_the_table_is_wrong(name):
    "What an entry sets are settings with values that they take; what it refuses ends in a fix"
    for value, found in FOREIGN[name].items():
        if not isinstance(found, Meaning): found = translate_setting(name, None if value is ... else value, defaults())
        assert found.fix is not None or found.settings or found.method or isinstance(found.note, str)
        load_config(**found.settings)
    odd = translate_setting(name, object(), defaults()) if ... not in FOREIGN[name] else None
    assert odd is None or odd.fix


def test_a_command_line_wins_over_a_file_and_a_file_over_its_import(tmp_path):
    (tmp_path/"base.py").write_text("bf16 = True\nload_in_4bit = True\n")
    (tmp_path/"mine.py").write_text("from base import *\nmethod = 'lora'\nload_in_4bit = False\n")
    assert load_config(tmp_path/"mine.py").sources["dtype"].endswith("(bf16 = True)")
    cfg = load_config(tmp_path/"mine.py", dtype="float32", load_in_4bit=True)
    assert (cfg.dtype, cfg.method) == ("float32", "qlora")


TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
dataset_train_split: train
dataset_test_split: test
torch_dtype: bfloat16
learning_rate: 2.0e-5
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_tokn: x
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
max_length: 1024
output_dir: out/Qwen2.5-0.5B-SFT
push_to_hub: false
report_to: none
"""
AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
wandb_entity:
wandb_watch:
wandb_name:
wandb_log_model:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""


def test_trls_yaml(tmp_path):
    (tmp_path/"sft.yaml").write_text(TRL)
    with pytest.raises(ConfigError) as e: load_config(tmp_path/"sft.yaml")
    assert str(e.value).startswith(f"{tmp_path}/sft.yaml:13: eos_tokn is not a setting")
    (tmp_path/"sft.yaml").write_text(TRL.replace("eos_tokn: x\n", ""))
    cfg = load_config(tmp_path/"sft.yaml")
    assert (cfg.model, cfg.train_file, cfg.learning_rate) == ("Qwen/Qwen2.5-0.5B", ("trl-lib/Capybara",), 2e-5)
    assert (cfg.eval_file, cfg.max_tokens_per_batch, cfg.run_name) == (
        ("trl-lib/Capybara:test",), 2048, "Qwen2.5-0.5B-SFT")


def test_axolotls_yaml(tmp_path):
    file = tmp_path/"qlora.yml"
    file.write_text(AXOLOTL)
    cfg = load_config(file)
    assert (cfg.eval_steps, cfg.save_steps, cfg.warmup_steps, cfg.weight_decay) == (.25, "epoch", 10, 0)
    file.write_text(AXOLOTL.replace("evals_per_epoch: 4", "evals_per_epoch: 1"))
    cfg = load_config(file)
    assert (cfg.train_file, cfg.data_format, cfg.method) == (("teknium/GPT4-LLM-Cleaned",), "alpaca_prompt", "qlora")
    assert (cfg.max_tokens_per_batch, cfg.eval_steps, cfg.learning_rate) == (4096, "epoch", 2e-4)
    assert (cfg.optim, cfg.eval_fraction, cfg.sources["eval_fraction"]) == ("adamw_bnb_8bit", .1, f"{file}:10")


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "3", "", "a: !!python/object:os.system x", "\0"])
def test_what_is_no_yaml_of_settings(tmp_path, text):
    (tmp_path/"x.yaml").write_text(text)
    with pytest.raises(ConfigError, match="this is not valid YAML for settings"): load_config(tmp_path/"x.yaml")


def test_yaml_runs_no_code_that_nobody_has_said_again(tmp_path):
    (tmp_path/"x.yaml").write_text("task: mine:Task\n")
    assert load_config(tmp_path/"x.yaml").untrusted == {"task"}
    assert load_config(tmp_path/"x.yaml", trust_remote_code=True).untrusted == frozenset()


def shell(line):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try: code = main(line.split())
        except SystemExit as e: code = e.code
    return code, " ".join(said.getvalue().split())


LINES = [   # and what the answer ends in
    ("train --learnin-rate 1", "Fix: write --learning-rate."), ("train --colour red", "Fix: sft_nb train --help."),
    ("train --lr", "Fix: --learning-rate auto."), ("train --lr fast", "Fix: --learning-rate auto."),
    ("train --lr 1e-4 1e-5", "Fix: --learning-rate 1e-4."), ("train --method q-lora", "Fix: --method qlora."),
    ("train --max-length long", "Fix: --max-length 512."), ("train --eval-fraction 5", "Fix: --eval-fraction 0.05."),
    ("train demo", "Fix: --config demo."), ("evaluate", "Fix: sft_nb evaluate runs/NAME."),
    ("data --show -1", "Fix: --show 0."), ("train --load-in-3bit", "Fix: sft_nb train --help."),
    ("train --gpu first", "Fix: --gpu 0."), ("train --padding_side left", "Fix: leave --padding-side out."),
    ("train --config demo --optim adamm", "Fix: --optim adamw_torch."), ("train --wandb maybe", "Fix: --wandb.")]


@pytest.mark.parametrize("line, ends", LINES, ids=[line for line, _ in LINES])
def test_a_wrong_line_ends_in_its_fix(line, ends):
    code, said = shell(line)
    assert code == 2 and said.endswith(ends), said


@pytest.fixture(scope="module")
def help(): return shell("train --help")[1]


def test_the_help_has_the_groups_of_a_config_and_three_examples_first(help):
    groups = ["rows options", "base-model options", "adapters options", "training options", "evaluation options"]
    places = [help.index(f" {group} ") for group in groups]
    assert places == sorted(places)
    assert help.count("sft_nb train --", 0, help.index("--help")) == 3


def test_shipped_configs_are_named_in_the_help(help): assert all(name in help for name in config_names())
