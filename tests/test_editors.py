"""What editors and type checkers know: basedpyright, started once for README, recipes, public names, and mistakes."""
import inspect
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

import sft_nb

sys.path.insert(0, str(ROOT/"scripts"))
from plain_install import ten_lines  # noqa: E402
from stubs import make_stubs, Module, Package  # noqa: E402

MISTAKES = """
import sft_nb
from sft_nb import *
from sft_nb import lauch   # wrong
from sft_nb.config.load import load_confg   # wrong
cfg = load_config("demo", lr=1e-4, max_time="5h", train_file="rows.jsonl", fields=dict(question="Q"), lora_r=8)
load_config("demo", lerning_rate=1e-4)   # wrong
load_config("demo", max_samples="many")   # wrong
load_config("demo", method="lorra")   # wrong
load_config("demo", report_to=3)   # wrong
load_config(cfg, lora_target_modules=["q_proj"], dtype="float32").lora_r.bit_length()
print(cfg.max_length, cfg.data_processes, cfg.max_lenght)   # wrong
data = prepare(cfg)
prepare(cfg, rows=[])   # wrong
print(data.train.lengths.max(), data.dropped, data.trian)   # wrong
print(plan(cfg, data, device="rtx4090-24gb").fits, plan(data, device=3))   # wrong
print(preflight(data).failed[0].fix, preflight(data).problems)   # wrong
run = launch(cfg, data, num_processes=2)
launch(cfg, data, processes=2)   # wrong
launch(data, num_processes="two")   # wrong
launch(data.train)   # wrong
run.wait().upper()
run.wiat()   # wrong
run.wait().state   # wrong
run.metrics()[0]["loss"]
run.metrics.loss   # wrong
run.resume(max_time="5h").stop()
run.resume(lora_r=8)   # wrong
resume(run, learning_rate=1e-4)   # wrong
print(run.status.exit_code, run.status.exitcode)   # wrong
print(evaluate(run, eval_samples=9, batch_size=4).tuned.accuracy)
evaluate(run, max_new_token=3)   # wrong
print(sweep(run, shots=0).best, sweep(run).bset)   # wrong
prove(run, servr="http://localhost:8000")   # wrong
DataPanel(data).state.search("of").listed()
DataPanel(data).state.search(1)   # wrong
RunPanel(run).stop.click()
RunPanel(run).stpo   # wrong
Report.load("report.json").status.lower()   # wrong: a Path
SftError("train.jsonl", "is empty").card()
SftError("train.jsonl")   # wrong
sft_nb.trian(cfg)   # wrong
"""
KNOWN = {   # expression -> its type
    "plan(cfg, data)": "Plan", "preflight(cfg, data)": "Report", "prepare(cfg)": "Data", "run": "Run",
    "run.wait()": "str", "run.resume()": "Run", "run.config": "Config", "run.metrics()": "list[dict[Any, Any]]",
    "sweep(run)": "Sweep", "evaluate(run)": "Evaluation", "evaluate(run).tuned": "Scores", "prove(run)": "Proof",
    "verdict(run)": "Verdict", "train(cfg)": "Run", "data.train": "Split", "resolve(cfg)": "tuple[Config, Plan | None]",
    "cfg.max_time": "float | None", "cfg.learning_rate": "float | Literal['auto']", "cfg.seed": "int",
    "cfg.train_file": "tuple[str, ...] | None", "list_runs()": "DataFrame", "Finding.from_dict({})": "Finding",
    "Workbench(cfg).data": "Data", "BatchPanel(data).state": "BatchState", "run.plot()": "Figure"}
CODE = "from sft_nb import *\ncfg = load_config()\ndata = prepare(cfg)\nrun = launch(cfg, data)\n"
# transformers and TRL, which take 16 CPU seconds to read, for what is not ours
OPAQUE = dict.fromkeys(("transformers/__init__.pyi", "trl/__init__.pyi"), "def __getattr__(name: str) -> Any: ...") | {
    "transformers/modeling_utils.pyi": "class PreTrainedModel(Any): ...",
    "transformers/tokenization_utils_base.pyi": "class PreTrainedTokenizerBase(Any): ..."}
# what a notebook may do: read what is `None` in other cases, or was set by an error
ALLOWED = ("OptionalMemberAccess", "OptionalSubscript", "OptionalIterable", "PossiblyUnboundVariable")


def code_of(notebook:Path)->str:
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    return re.sub(r"(?m)^[!%].*", "", "\n".join("".join(c["source"]) for c in cells))


def members(kind:type)->list[str]:
    "Public attributes of the package's own classes"
    own = [one for one in kind.__mro__ if one.__module__.startswith("sft_nb")]
    return sorted({name for one in own for name in vars(one) if not name.startswith("_") and name != "in_json"})


