"""What holds for any input: a result or a sentence with its fix, no control character, no hang, and nothing written
outside the folders of the test. Inputs that once failed are kept in the corpus, a JSON line for each."""
import json
import os
import random
import signal
import sys
import tempfile
import unicodedata
from contextlib import contextmanager
from pathlib import Path

from sft_nb.base.report import SftError

CORPUS = Path(__file__).parent/"corpus"
SEED = os.environ.get("SFT_NB_FUZZ_SEED", "0")   # another seed makes other inputs
CPU_SECONDS = 60   # of one input: far more than any needs, on any machine
_WRITES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1,
           "os.truncate": 0, "shutil.rmtree": 0, "shutil.move": 1, "shutil.copyfile": 1}
_allowed, _outside = [], []   # folders while a call is watched; what it wrote elsewhere


def _watch(event:str, args:tuple):
    if not _allowed: return
    if event == "open":
        path, mode, flags = args
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else "w" in (mode or "")
        if not writes: return
    elif event in _WRITES:
        if event.startswith("os.") and isinstance(args[-1], int) and args[-1] > 0: return   # relative to an open folder
        path = args[_WRITES[event]]
    else: return
    if not isinstance(path, (str, bytes, os.PathLike)): return   # a number of an open file
    path = os.path.realpath(os.fsdecode(path))
    if path == os.devnull or path.endswith(".pyc") or "__pycache__" in path: return
    if not any(f"{path}/".startswith(f"{folder}/") for folder in _allowed): _outside.append((event, path))


sys.addaudithook(_watch)


class Hang(BaseException):
    "Too much CPU time; no `except Exception` stops it"


@contextmanager
def watched(*folders:Path):
    "Fails for a call that writes outside the folders, the cache and the folder of temporary files, or takes too long"
    def stop(*_): raise Hang(f"more than {CPU_SECONDS} seconds of CPU time")
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    temporary = tempfile.gettempdir()
    _allowed.extend(os.path.realpath(f) for f in (*folders, os.environ["SFT_NB_CACHE"]))
    try: yield
    finally:
        _allowed.clear()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    outside = [found for found in _outside if not found[1].startswith(os.path.join(temporary, "tmp"))]
    _outside.clear()
    assert not outside, outside


def ends_well(work, *folders:Path):
    "What a call returns, or its error in a sentence with a fix; any other exception fails"
    with watched(*folders):
        try: found = work()
        except SftError as e: found = e
        text = str(found)
    odd = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"}
    assert not odd, (odd, text)
    if isinstance(found, SftError): assert "Fix: " in text and len(text) < 20_000, text
    return found


# --- values

ODD = [None, True, False, -1, 0, 2.5, 1e308, 10**30, "", " ", "x", "\x00", "\x1b[2J\x1b[31mred", "\u202eabc", "\ud800",
       "é" * 3, "a" * 3000, "<|im_end|>", "</s>", "{{ 7 * 7 }}", "{% for %}", "../../../etc/passwd", "null", "[1",
       '{"a": 1}', [], [[]], [None], ["x"], ["x", 1], {}, {"": ""}, {"a": {"b": [{}]}}, [[[[[[]]]]]], "9" * 50]
NO_JSON = ["NaN", "Infinity", "1e999", "9" * 5000, "[" * 2000, "\\", "'x'", "\x00", "\ud800", "{{}}"]


def places(value, path=()):
    "Every path in a value"
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def _changed(value, path, change):
    if not path: return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, dict): return {k: _changed(v, rest, change) if k == key else v for k, v in value.items()}
    return [_changed(v, rest, change) if k == key else v for k, v in enumerate(value)]


def mutate(r:random.Random, value, words:list[str]=()):
    "Change a JSON value in one to three places: another value, a key more or less, a part twice, another order"
    for _ in range(r.choice((1, 1, 2, 3))):
        path = r.choice([*places(value)])
        def change(old):
            kind = r.randrange(7)
            if kind == 0 and isinstance(old, dict) and old:
                gone = r.choice([*old])
                return {k: v for k, v in old.items() if k != gone}
            if kind == 1 and isinstance(old, dict):
                key = r.choice([*words, "weight", "loss", "train", "\x1b[2Jkey", "", "content", "role"])
                return old | {key: r.choice(ODD)}
            if kind == 2 and isinstance(old, list) and old:
                part = r.choice(old)
                return [*old, part] if r.random() < .5 else r.sample(old, len(old))
            if kind == 3: return [old]
            if kind == 4: return {"content": old}
            if kind == 5 and isinstance(old, str): return old[:len(old) // 2] + str(r.choice(ODD)) + old[len(old) // 2:]
            return r.choice(ODD)
        value = _changed(value, path, change)
    return value


def corpus(name:str)->list:
    "The kept inputs of a kind"
    file = CORPUS/f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
