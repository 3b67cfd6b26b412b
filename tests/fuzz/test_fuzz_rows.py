"""Rows of every format with one to three odd places, in files of every kind; and files that are damaged."""
import json
import random

import pytest
from fuzzing import corpus, ends_well, mutate, NO_JSON, SEED
from rows.test_published import ANSWER, CALL, GPT, HUMAN, READ, TOOL, USER, with_number

from sft_nb.config.load import load_config
from sft_nb.rows.settings import FORMATS
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer

CALLS = dict(role="assistant", content="", tool_calls=[dict(id="1", type="function", function=dict(
    name="weather", arguments=dict(city="Oslo")))])
ROWS = dict(
    text=dict(text="Some text of {k}."), tokens=dict(input_ids=[3, 4, 5, 6], labels=[-100, -100, 5, 6]),
    question_answer=dict(question="{k}?", answer="yes"), prompt_completion=dict(prompt="{k}?", completion="yes"),
    chats=dict(prompt=[USER], completion=[ANSWER]), preference=dict(chosen=[USER, ANSWER], rejected=[USER, ANSWER]),
    parts=dict(messages=[dict(role="user", content=[dict(type="text", text="Hi {k}")]), ANSWER]),
    calls=dict(messages=[USER, CALLS, dict(role="tool", tool_call_id="1", content="4 C"), ANSWER], tools=[TOOL]),
    thought=dict(messages=[USER, ANSWER | dict(reasoning_content="Hm.")]), sharegpt=dict(conversations=[HUMAN, GPT]),
    stored_completion=dict(input=[USER], output=dict(choices=[dict(message=ANSWER)])), calls_as_text=dict(text=CALL),
    jeopardy=dict(question="{k}?", category="x", answer="yes")) | {name: row for name, (row, _) in READ.items()}
HOW = [dict(), dict(on_long="cut"), dict(on_long="split"), dict(train_on_prompt=True), dict(train_on_turns="last"),
       dict(reasoning="inline"), dict(reasoning="drop"), dict(chat_template="none"), dict(drop_duplicates=True)]


@pytest.fixture(scope="module")
def tokenizer(): return load_tokenizer(load_config("default", model="tiny"))


def read(tmp_path, tokenizer, lines:list[str], *, data_format="auto", on_bad_row="drop", **how):
    file = tmp_path/"rows.jsonl"
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    cfg = load_config("default", model="tiny", train_file=str(file), eval_samples=0, on_bad_row=on_bad_row, seed=1,
                      data_format=data_format, max_length=256, **how)
    return ends_well(lambda: prepare(cfg, tokenizer), tmp_path)


def with_raw_value(r, line:str)->str:
    "A line of JSON with a value that Python's writer would not write"
    ends = [k for k, c in enumerate(line) if c in ",}]"]
    at = r.choice(ends) if ends else len(line)
    return line[:at] + r.choice((",", ":", "")) + r.choice(NO_JSON) + line[at:]


@pytest.mark.parametrize("name", ROWS)
def test_rows(tmp_path, tokenizer, name):
    r = random.Random(f"{SEED} {name}")
    for k in range(6):
        rows = [mutate(r, with_number(ROWS[name], k), words=[f for some in FORMATS.values() for f in some])
                for k in range(4)]
        lines = [json.dumps(row) for row in [with_number(ROWS[name], 9), *rows]]
        if k == 5: lines[-1] = with_raw_value(r, lines[-1])
        how = dict(on_bad_row="error" if k == 4 else "drop", data_format=r.choice(("auto", "auto", *FORMATS)))
        read(tmp_path, tokenizer, lines, **how, **r.choice(HOW))


@pytest.mark.parametrize("kept", corpus("rows"), ids=str)
def test_rows_that_once_failed(tmp_path, tokenizer, kept):
    read(tmp_path, tokenizer, kept["lines"], **kept.get("settings", {}))
