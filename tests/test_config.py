"""Properties of the config: any mixture of names, files and values gives an equal config or one clear error."""
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from hypothesis import example, given, settings as how, strategies as st

from conftest import ROOT
from sft_nb.config.setting import named_arguments
from sft_nb.config.load import config_names, find_config, load_config, save_config, table
from sft_nb.base.report import ConfigError
from sft_nb.config.settings import ALIASES, defaults, SETTINGS
from sft_nb.extras.other_tools import FOREIGN, TOOLS


def values(f):
    "Values that setting `f` accepts"
    t = f.type
    if get_origin(t) is Literal: return st.sampled_from(get_args(t))
    if tuple[float, ...] in (t, *get_args(t)): return st.lists(st.floats(.1, 10), min_size=1, max_size=3).map(tuple)
    if tuple[str, ...] in (t, *get_args(t)):
        return st.lists(st.sampled_from(["q_proj", "v_proj", "all-linear"]), min_size=1, max_size=3).map(tuple)
    if t is bool: return st.booleans()
    if words := [w for a in get_args(t) if get_origin(a) is Literal for w in get_args(a)]:   # or a value of its own
        own = st.booleans() if bool in get_args(t) else st.integers(2, 10_000)
        if f.name == "learning_rate": own = st.floats(0, .9)
        return st.sampled_from(words) | own
    if f.name in ("lora_dropout", "weight_decay", "eval_fraction", "adam_beta1", "adam_beta2"):
        return st.floats(0, .9)
    if f.name == "drop_near_duplicates": return st.floats(.5, .9)
    if int in (t, *get_args(t)): return st.integers(2, 10_000)
    if float in (t, *get_args(t)): return st.floats(0, 1e6) | st.integers(0, 100)
    return st.text("abc/._-", min_size=1, max_size=8)


some = st.dictionaries(st.sampled_from([*SETTINGS]), st.none(), max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: values(SETTINGS[name]) for name in names}))


@given(some)
@how(max_examples=60, deadline=None)
def test_saved_and_loaded_is_equal(tmp_path_factory, overrides):
    cfg = load_config("gsm8k", **overrides)
    again = load_config(save_config(cfg, tmp_path_factory.mktemp("c")/"config.json"))
    assert again == cfg
    assert all(cfg.sources[k] == "override" for k in overrides)


@given(some)
@how(max_examples=40, deadline=None)
def test_a_python_file_says_the_same_as_overrides(tmp_path_factory, overrides):
    file = tmp_path_factory.mktemp("c")/"mine.py"
    file.write_text("from sft_nb.configs.default import *\n" + "".join(f"{k} = {v!r}\n" for k, v in overrides.items()))
    cfg = load_config(file)
    assert cfg == load_config(**overrides)
    assert all(cfg.sources[k] == f"{file}:{i}" for i, k in enumerate(overrides, 2))


names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20)
names = names.filter(lambda n: n not in ("name", "source"))   # the two parameters of load_config itself

THEIRS = FOREIGN.keys() | {key for tool in TOOLS.values() for key in [*tool.keys, *tool.own]}

@given(names)
@example("quant_bits")   # one tool's own: it stands in no table that all tools share
@how(max_examples=100, deadline=None)
def test_a_name_is_a_setting_an_alias_or_refused(name):
    known = name in defaults() or name in ALIASES or name in THEIRS
    try: load_config(**{name: "x"})
    except ConfigError as e: assert known or f"{name} is not a setting" in str(e)
    else: assert known


OTHER = {   # values that are not defaults
    bool: True, int: 7, float: .5, float | Literal["auto"]: .5, str: "some/name", int | None: 7, float | None: 7.,
    str | None: "some/name", tuple[str, ...]: ("q_proj",), tuple[str, ...] | None: ("some/name",)}

def another(full):
    "A value of setting `full` that is not its default"
    if full == "eval_fraction": return .5
    if full in ("gradient_checkpointing", "train_on_prompt"): return True
    if full == "num_workers": return 3
    if full == "bnb_4bit_use_double_quant": return False
    if full == "bnb_4bit_quant_type": return "fp4"
    return OTHER[SETTINGS[full].type]


@pytest.mark.parametrize("alias,full", sorted(ALIASES.items()))
def test_every_alias_works_in_any_spelling(alias, full):
    value = another(full)
    kept = "name" if alias == "output_dir" else value
    for spelled in (alias, alias.upper(), alias.replace("_", "-")):
        assert getattr(load_config(**{spelled: value}), full) == kept != defaults()[full]


