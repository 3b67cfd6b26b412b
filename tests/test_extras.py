"""Without `sft_nb.extras` every command works on our own names and files, and other tools' keys get a sentence."""
import ast
import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from test_layers import imports

from sft_nb.extras import PUBLIC
from sft_nb.extras.meanings import CONVERSIONS, TOOL_FILES, read_toml
from sft_nb.extras.other_tools import FOREIGN, TOOLS

HIDE = "import sys\nsys.modules['sft_nb.extras'] = None   # as if the folder were not there\n"
CORE = [p for p in (ROOT/"sft_nb").rglob("*.py") if not {"extras", "configs"} & {*p.relative_to(ROOT/"sft_nb").parts}]


def hidden(code:str, folder)->str:
    done = subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


ALL_PARTS = """
import os, sys
sys.stderr = sys.stdout
for name, code in {parts!r}.items():
    os.mkdir(name)
    os.chdir(name)
    print("part " + name)
    exec(code, dict(__name__="__main__"))
    os.chdir("..")
"""


@pytest.fixture(scope="module")
def says(tmp_path_factory)->dict[str,str]:
    "Part -> what it prints; one process, which imports torch once, and a folder for each part"
    parts = dict(configs=CONFIGS, missing=WITHOUT.format(lines=NEED_THEM), rows=READ, names=NAMES)
    parts |= {f"line-{k}": f"from sft_nb.cli import main\nprint('code', main({line.split()!r}))"
              for k, (line, _) in enumerate(LINES)}
    parts |= {f"name-{k}": f"try: {code}\nexcept (AttributeError, ImportError) as e: print(e)"
              for k, code in enumerate(MISSED)}
    printed = hidden(ALL_PARTS.format(parts=parts), tmp_path_factory.mktemp("hidden"))
    found = re.split(r"^part (\S+)\n", printed, flags=re.MULTILINE)[1:]
    assert found[::2] == [*parts]
    return dict(zip(found[::2], found[1::2]))


def test_one_module_of_the_core_imports_the_extras_and_does_so_when_asked():
    def names_them(path)->bool:
        strings = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        return any(name.split(".")[0] == "extras" for name in imports(path)) or any(
            isinstance(text, str) and re.match(r"(sft_nb)?\.extras\b[\w.]*$", text) for text in strings)
    assert [p.name for p in CORE if p.name != "_modidx.py" and names_them(p)] == ["extensions.py"]
    tree = ast.parse((ROOT/"sft_nb/base/extensions.py").read_text())
    assert not any(isinstance(node, ast.Try) for node in tree.body)   # not when it is imported, but in a function


CONFIGS = """
from pathlib import Path
from sft_nb.config.load import config_names, load_config, save_config
from sft_nb.base.report import ConfigError
for name in config_names(): load_config(name)
assert load_config(lr=1e-3, batch_size=2).per_device_train_batch_size == 2
Path("mine.py").write_text("from sft_nb.configs.default import *\\nlora_rank = 8\\n")
Path("mine.yaml").write_text("lora_rank: 8\\nlr: 1e-3\\n")
for name in ("mine.py", "mine.yaml", save_config(load_config("mine.py"), "config.json")):
    assert load_config(name).lora_r == 8
Path("theirs.yaml").write_text("base_model: u/m\\nlora_r: 8\\nsample_packing: true\\n")
Path("theirs.sh").write_text("swift sft --model u/m\\n")
Path("ours.yaml").write_text("base_model: tiny\\nmicro_batch_size: 2\\n")   # ours by name, with another tool's defaults
for name in ("theirs.yaml", "theirs.sh", "ours.yaml"):
    try: load_config(name)
    except ConfigError as e: print(e)
try: load_config(warmup_ratio=10)
except ConfigError as e: print(e)
"""


def test_configs_of_our_own_are_read_without_the_extras(says):
    said = says["configs"]
    assert "theirs.yaml:3: sample_packing is not a setting; keys of other tools are read by sft_nb.extras" in said
    assert "1. ours.yaml:1: base_model is not a setting; keys of other tools are read by sft_nb.extras" in said
    assert "'theirs.sh': this is not a .py, .yaml or .json file" in said
    assert "warmup_ratio = 10; warmup_ratio must be a share of all steps, below 1" in said


LINES = [   # commands, and what they say
    ("config --config demo --lr 1e-3", "learning_rate"),
    ("data --config demo --max-samples 4 --show 1 --eval-samples 0", "arithmetic"),
    ("plan --config demo --max-samples 4", "GiB"), ("runs", "run"),
    ("train --config demo --bf16 true", "--bf16 is not an option; keys of other tools are read by sft_nb.extras")]


