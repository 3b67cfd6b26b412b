"""Models side by side: their prompts, the state after a stop, and what is written into the run."""
import json
import os
import shutil
import time
from dataclasses import replace

import pytest
import torch
from learner import small

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.extras.kept_answers import KeptAnswers
from sft_nb.model.generation import Generation, generate
from sft_nb.panels.conversation import GenerationState, Turn, question_of, turn_html, with_system_prompt
from sft_nb.panels.generation import GenerationPanel
from sft_nb.panels.reply_stream import Reply, first_difference, pieces_html, speak, write_reply
from sft_nb.panels.chat_models import find_chat_models, names_in
from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import Run
from sft_nb.tasks.core import Score
from sft_nb.tokens.encode import encode_prompts
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

EVIL = "<script>1</script></pre><img src=x onerror=alert(1)>\x1b[2J\u202e**bold** [a](javascript:1)"


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    "Two steps of the synthetic learner, with four held-out rows and a system prompt"
    folder = tmp_path_factory.mktemp("runs")
    return train(small(folder, run_name="one", max_steps=2, save_steps=1, eval_samples=4, system_prompt="Count."))


@pytest.fixture(scope="module")
def asked(learned): return GenerationState(learned)


def said(*pieces, state="ended", speaker="base")->Reply:
    n = len(pieces)
    return Reply(speaker, state, [*range(n)], [*pieces], [.4] * n, [""] * n, "".join(pieces))


def test_a_streamed_answer_is_the_one_of_generate(tokenizer):
    bench = Workbench(load_config("demo"))
    talk, model = [dict(role="user", content="Zoë has 14 🙂. What is 14 + 23?")], bench.base()
    prompt, = encode_prompts([talk], tokenizer)
    for how in (dict(max_new_tokens=24), dict(max_new_tokens=24, temperature=.9, top_p=.8, seed=5)):
        whole, = generate(model, tokenizer, [talk], **how)
        found = speak(Reply("base"), model, tokenizer, prompt, **how)
        assert Generation(found.text, found.n_tokens, found.state == "ended") == whole
        assert "".join(found.pieces) == tokenizer.decode(found.ids)
        assert all(0 < share <= 1 for share in found.shares) and len(found.shares) == len(found.ids)


def test_a_prompt_longer_than_the_positions_of_a_model_is_refused(tokenizer):
    with pytest.raises(SftError, match=r"prompt 1: it is 9,999 tokens long, and the model has positions for [\d,]+"):
        speak(Reply("base"), Workbench(load_config("demo")).base(), tokenizer, [5] * 9_999, max_new_tokens=2)


@pytest.mark.parametrize("how", [dict(), dict(temperature=1.5, top_p=.9, seed=3)], ids=["greedy", "drawn"])
def test_models_write_in_turn_and_say_what_each_says_alone(trained, monkeypatch, how):
    import peft
    read, order, load = [], [], peft.load_peft_weights
    monkeypatch.setattr(peft, "load_peft_weights", lambda folder, **k: read.append(folder) or load(folder, **k))
    state = GenerationState(trained, ("base", *names_in(trained)[1:]))
    turn = state.ask("Write the numbers from 1 to 30.", max_new_tokens=30,
                     on_token=lambda reply: order.append(reply.speaker), **how)
    assert len(read) == len({*read}) == len(state.names) - 1   # each adapter once, however often its turn comes
    longest = [name for name in state.names if len(turn.replies[name].ids) > 8]
    assert len(longest) > 1
    first, second = (order.index(name) for name in longest[:2])
    assert first < second < len(order) - 1 - order[::-1].index(longest[0])   # the second begins before the first ends
    for s in state.speakers:
        prompt, = encode_prompts([state.chat_with(s.name, turn)], s.tokenizer)
        with state.stage.on(s) as model:
            alone = speak(Reply(s.name), model, s.tokenizer, prompt, max_new_tokens=30, **how)
        assert replace(turn.replies[s.name], window=0) == replace(alone, window=0)


def test_a_stop_in_the_middle_keeps_what_all_have_said(trained):
    state = GenerationState(trained, (names_in(trained)[1], "adapter"))

    def after_both_began(reply):
        if reply.speaker == "adapter" and len(reply.ids) == 3: state.stop()
    turn = state.ask(question_of(state.chat_of(1)[1]), row=1, max_new_tokens=40, on_token=after_both_began)
    assert [(r.state, len(r.ids)) for r in turn.replies.values()] == [("stopped", 8), ("stopped", 3)]
    assert all(r.text for r in turn.replies.values())


