"""Reasoning and calls in one turn: thought, call, result, thought, answer. What is learned of each message begins where
the prompt of generation ends, with its own thought in the tags of the template, in front of its calls."""
import pytest
from reasoning_templates import chatml, END, HARMONY, MESSAGES, OFF, SPECIAL, when

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.messages import read_blocks
from sft_nb.rows.readers import to_messages
from sft_nb.tokens.encode import encode
from sft_nb.tokens.tokenizer import load_tokenizer

# writes the text of a message behind its calls, reasoning under no key, and takes its own tags out of a text
CALLS_FIRST = (MESSAGES + "{%- if m.role == 'tool' %}{{- '<result>' + m.content + '</result>' }}{%- else %}"
               "{{- '<|turn>' + m.role + '\\n' }}{%- for c in m.tool_calls or [] %}"
               "{{- '<call>' + c.function.name + (c.function.arguments | tojson) + '</call>' }}{%- endfor %}"
               "{{- (m.content or '').split('<channel|>')[-1] }}"
               "{{- (tools | tojson) if tools and loop.first }}"
               "{{- '<|result>' if m.tool_calls else '<turn|>\\n' }}{%- endif %}" + END
               + "{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|turn>assistant\\n' }}"
               + when(OFF, "{{- '<|channel>thought\\n<channel|>' }}") + "{%- endif %}")
# drops the reasoning before a call once there is an answer, so that no prompt is the beginning of the whole
DROPS = HARMONY.replace("{%- if m.thinking %}", "{%- if m.thinking and (loop.last or messages[-1].role == 'tool') %}")
TOKENS = [*SPECIAL, "<|turn>", "<turn|>", "<|result>", "<channel|>"]
TOOL = dict(type="function", function=dict(name="add", description="adds", parameters=dict(type="object")))
CALL = dict(type="function", id="abcdef012", function=dict(name="add", arguments=dict(a=1)))


def agent(*, inline=False, text=""):
    "Thought and call, result, thought and answer"
    def thinks(thought, content, **more):
        if inline: return dict(role="assistant", content=f"<think>\n{thought}\n</think>\n\n{content}", **more)
        return dict(role="assistant", content=content, reasoning_content=thought, **more)
    return [dict(role="user", content="1+1?", tools=[TOOL]), thinks("I add them.", text, tool_calls=[CALL]),
            dict(role="tool", name="add", tool_call_id="abcdef012", content="2"), thinks("It is two.", "Two.")]


def learned(template, messages, **settings):
    tokenizer = load_tokenizer(load_config(None, chat_template=template, **settings))
    tokenizer.add_special_tokens(dict(additional_special_tokens=TOKENS))
    found = []
    for ids, labels in encode({"row": messages}, tokenizer):
        first = next(k for k, label in enumerate(labels) if label != -100)
        found.append((tokenizer.decode(ids[:first]), tokenizer.decode([i for i in labels if i != -100])))
    return found


@pytest.mark.parametrize("text", ["", "Let me see."])
@pytest.mark.parametrize("how", [dict(inline=False), dict(inline=True)], ids=["beside", "inside"])
def test_a_template_that_writes_text_behind_calls(how, text):
    settings = {} if how["inline"] else dict(reasoning="inline")
    (_, first), (before, last) = learned(CALLS_FIRST, agent(**how, text=text), **settings)
    assert first.startswith("<|channel>thought\nI add them.\n<channel|><call>add") and first.count("<channel|>") == 1
    assert last == "<|channel>thought\nIt is two.\n<channel|>Two.<turn|>" and before.endswith("<result>2</result>")
    assert "I add them." not in before and text in first


def test_without_a_key_the_fix_that_is_proposed_writes_this():
    with pytest.raises(SftError) as e: learned(CALLS_FIRST, agent())
    assert e.value.fix.settings == dict(reasoning="inline")


