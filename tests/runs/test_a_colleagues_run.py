"""A run that came from elsewhere: its rows may be missing or others, and its folder is no model."""
import json

import pytest

from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import held_out
from sft_nb.model.load import load_shape
from sft_nb.panels.conversation import GenerationState
from sft_nb.proof.merge import merge
from sft_nb.base.report import ConfigError, SftError
from sft_nb.runs.directory import create_run
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
