"""Searches: each combination is trained once, whatever interrupts; what is chosen is the best, and cannot be changed by
how runs share their base."""
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from learner import learner

from sft_nb import load_config, SftError, train
from sft_nb.extras import search as searching
from sft_nb.extras.search import next_from_optuna, ValueRange, search, Trial
from sft_nb.base.report import ConfigError
from sft_nb.config.load import save_config
from sft_nb.runs.directory import Run


FEW = dict(max_steps=6, max_samples=64, eval_samples=8, preflight=False, max_new_tokens=8)


@pytest.fixture
def demo(tmp_path): return load_config("demo", runs_dir=str(tmp_path), **FEW)


@pytest.fixture
def cfg(demo): return replace(demo, **learner())


def losses(run): return [m[k] for m in run.metrics() for k in ("loss", "eval_loss") if k in m]


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_shared_base_trains_to_the_same_bytes(demo, tmp_path, method):
    cfg = replace(demo, **learner()) if method == "lora" else demo
    found = search(cfg, learning_rate=[1e-2], lora_r=[4, 8], stop_early=False)
    alone = train(load_config(cfg, runs_dir=str(tmp_path/"alone"), eval_steps=.1, learning_rate=1e-2, lora_r=8))
    shared = found.folder/"learning_rate_0.01-lora_r_8"
    assert losses(Run(shared)) == losses(alone)
    weights = [folder/"adapter/adapter_model.safetensors" for folder in (shared, alone.path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_what_is_missing_is_trained_and_nothing_else(cfg):
    kept = search(cfg, learning_rate=[1e-3, 1e-2])
    before = {path: path.stat().st_mtime_ns for path in kept.folder.glob("*/metrics.jsonl")}
    more = search(cfg, learning_rate=[1e-3, 1e-2, 3e-3])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert {v["learning_rate"] for v in more.values.values()} == {1e-3, 1e-2, 3e-3}


def test_a_run_that_was_stopped_goes_on_and_its_scores_are_those_of_a_whole_run(cfg, tmp_path, monkeypatch):
    whole = search(cfg, name="whole", learning_rate=[1e-3, 1e-2], stop_early=False)
    cfg = replace(cfg, save_steps=2)
    original = searching.train

    def stop_after_two(bench):
        stopped = original(load_config(bench.requested, max_time=1e-9))   # stops after its first step
        assert stopped.state == "stopped"
        stopped.set_status("stopped", reason="Ctrl-C", stopped_by="Ctrl-C")
        return stopped
    monkeypatch.setattr(searching, "train", stop_after_two)
    partial = search(cfg, learning_rate=[1e-3, 1e-2], stop_early=False)
    assert len(partial.values) == 1 and not partial.scores and partial.best is None
    assert partial.conclusions == ["no run has finished", "learning_rate 0.001: stopped: Ctrl-C"]
    assert "stopped: Ctrl-C" in str(partial) and "stopped: Ctrl-C" in partial._repr_html_()
    monkeypatch.setattr(searching, "train", original)
    done = search(cfg, learning_rate=[1e-3, 1e-2], stop_early=False)
    assert [*done.states.values()] == ["finished"] * 2
    for name, scores in done.scores.items():
        assert scores.overall("loss") == pytest.approx(whole.scores[name].overall("loss"))


def test_a_stopped_run_without_a_checkpoint_begins_again(cfg, monkeypatch):
    kept = search(cfg, learning_rate=[1e-3])
    run = kept.best
    for folder in run.checkpoints(): shutil.rmtree(folder)
    run.set_status("stopped", reason="SIGTERM", stopped_by="SIGTERM")
    assert search(cfg, learning_rate=[1e-3]).to_dict()["runs"][0]["state"] == "finished"


def test_two_processes_share_the_work(cfg, tmp_path, warm_processes):
    config = save_config(cfg, tmp_path/"config.json")
    line = [sys.executable, "-m", "sft_nb", "search", "--config", str(config), "--lr", "1e-3,3e-3,1e-2", "--json"]
    both = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [p.communicate(timeout=1200) for p in both]
    assert [p.returncode for p in both] == [0, 0], ends
    runs = sorted(path.parent.name for path in (tmp_path/"search").glob("*/config.json"))
    assert runs == ["learning_rate_0.001", "learning_rate_0.003", "learning_rate_0.01"]
    last = search(cfg, learning_rate=[1e-3, 3e-3, 1e-2])
    assert {state.partition(":")[0] for state in last.states.values()} <= {"finished", "stopped early"}


def test_a_combination_that_cannot_be_trained_is_kept_with_its_reason(cfg):
    found = search(cfg, lora_target_modules=[("q_proj",), ("nowhere",)])
    assert len(found.scores) == 1
    reason, = [state for state in found.states.values() if state != "finished"]
    assert reason.startswith("refused: ") and "nowhere" in reason and "nowhere" in str(found)
    assert found.plot() is not None


def test_a_run_that_cannot_win_is_stopped_and_not_begun_again(cfg):
    cfg = replace(cfg, max_steps=20, max_samples=200)
    found = search(cfg, learning_rate=[1e-2, 1e-7])
    slow = Run(found.folder/"learning_rate_1e-07")
    assert slow.state == "stopped" and slow.status.stopped_by == "search" and slow.step < 20
    assert found.best.name == "learning_rate_0.01" and [*found.losses] == [slow.name]
    before = slow.step
    assert search(cfg, learning_rate=[1e-2, 1e-7]).to_dict() == found.to_dict() and slow.step == before
    assert search(replace(cfg, runs_dir=cfg.runs_dir + "/x"), learning_rate=[1e-2, 1e-7], stop_early=False).losses == {}


def test_a_score_of_answers_chooses(demo):
    cfg = replace(demo, max_steps=30, max_samples=300, max_new_tokens=16)
    found = search(cfg, by="accuracy", learning_rate=[1e-5, 1e-2])
    assert found.by == "accuracy" and len(found.scores) == 2 and found.best.name == "learning_rate_0.01"
    assert "accuracy" in str(found)


def test_seeds_differ_by_noise(cfg, tmp_path):
    for name, n in (("train", 60), ("eval", 12)):
        rows = [dict(question=f"What is {k} + {len(name)}?", answer=str(k + len(name))) for k in range(n)]
        (tmp_path/f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = dict(train_file=str(tmp_path/"train.jsonl"), eval_file=str(tmp_path/"eval.jsonl"))
    found = search(load_config(cfg, task="auto", **files), seed=[1, 2, 3], stop_early=False)
    assert len(found.scores) == 3 and "corrected for the choice among the 3" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["best"] == found.best.name


def test_seeds_that_decide_the_rows_are_refused(cfg):
    with pytest.raises(ConfigError, match="prepared with seed"): search(cfg, seed=[1, 2])


@pytest.mark.parametrize("line, text", [
    (dict(), "no values are named"), (dict(learning_rate="1e-4..1e-2"), "sampler=.tpe."),
    (dict(learning_rate="-" * 20_000 + "1..2"), "a list of values, or a range"),
    (dict(name="../x", lora_r=[4, 8]), "name: '../x' cannot be .*Fix: name='x'"),
    (dict(learning_rate=[1e-3], trials=3), "as many runs as there are"),
    (dict(eval_file=["a", "b"]), "which rows are scored"),
    (dict(lora_r=[4, 8], by="acuracy"), "answers have no 'acuracy'; loss, .*Fix: by='accuracy'"),
    (dict(learning_rate=[1e-3], sampler="best"), "not a sampler")])
def test_what_cannot_be_searched(cfg, line, text):
    with pytest.raises(ConfigError, match=text): search(cfg, **line)
    assert not list(Path(cfg.runs_dir).glob("**/search.json"))   # which would refuse the corrected call


def test_rows_to_choose_by_are_needed(cfg):
    with pytest.raises(ConfigError, match="no rows are held out"): search(replace(cfg, eval_samples=0), lora_r=[4, 8])


def test_without_optuna(cfg, monkeypatch):
    monkeypatch.setattr(searching, "is_installed", lambda name: False)
    with pytest.raises(SftError, match=r"needs Optuna.*Fix: .*pip install 'sft_nb\[search\]'"):
        search(cfg, sampler="tpe", learning_rate="1e-4..1e-2")


def test_one_folder_holds_one_search(cfg):
    search(cfg, learning_rate=[1e-3])
    others = ((dict(learning_rate=[1e-3], by="accuracy"), "value of by"), (dict(lora_r=[4]), "searched settings"))
    for other, text in others:
        with pytest.raises(ConfigError, match=text): search(cfg, **other)
    with pytest.raises(ConfigError, match="another value of max_steps"):
        search(replace(cfg, max_steps=8), learning_rate=[1e-3])


def test_a_sampler_is_asked_again_after_each_run(cfg):
    found = search(cfg, sampler="random", trials=3, learning_rate="1e-4..1e-2", lora_r=[4, 8])
    rates = {v["learning_rate"] for v in found.values.values()}
    assert len(rates) == 3 and all(1e-4 <= rate <= 1e-2 for rate in rates)
    again = search(cfg, sampler="random", trials=3, learning_rate="1e-4..1e-2", lora_r=[4, 8])
    assert again.to_dict() == found.to_dict()


def test_integers_and_any_value_can_be_sampled():
    layers = [("q_proj",), ("q_proj", "v_proj")]
    space = dict(lora_r=ValueRange(2, 64), lora_target_modules=layers, use_rslora=[True, False])
    trials = []
    for k in range(12): trials.append(Trial(next_from_optuna(space, trials, "tpe"), None if k == 3 else float(k)))
    assert all(isinstance(t.values["lora_r"], int) and 2 <= t.values["lora_r"] <= 64 for t in trials)
    assert {t.values["lora_target_modules"] for t in trials} == {("q_proj",), ("q_proj", "v_proj")}
