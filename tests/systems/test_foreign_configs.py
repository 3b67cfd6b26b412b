"""Config files of TRL, the handbook, Axolotl and LLaMA-Factory: read with their meaning, or refused."""
import json
import os
import random
import re
import textwrap
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from sft_nb.config.load import load_config, table
from sft_nb.base.report import ConfigError, SftError
from sft_nb.config.settings import ALIASES, defaults
from sft_nb.extras.meanings import FileSettings, Meaning, read_toml
from sft_nb.extras.other_tools import FOREIGN, foreign_keys, TOOLS, translate_setting, VALUES

PUBLISHED = Path(os.environ.get("SFT_NB_SHARED", Path(__file__).parents[3]/"shared"))/"foreign_configs"


def read(path):
    "The config, or the error that refuses it"
    try: return load_config(path)
    except ConfigError as e: return e


def print_table(folder=PUBLISHED):
    "Print the result for each file below a folder: python tests/systems/test_foreign_configs.py FOLDER"
    for tool in sorted(p for p in Path(folder).iterdir() if p.is_dir()):
        found = {file: read(file) for file in sorted(tool.glob("*.y*ml"))}
        for file, cfg in found.items():
            said = str(cfg).replace(str(file), "") if isinstance(cfg, ConfigError) else "read"
            print(f"{tool.name:<20} {file.name:<60} {said[:160]}")
        n = sum(not isinstance(cfg, ConfigError) for cfg in found.values())
        print(f"{tool.name:<20} {n} of {len(found)} are read\n")


READ = {"alignment-handbook": 6, "axolotl": 61, "llama-factory": 8}
OTHER_METHODS = {"alignment-handbook": 0, "axolotl": 14, "llama-factory": 7}   # no supervised fine-tuning on text


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published files are not in {PUBLISHED}")
@pytest.mark.parametrize("tool", sorted(READ))
def test_published_files_are_read_or_refused(tool):
    found = {file.name: read(file) for file in (PUBLISHED/tool).glob("*.y*ml")}   # any other exception fails here
    refused = {name: e for name, e in found.items() if isinstance(e, ConfigError)}
    methods = [name for name, e in refused.items() if "sft_nb only does supervised fine-tuning on text" in str(e)]
    assert (len(found) - len(refused), len(methods)) == (READ[tool], OTHER_METHODS[tool])
    for name in methods: assert len(str(refused[name]).splitlines()) == 1, name
    for name, e in refused.items(): assert "Fix: " in str(e) and len(str(e)) < 1200, name


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published files are not in {PUBLISHED}")
@pytest.mark.parametrize("name, published", [
    ("qlora-1b.yml", "axolotl/147_qlora-1b.yml"),
    ("qwen3_lora_sft_ds3.yaml", "llama-factory/examples_train_lora_qwen3_lora_sft_ds3.yaml")])
