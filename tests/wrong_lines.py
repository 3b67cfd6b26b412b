"""Generate wrong command lines, as users may type them, and damaged files, as full disks and other tools leave them."""
import json
import os
from itertools import product
from pathlib import Path

from sft_nb.config.settings import SETTINGS

DEEP = "[" * 100_000
NOT_JSON = {
    "empty": b"", "half": b'{"config": {"lora_r": 1', "binary": bytes(range(256)), "list": b"[1, 2]", "null": b"null",
    "number": b"3", "string": b'"x"', "utf16": '{"config": {}}'.encode("utf-16"), "deep": DEEP.encode(),
    "nan": b'{"config": NaN}', "inner": b'{"config": [1]}', "of-null": b'{"config": null, "state": null}'}


def of_settings()->list[list[str]]:
    "Settings with an invalid value or without one; every third of those that do not take text"
    commands, found = ("config", "train", "data", "plan", "check"), []
    strict = [f for f in SETTINGS.values() if f.type not in (str, str | None) and "str" not in str(f.type)]
    for k, f in enumerate(strict[::3]):
        flag, command = "--" + f.name.replace("_", "-"), commands[k % 5]
        found.append([command, f"{flag}=maybe"] if f.type is bool else [command, flag, "\x1b[31mwrong"])
    return [*found, *(["train", "--" + name] for name in ("model", "task", "runs-dir", "optim"))]


TYPED = """
- | -- | --- | trian | TRAIN | --verbose | é | ../train | help | train - | train demo | train --lerning-rate 1
train --learning-rate | train --learning-rate 1e-4 1e-5 | train --learning-rate=1e-4x | train --learning-rate nan
train --learning-rate 1e999 | train --max-steps 1.5 | train --seed -1 | train --lora-r 0 | train --config
train --config . | train --config / | train --config gms8k | train --config /dev/null
train --config gsm8k --config demo
train --batch-size 4 --micro-batch-size 8 | train --no-learning-rate | train --no-max-length 3 | train --resume
train --resume nowhere | train --resume nowhere --lr 1 | train --resume nowhere --config demo | train --output-dir
evaluate | evaluate nowhere | evaluate a b | evaluate nowhere --eval-samples many | evaluate --run x
evaluate nowhere --lora-r 3 | merge | merge nowhere --dtype int3 | merge nowhere --prompts x | stop | stop nowhere
stop nowhere --timeout soon | stop . | runs --runs-dir nowhere | runs a b | runs ../x | runs --runs-dir /dev/null
config nowhere | config --all --nothing | plan --card h20 | plan --device h20 --lengths 60 | plan --lengths
plan --lengths a | plan --lengths 0 | check --dropped 3 | data --dropped all | data --nothing"""
ODD = [[""], ["train "], ["\x1b[2J"], ["\ud800"], ["x" * 100_000], ["train", "\ud800"], ["config", "\0"],
       ["runs", "--runs-dir", ""], ["train", "--max-steps", "9" * 5000],
       *(["train", "--config", odd] for odd in ("", "\0", "x" * 5000)),
       *([command, odd] for command in ("evaluate", "merge", "stop") for odd in ("", "\0", "x" * 5000)),
       *(["train", "--resume", odd] for odd in ("", "\0")), ["runs", "--runs-dir", "\0"]]
SPELLING = [line.split() for lines in TYPED.strip().splitlines() for line in lines.split(" | ")] + ODD


PYTHON = {
    "syntax": "lora_r = = 3", "raises": "1 / 0", "exits": "import sys; sys.exit(3)",
    "stops": "raise KeyboardInterrupt", "imports": "import nothing_of_this_name", "recursion": "def f(): f()\nf()",
    "null": "lora_r = 1\0",
    "tab": "if 1:\n\tlora_r = 1\n        lora_r = 2", "quits": "raise SystemExit('x')",
    "types": "lora_r = object()\nmax_length = [1]\nmodel = b'x'",
    "itself": "from sft_nb.configs.default import nothing"}
UNKNOWN = b'{"config": {"lerning_rate": 1, "lora_r": "x", "model": null, "train_file": {"a": 1}}}'


def configs(folder:Path)->list[list[str]]:
    "Invalid config files"
    files = {f"{name}.py": text.encode() for name, text in PYTHON.items()}
    files |= {"latin.py": "model = 'é'".encode("latin-1"), "binary.py": bytes(range(256)), "notes.txt": b"lora_r = 3"}
    files |= {f"{name}.json": text for name, text in NOT_JSON.items()} | {"unknown.json": UNKNOWN}
    for name, text in files.items(): (folder/name).write_bytes(text)
    (folder/"folder.py").mkdir()
    os.symlink("loop.py", folder/"loop.py")
    return [["config", "--config", name] for name in [*files, "folder.py", "loop.py"]]


PARTS = ("config.json status.json metrics.jsonl guards.json data.json process.json environment.json eval/adapter.json "
         "preflight.json lock").split()
COMMANDS = ["runs RUN", "runs", "train --resume RUN", "evaluate RUN", "merge RUN", "stop RUN", "config RUN",
            "runs RUN whole --json"]
LINES = {"no step": b'{"loss": 1}\n', "text": b'{"step": "three", "loss": "low"}\n', "list": b"[1]\n",
         "half": b'{"step": 1}\n{"st', "halfway": b'{"step": 1}\n{"st\n{"step": 2}\n', "binary": bytes(range(256)),
         "nul": b"\0" * 512}
