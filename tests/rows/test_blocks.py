"""Rows as providers and other tools write them are read as the conversation they are, or refused with what to do."""
import copy
import datetime
import json

import pytest

from sft_nb.base.report import SftError
from sft_nb.rows.settings import FORMATS
from sft_nb.rows.readers import detect, to_messages
from sft_nb.extras.tool_calls import call_flaws

WEATHER = dict(name="weather", description="d", parameters=dict(type="object"))
TOOLS = [dict(type="function", function=WEATHER)]
WANTED = [   # system, question, words and a call, its result, answer
    dict(role="system", content="Use tools.", tools=TOOLS), dict(role="user", content="Weather?"),
    dict(role="assistant", content="Looking.", tool_calls=[
        dict(type="function", function=dict(name="weather", arguments=dict(city="Oslo")), id="t1")]),
    dict(role="tool", content="4 C", tool_call_id="t1"), dict(role="assistant", content="Cold.")]
ASKED, ARGUMENTS = dict(role="user", content="Weather?"), dict(city="Oslo")
SCHEMA = {k: v for k, v in WEATHER.items() if k != "parameters"}
COLD = dict(role="assistant", content="Cold.")


def text(value): return dict(type="text", text=value)


ROWS = dict(
    openai=dict(system="Use tools.", tools=TOOLS, messages=[
        ASKED, dict(role="assistant", content="Looking.", tool_calls=[
            dict(id="t1", type="function", function=dict(name="weather", arguments=json.dumps(ARGUMENTS)))]),
        dict(role="tool", tool_call_id="t1", content="4 C"), COLD]),
    anthropic=dict(system="Use tools.", tools=[SCHEMA | dict(input_schema=WEATHER["parameters"])], messages=[
        ASKED, dict(role="assistant", content=[text("Looking."), dict(type="tool_use", id="t1", name="weather",
                                                                     input=ARGUMENTS)]),
        dict(role="user", content=[dict(type="tool_result", tool_use_id="t1", content=[text("4 C")])]),
        dict(role="assistant", content=[text("Cold.")])]),
    bedrock=dict(
        schemaVersion="bedrock-conversation-2024", system=[dict(text="Use tools.")],
        toolConfig=dict(tools=[dict(toolSpec=SCHEMA | dict(inputSchema=dict(json=WEATHER["parameters"])))]),
        messages=[dict(role="user", content=[dict(text="Weather?")]),
                  dict(role="assistant", content=[dict(text="Looking."), dict(toolUse=dict(
                      toolUseId="t1", name="weather", input=ARGUMENTS))]),
                  dict(role="user", content=[dict(toolResult=dict(toolUseId="t1", content=[dict(text="4 C")]))]),
                  dict(role="assistant", content=[dict(text="Cold.")])]),
    llama_factory_v1=dict(tools=json.dumps(TOOLS), messages=[
        dict(role="system", content=[dict(type="text", value="Use tools.")]),
        dict(role="user", content=[dict(type="text", value="Weather?")]),
        dict(role="assistant", content=[dict(type="text", value="Looking."), dict(
            type="tool_call", value=json.dumps(dict(id="t1", name="weather", arguments=ARGUMENTS)))]),
        dict(role="tool", tool_call_id="t1", content=[dict(type="text", value="4 C")]), COLD]),
    responses=dict(tools=[dict(type="function", **WEATHER)], input=[
        dict(role="system", content="Use tools."), ASKED, dict(role="assistant", content="Looking."),
        dict(type="function_call", call_id="t1", name="weather", arguments=json.dumps(ARGUMENTS)),
        dict(type="function_call_output", call_id="t1", output="4 C")],
        output=[dict(type="message", role="assistant", content=[dict(type="output_text", text="Cold.")])]),
    preference=dict(input=dict(tools=TOOLS, messages=[
        dict(role="system", content="Use tools."), ASKED,
        dict(role="assistant", content="Looking.", tool_calls=[
            dict(id="t1", function=dict(name="weather", arguments=ARGUMENTS))]),
        dict(role="tool", tool_call_id="t1", content="4 C")]),
        preferred_output=[COLD], non_preferred_output=[dict(role="assistant", content="Hot.")]))