def test_a_base_that_is_loaded_anew_each_time_is_loaded_once(learned, monkeypatch):
    state = GenerationState(learned, "base")
    state.speakers = [replace(state.speakers[0], seat=None)]
    loaded, base = [], Workbench.base
    monkeypatch.setattr(Workbench, "base", lambda self: loaded.append(1) or base(self))
    assert len(state.ask("Hello", max_new_tokens=20, temperature=2., seed=1).replies["base"].ids) > 8
    assert len(loaded) == 1


def test_a_cache_of_another_kind_gives_the_same_answer(tokenizer, monkeypatch):
    bench = Workbench(load_config("demo"))
    prompt, = encode_prompts([[dict(role="user", content="What is 14 + 23?")]], tokenizer)
    model, how = bench.base(), dict(max_new_tokens=8)
    cached = speak(Reply("base"), model, tokenizer, prompt, **how)
    monkeypatch.setattr("sft_nb.panels.reply_stream.choose_decoding", lambda model: ("transformers", "it is another"))
    assert speak(Reply("base"), model, tokenizer, prompt, **how).ids == cached.ids


@pytest.mark.parametrize("a, b, at", [
    ("14 + 23|=|37", "14| + 23|=|36", 3), ("a|b", "a", 1), ("a", "a|b", 1), ("a|b", "ab", None), ("", "x", 0),
    ("", "", None),
])
def test_where_two_answers_part(a, b, at):
    assert first_difference(said(*a.split("|")), said(*b.split("|"))) == at


@pytest.mark.parametrize("state", ["waiting", "speaking", "stopped", "cut", "failed"])
def test_what_did_not_end_by_itself_may_agree(state):
    assert first_difference(said("a", "b"), said("a", state=state)) is None
    assert first_difference(said("a", state=state), said("a", "b")) is None
    assert first_difference(said("a", "b"), said("x", state=state)) == 0


def test_a_row_brings_its_system_prompt_its_answer_and_its_score(asked):
    place, talk = asked.chat_of(2)
    turn = asked.ask(question_of(talk), row=2)
    assert [m["content"] for m in turn.before] == ["Count."] and turn.where == place
    assert [m["role"] for m in asked.chat_with("base", turn)] == ["system", "user"]
    assert {r.score.expected for r in turn.replies.values()} == {r.score.expected for r in asked.ask(
        question_of(talk), row=place).replies.values()}
    assert asked.ask("Something else", row=2).expected is None   # the words of the row were changed


def test_a_thought_before_an_answer_is_not_marked(asked, tokenizer, monkeypatch):
    "The next token is forced: a wrong draft in a thought, then the target"
    place, talk = asked.chat_of(2)
    text = f"<think>\nThe answer is 1.\n</think>\n\n{talk[-1]['content']}"
    script, first = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id], {}

    def forced(decoder, running, ids):
        token = script[len(ids) - first.setdefault(decoder, len(ids))]
        return torch.nn.functional.one_hot(torch.tensor([token]), len(tokenizer)) * 1e4
    monkeypatch.setattr("sft_nb.panels.reply_stream._next_logits", forced)
    asked.new()
    turn = asked.ask(question_of(talk), row=place, max_new_tokens=len(script))
    for reply in turn.replies.values():
        assert reply.text == text and reply.score.correct and reply.verdict().startswith("✓ right")


def test_a_system_prompt_can_be_replaced_and_left_out(asked):
    asked.new()
    assert asked.begin("Hello", system="Be brief.").before == [dict(role="system", content="Be brief.")]
    asked.new()
    assert asked.begin("Hello", system="").before == []
    tools = [dict(role="system", content="x", tools=[1]), dict(role="user", content="y")]
    assert with_system_prompt(tools, "") == [dict(role="system", content="", tools=[1]), tools[1]]
    asked.new()


def test_a_failed_turn_is_left_out_of_what_follows(asked):
    asked.new()
    first, second = asked.begin("First", system="S"), asked.begin("Second")
    first.replies["base"].text = "Yes"
    first.replies["adapter"].state = "failed"
    roles = {name: [m["role"] for m in asked.chat_with(name, second)] for name in asked.names}
    assert roles == dict(base=["system", "user", "assistant", "user"], adapter=["system", "user"])
    asked.new()


def test_a_stop_is_heard_after_the_present_token(asked):
    turn = asked.ask("Hello", max_new_tokens=200, temperature=2., seed=1,
                     on_token=lambda reply: asked.stop() if len(reply.ids) == 3 else None)
    assert [(r.state, len(r.ids)) for r in turn.replies.values()] == [("stopped", 3), ("stopped", 0)]
    assert asked.ask("Hello", max_new_tokens=2).replies["adapter"].over   # the next question is asked again
    asked.new()