def test_the_page_shows_files_that_mean_what_the_published_ones_do(name, published, tmp_path):
    "Without their comments"
    cells = json.loads((ROOT/"nbs/reference/09_from_other_tools.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells)
    shown = re.search(rf'Path\("{name}"\)\.write_text\("""(.*?)"""\)', source, re.S)[1]
    assert settings_of(load(tmp_path, shown, name)) == settings_of(load_config(PUBLISHED/published))


def settings_of(cfg): return {k: getattr(cfg, k) for k in defaults() if getattr(cfg, k) != defaults()[k]}


def load(tmp_path, text, name="theirs.yaml"):
    (tmp_path/name).write_text(text)
    return load_config(tmp_path/name)


AXOLOTL = """
base_model: Qwen/Qwen2.5-7B
datasets:
  - {path: u/rows, type: chat_template}
micro_batch_size: 2
num_epochs: 2
learning_rate: 1e-4
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
dataset: u/rows
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
torch_dtype: bfloat16
"""
SWIFT = """
model: Qwen/Qwen3-4B
tuner_type: lora
dataset: [u/rows#500]
"""
HANDBOOK = """
model_name_or_path: mistralai/Mistral-7B-v0.1
dataset_mixer:
  HuggingFaceH4/ultrachat_200k: 1.0
dataset_splits: [train_sft, test_sft]
"""

MEANS = [   # a file, what is added to it, and some of its settings
    # what a file leaves out has the defaults of its tool
    (AXOLOTL, "", dict(method="full", num_train_epochs=2, gradient_accumulation_steps=1, weight_decay=0,
                       max_length=512, save_steps="epoch", on_long="drop", lr_scheduler_type="cosine")),
    (LLAMA_FACTORY, "", dict(method="lora", lora_r=8, lora_alpha=16, max_length=2048, on_long="cut", learning_rate=5e-5,
                             per_device_train_batch_size=8, lr_scheduler_type="linear", weight_decay=0,
                             warmup_steps=0, lora_target_modules=("all-linear",), train_on_prompt=False)),
    (TRL, "", dict(method="full", max_length=1024, learning_rate=2e-5, per_device_train_batch_size=8, on_long="cut",
                   dtype="bfloat16", gradient_accumulation_steps=1, train_file=("trl-lib/Capybara",))),
    (HANDBOOK, "", dict(train_file=("HuggingFaceH4/ultrachat_200k:train_sft",), eval_file=None,
                        train_on_prompt="conversations")),   # messages whole, and of prompt and completion the latter
    (HANDBOOK, "eval_strategy: epoch", dict(eval_file=("HuggingFaceH4/ultrachat_200k:test_sft",), eval_steps="epoch")),
    (SWIFT, "", dict(method="lora", lora_r=8, lora_alpha=32, lora_dropout=.05, learning_rate=1e-4, weight_decay=.1,
                     train_file=("u/rows:train[:500]",), gradient_accumulation_steps=16, on_long="drop",
                     lr_scheduler_type="cosine", lora_target_modules=("all-linear",), train_on_prompt=False)),
    (SWIFT.replace("lora", "full"),
     "per_device_train_batch_size: 4\ntruncation_strategy: left\nval_dataset: held.jsonl",
     dict(method="full", learning_rate=1e-5, gradient_accumulation_steps=4, on_long="cut", cut_side="start",
          eval_file=("held.jsonl",), eval_steps=500)),
    (SWIFT.replace("tuner_type", "train_type"), "system: Be brief.\nquant_bits: 4\ntarget_modules: [q_proj]\n"
     "split_dataset_ratio: 0.01\nmodel_name: bot\nmodel_author: me\nloss_scale: last_round\ninit_weights: pissa",
     dict(method="qlora", system_prompt="Be brief.", lora_target_modules=("q_proj",), eval_fraction=.01,
          model="Qwen/Qwen3-4B", train_on_turns="last", init_lora_weights="pissa")),
    (SWIFT, "loss_scale: all\nattn_impl: flash_attn\ndeepspeed: zero3_offload\nuse_chat_template: false",
     dict(train_on_prompt=True, attn_implementation="auto", deepspeed="zero3", chat_template="none")),
    (SWIFT, "enable_thinking: false\ntrain_dataloader_shuffle: false\ndataset_shuffle: false",
     dict(chat_template_kwargs=("enable_thinking=False",), shuffle=False)),
    (SWIFT, "train_dataloader_shuffle: false", dict(shuffle=True)),   # the dataset is shuffled
    (SWIFT, "packing: true\npacking_strategy: binpack\nmax_length: 2048\npacking_length: 4096\n"
     "per_device_train_batch_size: 2", dict(max_length=2048, max_tokens_per_batch=8192)),
    (SWIFT, "columns: {Ask: query, Say: response}\ntemplate: chatml\nis_binary_loss_scale: true",
     dict(fields=("question=Ask", "answer=Say"), chat_template="chatml")),
    (SWIFT.replace("u/rows#500", "'u/rows:a/b'"), "enable_channel_loss: true\neval_metric: nlg",
     dict(train_file=("u/rows:a:train", "u/rows:b:train"))),
    # reasoning
    (LLAMA_FACTORY, "template: qwen3\nenable_thinking: false",
     dict(reasoning="drop", chat_template_kwargs=("enable_thinking=False",))),
    (LLAMA_FACTORY, "template: qwen3\nenable_thinking: true", dict(reasoning="auto", chat_template_kwargs=None)),
    (LLAMA_FACTORY, "template: qwen\nenable_thinking: false", dict(reasoning="auto", chat_template_kwargs=None)),
    (LLAMA_FACTORY, "template: qwen3\nenable_thinking: false\nchat_template: '{{ messages }}'",
     dict(reasoning="drop", chat_template_kwargs=None)),
    (TRL, "enable_thinking: false\npreserve_thinking: true",
     dict(chat_template_kwargs=("enable_thinking=False", "preserve_thinking=True"))),
    (AXOLOTL, "chat_template_kwargs: {enable_thinking: true}", dict(chat_template_kwargs=("enable_thinking=True",))),
    # how it is trained
    (AXOLOTL, "adapter: lora\nload_in_8bit: true", dict(method="qlora", load_in_8bit=True)),
    (AXOLOTL, "load_in_4bit: false\nadapter: lora\nload_in_8bit: false", dict(method="lora")),
    (AXOLOTL, "adapter: lora\nload_in_4bit: true", dict(method="qlora")),
    (AXOLOTL, "load_in_4bit: false\nload_in_8bit: false\nadapter:", dict(method="full")),
    (AXOLOTL, "adapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_target_linear: true\n"
              "lora_target_modules: [q_proj, v_proj]\npeft_use_dora: true",
     dict(method="qlora", lora_target_modules=("all-linear",), use_dora=True)),
    (AXOLOTL, "adapter: lora\nlora_target_modules: 'model.language_model.layers.[\\d]+.(mlp|self_attn).(up|down)_proj'",
     dict(lora_target_modules=("up_proj", "down_proj"))),
    (AXOLOTL, "lora_modules_to_save: [embed_tokens, lm_head]\nadapter: lora",
     dict(modules_to_save=("embed_tokens", "lm_head"))),
    (LLAMA_FACTORY, "quantization_bit: 4\nlora_rank: 32", dict(method="qlora", lora_r=32, lora_alpha=64)),
    (LLAMA_FACTORY, "quantization_bit: 8", dict(method="qlora", load_in_8bit=True)),
    (LLAMA_FACTORY, "finetuning_type: full\npure_bf16: true", dict(method="full", dtype="bfloat16")),
    (LLAMA_FACTORY, "lora_target: q_proj,v_proj\nadditional_target: embed_tokens,lm_head\nlora_alpha: 10",
     dict(lora_target_modules=("q_proj", "v_proj"), modules_to_save=("embed_tokens", "lm_head"), lora_alpha=10)),
    (LLAMA_FACTORY, "pissa_init: true\npissa_iter: 4\npissa_convert: true", dict(init_lora_weights="pissa_niter_4")),
    (LLAMA_FACTORY, "mask_history: true\nbf16: true", dict(train_on_turns="last", dtype="bfloat16")),
    (TRL, "use_peft: true\nlora_r: 32\nlora_alpha: 16", dict(method="lora", lora_r=32, lora_alpha=16, lora_dropout=.05,
                                                             lora_target_modules=("q_proj", "v_proj"))),
    (AXOLOTL, "adapter: lora\nlora_target_parameters: [experts.gate_up_proj]",
     dict(method="lora", lora_target_parameters=("experts.gate_up_proj",), lora_target_modules=("none",))),
    (AXOLOTL, "adapter: lora\nlora_target_parameters: [experts.gate_up_proj]\nlora_target_linear: true",
     dict(lora_target_parameters=("experts.gate_up_proj",), lora_target_modules=("all-linear",))),
    (LLAMA_FACTORY, "finetuning_type: lora\nmoe_aux_loss_coef: 0.01", dict(method="lora", router_aux_loss_coef=.01)),
    (TRL, "use_peft: true\nload_in_4bit: true\nlora_target_modules: all-linear",
     dict(method="qlora", lora_target_modules=("all-linear",), bnb_4bit_use_double_quant=False)),
    (TRL, "bf16: true\nfp16: false\nassistant_only_loss: true", dict(dtype="bfloat16", train_on_prompt=False)),
    # what is learned: TRL 1.16 learns rows of messages whole, and completions without their prompts
    (TRL, "", dict(train_on_prompt="conversations")), (TRL, "assistant_only_loss: false", dict(
        train_on_prompt="conversations")),
    (TRL, "completion_only_loss: false", dict(train_on_prompt=True)),
    (TRL, "completion_only_loss: true", dict(train_on_prompt="conversations")),
    (TRL, "completion_only_loss: true\nassistant_only_loss: false", dict(train_on_prompt="conversations")),
    (TRL, "completion_only_loss: false\nassistant_only_loss: true", dict(train_on_prompt=False)),
    (TRL, "train_on_prompt: false", dict(train_on_prompt=False)),
    (AXOLOTL, "", dict(train_on_prompt=False, task="chat")),
    (LLAMA_FACTORY, "do_train: true\ndo_predict: true\ndo_eval: true", dict(train_on_prompt=False)),
    (TRL, "do_eval: true\ndo_predict: true", dict(method="full")),   # its script trains anyway
    # how often
    (AXOLOTL, "val_set_size: 0.1\nevals_per_epoch: 4\nsaves_per_epoch: 2",
     dict(eval_fraction=.1, eval_steps=.125, save_steps=.25)),
    (AXOLOTL, "val_set_size: 0.1\nevals_per_epoch: 1\nsaves_per_epoch: 1",
     dict(eval_steps="epoch", save_steps="epoch")),
    (AXOLOTL, "val_set_size: 0\nevals_per_epoch: 4", dict(eval_fraction=None, eval_steps=None)),
    (AXOLOTL, "val_set_size: 0.05", dict(eval_steps="epoch")),
    (AXOLOTL, "val_set_size: 200", dict(eval_rows=200, eval_fraction=None)),
    (AXOLOTL, "eval_strategy: 'no'\nval_set_size: 0.05", dict(eval_steps=None)),
    (LLAMA_FACTORY, "val_size: 0.1\neval_strategy: steps\neval_steps: 500\nper_device_eval_batch_size: 1",
     dict(eval_fraction=.1, eval_steps=500, per_device_eval_batch_size=1)),
    (TRL, "eval_strategy: steps\neval_steps: 100", dict(eval_steps=100, eval_file=("trl-lib/Capybara:test",))),
    (TRL, "eval_strategy: 'no'\neval_steps: 100", dict(eval_steps=None)),
    (TRL, "save_strategy: epoch\nsave_steps: 100", dict(save_steps="epoch")),
    (TRL, "save_steps: 0.05\nlogging_steps: 0.1", dict(save_steps=.05, logging_steps=10)),
    # batches, schedule, optimiser
    (AXOLOTL, "sample_packing: true\nsequence_len: 4096", dict(max_tokens_per_batch=8192, max_length=4096)),
    (AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 2\nbatch_size: 32"), "",
     dict(effective_batch_size=32, per_device_train_batch_size=2)),
    (AXOLOTL, "unfrozen_parameters: ['transformer.blocks.[0-7].', lm_head]",
     dict(method="full", unfrozen_parameters=("transformer.blocks.[0-7].", "lm_head"))),
    (AXOLOTL, "adapter: lora\nunfrozen_parameters: [model.language_model.*, lm_head]",
     dict(method="lora", unfrozen_parameters=None)),
    (AXOLOTL, "curriculum_sampling: true", dict(shuffle=False)),
    (AXOLOTL.replace("micro", "  - {path: u/more, type: chat_template}\nmicro"), "curriculum_sampling: true",
     dict(shuffle=True)),   # merged datasets are shuffled
    (AXOLOTL.replace("micro", "  - {path: u/more, type: chat_template}\nmicro"),
     "curriculum_sampling: true\nshuffle_merged_datasets: false", dict(shuffle=False)),
    (LLAMA_FACTORY, "disable_shuffling: true", dict(shuffle=False)),
    (TRL, "train_sampling_strategy: sequential\nlog_level: info", dict(shuffle=False)),
    (AXOLOTL, "wandb_project: mine", dict(wandb=True, wandb_project="mine")),   # as axolotl.utils.wandb_ turns it on
    (AXOLOTL, "wandb_project:\nwandb_name:", dict(wandb=False, wandb_project="sft_nb")),
    (AXOLOTL, "wandb_project: mine\nuse_wandb: false", dict(wandb=False, wandb_project="mine")),
    (AXOLOTL, "wandb_project: mine\nwandb_mode: disabled", dict(wandb=False)),
    (AXOLOTL, "cosine_min_lr_ratio: 0.1\nlr_scheduler: cosine",
     dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=("min_lr_rate=0.1",))),
    (AXOLOTL, "adam_beta2: 0.95\nadam_epsilon: 0.00001\nwarmup_steps: 10", dict(adam_beta2=.95, adam_epsilon=1e-5,
                                                                               warmup_steps=10)),
    (AXOLOTL, "chat_template_kwargs: {enable_thinking: false}", dict(chat_template_kwargs=("enable_thinking=False",))),
    (TRL, "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\nwarmup_ratio: 0.03",
     dict(lr_scheduler_kwargs=("min_lr_rate=0.1",), warmup_steps=.03)),
    (TRL, "warmup_ratio: 0.03\nwarmup_steps: 20", dict(warmup_steps=20)),
    (TRL, "packing: true\npacking_strategy: bfd_split\nmax_length: 100",
     dict(on_long="split", max_tokens_per_batch=800)),
    (AXOLOTL, "excess_length_strategy: truncate\ntrain_on_inputs: true", dict(on_long="cut", train_on_prompt=True)),
    (AXOLOTL, "gradient_checkpointing: unsloth\nactivation_offloading: legacy",
     dict(gradient_checkpointing=True, activation_offloading=True)),
    (TRL, "optim: galore_adamw\noptim_args: rank=64, update_proj_gap=100\noptim_target_modules: [self_attn, mlp]",
     dict(optim="galore_adamw", optim_args=("rank=64", "update_proj_gap=100"),
          optim_target_modules=("self_attn", "mlp"))),
    (AXOLOTL, "optimizer: apollo_adamw\noptim_args: {rank: 8, proj: random}\noptim_target_modules: all-linear",
     dict(optim="apollo_adamw", optim_args=("rank=8", "proj=random"), optim_target_modules=("all-linear",))),
    (LLAMA_FACTORY, "finetuning_type: full\nuse_galore: true\ngalore_target: mlp,self_attn\ngalore_rank: 128",
     dict(optim="galore_adamw", optim_target_modules=("mlp", "self_attn"),
          optim_args=("rank=128", "update_proj_gap=200", "scale=2.0", "proj_type=std"))),
    (LLAMA_FACTORY, "finetuning_type: full\nuse_apollo: true\napollo_target: all", dict(
        optim="apollo_adamw", optim_target_modules=("all-linear",), optim_args=(
            "rank=16", "update_proj_gap=200", "scale=32.0", "proj=random", "proj_type=std", "scale_type=channel"))),
    # processes
    (TRL, "accelerate_config: zero3\nnum_processes: 4", dict(deepspeed="zero3", num_processes=4)),
    (TRL, "accelerate_config: multi_gpu", dict(deepspeed=None)), (TRL, "accelerate_config: fsdp2", dict(fsdp=True)),
    (SWIFT, "num_processes: 4", dict(gradient_accumulation_steps=4)),   # 16 rows in a step, on all processes together
    (SWIFT, "num_processes: 4\nper_device_train_batch_size: 2", dict(gradient_accumulation_steps=2)),
    (SWIFT, "new_special_tokens: [<a>, <b>]\nmax_epochs: 2\nearly_stop_interval: 3\nexperts_impl: grouped_mm",
     dict(train_tokens=("<a>", "<b>"), num_train_epochs=2, early_stopping_patience=3)),
    (AXOLOTL, "expert_parallel_size: 4\nuse_dsv4_kernels: true", dict(method="full")),
    (TRL, "device_map: auto", dict(device_map="auto")), (TRL, "device_map: {'': 0}", dict(device_map=None)),
    (AXOLOTL, "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_version: 1, fsdp_offload_params: true}",
     dict(fsdp=True)),
    (AXOLOTL, "fsdp_version: 2\nfsdp_config:\n  offload_params: false\n  state_dict_type: FULL_STATE_DICT",
     dict(fsdp=True)),
    (AXOLOTL, "deepspeed: deepspeed_configs/zero3_bf16.json", dict(deepspeed="zero3")),
    (AXOLOTL, "deepspeed: deepspeed_configs/zero1.json", dict(deepspeed="zero2")),
    (LLAMA_FACTORY, "deepspeed: examples/deepspeed/ds_z3_config.json", dict(deepspeed="zero3")),
    (LLAMA_FACTORY, "deepspeed: examples/deepspeed/ds_z0_config.json", dict(deepspeed=None)),
    (AXOLOTL, "context_parallel_size: 2\nattn_implementation: flash_attention_2",
     dict(sequence_parallel_size=2, attn_implementation="auto")),
    # templates
    (AXOLOTL, "chat_template: chatml\nspecial_tokens: {eos_token: <|im_end|>}", dict(chat_template="chatml")),
    (AXOLOTL, "chat_template: qwen_25", dict(chat_template=None)),
    (AXOLOTL, "chat_template: tokenizer_default_fallback_chatml", dict(chat_template=None)),
    (AXOLOTL, "chat_template: jinja\nchat_template_jinja: '{{ messages }}'", dict(chat_template="{{ messages }}")),
    (AXOLOTL, "default_system_message: Be brief.\nspecial_tokens: {additional_special_tokens: [<a>, <b>]}",
     dict(system_prompt="Be brief.", train_tokens=("<a>", "<b>"))),
    (AXOLOTL, "tokens: [<a>]", dict(train_tokens=("<a>",))),
    (LLAMA_FACTORY, "template: llama3\nadd_tokens: <a>,<b>", dict(chat_template="llama3", train_tokens=("<a>", "<b>"))),
    (LLAMA_FACTORY, "template: qwen3_nothink", dict(chat_template=None)),
    (LLAMA_FACTORY, "template: empty", dict(chat_template="none")),
    (TRL, "chat_template_path: mine.jinja\neos_token: <|im_end|>", dict(chat_template="mine.jinja")),
    (TRL, "activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2}",
     dict(gradient_checkpointing=True)),
    # rows
    (TRL, "dataset_config: main\ndataset_train_split: train[:1%]",
     dict(train_file=("trl-lib/Capybara:main:train[:1%]",))),
    (TRL, "dataset_text_field: body", dict(fields=("text=body",))),
    (LLAMA_FACTORY, "max_samples: 1000", dict(train_file=("u/rows:train[:1000]",), max_samples=None)),
    (LLAMA_FACTORY.replace("u/rows", "identity,alpaca_en_demo"), "max_samples: 10\neval_dataset: held",
     dict(train_file=("data/identity.json[:10]", "data/alpaca_en_demo.json[:10]"), eval_file=("data/held.json",))),
]


@pytest.mark.parametrize("file, more, wanted", MEANS, ids=lambda x: re.sub(r"\W+", " ", str(x))[:50])
def test_what_a_file_means(tmp_path, file, more, wanted):
    cfg = load(tmp_path, f"{file}{more}\n")
    assert {k: getattr(cfg, k) for k in wanted} == wanted


ENTRIES = [   # an entry of Axolotl's or TRL's datasets, and what it sets
    (dict(path="u/x", type="alpaca"), dict(data_format="alpaca_prompt", chat_template="alpaca", train_file=("u/x",))),
    (dict(path="u/x", type="completion", field="body"), dict(data_format="text", on_long="split",
     fields=("text=body",))),
    (dict(path="u/x", type="sharegpt", conversation="chatml"), dict(data_format="sharegpt", chat_template="chatml")),
    (dict(path="u/x", type="chat_template", field_messages="conversations",
          message_property_mappings=dict(role="from", content="value")), dict(data_format="auto", fields=None)),
    (dict(path="u/x", type="chat_template", field_messages="talk"), dict(fields=("messages=talk",))),
    (dict(path="u/x", type="chat_template", roles_to_train=["assistant"], train_on_eos="turn"),
     dict(train_on_prompt=False)),
    (dict(path="u/x", type="chat_template", roles_to_train=["human", "gpt"]), dict(train_on_prompt=True)),
    (dict(path="u/x", type="chat_template", roles_to_train=[], message_field_training="training"),
     dict(train_on_prompt=False)),
    (dict(path="u/x", type="chat_template", roles_to_train=None, train_on_eos=None), dict(train_on_turns="last")),
    (dict(path="u/x", type="gpteacher"), dict(data_format="alpaca_prompt", fields=("output=response",))),
    (dict(path="u/x", type="oasst"), dict(fields=("instruction=INSTRUCTION", "output=RESPONSE"))),
    (dict(path="u/x", type="alpaca_w_system.load_open_orca"), dict(data_format="question_answer")),
    (dict(path="u/x", type="alpaca_chat.load_qa"), dict(data_format="question_answer")),
    (dict(path="u/x", name="main", split="test"), dict(train_file=("u/x:main:test",))),
    (dict(path="u/x", revision="abc", split="train[:20%]"), dict(train_file=("u/x@abc:train[:20%]",))),
    (dict(path="json", data_files=["a.json", "b.json"]), dict(train_file=("a.json", "b.json"))),
    (dict(path="u/x", data_files=["sub/a.json"]), dict(train_file=("hf://datasets/u/x/sub/a.json",))),
    (dict(path="rows.jsonl", ds_type="json", type="chat_template", split="train[:5%]"),
     dict(train_file=("rows.jsonl[:5%]",))),
    (dict(path="u/x", type=dict(field_instruction="q", field_output="a", format="[INST] {instruction} [/INST]")),
     dict(data_format="alpaca", fields=("instruction=q", "output=a")))]


@pytest.mark.parametrize("entry, wanted", ENTRIES, ids=lambda x: str(x)[:60])
def test_what_an_entry_of_datasets_means(tmp_path, entry, wanted):
    cfg = load(tmp_path, AXOLOTL.replace("{path: u/rows, type: chat_template}", json.dumps(entry)))
    assert {k: getattr(cfg, k) for k in wanted} == wanted


def test_a_key_of_messages_that_is_not_known_is_to_be_renamed(tmp_path):
    entry = json.dumps(dict(path="u/x", type="chat_template", message_field_training="learn_it"))
    with pytest.raises(ConfigError, match="learn_it, and not one of train, training.*rename that key of the messages"):
        load(tmp_path, AXOLOTL.replace("{path: u/rows, type: chat_template}", entry))


def test_several_datasets(tmp_path):
    both = AXOLOTL.replace("micro_batch", "  - {path: rows.jsonl, type: sharegpt}\nchat_template: chatml\nmicro_batch")
    cfg = load(tmp_path, both)
    assert (cfg.train_file, cfg.data_format, cfg.chat_template) == (("u/rows", "rows.jsonl"), "auto", "chatml")
    cfg = load(tmp_path, HANDBOOK.replace("ultrachat_200k: 1.0", "ultrachat_200k: 0.5\n  u/x: 1.0"))
    assert (cfg.train_weights, cfg.train_file[1]) == ((.5, 1.), "u/x:train_sft")
    cfg = load(tmp_path, TRL.replace("dataset_name: trl-lib/Capybara", "datasets:\n  - {path: u/x, name: a, split: b}"))
    assert cfg.train_file == ("u/x:a:b",)


def test_axolotls_types_write_their_own_prompts(tmp_path):
    "The text is that of `axolotl.prompters` and `axolotl.prompt_strategies`"
    jinja2 = pytest.importorskip("jinja2")
    from sft_nb.rows.readers import to_messages
    with_input = ("Below is an instruction that describes a task, paired with an input that provides further context. "
                  "Write a response that appropriately completes the request.")
    without = with_input.replace(", paired with an input that provides further context", "")
    concise = ("Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that "
               "appropriately and concisely completes the request.\n\n")
    row, question = dict(instruction="Add.", input="1+1", output="2"), dict(question="1+1?", answer="2")
    cases = [
        ("alpaca", row, f"{with_input}\n\n### Instruction:\nAdd.\n\n### Input:\n1+1\n\n### Response:\n2</s>"),
        ("alpaca", row | dict(input=""), f"{without}\n\n### Instruction:\nAdd.\n\n### Response:\n2</s>"),
        ("alpaca_w_system.load", row | dict(system="S"),
         "S\n\n### Instruction:\nAdd.\n\n### Input:\n1+1\n\n### Response:\n2</s>"),
        ("alpaca:chat", row, f"SYSTEM: {with_input}\nUSER: Add.\n1+1\nASSISTANT:2</s>"),
        ("alpaca_chat.load", row | dict(input=None), f"SYSTEM: {without}\nUSER: Add.\nASSISTANT:2</s>"),
        ("alpaca_chat.load_qa", question, f"SYSTEM: {concise}\nUSER: 1+1?\nASSISTANT:2</s>"),
        ("jeopardy", question | dict(category="SUMS"),
         f"{with_input}\n\n### Instruction:\n1+1?\n\n### Input:\nSUMS\n\n### Response:\nwhat is 2</s>"),
        ("alpaca_w_system.load_open_orca", question | dict(system="S"),
         "### System:\nS\n### Human:\n1+1?\n### Assistant:\n2</s>")]
    shipped = Path(__file__).parents[2]/"sft_nb/assets/templates/alpaca.jinja"
    for kind, row, wanted in cases:
        cfg = load(tmp_path, AXOLOTL.replace("type: chat_template", f"type: '{kind}'") + "chat_template: chatml\n")
        template = shipped.read_text() if cfg.chat_template == "alpaca" else cfg.chat_template
        text = jinja2.Template(template).render(messages=to_messages(row, format=cfg.data_format), bos_token="",
                                                eos_token="</s>", raise_exception=None)
        assert text == wanted, kind
    for kind, says in (("context_qa.load_v2", "writes 'Answer:' in front of each"), ("reflection", "not known here")):
        with pytest.raises(ConfigError, match=says):
            load(tmp_path, AXOLOTL.replace("type: chat_template", f"type: {kind}"))
    both = AXOLOTL.replace("micro_batch", "  - {path: rows.jsonl, type: alpaca}\nchat_template: chatml\nmicro_batch")
    with pytest.raises(ConfigError, match="their types write prompts differently") as e: load(tmp_path, both)
    assert "type: chat_template for each" in str(e.value.fix)
    load(tmp_path, both.replace("type: alpaca", "type: chat_template"))


def test_a_template_is_made_of_a_format(tmp_path):
    jinja2 = pytest.importorskip("jinja2")
    kind = dict(format='[INST] {instruction} {input}"[/INST]', no_input_format="Q: {instruction}\nA: ",
                system_prompt="S")
    cfg = load(tmp_path, AXOLOTL.replace("type: chat_template", f"type: {json.dumps(kind)}"))
    talk = [dict(role="user", content="hi"), dict(role="assistant", content="yes")]
    assert jinja2.Template(cfg.chat_template).render(messages=talk, eos_token="</s>") == "SQ: hi\nA: yes</s>"


REFUSED = [   # a file, what is added to it, and what the error says
    (AXOLOTL, "rl: dpo\ndpo_beta: 0.1\nuse_eaft: true", "asks for preference training (DPO)"),
    (AXOLOTL, "rl: grpo\ntrl: {beta: 0.1}", "asks for reinforcement learning (GRPO)"),
    (AXOLOTL, "rl: kto\nremove_unused_columns: false", "preference training (KTO)"),
    (AXOLOTL, "reward_model: true\nnum_labels: 1", "the training of a reward model"),
    (AXOLOTL, "pretraining_dataset: [{path: allenai/c4}]", "pretraining on raw text"),
    (AXOLOTL, "processor_type: AutoProcessor\nskip_prepare_dataset: true", "training on images, video or sound"),
    (LLAMA_FACTORY, "template: qwen2_vl", "training on images, video or sound"),
    (LLAMA_FACTORY.replace("sft", "dpo"), "pref_beta: 0.1\npref_loss: sigmoid", "preference training (DPO)"),
    (LLAMA_FACTORY.replace("sft", "pt"), "", "pretraining on raw text"),
    (LLAMA_FACTORY.replace("sft", "rm"), "", "the training of a reward model"),
    (LLAMA_FACTORY.replace("u/rows", "mllm_demo"), "", "training on images"),
    (LLAMA_FACTORY, "image_max_pixels: 262144\nvideo_max_pixels: 16384", "training on images"),
    ("model_name_or_path: u/m\ntemplate: qwen3\nexport_dir: out\nexport_size: 5\n", "", "sft_nb merge"),
    ("model_name_or_path: u/m\ntemplate: qwen3\ninfer_backend: huggingface\n", "", "answering with a model"),
    (TRL, "beta: 0.1\nmax_prompt_length: 512", "preference training"),
    (LLAMA_FACTORY, "do_predict: true\npredict_with_generate: true", "do_predict = True asks for answers"),
    (LLAMA_FACTORY, "do_eval: true", "do_eval = True asks for evaluation"),
    (LLAMA_FACTORY, "do_train: false\ndo_predict: true", "asks for evaluation, and no training"),
    ("do_predict: true\n", "", "asks for answers to held-out rows"),
    (LLAMA_FACTORY, "template: qwen3\nenable_thinking:", "rows without reasoning would get an empty block"),
    (SWIFT, "rlhf_type: dpo", "preference training (DPO)"), (SWIFT, "loss_scale: hermes", "not weighted"),
    (SWIFT, "loss_scale: default+ignore_empty_think", "enable_thinking: false"),
    (SWIFT, "truncation_strategy: odd", "delete, left, right or split"), (SWIFT, "dataset: [u/x#many]", "whole number"),
    (SWIFT, "tuner_type: vera", "another way to train"), (SWIFT, "system: odd.txt", "no such file"),
    (SWIFT, "quant_bits: 3", "4 or 8 bits"), (SWIFT, "quant_method: hqq", "bitsandbytes"),
    (SWIFT, "task_type: seq_cls", "another task"), (SWIFT, "columns: {a: query}", "fields names the columns"),
    (SWIFT, "freeze_parameters_ratio: 0.5", "not supported here"),
    (TRL, "num_generations: 8\nmax_completion_length: 100", "reinforcement learning"),
    (AXOLOTL, "use_eaft: true", "another loss"), (LLAMA_FACTORY, "use_dft_loss: true", "another loss"),
    (TRL, "loss_type: dft", "it is the loss of the next token"), (AXOLOTL, "neftune_noise_alpha: 5", "adds noise"),
    (LLAMA_FACTORY, "finetuning_type: freeze", "another way to train"),
    (AXOLOTL, "optimizer: muon", "an optimiser that"),
    (LLAMA_FACTORY, "use_badam: true", "its optimiser"),
    (LLAMA_FACTORY, "use_galore: true\ngalore_layerwise: true", "galore_layerwise is not supported"),
    (SWIFT, "use_galore: true", "not supported here"), (AXOLOTL, "lr_scheduler: one_cycle", "a schedule that"),
    (AXOLOTL, "peft_layer_replication: [[0, 2]]", "would not be LoRA"),
    (AXOLOTL, "loraplus_lr_ratio: 16", "another learning"), (AXOLOTL, "qat: {weight_dtype: int4}", "number format"),
    (AXOLOTL, "adapter: lora\nunfrozen_parameters: [norm]", "no part of its base beside it"),
    (AXOLOTL, "unfrozen_parameters: ['^model.embed_tokens.weight$[:32000]']", "parameters are trained whole"),
    (LLAMA_FACTORY, "template: vicuna", "the text of vicuna is not known here"),
    (LLAMA_FACTORY, "template: default", "the text of default is not known here"),
    (TRL, "max_length: null", "rows of any length stay whole there. Fix: max_length: 32768"),
    ("model: u/m\nadapters: out\nstream: true\n", "", "answering with a model, and no training"),
    ("model: u/m\nsampler_type: distill\nstream: true\n", "", "drawing answers, and no training"),
    (LLAMA_FACTORY, "use_mca: true", "own trainer"),
    (TRL, "log_level: x", "it takes 'debug', 'info'"), (TRL, "resume_from_checkpoint: c", "its own settings"),
    (TRL, "greater_is_better: true", "a lower loss is better"), (TRL, "gpu: 1", "when the program starts"),
    (TRL, "distributed_training: true", "num_processes sets how many"),
    (AXOLOTL, "datasets: [{path: u/x, type: {odd: 1}}]", "type odd of a type"),
    (AXOLOTL, "datasets: [{path: u/x, type: chat_template, train_on_eos: last}]", "Fix: train_on_eos: turn, as every"),
    (AXOLOTL, "plugins: [axolotl.integrations.kd.KDPlugin]", "KDPlugin"),
    (AXOLOTL, "adapter: lora\nlora_target_linear: true\nlora_target_modules: [lm_head]", "besides all linear layers"),
    (AXOLOTL, "adapter: vera", "lora or qlora"), (AXOLOTL, "tokens: {eos: x}", "not a special token"),
    (AXOLOTL, "model_config: {rope_scaling: {factor: 2}}", "rope_scaling would change the model"),
    (AXOLOTL, "bnb_config_kwargs: {odd: 1}", "odd is not known"),
    (AXOLOTL, "evals_per_epoch: x\nval_set_size: .1", "times"),
    (AXOLOTL, "val_set_size: -1", "a share below 1"), (AXOLOTL, "fsdp: [odd]", "odd is not known"),
    (AXOLOTL, "excess_length_strategy: odd", "drop, truncate or raise"), (TRL, "truncation_mode: x", "keep_start"),
    (LLAMA_FACTORY, "quantization_bit: 3", "4 or 8 bits"),
    (TRL, "packing: true\npacking_strategy: wrapped", "rows stay whole"),
    (LLAMA_FACTORY, "mix_strategy: interleave_over", "train_weights"),
    (AXOLOTL, "cosine_constant_lr_ratio: 0.8", "held"),
    (AXOLOTL, "lora_target_modules: 'layers.(1|2).mlp'\nadapter: lora", "not a pattern"),
    (AXOLOTL, "lerning_rate: 1", "lerning_rate is not a setting; the nearest is learning_rate"),
    (AXOLOTL, "sequence_len: [1, 2]", "sequence_len takes an integer"), (AXOLOTL, "datasets: 3", "a list of entries"),
    (AXOLOTL, "output_dir: {a: b}", "output_dir takes a string"),
    (AXOLOTL, "chat_template: [a]", "chat_template takes"),
    (LLAMA_FACTORY, "dataset: [1, {a: b}]\nadd_tokens: 3", "a type other than int"),
    (HANDBOOK, "dataset_mixture: {datasets: [3]}", "entries"),
    (HANDBOOK, "dataset_mixer: 3", "a dataset and its part"), (HANDBOOK, "dataset_splits: [x]", "none for training"),
    (AXOLOTL, "peft_init_lora_weights: false", "changes nothing at first"),
    (AXOLOTL, "peft: {backend: torchao}", "quantised"),
    (TRL, "dataset_config: a\ndatasets: [{path: u/x}, {path: u/y}]", "belongs to one dataset"),
]


@pytest.mark.parametrize("file, more, says", REFUSED, ids=lambda x: re.sub(r"\W+", " ", str(x))[:50])
def test_what_is_refused_and_why(tmp_path, file, more, says):
    names = {line.split(":")[0] for line in more.splitlines()}   # a name that is set again replaces what was there
    kept = [line for line in file.splitlines() if line.split(":")[0] not in names or not line.strip()]
    replaced = names & {"dataset", "datasets", "dataset_splits", "dataset_mixer"}
    text = "\n".join([*kept, more]) if replaced else file + more
    if "datasets" in names:
        text = text.replace("  - {path: u/rows, type: chat_template}\n", "")
        text = text.replace("dataset_name: trl-lib/Capybara\n", "packing: false\n")
    if "dataset_mixer" in names: text = text.replace("  HuggingFaceH4/ultrachat_200k: 1.0\n", "")
    with pytest.raises(ConfigError) as e: load(tmp_path, text + "\n")
    assert says in str(e.value), str(e.value)
    if "only does supervised" in str(e.value): assert "problems" not in str(e.value)


def test_every_entry_that_cannot_be_read_is_named(tmp_path):
    odd = [dict(path="a", type="reflection"), dict(path="b", type="chat_template", train_on_eos="last"),
           dict(path="c", type="chat_template", message_property_mappings=dict(role="who", content="text")),
           dict(path="d", type="chat_template", roles=dict(user=["me"]), roles_to_train=["tool"]),
           dict(path="e", type=dict(format="no place")), dict(path="f", shards=2, shards_idx=1,
            drop_system_message=True),
           dict(path="g", message_field_training="learn", odd=1)]
    with pytest.raises(ConfigError) as e: load(tmp_path, AXOLOTL.replace("\n  - {path: u/rows, type: chat_template}",
                                                                         f" {json.dumps(odd)}"))
    for part in ("type reflection", "train_on_eos last", "keys who and text", "the role me of user",
                 "roles_to_train tool", "a format without {instruction}", "a part of the rows (shards)",
                 "drop_system_message",
                 "message_field_training learn", "odd is not known"): assert part in e.value.expected
    nothing = [dict(path="a", type="chat_template", roles_to_train=[])]
    with pytest.raises(ConfigError, match="roles_to_train empty. Fix: leave roles_to_train out"):
        load(tmp_path, AXOLOTL.replace("\n  - {path: u/rows, type: chat_template}", f" {json.dumps(nothing)}"))
    two = [dict(path="a", type="alpaca", system_prompt="x"), dict(path="b", type="alpaca", system_prompt="y")]
    with pytest.raises(ConfigError, match="system_prompt differs"):
        load(tmp_path, AXOLOTL.replace("\n  - {path: u/rows, type: chat_template}", f" {json.dumps(two)}"))
    with pytest.raises(ConfigError, match="orpo.chat_template, which hold no answers"):
        load(tmp_path, AXOLOTL.replace("chat_template", "orpo.chat_template"))


ODD = [3, -1.5, "x", [1], [{}], [[]], {"a": 1}, True, "1e400", {"path": []}, "\0"]


@pytest.mark.parametrize("value", ODD, ids=str)
def test_no_value_of_any_name_ends_in_a_raw_error(tmp_path, value):
    for tool in ("", *TOOLS):
        given = FileSettings(defaults() | dict(train_file=("u/x",)), dict(max_samples=value), tool, tmp_path)
        for name in {*FOREIGN, *ALIASES, *defaults(), *(TOOLS[tool].own if tool else ())}:
            assert isinstance(translate_setting(name, value, given), Meaning | None), name
    for base in (AXOLOTL + "sample_packing: true\nval_set_size: 0.1\nevals_per_epoch: 2\n", TRL + "use_peft: true\n"):
        for name in ("max_length", "sequence_len", "micro_batch_size", "num_epochs", "lora_r", "train_file", "model",
                     "eval_file", "chat_template", "output_dir", "task", "fields", "dtype", "report_to", "run_name"):
            (tmp_path/"odd.yaml").write_text(re.sub(rf"(?m)^{name}:.*\n", "", base) + f"{name}: {json.dumps(value)}\n")
            read(tmp_path/"odd.yaml")


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"the published files are not in {PUBLISHED}")
@pytest.mark.parametrize("seed", range(100))
def test_a_published_file_that_was_altered_is_read_or_refused(tmp_path, seed):
    "Keys are left out, get other values, or are added from any tool; nothing but a ConfigError comes out"
    rng = random.Random(seed)
    file = rng.choice(sorted(PUBLISHED.glob("*/*.y*ml")))
    settings = yaml.safe_load(file.read_text())
    values = [*ODD, None, [], {}, 10**400, -1, 0.5, [None], {"a": [1]}, "auto", "\n", [["a"]], {1: 2}]
    for key in rng.sample(sorted(settings), min(4, len(settings))): settings[key] = rng.choice(values)
    for key in rng.sample(sorted(settings), min(3, len(settings))): del settings[key]
    for key in rng.sample(sorted({*FOREIGN, *ALIASES, *defaults()}), 6): settings[key] = rng.choice(values)
    for entry in settings.get("datasets") or () if isinstance(settings.get("datasets"), list) else ():
        if isinstance(entry, dict): entry[rng.choice([*entry, "roles", "type", "split"])] = rng.choice(values)
    (tmp_path/"altered.yaml").write_text(yaml.safe_dump(settings))
    read(tmp_path/"altered.yaml")