WHOLE = {"config.json": dict(config=dict(model="tiny", eval_samples=4)), "status.json": dict(state="stopped", step=3),
         "guards.json": dict(title="guards", figures={}, findings=[]),
         "data.json": dict(title="x", figures={}, findings=[])}


def run(folder:Path)->Path:
    "A run stopped at step 3, valid except for its weights"
    folder.mkdir(parents=True)
    for name, said in WHOLE.items(): (folder/name).write_text(json.dumps(said))
    (folder/"metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    return folder


def damaged(folder:Path)->list[list[str]]:
    "Runs with one changed file each, read by one command in turn"
    run(folder/"runs/whole")
    kinds = [(part, name, text) for part, (name, text) in product(PARTS, NOT_JSON.items()) if part != "metrics.jsonl"]
    kinds += [("metrics.jsonl", name, text) for name, text in LINES.items()]
    kinds += [(part, "folder", None) for part in PARTS]
    found = []
    for k, (part, name, text) in enumerate(kinds[::2]):
        home = run(folder/f"runs/{k:03}-{part.split('.')[0].replace('/', '-')}-{name.replace(' ', '-')}")
        (home/part).unlink(missing_ok=True)
        (home/part).parent.mkdir(exist_ok=True)
        (home/part).mkdir() if text is None else (home/part).write_bytes(text)
        line = COMMANDS[k % len(COMMANDS)]
        path = home.name if line.startswith("runs") else f"runs/{home.name}"
        found.append([path if word == "RUN" else word for word in line.split()])
    return found + checkpoints(folder)


def checkpoints(folder:Path)->list[list[str]]:
    "Runs with invalid weights"
    found = []
    manifests = {"none": None, **NOT_JSON, "files": b'{"model.safetensors": {"bytes": 3, "sha256": "0"}}'}
    for name, text in manifests.items():
        home = run(folder/f"runs/weights-{name}")
        for part in ("checkpoints/checkpoint-3", "adapter"):
            (home/part).mkdir(parents=True)
            if text is not None: (home/part/"checkpoint.json").write_bytes(text)
        found.append(["train", "--resume", f"runs/{home.name}"])
    home = run(folder/"runs/weights-file")
    (home/"checkpoints").write_text("x")
    return [*found, ["train", "--resume", str(home)], ["runs", "weights-file"]]


FINE = b'{"question": "1+1?", "answer": "2"}\n'
ROWS = {
    "empty.jsonl": b"", "half.jsonl": FINE + b'{"question": "1', "binary.jsonl": bytes(range(256)),
    "deep.jsonl": DEEP.encode(), "numbers.jsonl": b"1\n2\n", "nulls.jsonl": b"null\n", "nul.jsonl": b"\0" * 64,
    "fields.jsonl": b'{"a": 1, "b": 2}\n', "roles.jsonl": b'{"messages": [{"role": 1, "content": {}}]}\n',
    "flat.jsonl": b'{"messages": "hello"}\n', "none.jsonl": b'{"messages": null}\n',
    "strings.jsonl": b'{"messages": ["a", "b"]}\n', "utf16.jsonl": FINE.decode().encode("utf-16"),
    "latin.jsonl": b'{"question": "\xe9", "answer": "x"}\n', "list.json": b"[[1], 2]", "broken.json": b'{"a": ',
    "broken.csv": b'a,b\n"1,2\n', "nul.csv": b"a\0b\n\0\n", "empty.csv": b"", "broken.parquet": b"PAR1xxxx",
    "empty.parquet": b"", "tokens.jsonl": b'{"input_ids": ["a"], "labels": [1]}\n',
    "negative.jsonl": b'{"input_ids": [-5, 99999999], "labels": [1, 2]}\n', "notes.docx": b"PK",
    "huge.jsonl": b'{"input_ids": [1e400, 2], "labels": [1, 2]}\n', "broken.jsonl.gz": b"\x1f\x8bxxxx",
    "surrogate.jsonl": b'{"question": "\\ud800", "answer": "\\ud800"}\n',
    "tools.jsonl": b'{"messages": [], "tools": 3}\n'}


def rows(folder:Path)->list[list[str]]:
    "Unreadable files of rows"
    for name, text in ROWS.items(): (folder/name).write_bytes(text)
    more = [
        ["--train-file", "nowhere.jsonl"], ["--train-file", "\0"], ["--train-file", "/dev/null"],
        ["--train-file", "empty.jsonl", "--train-weights", "0"], ["--train-file", "nowhere:train"],
        ["--chat-template", "nowhere.jinja"],
        ["--task", "gsm8k", "--train-file", "fields.jsonl"], ["--tokenizer", "./nowhere"], ["--model", "./nowhere"],
        ["--cache-dir", "empty.jsonl"], ["--task", "nothing:Here"], ["--task", "json:loads"], ["--task", "mine:"],
        ["--max-length", "2"], ["--model", "\0"]]
    files = [["data", "--eval-samples", "0", "--train-file", name] for name in ROWS]
    return [*files, *(["data", *line] for line in more)]


def wrong_lines(folder:Path)->list[list[str]]:
    "All wrong command lines, with their files created in `folder`"
    return [*of_settings(), *SPELLING, *configs(folder), *damaged(folder), *rows(folder)]