def test_what_fails_is_a_line_and_the_others_go_on(learned, monkeypatch):
    state = GenerationState(learned, ("base", "checkpoint-1", "adapter"))
    state.speakers[1] = replace(state.speakers[1], weights=learned.path/"gone")

    def without_memory(reply, model, *args, **how):
        if reply.speaker == "adapter": raise RuntimeError("CUDA out of memory")
        yield from write_reply(reply, model, *args, **how)
    monkeypatch.setattr("sft_nb.panels.conversation.write_reply", without_memory)
    turn = state.ask("Hello", max_new_tokens=2)
    assert [r.state for r in turn.replies.values()][1:] == ["failed", "failed"]
    assert turn.replies["base"].over and turn.replies["base"].ids
    assert "gone is gone" in turn.replies["checkpoint-1"].error
    assert "memory ran out" in turn.replies["adapter"].error and state.stage.swapped == {}
    assert state.html().count("role='alert'") == 2


def test_checkpoints_and_other_runs_share_one_base(learned, tmp_path):
    other = Run(shutil.copytree(learned.path, tmp_path/"two"))
    state = GenerationState(learned, ("base", *names_in(learned)[1:], other))
    state.ask("Hello", max_new_tokens=2)
    assert state.names == ["base", "checkpoint-1", "checkpoint-2", "adapter", "two adapter"]
    assert len(state.stage.swapped) == 1
    assert state.turns[-1].replies["adapter"].shares == state.turns[-1].replies["two adapter"].shares
    assert state.turns[-1].replies["adapter"].shares != state.turns[-1].replies["base"].shares


def test_the_base_is_loaded_with_the_newest_adapter_so_that_it_need_not_be_loaded_again(learned, tmp_path):
    base, newest = find_chat_models(learned)
    assert (base.name, base.weights, base.seat) == ("base", None, learned.weights("adapter"))
    assert (newest.name, newest.weights, newest.seat) == ("adapter", learned.weights("adapter"), None)
    copy = Run(shutil.copytree(learned.path, tmp_path/"two"))
    shutil.rmtree(copy.adapter)
    assert [s.name for s in find_chat_models(copy)] == ["base", "checkpoint-2"]
    assert find_chat_models(copy)[0].seat == copy.weights("checkpoint-2")
    shutil.rmtree(copy.path/"checkpoints")
    assert [(s.name, s.seat) for s in find_chat_models(copy)] == [("base", None)]


def test_thumbs_are_lines_that_preference_trainers_read(learned, asked):
    file, kept = learned.path/"preferences.jsonl", KeptAnswers(asked)
    file.write_text("not ours\n")
    turn = asked.ask("Hello", max_new_tokens=3)
    for name, text in (("base", "no"), ("adapter", "yes")): turn.replies[name].text = text
    kept.rate("adapter", "good")
    kept.rate("base", "bad")
    first, line = file.read_text().splitlines()
    pair = json.loads(line)
    assert first == "not ours" and pair["chosen"][0]["content"] == "yes" and pair["rejected"][0]["content"] == "no"
    assert {"prompt", "chosen_model", "rejected_model", "time", "id", "sampling"} <= {*pair}
    kept.rate("base", "good")   # two good ones are no pair
    assert [json.loads(x)["label"] for x in file.read_text().splitlines()[1:]] == [True, True]
    kept.rate("base", "good")
    kept.rate("adapter", "good")
    assert file.read_text() == "not ours\n"
    with pytest.raises(ConfigError, match="nobody has not answered"): kept.rate("nobody", "good")
    file.unlink()
    asked.new()


def test_without_the_extras_nothing_can_be_kept(learned, monkeypatch):
    monkeypatch.setattr("sft_nb.panels.generation.extension", lambda kind: None)
    panel = GenerationPanel(learned, "base", thread=False)
    panel.controls.ask.click()
    assert "class='sft-base'" in panel.to_html() and panel.controls.thumbs == []
    assert panel.controls.keep.hidden and panel.controls.ask_set.hidden


def test_answers_that_follow_different_words_are_no_pair(asked):
    asked.new()
    first, second = asked.begin("First"), asked.begin("Second")
    for reply, text in zip(first.replies.values(), ("a", "b")): reply.text = text
    for reply, rating in zip(second.replies.values(), ("good", "bad")): reply.text, reply.rating = "c", rating
    lines = KeptAnswers(asked).preferences(second)
    assert [sorted({"label", "chosen"} & {*line}) for line in lines] == [["label"], ["label"]]
    asked.new()