def test_every_key_has_a_meaning_in_words():
    "The page of all keys is made of them"
    keys = dict(foreign_keys())
    assert {*FOREIGN, *ALIASES, *VALUES} <= {*keys} and all(keys.values())
    assert keys["save_strategy"].startswith("'steps': ignored: every save_steps; 'epoch': save_steps = 'epoch'")
    assert keys["use_eaft"] == "refused: it trains with another loss" and keys["lr"] == "learning_rate"
    assert keys["batch_size"] == "per_device_train_batch_size"
    assert keys["batch_size (Axolotl)"] == "effective_batch_size"


def test_the_chat_template_of_a_folder(tmp_path):
    "TRL takes the folder of a tokenizer for it"
    (tmp_path/"its").mkdir()
    (tmp_path/"its/chat_template.jinja").write_text("{{ messages }}")
    assert Path(load(tmp_path, TRL + "chat_template_path: its\n").chat_template).name == "chat_template.jinja"


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(ConfigError) as e:
        load(tmp_path, AXOLOTL + "use_eaft: true\noptimizer: muon\nnovel_feature: true\nlora_r: x\nnovel_too: false\n")
    text = str(e.value)
    assert text.startswith("4 problems")
    assert all(word in text for word in ("use_eaft", "muon", "novel_feature", "lora_r"))


