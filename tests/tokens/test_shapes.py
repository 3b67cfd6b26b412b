"""What is supervised is the answer's own words and its end, whatever shape a chat template has: nothing of the prompt's
tail, of a header or of another message; and the tokens before it are those that generation is given."""
import json
import re
from functools import cache

import pytest
from hypothesis import given, HealthCheck, settings as how, strategies as st

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.messages import normalise_message
from sft_nb.rows.readers import to_messages
from sft_nb.tokens.encode import encode, encode_prompts, end_ids
from sft_nb.tokens.template import Template
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.tokens.turns import has_content

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FOLDED = ("{% set ns = namespace(says='') %}{% if messages[0].role == 'system' %}"
          "{% set ns.says = messages[0].content %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST]"
          "{{ ns.says + '\n\n' if ns.says and LAST else '' }}{{ m.content }}[/INST]"
          "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}")
LAST_USER = "loop.index0 == (messages | map(attribute='role') | list | length) - 1"
CALLING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
           "{{ c.function.name }} ARGUMENTS</call>{% endfor %}<|im_end|>\n{% endfor %}")
TOOLS = "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}"
AS_OBJECT = CALLING.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_STRING = CALLING.replace("ARGUMENTS", "{{ '' + c.function.arguments }}")
REMINDER = "<|im_start|>system\nWrite calls as a list of actions.<|im_end|>\n"   # behind all messages
NOT_AFTER_A_TOOL = ("{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}")

SHAPES = dict(
    chatml="{% for m in messages %}" + TURN + "{% endfor %}" + OPEN,
    folded_into_the_last=FOLDED.replace("LAST", "loop.last"),
    folded_where_the_last_message_is=FOLDED.replace("LAST", LAST_USER),
    header_only_in_the_prompt="{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}"
                              + TURN + "{% endif %}{% endfor %}" + OPEN,
    another_header_in_the_prompt="{% for m in messages %}" + TURN.replace("m.role", "m.role | upper") + "{% endfor %}"
                                 + OPEN,
    no_header_in_the_prompt="{% for m in messages %}" + TURN + "{% endfor %}",
    header_twice="{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>"
                 "\n{% else %}" + TURN + "<|im_start|>assistant\n{% endif %}{% endfor %}",
    trimming="{% for m in messages %}" + TURN.replace("m.content", "m.content | trim") + "{% endfor %}" + OPEN,
    opened_thought="{% for m in messages %}" + TURN + "{% endfor %}" + OPEN.replace("\n{% e", "\n<think>\n{% e"),
    empty_thought="{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
                  "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN,
    empty_thought_and_folded="{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n"
                             "{{ 'Be kind. ' if loop.last }}{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
                             "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n{% endif %}"
                             "{% endfor %}" + OPEN,
    system_behind_the_answer="{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}"
                             "{% for m in messages if m.role == 'system' %}" + TURN + "{% endfor %}" + OPEN,
    header_with_a_length="{% for m in messages %}<|im_start|>{{ m.role }}{{ ' at length' if m.content | length > 9 }}\n"
                         "{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN,
    no_special_tokens="{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
                      "{% if add_generation_prompt %}### assistant:\n{% endif %}",
    tools_required="{% if not tools %}{{ raise_exception('tools, please') }}{% endif %}" + TOOLS + AS_OBJECT + OPEN)
WITH_TOOLS = dict(
    as_object=TOOLS + AS_OBJECT + OPEN, as_string=TOOLS + AS_STRING + OPEN,
    nothing_after_a_tool=TOOLS + AS_OBJECT + NOT_AFTER_A_TOOL,
    reminding=TOOLS + AS_OBJECT + REMINDER + OPEN,   # as the template of Command R for tools
    named_reminding=dict(default=SHAPES["chatml"], tool_use=TOOLS + AS_OBJECT + REMINDER + OPEN),
    named=dict(default=SHAPES["chatml"], tool_use=TOOLS + AS_OBJECT + NOT_AFTER_A_TOOL))
THOUGHT = re.compile(r"(<think>)?\s*(</think>)?\s*")   # what closes or leaves out a thought
TOOL = dict(type="function", function=dict(name="add", description="adds",
                                           parameters=dict(type="object", properties={})))


def tokenizer_of(template, **settings):
    tok = load_tokenizer(load_config(**settings))
    tok.chat_template = template
    return tok


@cache
def loaded(shape): return tokenizer_of(SHAPES[shape])