def test_what_was_asked_of_the_models_is_said_in_words(learned):
    state = GenerationState(learned)
    state.ask("Hello", system="Be brief.", max_new_tokens=1)
    html = state.html()
    assert "turn 1 · at most 1 token, the likeliest each time" in html and "max_new_tokens" not in html
    assert "the prompt as base and adapter read it" in html and "&lt;|im_start|&gt;system\nBe brief." in html
    state.ask("And?", max_new_tokens=2, temperature=.7, top_p=.9, seed=3)
    assert "turn 2 · at most 2 tokens, temperature 0.7, top-p 0.9, seed 3" in state.html()


def test_nothing_that_is_said_is_obeyed():
    reply = replace(said(EVIL, "\u202e", speaker=EVIL), error=EVIL, score=Score(False, EVIL, EVIL), instead=[EVIL] * 2)
    html = turn_html(Turn(EVIL, [dict(role="system", content=EVIL)], {EVIL: reply, "b": said("x")}, {}, EVIL, EVIL))
    assert not any(bad in html for bad in ("<script", "<img", "</pre><img", "\x1b", "\u202e"))
    assert "≠" in pieces_html(reply, 0) and "title='40.0%" in pieces_html(reply)


def test_the_panel_answers_in_a_thread(learned):
    panel = GenerationPanel(learned)
    c = panel.controls
    assert c.row.value == 1 and c.system.value == "Count." and c.tokens.value == 8
    panel._receive_event(panel, dict(id=c.prompt.to_dict()["sends"], event="click", n=1), [])   # Ctrl+Enter
    panel.worker.join(600)
    assert not panel.busy and not c.ask.disabled and c.stop.disabled
    assert panel.to_html().count("class='sft-tuned'") == 1
    assert "✓ right" in panel.to_html() or "✗ wrong" in panel.to_html()
    assert [b.label for b in c.thumbs] == [
        "rate base good", "rate base bad", "rate adapter good", "rate adapter bad"]
    panel.state.turns[-1].replies["base"].text = ""
    rated = [button.label for button in panel.kept.thumbs(panel._try)]
    assert rated == ["rate adapter good", "rate adapter bad"]   # nothing is rated
    c.models.value = ("checkpoint-1",)
    assert panel.state.names == ["checkpoint-1"] and "nothing has been asked yet" in panel.to_html()
    c.row.value = 99
    assert "there is no row 99; one of 4 held-out rows" in panel.to_html()
    panel.close()


def test_no_picture_shows_a_question_and_offers_the_next_one_before_it_is_answered(learned):
    panel, pictures = GenerationPanel(learned, "base", thread=False), []
    def note(_): pictures.append((panel.state.turns[-1].replies["base"].over, panel.controls.ask.disabled))
    panel.observe(note, "view")
    panel.generate()
    assert pictures[0] == (False, True) and pictures[-1] == (True, False)
    assert (False, False) not in pictures   # a press on such a button would be lost


def test_a_run_without_held_out_rows_can_be_asked(learned, tmp_path):
    run = Run(shutil.copytree(learned.path, tmp_path/"none"))
    run.keep(replace(run.config, eval_samples=0))
    panel = GenerationPanel(run, "base", thread=False)
    assert panel.error == "" and panel.controls.row.value == 0
    panel.controls.prompt.value = "Hello"
    panel.controls.ask.click()
    assert panel.state.turns[0].replies["base"].over


def test_a_row_of_the_sweep_is_handed_over(learned):
    from sft_nb.extras.eval_panel import EvalPanel
    from sft_nb.evaluation.generations import Answer, Scores
    from sft_nb.evaluation.sweep import Sweep
    places = [*GenerationState(learned).rows()][:2] + ["another row"]
    scores = [Scores(name, [Answer(p, f"Prompt of {p}", name, False, None, "1", 1, True) for p in places])
              for name in ("base", "checkpoint-1", "checkpoint-2")]
    (learned.path/"eval").mkdir(exist_ok=True)
    made = Sweep("one", "accuracy", scores[0], {s.model: s for s in scores[1:]})
    made.save(learned.path/"eval/sweep.json")
    panel = EvalPanel(learned, thread=False)
    panel.table.value = 1
    panel.ask.click()
    trial = panel.trial
    assert (trial.state.names, trial.controls.row.value) == (["base", "checkpoint-1"], 2)
    assert trial.state.stage.swapped == {}   # no model before it is asked
    trial.controls.ask.click()
    assert f"expected ({places[1]})" in trial.to_html() and trial.to_html() in panel.to_html()
    panel.checkpoint.value = "checkpoint-2"
    panel.table.value = 2
    panel.ask.click()
    assert panel.trial is trial and trial.state.names == ["base", "checkpoint-2"]
    assert (trial.controls.row.value, trial.controls.prompt.value) == (0, "Prompt of another row")
    panel.close()


