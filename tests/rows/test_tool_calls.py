"The calls of a conversation against its tools"
import copy
import json
import subprocess

import pytest

from sft_nb.config.load import load_config
from sft_nb.extras.tool_calls import argument_problem, call_flaws
from sft_nb.tokens.prepare import prepare

SCHEMA = dict(type="object", required=["a"], properties=dict(a=dict(type="integer")))
TOOL = dict(type="function", function=dict(name="f", parameters=SCHEMA))
ROW = dict(tools=[TOOL], messages=[
    dict(role="user", content="Ask f."),
    dict(role="assistant", content="", tool_calls=[
        dict(id="c1", type="function", function=dict(name="f", arguments=json.dumps(dict(a=1))))]),
    dict(role="tool", tool_call_id="c1", content="3"),
    dict(role="assistant", content="It is three.")])


def found(tokenizer, *changed)->dict[str,str]:
    data = prepare(load_config(task="chat"), tokenizer, train=[ROW, *changed])
    names = ("unknown_function", "arguments", "result_without_call", "call_without_result")
    return {f.check.removeprefix("train_"): f.says for f in data.report.findings if f.check[6:] in names}


def change(edit)->dict:
    row = copy.deepcopy(ROW)
    edit(row["messages"])
    return row


def with_call(**more):
    def edit(messages): messages[1]["tool_calls"][0]["function"] |= more
    return change(edit)


@pytest.mark.parametrize("row, name, expected", [
    (with_call(name="g"), "unknown_function", "g (train rows row 2)"),
    (with_call(arguments='{"a": "x"}'), "arguments", "f: a is 'x', not integer"),
    (with_call(arguments='{"a": 1, "b": 1}'), "arguments", "f: there is no parameter b"),
    (with_call(arguments="{}"), "arguments", "f: a is missing"),
    (change(lambda messages: messages[2].update(tool_call_id="zz")), "result_without_call", "zz"),
    (change(lambda messages: messages.pop(2)), "call_without_result", "f")])
def test_what_does_not_fit_is_counted(row, name, expected, tokenizer):
    says = found(tokenizer, row)
    assert "1 of 2 rows" in says[name] and expected in says[name]


def test_what_fits_or_cannot_be_checked_is_not_flagged(tokenizer):
    without = {k: v for k, v in with_call(name="g").items() if k != "tools"}
    ends_with_call = change(lambda messages: messages.__delitem__(slice(2, None)))
    xlam = copy.deepcopy(ROW) | dict(tools=[dict(name="f", parameters=dict(a=dict(type="int")))])
    assert found(tokenizer, without, ends_with_call, xlam) == {}


def test_schemas_with_parts_that_are_not_checked():
    assert argument_problem(dict(a="x"), dict(anyOf=[SCHEMA])) == ""
    assert argument_problem(dict(a=[dict(b=1)]), dict(type="object", properties=dict(a=dict(
        type="array", items=dict(type="object", properties=dict(b=dict(type="string"))))))) == "a[0].b is 1, not string"
    assert argument_problem(dict(a=True), SCHEMA) == "a is True, not integer"
    assert argument_problem(dict(a=2.0), SCHEMA) == ""


def test_null_is_the_same_as_no_argument():
    "A table gives each call the arguments of all"
    assert argument_problem(dict(a=1, b=None), SCHEMA) == ""
    assert argument_problem(dict(a=None), SCHEMA) == "a is None, not integer"


def test_definitions_without_a_name_or_with_other_types():
    messages = [dict(role="user", content="Hi"), dict(role="assistant", content="Hello")]
    for name in (None, ["f"], {}): assert call_flaws([messages[0] | dict(tools=[dict(name=name)]), messages[1]]) == {}
    assert argument_problem(dict(a=1), SCHEMA | dict(required=[{}, "b"])) == "b is missing"


def test_rows_whose_calls_do_not_fit_are_left_out_by_one_command(tmp_path):
    rows = [change(lambda messages: None), with_call(name="g"), change(lambda messages: messages.pop(2))]
    (tmp_path/"calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = dict(task="chat", train_file=str(tmp_path/"calls.jsonl"), eval_samples=0)
    says = {f.check: str(f.fix) for f in prepare(load_config(**cfg)).report.findings}
    fix = says["train_unknown_function"]
    assert fix == says["train_call_without_result"] and fix.startswith("correct these rows, or sed -n '2p;3p' ")
    assert fix.endswith("drop_rows broken_calls.jsonl (all 2 rows with a flaw in their calls)")
    command = fix.partition("or ")[2].partition(", then")[0]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    left = prepare(load_config(**cfg, drop_rows=str(tmp_path/"broken_calls.jsonl")))
    assert len(left.train) == 1 and "train_unknown_function" not in {f.check for f in left.report.findings}