def test_all_problems_come_in_one_error(tmp_path):
    file = tmp_path/"mine.py"
    file.write_text("MAX_SEQ_LENGTH = 262144,\nlerning_rate = 1\nlora_r = 'x'\nseed = -1\n")
    with pytest.raises(ConfigError) as e: load_config(file, methd="lora")
    parts = (f"{file}:1", "the comma at the end makes it one", f"{file}:2", "learning_rate", f"{file}:3", "an integer",
             f"{file}:4", "at least 0", "methd", "method")
    for part in parts: assert part in str(e.value)
    assert str(e.value).startswith("5 problems")


@pytest.mark.parametrize("source,fix", [("override", "lora_r=16"), ("command line", "--lora-r 16")])
def test_the_edit_is_spelled_as_its_place_spells_it(tmp_path, source, fix):
    with pytest.raises(ConfigError) as e: load_config(source=source, lora_r="16")
    assert str(e.value.fix) == fix
    (tmp_path/"mine.py").write_text("lora_r = '16'\n")
    with pytest.raises(ConfigError) as e: load_config(tmp_path/"mine.py", source=source)
    assert e.value.fix.says("shell") == "lora_r = 16"


def test_a_config_builds_on_another(tmp_path, monkeypatch):
    base, child = tmp_path/"base_config_of_mine.py", tmp_path/"child.py"
    base.write_text("from sft_nb.configs.default import *\nbatch_size = 16\nlora_r = 8\n")
    child.write_text("from base_config_of_mine import *\nper_device_train_batch_size = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    cfg = load_config(child)
    assert (cfg.per_device_train_batch_size, cfg.lora_r) == (2, 8)
    assert cfg.sources["lora_r"] == f"imported by {child}"
    assert cfg.sources["per_device_train_batch_size"] == f"{child}:2"


@pytest.mark.parametrize("text,says", [
    ("not json", "this is not a saved config"), ("[1]", "this is not a saved config"),
    ('{"config": {"lora_rr": 3}}', "lora_rr is not a setting; the nearest is lora_r"),
    ('{"config": {"lora_r": "x"}}', "lora_r takes an integer")])
def test_a_damaged_json_is_named(tmp_path, text, says):
    (tmp_path/"config.json").write_text(text)
    with pytest.raises(ConfigError, match=says): load_config(tmp_path/"config.json")


def test_find_config(tmp_path):
    (tmp_path/"notes.txt").touch()
    with pytest.raises(ConfigError, match="not a .py, .yaml or .json file"): find_config(tmp_path/"notes.txt")
    with pytest.raises(ConfigError, match="no config and no file has this name"): find_config("zzz")
    save_config(load_config(), tmp_path/"config.json")
    assert find_config(tmp_path) == tmp_path/"config.json"


@pytest.mark.parametrize("name", config_names())
def test_shipped_configs_load_and_are_listed_with_their_lines(name):
    lines = table(load_config(name)).splitlines()
    assert name == "default" or all(f"sft_nb/configs/{name}.py" in line for line in lines)


def test_every_setting_is_explained_and_used():
    "No setting is accepted but ignored"
    own = ("settings.py", "config_files.py", "config.py", "_modidx.py")
    files = [p for p in (ROOT/"sft_nb").rglob("*.py")
             if p.name not in own and p.parent.name not in ("configs", "extras")]
    code = "\n".join(p.read_text() for p in files)
    assert [n for n in defaults() if n not in code] == []
    assert all(len(text) > 10 for text in (s.help for s in SETTINGS.values()))


def test_a_frozen_config_is_checked_however_it_is_made():
    with pytest.raises(ConfigError): replace(load_config(), max_length="long")
    with pytest.raises(AttributeError): load_config().lora_r = 3


def test_functions_of_a_trainer_are_refused_with_what_to_write(tmp_path):
    file = tmp_path/"mine.py"
    file.write_text("lora_r = 8\ndef helper(): pass\ndef compute_metrics(p): return {}\n"
                    "def formatting_func(row): return row\nclass Own: pass\ndata_collator = Own()\n")
    with pytest.raises(ConfigError) as e: load_config(file)
    text = str(e.value)
    assert text.startswith("3 problems") and f"{file}:3: compute_metrics is not a setting" in text
    assert "metrics={" in text and "task = 'task.py'" in text and "max_tokens_per_batch" in text
    file.write_text("lora_r = 8\ndef helper(): pass\n")
    assert load_config(file).lora_r == 8


def test_no_wandb_wins_over_the_report_to_of_a_file(tmp_path):
    file = tmp_path/"mine.py"
    for written, left in (('"wandb"', None), ('["wandb", "tensorboard"]', ("tensorboard",))):
        file.write_text(f"report_to = {written}\n")
        assert load_config(file, wandb=False).report_to == left
        assert "wandb" in load_config(file).report_to
    assert load_config(file, wandb=False, report_to=("wandb",)).report_to == ("wandb",)


AXOLOTL = "base_model: tiny\nadapter: lora\nmicro_batch_size: 1\n"

@pytest.mark.parametrize("text,line,found,fix", [
    ("max_length: 1.5\n", 1, "max_length: 1.5 is a number", "max_length: 512"),
    ("seed: 1\nlora_r: [8]\n", 2, "lora_r: [8] is a list", "lora_r: 8"),
    ("learning_rate: [1, 2]\n", 1, "learning_rate: [1, 2] is a list", "learning_rate: auto"),
    ("run_name: 2024-01-31\n", 1, "run_name: 2024-01-31 is a date in YAML", 'write run_name: "2024-01-31", in quotes'),
    ("seed: on\n", 1, "seed: true is true", "seed: 1"),
    ("report_to: {a: 1}\n", 1, "report_to is a dict", "leave report_to out, or write a list of strings"),
    ("lora_target_modules: [q_proj, 3]\n", 1, "lora_target_modules: [q_proj, 3] is a list with 3 in it",
     "lora_target_modules: [all-linear]"),
    ("train_file: {a: b}\n", 1, "train_file is a dict", "leave train_file out, or write a list of strings"),
    ("data: x.jsonl\n", 1, "data is not a setting", "train_file: rows.jsonl"),
    ("lerning_rate: 1\n", 1, "lerning_rate is not a setting", "write learning_rate"),
    (f"{AXOLOTL}sequence_len: 0\n", 4, "sequence_len: 0", "sequence_len: 512"),
    (f"{AXOLOTL}val_set_size: x\n", 4, "val_set_size: x", "val_set_size: 0.05"),
    (f"{AXOLOTL}optimizer: came_pytorch\n", 4, "optimizer: came_pytorch", "optimizer: adamw_torch")])
def test_a_yaml_file_is_answered_in_its_own_words(tmp_path, text, line, found, fix):
    file = tmp_path/"mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as e: load_config(file)
    assert (e.value.where, e.value.found, str(e.value.fix)) == (f"{file}:{line}", found, fix)
    for odd in ("tuple", "comma", " = "): assert odd not in str(e.value)
    (tmp_path/"fixed.yaml").write_text(str(e.value.fix) if fix.split(":")[0] in defaults() else "seed: 1")
    load_config(tmp_path/"fixed.yaml")   # what is proposed can be read


@pytest.mark.parametrize("text,line,why,fix", [
    ("lora_r: 8\n  seed: 5\n", 2, "mapping values are not allowed here", "write it without leading spaces: seed: 5"),
    ("lora_r: 8\n  lr_scheduler_kwargs: [1\n", 2, "mapping values are not allowed here",
     "write it without leading spaces, and with ] at the end: lr_scheduler_kwargs: [1]"),
    ("lora_r: 8\n  seed: [1}\n", 2, "mapping values are not allowed here", "correct line 2, which is: seed: [1}"),
    ('run_name: a: "b"\n', 1, "mapping values are not allowed here", 'write run_name: "a: \\"b\\""'),
    ("run_name: a: b\n", 1, "mapping values are not allowed here", 'write run_name: "a: b"'),
    ("lora_r: 8\nmax_length:512\nseed: 1\n", 2, "could not find expected ':'", "write max_length: 512"),
    ("max_length = 512\n", 1, "without a colon and a space", "write max_length: 512"),
    ("lora_r: 8\n\tseed: 1\n", 2, "found character '\\t'", "indent line 2 with spaces, not with tabs"),
    ("lora_r: [8\nseed: 1\n", 1, "while parsing a flow sequence", "correct line 1, which is: lora_r: [8")])
def test_what_is_no_yaml_is_shown_with_its_line(tmp_path, text, line, why, fix):
    file = tmp_path/"mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as e: load_config(file)
    assert e.value.where == f"{file}:{line}" and why in e.value.found and str(e.value.fix) == fix


@pytest.mark.parametrize("name,text", [
    ("a.json", '[{"question": "a", "answer": "b"}]'), ("b.json", '{"question": "a"}\n{"question": "b"}\n'),
    ("c.jsonl", '{"question": "a"}\n'), ("d.csv", "question,answer\na,b\n")])
def test_rows_in_the_place_of_a_config_are_told_where_they_belong(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path/name).write_text(text)
    with pytest.raises(ConfigError) as e: load_config(name)
    assert e.value.fix.says("shell") == f"--train-file {name}"
    assert e.value.fix.says("python") == f"load_config(train_file='{name}')"
    assert load_config(train_file=name).train_file == (name,)


def test_a_name_that_is_no_setting_and_in_no_file_is_no_helper_of_one():
    for source, more in (("override", {}), ("command line", dict(source="command line"))):
        with pytest.raises(ConfigError, match=f"{source}: zzqq is not a setting") as e: load_config(zzqq=1, **more)
        assert "helper" not in str(e.value) and "leave zzqq out" in str(e.value)


def test_a_key_that_is_written_twice(tmp_path):
    file = tmp_path/"twice.yaml"
    file.write_text("lora_r: 8\nseed: 1\nlora_r: 16\n")
    with pytest.raises(ConfigError, match="twice.yaml:3: lora_r is set twice, on lines 1 and 3"): load_config(file)
    file.write_text(f"{AXOLOTL}datasets:\n  - path: a.jsonl\n    path: b.jsonl\n")
    with pytest.raises(ConfigError, match="path is set twice, on lines 5 and 6"): load_config(file)
    file.write_text("lora_r: 8\nlora_r: 8\n")
    assert load_config(file).lora_r == 8
    file.write_text("lora_r: 8\nlora_rank: 16\n")
    with pytest.raises(ConfigError, match=r"lora_r is set twice, to 8 \(.*twice.yaml:1\) and as lora_rank to 16"):
        load_config(file)
    (tmp_path/"twice.json").write_text('{"config": {"lora_r": 8,\n "lora_r": 16}, "sources": {"lora_r": "x"}}')
    with pytest.raises(ConfigError, match="lora_r is set twice, on lines 1 and 2"): load_config(tmp_path/"twice.json")
    twice = '{\n\t"config": {\n\t\t"lora_r": 8,\n\t\t"lora_r": 16}}'   # tabs, which YAML refuses
    for encoding in ("utf-8", "utf-16"):
        (tmp_path/"twice.json").write_text(twice, encoding=encoding)
        with pytest.raises(ConfigError, match="lora_r is set twice, on lines 3 and 4"):
            load_config(tmp_path/"twice.json")
    for odd in (f'"lora_r": {"[" * 900}{"]" * 900}, "lora_r": 8', f'"{"k" * 2000}": 1, "{"k" * 2000}": 2'):
        (tmp_path/"twice.json").write_text(f'{{"config": {{{odd}}}}}')
        with pytest.raises(ConfigError, match="a key is set twice in one object"): load_config(tmp_path/"twice.json")


class Odd:
    "An object that cannot be compared"
    def __eq__(self, other): raise KeyError("no")


NESTED = "x"
for _ in range(5000): NESTED = [NESTED]

@pytest.mark.parametrize("value", [np.array([1, 2]), Odd(), NESTED, 10**5000, -10**30, "9" * 400 + "k",
                                   "1" * 5000 + ":00"], ids=range(7))
def test_values_that_no_setting_takes(value):
    names = ["on_long", "max_samples", "max_time", "train_on_prompt", "eval_fraction"]
    for name in names if isinstance(value, str) else [*names, "report_to"]:
        with pytest.raises(ConfigError, match=f"{name}.*Fix: "): load_config(**{name: value})
    with pytest.raises(ConfigError, match="lora_r is an integer of more than 63 bits"): load_config(lora_r=10**5000)


@pytest.mark.parametrize("name", [5, True, b"demo", ["demo"], ("demo",), {"demo"}, len])
def test_what_names_no_config_is_not_taken_for_the_defaults(name):
    with pytest.raises(ConfigError, match=f"cfg: it is of type {type(name).__name__}.*Fix: load_config"):
        load_config(name)


def test_names_of_settings_that_are_no_texts(tmp_path):
    with pytest.raises(ConfigError, match="1 is not a setting"): load_config({1: 2})
    assert load_config(PurePosixPath("demo")) == load_config("demo")
    (tmp_path/"leaves.py").write_text("class Leaves(BaseException): pass\nraise Leaves('x')\n")
    with pytest.raises(ConfigError, match="leaves.py:2: Leaves: x"): load_config(tmp_path/"leaves.py")
    deep = "x=" + "-" * 20_000 + "1"
    with pytest.raises(ConfigError): load_config(chat_template_kwargs=(deep, 3))
    assert named_arguments("chat_template_kwargs", (deep,), "") == dict(x=deep[2:])


def test_a_mapping_that_is_merged_is_no_setting(tmp_path):
    file = tmp_path/"merged.yaml"
    file.write_text("base: &base {lora_r: 4, max_length: 64}\nmore: &more\n  lora_alpha: 9\n"
                    "<<: [*base, *more]\nlora_r: 8\n")
    cfg = load_config(file)
    assert (cfg.lora_r, cfg.max_length, cfg.lora_alpha) == (8, 64, 9)
    file.write_text("base: &base {lora_r: 4}\nmore: &more\n  <<: *base\n<<: *more\n")
    assert load_config(file).lora_r == 4
    file.write_text("base: &base {lora_rr: 4}\n<<: *base\n")   # what is in it is looked at where it is merged
    with pytest.raises(ConfigError, match="merged.yaml:2: lora_rr is not a setting; the nearest is lora_r"):
        load_config(file)
    for other in ("base: {lora_r: 4}\n", "base: &base {lora_r: 4}\n", "base: &base {lora_r: 4}\nbias: *base\n"):
        file.write_text(other)   # which is merged nowhere
        with pytest.raises(ConfigError, match="merged.yaml:1: base is not a setting"): load_config(file)


def test_other_json_than_a_saved_config(tmp_path):
    (tmp_path/"mine.json").write_text('{"max_length": 1024,\n "lora_r": [8]}')
    with pytest.raises(ConfigError, match=r'mine.json:2: "lora_r": \[8\] is a list.*Fix: "lora_r": 8'):
        load_config(tmp_path/"mine.json")
    (tmp_path/"mine.json").write_text('{"max_length": 1024}')
    assert load_config(tmp_path/"mine.json").max_length == 1024
    (tmp_path/"mine.json").write_text('{"max_length": 1024,\n}')
    with pytest.raises(ConfigError, match="mine.json:2: this is not a saved config"): load_config(tmp_path/"mine.json")
    (tmp_path/"mine.json").write_text('{"config": 3}')
    with pytest.raises(ConfigError, match="it has no settings under config"): load_config(tmp_path/"mine.json")
    (tmp_path/"config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="the config of a model, not of a run.*Fix: model="): load_config(tmp_path)
    (tmp_path/"mine.toml").write_text("max_length = 512\n")
    with pytest.raises(ConfigError, match="Fix: write it in YAML: max_length: 512"): load_config(tmp_path/"mine.toml")


def test_a_missing_config_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError) as e: load_config(tmp_path/"nosuch.yaml")
    assert isinstance(e.value, ConfigError) and e.value.exit_code == 2


def test_numbers_that_are_none(tmp_path):
    with pytest.raises(ConfigError) as e: load_config(learning_rate=float("nan"))
    assert e.value.found == "learning_rate = nan is not a finite number"
    for v in (10, 1, 1.):
        with pytest.raises(ConfigError, match="must be a share of all steps, below 1"): load_config(warmup_ratio=v)
    with pytest.raises(ConfigError, match="Fix: --warmup-ratio 0.1, or --warmup-steps 10"):
        load_config(warmup_ratio=10, source="command line")
    assert load_config(warmup_ratio=.1).warmup_steps == .1
    assert load_config("demo").warmup_steps and load_config("gsm8k").warmup_steps   # which the shipped configs set
    assert load_config("demo", warmup_ratio=.3).warmup_steps == load_config("gsm8k", warmup_ratio=.3).warmup_steps == .3
    assert load_config(load_config("demo"), warmup_ratio=.3).warmup_steps == .3
    with pytest.raises(ConfigError, match="must be a share of all steps, below 1"): load_config("demo", warmup_ratio=3)
    (tmp_path/"own.py").write_text("from sft_nb.configs.demo import *\nwarmup_ratio = 0.3\n")
    assert load_config(tmp_path/"own.py").warmup_steps == .3
    assert load_config("demo", warmup_ratio=.3, warmup_steps=20).warmup_steps == 20   # of one place


@pytest.mark.parametrize("typed,setting,near", [("FULL", "method", "full"), ("QLoRA", "method", "qlora"),
    ("BF16", "dtype", "bfloat16"), ("Messages", "data_format", "messages"), ("NF4", "bnb_4bit_quant_type", "nf4")])
def test_the_case_of_a_value_does_not_matter_for_what_is_proposed(typed, setting, near):
    with pytest.raises(ConfigError) as e: load_config(**{setting: typed})
    assert e.value.fix.settings == {setting: near}


@pytest.mark.parametrize("value", [-.5, float("-inf")])
def test_a_share_of_the_steps_is_above_0(value):
    "0.5 is another tool's share of all steps, and is accepted; a number below 0 is none"
    with pytest.raises(ConfigError, match="logging_steps takes an integer"): load_config("demo", logging_steps=value)
