"""What other tools exclude from the loss is not learned, or is refused by name; what nothing reads is a warning."""
import json

import datasets
import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.messages import LOSS_FLAGS
from sft_nb.rows.readers import to_messages
from sft_nb.tokens.prepare import prepare

BAD, GOOD = dict(role="assistant", content="WRONGONE"), dict(role="assistant", content="right")
ASKED = dict(role="user", content="a?")


def read(*rows, **settings): return prepare(load_config(task="chat", eval_samples=0, **settings), train=list(rows))


def learned(data)->list[str]:
    return [data.tokenizer.decode([i for i in x["labels"] if i != -100]).replace("<|im_end|>", "")
            for x in data.train.tokens]


def warned(data)->dict: return {f.check: f for f in data.report.findings if f.status == "warn"}


@pytest.mark.parametrize("key", LOSS_FLAGS)
@pytest.mark.parametrize("value", [False, 0, 0., "false", "0.0"])
def test_every_flag_excludes_an_answer(key, value):
    if key == "masked": value = not value if not isinstance(value, str) else "true"
    data = read(dict(messages=[ASKED, BAD | {key: value}, ASKED, GOOD]))
    assert learned(data) == ["right"] and data.train.seen.unread == {}
    assert data.report.figures["train"]["excluded_by_flags"] == "1 answer"
    assert "1 answer is excluded by flags" in data.report.summary


@pytest.mark.parametrize("key", LOSS_FLAGS)
@pytest.mark.parametrize("value", [.5, 2, "half", [1], "last_round"])
def test_a_flag_of_another_value_is_refused_by_name(key, value):
    with pytest.raises(SftError, match=f"{key} of message 2 is .*; true or false, 1 or 0"):
        to_messages(dict(messages=[ASKED, GOOD | {key: value}]))


def test_flags_that_contradict_each_other_are_refused():
    with pytest.raises(SftError, match="message 2 has train True and weight 0, which contradict each other"):
        to_messages(dict(messages=[ASKED, GOOD | dict(train=True, weight=0)]))
    assert to_messages(dict(messages=[ASKED, GOOD | dict(train=True, weight=1, masked=False)]))[1]["train"] is True


def test_a_loss_of_null_is_not_learned_and_other_nulls_are_absent():
    talk = [ASKED | dict(loss=None), BAD | dict(loss=None), ASKED, GOOD | dict(loss=True)]
    assert learned(read(dict(conversations=talk))) == ["right"]
    assert learned(read(dict(messages=[ASKED, GOOD | dict(weight=None, train=None)]))) == ["right"]
    with pytest.raises(SftError, match="no answer that is trained"): read(dict(messages=[ASKED, BAD | dict(loss=None)]))


def test_a_greeting_is_context_unless_a_flag_says_otherwise(tmp_path):
    "Nothing asks for it; ShareGPT's files have many rows that begin so"
    greeting = dict(role="assistant", content="WRONGONE")
    data = read(dict(messages=[greeting, ASKED, GOOD]), dict(messages=[ASKED, GOOD, ASKED, GOOD]))
    assert learned(data) == ["right", "rightright"]
    assert "From all 2 rows; 1 greeting before the first question, not learned" in data.report.summary
    marked = read(dict(messages=[greeting, ASKED, GOOD | dict(loss=True)]))
    assert learned(marked) == ["right"] and not warned(marked)
    for row in ([GOOD, ASKED], [GOOD | dict(train=True), ASKED, GOOD]):
        with pytest.raises(SftError, match="it begins with an answer; a question before the first answer"):
            read(dict(messages=row))
    asked_first = read(dict(messages=[dict(role="system", content="You begin."), GOOD, ASKED, GOOD]))
    assert learned(asked_first) == ["rightright"]   # a system message can make a model say it
    with pytest.raises(SftError, match="refuses this conversation.* Fix: leave the greeting before"):
        read(dict(messages=[greeting, ASKED, GOOD]), chat_template=str(_alternating(tmp_path)))