words = st.text("ab 0?.\n{}é<>/[]", max_size=60)
answers = words.filter(str.strip)
talks = st.tuples(st.none() | words, st.lists(st.tuples(words, answers), min_size=1, max_size=3))
relaxed = how(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def messages_of(talk, **first):
    system, turns = talk
    found = [dict(role="system", content=system)] if system is not None else []
    found += [m for q, a in turns for m in (dict(role="user", content=q), dict(role="assistant", content=a))]
    return [found[0] | first, *found[1:]]


def spans(rows):
    "Ids before each supervised span, and the span"
    for ids, labels in rows:
        start = None
        for k, label in enumerate([*labels, -100]):
            if label != -100 and start is None: start = k
            if label == -100 and start is not None:
                yield ids[:start], ids[start:k]
                start = None


def squeezed(s): return "".join(s.split())


def own_words(tok, span, content):
    "Does the span hold the answer, its end, and at most the marks of a thought in front?"
    text = tok.decode(span)
    words = squeezed(content)
    end = text.removesuffix(tok.eos_token)
    assert text != end, (text, "ends with the end token")
    found = squeezed(end)
    assert found.endswith(words), (text, content)
    assert THOUGHT.fullmatch(found.removesuffix(words)), (text, content)


@pytest.mark.parametrize("shape", SHAPES)
@given(talk=talks)
@relaxed
def test_only_the_answers_own_words(shape, talk):
    tok = loaded(shape)
    messages = messages_of(talk, **(dict(tools=[TOOL]) if shape == "tools_required" else {}))
    try: rows = encode({"row": messages}, tok)
    except SftError as e:   # spaces around an answer may make what a template does with it undecidable
        assert "changes the answer" in str(e)
        assert any(m["content"] != m["content"].strip() or "<" in m["content"] for m in messages), (str(e), messages)
        return
    at = [i for i, m in enumerate(messages) if m["role"] == "assistant" and has_content(m)]
    found = list(spans(rows))
    assert len(found) == len(at)
    for (before, span), i in zip(found, at):
        assert before == encode_prompts([messages[:i]], tok)[0]
        own_words(tok, span, messages[i]["content"])


CALL = dict(type="function", id="abcdef012", function=dict(name="add", arguments=dict(a=1)))


@pytest.mark.parametrize("shape", WITH_TOOLS)
@pytest.mark.parametrize("result", ["3", ""])
@pytest.mark.parametrize("answer", ["It is 3.", "3", "x" * 60])
def test_calls_are_native_and_nothing_stands_in_front_of_an_answer(shape, result, answer):
    tok = tokenizer_of(WITH_TOOLS[shape])
    talk = [dict(role="user", content="1+2?", tools=[TOOL]), dict(role="assistant", content="", tool_calls=[CALL]),
            dict(role="tool", name="add", tool_call_id="abcdef012", content=result),
            dict(role="assistant", content=answer)]
    said = [tok.decode(span) for _, span in spans(encode({"row": talk}, tok))]
    assert said == ['<call>add {"a": 1}</call><|im_end|>', answer + "<|im_end|>"]
    assert Template(tok).unsupported_tools(talk) == ()


def test_the_header_of_a_second_answer_in_a_row():
    "As the template of Qwen1.5, whose prompt has no header behind an answer and whose last message has no end"
    tok = tokenizer_of("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                       "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
                       "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|im_start|>assistant\n"
                       "{% endif %}")
    talk = [question(1), dict(role="assistant", content="one"), dict(role="assistant", content="two")]
    assert said(tok, talk) == ["one<|im_end|>", "two<|im_end|>"]


OPENED_THOUGHTS = dict(   # prompts that open a thought, and calls that are written without one
    nemotron_nano_2="{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<TOOLCALL>["
                    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</TOOLCALL>"
                    "{% else %}{{ '<think>\n\n' if m.role == 'assistant' and loop.last }}"
                    "{{ m.content }}{% endif %}\n<|im_end|>\n\n{% endfor %}{% if add_generation_prompt %}"
                    "<|im_start|>assistant\n<think>\n\n{% endif %}",
    cohere="{% for m in messages %}<|im_start|>{{ m.role }}{% if m.tool_calls %}<|START_ACTION|>["
           "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]<|END_ACTION|>"
           "{% else %}{{ '<|START_TEXT|>' if m.role == 'assistant' }}"
           "{{ m.content }}{{ '<|END_TEXT|>' if m.role == 'assistant' }}{% endif %}<|im_end|>{% endfor %}"
           "{% if add_generation_prompt %}<|im_start|>assistant<|START_THINKING|>{% endif %}")


@pytest.mark.parametrize("shape", OPENED_THOUGHTS)
@pytest.mark.parametrize("special", [True, False])
def test_calls_without_the_thought_that_the_prompt_opens(shape, special):
    tok = tokenizer_of(TOOLS + OPENED_THOUGHTS[shape])
    names = ["<|START_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>"]
    if special: tok.add_special_tokens(dict(additional_special_tokens=names))
    talk = [dict(role="user", content="1+2?", tools=[TOOL]),
            dict(role="assistant", content="", tool_calls=[CALL, CALL]),
            dict(role="tool", name="add", tool_call_id="abcdef012", content="3"),
            dict(role="assistant", content="It is 3.")]
    call, answer = said(tok, talk)
    assert call.count('{"name": "add", "arguments": {"a": 1}}') == 2 and call.endswith("<|im_end|>"), call
    assert answer.strip().endswith("<|im_end|>") and "It is 3." in answer
    (before, _), *_ = spans(encode({"row": talk}, tok))
    assert before == encode_prompts([talk[:1]], tok)[0]


CLOSED_TWICE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
                "{{ '<|END_RESPONSE|>' if m.role == 'assistant' }}END{% endfor %}" + OPEN)


