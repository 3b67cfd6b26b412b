"""Errors have the same exception types as in Python's standard library."""
import pickle

import pytest

from sft_nb.config.load import load_config
from sft_nb.extras.openai_client import rejection, RequestRejected
from sft_nb.extras.earlier_adapter import find_earlier_adapter
from sft_nb.model.finetuning.parallelism import deepspeed_config
from sft_nb.proof.folder import Folder
from sft_nb.extras.gguf_checks import Gguf
from sft_nb.base.report import (
    ConfigError, MissingFileError, MissingPathError, MissingRunError, SftError, spell_settings)
from sft_nb.rows.sources import read_rows
from sft_nb.runs.directory import Run
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
