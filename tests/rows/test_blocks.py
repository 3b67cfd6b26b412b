"""Rows as providers and other tools write them are read as the conversation they are, or refused with what to do."""
import json

import pytest

from sft_nb.report import SftError
from sft_nb.rows.formats import detect, FORMATS, to_messages

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
    vertex=dict(
        systemInstruction=dict(role="system", parts=[dict(text="Use tools.")]),
        tools=[dict(functionDeclarations=[WEATHER])],
        contents=[dict(role="user", parts=[dict(text="Weather?")]),
                  dict(role="model", parts=[dict(text="Looking."), dict(functionCall=dict(
                      id="t1", name="weather", args=ARGUMENTS))]),
                  dict(role="function", parts=[dict(functionResponse=dict(id="t1", response="4 C"))]),
                  dict(role="model", parts=[dict(text="Cold.")])]) if False else None,
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
