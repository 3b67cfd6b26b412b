"""RunPanel's state on hand-made directories: what it reads, how fast, and that displayed text is inert."""
import json
import shutil
import time

import pytest
from learner import small

from sft_nb.panels.run_state import RunState
from sft_nb.panels.run import RunPanel
from sft_nb.base.progress import Phase, Progress, progress_listener
from sft_nb.base.report import Report, warn
from sft_nb.runs.directory import create_run
from sft_nb.runs.metrics import append_line, draw_curves
from sft_nb.runs.status import CHECKPOINT_ASKED, ProgressFile

HOSTILE = "<script>alert(1)</script> # **bold** \x1b[31mred\x1b[0m \u202eabc"


@pytest.fixture
def run(tmp_path): return create_run(small(tmp_path, run_name="a", max_steps=10))


def test_each_phase_is_seen_with_its_counts(run):
    state = RunState(run)
    assert state.phase() == "killed at step 0 of 10"
    with run.locked(), progress_listener(ProgressFile(run.path/"progress.json")):
        state.refresh()
        assert state.phase() == "starting"
        for phase, of, said in (("reading", 0, "reading"), ("preflight", 35, "preflight 0 of 35 checks"),
                                ("loading", 0, "loading"), ("training", 10, "training 0 of 10 steps"),
                                ("evaluating", 4, "evaluating 0 of 4 batches"), ("saving", 0, "saving")):
            with Phase(phase, of):
                assert state.refresh() and state.phase() == said and said in state.html()
                assert state.to_dict()["progress"]["phase"] == phase


def test_steps_and_time_left_are_of_the_training(run):
    with run.locked():
        told = Progress("training", 4, 8, seconds_left=120., figures=dict(loss=.5))
        (run.path/"progress.json").write_text(json.dumps(told.to_dict()))
        state = RunState(run)
        assert (state.step, state.steps) == (4, 8)   # as the trainer counts, not as the config asks
        assert state.phase() == "training 4 of 8 steps, loss 0.5, 2 min left" and "width:50.0%" in state.html()


@pytest.mark.parametrize("text", ["[1]", "{", '{"phase": ', ""])
def test_files_that_are_damaged_are_no_error(run, text):
    for name in ("progress.json", "guards.json", "plan.json", "samples.jsonl"): (run.path/name).write_text(text)
    with run.locked(): state = RunState(run)
    assert state.noticed == [] and state.memory() == {} and state.answers() == [] and "starting" in state.html()


def test_a_hundred_thousand_lines(run):
    line = '{{"step": {}, "loss": {}, "grad_norm": 1.5}}\n'
    (run.path/"metrics.jsonl").write_text("".join(line.format(k, 2 + k % 7) for k in range(1, 100_001)))
    append_line(run.path/"metrics.jsonl", dict(step=100_001, loss=50.))
    state, began = RunState(run), time.process_time()
    for _ in range(5):
        html = state.html()
        assert not state.refresh()
    assert time.process_time() - began < 5 and len(html) < 100_000   # 0.2 s on an idle machine
    assert state.spikes(1)[0][0] == 100_001 and (100_001, 50.) in state.series("loss")["loss"]
    append_line(run.path/"metrics.jsonl", dict(step=100_002, loss=1.))
    before = state.tails[0].read_to
    assert state.refresh() and state.step == 100_002 and state.tails[0].read_to - before < 100   # only what is new


def test_what_is_read_is_escaped(run):
    Report("guards", {}, [warn(HOSTILE, HOSTILE, check="c")]).save(run.path/"guards.json")
    append_line(run.path/"samples.jsonl", dict(step=3, answers=[dict(asked=HOSTILE, text=HOSTILE, ended=True)]))
    run.set_status("failed", reason=HOSTILE, fix=HOSTILE)
    append_line(run.path/"metrics.jsonl", {"step": 1, "loss": 1., HOSTILE: 2.})
    state = RunState(run)
    assert state.answers() == [(HOSTILE, [(3, HOSTILE)])]
    html = state.html()
    assert "<script" not in html and "\x1b" not in html and "\u202e" not in html and html.count("&lt;script&gt;") >= 5
    json.dumps(state.to_dict())


