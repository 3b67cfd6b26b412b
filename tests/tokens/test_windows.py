"""A conversation of many answers is laid out in windows, with the chunks that it has as a whole."""
import random

import pytest
from reasoning_templates import SPECIAL, TEMPLATES
from samples import trl_template

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.extras import windows
from sft_nb.tokens import turns
from sft_nb.tokens.template import Template
from sft_nb.tokens.tokenizer import load_tokenizer

LINE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ODD = dict(   # what a template may look at beyond a window
    number="{% for m in messages %}{{ loop.index }}" + LINE + "{% endfor %}" + PROMPT,
    seventh="{% for m in messages %}{{ '#' if loop.index0 % 7 == 0 }}" + LINE + "{% endfor %}" + PROMPT,
    count="{{ messages | length }}{% for m in messages %}" + LINE + "{% endfor %}" + PROMPT,
    last_six="{% for m in messages[-6:] %}" + LINE + "{% endfor %}" + PROMPT,
    tools_at_the_end="{% for m in messages %}{{ tools if loop.last }}" + LINE + "{% endfor %}" + PROMPT,
    a_word_earlier="{% set ns = namespace(off=false) %}{% for m in messages %}{% if 'blue' in m.content %}"
                   "{% set ns.off = true %}{% endif %}" + LINE + "{% endfor %}" + PROMPT +
                   "{{ '<think>\n\n</think>\n\n' if ns.off and add_generation_prompt }}",
    many="{% for m in messages %}" + LINE + "{% endfor %}" + PROMPT + "{{ '!' if messages | length > 16 }}")
OF_TRL = ["qwen3_training", "qwen2_5", "llama3_1", "gemma3_training", "glm4moe_training", "phi3_training"]


def conversation(seed:str)->list[dict]:
    "Chats and agents, with and without thoughts, flags, empty answers and answers in parts"
    r = random.Random(seed)
    agent, thinks, flags, empty, parts = (r.random() < p for p in (.5, .3, .3, .2, .2))
    def words(): return " ".join(r.choices("the cat red blue x+y é {} <b> 12".split(), k=r.randint(1, 5)))
    found = [dict(role="system", content=words())] if r.random() < .5 else []
    found.append(dict(role="user", content=words()))
    for k in range(12):
        answer = dict(role="assistant", content=words())
        if thinks: answer["reasoning_content"] = words()
        if flags and r.random() < .4: answer["train"] = r.random() < .3
        elif parts and r.random() < .3: answer["train_parts"] = [[answer["content"], False], ["", True]]
        if empty and r.random() < .2 and "train_parts" not in answer: answer["content"] = ""
        if agent and k < 11:
            answer.pop("train_parts", None)
            answer["tool_calls"] = [dict(type="function", id=f"call{k:05}", function=dict(
                name="run", arguments=dict(command=words(), n=k)))]
        then = dict(role="tool", name="run", tool_call_id=f"call{k:05}", content=words())
        found += [answer, then if agent else dict(role="user", content=words())]
    if agent: found[0] = found[0] | dict(tools=[dict(type="function", function=dict(name="run", parameters={}))])
    return [*found, dict(role="assistant", content="Done.")]


def laid_out(tokenizer, messages, **how):
    "The chunks and what is noted of the template, or the kind of error"
    t = Template(tokenizer)
    try: return turns.split_conversation(messages, t, **how), {**t.shared["notes"]}
    except SftError as e: return type(e)


@pytest.mark.parametrize("name", [*ODD, *TEMPLATES, *OF_TRL])
def test_windows_change_no_chunk(name, monkeypatch):
    tok = load_tokenizer(load_config(model="tiny"))
    tok.add_special_tokens(dict(additional_special_tokens=SPECIAL))
    if name in OF_TRL: tok.chat_template = open(trl_template(f"{name}.jinja")).read()
    else: tok.chat_template = (ODD | TEMPLATES)[name]
    for seed in range(3):
        messages = conversation(f"{name} {seed}")
        for how in (dict(), dict(prompt_too=True), dict(turns="last", prompt_too=seed > 0)):
            found = []
            for most in (10**9, 4):
                monkeypatch.setattr(windows, "MANY", most)
                monkeypatch.setattr(windows, "_IN_A_WINDOW", 2)
                found.append(laid_out(tok, messages, **how))
            assert found[0] == found[1], (seed, how)