def test_a_prompt_set_is_kept_asked_of_every_checkpoint_and_exported(trained, tmp_path):
    copy = shutil.copytree(trained.path, tmp_path/"one")
    panel = GenerationPanel(copy, thread=False)
    c = panel.controls
    c.ask_set.click()
    assert "no prompt is kept" in panel.error                  # nothing to ask
    c.tokens.value = 4
    for prompt in ("What is 2 + 3?", "<b>What</b> is 4 + 5?", "slip", "slip"):   # the same again takes it out
        c.prompt.value = prompt
        c.keep.click()
    c.prompt.value = " "
    c.keep.click()
    assert "the prompt is empty" in panel.error
    assert [p["prompt"] for p in panel.kept.prompts()] == ["What is 2 + 3?", "<b>What</b> is 4 + 5?"]
    c.ask_set.click()
    lines = [json.loads(line) for line in (copy/"prompt-answers.jsonl").read_text().splitlines()]
    assert [[*line["answers"]] for line in lines] == [names_in(panel.state.run)] * 2
    assert "&lt;b&gt;What" in panel.to_html() and "<b>What" not in panel.to_html()
    assert not c.ask.disabled and not panel.writing
    reopened = GenerationPanel(copy, thread=False)             # another session finds the same set
    assert len(reopened.kept.prompts()) == 2
    (copy/"prompts.jsonl").write_text('\n{"prompt": "good"}\n{"prompt": 3}\n')
    reopened.controls.ask_set.click()
    assert "line 3" in reopened.error and "there is no prompt in it" in reopened.error


def test_a_checkpoint_that_is_written_appears_among_the_models(trained, tmp_path):
    copy = shutil.copytree(trained.path, tmp_path/"one")
    shutil.move(copy/"checkpoints"/"checkpoint-60", tmp_path/"later")
    panel = GenerationPanel(copy, thread=False)
    run = panel.state.run
    run.set_status("running")
    with run.locked():
        panel.begin_showing()
        assert panel.follower.is_alive() and "checkpoint-60" not in panel.controls.models.options
        shutil.move(tmp_path/"later", copy/"checkpoints"/"checkpoint-60")
        for _ in range(3000):
            if "checkpoint-60" in str(panel.view): break
            time.sleep(.1)
        assert "checkpoint-60" in panel.controls.models.options and "checkpoint-60" in str(panel.view)
        run.set_status("finished")
    panel.follower.join(300)
    assert not panel.follower.is_alive() and panel.failure is None


def test_a_run_that_was_removed_is_all_that_is_said(learned, tmp_path):
    run = Run(shutil.copytree(learned.path, tmp_path/"copy"))
    panel = GenerationPanel(run, "base", thread=False)
    shutil.rmtree(run.path)
    for act in (panel.controls.keep.click, panel.controls.ask.click):
        act()
        assert "its directory" in panel.error and "is gone" in panel.error and "default" not in panel.error


@pytest.mark.parametrize("damage", [os.mkfifo, lambda file: file.write_bytes(b"x" * 99)], ids=["pipe", "cut"])
def test_weights_that_were_damaged_after_the_base_was_loaded_are_a_line(learned, tmp_path, damage):
    run = Run(shutil.copytree(learned.path, tmp_path/"copy"))
    state = GenerationState(run, ("checkpoint-1", "checkpoint-2"))
    file = run.path/"checkpoints/checkpoint-2/adapter_model.safetensors"
    file.unlink()
    damage(file)
    state.ask("Hello", max_new_tokens=2)
    replies = state.turns[-1].replies
    assert replies["checkpoint-1"].n_tokens and not replies["checkpoint-1"].error
    assert "adapter_model.safetensors: it cannot be read" in replies["checkpoint-2"].error


def test_a_follower_that_cannot_read_says_so(learned, monkeypatch):
    panel = GenerationPanel(learned, "base", thread=False)
    models = list(panel.controls.models.options)
    def unreadable(run): raise PermissionError(13, "Permission denied", "checkpoints")
    monkeypatch.setattr("sft_nb.panels.generation.names_in", unreadable)
    panel.keep_up()
    assert "Permission denied" in str(panel.view) and isinstance(panel.failure, PermissionError)
    assert models and panel.controls.models.options == models   # those that were there stay