def test_memory_stands_beside_the_plan(run):
    append_line(run.path/"metrics.jsonl", dict(step=1, peak_memory_gib=2.5, tokens_per_second=50., gpu_use_percent=93.))
    assert RunState(run).beside_plan() == ["memory: measured 2.50 GiB at most"]
    plan = dict(allocated=3 * 2**30, total=4 * 2**30, device=dict(gib=24., kind="cuda"), tokens_per_second=40.)
    (run.path/"plan.json").write_text(json.dumps(plan))
    state = RunState(run)
    assert state.memory() == dict(taken=2.5, planned=3., there=24.)
    html = state.html()
    assert "planned 3.00 GiB, measured 2.50 GiB, 17% below the plan; the device has 24.0 GiB<" in html
    assert "planned 40 tokens/s, measured 50, 25% above the plan" in html
    assert state.numbers()["GPU use"] == "93%" and state.figures()["gpu_use_percent"] == 93
    plan["device"]["kind"] = "cpu"   # there the process is measured, with its libraries
    (run.path/"plan.json").write_text(json.dumps(plan))
    assert RunState(run).memory()["planned"] == 4. and "whole process" not in RunState(run).html()
    (run.path/"plan.json").write_text(json.dumps(plan | dict(total=2 * 2**30)))
    assert "25% above the plan; it counts the whole process" in RunState(run).html()
    (run.path/"plan.json").write_text(json.dumps(dict(allocated=3 * 2**30, device=dict(gib=24.))))   # with less in it
    assert RunState(run).memory()["planned"] == 3.


def test_several_runs_have_a_legend(run, tmp_path):
    other = create_run(small(tmp_path, run_name="b"))
    for one in (run, other): append_line(one.path/"metrics.jsonl", dict(step=1, loss=1., eval_loss=2.))
    state = RunState(run, other)
    assert [r.path for r in RunState([run, other]).runs] == [r.path for r in state.runs]   # a list says the same
    assert [*state.series("loss", "eval_loss")] == ["a loss", "a eval_loss", "b loss", "b eval_loss"]
    assert all(f", {name}: " in state.html() for name in ("a training", "b held out"))
    lines = draw_curves(state.curves(), state.looks()).axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert lines[0].get_marker() == lines[1].get_marker() != lines[2].get_marker()   # not by colour alone
    drawn = {s["name"]: s for s in state.charts()[0]["series"]}
    assert [drawn[line.get_label()]["dashed"] for line in lines] == [False, True, False, True]


def test_runs_that_are_picked_are_drawn_together(run, tmp_path):
    others = [create_run(small(tmp_path, run_name=name)) for name in ("b", "c")]
    for one in (run, *others): append_line(one.path/"metrics.jsonl", dict(step=1, loss=1., eval_loss=2., grad_norm=1.))
    panel = RunPanel(run, others[0])
    assert {label for label, _ in panel.others.options} == {"b", "c"} and panel.others.value == (others[0].path,)
    tail = panel.state.tails[1]
    panel.others.receive("set", [0, 1])
    assert [one.name for one in panel.state.runs] == ["a", "b", "c"] and panel.state.tails[1] is tail
    def drawn(k=0): return next(block for block in panel.view if block["kind"] == "columns")["groups"][k][0]["series"]
    looks = {s["name"]: (s["colour"], s["dashed"]) for s in drawn()}
    assert [s["name"] for s in drawn(1)] == ["a", "b", "c"]   # of one figure
    assert looks == {f"{name} {kind}": (k, kind == "held out") for k, name in enumerate("abc")
                     for kind in ("training", "held out")}
    panel.others.receive("set", [])
    assert [s["name"] for s in drawn()] == ["training", "held out"]
    assert [(s["colour"], s["dashed"]) for s in drawn()] == [(0, False), (1, True)]


def test_four_charts_of_what_is_measured(run):
    append_line(run.path/"metrics.jsonl", dict(step=1, loss=1., grad_norm=1., learning_rate=1., peak_memory_gib=1.))
    state = RunState(run)
    assert [*state.curves()] == ["loss", "learning rate", "gradient norm", "peak memory, GiB"]
    append_line(run.path/"metrics.jsonl", dict(step=2, loss=1.001, tokens_per_second=1.))
    assert state.refresh() and [*state.curves()][3:] == ["tokens per second"]
    append_line(run.path/"metrics.jsonl", dict(step=3, loss=9.))
    append_line(run.path/"metrics.jsonl", dict(step=4, loss=9.01))
    assert state.refresh() and [step for step, _ in state.spikes()] == [3]   # not every little rise