@pytest.mark.parametrize("name", ROWS)
def test_every_spelling_of_a_conversation_with_a_call_is_the_same(name):
    found = to_messages(ROWS[name])
    assert [{k: v for k, v in m.items() if k != "train"} for m in found] == WANTED
    learned = [m["content"] for m in found if m["role"] == "assistant" and m.get("train", True)]
    assert learned == (["Cold."] if "input" in ROWS[name] else ["Looking.", "Cold."])   # an input is a prompt


def test_vertex_names_a_call_by_its_function():
    row = dict(
        systemInstruction=dict(role="system", parts=[dict(text="Use tools.")]),
        tools=[dict(functionDeclarations=[WEATHER])],
        contents=[dict(role="user", parts=[dict(text="Weather?")]),
                  dict(role="model", parts=[dict(text="hm", thought=True), dict(text="Looking."),
                                            dict(functionCall=dict(name="weather", args=ARGUMENTS))]),
                  dict(role="function", parts=[dict(functionResponse=dict(name="weather", response=dict(celsius=4)))]),
                  dict(role="model", parts=[dict(text="Cold.")])])
    call = dict(type="function", function=dict(name="weather", arguments=ARGUMENTS))
    assert detect(row) == "vertex"
    assert to_messages(row) == [
        *WANTED[:2], dict(role="assistant", content="Looking.", reasoning_content="hm", tool_calls=[call]),
        dict(role="tool", content='{"celsius": 4}', name="weather"), COLD]


def test_calls_in_messages_of_their_own_join_the_answer_before_them():
    "ms-swift's, and OpenAI's older function_call"
    calls = [dict(role="tool_call", content=json.dumps(dict(name="weather", arguments=dict(city=c)))) for c in "ab"]
    answers = [dict(role="tool_response", content="4 C"), COLD]
    for before in ([], [dict(role="assistant", content="Looking.")]):
        found = to_messages(dict(messages=[ASKED, *before, *calls, *answers]))
        assert [m["role"] for m in found] == ["user", "assistant", "tool", "assistant"]
        assert [c["function"]["arguments"]["city"] for c in found[1]["tool_calls"]] == ["a", "b"]
    hidden = to_messages(dict(messages=[ASKED, calls[0] | dict(loss=False), calls[1], *answers]))
    assert [m.get("train") for m in hidden] == [None, False, None, None, None]   # their flags differ


def test_olmos_tools_and_calls():
    rows = [dict(role="system", content="Hi", functions=json.dumps([WEATHER]), function_calls=None), ASKED,
            dict(role="assistant", content=None, function_calls='weather(city="Oslo", days=[1, 2])'),
            dict(role="environment", content="4 C"), COLD]
    found = to_messages(dict(messages=rows))
    assert found[0]["tools"] == TOOLS and [m["role"] for m in found][-2:] == ["tool", "assistant"]
    assert found[2]["tool_calls"][0]["function"]["arguments"] == dict(city="Oslo", days=[1, 2])
    for calls in ("weather(Oslo)", "weather('Oslo')", "not a call", "weather(city=Oslo)",
                  f"weather(days={'-' * 20_000}1)"):
        with pytest.raises(SftError, match="function_calls of message 2 is"):
            to_messages(dict(messages=[ASKED, dict(role="assistant", content="", function_calls=calls)]))


@pytest.mark.parametrize("arguments, found", [
    (json.dumps(json.dumps(ARGUMENTS)), None), (json.dumps(json.dumps(json.dumps(ARGUMENTS))), None),
    ("", {}), (None, {}), ("Oslo", "cannot be read as JSON"), ('"Oslo"', "cannot be read as JSON"),
    ("[1]", "the arguments in message 2 are .1.; an object"), (3, "the arguments in message 2 are 3; an object")])