def _alternating(folder):
    "A template that begins with a question, as Gemma's"
    template = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
                "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    (folder/"alternating.jinja").write_text(template)
    return folder/"alternating.jinja"


def test_an_answer_without_a_flag_beside_marked_ones_is_a_warning():
    "As Arrow writes it, where null and absent are the same"
    rows = [dict(messages=[ASKED, BAD, ASKED, GOOD | dict(loss=True)])] * 2
    for given in (rows, datasets.Dataset.from_list(rows)):
        data = prepare(load_config(task="chat", eval_samples=0), train=given)
        assert warned(data)["train_flags"].says.startswith("2 answers without a flag, or with null")
    only_bad = read(dict(messages=[ASKED, BAD | dict(weight=0), ASKED, GOOD]))
    assert "train_flags" not in warned(only_bad) and learned(only_bad) == ["right"]


def test_an_absent_weight_is_1_as_openai_reads_it():
    data = read(dict(messages=[ASKED, BAD | dict(weight=0), ASKED, GOOD, ASKED, GOOD | dict(weight=1)]))
    assert "train_flags" not in warned(data) and learned(data) == ["rightright"]


def test_a_message_of_another_role_that_is_marked_is_a_warning():
    data = read(dict(messages=[ASKED | dict(train=True), GOOD | dict(train=True)]))
    assert learned(data) == ["right"] and "1 message of other roles" in warned(data)["train_marked"].says
    assert warned(data)["train_marked"].fix.settings == dict(train_on_prompt=True)


@pytest.mark.parametrize("mask", [[0, 1], [0, 0, 0, 1], [False, True], "[0, 1]"])
def test_a_flag_of_the_row_has_an_entry_for_each_message_or_answer(mask):
    data = read(dict(messages=[ASKED, BAD, ASKED, GOOD], loss_mask=mask))
    assert learned(data) == ["right"] and data.train.seen.unread == {}


def test_a_flag_of_the_row_with_other_entries_is_refused():
    row = dict(messages=[ASKED, BAD, ASKED, GOOD], loss_mask=[0, 1, 1])
    found = "loss_mask has 3 entries, and there are 4 messages with 2 answers"
    with pytest.raises(SftError, match=found) as e: read(row)
    assert e.value.fix.settings == dict(ignore_columns=("loss_mask",))
    with pytest.raises(SftError, match="loss_mask has 2 entries"):   # and the messages have it too
        read(dict(messages=[ASKED, BAD, ASKED, GOOD | dict(loss_mask=1)], loss_mask=[0, 1]))
    with pytest.raises(SftError, match="loss_mask is .*, and a row is either learned or not"):
        read(dict(prompt="a?", completion="right", loss_mask=[0, 1]))


@pytest.mark.parametrize("key", LOSS_FLAGS)
def test_a_row_is_left_out_by_its_own_flag(key):
    off, on = (True, False) if key == "masked" else (0, 1)
    data = read(dict(question="a?", answer="WRONGONE") | {key: off}, dict(question="a?", answer="right") | {key: on})
    assert learned(data) == ["right"] and data.dropped[0]["reason"] == f"{key} is {off}"
    with pytest.raises(SftError, match=f"{key} is 0.7, and a row is either learned or not; 0 or 1") as e:
        read(dict(question="a?", answer="right") | {key: .7})
    assert e.value.fix.settings == dict(ignore_columns=(key,))


def test_a_config_of_axolotl_may_name_every_flag():
    from sft_nb.extras.datasets import _LOSS_KEYS
    assert {*_LOSS_KEYS} == {*LOSS_FLAGS} - {"masked"}   # which is the opposite