@pytest.fixture(scope="module")
def found(tmp_path_factory)->dict[str,list[tuple[int,str,str]]]:
    "File -> line, severity and message of what the checker says, of an installation as a user has it"
    folder = tmp_path_factory.mktemp("editor")
    site = folder/"venv/lib"/f"python{sys.version_info[0]}.{sys.version_info[1]}"/"site-packages"
    site.mkdir(parents=True)
    (folder/"venv/pyvenv.cfg").touch()
    (site/"sft_nb").symlink_to(ROOT/"sft_nb")
    (site/"others.pth").write_text(sysconfig.get_path("purelib"))
    for name, text in OPAQUE.items():
        (folder/"opaque"/name).parent.mkdir(parents=True, exist_ok=True)
        (folder/"opaque"/name).write_text(f"from typing import Any\n{text}")

    public = {name: getattr(sft_nb, name) for name in sft_nb.__all__}
    classes = {name: kind for name, kind in public.items() if isinstance(kind, type)}
    used = [f"def use_{name}(x: sft_nb.{name}):\n    return ({', '.join(f'x.{one}' for one in members(kind))})"
            for name, kind in classes.items() if members(kind)]
    files = dict(readme=ten_lines(), mistakes=MISTAKES, members="\n".join(["import sft_nb", *used]),
                 names="import sft_nb\n" + "\n".join(f"reveal_type(sft_nb.{name})" for name in public),
                 known=CODE + "\n".join(f"reveal_type({one})" for one in KNOWN))
    files |= {f"recipe_{nb.stem}": code_of(nb) for nb in (ROOT/"nbs/recipes").glob("*.ipynb")}
    for name, text in files.items(): (folder/f"{name}.py").write_text(text)
    rules = {f"report{rule}": "none" for rule in ALLOWED}
    config = dict(typeCheckingMode="standard", include=["*.py"], venvPath=".", venv="venv", stubPath="opaque")
    (folder/"pyrightconfig.json").write_text(json.dumps(config | rules))
    command = [Path(sys.executable).parent/"basedpyright", "-p", folder, "--outputjson"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    said = {name: [] for name in files}
    for d in json.loads(done.stdout)["generalDiagnostics"]:
        said[Path(d["file"]).stem].append((d["range"]["start"]["line"], d["severity"], d["message"]))
    return said


NOT_OURS = re.compile('Import "as_gguf"|of module "xllamacpp"')   # of this repository's tests; without types


def errors(said:list[tuple])->list[tuple[int,str]]:
    return [(line, text) for line, severity, text in said if severity == "error" and not NOT_OURS.search(text)]


def test_the_readme_and_the_recipes_have_no_error_but_the_one_that_a_recipe_shows(found):
    "Settings that configs share are a config, `load_config(cfg, seed=1)`: of `**settings` all values have one type"
    pages = {name: errors(said) for name, said in found.items() if name == "readme" or name.startswith("recipe_")}
    assert len(pages) > 15
    (_, shown), = pages.pop("recipe_03_a_run_that_went_wrong")
    assert shown == 'No parameter named "lerning_rate"'
    assert {name: texts for name, texts in pages.items() if texts} == {}


def test_mistakes_are_red_and_nothing_else_is(found):
    wrong = {k for k, line in enumerate(MISTAKES.splitlines()) if "# wrong" in line}
    red = dict(errors(found["mistakes"]))
    assert {MISTAKES.splitlines()[k]: red.get(k) for k in wrong ^ {*red}} == {}


def test_every_public_name_is_known_and_so_is_its_type(found):
    types = [re.sub(r"\w+\[(Unknown|\.\.\.)(, (Unknown|\.\.\.))*\]|\(\.\.\.\) -> Unknown", "", text)   # a bare dict
             for _, _, text in found["names"]]
    assert len(types) == len(sft_nb.__all__) and not [text for text in types if "Unknown" in text]
    assert not errors(found["names"])


def test_every_member_of_a_public_class_is_known(found): assert errors(found["members"]) == []


def test_main_objects_are_of_their_real_class(found):
    types = [re.search(r'is "(.*)"$', text)[1] for _, severity, text in found["known"] if severity == "information"]
    assert dict(zip(KNOWN, types)) == KNOWN and not errors(found["known"])


def test_a_public_class_without_a_type_is_refused():
    code = "from fastcore.basics import patch\nclass Kept:\n    def __init__(self): self.rows = {}\n"
    package = Package([Module("sft_nb.kept", f"{code}@patch\ndef first(self:Kept, n:int=1): return self.rows[n]\n")])
    with pytest.raises(SystemExit) as e: make_stubs(package, dict(Kept="kept"))
    untyped = "Kept.rows of sft_nb.kept, Kept.first() of sft_nb.kept"
    assert str(e.value).startswith(f"No type is known of what editors see: {untyped}.\nFix: annotate them")


def test_a_stub_says_what_its_module_does():
    "Methods from `@patch`, comments of parameters, the type of what is set"
    code = '''
from pathlib import Path
from fastcore.basics import patch
class Kept:
    "What is kept"
    def __init__(self,
        n:int,          # how many,
                        # at most
    ):
        self.n, self.folder, self._own = n, Path("kept"), 1
@patch(as_prop=True)
def first(self:Kept)->dict: "The first"; return {}
'''
    stub = make_stubs(Package([Module("sft_nb.kept", code)]), dict(Kept="kept"))["sft_nb.kept"]
    assert inspect.cleandoc(stub.partition("class")[2]) == inspect.cleandoc('''Kept:
    """What is kept"""
    n: int
    folder: Path

    def __init__(self, n: int) -> None: ...

    @property
    def first(self) -> dict[Any, Any]:
        """The first"""''')