def test_dataset_info(tmp_path):
    info = dict(
        mine=dict(file_name="mine.json", columns=dict(prompt="question", query="input", response="answer",
         system="who")),
        talk=dict(hf_hub_url="u/talk", formatting="sharegpt", subset="en", split="dev", num_samples=5,
                  columns=dict(messages="conversations"), tags=dict(role_tag="from", content_tag="value")),
        pairs=dict(file_name="p.json", ranking=True), seen=dict(file_name="i.json", columns=dict(images="images")),
        inside=dict(hf_hub_url="u/big", folder="en"), cloud=dict(cloud_file_name="s3://a.json"), named=dict(
            file_name="n.json", formatting="sharegpt", tags=dict(user_tag="Guest", assistant_tag="gpt")),
        other=dict(file_name="o.json", columns=dict(prompt="ask")), odd=dict(
            script_url="x", formatting="sharegpt", tags=dict(role_tag="who", content_tag="says")))
    (tmp_path/"data").mkdir()
    (tmp_path/"data/dataset_info.json").write_text(json.dumps(info))
    (tmp_path/"deep/er").mkdir(parents=True)
    def loaded(names, more=""): return load(tmp_path/"deep/er", LLAMA_FACTORY.replace("u/rows", names) + more)
    cfg = loaded("mine", "max_samples: 10\n")
    assert cfg.train_file == (f"{tmp_path}/data/mine.json[:10]",) and cfg.data_format == "alpaca"
    assert cfg.fields == ("instruction=question", "output=answer", "system=who")
    cfg = loaded("'mine, talk'")
    assert "the first num_samples rows of talk, which LLaMA-Factory draws at random" in table(cfg)
    assert (cfg.train_file[1], cfg.data_format) == ("u/talk:en:dev[:5]", "auto")
    for names, says in (("pairs", "preferences"), ("seen", "images"), ("odd", "loaded by a script"),
                        ("inside", "inside has a folder"), ("cloud", "has a cloud_file_name"), ("named", "role Guest"),
                        ("nobody", "not in"), ("mine,other", "different names")):
        with pytest.raises(ConfigError, match=says): loaded(names)
    (tmp_path/"data/dataset_info.json").write_text("[")
    assert loaded("mine").train_file == ("data/mine.json",)


