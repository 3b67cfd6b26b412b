"Run directories with damaged files: readers of a run return, or say what is wrong; a run beside it is listed"
import json
import random
import shutil

import pytest
from fuzzing import corpus, ends_well, mutate, NO_JSON, SEED

from sft_nb.panels.run_state import RunState
from sft_nb.runs.directory import can_resume, list_runs, Run
from sft_nb.runs.summary import summary

READERS = [str, repr, lambda r: r._repr_html_(), lambda r: json.dumps(r.to_dict()), can_resume, summary,
           lambda r: r.best, lambda r: r.lowest_loss(), lambda r: r.history(), lambda r: r.failure(), lambda r: r.state,
           lambda r: r.log(), RunState, lambda r: r.config, lambda r: r.checkpoints(), lambda r: r.progress]


def damage(r:random.Random, text:bytes)->bytes:
    "The text of a file with odd values in a line, or cut, or with other bytes"
    lines = text.splitlines(keepends=True) if r.random() < .5 else [text]
    k = r.randrange(len(lines)) if lines else 0
    try: odd = json.dumps(mutate(r, json.loads(lines[k]))).encode()
    except (ValueError, IndexError): odd = b"x"
    kind = r.randrange(6)
    if kind == 0: return text[:r.randrange(len(text) + 1)]
    if kind == 1: return text.replace(r.choice([b"1", b"0", b"null", b"true", b'"']), r.choice(NO_JSON).encode(
        errors="surrogatepass"), r.choice((1, -1)))
    if kind == 2:
        at = r.randrange(len(text) + 1)
        return text[:at] + r.randbytes(8) + text[at:]
    lines[k:k + 1] = [odd, b"\n"] if len(lines) > 1 else [odd]
    return b"".join(lines)


def read(root, run):
    for reader in READERS: ends_well(lambda reader=reader: ascii(reader(Run(run.path))), root)
    listed = ends_well(lambda: list_runs(root), root)
    assert "beside" in str(listed)


@pytest.fixture
def two(undisturbed, tmp_path):
    "A run that is damaged, and one that is not"
    ignored = shutil.ignore_patterns("checkpoints", "adapter")
    for name in ("broken", "beside"): shutil.copytree(undisturbed.path, tmp_path/name, ignore=ignored)
    return tmp_path, Run(tmp_path/"broken")


@pytest.mark.parametrize("part", range(3))
def test_runs(two, part):
    root, run = two
    r = random.Random(f"{SEED} {part}")
    files = sorted(p for p in run.path.rglob("*") if p.suffix in (".json", ".jsonl", ".txt", ".log"))
    whole = {file: file.read_bytes() for file in files}
    for _ in range(12):
        for file in r.sample(files, r.choice((1, 1, 2, 3))): file.write_bytes(damage(r, whole[file]))
        read(root, run)
        for file, text in whole.items(): file.write_bytes(text)


@pytest.mark.parametrize("kept", corpus("runs"), ids=lambda x: x["name"])
def test_runs_that_once_failed(two, kept):
    root, run = two
    for name, text in kept["files"].items(): (run.path/name).write_text(text)
    read(root, run)
