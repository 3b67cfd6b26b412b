"""What a setting or an argument names must be there, and a mistake is reported as what it is."""
import json

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.extras.proposals import propose_fields
from sft_nb.rows.readers import value_at
from sft_nb.tokens.prepare import prepare

ROWS = [dict(prompt=f"say {k}", completion=f"bad {k}", completion_clean=f"good {k}") for k in range(6)]


def settings(**more): return load_config("default", **more)


def test_a_typo_in_fields_is_no_other_column():
    "`completion` is a column itself, so every row can be read without the one that was meant"
    cfg = settings(fields=("completion=completion_claen",))
    with pytest.raises(ConfigError, match="no row has the column completion_claen for completion; did you mean") as e:
        prepare(cfg, train=ROWS)
    assert e.value.fix.settings == dict(fields=("completion=completion_clean",))
    right = prepare(load_config(cfg, **e.value.fix.settings), train=ROWS)
    assert "good 0" in right.tokenizer.decode(right.train.tokens[0]["input_ids"])


def test_a_column_that_some_rows_have_is_none_that_is_missing():
    rows = [dict(prompt="a", completion="b"), dict(prompt="c", reply="d")] * 3
    assert len(prepare(settings(fields=("completion=reply",)), train=rows).train.tokens) == 6
    few = settings(fields=("completion=reply",), max_samples=1)   # rows that were not read may have it
    assert len(prepare(few, train=rows).train.tokens) == 1


def test_a_column_without_a_near_name():
    with pytest.raises(ConfigError, match="no row has the column zzz for prompt; the columns are") as e:
        prepare(settings(fields=("prompt=zzz",)), train=ROWS)
    assert e.value.fix.settings == dict(fields=None)


def test_a_place_inside_a_column():
    rows = [dict(about="a sentence", chats=[dict(messages=[])])]
    with pytest.raises(SftError, match="there is nothing at chats.list.messages for messages .*; chats is a list"):
        prepare(settings(fields=("messages=chats.list.messages",)), train=rows)


def test_columns_are_guessed_by_their_texts_and_not_by_their_place():
    row = {"Ticket-Nr.": "1000", "Erstellt am": "01.02.2026", "Betreff": "Drucker",
           "Kundenanfrage": "Der Drucker im zweiten Stock druckt nicht mehr",
           "Loesungsweg": "Bitte das Kabel neu stecken", "Status": "offen"}
    def proposed(row, *fields): return propose_fields(row, fields).settings["fields"]
    assert proposed(row, "question", "answer") == ("question=Kundenanfrage", "answer=Loesungsweg")
    languages = dict(english="one two", arabic="x")
    assert proposed(languages, "source", "target") == ("source=english", "target=arabic")
    numbers = {"id": "7", "1st": "5", "2nd": "6"}
    assert propose_fields(numbers, ("question", "answer")) is None   # a number is no question, unless its name tells


def test_of_one_bad_row_among_others_the_fix_is_to_leave_it_out():
    rows = [dict(prompt="a", completion="b"), dict(prompt="c", completion=["d", "e"])]
    with pytest.raises(SftError) as e: prepare(settings(), train=rows)
    assert "on_bad_row" in str(e.value.fix)
    with pytest.raises(SftError) as e: prepare(settings(), train=rows[1:])   # all rows may be like that
    assert "on_bad_row" not in str(e.value.fix)


def test_bad_lines_of_a_file_are_reported_in_the_same_way(tmp_path):
    file = tmp_path/"rows.jsonl"
    file.write_text("\n".join([json.dumps(ROWS[0]), "{broken"]))
    with pytest.raises(SftError, match="rows.jsonl line 2: this is not valid JSON") as e:
        prepare(settings(train_file=str(file)))
    assert "on_bad_row" in str(e.value.fix)


@pytest.mark.parametrize("way, name", [(dict(eval_fraction=.2), "eval_fraction"), (dict(eval_rows=4), "eval_rows")])
def test_held_out_rows_of_which_none_is_left_are_named_as_such(way, name):
    rows = [dict(prompt=f"say {k}", completion=f"good {k}") for k in range(40)]
    kept = prepare(settings(**way), train=rows)
    held_out = {place for place, _ in kept.eval.source}
    assert held_out
    spoilt = [dict(r, completion="") if f"train rows row {k + 1}" in held_out else r for k, r in enumerate(rows)]
    with pytest.raises(SftError, match="held out is left") as e: prepare(settings(**way), train=spoilt)
    assert e.value.where == name and name in e.value.fix.settings


def test_the_older_form_of_a_call():
    call = dict(name="weather", arguments='{"city": "Oslo"}')
    tools = [dict(type="function", function=dict(name="weather", parameters=dict(type="object", properties={})))]
    old = [dict(role="user", content="Rain?"), dict(role="assistant", content=None, function_call=call)]
    new = [old[0], dict(role="assistant", content=None, tool_calls=[dict(type="function", function=call)])]
    one, other = (prepare(settings(), train=[dict(messages=m, tools=tools)]) for m in (old, new))
    assert one.train.tokens[0] == other.train.tokens[0]


@pytest.mark.parametrize("rows", ["rows.jsonl", [dict(prompt="a", completion="b")]])
def test_rows_in_the_place_of_a_tokenizer(rows):
    with pytest.raises(ConfigError, match="the second argument is a tokenizer"): prepare(settings(), rows)


def test_a_folder_of_notes(tmp_path):
    (tmp_path/"a.rst").write_text("a")
    with pytest.raises(SftError, match="no file with rows in this folder, only .rst") as e:
        prepare(settings(train_file=str(tmp_path)))
    assert "*.txt" in str(e.value.fix)


def test_a_split_of_a_file(tmp_path):
    file = tmp_path/"rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    with pytest.raises(SftError, match="there is no such file") as e:
        prepare(settings(train_file=str(file), eval_file=f"{file}:test"))
    assert e.value.fix.settings["eval_fraction"] == .05   # and not the training rows


@pytest.mark.parametrize("way", [{}, dict(eval_fraction=.2), dict(eval_rows=3)])
def test_no_rows_at_all(way):
    with pytest.raises(SftError, match="there are none: it is empty"): prepare(settings(**way), train=[])


def test_a_path_with_a_mark_too_many_names_nothing():
    row = dict(a=dict(b=[1, 2]))
    assert [value_at(row, path) for path in ("a.b", "a.b[1]")] == [[1, 2], 2]
    assert [value_at(row, path) for path in ("a.b]", "a..b", "a.b[x]", "a.b[1")] == [None] * 4