def test_arguments_are_an_object_however_often_they_were_encoded(arguments, found):
    call = dict(role="assistant", tool_calls=[dict(function=dict(name="weather", arguments=arguments))])
    def read(): return to_messages(dict(messages=[ASKED, call]))[1]["tool_calls"][0]["function"]["arguments"]
    if not isinstance(found, str): assert read() == (ARGUMENTS if found is None else found)
    else:
        with pytest.raises(SftError, match=found): read()


def test_functions_beside_a_conversation_are_its_tools():
    row = dict(messages=[ASKED, COLD], functions=[WEATHER])
    assert to_messages(row)[0]["tools"] == TOOLS
    assert to_messages(row | dict(tools=[]))[0]["tools"] == TOOLS
    assert to_messages(dict(question="Weather?", answer="Cold.", functions=json.dumps([WEATHER])))[0]["tools"] == TOOLS
    with pytest.raises(SftError, match="functions are .3.; a list of objects"): to_messages(row | dict(functions=[3]))


def test_a_list_written_by_python_is_read():
    "Cells of a table that pandas wrote; an array's text is no Python, and is refused"
    assert to_messages(dict(messages=str([ASKED, COLD]))) == [ASKED, COLD]
    with pytest.raises(SftError, match="messages cannot be read as JSON"):
        to_messages(dict(messages="[{'role': 'user', 'content': 'a'}\n {'role': 'assistant', 'content': 'b'}]"))


CHOSEN, REJECTED = {"from": "gpt", "value": "Cold."}, {"from": "gpt", "value": "Hot."}
HISTORY = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Weather?"}]


@pytest.mark.parametrize("row", [
    dict(conversations=HISTORY, chosen=CHOSEN, rejected=REJECTED),
    dict(messages=HISTORY, chosen="Cold.", rejected="Hot."),
    dict(conversations=HISTORY, chosen=[CHOSEN], rejected=[REJECTED]),
    dict(messages=[*HISTORY, CHOSEN], chosen="Cold.", rejected="Hot."),
    dict(messages=[*HISTORY, CHOSEN], chosen=[*HISTORY, CHOSEN], rejected=[*HISTORY, REJECTED])])
def test_of_a_preference_the_history_is_the_prompt(row):
    found = to_messages(row)
    assert [(m["content"], m.get("train", True)) for m in found] == [
        ("Hi", True), ("Hello", None), ("Weather?", True), ("Cold.", True)]


def test_a_preference_whose_conversation_has_an_answer_is_refused():
    with pytest.raises(SftError, match="conversations end with an answer, and chosen is another one") as e:
        to_messages(dict(conversations=[*HISTORY, REJECTED], chosen=CHOSEN, rejected=REJECTED))
    assert e.value.fix.settings == dict(data_format="sharegpt")


@pytest.mark.parametrize("row, what", [
    (dict(message_id="b", parent_id="a", text="4", role="assistant", lang="en"), "one message of a tree"),
    (dict(message_tree_id="a", prompt=dict(text="Hi", replies=[])), "a tree of messages"),
    (dict(id=1, annotations=[dict(result=[])], data=dict(text="Hi")), "a task of Label Studio"),
    (dict(id=1, fields=dict(text="Hi"), responses=dict(label=[])), "a record of Argilla"),
    (dict(role="user", content="Hi"), "one message, and not a conversation")])
def test_exports_that_are_no_conversation_are_refused_by_name(row, what):
    with pytest.raises(SftError, match=what) as e: to_messages(row)
    assert "no_format" not in str(e.value) and e.value.fix


@pytest.mark.parametrize("block", [
    dict(type="image", source={}), dict(type="image_url", image_url=dict(url="x")), dict(inlineData=dict(data="x")),
    dict(image=dict(format="png")), dict(type="input_audio", input_audio={}), 3, dict(type="tool_use")])
def test_blocks_that_are_no_text_are_refused(block):
    with pytest.raises(SftError, match="content of message 1 is|the call in message 1"):
        to_messages(dict(messages=[dict(role="user", content=[block]), COLD]))


