"""A step that is taken again, for several kinds of runs, and what stands in its way."""
import hashlib
import json
import random
import shutil

import pytest
from learner import killed_at_eight, small, small_qlora

from sft_nb.base.progress import progress_listener
from sft_nb.base.report import ConfigError, SftError
from sft_nb.extras.replay import Replay, ReplayedRow
from sft_nb.panels.batches import BatchPanel
from sft_nb.runs.directory import Run
from sft_nb.training.train import resume, train

PACKED = dict(max_tokens_per_batch=256, padding_free=True)
KINDS = dict(
    lora=dict(lora_dropout=.1, gradient_accumulation_steps=1), qlora={}, full=dict(method="full", learning_rate=1e-3),
    packed=PACKED, accumulated=dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, lora_dropout=.1),
    resumed=dict(lora_dropout=.1, eval_samples=8, eval_steps=2, logging_steps=4))   # an evaluation draws a number


@pytest.fixture(scope="module")
def kind_of_run(train_once):
    def make(kind:str):
        make = small_qlora if kind == "qlora" else small
        cfg = lambda folder: make(folder, run_name=kind, **KINDS[kind])   # noqa: E731
        if kind != "resumed": return train_once(f"replayed-{kind}", lambda folder: train(cfg(folder)))
        def stopped(folder):
            run = train(cfg(folder))
            for n in (9, 10): shutil.rmtree(run.path/f"checkpoints/checkpoint-{n}")
            run.set_status("running", step=8)   # killed there
            return resume(run)
        return train_once("replayed-resumed", stopped)
    return make


def files_of(run:Run)->dict:
    return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest())
            for p in run.path.rglob("*") if p.is_file()}


def check_steps(run:Run, steps)->None:
    before = files_of(run)
    for step in steps:
        again = run.replay(step)
        assert again.equal is True and again.difference == 0, (run.name, step, again.logged, again.replayed)
        assert again.logged_at >= step and set(again.logged) == {"loss", "grad_norm", "learning_rate"}
        if again.logged_at == step == 1 or run.config.logging_steps == 1:
            assert again.loss == pytest.approx(again.logged["loss"], rel=1e-6)
            assert again.grad_norm == again.logged["grad_norm"]
    assert files_of(run) == before


@pytest.mark.parametrize("kind", ["qlora", "packed", "resumed"])   # all of them below, in `make soak`
def test_a_step_taken_again_is_the_step_that_was_taken(kind_of_run, kind):
    check_steps(kind_of_run(kind), [random.Random(kind).randint(1, 10)])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_every_kind(kind_of_run, kind):
    check_steps(kind_of_run(kind), range(1, 11))


def test_its_rows_are_those_of_the_step(undisturbed):
    again = undisturbed.replay(4)
    bench = again.bench
    numbers = [n for k in bench.batches.micro_batches(4, 2) for n in bench.batches[k]]
    assert [r.example for r in again.rows] == numbers and again.steps == 1 and again.checkpoint == "checkpoint-3"
    assert [m["role"] for m in again.rows[0].messages] == ["user", "assistant"]
    where, row = bench.data.train.row(numbers[2])
    assert again.rows[2].where == where and again.rows[2].messages[0]["content"] == row["question"]
    loss = sum(r.loss * r.supervised for r in again.rows) / sum(r.supervised for r in again.rows)
    assert loss == pytest.approx(again.loss, rel=1e-5)   # it has no dropout
    assert again.fingerprint == undisturbed.fingerprint("train")
    panel = BatchPanel(again.batch)
    assert "optimiser step 4 of 10" in panel.state.caption()


def test_what_would_have_been_without_a_row(undisturbed):
    plain = undisturbed.replay(5)
    row = plain.rows[-1].row
    without = undisturbed.replay(5, without=[row])
    rest = [r for r in plain.rows if r.row != row]
    assert [r.row for r in without.rows] == [r.row for r in rest] and without.equal is None
    assert without.loss == pytest.approx(sum(r.loss * r.supervised for r in rest) / sum(r.supervised for r in rest))
    assert without.logged == plain.logged and f"without row {row}, the loss is" in str(without)
    with pytest.raises(ConfigError, match="row 99 is not in step 5; some of its rows: "):
        undisturbed.replay(5, without=[99])
    for rate in (float("nan"), -1., 1e300):
        with pytest.raises(ConfigError, match="learning_rate"): undisturbed.replay(5, learning_rate=rate)
    with pytest.raises(ConfigError, match="no row is left in step 5"):
        undisturbed.replay(5, without=[r.row for r in plain.rows])


def test_another_rate_changes_what_comes_after(undisturbed):
    "Here a step of 0 leaves the loss as it is"
    none = undisturbed.replay(5, learning_rate=0.)
    assert [r.loss for r in none.rows] == [r.loss_after for r in none.rows]
    again = undisturbed.replay(5, learning_rate=undisturbed.replay(5).learning_rate)
    assert again.rows == undisturbed.replay(5).rows and again.equal is None