def test_rows_of_a_folder_on_the_hub(tmp_path):
    file = LLAMA_FACTORY.replace("u/rows", "identity") + "dataset_dir: REMOTE:llamafactory/demo_data\n"
    assert load(tmp_path, file).train_file == ("hf://datasets/llamafactory/demo_data/identity.json",)


def test_anchors_merges_and_helpers(tmp_path):
    cfg = load(tmp_path, "x-base: &base\n  micro_batch_size: 2\n  num_epochs: 3\n_lr: &lr 1e-4\nbase_model: u/m\n"
                         "<<: *base\ndatasets: [{path: u/x}]\nlearning_rate: *lr\n")
    assert (cfg.per_device_train_batch_size, cfg.num_train_epochs, cfg.learning_rate) == (2, 3, 1e-4)
    assert cfg.sources["num_train_epochs"].endswith(":6")
    cfg = load(tmp_path, "a-b: {lora_r: 8}\n".replace("a-b", ".x") + "<<: [{lora_r: 4}, {lora_alpha: 9}]\n")
    assert (cfg.lora_r, cfg.lora_alpha) == (4, 9)


def test_turns_of_users_are_learned_with_system_messages_and_said(tmp_path):
    def roles(names): return AXOLOTL.replace("type: chat_template", f"type: chat_template, roles_to_train: [{names}]")
    cfg = load(tmp_path, roles("user, assistant"))
    assert cfg.train_on_prompt is True and "system messages are learned too" in table(cfg)
    assert "system messages" not in table(load(tmp_path, roles("system, user, assistant")))


def test_tokens_that_are_listed_in_a_file(tmp_path):
    (tmp_path/"new.txt").write_text("<a> <b>\n<c>\n")
    assert load(tmp_path, SWIFT + "new_special_tokens: new.txt\n").train_tokens == ("<a>", "<b>", "<c>")