@pytest.mark.parametrize("k", range(len(LINES)), ids=[line for line, _ in LINES])
def test_commands_work_without_the_extras(says, k): assert LINES[k][1] in says[f"line-{k}"]


TRAINED = """
from sft_nb.cli import main
few = ["--config", "demo", "--max-samples", "8", "--eval-samples", "4", "--max-steps", "2", "--save-steps", "1",
       "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "1"]
for method in ("lora", "qlora", "full"):
    more = [] if method == "lora" else ["--no-preflight"]
    assert main(["train", *few, "--method", method, "--run-name", method, *more]) == 0, method
assert main(["evaluate", "runs/lora", "--eval-samples", "2"]) == 0   # without the base with examples
assert main(["merge", "runs/qlora", "--out", "merged"]) == 0
proof = ["prove", "runs/qlora", "--folder", "merged", "--prompts", "1", "--max-new-tokens", "4"]
assert main(proof) == 0
print("code", main([*proof, "--quantised", "int8"]))
for more in (["--kernels", "compile"], ["--kernels", "liger"], ["--fsdp", "--num-processes", "2", "--method", "full"],
             ["--sequence-parallel-size", "2", "--num-processes", "2"], ["--model", "some.gguf"],
             ["--adapter-name-or-path", "runs/lora", "--no-preflight"]):
    print("code", main(["train", *few, *more]))
from sft_nb import load_config, load_model, load_tokenizer, train, SftError
cfg = load_config("demo", method="full", preflight=False)
try: train(cfg, model=load_model(cfg, load_tokenizer(cfg)))
except SftError as e: print(e)
"""


def test_training_and_what_follows_work_without_the_extras(tmp_path):
    "Kernels, experts in 4 bits, sharding and GGUF files are extras; what asks for them by name is refused"
    said = hidden(TRAINED.replace("\n", "\nimport sys; sys.stderr = sys.stdout\n", 1), tmp_path)
    assert said.count("code 2") == 7
    assert "the base is not asked with examples in its prompt: that needs sft_nb.extras" in said
    assert "all the same in 3 stages (adapter, folder)" in said and ", 1 skipped" in said
    assert "files and tensors are not compared: that needs sft_nb.extras  Fix: pip install" in said
    for what in ("quantised", "kernels 'compile'", "kernels 'liger'", "fsdp", "sequence_parallel_size 2",
                 "model 'some.gguf'", "model", "adapter_name_or_path 'runs/lora'"):
        assert f"{what}: it needs sft_nb.extras, which is missing; a whole installation. Fix: pip install" in said
    for method in ("lora", "qlora", "full"):
        assert json.loads((tmp_path/f"runs/{method}/trainer.json").read_text())["one_product"] == 0


def test_the_files_of_tools_and_the_functions_fit_together():
    text = "".join(file.read_text() for file in TOOL_FILES.glob("*.toml"))
    assert {*re.findall(r'(?:by|dependent_defaults) = "(\w+)"', text)} == {*CONVERSIONS}
    assert {file.stem for file in TOOL_FILES.glob("*.toml")} == {*TOOLS}
    common, unread = read_toml("unread/every-tool"), {file.stem for file in (TOOL_FILES/"unread").glob("*.toml")}
    assert {*common["order"]} == unread - {"every-tool"}


def test_a_key_of_any_file_has_one_meaning():
    "`datasets` is a list in the files of two tools, with the same function"
    named = [name for tool in TOOLS.values() for name in (*tool.keys, *tool.set_nothing)]
    assert {name for name in named if named.count(name) > 1} == {"datasets"} and {*named} == {*FOREIGN}


def test_the_files_of_tools_have_no_other_parts():
    "A misspelled section would be skipped"
    known = set("title marks needed dependent_defaults defaults nulls keys own methods accepted ignored refused "
                "parameters types entries columns unsaid".split())
    assert {name: found for name in TOOLS if (found := {*read_toml(name)} - known)} == {}
    known = set("title marks fix adapter alpha_scale counts_batches equal layers datasets other_methods".split())
    tools = read_toml("unread/every-tool")["order"]
    assert {name: found for name in tools if (found := {*read_toml(f"unread/{name}")} - known)} == {}


