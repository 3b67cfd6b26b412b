"""In prompt and label together a block of reasoning is opened once and closed once, in this order, with every template
of `reasoning_templates.py` and any arguments; or the row is refused with a fix that works as typed."""
import json
import re

import pytest
from reasoning_templates import SPECIAL, TEMPLATES

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.tokens.encode import encode
from sft_nb.tokens.tokenizer import load_tokenizer

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>", "<|END_THINKING|>"),
         ("<|channel>thought", "<channel|>"), ("◁think▷", "◁/think▷"))
HEADERS = ("<|im_start|>assistant", "<|im_start|>model", "<|Assistant|>", "<|start|>assistant")
ASK, ANSWER = dict(role="user", content="1+1?"), dict(role="assistant", content="It is two.")
CALL = dict(type="function", id="abcdef012", function=dict(name="add", arguments=dict(a=1, b=None)))
TOOL = dict(type="function", function=dict(name="add", description="adds",
                                           parameters=dict(type="object", properties={})))
THOUGHT = ANSWER | dict(reasoning_content="One and one.")
ROWS = dict(
    plain=[ASK, ANSWER],
    reasoning=[ASK, THOUGHT],
    inline=[ASK, ANSWER | dict(content="<think>\nOne and one.\n</think>\n\nIt is two.")],
    turns=[ASK, ANSWER, ASK, ANSWER],
    reasoning_turns=[ASK, THOUGHT, ASK, THOUGHT],
    mixed_turns=[ASK, THOUGHT, ASK, ANSWER],
    system=[dict(role="system", content="Be brief."), ASK, ANSWER],
    calls=[ASK, dict(role="assistant", content="", tool_calls=[CALL]),
           dict(role="tool", name="add", tool_call_id="abcdef012", content="2"), ANSWER],
    reasoning_calls=[ASK, dict(role="assistant", content="", tool_calls=[CALL], reasoning_content="One and one."),
                     dict(role="tool", name="add", tool_call_id="abcdef012", content="2"), THOUGHT])
ARGUMENTS = dict(none=None, on=dict(enable_thinking=True), off=dict(enable_thinking=False))


def messages_of(messages, arguments=None):
    first = dict(tools=[TOOL]) if any(m.get("tool_calls") for m in messages) else {}
    return [messages[0] | first | (dict(chat_template_kwargs=arguments) if arguments else {}), *messages[1:]]


def tokenizer_of(template, **settings):
    "A tokenizer that knows the templates' special tokens"
    tokenizer = load_tokenizer(load_config(None, chat_template=template, **settings))
    tokenizer.add_special_tokens(dict(additional_special_tokens=SPECIAL))
    return tokenizer


def spans(tokenizer, messages):
    "Text before each supervised span, and the span"
    found = []
    for ids, labels in encode({"row": messages}, tokenizer):
        start = None
        for k, label in enumerate([*labels, -100]):
            if label != -100 and start is None: start = k
            if label == -100 and start is not None:
                found.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:k])))
                start = None
    return found


def faults(found):
    "What is malformed, found in the text alone: the answer's turn is everything after its header"
    for before, label in found:
        header = max(before.rfind(h) for h in HEADERS)
        turn = before[header:] + label
        for opening, close in PAIRS:
            events = re.findall(f"{re.escape(opening)}|{re.escape(close)}", turn)
            in_prompt = events == [close] and close in before[header:]   # V3.1 only closes it
            if events not in ([], [opening, close]) and not in_prompt: yield events, turn


def thoughts(found): return sum(label.count("One and one.") for _, label in found)


def settings_of(fix):
    "Each alternative of a fix that is a setting"
    return [f.settings for f in (fix, *fix.otherwise) if f.settings]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("by", ["row", "setting"])
def test_no_block_is_malformed(name, arguments, by):
    template, given, wrong, n_learned = TEMPLATES[name], ARGUMENTS[arguments], [], 0
    if by == "setting" and (given is None or "enable_thinking" not in template): return
    settings = dict(chat_template_kwargs=given) if by == "setting" else {}
    tokenizer = tokenizer_of(template, **settings)
    for kind, messages in ROWS.items():
        messages = messages_of(messages, given if by == "row" else None)
        n_thoughts = json.dumps(messages).count("One and one.")
        try: found = spans(tokenizer, messages)
        except SftError as e:
            tried = [s for s in settings_of(e.fix) if "on_bad_row" not in s]
            for change in tried:
                try: again = spans(tokenizer_of(template, **settings | change), messages)
                except SftError as second: wrong.append((kind, "fix", str(e), change, str(second)))
                else:
                    wrong += [(kind, "fix", change, fault) for fault in faults(again)]
                    if change.get("reasoning") != "drop" and thoughts(again) != n_thoughts:
                        wrong.append((kind, "fix lost", change, again))
            if not tried: wrong.append((kind, "no fix", str(e)))
            continue
        n_learned += 1
        wrong += [(kind, fault) for fault in faults(found)]
        if thoughts(found) != n_thoughts: wrong.append((kind, "lost", n_thoughts, found))
    assert not wrong, "\n".join(map(str, wrong))
    assert n_learned >= 3
