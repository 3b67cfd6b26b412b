"""Every spelling of a conversation gives the same messages and tokens."""
import re

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.readers import to_messages
from sft_nb.tokens.prepare import prepare


def test_all_spellings_of_a_conversation_are_the_same_tokens(tokenizer):
    talk = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
    rows = [
        dict(messages=talk),
        dict(conversations=[{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]),
        dict(instruction="1+1?", input="", output="2"),
        dict(prompt="1+1?", completion="2"),
        dict(prompt=talk[:1], completion=talk[1:]),
        dict(prompt="1+1?", response="2"),
        dict(question="1+1?", answer="2")]
    ids = prepare(load_config(eval_samples=0), tokenizer, train=[rows[0]]).train.tokens[0]
    tokens = dict(input_ids=ids["input_ids"], labels=ids["labels"])
    data = prepare(load_config(task="chat", eval_samples=0), tokenizer, train=[*rows, tokens])
    assert all(x == ids for x in data.train.tokens) and len(data.train.tokens) == 8
    assert tokenizer.decode([i for i in ids["labels"] if i != -100]) == "2<|im_end|>"


@pytest.mark.parametrize("row", [None, "a text", [dict(question="1+1?", answer="2")]])
def test_what_is_no_row(row):
    for format in ("auto", "question_answer"):
        with pytest.raises(SftError, match="row: it is a .*; a dict with the fields of one row"):
            to_messages(row, format=format)


@pytest.mark.parametrize("row", [dict(messages=10**5000), dict(question="1+1?", answer=10**5000)])
def test_a_number_that_python_does_not_print(row):
    with pytest.raises(SftError, match="is int with too many digits; a "): to_messages(row)


@pytest.mark.parametrize("messages, says", [
    ("hello", "messages is 'hello'; a list"), ("[{", "messages cannot be read as JSON"), ("", "messages is ''; a list"),
    ('{"role": "user"}', "a list")])
def test_messages_that_are_a_text(messages, says):
    "A list that is written as JSON is read; any other text is no list"
    with pytest.raises(SftError, match=re.escape(says)): to_messages(dict(messages=messages))