OF_EXTRAS = [name for names in PUBLIC.values() for name in names.split()]
NAMES = f"""
from sft_nb import *
import sft_nb
print(train, RunPanel, [*filter(sft_nb._HOME.get, {OF_EXTRAS})])
"""


def test_all_other_public_names_come_without_the_extras(says):
    assert "LossPanel" in OF_EXTRAS and says["names"].endswith("[]\n")


MISSED = ["from sft_nb import LossPanel", "import sft_nb; sft_nb.LossPanel", "import sft_nb.panels.losses"]


@pytest.mark.parametrize("k", range(len(MISSED)), ids=MISSED)
def test_a_name_of_the_extras_is_missed_by_name(says, k):
    assert "are in sft_nb.extras, which is missing. Fix: pip install" in says[f"name-{k}"]


WITHOUT = """
from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.runs.directory import create_run
run = create_run(load_config("demo", run_name="x"))
(run.path/"adapter").mkdir()
for line in {lines}: print("code", main(line.split()))
"""


NEED_THEM = ("compare runs/x runs/x", "sweep runs/x --follow", "search --config demo --learning-rate 1e-3 1e-2",
             "report runs/x", "replay runs/x --step 1", "explain runs/x", "merge runs/x --out a.gguf",
             "prove runs/x --gguf a.gguf", "prove runs/x --server http://localhost:1",
             "evaluate runs/x --eval-samples 2 --server http://localhost:1")


def test_a_feature_of_the_extras_is_named_where_it_is_missing(says):
    said = says["missing"]
    assert said.count("it needs sft_nb.extras, which is missing") == said.count("code 1") == len(NEED_THEM), said
    assert said.count("Fix: pip install") == len(NEED_THEM)


READ = """
import json
from pathlib import Path
from sft_nb.cli import main
pair = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
call = dict(type="function", function=dict(name="add", arguments="{}"))
blocks = [dict(type="tool_use", id="t1", name="add", input={})]
rows = dict(
    messages=dict(messages=[*pair, pair[0], dict(role="assistant", tool_calls=[call]), dict(role="tool", content="2")]),
    parts=dict(messages=[dict(role="user", content=[dict(type="text", text="1+1?")]), pair[1]]),
    sharegpt=dict(conversations=[{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]),
    alpaca=dict(instruction="1+1?", output="2"), completion=dict(prompt="1+1?", completion="2"), text=dict(text="1+1"),
    anthropic=dict(messages=[pair[0], dict(role="assistant", content=blocks)]), vertex=dict(contents=pair),
    tickets=dict(ticket="It is slow.", resolution="Restart it."), segments=dict(segments=[dict(text="a", label=True)]),
    unknown=dict(kolA="a", kolB="b"), turns=dict(messages=[dict(human="1+1?", assistant="2")]),
    preference=dict(messages=pair, chosen="2", rejected="3"), jeopardy=dict(question="1", category="a", answer="b"),
    parts_of_answer=dict(messages=[pair[0], dict(pair[1], train_detail=[dict(begin_offset=0)])]),
    calls=dict(messages=[pair[0], dict(role="assistant", content="a", function_calls="f(a=1)")]))
for name, row in rows.items():
    Path(f"{name}.jsonl").write_text(json.dumps(row) + "\\n")
    more = ["--fields", "question=tiket", "answer=resolution"] if name == "tickets" else []
    if name == "jeopardy": more = ["--data-format", name]
    print(name, main(["data", "--train-file", f"{name}.jsonl", "--eval-samples", "0", *more]))
"""


def test_common_rows_are_read_without_the_extras_and_others_get_a_sentence(says):
    said = says["rows"]
    codes = dict(re.findall(r"^(\w+) ([0-9])$", said, re.MULTILINE))
    common = {"messages", "parts", "sharegpt", "alpaca", "completion", "text"}
    assert {name for name, code in codes.items() if code == "0"} == common and len(codes) == 16, said
    for what in ("format vertex", "format segments", "format preference", "format jeopardy", "train_detail",
                 "function_calls"):
        assert f"{what} needs sft_nb.extras, which is missing; a whole installation. Fix: pip install" in said, what
    assert "no format has those; readings are proposed by sft_nb.extras, which is missing" in said
    assert "and content; other shapes are read by sft_nb.extras, which is missing" in said
    assert said.count("flaws of texts, and exports of other tools, are not looked for: that needs") == len(common)
    assert "a string; blocks are read by sft_nb.extras, which is missing" in said
    assert "there is no column tiket for question (fields); the columns are ticket, resolution. Fix: name one" in said