def test_a_mask_may_mean_two_things():
    assert learned(read(dict(messages=[ASKED, GOOD], mask="User"))) == ["right"]   # NeMo's: whose messages are hidden
    for row, name in ((dict(messages=[ASKED, GOOD], mask=[0, 1]), "mask"),
                      (dict(messages=[ASKED, GOOD | dict(mask=1)]), "messages.mask")):
        with pytest.raises(SftError, match=f"it has {name}, which may mean learned or hidden") as e: read(row)
        assert learned(read(row, **e.value.fix.settings)) == ["right"]


def test_keys_of_parts_and_calls_are_read_or_named():
    call = dict(type="function", function=dict(name="f", arguments="{}", note="x"))
    part = dict(type="text", text="right", cache_control=dict(type="ephemeral"))
    data = read(dict(messages=[ASKED, dict(role="assistant", content=[part], tool_calls=[call])]))
    assert data.train.seen.unread == {"messages.content.cache_control": 1, "messages.tool_calls.note": 1}
    flagged = dict(messages=[ASKED, GOOD | dict(tool_calls=[call | dict(loss=False)])])
    with pytest.raises(SftError, match="it has messages.tool_calls.loss, and a call is learned with its message"):
        read(flagged)


@pytest.mark.parametrize("name, status", [
    ("id", "ok"), ("conversation_id", "ok"), ("num_turns", "ok"), ("source", "ok"), ("token_count", "ok"),
    ("created_at", "ok"), ("openai_moderation", "ok"), ("label_id", "warn"), ("antwort", "warn"),
    ("is_correct", "warn"), ("sample_weights", "warn"), ("loss_value", "warn"),
    ("trained_on", "warn"), ("attention_masking", "warn")])
def test_unread_names_are_harmless_by_a_list_or_a_warning(name, status):
    rows = dict(messages=[ASKED, GOOD]) | {name: "x"}, dict(messages=[ASKED | {name: "x"}, GOOD])
    for row in rows:
        found = next(f for f in read(row).report.findings if f.check == "train_columns")
        assert found.status == status and name in found.says


def test_rows_of_another_split_in_a_training_file_are_a_warning():
    splits = "train", "test", "Validation", "test"
    rows = [dict(question=f"a{i}?", answer="right", split=s) for i, s in enumerate(splits)]
    found = warned(read(*rows))["train_split"]
    assert "split: test in 2 rows, split: Validation in 1 row" in found.says
    assert found.fix.says("shell").endswith(", then --train-file train.jsonl --eval-file held_out.jsonl")
    assert "train_split" not in warned(read(rows[0]))
    for other in (dict(split=3), dict(split=["test"]), dict(is_test=[1, 2]), dict(is_test=False), dict(set="small"),
                  dict(topic="test")):
        assert "train_split" not in warned(read(rows[0] | other))


@pytest.mark.parametrize("row, said", [
    (dict(split="evaluation"), "split: evaluation"), (dict(dataset_split="held-out"), "dataset_split: held-out"),
    (dict(partition="dev"), "partition: dev"),
    (dict(is_test=True), "is_test: True")])
def test_other_names_of_a_split(row, said):
    found = warned(read(dict(question="a?", answer="right") | row, dict(question="b?", answer="right")))
    assert found["train_split"].says.endswith(f"{said} in 1 row")


@pytest.mark.parametrize("row, said", [
    (dict(question="a?", answer="right", is_correct=False), "is_correct: False"),
    (dict(question="a?", answer="right", status="rejected"), "status: rejected"),
    (dict(question="a?", answer="right", metadata=dict(review=dict(decision="Discard"))),
     "metadata.review.decision: Discard"),
    (dict(messages=[ASKED, GOOD | dict(deleted=True)]), "messages.deleted: True"),
    (dict(messages=[ASKED, GOOD | dict(feedback="thumbs_down")]), "messages.feedback: thumbs_down"),
    (dict(messages=[ASKED, GOOD | dict(finish_reason="length")]), "messages.finish_reason: length"),
    (dict(prompt="a?", completion="right", stop_reason="max_tokens"), "stop_reason: max_tokens"),
    (dict(messages=[ASKED, GOOD], toxic=True), "toxic: True"),
    (dict(question="a?", answer="right", is_safe=False), "is_safe: False"),
    (dict(prompt="a?", completion="right", truncated=True), "truncated: True"),
    (dict(question="a?", answer="right", review_result=False), "review_result: False"),
    ({"question": "a?", "answer": "right", "ok?": "nein"}, "ok?: nein"),
    (dict(messages=[ASKED, GOOD], bad_answer=True), "bad_answer: True"),
    (dict(prompt="a?", completion="right", answer="reject", _input_hash=1, _task_hash=2), "answer: reject")])