def test_the_command_line_wins_and_puts_right(tmp_path):
    file = tmp_path/"a.yml"
    file.write_text(AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 4\nuse_eaft: true\n")
    cfg = load_config(file, source="command line", use_eaft=False, num_epochs=1, warmup_ratio=.5)
    assert (cfg.num_train_epochs, cfg.eval_steps, cfg.warmup_steps) == (1, .25, .5)


def test_paths_are_looked_for_beside_the_file(tmp_path):
    (tmp_path/"rows.jsonl").write_text("{}\n")
    cfg = load(tmp_path, AXOLOTL.replace("u/rows", "rows.jsonl"))
    assert cfg.train_file == (str(tmp_path/"rows.jsonl"),)


TRL_LINE = """--model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4
    --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8
    --eos_token <|im_end|> --eval_strategy steps --eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16
    --output_dir Qwen2-0.5B-SFT
    --push_to_hub --lr_scheduler_kwargs {"min_lr_rate":0.1}"""


def test_rows_that_a_limit_shortens_are_looked_for_beside_the_file_too(tmp_path):
    (tmp_path/"rows.jsonl").write_text("{}\n")
    cfg = load(tmp_path, LLAMA_FACTORY.replace("u/rows", "rows.jsonl") + "max_samples: 5\n")
    assert cfg.train_file == (f"{tmp_path}/rows.jsonl[:5]",)
    cfg = load(tmp_path, AXOLOTL.replace("{path: u/rows", "{path: rows.jsonl, split: 'train[:20%]'"))
    assert cfg.train_file == (f"{tmp_path}/rows.jsonl[:20%]",)


@pytest.mark.parametrize("text", ["model_name_or_path: tiny\nstage: sft\n", "base_model: tiny\nadapter: lora\n",
                                  "model_name_or_path: tiny\nuse_peft: true\n"])
def test_a_file_without_rows_does_not_train_on_those_of_the_demo(tmp_path, text):
    from sft_nb.tasks.core import task_of
    from sft_nb.tokens.conversations import open_split
    cfg = load(tmp_path, text)
    with pytest.raises(SftError, match="task chat, train rows: there is no file"):
        open_split(cfg, task_of(cfg), "train")


OTHER_TOOLS = [   # a file of a tool that is not read, as its documentation has it, and settings of the fix
    ("torchtune", """
        tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
        model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8}
        dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, source: u/x}
        checkpointer: {checkpoint_dir: /tmp/m}
        optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
        max_steps_per_epoch: null
        compile: false""",
     dict(model="/tmp/m", train_file="u/x", max_length=2048, lora_r=8, learning_rate=2e-5, method="lora",
          train_on_prompt=True, on_long="cut", lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0)),
    ("LitGPT", "checkpoint_dir: c/x\nprecision: bf16-true\nlora_mlp: true\ntrain: {epochs: 2}",
     dict(model="c/x", num_train_epochs=2, method="lora", train_on_prompt=True, learning_rate=1e-3, lora_r=8,
          lora_alpha=16, lora_dropout=.05, effective_batch_size=16, warmup_steps=100, chat_template="alpaca",
          lora_target_modules=("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))),
    ("LitGPT", "checkpoint_dir: c/x\nout_dir: o\nlora_key: false\n"
               "optimizer: {init_args: {lr: 3e-4, betas: [0.9, 0.95]}}",
     dict(model="c/x", method="full", learning_rate=3e-4, adam_beta2=.95, num_train_epochs=5, output_dir="o")),
    ("LitGPT", "checkpoint_dir: c/x\nlora_r: 4\nquantize: bnb.nf4-dq\ndata: {init_args: {mask_prompt: true}}",
     dict(model="c/x", lora_r=4, method="qlora")),
    ("NeMo", "step_scheduler: {global_batch_size: 64}\nmodel: {_target_: x, pretrained_model_name_or_path: u/m}\n"
             "peft: {dim: 8}", dict(model="u/m", effective_batch_size=64, lora_r=8, method="lora")),
    ("NeMo", "trainer: {max_steps: 9}\nexp_manager: {}\nmodel: {optim: {lr: 1e-5}}",
     dict(max_steps=9, learning_rate=1e-5, method="full")),
    ("mlx-lm", "model: u/m\ntrain: true\ndata: rows\niters: 100\nadapter_path: a\nnum_layers: 16",
     dict(model="u/m", train_file="rows", max_steps=100, output_dir="a", method="lora", train_on_prompt=True,
          lora_r=8, lora_alpha=160, learning_rate=1e-5, lr_scheduler_type="constant", weight_decay=0.)),
    ("mlx-lm", "lora_parameters: {rank: 4, scale: 2.5, keys: [self_attn.q_proj]}\niters: 100\n"
               "grad_accumulation_steps: 4", dict(lora_r=4, lora_alpha=10, lora_target_modules=("q_proj",),
                                                 max_steps=25, gradient_accumulation_steps=4)),
    ("mlx-lm", "model: u/m\ndata: rows\nfine_tune_type: full\nmask_prompt: true\nsteps_per_eval: 50",
     dict(model="u/m", train_file="rows", eval_steps=50, method="full", train_on_prompt=False)),
    ("mistral-finetune", "data: {instruct_data: a.jsonl}\nmodel_id_or_path: m\nlora: {rank: 64}\nno_eval: false",
     dict(train_file="a.jsonl", model="m", lora_r=64, lora_alpha=128, method="lora", warmup_steps=.05)),
    ("H2O LLM Studio", "llm_backbone: u/m\ndataset: {train_dataframe: a.csv}\ntraining: {lora_r: 4}",
     dict(model="u/m", train_file="a.csv", lora_r=4, method="lora")),
    ("LLaMA-Factory v1", "model: u/m\nmodel_class: llm\ntemplate: qwen3\ncutoff_len: 99\nkernel_config: {name: auto}",
     dict(model="u/m", max_length=99, method="full")),
    ("LLaMA-Factory v1", "model: u/m\nmodel_class: llm\ntrain_dataset: data/demo.yaml\n"
                         "peft_config: {name: lora, r: 4}\n"
                         "quant_config: {name: bnb, quantization_bit: 4}\nmicro_batch_size: 2",
     dict(method="qlora", lora_r=4, lora_alpha=16, per_device_train_batch_size=2, gradient_accumulation_steps=1)),
    ("Unsloth Studio", "model: u/m\ntraining: {training_type: full, num_epochs: 0, max_steps: 30}\nlora: {lora_r: 64}",
     dict(model="u/m", method="full", max_steps=30, train_on_prompt=True)),
    ("H2O LLM Studio", "llm_backbone: u/m\ndataset: {train_dataframe: a.csv, validation_dataframe: None, "
                       "prompt_column: [ask], answer_column: reply, validation_size: 0.1}\n"
                       "architecture: {backbone_dtype: int4}",
     dict(method="qlora", fields=("question=ask", "answer=reply"), eval_fraction=.1, lora_r=4)),
    ("NeMo", "step_scheduler: {max_steps: 9}\nmodel: {pretrained_model_name_or_path: u/m}\n"
             "peft: {dim: 8, target_modules: '*_proj'}\nquantization: {load_in_4bit: true}\n"
             "lr_scheduler: {lr_decay_style: cosine, min_lr: 1e-6}",
     dict(method="qlora", max_steps=9, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=("min_lr=1e-6",))),
    ("NeMo RL", "defaults: sft.yaml\npolicy: {model_name: u/m, dtensor_cfg: {lora_cfg: {enabled: true, dim: 128}}}",
     dict(model="u/m", method="lora", lora_r=128)),
    ("verl", "data: {train_files: a.parquet, micro_batch_size_per_gpu: 4, prompt_key: ask, response_key: reply}\n"
             "model: {partial_pretrain: u/m, lora_rank: 32, target_modules: [q_proj]}\noptim: {lr: 1e-4}",
     dict(model="u/m", method="lora", lora_r=32, lora_target_modules=("q_proj",), on_long="error", learning_rate=1e-4,
          effective_batch_size=256, fields=("question=ask", "answer=reply"))),
    ("Open Instruct", "model_name_or_path: u/m\ndataset_mixer_list: [u/x, 1.0, u/y, 1.0]\nwith_tracking: true",
     dict(model="u/m", train_file=("u/x", "u/y"), learning_rate=2e-5, lr_scheduler_type="linear", method="full")),
    ("Megatron", "model: u/m\ndataset: u/x\ntuner_type: lora\ntensor_model_parallel_size: 2\nlr: 1e-4",
     dict(model="u/m", train_file="u/x", method="lora", learning_rate=1e-4)),
    ("OLMo-core", "train_module: {optim: {lr: 1e-4}}\ntrainer: {max_duration: {value: 2}}",
     dict(learning_rate=1e-4, num_train_epochs=2)),
    ("Megatron", "model: u/m\ndataset: u/x\ngradient_accumulation_steps: 8\nlr_warmup_fraction: 0.05\n"
                 "min_lr: 1e-6\nsplit_dataset_ratio: 0.01\nclip_grad: 0.5",
     dict(gradient_accumulation_steps=8, warmup_steps=.05, lr_scheduler_type="cosine_with_min_lr", eval_fraction=.01,
          lr_scheduler_kwargs=("min_lr=1e-06",), max_grad_norm=.5)),
    ("NeMo", "exp_manager: {name: x}\nmodel: {restore_from_path: m, peft: {peft_scheme: lora, lora_tuning: "
             "{adapter_dim: 64, alpha: 128}}}", dict(model="m", method="lora", lora_r=64, lora_alpha=128)),
    ("OpenRLHF", "pretrain: u/m\nmax_len: 99\ninput_key: ask\noutput_key: reply",
     dict(model="u/m", max_length=99, method="full", fields=("question=ask", "answer=reply"))),
    ("AutoTrain", "task: llm-sft\nbase_model: u/m\nproject_name: x\n"
                  "data: {path: u/x, train_split: train_sft, column_mapping: {text_column: messages}}\n"
                  "params: {block_size: 99, lr: 1e-4, peft: true, quantization: int4, target_modules: all-linear}",
     dict(model="u/m", train_file="u/x:train_sft", max_length=99, learning_rate=1e-4, method="qlora", lora_r=16,
          train_on_prompt=True, warmup_steps=.1)),
    ("AutoTrain", "task: llm-sft\nbase_model: u/m\nproject_name: x\n"
                  "params: {lr: 1e-4, peft: true, quantization: int8}", dict(method="qlora", load_in_8bit=True)),
    ("H2O LLM Studio", "llm_backbone: u/m\ndataset: {train_dataframe: a.csv}\narchitecture: {backbone_dtype: int8}",
     dict(method="qlora", load_in_8bit=True)),
    ("Unsloth Studio", "model: u/m\ndata: {dataset: u/x}\ntraining: {training_type: lora, batch_size: 2}\n"
                       "lora: {lora_r: 64}",
     dict(model="u/m", train_file="u/x", per_device_train_batch_size=2, lora_r=64, method="lora"))]


@pytest.mark.parametrize("tool, text, settings", OTHER_TOOLS, ids=[tool for tool, *_ in OTHER_TOOLS])
def test_a_file_of_a_tool_that_is_not_read_is_named_in_one_sentence(tmp_path, tool, text, settings):
    with pytest.raises(ConfigError) as e: load(tmp_path, textwrap.dedent(text))
    assert f"this is a config of {tool}, which is not read; those of ms-swift, LLaMA-Factory" in str(e.value)
    assert len(str(e.value).splitlines()) == 1 and str(e.value).count(". Fix: ") == 1
    assert settings.items() <= e.value.fix.settings.items() and "Fix: sft_nb train --" in str(e.value)
    load_config(**e.value.fix.settings)   # the line can be run


@pytest.mark.parametrize("text, says", [
    ("_component_: x\nteacher_model: {_component_: y}", "a config of torchtune for distillation"),
    ("quantizer: {_component_: y}", "a config of torchtune for training for a number format"),
    ("_component_: x\ntasks: [mmlu]\nquantizer: null", "a config of torchtune for evaluation"),
    ("model_name: pythia\ntokenizer_dir: c\ntrain: {max_tokens: 9}", "a config of LitGPT for pretraining"),
    ("recipe: FinetuneRecipeForVLM\nstep_scheduler: {max_steps: 9}\nmodel: {pretrained_model_name_or_path: u/m}",
     "a config of NeMo for training on images"),
    ("model_name_or_path: u/m\nwith_tracking: true\ndpo_beta: 5", "a config of Open Instruct for preference training"),
    ("task: llm-orpo\nbase_model: u/m\nproject_name: x\nparams: {lr: 1e-4}", "AutoTrain for preference training"),
    ("task: token-classification\nbase_model: u/m\nproject_name: x\nparams: {lr: 1e-4}", "for another kind of task"),
    ("data_stages: [{data: {}}]\nparallelism: {dp: 8}", "a config of nanotron for pretraining"),
    ("model: u/m\nmodel_class: llm\npeft_config: {name: freeze, freeze_trainable_layers: 2}",
     "a config of LLaMA-Factory v1 for training some of the layers")])
def test_a_file_of_another_tool_for_another_method_gets_no_line(tmp_path, text, says):
    with pytest.raises(ConfigError, match="sft_nb only does supervised fine-tuning on text") as e: load(tmp_path, text)
    assert says in str(e.value) and "sft_nb train" not in str(e.value)


def test_what_a_proposed_line_lacks_is_named(tmp_path):
    text = ("_component_: x\ndataset: {source: u/x, packed: true}\noptimizer: {lr: 1e-4, _component_: torchao.Low8}\n"
            "loss: {_component_: y}\nepochs: 1")
    with pytest.raises(ConfigError, match="the line is without dataset.packed, optimizer._component_. Fix"):
        load(tmp_path, text)


@pytest.mark.parametrize("text, lost", [
    ("model: u/m\nmodel_class: llm\ntrain_dataset: data/v1_dpo_demo.yaml\noptim_config: {name: muon}",
     "train_dataset, optim_config.name"),
    ("model: u/m\ndataset: [u/x, u/y]\ntensor_model_parallel_size: 2", "dataset"),
    ("model: u/m\ndataset: 'u/x#500'\ntrain_iters: 9", "dataset")])
def test_rows_and_an_optimiser_that_a_proposed_line_lacks_are_named(tmp_path, text, lost):
    with pytest.raises(ConfigError, match=f"the line is without {lost}. Fix") as e: load(tmp_path, text)
    assert "train_file" not in e.value.fix.settings


def test_a_file_that_says_nothing_that_is_known_here(tmp_path):
    with pytest.raises(ConfigError, match="a config of torchtune.*Fix: sft_nb config lists the settings"):
        load(tmp_path, "loss: {_component_: x}\n")


def test_rows_that_llama_factory_packs_together_do_not_see_each_other_here(tmp_path):
    "Its neat_packing keeps them apart too, so nothing differs"
    cfg = load(tmp_path, LLAMA_FACTORY + "packing: true\n")
    assert cfg.max_tokens_per_batch == 8 * 2048 and "packed rows do not see each other" in table(cfg)
    cfg = load(tmp_path, LLAMA_FACTORY + "packing: true\nneat_packing: true\n")
    assert cfg.max_tokens_per_batch == 8 * 2048 and "see each other" not in table(cfg)
    assert load(tmp_path, LLAMA_FACTORY + "packing: false\n").max_tokens_per_batch is None


def test_swifts_benchmarks_after_a_training_are_no_held_out_rows(tmp_path):
    cfg = load(tmp_path, SWIFT + "eval_use_evalscope: true\neval_dataset: gsm8k\n")
    assert cfg.eval_file is None


def test_a_file_of_accelerate_is_one_sentence(tmp_path):
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
    with pytest.raises(ConfigError, match="config of accelerate, which.* Fix: num_processes, fsdp and deepspeed"):
        load(tmp_path, text)


def test_what_swift_does_where_a_key_is_left_out_is_told(tmp_path):
    "From 4.3.1 on it leaves an empty <think> block out of the loss, and its longest row is the model's"
    told = table(load(tmp_path, SWIFT))
    for part in ("without max_length: rows may be as long", "without disable_ignore_empty_think: an empty <think>",
                 "500 rows, in the order of the file, where ms-swift draws them at random; of the Hugging Face"):
        assert part in told, told
    told = table(load(tmp_path, SWIFT.replace("u/rows", "HF::u/rows") + "max_length: 99\nenable_thinking: false\n"))
    assert "without" not in told and "ModelScope" not in told


def test_swifts_command_line():
    from sft_nb.cli.options import Option, parse
    line = """--model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset u/x:en#500 u/y#20 --torch_dtype bfloat16
        --num_train_epochs 1 --lora_rank 8 --target_modules all-linear --split_dataset_ratio 0.1 --model_author swift
        --model_name swift-robot --system Terse. --use_hf true --gradient_accumulation_steps 16"""
    _, cfg = parse("train", line.split(), dict(config=Option(str | None, None, "")), summary="")
    assert (cfg.model, cfg.method, cfg.lora_alpha) == ("Qwen/Qwen2.5-7B-Instruct", "lora", 32)
    assert (cfg.train_file, cfg.eval_fraction) == (("u/x:en:train[:500]", "u/y:train[:20]"), .1)
    assert (cfg.system_prompt, cfg.dtype) == ("Terse.", "bfloat16")


SWIFT_SCRIPT = """# 22GiB
export MODEL=Qwen/Qwen3-4B
CUDA_VISIBLE_DEVICES=0 \\
swift sft \\
    --model ${MODEL} \\
    --train_type lora \\
    --dataset 'u/x#500' \\
              u/y#20 \\
    --learning_rate 1e-4 --max_length 2048 \\
    --system 'You are terse.' --model_author swift --model_name swift-robot
"""


def test_a_shell_script_is_read(tmp_path):
    cfg = load(tmp_path, SWIFT_SCRIPT, "train.sh")
    assert (cfg.model, cfg.method, cfg.learning_rate, cfg.max_length) == ("Qwen/Qwen3-4B", "lora", 1e-4, 2048)
    assert cfg.train_file == ("u/x:train[:500]", "u/y:train[:20]") and cfg.system_prompt == "You are terse."
    assert cfg.sources["max_length"].endswith("train.sh:9")
    cfg = load(tmp_path, "accelerate launch --num_processes 2 trl/scripts/sft.py --model_name_or_path u/m "
                         "--dataset_name u/x --packing --max-length 300", "trl.sh")
    assert (cfg.num_processes, cfg.max_length, cfg.max_tokens_per_batch) == (2, 300, 2400)
    with pytest.raises(ConfigError, match="train.sh:10: --lerning_rate|lerning_rate is not a setting") as e:
        load(tmp_path, SWIFT_SCRIPT.replace("--learning_rate", "--lerning_rate"), "train.sh")
    assert "write --learning-rate" in str(e.value)
    with pytest.raises(ConfigError, match="asks for preference training"):
        load(tmp_path, "swift rlhf --rlhf_type dpo --model u/m --dataset 'u/x'", "dpo.sh")
    for text in ("ls\n", "echo 'open --a\n", ""):
        with pytest.raises(ConfigError, match="no command in it has options"): load(tmp_path, text, "none.sh")
    for line, fix in {"swift infer --adapters out --stream true": "chat", "swift export --adapters out": "merge",
                      "N=1 megatron export --model m": "merge", "swift eval --eval_url u": "evaluate",
                      "trl vllm-serve --model m": "chat", "axolotl merge-lora a.yml --model-dir=b": "merge"}.items():
        with pytest.raises(ConfigError, match=f"does not train. Fix: sft_nb {fix} RUN"): load(tmp_path, line, "no.sh")
    (tmp_path/"bytes.sh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="bytes.sh"): load_config(tmp_path/"bytes.sh")


@pytest.mark.parametrize("line, wanted", [
    ("swift sft --model u/m --dataset u/x", dict(method="lora", learning_rate=1e-4, weight_decay=.1, lora_r=8)),
    ("llamafactory-cli train --model_name_or_path u/m --dataset u/x", dict(method="lora", learning_rate=5e-5)),
    ("trl sft --model_name_or_path u/m", dict(method="full", learning_rate=2e-5, max_length=1024)),
    ("axolotl train theirs.yaml --learning-rate 1e-3", dict(method="full", learning_rate=1e-3, max_length=512)),
    ("axolotl train plain.yaml", dict(method="full", max_length=512)), ("swift sft plain.yaml", dict(weight_decay=.1))])
def test_a_program_says_whose_defaults_hold(tmp_path, line, wanted):
    "Also where no option is one that only its files have"
    (tmp_path/"theirs.yaml").write_text(AXOLOTL)
    (tmp_path/"plain.yaml").write_text("model: u/m\nnum_epochs: 1\n")
    cfg = load(tmp_path, line, "train.sh")
    assert {k: getattr(cfg, k) for k in wanted} == wanted


@pytest.mark.parametrize("command, says", [
    ("trl dpo", r"stage = 'dpo' asks for preference training \(DPO\)"), ("trl kto", r"\(KTO\)"),
    ("trl reward", "the training of a reward model"), ("accelerate launch trl/scripts/grpo_vlm.py", r"\(GRPO\)"),
    ("python examples/scripts/reward_modeling.py", "a reward model"), ("python scripts/run_orpo.py", r"\(ORPO\)"),
    ("python trl/experimental/gkd/gkd.py", "distillation"), ("python examples/scripts/nash_md.py", r"\(Nash-MD\)")])
def test_a_command_that_trains_something_else_is_not_read_as_fine_tuning(tmp_path, command, says):
    "Its options can be the same: trl dpo --model_name_or_path u/m --dataset_name u/x"
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, f"{command} --model_name_or_path u/m --dataset_name u/x", "train.sh")
    (tmp_path/"theirs.yaml").write_text(TRL)
    with pytest.raises(ConfigError, match=says): load(tmp_path, f"{command} --config theirs.yaml", "train.sh")


def test_swifts_and_megatrons_other_commands(tmp_path):
    options = "--model u/m --dataset u/x --learning_rate 1e-4"
    with pytest.raises(ConfigError, match=r"preference training \(DPO\)"):
        load(tmp_path, f"swift rlhf {options}", "a.sh")
    with pytest.raises(ConfigError, match=r"asks for reinforcement learning \(GRPO\);"):
        load(tmp_path, f"swift rlhf {options} --rlhf_type grpo", "a.sh")
    with pytest.raises(ConfigError, match="a config of Megatron, which is not read"):
        load(tmp_path, f"megatron sft {options}", "a.sh")


REFUSED = [   # a file, what is added to it, what its refusal has, and a setting beside it with which it is read
    (LLAMA_FACTORY, "finetuning_type: oft", "another way to train a part of the weights", "method: lora"),
    (LLAMA_FACTORY, "quantization_bit: 3", "a base is quantised to 4 or 8 bits. Fix: quantization_bit: 4", ""),
    (SWIFT.replace("tuner_type: lora", "tuner_type: adalora\nattn_impl: sdpa"), "", "another way to train",
     "method: lora"),
    (SWIFT, "loss_scale: ignore_empty_think", "Fix: enable_thinking: false", "enable_thinking: false"),
    (SWIFT, "loss_scale: default+ignore_empty_think", "Fix: enable_thinking: false", "enable_thinking: false"),
    (SWIFT, "loss_scale: react", "parts of an answer are not weighted. Fix: loss_scale: default", ""),
    (SWIFT.replace("u/rows#500", "u/rows, swift/self-cognition#500"), "",
     "{{NAME}} and {{AUTHOR}}.*Fix: dataset: .*u/rows", ""),
    (SWIFT.replace("u/rows#500", "swift/self-cognition"), "", "Fix: write them into a copy of the rows", ""),
    (SWIFT, "loss_type: loss_scale", "not supported here. Fix: leave loss_type out", ""),
    (SWIFT, "template: default", "its text is not known here. Fix: name a file in chat_template", ""),
    (SWIFT, "max_pixels: 1003520", "images, video or sound", ""),
    (SWIFT, "init_weights: lora-ga\nlora_ga_iters: 2", "from gradients of the rows. Fix: init_weights: pissa", ""),
    (SWIFT.replace("u/rows#500", "'u/rows:a/b#500'"), "", "is of one subset. Fix: train_file NAME:SUBSET#500", ""),
    (SWIFT.replace("tuner_type: lora", "tuner_type: reft\nreft_rank: 4"), "",
     "^[^\n]*reft is another way to train[^\n]*$", "method: lora"),
    (SWIFT, "new_special_tokens: none.txt", "there is no such file", "train_tokens: [<a>]"),
    (SWIFT, "teacher_model: u/big", "distillation", ""),
    (LLAMA_FACTORY, "mix_strategy: interleave_under\ninterleave_probs: 0.3,0.7", "Fix: mix_strategy: concat", ""),
    (LLAMA_FACTORY, "use_eaft_loss: true", "another loss", ""),
    (AXOLOTL, "model_config: {output_router_logits: true}", "the loss that balances experts",
     "router_aux_loss_coef: 0.02"),
    (AXOLOTL.replace("type: chat", "drop_system_message: true, type: chat"), "",
     "Fix: leave drop_system_message out: a system message is a part of the prompt", ""),
    (TRL, "accelerate_config: mine/eight.yaml", "a file of accelerate is not read", "num_processes: 2"),
    (TRL, "packing: true\npacking_strategy: wrapped", "rows stay whole. Fix: leave packing_strategy out", ""),
    (TRL, "chat_template_path: HuggingFaceTB/SmolLM3-3B",
     r"another model is not fetched. Fix: name a file in chat_template that holds AutoTokenizer.from_pretrained\(.*3B'",
     ""),
    (AXOLOTL.replace("type: chat", "train_on_eot: last, type: chat"), "", "Fix: train_on_eot: turn, as every", ""),
    (AXOLOTL.replace("type: chat", "field_thinking: thoughts, type: chat"), "",
     "one of reasoning_content, reasoning, thinking. Fix: rename that key", ""),
    (AXOLOTL, "adapter: lora\nlora_rank_pattern: {q_proj: 32}", "some layers would have another rank", ""),
    (AXOLOTL, "use_onebitllms: true", "a number format that is not supported", ""),
    (AXOLOTL, "nvfp4_merge_aware: true", "a number format that is not supported", "")]


@pytest.mark.parametrize("text, more, says, beside", REFUSED, ids=range(len(REFUSED)))
def test_a_refused_key_is_answered_with_what_works(tmp_path, text, more, says, beside):
    with pytest.raises(ConfigError) as e: load(tmp_path, f"{text}\n{more}\n")
    assert re.search(says, str(e.value)), str(e.value)
    if beside: load(tmp_path, f"{text}\n{more}\n{beside}\n")
    if beside: load_config(tmp_path/"theirs.yaml", **yaml.safe_load(beside))   # on the command line
    elif e.value.fix.settings: load_config(tmp_path/"theirs.yaml", **e.value.fix.settings)


@pytest.mark.parametrize("launcher, processes", [
    ("accelerate launch --config_file zero3.yaml --num_processes=8 sft.py", 8),
    ("torchrun --nproc_per_node 4 --nnodes 2 sft.py", 8), ("deepspeed --num_gpus 2 sft.py", 2),
    ("NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft", 4), ("CUDA_VISIBLE_DEVICES=0,1 swift sft", 1),
    ("N=2\nexport NPROC_PER_NODE=$N\nswift sft", 2), ("torchrun --nproc_per_node $1 -m trl.sft", 1)])
def test_a_launcher_says_how_many_processes_train(tmp_path, launcher, processes):
    cfg = load(tmp_path, f"{launcher} --model u/m --train_type lora --dataset u/x && echo --done 1 2 3", "train.sh")
    assert (cfg.num_processes, cfg.method, cfg.train_file) == (processes, "lora", ("u/x",))


ZERO3 = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_multinode_launcher: standard, zero3_init_flag: true, zero_stage: 3}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
FSDP2 = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 4\n"


@pytest.mark.parametrize("options, meant", [
    ("--config_file recipes/eight.yaml", (8, "zero3", False)),
    ("--config_file recipes/eight.yaml --num_processes 2", (2, "zero3", False)),
    ("--config_file=recipes/four.yaml", (4, None, True)), ("--config_file elsewhere/zero2.yaml", (1, "zero2", False)),
    ("--config_file fsdp2_config.yaml", (1, None, True)), ("--config_file multi_gpu.yaml", (1, None, False)),
    ("--use_deepspeed --zero_stage 3", (1, "zero3", False)), ("--use_fsdp --num_processes 2", (2, None, True)),
    ("--multi_gpu --mixed_precision bf16 --num_processes 2", (2, None, False)), ("", (1, None, False))])
def test_accelerate_launch_says_what_shards_the_model(tmp_path, options, meant):
    (tmp_path/"recipes").mkdir()
    (tmp_path/"recipes/eight.yaml").write_text(ZERO3)
    (tmp_path/"recipes/four.yaml").write_text(FSDP2)
    script = "accelerate launch {} scripts/sft.py --model_name_or_path u/m --dataset_name u/x{}"
    cfg = load(tmp_path, script.format(options, ""), "train.sh")
    assert (cfg.num_processes, cfg.deepspeed, cfg.fsdp) == meant
    assert load(tmp_path, script.format(options, " --deepspeed zero2"), "train.sh").deepspeed == "zero2"


def test_a_launcher_with_a_file_that_cannot_be_read(tmp_path):
    script = "accelerate launch --config_file mine.yaml -m trl.scripts.sft --model_name_or_path u/m --dataset_name u/x"
    with pytest.raises(ConfigError, match="mine.yaml, which is not there. Fix: give its num_processes"):
        load(tmp_path, script, "train.sh")
    told = script.replace("--config_file mine.yaml", "--num_processes 8 --use_deepspeed --zero_stage 3")
    assert load(tmp_path, told, "train.sh").deepspeed == "zero3"
    (tmp_path/"mine.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="mine.yaml: .*a file of accelerate"): load(tmp_path, script, "train.sh")


def test_a_script_computes_and_names_other_files(tmp_path):
    line = "swift sft --tuner_type lora --model u/m --dataset u/x --gradient_accumulation_steps "
    for text, steps in (("$(expr 16 / 2)", 8), ("$((128/4/2))", 16), ("${STEPS:-6}", 6), ("$((2 * 3 - 1)) > log", 5),
                        ("$((9 + 2 - 4))", 7), ("$((9 % 5))", 4)):
        assert load(tmp_path, line + text, "sums.sh").gradient_accumulation_steps == steps
    other = "mytool --model_name_or_path u/m --dataset_name u/x --dataset_train_split train --lr 1e-3"
    cfg = load(tmp_path, other, "a.sh")
    assert (cfg.model, cfg.learning_rate) == ("u/m", 1e-3)   # train is a value here
    for text in ("$1", "$STEPS", "$(nproc)", "$((4/0))"):
        with pytest.raises(ConfigError, match="gradient_accumulation_steps is .*, which the script does not set"):
            load(tmp_path, line + text, "unset.sh")
    (tmp_path/"recipes").mkdir()
    (tmp_path/"recipes/sft.yaml").write_text(TRL + "learning_rate: 1e-3\nmax_length: 99\n")
    cfg = load(tmp_path, "accelerate launch sft.py --config recipes/sft.yaml --lr 2e-4", "run.sh")
    assert (cfg.learning_rate, cfg.max_length, cfg.dtype) == (2e-4, 99, "bfloat16")
    assert load(tmp_path, "swift sft recipes/sft.yaml", "run.sh").max_length == 99
    with pytest.raises(ConfigError, match="its settings are in gone.yaml, which is not there"):
        load(tmp_path, "trl sft --config gone.yaml", "run.sh")
    with pytest.raises(ConfigError, match="pretraining on raw text"):
        load(tmp_path, "swift pt --model u/m --train_type full --dataset u/x", "pt.sh")
    with pytest.raises(ConfigError, match="a config of verl.*the line is without data.prompt_dict_keys"):
        load(tmp_path, "torchrun -m verl.sft data.train_files=$HOME/a.parquet model.partial_pretrain=u/m \\\n"
                       "  data.prompt_dict_keys=['question'] trainer.default_local_dir=$2", "verl.sh")
    with pytest.raises(ConfigError, match="a config of OpenRLHF"):
        load(tmp_path, "deepspeed --module openrlhf.cli.train_sft --data.max_len 99 --data.input_key ask", "rlhf.sh")


@pytest.mark.parametrize("line", [
    "precision: bf16", "lora_mlp_x: true", "num_layers: 16", "tuner_types_: x", "no_eval: true", "dist_configs: {}",
    "disable_eval: true", "save_totl_limit: many"])
def test_a_name_is_not_answered_with_one_that_means_something_else(tmp_path, line):
    with pytest.raises(ConfigError) as e: load(tmp_path, f"model: tiny\n{line}\n")
    assert "nearest" not in str(e.value) and "leave" in str(e.value)


def test_trls_documented_command_line():
    from sft_nb.cli.options import Option, parse
    own = dict(config=Option(str | None, None, ""))
    _, cfg = parse("train", TRL_LINE.split(), own, summary="")
    assert (cfg.method, cfg.lora_r, cfg.max_length, cfg.max_tokens_per_batch) == ("lora", 32, 1024, 2048)
    assert (cfg.lr_scheduler_type, cfg.lr_scheduler_kwargs) == ("linear", ("min_lr_rate=0.1",))
    assert (cfg.eval_file, cfg.run_name) == (("trl-lib/Capybara:test",), "Qwen2-0.5B-SFT")
    assert "eos_token" in table(cfg) and "hf upload" in table(cfg)
    line = "--lerning-rate 1 --colour red --use_eaft true --max-length long"
    with pytest.raises(ConfigError) as e: parse("train", line.split(), own, summary="")
    assert str(e.value).startswith("4 problems") and "\n  4. " in str(e.value)
    _, cfg = parse("train", ["--fsdp", "full_shard auto_wrap", "--gradient_checkpointing", "unsloth"], own, summary="")
    assert (cfg.fsdp, cfg.gradient_checkpointing) == (True, True)


if __name__ == "__main__":
    import sys
    print_table(*sys.argv[1:2])


def test_trls_split_of_one_file(tmp_path):
    "Its fix is not to evaluate on the training rows"
    (tmp_path/"rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    theirs = dict(model_name_or_path="tiny", dataset_name=str(tmp_path/"rows.jsonl"), dataset_test_split="test",
                  eval_strategy="steps")
    with pytest.raises(ConfigError, match="test; one file has no other split") as e: load(tmp_path, yaml.dump(theirs))
    assert "eval_fraction" in str(e.value.fix)


def test_values_of_a_tools_file_are_those_of_settings():
    "Lists are tuples, as in every setting, and null is None"
    def parts(v):
        yield v
        if isinstance(v, dict): v = v.values()
        if not isinstance(v, (str, bool, int, float, type(None))): yield from (part for one in v for part in parts(one))
    found = [one for tool in TOOLS for one in parts(read_toml(tool))]
    assert any(isinstance(one, tuple) for one in found) and not any(isinstance(one, list) for one in found)
    assert None in found and "null" not in found
