"""Modules that moved are found under the names of older versions, which task files and configs of users import."""
import subprocess, sys

import pytest

from sft_nb import load_config
from sft_nb.base.extensions import extension
from sft_nb.base.report import ConfigError
from sft_nb.config.load import Config

OLD = ("from sft_nb.config import load_config, Config\nfrom sft_nb.report import ConfigError, SftError\n"
       "from sft_nb.settings import SETTINGS\nfrom sft_nb.thoughts import answer_of\nimport sft_nb.display\n"
       "from sft_nb.tasks.core import Task\n")


def test_old_names_are_the_same_objects():
    names = {}
    exec(OLD, names)
    assert names["ConfigError"] is ConfigError and names["load_config"] is load_config and names["Config"] is Config
    import sft_nb.base.display
    assert names["sft_nb"].display is sft_nb.base.display and sft_nb.base.display.__name__ == "sft_nb.base.display"


def test_a_config_file_that_imports_old_names(tmp_path):
    imports = OLD.replace("SETTINGS", "SETTINGS as _")   # a public name in capitals would be a setting
    (tmp_path/"mine.py").write_text(imports + "max_length = load_config('demo').max_length * 2\n")
    assert load_config(tmp_path/"mine.py").max_length == 2 * load_config("demo").max_length


def test_old_names_of_the_model():
    from sft_nb.model import checkpointing, generate, optimizer, sampling
    from sft_nb.model.finetuning import checkpointing as new
    from sft_nb.model.generation import Sampling
    assert checkpointing is new and sampling is generate and generate.Sampling is Sampling
    assert optimizer.__name__ == "sft_nb.model.finetuning.optimizer"


def test_old_names_of_extras_and_of_each_module_that_moved():
    import importlib
    import sft_nb
    older = extension("older_modules")
    assert len(older) > 15 and older.items() <= sft_nb._MOVED.items()
    for old, new in sft_nb._MOVED.items(): assert importlib.import_module(old) is importlib.import_module(new), old


def test_old_names_load_no_torch():
    code = OLD + "import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_names_are_refused():
    with pytest.raises(ModuleNotFoundError, match="sft_nb.reports"): __import__("sft_nb.reports")
    with pytest.raises(ImportError, match="load_configs"): exec("from sft_nb.config import load_configs")
