"""What is written into a run, and what can still be read after a failure."""
import os, shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, MissingPathError, SftError
from sft_nb.runs.checkpoint import find_corruption, flatten_folder, prune, remove_leftovers, write_checksums
from sft_nb.runs.directory import Run, create_run, open_run
from sft_nb.runs.provenance import base_folder
from sft_nb.runs.status import Status, read_status
from sft_nb.runs.directory import list_runs


def curve(run)->list: return [(m["step"], m["loss"]) for m in run.metrics() if "loss" in m]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "A run after ten steps of training"
    run = create_run(load_config("demo", runs_dir=str(tmp_path_factory.mktemp("whole")), max_steps=10))
    for step in range(1, 11): run.record(dict(step=step, loss=3 / step))
    run.set_status("finished", step=10)
    return run


def test_half_a_line_of_metrics_is_no_line(tmp_path, whole):
    shutil.copytree(whole.path, tmp_path/"half")
    run = Run(tmp_path/"half")
    with (run.path/"metrics.jsonl").open("a") as f: f.write('{"step": 11, "lo')
    assert curve(run) == curve(whole)
    run.rewind(9)
    assert [m["step"] for m in run.metrics()] == [*range(1, 10)]
    assert (run.path/"metrics.jsonl").read_text().endswith("}\n")


@contextmanager
def nobody():
    "Run as a user other than root, who may read everything"
    if os.geteuid() != 0: yield
    else:
        os.seteuid(65534)
        try: yield
        finally: os.seteuid(0)


def test_a_folder_that_may_not_be_read_or_written(tmp_path):
    closed = tmp_path/"closed"
    (closed/"checkpoint-1").mkdir(parents=True)
    (closed/"checkpoint-1/weights").write_bytes(b"w")
    write_checksums(closed/"checkpoint-1")
    for p in (tmp_path, *tmp_path.parents[:3]): p.chmod(p.stat().st_mode | 0o055)
    (closed/"checkpoint-1").chmod(0)
    refused = f"run directory {closed}/runs: you may not change {closed} .its permissions are drwxr-xr-x"
    try:
        with nobody():
            assert "it cannot be read (Permission denied)" == find_corruption(closed/"checkpoint-1")
            with pytest.raises(SftError, match=refused): create_run(load_config("demo", runs_dir=str(closed/"runs")))
    finally: (closed/"checkpoint-1").chmod(0o755)


def test_a_list_of_runs_shows_the_few_settings_in_which_they_differ(tmp_path):
    for name, rate in dict(a=1e-4, b=3e-4).items():
        create_run(load_config("demo", runs_dir=str(tmp_path), run_name=name, learning_rate=rate, warmup_steps=rate))
    table = list_runs(tmp_path)
    assert [*table["learning_rate"]] == [1e-4, 3e-4] and not {"lora_r", "warmup_steps"} & {*table}
    assert "warmup_steps" in list_runs(tmp_path, only=("a", "b"))
    assert "learning_rate" not in list_runs(tmp_path, only=("a",))


TORN = ['{"state": "runn', "[]", '{"step": "four"}', '{"state": "stopped", "fix_parts": {"comand": "x"}}']

@pytest.mark.parametrize("torn", TORN)
def test_a_status_that_cannot_be_read_hides_no_other_run(tmp_path, whole, torn):
    for name in ("good", "bad"): shutil.copytree(whole.path, tmp_path/name)
    (tmp_path/"bad/status.json").write_text(torn)
    table = list_runs(tmp_path).set_index("run")
    assert dict(table.state) == dict(good="finished", bad="failed")
    assert table.reason["bad"].startswith("status.json cannot be read (")


def test_a_status_of_an_earlier_version_is_read(tmp_path):
    "Without the fields that came later, and with one that has gone"
    (tmp_path/"status.json").write_text('{"state": "stopped", "reason": "SIGTERM", "fix": "resume it", "mood": "?"}')
    assert read_status(tmp_path/"status.json") == Status("stopped", "SIGTERM", "resume it")


def test_old_checkpoints_and_leftovers_are_removed_from_the_disk(tmp_path):
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-15", "checkpoint-20.aside", "checkpoint-2.gone"):
        (tmp_path/name).mkdir()
        (tmp_path/name/"weights").write_text("1")
        if name[-1].isdigit(): write_checksums(tmp_path/name)
    def left(): return sorted(p.name for p in tmp_path.iterdir())
    assert sorted(remove_leftovers(tmp_path)) == ["checkpoint-2.gone", "checkpoint-20.aside"]
    assert left() == ["checkpoint-10", "checkpoint-15", "checkpoint-5"]
    assert prune(tmp_path, 1, best={5}) == ["checkpoint-10"] and left() == ["checkpoint-15", "checkpoint-5"]
    assert prune(tmp_path, 0) == ["checkpoint-5"] and left() == ["checkpoint-15"]   # never the newest