def test_an_answer_ends_with_the_end_token_of_the_tokenizer_if_every_turn_does():
    "As in Cohere's templates, whose inner marker may be special; `train_tokens` itself can make it so"
    tok = tokenizer_of(CLOSED_TWICE.replace("END{", "<|im_end|>\n{"), train_tokens=("<|END_RESPONSE|>",))
    assert said(tok, [question(1), dict(role="assistant", content="2")] * 2) == ["2<|END_RESPONSE|><|im_end|>"] * 2
    assert end_ids(tok) == [tok.eos_token_id]


def test_an_end_token_of_the_conversation_is_none_of_the_turn():
    "As in Phi-4-mini's template, which ends a turn with <|end|> and a conversation with <|endoftext|>"
    tok = tokenizer_of("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
                       "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_end|>{% endif %}",
                       train_tokens=("<|end|>",))
    assert said(tok, [question(1), dict(role="assistant", content="2")] * 2) == ["2<|end|>"] * 2


def test_end_tokens_of_a_template_that_wants_tools():
    tok = tokenizer_of(SHAPES["tools_required"])
    assert end_ids(tok) == [tok.eos_token_id]
    with pytest.raises(SftError, match="refuses"): end_ids(tokenizer_of("{{ raise_exception('no') }}"))


# reasoning

READS_THOUGHT = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.KEY %}<think>{{ m.KEY }}</think>{% endif %}"
                 "{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN)


def thoughtful():
    return [dict(role="user", content="1+1?"), dict(role="assistant", content="2", reasoning_content="hm")]


def said(tok, messages): return [tok.decode(span) for _, span in spans(encode({"row": messages}, tok))]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("mode", ["auto", "native"])
def test_native_reasoning(key, mode):
    tok = tokenizer_of(READS_THOUGHT.replace("KEY", key), reasoning=mode)
    assert said(tok, thoughtful()) == ["<think>hm</think>2<|im_end|>"]


@pytest.mark.parametrize("mode", ["auto", "native"])
def test_reasoning_without_a_place_for_it(mode):
    tok = tokenizer_of(SHAPES["chatml"], reasoning=mode)
    with pytest.raises(SftError, match="no key for it.*reasoning='inline'"): said(tok, thoughtful())


def test_inline_and_dropped_reasoning():
    for mode, text in dict(inline="<think>\nhm\n</think>\n\n2<|im_end|>", drop="2<|im_end|>").items():
        assert said(tokenizer_of(SHAPES["chatml"], reasoning=mode), thoughtful()) == [text]


def test_reasoning_that_the_template_takes_from_earlier_turns():
    "Each answer is taught with its reasoning, behind a history without: one example for each turn"
    tok = tokenizer_of(READS_THOUGHT.replace("m.KEY %}", "m.reasoning_content and loop.last %}")
                       .replace("m.KEY", "m.reasoning_content"))
    talk = [*thoughtful(), *thoughtful()]
    rows = encode({"row": talk}, tok)
    assert len(rows) == 2 and said(tok, talk) == ["<think>hm</think>2<|im_end|>"] * 2
    assert "hm" not in tok.decode(next(before for before, _ in list(spans(rows))[1:]))


