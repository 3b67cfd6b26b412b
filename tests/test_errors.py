"""Errors have the same exception types as in Python's standard library."""
import pickle

import pytest

from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.evaluation.sweep import sweep
from sft_nb.evaluation.verdict import verdict
from sft_nb.extras.card import write_card
from sft_nb.extras.html_report import run_page
from sft_nb.extras.openai_client import rejection, RequestRejected
from sft_nb.extras.earlier_adapter import find_earlier_adapter
from sft_nb.model.finetuning.parallelism import deepspeed_config
from sft_nb.proof.folder import Folder
from sft_nb.extras.gguf_checks import Gguf
from sft_nb.base.report import (
    ConfigError, MissingFileError, MissingPathError, MissingRunError, SftError, spell_settings)
from sft_nb.model.hardware import find_device
from sft_nb.planning.plan import plan
from sft_nb.proof.merge import merge
from sft_nb.rows.sources import read_rows
from sft_nb.runs.directory import list_runs, Run
from sft_nb.tasks.core import task_of
from sft_nb.tokens.tokenizer import load_tokenizer


def test_a_wrong_value_is_a_value_error():
    with pytest.raises(ValueError, match="lora_r") as e: load_config("demo", lora_r="sixteen")
    assert type(e.value) is ConfigError and e.value.exit_code == 2


def test_a_missing_file_of_rows_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file") as e: read_rows(tmp_path/"rows.jsonl")
    assert type(e.value) is MissingFileError and e.value.exit_code == 1 and str(e.value.fix)


def test_a_missing_run_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such directory") as e: Run(tmp_path/"demo-1")
    assert type(e.value) is MissingRunError and isinstance(e.value, ConfigError) and e.value.exit_code == 2


@pytest.mark.parametrize("look", [
    lambda path: load_config(f"{path}/nosuch.yaml"),
    lambda path: load_tokenizer(load_config(model=f"{path}/nofolder")),
    lambda path: load_tokenizer(load_config(model="tiny", chat_template=f"{path}/nosuch.jinja")),
    lambda path: task_of(load_config(task=f"{path}/nosuch.py")),
    lambda path: deepspeed_config(**load_config(deepspeed=f"{path}/nosuch.json").values(deepspeed_config)),
    lambda path: find_earlier_adapter(load_config(method="lora", adapter_name_or_path=f"{path}/nosuch")),
    lambda path: Folder(path/"nope"), lambda path: Gguf(path/"nope.gguf")])
def test_whatever_is_named_and_not_there_is_a_file_not_found_error(tmp_path, look):
    with pytest.raises(FileNotFoundError) as e: look(tmp_path)
    assert type(e.value) is MissingPathError and e.value.exit_code == 2 and str(e.value.fix)


def test_a_missing_config_names_those_beside_it(tmp_path):
    (tmp_path/"mine.yaml").write_text("seed: 1\n")
    with pytest.raises(MissingPathError) as e: load_config(tmp_path/"mime.yaml")
    assert e.value.fix.settings == dict(config=str(tmp_path/"mine.yaml"))


def test_what_is_there_and_wrong_is_no_missing_file(tmp_path):
    (tmp_path/"x.gguf").write_text("x")
    for look in (lambda: Folder(tmp_path), lambda: Gguf(tmp_path/"x.gguf"),
                 lambda: find_earlier_adapter(load_config(method="lora", adapter_name_or_path=str(tmp_path)))):
        with pytest.raises(ConfigError) as e: look()
        assert not isinstance(e.value, FileNotFoundError)


def test_a_rejected_request_is_a_runtime_error():
    error = rejection("http://localhost:8000", 500, "oops")
    assert isinstance(error, RuntimeError) and type(error) is RequestRejected and isinstance(error, SftError)


@pytest.mark.parametrize("kind", [SftError, ConfigError, MissingFileError, MissingPathError, MissingRunError])
def test_an_error_survives_another_process_with_its_fix(kind):
    error = pickle.loads(pickle.dumps(kind("rows.jsonl", "there is no such file", "a file", fix="name a file")))
    assert type(error) is kind and str(error) == "rows.jsonl: there is no such file; a file. Fix: name a file."


@pytest.mark.parametrize("language, text", [
    ("yaml", 'system_prompt: "Für Ä"'), ("json", '"system_prompt": "Für Ä"'), ("shell", "--system-prompt 'Für Ä'"),
    ("file", "system_prompt = 'Für Ä'")])
def test_a_fix_keeps_its_letters_in_every_language(language, text):
    assert spell_settings(dict(system_prompt="Für Ä"), language) == text


WRONG_KINDS = [   # function, its arguments, and the words of the error
    (evaluate, dict(cluster=["id"]), "cluster is .'id'.; a string or None"), (evaluate, dict(by=5), "by is 5; a str"),
    (evaluate, dict(server=8000), "server is 8000; a string"), (evaluate, dict(served={}), "served is {}; a string"),
    (evaluate, dict(shots="three"), "shots is 'three'; an integer"), (evaluate, dict(shots=True), "shots is True"),
    (evaluate, dict(eval_file=5), "eval_file is 5; a path"),
    (sweep, dict(checkpoints=3), "checkpoints is 3; a string"), (sweep, dict(checkpoints=[None]), "is None"),
    (sweep, dict(checkpoint="checkpoint-3"), "checkpoint is given; .*Fix: checkpoints="),
    (verdict, dict(min_gain="2%"), "min_gain is '2%'; a number"), (verdict, dict(min_gain=None), "min_gain is None"),
    (verdict, dict(max_forgetting=[.1]), "max_forgetting is .0.1.; a number or None"),
    (merge, dict(out=5), "out is 5; a path or None"), (merge, dict(prompts="8"), "prompts is '8'; an integer"),
    (lambda run, **how: run.resume(**how), dict(max_steps="9"), "max_steps is '9'; a number"),
    (run_page, dict(path=5), "path is 5; a path"), (run_page, dict(rows="five"), "rows is 'five'; an integer"),
    (write_card, dict(folder=5), "folder is 5; a path"), (write_card, dict(folder="nowhere"), "no folder nowhere"),
    (lambda run, **how: list_runs(**how), dict(root=5), "path is 5; a path"),
    (lambda run, **how: list_runs(run.path.parent, **how), dict(only=5), "path is 5; a path"),
    (lambda run, **how: read_rows(**how), dict(rows=[dict(text="x")], n="5"), "n is '5'; an integer or None"),
    (lambda run, **how: read_rows(**how), dict(rows=[dict(text="x")], n=-1), "n is -1; at least 1. Fix: leave n out"),
    (lambda run, **how: find_device(**how), dict(name=None), "device 'None': it is not in the list"),
    (lambda run, **how: plan(run.config, **how), dict(world_size="2"), "world_size is '2'; an integer or None"),
    (lambda run, **how: plan(run.config, **how), dict(lengths="512"), "lengths is '5'; an integer"),
    (lambda run, **how: plan(run.config, **how), dict(lengths=5.), "lengths is 5.0; an integer"),
]


@pytest.mark.parametrize("function, how, words", WRONG_KINDS, ids=[words for *_, words in WRONG_KINDS])
def test_an_argument_of_another_kind_is_named(undisturbed, function, how, words):
    with pytest.raises(SftError, match=words) as e: function(undisturbed, **how)
    assert str(e.value.fix)


def test_one_run_may_be_named_without_a_list(undisturbed):
    assert [*list_runs(undisturbed.path.parent, only=undisturbed.name)["run"]] == [undisturbed.name]
