"""How long an answer may be, what happens to a thought, and what an evaluation says about its time."""
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sft_nb.config.load import load_config
from sft_nb.evaluation import generations as chapter
from sft_nb.evaluation.evaluate import Evaluator
from sft_nb.evaluation.generations import answer_prompts, GenerationCache, longest_target, make_questions
from sft_nb.extras.openai_client import ServerEvaluator, ServerReply
from sft_nb.model.generation import Generation
from sft_nb.base.progress import Progress

CALL = dict(type="function", function=dict(name="add", arguments=dict(a=1, b=2)))
TALKS = dict(   # answers of a row -> whether the longest is longer than 20 tokens
    short=[dict(role="user", content="Is it?"), dict(role="assistant", content="yes")],
    long=[dict(role="user", content="Is it?"), dict(role="assistant", content="one two three " * 12)],
    thought=[dict(role="user", content="Is it?"), dict(role="assistant", content=f"<think>{'hm ' * 40}</think>yes")],
    call=[dict(role="user", content="1 + 2?"), dict(role="assistant", content="", tool_calls=[CALL])])


@pytest.mark.parametrize("name", TALKS)
def test_the_longest_target_counts_thoughts_and_calls(tokenizer, name):
    n = longest_target([TALKS["short"], TALKS[name]], tokenizer)
    assert (n > 20) == (name != "short") and n > 1
    turns = [*TALKS["long"], *TALKS["short"]]   # only the last answer is generated
    assert longest_target([turns], tokenizer) == longest_target([TALKS["short"]], tokenizer)


def test_a_limit_that_was_set_is_kept(tokenizer):
    rows = {"row 1": dict(question="Is it?", answer="yes")}
    unset = make_questions(load_config(task="chat"), tokenizer, rows)
    assert unset.limits == dict(max_new_tokens=32, thought_tokens=1024) and unset.longest_target == 3
    for n in (256, 7):
        assert make_questions(load_config(task="chat", max_new_tokens=n), tokenizer, rows).limits == dict(
            max_new_tokens=n, thought_tokens=0)
    texts = make_questions(load_config(task="text"), tokenizer, {"row 1": dict(text="The sky is blue.")})
    assert (texts.longest_target, texts.thought_tokens) == (0, 0)


@pytest.fixture
def model_that_thinks(monkeypatch):
    "Row 0 answers, row 1 rambles, row 2 thinks for 40 tokens; returns what was asked"
    asked, said = [], {0: ("yes", 2), 1: ("well " * 900, 900), 2: (f"<think>{'hm ' * 38}</think> no", 42)}
    def generated(model, tokenizer, prompts, *, on_answer, max_new_tokens, adapters=None):
        asked.append(([ids[0] for ids in prompts], max_new_tokens, adapters))
        for k, ids in enumerate(prompts):
            text, n = said[ids[0]]
            words = text.split(" ")[:max_new_tokens]
            on_answer(k, Generation(" ".join(words), min(n, max_new_tokens), n <= max_new_tokens))
    monkeypatch.setattr(chapter, "continue_tokens", generated)
    return asked


def test_a_thought_is_not_cut_and_rambling_is(tokenizer, model_that_thinks, tmp_path):
    how = dict(max_new_tokens=32, thought_tokens=100, adapters=["a", "b", "c"])
    cache = GenerationCache(tmp_path/"answers.jsonl")
    found = answer_prompts(None, tokenizer, [[0], [1], [2]], ["w"] * 3, cache, **how)
    assert model_that_thinks == [([0, 1, 2], 32, ["a", "b", "c"]), ([2], 132, ["c"])]
    assert [(g.n_tokens, g.ended) for g in found] == [(2, True), (32, False), (42, True)]
    assert found[2].text.endswith("</think> no")
    again = answer_prompts(None, tokenizer, [[0], [1], [2]], ["w"] * 3, GenerationCache(cache.file), **how)
    assert again == found and len(model_that_thinks) == 2   # nothing is generated twice


def test_a_limit_that_was_set_cuts_a_thought(tokenizer, model_that_thinks):
    (found,) = answer_prompts(None, tokenizer, [[2]], ["w"], GenerationCache(None), max_new_tokens=32)
    assert len(model_that_thinks) == 1 and not found.ended


@pytest.mark.parametrize("seconds, training, says", [
    (20, 300., "takes about 3 min, the training took 5 min; a quarter of the training: eval_samples=25"),
    (20, 3000., ""), (.1, 1., ""), (20, None, "")])
def test_a_long_evaluation_says_so_once(monkeypatch, capsys, seconds, training, says):
    metrics = [] if training is None else [dict(step=1, seconds=1.), dict(step=9, seconds=training)]
    questions = SimpleNamespace(cfg=SimpleNamespace(per_device_eval_batch_size=8))
    target = SimpleNamespace(run=SimpleNamespace(metrics=lambda: metrics))
    evaluator = Evaluator(target, None, questions, None)
    monkeypatch.setattr("sft_nb.evaluation.evaluate.time.monotonic", lambda: 100. + seconds)
    for done in (0, 7, 20, 40): evaluator.compare_time(Progress("generating", done, 60), began=100.)
    err = capsys.readouterr().err
    assert err.count("sft_nb:") == bool(says) and says in err


@dataclass(frozen=True)
class Served:
    url:str = "http://here"
    wanted:str|None = None
    tokenizer:object = None


def reply(text, finish, n, reasoning=""): return ServerReply(text, finish, None, reasoning, None, None, n)


@pytest.mark.parametrize("settings, asked", [({}, [(2, 32), (1, 1056)]), (dict(max_new_tokens=40), [(2, 40)])])
def test_a_server_gives_a_thought_more_tokens(tokenizer, monkeypatch, settings, asked):
    rows = {f"row {k}": dict(question=f"Is it {k}?", answer="yes") for k in range(2)}
    questions, calls = make_questions(load_config(task="gsm8k", **settings), tokenizer, rows), []
    def ask(server, talks, *, max_new_tokens, **how):
        calls.append((len(talks), max_new_tokens))
        if max_new_tokens > 1000: return [reply("yes", "stop", 60, "hm " * 50)]
        return [reply("yes", "stop", 2), reply("", "length", 32, "hm hm")]
    monkeypatch.setattr("sft_nb.extras.openai_client.ask_server", ask)
    scores = ServerEvaluator(Served(tokenizer=tokenizer), questions, progress=False).score("tuned")
    assert calls == asked and [a.ended for a in scores.answers] == [True, len(asked) == 2]
