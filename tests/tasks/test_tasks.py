"""Answers are parsed as the authors of the data meant them."""
import json

import pytest
from conftest import shared
from hypothesis import given, strategies as st

from sft_nb.base.report import ConfigError, SftError
from sft_nb.config.load import load_config
from sft_nb.config.settings import SETTINGS
from sft_nb.tasks.arithmetic import is_held_out, solve, TASK
from sft_nb.tasks.core import get_task, task_names
from sft_nb.tasks.answers import final_number
from sft_nb.tasks.gsm8k import GSM8K
from sft_nb.extras.tasks.tools import compare_calls


@given(st.integers(-10**9, 10**9))
def test_a_number_is_read_in_every_dress(n):
    for text in (f"#### {n}", f"so <<1+1={n}>>{n} in all", f"It is {n}.", f"#### {n:,}", f"1 and 2\n#### {n}.0"):
        assert final_number(text) == str(n)


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text): assert final_number(text) is None or float(final_number(text)) is not None


@pytest.mark.parametrize("split,n", [("train", 7473), ("test", 1319)])
def test_gsm8k_answers_are_read_and_worth_a_point(split, n):
    rows = [json.loads(line) for line in shared(f"data/gsm8k/{split}.jsonl").open()]
    assert len(rows) == n
    for r in rows:
        assert final_number(r["answer"]) == r["answer"].split("####")[1].strip().replace(",", "")
    assert all(GSM8K().score(r["answer"], r).correct for r in rows[:200])


def test_gsm8k_without_a_hub_says_which_file_to_give():
    with pytest.raises(SftError) as e: GSM8K().rows("train")
    assert e.value.fix.says("shell") == "--train-file path/to/train.jsonl"


def test_gsm8k_asks_the_hub_for_its_two_splits(monkeypatch):
    import datasets
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: [name, config, split])
    splits = {side: GSM8K().rows(side) for side in ("train", "eval")}
    assert splits == dict(train=["openai/gsm8k", "main", "train"], eval=["openai/gsm8k", "main", "test"])


def test_the_split_is_by_problem():
    train = TASK.make_rows(4000, seed=7, evaluation=False)
    test = TASK.make_rows(4000, seed=0, evaluation=True)
    assert not {r["problem"] for r in train} & {r["problem"] for r in test}
    assert all(is_held_out(r["problem"]) for r in test)
    assert not any(is_held_out(r["problem"]) for r in train)


@given(st.integers(0, 10**6))
def test_generated_answers_are_right(seed):
    for r in TASK.make_rows(3, seed=seed, evaluation=False):
        line = r["answer"].split("\n")[-2]
        left, right = line.split(" = ")
        assert eval(left) == int(right) == int(final_number(r["answer"])) == solve(*r["problem"])[1] >= 0


def test_tasks_are_found_by_name_and_by_path():
    assert {"arithmetic", "chat", "gsm8k", "nli", "units_rft"} <= {*task_names()}
    listed = SETTINGS["task"].help.partition(";")[0]
    assert listed.split(", ") == task_names(), "the help of the setting `task` names every task, by name"
    assert get_task("sft_nb.tasks.gsm8k:GSM8K").name == "gsm8k"
    for wrong in ("algebra", "no_such_module:X", "sft_nb.tasks.gsm8k:Nothing"):
        with pytest.raises(ConfigError): get_task(wrong)


# units whose answers are missing, or stand in the reasoning already

def units_of(tmp_path, *rows, task="units", **settings):
    "What is learned from a file of rows, and why the others are dropped"
    import json
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    from sft_nb.tokens.tokenizer import load_tokenizer
    file = tmp_path/"rows.json"
    file.write_text(json.dumps(rows))
    cfg = load_config(task=task, train_file=str(file), eval_samples=0, on_bad_row="drop", **settings)
    data = prepare(cfg, load_tokenizer(cfg))
    ids = [[l for l in x["labels"] if l != -100] for x in data.train.tokens]
    return data.tokenizer.batch_decode(ids, skip_special_tokens=True), data.train.reasons


def test_units_without_a_gold_answer_are_dropped_and_counted(tmp_path):
    rows = [dict(question="How many?", answer=a) for a in ("3000", "", None, "unknown", "<answer>7</answer>")]
    said, reasons = units_of(tmp_path, *rows)
    assert [s.strip() for s in said] == ["<answer>3000</answer>", "<answer>7</answer>"]
    assert reasons == {"empty answer": 2, "its answer is not a number": 1}