def test_an_annotation_that_is_a_list_of_one_text_is_that_text():
    "As Argilla's flat records have them; of several answers, none is chosen"
    row = dict(question="Hi", answer=["pos"])
    assert to_messages(row)[1]["content"] == "pos"
    with pytest.raises(SftError, match="the answer is .*; a string"): to_messages(row | dict(answer=["pos", "neg"]))


def test_formats_that_hold_messages_need_messages():
    "A column called contents or input that is text is none of them"
    for row in (dict(contents="Hi", label="x"), dict(input="Hi", output="Hello"), dict(input=[], output="x")):
        assert detect(row) is None
    assert {"vertex", "stored_completion", "openai_preference"} < {*FORMATS}


def test_blocks_that_are_a_prompt_or_a_completion():
    row = dict(prompt=[text("Weather"), text("?")], completion=[text("Cold."), text(" Very.")])
    assert to_messages(row) == [ASKED, COLD | dict(content="Cold. Very.")]
    flagged = to_messages(row | dict(completion=[text("BAD") | dict(train=False), text("good")]))
    assert flagged[1]["train_parts"] == [["BAD", False], ["good", True]]
    with pytest.raises(SftError, match="the answer has parts with flags"):
        to_messages(dict(question="a?", answer=[text("BAD") | dict(weight=0), text("good")]))


def test_definitions_of_tools_may_be_texts():
    function = WEATHER | dict(parameters=json.dumps(WEATHER["parameters"]))
    for tools in ([json.dumps(WEATHER)], json.dumps([WEATHER]), [dict(type="function", function=function)], [function]):
        assert to_messages(dict(messages=[ASKED, COLD], tools=tools))[0]["tools"] == TOOLS
    with pytest.raises(SftError, match="parameters in tools cannot be read as JSON"):
        to_messages(dict(messages=[ASKED, COLD], tools=[WEATHER | dict(parameters="{")]))


def test_reasoning_that_a_provider_keeps_to_itself_is_no_answer():
    "OpenAI's items without a summary, Anthropic's encrypted blocks"
    answer = dict(type="message", role="assistant", content=[dict(type="output_text", text="Cold.")])
    assert to_messages(dict(input=[ASKED], output=[dict(type="reasoning", summary=[]), answer])) == [ASKED, COLD]
    blocks = [dict(type="redacted_thinking", data="EmwK"), text("Cold.")]
    assert to_messages(dict(messages=[ASKED, dict(role="assistant", content=blocks)])) == [ASKED, COLD]


def places(x, path=()):
    "The path of each value in a row, nested ones too"
    if path: yield path
    for key in range(len(x)) if isinstance(x, list) else x if isinstance(x, dict) else ():
        yield from places(x[key], (*path, key))


def replaced(row, path, value):
    row = inner = copy.deepcopy(row)
    for key in path[:-1]: inner = inner[key]
    inner[path[-1]] = value
    return row


@pytest.mark.parametrize("kind", ROWS)
def test_any_value_may_be_of_another_type(kind):
    "Every row is read or refused, and no other exception is raised"
    values = [None, [], {}, "", 3, .5, True, "x", "[{}]", [None], [[]], [3], {"a": 1}, {"type": ["text"]}, {"role": {}},
              {"name": ["f"]}, {"parts": 3}, {"functionDeclarations": 3}, [{"type": {}}], [datetime.date(2026, 1, 2)]]
    n_read = 0
    for path in places(ROWS[kind]):
        for value in values:
            try: messages = to_messages(replaced(ROWS[kind], path, value))
            except SftError: continue
            if messages: call_flaws(messages)
            n_read += 1
    assert n_read > 9


def test_the_input_of_a_preference_may_be_a_list_of_messages():
    row = dict(preferred_output=[COLD], non_preferred_output=[COLD | dict(content="Hot.")])
    for asked in ([ASKED], dict(messages=[ASKED])): assert to_messages(row | dict(input=asked)) == [ASKED, COLD]