def test_a_press_asks_and_does_not_wait(run, monkeypatch):
    asked = []
    monkeypatch.setattr(type(run), "stop", lambda self, timeout: asked.append(timeout))
    with run.locked():
        panel = RunPanel(run, every=.01)
        panel.stop.click()
        panel.checkpoint.click()
        assert asked == [None] and (run.path/CHECKPOINT_ASKED).exists()
        assert "a checkpoint is requested" in panel.to_html()
        panel.close()
        panel.follower.join(300)
        assert not panel.follower.is_alive()


def test_a_rise_is_a_press_away_from_its_rows(undisturbed):
    panel = RunPanel(undisturbed)
    step, _ = panel.state.spikes()[0]
    panel.rises[0].click()
    assert panel.state.at == step and f"optimiser step {step} of 10" in panel.to_html()
    assert all(f">{name}</div>" in panel.to_html() for name in panel.state.batches.names())


@pytest.mark.parametrize("asked", [
    "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<s>[INST] How many? [/INST]", "<bos><start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n"])
def test_prompts_are_shown_without_the_marks_of_their_template(run, asked):
    append_line(run.path/"samples.jsonl", dict(step=3, answers=[dict(asked=asked, text="4", ended=True)]))
    state = RunState(run)
    assert state.answers() == [("How many?", [(3, "4")])]
    assert ">step</th>" in state.html()
    append_line(run.path/"samples.jsonl", dict(step=9, answers=[dict(asked=asked, text="4" + "\n" * 200, ended=False)]))
    assert "4 ⏎ × 200  … (not ended)" in RunState(run).html()   # not a screen of blank lines


def test_what_failed_has_a_fix_and_a_run_without_steps_says_so(run):
    run.set_status("failed", reason="the loss is not a number", fix="learning_rate=1e-4")
    panel = RunPanel(run)
    assert "role='alert'" in panel.to_html() and "<b>Fix</b> <code>learning_rate=1e-4</code>" in panel.to_html()
    assert "No step has been logged yet" in json.dumps(panel.view)


def test_a_run_that_is_removed_while_it_is_shown_says_so(run):
    append_line(run.path/"metrics.jsonl", dict(step=1, loss=2.))
    panel = RunPanel(run)
    shutil.rmtree(run.path)
    panel.scale.value = "log"   # nothing follows a run that is not trained; a press looks at it again
    head = panel.state.head_html()
    assert panel.state.state == "removed" and "is gone; this is the last that was read" in head and ">2<" in head
    panel.step.value = 1   # what a press misses first is not what is wrong
    assert "its directory" in panel.error and "has this name" not in panel.error
    assert not run.path.exists()


def test_what_cannot_be_read_while_a_run_is_followed_is_said_and_the_kernel_is_not_called_gone(run, monkeypatch):
    panel = RunPanel(run, every=.01)
    def unreadable(): raise PermissionError(13, "Permission denied", "metrics.jsonl")
    with run.locked(), monkeypatch.context() as patched:
        panel.state.refresh()
        patched.setattr(panel.state, "refresh", unreadable)
        panel.follow()
        panel.follower.join(300)
        assert not panel.follower.is_alive() and panel.beat_seconds == 0 and panel.state.any_active
        assert "Permission denied" in str(panel.view) and isinstance(panel.failure, PermissionError)
        patched.undo()
        panel._try(lambda: None)   # any press
        assert panel.follower.is_alive() and "Permission denied" not in str(panel.view)
        panel.close()
    panel.follower.join(300)
    assert not panel.follower.is_alive()


def test_a_step_is_replayed_in_the_panel(undisturbed):
    panel = RunPanel(undisturbed)
    assert panel.replay.disabled   # no step is selected
    panel.step.value = 4
    panel.replay.click()
    assert panel.state.replayed.equal and "equal to the logged line" in panel.to_html() and panel.error == ""
    panel.step.value = 5
    assert panel.state.replayed is None and panel.state.replay_html() == ""