def test_a_killed_run_says_at_which_step_it_was_and_at_which_it_goes_on(tmp_path, whole):
    run = Run(shutil.copytree(whole.path, tmp_path/"killed"))
    for step in (3, 6):
        folder = run.path/f"checkpoints/checkpoint-{step}"
        folder.mkdir(parents=True)
        write_checksums(folder)
    assert (run.state_in_words, list_runs(tmp_path).get("checkpoint").iloc[0]) == ("finished at step 10", None)
    run.set_status("running", step=8)
    says = "killed at step 10; its last checkpoint is of step 6"   # step 10 was logged
    assert run.state_in_words == says and f"killed: {says}\n  Next: resume(" in str(run)
    assert "Next: " in run._repr_html_() and run.to_dict()["fix"] == f"sft_nb train --resume {run.path}"
    assert "its last checkpoint is of step 6" in run._repr_html_()
    assert "(killed, or out of memory); its last checkpoint is of step 6. Fix: resume(" in str(run.failure())
    table = list_runs(tmp_path).iloc[0]
    assert (table.state, table.step, table.checkpoint) == ("killed", 10, 6)
    with pytest.raises(SftError, match=says): create_run(load_config("demo", runs_dir=str(tmp_path), run_name="killed"))
    with pytest.raises(SftError, match="one of checkpoint-3, checkpoint-6"): run.weights("adapter")


def test_a_checkpoint_is_asked_of_a_run_that_is_trained(tmp_path, whole):
    with pytest.raises(SftError, match="it is finished") as e: whole.checkpoint()
    assert e.value.fix.says("shell") == "sft_nb runs"   # to resume it would be refused as well
    run = Run(shutil.copytree(whole.path, tmp_path/"long"))
    (run.path/"checkpoints/checkpoint-12345").mkdir(parents=True)
    write_checksums(run.path/"checkpoints/checkpoint-12345")
    run.set_status("stopped", step=12345)
    shutil.copytree(whole.path, tmp_path/"finished")
    table = list_runs(tmp_path).set_index("run")
    assert {str(n) for n in table.checkpoint} == {"None", "12345"}


def test_a_folder_more_than_is_wanted_leaves_nothing_behind(tmp_path):
    inner = tmp_path/"adapter"/"default"
    inner.mkdir(parents=True)
    (inner/"weights").write_text("1")
    flatten_folder(inner)
    assert [p.name for p in (tmp_path/"adapter").iterdir()] == ["weights"]


def test_a_config_is_read_once_and_again_when_another_process_has_changed_it(tmp_path, monkeypatch):
    read = []
    def counted(path, **how):
        read.append(path)
        return load_config(path, **how)
    monkeypatch.setattr("sft_nb.runs.directory.load_config", counted)
    run = create_run(load_config("demo", runs_dir=str(tmp_path), max_steps=7))
    assert [run.config.max_steps for _ in range(3)] == [7] * 3 and len(read) == 1
    other = Run(run.path)
    other.keep(replace(other.config, max_steps=9))   # of the same length
    assert [run.config.max_steps for _ in range(3)] == [9] * 3 and len(read) == 3
    run.keep(replace(run.config, task="capitals:Capitals"))
    stranger = Run(run.path)
    assert stranger.config.untrusted == {"task"} and run.config.untrusted == frozenset()
    stranger.trusts = True   # as `open_run` sets it
    assert stranger.config.untrusted == frozenset()
    (run.path/"config.json").unlink()
    with pytest.raises(MissingPathError): _ = run.config


def test_rows_that_were_moved_into_the_run_are_found_without_a_new_object(tmp_path):
    "As `load_config` finds them: under the last two parts of their path, beside config.json"
    rows = tmp_path/"data"/"rows.jsonl"
    rows.parent.mkdir()
    rows.write_text('{"text": "a"}\n')
    run = create_run(load_config("demo", runs_dir=str(tmp_path/"runs"), train_file=(str(rows),)))
    assert run.config.train_file == (str(rows),)
    rows.parent.rename(run.path/"data")
    assert run.config.train_file == (str(run.path/"data"/"rows.jsonl"),)


def test_a_run_that_was_deleted_since_is_no_wrong_name_of_a_config(tmp_path):
    run = create_run(load_config(run_name="gone", runs_dir=str(tmp_path)))
    shutil.rmtree(run.path)
    with pytest.raises(SftError, match="run .*gone.*: there is no such directory"): open_run(run)


def test_the_folder_of_a_base_from_the_hub_is_that_of_its_commit(tmp_path, monkeypatch):
    "The base of a run is recognised by it: without, an exchanged base is not noticed"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path/"models--some--model", "0123456789" * 4
    of = dict(model="some/model", revision=None)
    assert base_folder(**of, init="pretrained") is None   # not on this machine
    (repo/"snapshots"/commit).mkdir(parents=True)
    (repo/"snapshots"/commit/"config.json").write_text("{}")
    (repo/"refs").mkdir()
    (repo/"refs"/"main").write_text(commit)
    assert base_folder(**of, init="pretrained") == repo/"snapshots"/commit
    assert base_folder(**of, init="random") is None
    (repo/".no_exist"/commit).mkdir(parents=True)
    (repo/".no_exist"/commit/"config.json").touch()
    (repo/"snapshots"/commit/"config.json").unlink()
    assert base_folder(**of, init="pretrained") is None   # the hub has no such file


def test_the_nearest_run_is_named(tmp_path):
    for name in ("intent", "share"):
        (tmp_path/name).mkdir()
        (tmp_path/name/"config.json").write_text("{}")
    with pytest.raises(ConfigError) as e: Run(tmp_path/"intnet")
    assert e.value.expected == "the nearest here is intent"
    with pytest.raises(ConfigError) as e: Run(tmp_path/"other")
    assert e.value.expected == "the newest here are intent, share"