def test_reasoning_stays_where_tools_become_text():
    talk = [*thoughtful()[:1], thoughtful()[1] | dict(content="", tool_calls=[CALL])]
    tok = tokenizer_of(SHAPES["chatml"], reasoning="inline")
    assert said(tok, talk) == ["<think>\nhm\n</think>\n\n" + json.dumps(CALL["function"]) + "<|im_end|>"]


# what is never supervised

def question(n): return dict(role="user", content=f"{n}?")


def test_an_answer_that_is_not_to_be_learned_is_not_learned_with_the_prompt():
    tok = tokenizer_of(SHAPES["chatml"])
    talk = [question(1), dict(role="assistant", content="wrong", train=False), question(2),
            dict(role="assistant", content="right")]
    (_, labels), = encode({"row": talk}, tok, prompt_too=True)
    learned = tok.decode([l for l in labels if l != -100])
    assert "wrong" not in learned and "right" in learned and "1?" in learned and "2?" in learned


def test_nor_is_it_where_turns_stand_apart():
    tok = tokenizer_of(SHAPES["folded_into_the_last"])
    talk = [question(1), dict(role="assistant", content="right"), question(2),
            dict(role="assistant", content="wrong", train=False), question(3), dict(role="assistant", content="fine")]
    talk = [dict(role="system", content="Be kind."), *talk]
    rows = encode({"row": talk}, tok, prompt_too=True)
    learned = [tok.decode([l for l in labels if l != -100]) for _, labels in rows]
    assert len(learned) == 2 and "1?" in learned[0] and not any("wrong" in text for text in learned)
    assert learned[1].strip() == "fine<|im_end|>"


@pytest.mark.parametrize("prompt_too", [False, True])
def test_an_empty_answer_is_not_an_end_token(prompt_too):
    tok = tokenizer_of(SHAPES["chatml"])
    talk = [question(1), dict(role="assistant", content=""), question(2), dict(role="assistant", content="2")]
    (ids, labels), = encode({"row": talk}, tok, prompt_too=prompt_too)
    assert tok.decode(ids).count("<|im_end|>") == 4
    ends = [i for i, l in zip(ids, labels) if l == tok.eos_token_id]
    assert len(ends) == (3 if prompt_too else 1)   # of the two questions and the answer, or of the answer


def test_only_the_completion_of_a_conversational_prompt():
    row = dict(prompt=[question(1), dict(role="assistant", content="one"), question(2)],
               completion=[dict(role="assistant", content="two")])
    tok, messages = tokenizer_of(SHAPES["chatml"]), to_messages(row)
    assert said(tok, messages) == ["two<|im_end|>"]
    (_, labels), = encode({"row": messages}, tok, prompt_too=True)   # the prompt is supervised where prompts are
    assert "one" in tok.decode([l for l in labels if l != -100])


@pytest.mark.parametrize("weight, trained", [(0, False), (1, True), (0., False), ("false", False), ("true", True),
                                             ("0", False), (None, True)])
def test_what_a_weight_means(weight, trained):
    for name in ("train", "weight"):
        answer = {"role": "assistant", "content": "x", name: weight}
        assert normalise_message(answer, "message 1").get("train", True) is trained


@pytest.mark.parametrize("weight", [0.5, 2, "half", [1], "", float("nan")])
def test_what_is_no_weight(weight):
    answer = dict(role="assistant", content="x", weight=weight)
    with pytest.raises(SftError, match="true or false"): normalise_message(answer, "it")


# What matters of two published templates: GigaChat 3 writes one call alone, and as a message of its own behind the
# answer's; Kimi K3 opens a thought in the prompt, and closes answer, message and turn with tokens of their own.
GIGACHAT_3 = ("{% for m in messages %}{{ 'function result' if m.role == 'tool' else m.role }}<|role_sep|>\n"
              "{{ m.content }}<|message_sep|>\n\n"
              "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}function call<|role_sep|>\n"
              """{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}<|message_sep|>\n\n{% endif %}"""
              "{% endfor %}{% if add_generation_prompt %}assistant<|role_sep|>\n{% endif %}")