def test_a_removed_checkpoint_means_more_steps(tmp_path, undisturbed, capsys):
    run = killed_at_eight(tmp_path, undisturbed)
    assert (run.replay(8).checkpoint, run.replay(8).steps) == ("checkpoint-6", 2)
    (run.path/"checkpoints/checkpoint-6/adapter_model.safetensors").write_bytes(b"")   # damaged
    assert (run.replay(8).checkpoint, run.replay(8).steps) == ("checkpoint-3", 5)
    shutil.rmtree(run.path/"checkpoints")
    capsys.readouterr()
    again = run.replay(8)
    assert (again.checkpoint, again.steps, again.equal) == ("", 8, True)
    assert "step 8 is replayed from the beginning: 8 steps, about " in capsys.readouterr().err


def test_a_replay_says_how_far_it_is(undisturbed):
    seen = []
    with progress_listener(seen.append): undisturbed.replay(5)   # from checkpoint-3
    assert {(p.done, p.of) for p in seen if p.phase == "training"} == {(3, 5), (4, 5), (5, 5)}


def test_an_extended_run_is_replayed_with_the_schedule_of_that_time(tmp_path):
    run = train(small(tmp_path, max_steps=4, save_steps=2))
    run = resume(run, max_steps=6)
    assert [run.replay(step).equal for step in (3, 6)] == [True, True]


def test_steps_after_the_last_line_are_compared_with_nothing(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    run.rewind(7)
    again = run.replay(8)
    assert again.equal is again.difference is None and not again.logged and again.loss > 0
    assert "nothing was logged at this step or after it" in str(again)


def test_another_line_is_a_difference(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    lines = [json.loads(line) for line in (run.path/"metrics.jsonl").read_text().splitlines()]
    for line in lines: line["loss"] = line.get("loss", 0) * 1.5
    (run.path/"metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = run.replay(7)
    assert again.equal is False and again.difference == pytest.approx(1/3)
    assert again.view().worst == "warn" and "differs from the logged line by 0.3" in str(again)


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_that_was_not_taken(undisturbed, step):
    with pytest.raises(ConfigError, match=f"step {step} is not one of its 10 steps; 1 to 10. Fix: run.replay.10."):
        undisturbed.replay(step)


def test_a_run_that_is_trained_now_or_has_taken_no_step(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    with run.locked(), pytest.raises(ConfigError, match="it is running, and its checkpoints come and go"):
        Run(run.path).replay(3)
    run.set_status("failed", step=0)
    (run.path/"metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="no step was taken"): run.replay(1)


def test_rows_that_have_changed_or_gone(tmp_path):
    rows = [dict(question=f"{n} and {n}?", answer=str(2 * n)) for n in range(32)]
    file = tmp_path/"rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train(small(tmp_path, train_file=str(file), task="chat", max_steps=2, max_samples=None))
    file.write_text("".join(json.dumps(row | dict(answer="0")) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="the training rows have changed since the run started"): run.replay(2)
    file.unlink()
    with pytest.raises(SftError, match="put it back, or write its new place into"): run.replay(2)


def test_a_run_of_other_versions(tmp_path, undisturbed, monkeypatch):
    run = killed_at_eight(tmp_path, undisturbed)
    known = json.loads((run.path/"environment.json").read_text())
    known["packages"]["torch"] = "2.0.1"
    (run.path/"environment.json").write_text(json.dumps(known))
    again = run.replay(8)
    assert again.equal and "torch was 2.0.1" in again.notes[0]
    from sft_nb.training.trainer import SupervisedTrainer
    def fails(*args, **kwargs): raise ValueError("an unknown format")
    monkeypatch.setattr(SupervisedTrainer, "_load_from_checkpoint", fails)
    with pytest.raises(SftError, match="checkpoint-6 cannot be loaded .an unknown format.* pip install torch==2.0"):
        run.replay(8)


def test_one_process_replays_what_two_have_trained(tmp_path, undisturbed):
    run = killed_at_eight(tmp_path, undisturbed)
    saved = json.loads((run.path/"config.json").read_text())
    for file in ("config.json", "origin.json"):
        saved = json.loads((run.path/file).read_text())
        saved["config"] |= dict(num_processes=2, gradient_accumulation_steps=1)
        (run.path/file).write_text(json.dumps(saved))
    assert "2 processes trained it and one replays it" in run.replay(7).notes[0]


def test_a_row_is_named_by_its_last_question_and_the_hardest_is_first():
    talk = [("system", "Be kind."), ("user", "What is\n\n 1 + 1?"), ("assistant", "2"),
            ("user", f"And {'so ' * 20}on?"), ("assistant", "3")]
    talks = [[dict(role=role, content=text) for role, text in talk[:n]] for n in (3, 5)]
    pictures = [dict(role="user", content=[dict(type="text", text="?")]), dict(role="assistant", content="4")]
    rows = [ReplayedRow(row=k, example=k, where=f"a:{k}", messages=messages, tokens=9, supervised=2, loss=loss,
                        loss_after=loss) for k, (messages, loss) in enumerate(
                            [(talks[0], .5), (pictures, 1.5), ([], None), (talks[1], 2.5)], 1)]
    made = Replay("a", 4, "", 4, rows, 1., 1., 1e-3, None, {}, {})
    lines = made.view().parts[1].lines
    assert [(line["row"], line["asks"]) for line in lines] == [
        (4, f"And {'so ' * 20}"[:32]), (2, ""), (1, "What is 1 + 1?"), (3, "")]
    assert [line["loss"] for line in lines] == ["2.5", "1.5", "0.5", None]
    assert made.loss_after == 1.5   # the row without a loss does not count
