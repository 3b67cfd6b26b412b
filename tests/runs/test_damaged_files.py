"""Files of a run that are empty, of another type or foreign: readers report it, or work without them."""
import json
import pickle
import shutil
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from learner import killed_at_eight, small

from sft_nb.config.load import load_config
from sft_nb.model.hardware import _free_gib
from sft_nb.base.files import cache_home, read_json_object
from sft_nb.panels.run_state import RunState
from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation.evaluate import Evaluation
from sft_nb.proof.merge import merge
from sft_nb.evaluation.sweep import Sweep
from sft_nb.runs.checkpoint import write_checksums
from sft_nb.runs.directory import can_resume
from sft_nb.runs.directory import Run
from sft_nb.runs.provenance import check_provenance
from sft_nb.runs.directory import list_runs
from sft_nb.training import train as training   # the module
from sft_nb.training.train import resume, train

DAMAGES = [b"", b"[]", b"3", b"{}", b"null", b"[" * 100_000, bytes(range(256))]
READERS = [str, lambda r: r._repr_html_(), lambda r: json.dumps(r.to_dict()), lambda r: str(list_runs(r.path.parent)),
           can_resume, lambda r: r.stop(), lambda r: r.best, lambda r: r.history(), lambda r: r.failure(), RunState,
           lambda r: r.config and check_provenance(r), lambda r: Sweep.load(r.path/"eval/sweep.json"),
           lambda r: Evaluation.load(r.path/"eval/x.json")]


def fields_of(text:bytes, every:bool):
    "The same object with one field, or every other field, of another type"
    said, odd = json.loads(text), ([], 3, {"a": 1}, None)
    for k, name in enumerate(said if isinstance(said, dict) else ()):
        yield from (json.dumps(said | {name: value}).encode() for value in (odd if every else odd[k % 4:][:1]))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["one type", "every type"])
def test_any_damage_is_a_sentence_or_does_no_harm(undisturbed, tmp_path, every):
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"a", ignore=shutil.ignore_patterns("checkpoints", "adapter")))
    (run.path/"eval").mkdir(exist_ok=True)
    line = dict(checkpoint="checkpoint-3", figure="accuracy", value=.5, rows="x")
    (run.path/"eval/scores.jsonl").write_text(json.dumps(line) + "\n")
    sweep = dict(run="a", by="accuracy", base={}, checkpoints={}, forgotten={}, lowest_loss=None)
    (run.path/"eval/sweep.json").write_text(json.dumps(sweep))
    names = ("status.json guards.json environment.json origin.json config.json metrics.jsonl samples.jsonl "
             "progress.json process.json owner.json eval/scores.jsonl eval/sweep.json eval/x.json plan.json")
    for name in names.split():
        file = run.path/name
        whole = file.read_bytes() if file.exists() else None
        odd = [] if whole is None or name.endswith("jsonl") else fields_of(whole, every)
        for damage in [*DAMAGES, *([] if name == "config.json" else odd)]:
            file.write_bytes(damage)
            for read in READERS:
                try: read(run)
                except SftError: pass
        file.unlink(missing_ok=True)
        if whole is not None: file.write_bytes(whole)


def foreign(file:Path)->None: file.write_bytes(pickle.dumps(Foreign()))

class Foreign:
    "An object that torch loads only in unsafe mode"


def test_a_foreign_state_in_a_checkpoint(undisturbed, tmp_path, capfd):
    run = killed_at_eight(tmp_path, undisturbed)
    newest = run.path/"checkpoints/checkpoint-6"
    for name in ("environment.json", "guards.json", "receipt.json"): (run.path/name).write_bytes(b"")
    for name, spoil in (("optimizer.pt", foreign), ("scheduler.pt", foreign), ("rng_state.pth", foreign),
                        ("trainer_state.json", lambda file: file.write_text("{}"))):
        whole = (newest/name).read_bytes()
        spoil(newest/name)
        write_checksums(newest)
        with pytest.raises(SftError, match="damaged/checkpoint-6: training cannot continue from it .*Fix: rm -r"):
            resume(run)
        (newest/name).write_bytes(whole)
    write_checksums(newest)
    assert "weights_only" not in "".join(capfd.readouterr()) + run.status.reason
    assert resume(run).state == "finished"   # the three empty files are no reason to fail
    assert read_json_object(run.path/"environment.json") == {}


def test_what_a_machine_may_lack(tmp_path, monkeypatch, capfd):
    "matplotlib, /proc/meminfo, a temporary folder of its own, a place for a merged model"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Path("/proc/meminfo/none").read_text())
    assert _free_gib() > 0
    with patch.object(training, "plot", side_effect=ImportError("no matplotlib")):
        run = train(small(tmp_path, run_name="a", max_steps=1))
    assert run.state == "finished" and "loss.png cannot be created" in "".join(capfd.readouterr())
    (tmp_path/"file").write_text("")
    for out in (tmp_path/"file/below", tmp_path/("n" * 300), tmp_path/"a\0b"):
        with pytest.raises(ConfigError, match="cannot be made .*Fix: out="): merge(run, out=out)
    monkeypatch.setenv("HOME", str(tmp_path/"file"))
    monkeypatch.delenv("SFT_NB_CACHE")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: 54321)
    taken = tmp_path/"sft_nb-54321"   # by another user, with a file or a folder that nobody else may read
    taken.touch(mode=0o600)
    assert cache_home().is_dir() and cache_home() != taken
    taken.unlink()
    taken.mkdir(mode=0o700)
    assert cache_home().is_dir() and cache_home() != taken


def test_optimisers_and_schedules_that_cannot_run(tmp_path):
    no_steps = "'polynomial' cannot run over 1 step, all of them warm-up"
    for how, says in ((dict(optim="lomo"), "the package lomo-optim is not installed"),
                      (dict(lr_scheduler_type="polynomial", warmup_steps=1), no_steps)):
        with pytest.raises(ConfigError, match=says): train(small(tmp_path, max_steps=1, **how))


def test_aliases_of_aliases_in_yaml(tmp_path):
    lines = ["_a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"_{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefghijk", "bcdefghijkl")]
    (tmp_path/"bomb.yaml").write_text("\n".join([*lines, "lora_target_modules: *l"]))
    with pytest.raises(ConfigError, match="its aliases expand to 7e.11 values; at most 100,000"):
        load_config(tmp_path/"bomb.yaml")
    (tmp_path/"cycle.yaml").write_text("_a: &a [*a]\nlora_target_modules: *a\n")
    with pytest.raises(ConfigError, match="this is not valid YAML for settings"): load_config(tmp_path/"cycle.yaml")
    for merge_keys in ("<<: *x", "<<: [*x, *empty]", "<<: *empty\nlora_r: 4"):
        (tmp_path/"merge.yaml").write_text("_x: &x {lora_r: 4}\n_empty: &empty {}\n" + merge_keys + "\n")
        assert load_config(tmp_path/"merge.yaml").lora_r == 4