KIMI_K3 = ("{% macro open(tag) %}<|open|>{{ tag }}<|sep|>{% endmacro %}{% macro close(tag) %}<|close|>{{ tag }}<|sep|>"
           "{% endmacro %}{% for m in messages %}{{ open('message role=' ~ m.role) }}{% if m.role == 'assistant' %}"
           "{{ open('think') }}{{ m.reasoning_content or '' }}{{ close('think') }}{{ open('response') }}{{ m.content }}"
           "{{ close('response') }}{% if m.tool_calls %}{{ open('tools') }}{% for c in m.tool_calls %}"
           "{{ open('call tool=' ~ c.function.name ~ ' index=' ~ loop.index) }}"
           "{% for k, v in c.function.arguments.items() %}{{ open('argument key=' ~ k) }}{{ v }}{{ close('argument') }}"
           "{% endfor %}{{ close('call') }}{% endfor %}{{ close('tools') }}{% endif %}"
           "{% else %}{{ m.content }}{% endif %}{{ close('message') }}<|end_of_msg|>{% endfor %}"
           "{% if add_generation_prompt %}{{ open('message role=assistant') }}{{ open('think') }}{% endif %}")
MARKERS = dict(gigachat=["<|message_sep|>", "<|role_sep|>"],
               kimi=["<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"])


def with_markers(name, special):
    "The tokenizer with a template's end token, and with its other markers as special tokens or as plain text"
    tok = tokenizer_of(dict(gigachat=GIGACHAT_3, kimi=KIMI_K3)[name])
    end, *others = MARKERS[name]
    tok.add_special_tokens(dict(additional_special_tokens=[end, *others] if special else [end]))
    tok.eos_token = end
    return tok


def calling(*towns):
    calls = [CALL | dict(id=f"abcdef{k:03}", function=dict(name="add", arguments=dict(town=town)))
             for k, town in enumerate(towns)]
    results = [dict(role="tool", name="add", tool_call_id=c["id"], content="sunny") for c in calls]
    return [question(1), dict(role="assistant", content="", tool_calls=calls), *results,
            dict(role="assistant", content="Sunny.")]


@pytest.mark.parametrize("special", [True, False])
def test_gigachat_writes_one_call_and_is_refused_two(special):
    tok = with_markers("gigachat", special)
    assert said(tok, [question(1), dict(role="assistant", content="2")] * 2) == ["2<|message_sep|>"] * 2
    call, answer = said(tok, calling("Paris"))
    assert call.endswith('{"name": "add", "arguments": {"town": "Paris"}}<|message_sep|>')
    assert answer == "Sunny.<|message_sep|>" and end_ids(tok) == [tok.eos_token_id]
    with pytest.raises(SftError, match="1 of 2 calls is written with name and arguments.*Rome.* is missing"):
        said(tok, calling("Paris", "Rome"))


@pytest.mark.parametrize("special", [True, False])
def test_kimi_writes_all_calls_and_ends_with_the_end_of_the_message(special):
    tok = with_markers("kimi", special)
    end = "<|close|>message<|sep|><|end_of_msg|>"
    answers = said(tok, [question(1), dict(role="assistant", content="2")] * 2)
    assert answers == ["<|close|>think<|sep|><|open|>response<|sep|>2<|close|>response<|sep|>" + end] * 2
    assert end_ids(tok) == [tok.eos_token_id]
    call, answer = said(tok, calling("Paris", "Rome"))
    assert call.count("<|open|>call tool=add") == call.count("<|close|>call") == 2 and call.endswith(end)
    assert "Paris" in call and "Rome" in call and "sunny" not in call + answer and "Sunny." in answer
    thought, = said(tok, thoughtful())
    assert thought.startswith("hm<|close|>think") and thought.endswith(end)


BY_KEY = CALLING.replace("ARGUMENTS", "{% for key, value in c.function.arguments.items() recursive %}[{{ key }}]"
    "{% if value is mapping %}{{ loop(value.items()) }}{% else %}{{ VALUE }}{% endif %}{% endfor %}")


def test_a_template_may_escape_the_arguments_of_a_call_and_not_shorten_them():
    talk = calling("Paris")
    talk[1]["tool_calls"][0]["function"]["arguments"] = dict(town="x & y", more=dict(days="<3 " * 9))
    tok = tokenizer_of(BY_KEY.replace("VALUE", "value | string | escape"))
    assert said(tok, talk)[0].startswith("<call>add [town]x &amp; y[more][days]&lt;3 &lt;3")
    tok = tokenizer_of(BY_KEY.replace("VALUE", "(value | string)[:20]"))
    with pytest.raises(SftError, match="0 of 1 call are written with name and arguments.*<3 <3.* is missing"):
        said(tok, talk)