def test_a_prompt_that_has_closed_the_block_takes_no_other():
    rows = [agent(inline=True)[0], agent(inline=True)[-1]]
    (_, label), = learned(CALLS_FIRST, rows, chat_template_kwargs=dict(enable_thinking=True))
    assert label == "<|channel>thought\nIt is two.\n<channel|>Two.<turn|>"
    with pytest.raises(SftError) as e: learned(CALLS_FIRST, rows, chat_template_kwargs=dict(enable_thinking=False))
    assert e.value.fix.settings == dict(chat_template_kwargs=("enable_thinking=True",))


@pytest.mark.parametrize("inline", [False, True])
def test_channels_begin_with_their_header_where_earlier_reasoning_is_dropped(inline):
    (_, first), (before, last) = learned(DROPS, agent(inline=inline))
    assert first.startswith("<|channel|>analysis<|message|>I add them.<|end|><|start|>assistant to=functions.add")
    assert before.endswith("<|start|>assistant")
    assert last.startswith("<|channel|>analysis<|message|>It is two.<|end|><|start|>assistant<|channel|>final")
    plain = [*agent()[:-1], dict(role="assistant", content="Two.")]
    (_, _), (before, last) = learned(DROPS, plain)
    assert before.endswith("<|start|>assistant") and last.startswith("<|channel|>final<|message|>Two.<")


def test_an_empty_block_and_a_tag_in_both_places_are_written_once():
    question = dict(role="user", content="1+1?")
    empty = chatml("{{- '<think></think>' }}", "")
    (_, label), = learned(empty, [question, dict(role="assistant", content="<think>Hm.</think>Two.")])
    assert label == "<think>Hm.</think>Two.<|im_end|>"
    both = chatml("{{- '</think>' }}", "{{- '<think></think>' }}")
    (before, label), = learned(both, [question, dict(role="assistant", content="Two.")])
    assert before.endswith("<think></think>") and label == "Two.<|im_end|>"


def test_a_special_tag_that_is_written_twice_is_refused():
    twice = chatml("{{- '[THINK]a[/THINK]' }}", "")
    twice = twice.replace("{{- '<|im_end|>\\n' }}", "{{- '[THINK]<|im_end|>\\n' }}", 1)
    with pytest.raises(SftError, match=r"\[THINK\] opens the reasoning twice"):
        learned(twice, [dict(role="user", content="1+1?"), dict(role="assistant", content="Two.")])


@pytest.mark.parametrize("template", [CALLS_FIRST, DROPS, chatml("", "")])
@pytest.mark.parametrize("content", ["<think>\nOne and", "<thinking>One and", "[THINK]One and"])
def test_an_answer_that_is_cut_off_in_its_reasoning_is_refused_as_such(template, content):
    row = [dict(role="user", content="1+1?"), dict(role="assistant", content=content)]
    with pytest.raises(SftError, match="opens reasoning that is never closed") as e: learned(template, row)
    assert e.value.fix.settings == dict(on_bad_row="drop")
    assert len(learned(template, [*row[:1], dict(role="assistant", content="Two.")])) == 1


@pytest.mark.parametrize("part", [
    dict(type="thinking", thinking=[dict(type="text", text="One and one.")]),
    dict(type="reasoning", summary=[dict(type="summary_text", text="One and one.")]),
    dict(type="thinking", thinking="One and one.")])
def test_reasoning_in_parts_is_read_however_deep_it_is(part):
    answer = dict(role="assistant", content=[part, dict(type="text", text="Two.")])
    messages = to_messages(dict(messages=[dict(role="user", content="1+1?"), answer]))
    assert [messages[1][k] for k in ("reasoning_content", "content")] == ["One and one.", "Two."]


def test_reasoning_in_parts_that_cannot_be_read_is_refused_and_an_encrypted_one_is_empty():
    assert read_blocks([dict(type="redacted_thinking", data="x")], "it")[0].value == ""
    with pytest.raises(SftError): read_blocks([dict(type="thinking", thinking=[dict(image="x")])], "it")
