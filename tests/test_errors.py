"""What a caller catches: errors are of the kinds that Python's own libraries raise."""
import pickle

import pytest

from sft_nb.config import load_config
from sft_nb.evaluation.openai_client import rejection, RequestRejected
from sft_nb.report import ConfigError, MissingFileError, MissingRunError, SftError
from sft_nb.rows.sources import read_rows
from sft_nb.runs.directory import Run


def test_a_wrong_value_is_a_value_error():
    with pytest.raises(ValueError, match="lora_r") as e: load_config("demo", lora_r="sixteen")
    assert type(e.value) is ConfigError and e.value.exit_code == 2


def test_a_missing_file_of_rows_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file") as e: read_rows(tmp_path/"rows.jsonl")
    assert type(e.value) is MissingFileError and e.value.exit_code == 1 and str(e.value.fix)


def test_a_missing_run_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such directory") as e: Run(tmp_path/"demo-1")
    assert type(e.value) is MissingRunError and isinstance(e.value, ConfigError) and e.value.exit_code == 2


def test_a_rejected_request_is_a_runtime_error():
    error = rejection("http://localhost:8000", 500, "oops")
    assert isinstance(error, RuntimeError) and type(error) is RequestRejected and isinstance(error, SftError)


@pytest.mark.parametrize("kind", [SftError, ConfigError, MissingFileError, MissingRunError])
def test_an_error_survives_another_process_with_its_fix(kind):
    error = pickle.loads(pickle.dumps(kind("rows.jsonl", "there is no such file", "a file", fix="name a file")))
    assert type(error) is kind and str(error) == "rows.jsonl: there is no such file; a file. Fix: name a file."
