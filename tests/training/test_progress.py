"""Progress reports during training, and a checkpoint requested in the middle of it."""
import io
import json
from types import SimpleNamespace

import pytest
from learner import assert_same, at_step, names, small
from transformers import TrainerControl, TrainerState

from sft_nb.base import progress
from sft_nb.checks import preflight
from sft_nb.base.progress import ProgressBar, Phase, Progress, progress_listener, log, show_progress
from sft_nb.runs.directory import Run
from sft_nb.runs.metrics import read_lines
from sft_nb.runs.status import CHECKPOINT_ASKED, read_progress
from sft_nb.training import recorder
from sft_nb.training.recorder import StopRequest
from sft_nb.training.train import train


def test_a_training_tells_its_phases_and_grants_a_checkpoint(tmp_path, undisturbed):
    "Samples and checkpoints between change nothing of the result"
    said, run = [], Run(undisturbed.path)
    def ask(): (tmp_path/"asked"/CHECKPOINT_ASKED).touch()
    with progress_listener(said.append), at_step(4, ask): run = train(small(tmp_path, run_name="asked", sample_steps=5))
    assert_same(run, undisturbed)
    assert names(run.checkpoints()) == [f"checkpoint-{n}" for n in (3, 4, 6, 9, 10)]
    assert not (run.path/CHECKPOINT_ASKED).exists()
    phases = list(dict.fromkeys(p.phase for p in said))
    assert [p for p in phases if p != "reading"] == ["planning", "loading", "training", "saving", "sampling"]
    steps = [p for p in said if p.phase == "training"]
    assert {(p.done, p.of) for p in steps} == {(k, 10) for k in range(11)} and "loss" in steps[-1].figures
    assert json.loads((run.path/"progress.json").read_text())["phase"] in progress.PHASES
    assert run.progress == Progress()   # nobody trains it
    samples = read_lines(run.path/"samples.jsonl")
    assert [line["step"] for line in samples] == [5, 10] and set(samples[0]["answers"][0]) == {"asked", "text", "ended"}


def test_of_several_processes_one_looks_and_all_save(tmp_path, monkeypatch):
    state = TrainerState(global_step=3, max_steps=10)
    (tmp_path/CHECKPOINT_ASKED).touch()
    monkeypatch.setenv("RANK", "1")
    second = StopRequest(folder=tmp_path)
    assert not second.on_step_end(None, state, TrainerControl()).should_save and (tmp_path/CHECKPOINT_ASKED).exists()
    monkeypatch.setattr(recorder, "agree_across_ranks", lambda mine: CHECKPOINT_ASKED)   # the first process says so
    control = second.on_step_end(None, state, TrainerControl())
    assert control.should_save and not control.should_training_stop and second.granted is None


def test_a_preflight_counts_its_checks_and_is_told_as_a_whole(monkeypatch):
    def look(name, f, evidence):
        with Phase("loading"): return []
    monkeypatch.setattr(preflight, "run_check", look)
    said = []
    with progress_listener(lambda p: said.append(str(p))): preflight.run_checks(SimpleNamespace(failures={}))
    n = len(preflight.all_checks())
    assert list(dict.fromkeys(said)) == [f"preflight {k} of {n} checks" for k in range(n + 1)] and n > 20


# --- who looks on

@pytest.fixture
def terminal(monkeypatch, capsys):
    "A user at a terminal; records what they see"
    monkeypatch.setattr(progress, "display_target", lambda: "terminal")
    return lambda: capsys.readouterr().err


def test_a_terminal_has_one_line_that_is_written_again(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    with ProgressBar(every=0.) as bar:
        for k in (1, 2): bar.show(Progress("training", k, 376))
    assert terminal() == "\rtraining 1 of 376 s\x1b[K\rtraining 2 of 376 s\x1b[K\r\x1b[K"   # cut to its width


def test_a_sentence_has_a_line_of_its_own(terminal):
    with show_progress(), Phase("loading"): log("sft_nb: a warning")
    assert terminal() == "\rloading\x1b[K\r\x1b[Ksft_nb: a warning\n"


def test_a_notebook_has_one_place_and_nothing_red(monkeypatch, capsys):
    import IPython.display
    drawn = []
    class Handle:
        def update(self, html): drawn.append(html.data)
    def display(html, display_id):
        drawn.append(html.data)
        return Handle()
    monkeypatch.setattr(progress, "display_target", lambda: "notebook")
    monkeypatch.setattr(IPython.display, "display", display)
    with show_progress(), Phase("training", 2) as steps:
        bar = progress._BAR.get()
        bar.every = bar._next = 0.
        for k in (1, 2): steps.update(k)
        log("sft_nb: a sentence")
    assert ["0 of 2" in drawn[0], "2 of 2" in drawn[-2], drawn[-1]] == [True, True, ""]
    assert capsys.readouterr() == ("sft_nb: a sentence\n", "")


def test_the_first_answers_of_a_batch_tell_nothing_about_the_time_left():
    with Phase("generating", 100, batch=32) as phase:
        phase.update(1)
        assert phase.progress.seconds_left is None
        phase.update(32)
        assert phase.progress.seconds_left is not None


@pytest.mark.parametrize("variable, kernel, seen", [("1", True, ""), ("", True, "notebook"), ("", False, "")])
def test_who_looks_on(monkeypatch, variable, kernel, seen):
    monkeypatch.setenv("TQDM_DISABLE", variable)
    monkeypatch.setattr(progress, "in_notebook", lambda: kernel)
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())   # no terminal
    assert progress.display_target() == seen


def test_a_progress_that_cannot_be_written_ends_nothing(tmp_path):
    from sft_nb.runs.status import ProgressFile
    with progress_listener(ProgressFile(tmp_path/"nowhere/progress.json")), Phase("loading"): pass
    assert read_progress(tmp_path/"nowhere/progress.json") == Progress()
