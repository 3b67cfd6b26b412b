"""Held-out rows answered by a server: scores equal to those of its weights, and every way it can fail."""
import shutil

import pytest
from stub_server import listening, Stub

from sft_nb.cli.console import main
from sft_nb.base.report import ConfigError, SftError
from sft_nb.extras import openai_client as asking   # the module
from sft_nb.evaluation.evaluate import evaluate, Evaluation
from sft_nb.evaluation.sweep import sweep
from sft_nb.evaluation.verdict import verdict
from sft_nb.runs.directory import Run
from sft_nb.runs.locate import find_target
from sft_nb.workbench import Workbench

FEW = dict(eval_samples=6, progress=False)
NAMES = ["checkpoint-3", "checkpoint-10"]


@pytest.fixture(scope="module")
def run(undisturbed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")/"learner-1"
    shutil.copytree(undisturbed.path, folder)
    return Run(folder)


@pytest.fixture(scope="module")
def stub(run):
    "Serves the base and two checkpoints, as vLLM does"
    bench = Workbench(find_target(run).config, is_resolved=True)
    tuned = {name: bench.trained(run.weights(name)).eval() for name in NAMES}
    return Stub(bench.base().eval(), bench.tokenizer, name="learner", adapters=tuned)


def test_a_server_gives_the_scores_that_the_weights_give(run, stub):
    at_home = evaluate(run, checkpoint="checkpoint-10", **FEW)
    there = dict(checkpoint="checkpoint-10", served="checkpoint-10", **FEW)
    with listening(stub) as url: e = evaluate(run, server=url, **there)
    assert [a.text for a in e.tuned.answers] == [a.text for a in at_home.tuned.answers]
    assert (e.tuned.answers, e.base.answers) == (at_home.tuned.answers, at_home.base.answers)
    assert (e.server, e.longer) == (url, 0) and f"asked: {url}" in str(e) and url in e._repr_html_()
    kept = run.path/"eval/checkpoint-10-served.json"
    assert Evaluation.load(kept) == e and Evaluation.load(run.path/"eval/checkpoint-10.json") == at_home


def test_a_sweep_asks_a_server_for_every_checkpoint(run, stub):
    with listening(stub) as url: made = sweep(run, checkpoints=tuple(NAMES), server=url, **FEW)
    here = sweep(run, checkpoints=tuple(NAMES), general=False, **FEW)
    assert [*made.checkpoints] == NAMES and not made.forgotten
    for name in NAMES: assert made.checkpoints[name].answers == here.checkpoints[name].answers
    assert made.base.answers == here.base.answers and (run.path/"eval/sweep-served.json").exists()
    with listening(stub) as url, pytest.raises(ConfigError, match="does not serve checkpoint-6, checkpoint-9;"):
        sweep(run, server=url, **FEW)


def test_other_prompts_are_counted_and_a_base_that_is_not_served_is_none(run, stub):
    alone = Stub(stub.adapters["checkpoint-10"], stub.tokenizer, name="merged", system="Be brief.")
    with listening(alone) as url:
        e = evaluate(run, server=url, **FEW)
        with pytest.raises(ConfigError, match="does not serve their base"):
            alone.name = "checkpoint-10"
            sweep(run, checkpoints=("checkpoint-10",), server=url, **FEW)
    assert e.base is None and e.longer == 6
    assert "counts different prompt tokens in 6 of 6 rows; `sft_nb prove learner-1 --server" in str(e)


def test_what_a_server_cannot_be_asked_is_refused_at_once(run, stub, monkeypatch, tmp_path):
    monkeypatch.setattr(asking, "_PAUSES", (0., 0.))
    (tmp_path/"texts.jsonl").write_text('{"text": "Four apples."}\n')
    texts = dict(task="text", eval_file=str(tmp_path/"texts.jsonl"))
    with listening(stub) as url:
        for how, says in ((dict(general=True), "the loss of general texts"), (texts, "compute a loss")):
            with pytest.raises(ConfigError, match=says): evaluate(run, server=url, **FEW | how)
        before = stub.requests
        with pytest.raises(SftError, match="it lists 3 models|Not Found"): evaluate(run, server=url + "/nothing", **FEW)
        with pytest.raises(SftError, match="exceed the context length"):
            stub.context = 8
            evaluate(run, server=url, served="learner", **FEW)
        assert stub.requests - before < 30   # a refusal is not tried again
    with pytest.raises(SftError, match="nothing answers there"): evaluate(run, server="http://127.0.0.1:1", **FEW)


def test_the_command_line_asks_a_server(run, stub, capsys, monkeypatch):
    stub.context = 2048
    monkeypatch.chdir(run.path.parent.parent)
    with listening(stub) as url:
        line = ["evaluate", str(run.path), "--server", url, "--served", "checkpoint-10", "--eval-samples", "6"]
        assert main(line) in (0, None)
    assert f"asked: {url}" in capsys.readouterr().out
    assert main([*line[:2], "--server", "localhost:8000", *line[-2:]]) != 0
    assert "it is not a valid address" in capsys.readouterr().err


def test_a_verdict_needs_a_base(run, stub):
    with listening(Stub(stub.adapters["checkpoint-10"], stub.tokenizer, name="merged")) as url:
        with pytest.raises(ConfigError, match="the server does not serve its base; answers of both models"):
            verdict(run, server=url, general=False, **FEW)


def test_a_server_that_shows_no_log_probabilities_is_asked_for_them_once(stub):
    silent = Stub(stub.model, stub.tokenizer, name="learner", logprobs=False)
    ask = [dict(role="user", content="1 + 1?")]
    with listening(silent) as url:
        server = asking.Server(url, stub.tokenizer)
        assert server.name == "learner"
        for _ in range(3):
            before = silent.requests
            assert server.chat(ask, max_tokens=2).top is None
            sent = silent.requests - before
    assert sent == 1 and not server.shows_logprobs
