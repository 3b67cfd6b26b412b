"""A run that came from elsewhere: its rows may be missing or others, its folder is no model, and it may belong to
another user of the machine."""
import json
import os
import pwd
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pandas   # noqa: F401, for another user, who may not be able to import it
import pytest

from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import held_out
from sft_nb.model.load import load_shape
from sft_nb.panels.conversation import GenerationState
from sft_nb.proof.merge import merge
from sft_nb.base.files import remove_temporaries
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.checkpoint import write_checksums
from sft_nb.runs.directory import check_free, check_permissions, create_run, Run
from sft_nb.runs.locate import find_target
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def rows(name="Ben"): return [dict(question=f"{name} has {k} figs. How many?", answer=str(k)) for k in range(12)]


def write(path, rows): path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    "A run whose held-out rows are in a file of their own; nothing was trained"
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "held.jsonl"): write(tmp_path/name, rows())
    files = dict(train_file="a.jsonl", eval_file="held.jsonl", runs_dir="runs", run_name="r")
    cfg = load_config(model="tiny", task="chat", **files)
    run = create_run(cfg)
    prepare(cfg).report.save(run.path/"data.json")
    run.adapter.mkdir()
    (run.adapter/"adapter_config.json").write_text(json.dumps(dict(base_model_name_or_path="tiny")))
    return run


def test_a_missing_file_of_a_run_is_replaced_by_no_other(theirs, tmp_path, capsys):
    (tmp_path/"held.jsonl").rename(tmp_path/"held2.jsonl")
    put_back = "put it back, or write its new place into"
    with pytest.raises(SftError, match=put_back): held_out(find_target(theirs))
    with pytest.raises(SftError, match=put_back): merge(theirs)
    with pytest.raises(SftError, match=put_back): GenerationState(theirs, ("base",)).rows()
    assert main(["train", "--config", str(theirs.path/"config.json")]) == 1 and put_back in capsys.readouterr().err
    # a file that was typed now is another matter
    line = ["train", "--config", str(theirs.path/"config.json"), "--eval-file", "held1.jsonl"]
    assert main(line) == 1 and "Fix: --eval-file held2.jsonl" in capsys.readouterr().err


def test_other_rows_are_said_by_their_fingerprint(theirs, tmp_path, capsys):
    says = "these are not the run's rows: their fingerprint is"
    held_out(find_target(theirs))
    assert says not in capsys.readouterr().err
    write(tmp_path/"held.jsonl", rows("Joe"))
    held_out(find_target(theirs))
    assert f"{says} " in (said := capsys.readouterr().err) and f"was {theirs.fingerprint('eval')}" in said
    write(tmp_path/"more.jsonl", rows("Eve"))
    for others in (dict(eval_samples=3), dict(eval_file=("more.jsonl",))):   # on purpose
        held_out(find_target(theirs, **others))
    assert says not in capsys.readouterr().err


@pytest.mark.parametrize("load", [load_tokenizer, lambda cfg: load_shape(cfg, None)])
@pytest.mark.parametrize("name, says, fix", [
    ("runs/r", "this is a run of tiny", "--model tiny --adapter-name-or-path runs/r, or sft_nb merge runs/r"),
    ("runs/r/adapter", "this is an adapter of tiny", "--adapter-name-or-path runs/r/adapter, or merge it")])
def test_a_run_or_an_adapter_is_no_model(theirs, load, name, says, fix):
    with pytest.raises(ConfigError, match=says) as e: load(load_config(model=name))
    assert fix in e.value.fix.says("shell")


def test_the_name_of_a_run_is_no_model_either(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr("sft_nb.tokens.tokenizer.why_missing", lambda *a: "there is no network")
    with pytest.raises(ConfigError, match="this is a run of tiny"): load_tokenizer(load_config(model="r"))


def test_a_full_run_holds_its_model(tmp_path):
    run = create_run(load_config(model="tiny", method="full", runs_dir=str(tmp_path), run_name="whole"))
    with pytest.raises(ConfigError, match="the model that it trained is in it") as e:
        load_tokenizer(load_config(model=str(run.path)))
    assert e.value.fix.settings == dict(model=str(run.adapter))


# --- a run of another user of the machine

OTHER = 65534   # nobody

@contextmanager
def as_another_user():
    "This process without the rights of root; what it imports has been imported"
    os.setresuid(OTHER, OTHER, 0)
    try: yield
    finally: os.setresuid(0, 0, 0)


@pytest.fixture
def of_root(monkeypatch):
    "A run of root with a checkpoint, in a folder that everyone may read"
    if os.getuid() != 0: pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp())   # pytest's own is closed to others
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    run = create_run(load_config("demo", runs_dir=str(folder/"runs"), run_name="r"))
    for part in (run.adapter, run.path/"checkpoints/checkpoint-2"):
        part.mkdir(parents=True)
        (part/"adapter_config.json").write_text("{}")
        write_checksums(part)
    run.set_status("stopped", step=2)
    yield run
    shutil.rmtree(folder)


RUN = "{run}"
READ = [["stop", RUN], ["merge", RUN], ["merge", RUN, "--out", "/tmp/merged"], ["prove", RUN], ["report", RUN],
        ["generate", RUN, "--prompt", "1+1"], ["compare", RUN, RUN], ["sweep", RUN]]
CHANGE = [["train", "--resume", RUN], ["train", "--resume", RUN, "--detach"], ["checkpoint", RUN], ["evaluate", RUN],
          ["verdict", RUN], ["evaluate", RUN + "/adapter"]]