def test_reasoning_that_ends_in_its_answer_is_not_answered_twice(tmp_path):
    "Rows that are lists, as [question, 120.0, reasoning]"
    rows = [["2 hours in minutes?", 120.0, "2 * 60 = 120 <answer>120</answer>"],
            ["3 weeks in days?", 21.0, "3 * 7 = 21"], ["1 km in m?", 1000.0, "<answer>10</answer>"]]
    said, reasons = units_of(tmp_path, *rows, task="units_rft", fields=("question=0", "answer=1", "reasoning=2"))
    assert [s.strip() for s in said] == ["2 * 60 = 120 <answer>120</answer>", "3 * 7 = 21 <answer>21.0</answer>"]
    assert reasons == {"its answer is 1000 and its reasoning says 10": 1}


def test_rows_without_a_gold_answer_are_not_evaluated(tmp_path):
    import json
    from sft_nb.config.load import load_config
    from sft_nb.tasks.core import task_of
    from sft_nb.tokens.conversations import read_split
    for task, good, bad in (("units", dict(question="?", answer="1"), dict(question="?", answer="")),
                            ("gsm8k", dict(question="?", answer="#### 1"), dict(question="?", answer=None)),
                            ("chat", dict(prompt="?", completion="1"), dict(prompt="?", completion=" "))):
        file = tmp_path/f"{task}.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in (bad, good, bad)))
        cfg = load_config(task=task, train_file=str(file), eval_file=str(file), eval_samples=9, on_bad_row="drop")
        assert list(read_split(cfg, task_of(cfg), "eval").values()) == [good], task
    file.write_text('{"prompt": 3}\n[1, 2]\n{"prompt": "?", "completion": "1"}\n')
    assert len(read_split(cfg, task_of(cfg), "eval")) == 1


@pytest.mark.parametrize("expected, answer, is_right", [
    ('{"a": 1, "b": [true, null]}', '{"b":[true,null],"a":1}', True),
    ('[{"x": 1, "y": 2}]', '[{"y": 2, "x": 1}]', True),
    ('{"a": 1}', '{"a": true}', False), ('{"a": 1}', '{"a": "1"}', False), ('[1, 2]', '[2, 1]', False),
    ('{"a": 1}', 'Here it is: {"a": 1}', False), ('{"a": 1}', '{"a": 1', False), ("1.0", "1", False),
    ('{"a": 1', '{"a":1', False), ("[" * 9999, "[ " * 9999, False)])
def test_an_answer_in_json_is_right_if_it_says_the_same(expected, answer, is_right):
    assert get_task("chat").score(answer, dict(prompt="?", completion=expected)).correct == is_right


@pytest.mark.parametrize("arguments, right", [(dict(xs=[1, 2, 4]), .75), (dict(xs=[2, 1, 3]), .5), (dict(xs=[]), 1 / 3),
                                              (dict(xs=[1, 2, 3], y="a"), 1.), (dict(y="a"), .4)])
def test_a_list_in_the_arguments_of_a_call_is_right_in_part(arguments, right):
    wanted = [dict(name="f", arguments=dict(xs=[1, 2, 3], y="a"))]
    got = [dict(name="f", arguments=dict(y="a") | arguments)]
    assert compare_calls(got, wanted)["arguments"] == right


CALL = dict(name="weather", arguments=dict(city="Oslo"))
HERMES = [{"from": "human", "value": "Weather in Oslo?"},
          {"from": "gpt", "value": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"},
          {"from": "tool", "value": "<tool_response>\n7 degrees\n</tool_response>"},
          {"from": "gpt", "value": "7 degrees."}]


@pytest.mark.parametrize("row", [dict(question="Weather in Oslo?", answer=json.dumps([CALL])),   # xLAM
                                 dict(conversations=HERMES), dict(conversations=HERMES[:2])])
def test_a_call_that_is_written_as_text_is_wanted_as_a_call(row):
    tools = get_task("tools")
    assert len(tools.messages(row)) == 2   # what follows the last call is left out
    for text, right in ((json.dumps(CALL), True), (f"<tool_call>{json.dumps(CALL)}</tool_call>", True),
                        ("7 degrees.", False), ("", False), (json.dumps(CALL | dict(name="news")), False)):
        assert tools.score(text, row).correct == right, text


def test_an_answer_without_a_call_wants_none():
    row = dict(question="Hi?", answer='Hello, {"city": "Oslo"} is no call.')
    assert get_task("tools").score("Hello.", row).correct and not get_task("tools").score(json.dumps(CALL), row).correct


@pytest.mark.parametrize("columns, languages", [
    ("translation.de translation.en", "from German to English"), ("en_US deu_Latn", "from English to German"),
    ("old_norse text_en", "from Old Norse to English")])
def test_the_languages_of_a_translation_are_those_of_its_columns(columns, languages):
    source, target = columns.split()
    cfg = load_config(task="translate", fields=dict(source=source, target=target))
    found = get_task("translate").with_settings(cfg)
    assert f"the following text {languages}:" in found.messages(dict(source="a", target="b"))[-2]["content"]
