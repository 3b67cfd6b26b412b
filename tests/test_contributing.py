"""The recipes of CONTRIBUTING.md, performed in a copy of the repository, pass the checks of `make quick`."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

TEXT = (ROOT/"CONTRIBUTING.md").read_text()


def block(recipe:str)->str:
    "The first code after `**A setting** is ...`, without its indent"
    found = re.search(r"\n\n((?: {4}.*\n|\n(?= {4}))+)", TEXT[TEXT.index(f"**{recipe}** "):])
    return re.sub(r"(?m)^ {4}", "", found[1])


def marked(recipe:str)->dict[str,str]:
    "Place -> the line for it: `code   # in _READERS`"
    return {place: line for line, place in re.findall(r"(?m)^(\S.*?) +# in (\w+)$", block(recipe))}


class Copy:
    "A copy of the tracked and new files, under git, in which notebooks and tests can be edited"
    def __init__(self, folder:Path):
        self.folder = folder
        listing = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
        if listed.returncode: pytest.skip("this is no git repository")
        for name in listed.stdout.splitlines():
            if not (ROOT/name).is_file(): continue
            (folder/name).parent.mkdir(parents=True, exist_ok=True)
            if name.startswith("sft_nb/assets"): (folder/name).symlink_to(ROOT/name)
            else: shutil.copy(ROOT/name, folder/name)
        for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm a"):
            subprocess.run(["git", *words.split()], cwd=folder, check=True)

    def run(self, *words:str)->subprocess.CompletedProcess:
        env = os.environ | dict(PYTHONPATH=str(self.folder), OMP_NUM_THREADS="1")
        return subprocess.run([sys.executable, *words], cwd=self.folder, env=env, capture_output=True, text=True)

    def edit(self, name:str, old:str, new:str)->None:
        "Replace a text that stands once in a file, or in the code of a notebook"
        file = self.folder/name
        if file.suffix != ".ipynb":
            text = file.read_text()
            assert text.count(old) == 1, (name, old)
            return file.write_text(text.replace(old, new)) and None
        nb = json.loads(file.read_text())
        cell, = [c for c in nb["cells"] if old in "".join(c["source"])]
        cell["source"] = "".join(cell["source"]).replace(old, new).splitlines(keepends=True)
        file.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n")

    def add_cells(self, name:str, *sources:str)->None:
        "Code at the end of a notebook, which is made if it is not there; the first cell of a new one is its title"
        file = self.folder/name
        new = dict(cells=[], metadata={}, nbformat=4, nbformat_minor=5)
        nb = json.loads(file.read_text()) if file.exists() else new
        for k, source in enumerate(sources):
            kind = dict(cell_type="code", execution_count=None, outputs=[])
            if source.startswith("# "): kind = dict(cell_type="markdown")
            lines = source.strip("\n").splitlines(keepends=True)
            nb["cells"].append(kind | dict(id=f"added{k:03}", metadata={}, source=lines))
        file.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n")


def add_setting(copy:Copy)->None:
    anchor, lines = "    max_grad_norm:Annotated[", re.sub("(?m)^", "    ", block("A setting").rstrip())
    copy.edit("nbs/11_training/00_settings.ipynb", anchor, f"{lines}\n{anchor}")
    copy.edit("tests/training/test_arguments.py", "OTHER = dict(\n", "OTHER = dict(\n    torch_empty_cache_steps=50,\n")


def add_task(copy:Copy)->None:
    last = max(int(p.name[:2]) for p in (copy.folder/"nbs/03_tasks").glob("*.ipynb"))
    name = f"03_tasks/{last + 1:02}_spelling.ipynb"
    copy.add_cells(f"nbs/{name}", "# spelling\n\n> Words, spelled backwards.", "#| default_exp tasks.spelling",
                   "#| export\nfrom sft_nb.tasks.core import Score, task", f"#| export\n{block('A task')}",
                   'found = TASK.score("tac", dict(word="cat", backwards="tac"))\n'
                   'assert found.correct and spelling.name == "spelling" and found.figures == dict(same_length=1)')
    copy.edit("nbs/02_rows/00_settings.ipynb", "nli, summarize", "nli, spelling, summarize")
    last_entry = r"( *)- text: .*\n.*03_tasks/\d+_\w+\.ipynb\n(?!.*\n.*03_tasks)"
    before = re.search(last_entry, (ROOT/"nbs/sidebar.yml").read_text())
    entry = f'{before[1]}- text: "Words backwards"\n{before[1]}  href: {name}\n'
    copy.edit("nbs/sidebar.yml", before[0], before[0] + entry)


def add_format(copy:Copy)->None:
    lines = marked("A format")
    copy.edit("nbs/02_rows/00_settings.ipynb", "FORMATS = dict(", f"FORMATS = dict(\n    {lines['FORMATS']}")
    copy.edit("nbs/02_rows/03_readers.ipynb", "_READERS = dict(\n", f"_READERS = dict(\n    {lines['_READERS']}\n")


def add_check(copy:Copy)->None:
    copy.add_cells("nbs/09_checks/02_rows.ipynb", f"#| export\n{block('A check')}", "assert check_few(data).status")
    copy.edit("tests/checks/test_checks.py", "pad prompts", "pad prompts few")


def add_control(copy:Copy)->None:
    page, lines = "nbs/14_panels/02_rows.ipynb", marked("A control")
    copy.edit(page, "        self._fit_range()\n        self._bind()\n",
              f"        {lines['__init__']}\n        self._fit_range()\n        self._bind()\n")
    copy.edit(page, "        self.table.observe(", f"        {lines['_bind']}\n        self.table.observe(")
    copy.edit(page, "controls_row(self.range, self.text, self.mark_listed)", lines["blocks"])


PERFORMED = '''
"What the recipes have made works"
from pathlib import Path
import pytest
from sft_nb.checks.rows import check_few
from sft_nb.config.load import load_config
from sft_nb.panels.rows import DataPanel
from sft_nb.base.report import ConfigError
from sft_nb.rows.readers import to_messages
from sft_nb.rows.readers import detect
from sft_nb.tasks.core import get_task
from sft_nb.tasks.metrics import measure_answers
from sft_nb.tokens.prepare import prepare
from sft_nb.training.arguments import training_arguments

@pytest.fixture(scope="module")
def data(): return prepare(load_config("demo", max_samples=9, eval_samples=0))

def test_the_setting_arrives_and_has_limits(capsys):
    from sft_nb.cli import main
    cfg = load_config("demo", torch_empty_cache_steps=50)
    assert training_arguments(cfg, Path("run")).torch_empty_cache_steps == 50
    with pytest.raises(ConfigError, match="torch_empty_cache_steps must be at least 1"):
        load_config("demo", torch_empty_cache_steps=0)
    with pytest.raises(SystemExit): main(["train", "--help"])
    assert "--torch-empty-cache-steps" in capsys.readouterr().out

def test_the_task_and_its_metric_are_found():
    task, rows = get_task("spelling"), [dict(word="cat", backwards="tac")]
    assert load_config(task="spelling").task == "spelling" and task.messages(rows[0])[-1]["content"] == "tac"
    assert measure_answers(task, ["cat"], [task.score("cat", rows[0])], rows)["same_length"] == 1

def test_the_format_is_detected_and_read():
    row = dict(dialog=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    assert detect(row) == "dialog" == load_config(data_format="dialog").data_format
    assert to_messages(row)[-1]["content"] == "b"

def test_the_check_sees_what_is_planted(data):
    assert check_few(data).status == "ok"
    few = prepare(load_config("demo", max_samples=2, eval_samples=0))
    assert check_few(few).status == "warn"

def test_the_control_has_its_effect(data):
    panel = DataPanel(data)
    panel.text.value = "nothing like that"
    panel.clear.click()
    assert panel.text.value == "" and "clear the search" in str(panel.view)
'''
QUICK = {   # of the tests that `make quick` selects, those that look at what the recipes change
    "tests/test_style.py": "column_120 or shown", "tests/test_layers.py": "chapter or gap or point_down",
    "tests/tasks/test_tasks.py": "found_by_name", "tests/checks/test_checks.py": "order_of_a_report",
    "tests/training/test_arguments.py": "torch_empty_cache_steps", "tests/test_settings.py": "",
    "tests/test_site.py": "sidebar or imports_stand or first_cell or lead_somewhere", "tests/test_performed.py": ""}


def test_the_recipes_pass_the_quick_checks(tmp_path):
    copy = Copy(tmp_path)
    for perform in (add_setting, add_task, add_format, add_check, add_control): perform(copy)
    (tmp_path/"tests/test_performed.py").write_text(PERFORMED.lstrip())
    programs = Path(sys.executable).parent
    for tool in (programs/"nbdev_clean", programs/"nbdev_export", "scripts/stubs.py"):   # what `make export` runs
        done = copy.run(str(tool))
        assert done.returncode == 0, done.stderr
    done = copy.run("-m", "ruff", "check", "-q", "nbs", "sft_nb", "tests")
    assert done.returncode == 0, done.stdout

    assert "\n    torch_empty_cache_steps: int | None\n" in (tmp_path/"sft_nb/config/settings.pyi").read_text()
    selected = copy.run("scripts/quick.py", "--list").stdout
    notebooks = re.findall(r"(?m)^  (nbs/\S+)", selected)
    assert {Path(name).stem[3:] for name in notebooks} == {"settings", "spelling", "readers", "rows"}
    asked = [name for name in QUICK if name in selected]
    assert {*QUICK} - {*asked} == {"tests/test_site.py"}   # the sidebar is left to `make test`
    words = " or ".join(f"({file.stem} and ({words}))" if words else file.stem for file, words in
                        ((Path(name), words) for name, words in QUICK.items()))
    done = copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *QUICK, "-k", words)
    assert done.returncode == 0, done.stdout[-6000:]
