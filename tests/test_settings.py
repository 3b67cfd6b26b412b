"""Every setting is read somewhere, and every number has limits."""
import ast
import dataclasses
import typing

import pytest
from conftest import ROOT

from sft_nb.config.load import load_config
from sft_nb.config.setting import Setting
from sft_nb.config.settings import Config, SETTINGS, settings_with

PACKAGE = ROOT/"sft_nb"
FACTS = ("hf", "changes_tokens", "changes_base")   # code reads the settings of which these are true
SAY_WHAT_THERE_IS = {p.name for p in PACKAGE.glob("extras/*.py")} | {
    "setting.py", "settings.py", "config_files.py", "config.py", "options.py"}   # and do nothing with it


def unread(names:list[str])->list[str]:
    "Settings that no module reads from a config or is given by name, and that are not passed to the trainer"
    read = {name for fact in FACTS for name in settings_with(fact)}
    given, taken = set(), {}   # names of functions that are given settings; function -> the settings that it uses
    for path in PACKAGE.rglob("*.py"):
        if path.name in SAY_WHAT_THERE_IS or path.parent.name == "configs": continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute): read.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "values":
                given |= {ast.unparse(arg) for arg in node.args}
            if isinstance(node, ast.FunctionDef):
                used = {n.id for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name)}
                taken.setdefault(node.name, set()).update({a.arg for a in node.args.kwonlyargs} & used)
                if any(ast.unparse(d).startswith("check(") for d in node.decorator_list): given.add(node.name)
    read |= {name for f in given for name in taken.get(f, ())}
    return [name for name in names if name not in read]


def test_every_setting_is_read():
    assert unread([*SETTINGS, "lr_min_ratio"]) == ["lr_min_ratio"]   # as one that was added and forgotten would be


def test_every_fact_about_settings_is_used():
    code = "\n".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "_modidx.py")
    facts = [f.name for f in dataclasses.fields(Setting)]
    assert [n for n in facts if f".{n}" not in code and f'settings_with("{n}")' not in code] == []


def test_every_number_has_limits():
    numbers = [s for s in SETTINGS.values() if {int, float} & {s.type, *typing.get_args(s.type)}]
    assert len(numbers) > 30 and [s.name for s in numbers if s.ge is None] == []


def test_a_list_is_as_good_as_a_tuple():
    "In Python one writes a list; a config holds a tuple, so that it can be a key"
    cfg = Config(train_file=["a.jsonl"], train_weights=[2.])
    assert (cfg.train_file, cfg.train_weights) == (("a.jsonl",), (2.,)) and hash(cfg) == hash(load_config(cfg))


@pytest.mark.parametrize("group", dict.fromkeys(s.group for s in SETTINGS.values()), ids=lambda group: group.__name__)
def test_no_group_of_settings_can_be_changed(group):
    "Newer versions of Python refuse a frozen class such as Config with a base that is not"
    name = dataclasses.fields(group)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError): setattr(group(), name, None)


def test_what_is_switched_on_by_default():
    "And is said to nobody: a tracker that sends metrics away, another method or another model are off"
    switches = {name: s.default for name, s in SETTINGS.items() if isinstance(s.default, bool)}
    on = {name for name, value in switches.items() if value}
    assert on == {"template_skeletons", "preflight", "bnb_4bit_use_double_quant", "shuffle"}
    cfg = Config()
    assert (cfg.report_to, cfg.num_processes, cfg.save_total_limit, cfg.price) == (None, 1, 2, None)
    assert (cfg.lora_dropout, cfg.lora_target_modules, cfg.init_lora_weights) == (0., ("all-linear",), "default")


def test_what_a_checkpoint_depends_on_cannot_change_when_a_run_is_resumed():
    fixed = set(settings_with("fixed_on_resume"))
    shape = {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "use_rslora",
             "use_dora", "init_lora_weights", "method", "num_processes", "seed"}
    assert shape <= fixed and not {"runs_dir", "report_to", "save_total_limit", "price"} & fixed


DEFAULTS = dict(   # a change here is a change for everybody who has not set it: say it in CHANGELOG.md
    task="auto", data_format="auto", prompt_separator="\n", train_on_turns="all", reasoning="auto", eval_samples=200,
    min_length=0, max_length=512, on_long="drop", cut_side="end", on_bad_row="error", num_workers="auto", model="tiny",
    init="pretrained", device="auto", dtype="auto", attn_implementation="auto", method="auto", lora_r=16, lora_alpha=32,
    lora_dropout=0., lora_target_modules=("all-linear",), init_lora_weights="default", bnb_4bit_quant_type="nf4",
    learning_rate="auto", num_train_epochs=3., max_steps=-1, per_device_train_batch_size=4, padding_free="auto",
    gradient_accumulation_steps=4, optim="adamw_torch", adam_beta1=.9, adam_beta2=.999, adam_epsilon=1e-8,
    lr_scheduler_type="cosine", warmup_steps=.03, weight_decay=.01, max_grad_norm=1., gradient_checkpointing="auto",
    activation_offloading="auto", keep_attention="auto", recompute_parts="auto", kernels="auto", max_logits_mib=512,
    seed=42, metric_for_best_model="loss", per_device_eval_batch_size=32, max_new_tokens=256, on_nan="stop",
    on_collapse="warn", logging_steps=10, save_steps=200, save_total_limit=2, runs_dir="runs", wandb_project="sft_nb",
    num_processes=1, sequence_parallel_size=1)


def test_the_defaults_are_those_published():
    values = {name: s.default for name, s in SETTINGS.items() if not isinstance(s.default, bool)}
    assert {name: value for name, value in values.items() if value is not None} == DEFAULTS


def test_the_limits_of_numbers():
    below = {name: s.lt for name, s in SETTINGS.items() if s.lt is not None}
    assert below == dict(eval_fraction=1, drop_near_duplicates=1, lora_dropout=1, learning_rate=1, adam_beta1=1,
                         adam_beta2=1, weight_decay=1, seed=2**32)
    above = {name: s.ge for name, s in SETTINGS.items() if s.ge not in (None, 0, 1)}
    assert above == dict(max_length=2, drop_near_duplicates=.5, max_steps=-1, max_tokens_per_batch=2)
    assert {name for name, s in SETTINGS.items() if s.ge == 0} == {
        "eval_fraction", "eval_samples", "min_length", "lora_dropout", "learning_rate", "num_train_epochs", "max_time",
        "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps", "weight_decay", "max_grad_norm", "seed",
        "router_aux_loss_coef", "eval_steps", "save_steps", "price"}