def test_rows_that_their_columns_call_bad_are_a_warning(row, said):
    other = dict(question="b?", answer="right", is_correct=True, status="approved", sentiment="bad", correct=0,
                 finish_reason="stop", result=False)
    found = warned(read(row, other))["train_rejected"]
    assert found.says == f"rows or answers that a column seems to call bad are trained on: {said} in 1 row"
    assert "write train: false in them, or ignore_columns=" in str(found.fix)
    assert "train_rejected" not in warned(read(other))
    assert "train_rejected" not in warned(read(row | dict(train=False), other))


def test_a_conversation_under_another_task_is_looked_at_too():
    rows = [dict(messages=[ASKED, GOOD | dict(mood="glad"), ASKED, BAD | dict(loss=False)])]
    data = prepare(load_config(task="gsm8k", eval_samples=0), train=rows)
    assert learned(data) == ["right"] and data.train.seen.unread == {"messages.mood": 1}


@pytest.mark.parametrize("row, name", [
    (dict(messages=[ASKED, GOOD | dict(compute_loss=False)]), "messages.compute_loss"),
    (dict(messages=[ASKED, GOOD | dict(skip=True)]), "messages.skip"),
    (dict(messages=[ASKED, GOOD | dict(learn=False)]), "messages.learn"),
    (dict(messages=[ASKED, GOOD | dict(ignore=True)]), "messages.ignore"),
    (dict(messages=[ASKED, GOOD], sample_weight=0.), "sample_weight")])
def test_an_unknown_flag_is_named_with_the_key_that_is_read(row, name):
    found = warned(read(row))["train_columns"]
    assert f"{name} may exclude something from the loss, and is not read" in found.says
    assert str(found.fix).startswith(f"rename {name} to train, with true or false, if it does, or ignore_columns=")


def test_an_end_that_is_excluded_with_the_last_part_is_a_warning():
    content = [dict(type="text", text="right"), dict(type="text", text="BAD", train=False)]
    found = warned(read(dict(messages=[ASKED, dict(role="assistant", content=content)])))["train_ends"]
    assert str(found.fix) == "mark the last part of each answer as learned, if its end is to be"


def test_the_flags_of_a_row_may_be_json_in_a_table():
    for mask in ("[0, 1]", "[false, true]", "[0, 0, 0, 1]"):
        assert learned(read(dict(messages=json.dumps([ASKED, BAD, ASKED, GOOD]), loss_mask=mask))) == ["right"]
    with pytest.raises(SftError, match="loss_mask has 3 entries"):
        read(dict(messages=[ASKED, BAD, ASKED, GOOD], loss_mask="[0, 1, 1]"))


def test_a_column_that_repeats_a_message_is_read():
    "As in UltraChat; a column with another text is named"
    row = dict(messages=[ASKED, GOOD], prompt=ASKED["content"], mood="glad")
    assert read(row).train.seen.unread == {"mood": 1}


def test_a_blank_answer_is_empty_and_its_row_is_named():
    data = read(dict(messages=[ASKED, GOOD]), dict(messages=[ASKED, GOOD, ASKED, dict(role="assistant", content="  ")]))
    assert "1 answer is empty" in warned(data)["train_empty"].says
    assert warned(data)["train_empty"].says.endswith("the first in train rows row 2")