def used(monkeypatch, tokenizer, messages, **how)->list[bool]:
    "For each conversation that is long enough for windows: were they enough?"
    found, lay_out = [], windows._lay_out_windows
    def noted(*args, **more):
        found.append(False)
        found[-1] = bool(example := lay_out(*args, **more))
        return example
    monkeypatch.setattr(windows, "_lay_out_windows", noted)
    turns.split_conversation(messages, Template(tokenizer), **how)
    return found


def test_windows_are_used_for_chats_and_agents(monkeypatch, tokenizer):
    chat = [dict(role=role, content=f"{role} {k}") for k in range(40) for role in ("user", "assistant")]
    assert used(monkeypatch, tokenizer, chat) == [True]
    calls = [dict(type="function", function=dict(name="f", arguments={}))]
    steps = [m for k in range(40) for m in (dict(role="assistant", content=f"Step {k}", tool_calls=calls),
                                            dict(role="tool", name="f", content=f"Result {k}"))]
    assert used(monkeypatch, tokenizer, [chat[0], *steps, chat[1]]) == [True]
    assert used(monkeypatch, tokenizer, chat[:60]) == []   # 30 answers


def test_a_template_that_refuses_a_late_message_is_asked_for_a_few_answers_only(monkeypatch):
    tok = load_tokenizer(load_config(model="tiny"))
    tok.chat_template = ("{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('No!') }}{% endif %}"
                         + LINE + "{% endfor %}" + PROMPT)
    chat = [dict(role=role, content=f"{role} {k}") for k in range(100) for role in ("user", "assistant")]
    seen, run = [], Template._run
    monkeypatch.setattr(Template, "_run", lambda self, messages, *a, **k: seen.append(len(messages)) or run(
        self, messages, *a, **k))
    with pytest.raises(SftError, match="No!"):
        turns.split_conversation([*chat, dict(role="user", content="no"), chat[1]], Template(tok))
    assert sum(n > 100 for n in seen) < 30


def test_a_late_call_that_the_template_leaves_out_is_an_error(monkeypatch):
    "Also where only the last answer is learned, so that the call is context"
    tok = load_tokenizer(load_config(model="tiny"))
    chat = [dict(role=role, content=f"{role} {k}") for k in range(40) for role in ("user", "assistant")]
    calls = [dict(type="function", function=dict(name="find", arguments=dict(town=town))) for town in ("Oslo", "Rome")]
    asked = [*chat, dict(role="user", content="Where?"), dict(role="assistant", content="", tool_calls=calls),
             dict(role="tool", name="find", content="59 N"), dict(role="assistant", content="In the north.")]
    seen, run = [], Template._run
    monkeypatch.setattr(Template, "_run", lambda self, messages, *a, **k: seen.append(len(messages)) or run(
        self, messages, *a, **k))
    def template(written): return ("{% for m in messages %}{% for c in " + written + " %}{{ c | tojson }}{% endfor %}"
                                   + LINE + "{% endfor %}" + PROMPT)
    tok.chat_template = template("m.tool_calls or []")
    assert turns.split_conversation(asked, Template(tok), turns="last")
    assert sum(n in (81, 82) for n in seen) == 0   # up to the call: a few messages before it were enough
    tok.chat_template = template("(m.tool_calls or [])[:1]")
    with pytest.raises(SftError, match="1 of 2 calls is written with name and arguments; .*Rome.* is missing"):
        turns.split_conversation(asked, Template(tok), turns="last")