def said_to_another(run, line, capsys)->str:
    with as_another_user(): code = main([word.format(run=run.path) for word in line])
    said = capsys.readouterr()
    assert code in (1, 2), said.out
    return said.err


@pytest.mark.parametrize("line", READ + CHANGE, ids=" ".join)
@pytest.mark.parametrize("hidden", ["", "checkpoints", "adapter/adapter_config.json", "config.json", "status.json"])
def test_what_another_user_may_not_read_is_not_missing(of_root, line, hidden, capsys):
    (of_root.path/hidden).chmod(0o700 if (of_root.path/hidden).is_dir() else 0o600)
    said = said_to_another(of_root, line, capsys)
    assert re.search(f"{of_root.path/hidden}(: it)? belongs to root, and nobody may not read it", said), said
    assert f"root can allow it with chmod -R a+rX {of_root.path/hidden}" in said
    if hidden in ("checkpoints", "status.json"):
        assert f"--config {of_root.path}/config.json --run-name r-2 --runs-dir another/folder" in said


@pytest.mark.parametrize("line", CHANGE, ids=" ".join)
def test_what_another_user_may_not_change_can_be_copied(of_root, line, capsys):
    before = sorted(of_root.path.rglob("*"))
    said = said_to_another(of_root, line, capsys)
    assert f"run 'r': {of_root.path} belongs to root, and nobody may not change it. Fix: cp -r {of_root.path} " in said
    assert sorted(of_root.path.rglob("*")) == before


def test_in_a_shared_folder_each_file_has_an_owner(of_root, capsys):
    "Its scores go into a folder that may be shared; a file that would be continued may not"
    of_root.path.chmod(0o777)
    with as_another_user(): check_permissions(of_root, of_root.path/"eval")
    for name in ("checkpoints", "adapter", "checkpoints/checkpoint-2"): (of_root.path/name).chmod(0o777)
    assert "belongs to root, and nobody may not change it" in said_to_another(of_root, CHANGE[0], capsys)
    for part in of_root.path.rglob("*"): part.chmod(0o777)
    with as_another_user(): check_permissions(of_root, of_root.path)


def test_runs_beside_one_that_may_not_be_read(of_root, capsys):
    shutil.copytree(of_root.path, of_root.path.with_name("closed")).chmod(0o700)
    shutil.copytree(of_root.path, of_root.path.with_name("config"))
    (of_root.path.with_name("config")/"config.json").chmod(0o600)
    with as_another_user(): assert main(["runs"]) == 0
    out, err = capsys.readouterr()
    assert " r " in out.replace("\n", " ") and "closed" not in out
    assert "not shown, as you may not read them: closed, config\n" in err
    shutil.rmtree(of_root.path)
    with as_another_user(): assert main(["runs"]) == 1
    assert "belongs to root" in capsys.readouterr().err   # and not that there is no run
    of_root.path.parent.chmod(0o700)
    said = said_to_another(of_root, ["runs"], capsys)
    assert "runs in runs: runs belongs to root, and nobody may not read it" in said


def test_a_name_of_another_users_run_is_taken(of_root, capsys):
    line, runs = ["train", "--config", "demo", "--run-name", "r"], of_root.path.parent
    of_root.path.chmod(0o700)
    for mode in (0o755, 0o700):
        runs.chmod(mode)
        said = said_to_another(of_root, line, capsys)
        assert f"{runs} belongs to root, and nobody may not change it. Fix: --runs-dir another/folder.\n" in said
    runs.chmod(0o1777)
    said = said_to_another(of_root, line, capsys)
    assert "belongs to root, and nobody may not read it. Fix: --run-name r-2, or root " in said


def test_temporary_files_of_another_user_are_left_alone(of_root):
    "In a folder like /tmp, in which everyone may only remove his own files"
    runs = of_root.path.parent
    runs.chmod(0o1777)
    (runs/".r-2.new").touch()
    os.utime(runs/".r-2.new", (0, 0))
    with as_another_user(): assert (remove_temporaries(runs), check_free(runs, "r-2")) == ([], None)
    assert (runs/".r-2.new").exists()


def test_files_of_ones_own_have_another_fix(of_root, capsys):
    os.chown(of_root.path, OTHER, OTHER)
    of_root.path.chmod(0)
    said = said_to_another(of_root, ["stop", RUN], capsys)
    denied = f"you may not read {of_root.path} (its permissions are d---------)"
    assert f"{denied}. Fix: chmod -R u+rwX {of_root.path}" in said


def test_a_file_that_nothing_checked_is_another_users_too(of_root, monkeypatch, capsys):
    "The last resort of the command line; and the same of a disk that is mounted read-only"
    def denied(self, *args, **kwargs): raise PermissionError(13, "Permission denied", str(of_root.path/"log.txt"))
    monkeypatch.setattr(Run, "stop", denied)
    said = said_to_another(of_root, ["stop", RUN], capsys)
    assert f"{of_root.path} belongs to root, and nobody may not open it" in said
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert "is on a disk that is mounted read-only" in said_to_another(of_root, ["stop", RUN], capsys)
    with monkeypatch.context() as m:
        m.setattr(Run, "stop", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only", str(of_root.path/"new/file"))))
        said = said_to_another(of_root, ["stop", RUN], capsys)
    assert "is on a disk that is mounted read-only. Fix: a folder on another disk" in said
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)   # a container without user names
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=0))
    assert "belongs to user 0, and user 65534 may not" in said_to_another(of_root, ["stop", RUN], capsys)
    monkeypatch.setattr(Run, "stop", lambda *args: os.kill(1, 0))   # an error without a file
    assert "PermissionError: [Errno 1]" in said_to_another(of_root, ["stop", RUN], capsys)
