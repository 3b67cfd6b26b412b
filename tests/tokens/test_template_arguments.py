"Arguments of the chat template: one setting for all code that renders a prompt, which a row's own replace"
from datetime import date

import pytest
from reasoning_templates import TEMPLATES
from transformers import AutoTokenizer

from sft_nb.config.load import load_config
from sft_nb.extras.openai_client import request_body
from sft_nb.base.report import ConfigError, SftError
from sft_nb.tokens.cache import token_inputs
from sft_nb.tokens.encode import encode, encode_prompts
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.template import Template
from sft_nb.tokens.tokenizer import configure_tokenizer, is_own_tokenizer, load_tokenizer
from sft_nb.workbench import Workbench

# closes an empty block in the prompt where thinking is off, as Qwen3 does; writes the reasoning that it is given
THINKS = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.reasoning_content %}"
          "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
          "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
          "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
          "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
          "{%- endif %}{%- endif %}")
QUESTION = [dict(role="user", content="1+1?")]
ROW = dict(messages=[*QUESTION, dict(role="assistant", content="2")])
OFF, ON = dict(enable_thinking=False), dict(enable_thinking=True)
EMPTY = "<think>\n\n</think>\n\n"


def config(**more): return load_config(None, **dict(chat_template=THINKS, eval_samples=0) | more)


def texts(cfg, *rows):
    data = prepare(cfg, train=list(rows))
    return [data.tokenizer.decode(row.ids) for row in data.train]


@pytest.mark.parametrize("value", [
    OFF, "enable_thinking=False", ("enable_thinking=false",), '{"enable_thinking": false}'])
def test_the_setting_does_what_an_argument_of_every_row_does(value):
    by_setting = texts(config(chat_template_kwargs=value), ROW, ROW)
    assert by_setting == texts(config(), *[ROW | dict(chat_template_kwargs=OFF)] * 2)
    assert EMPTY in by_setting[0] and EMPTY not in texts(config(), ROW)[0]


def test_a_row_has_the_last_word():
    on, off = texts(config(chat_template_kwargs=OFF), ROW | dict(chat_template_kwargs=ON), ROW)
    assert EMPTY not in on and EMPTY in off


def test_prompts_of_generation_and_requests_have_them_too():
    tokenizer = load_tokenizer(config(chat_template_kwargs=OFF))
    assert tokenizer.decode(encode_prompts([QUESTION], tokenizer)[0]).endswith(EMPTY)
    body = request_body(QUESTION, Template(tokenizer))[1]
    assert body["chat_template_kwargs"] == OFF
    first = QUESTION[0] | dict(chat_template_kwargs=ON)
    assert request_body([first], Template(tokenizer))[1]["chat_template_kwargs"] == ON


def test_the_template_that_is_saved_has_them_as_defaults(tmp_path):
    "So a server that knows nothing of the setting gives the model the prompts of its training"
    cfg = config(chat_template_kwargs=OFF)
    load_tokenizer(cfg).save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    render = dict(tokenize=False, add_generation_prompt=True)
    assert saved.apply_chat_template(QUESTION, **render).endswith(EMPTY)
    assert not saved.apply_chat_template(QUESTION, **render, **ON).endswith(EMPTY)
    again = load_tokenizer(load_config(None, tokenizer=str(tmp_path), chat_template_kwargs=OFF))
    assert again.chat_template == saved.chat_template   # not twice
    without = load_tokenizer(load_config(None, tokenizer=str(tmp_path)))
    assert EMPTY not in without.apply_chat_template(QUESTION, **render)


def test_another_value_makes_other_tokens():
    one, other = config(), config(chat_template_kwargs=OFF)
    data = prepare(one, train=[ROW])
    inputs = [token_inputs(cfg, data.task, load_tokenizer(cfg)) for cfg in (one, other)]
    assert {k for k in inputs[0] if inputs[0][k] != inputs[1][k]} == {"chat_template", "chat_template_kwargs"}
    assert is_own_tokenizer(load_tokenizer(other), one) and not is_own_tokenizer(load_tokenizer(other), other)
    with pytest.raises(ConfigError, match="prepared with chat_template_kwargs None"): Workbench(other, data=data)


def test_a_tokenizer_is_configured_anew():
    tokenizer = load_tokenizer(config(chat_template_kwargs=OFF))
    configure_tokenizer(tokenizer, load_config(None))
    assert tokenizer.chat_template == THINKS
    several = {"default": THINKS, "tool_use": THINKS}
    tokenizer.chat_template = several
    configure_tokenizer(tokenizer, load_config(None, chat_template_kwargs=OFF))
    assert all(text.endswith(THINKS) and text != THINKS for text in tokenizer.chat_template.values())


@pytest.mark.parametrize("settings, says", [
    (dict(chat_template="none", chat_template_kwargs=OFF), "there is no chat template.*Fix: chat_template_kwargs=None"),
    (dict(chat_template_kwargs=dict(enable_thinkin=False)), "does not read enable_thinkin;.*'enable_thinking=False'"),
    (dict(chat_template_kwargs=dict(effort="low")), "does not read effort;.*Fix: chat_template_kwargs=None"),
    (dict(chat_template_kwargs=dict(messages=1) | OFF), "messages cannot have a default.*'enable_thinking=False'"),
    (dict(chat_template_kwargs="enable_thinking"), "'enable_thinking' is not a pair"),
    (dict(chat_template_kwargs=3), "chat_template_kwargs")])
def test_arguments_that_no_template_reads_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(load_config(None, **dict(chat_template=THINKS) | settings))


# the date

DATED = "{{ '<|im_start|>system\\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\\n' }}" + THINKS
NOVEMBER = "strftime_now=2026-11-28"


def dated(**more): return load_config(None, chat_template=DATED, eval_samples=0, **more)


def test_the_day_is_part_of_the_tokens_and_of_the_config(tmp_path):
    first = prepare(dated(chat_template_kwargs=NOVEMBER, cache_dir=str(tmp_path)), train=[ROW])
    other = prepare(dated(chat_template_kwargs="strftime_now=2026-12-01", cache_dir=str(tmp_path)), train=[ROW])
    assert "Today: 28 Nov 2026" in first.tokenizer.decode(first.train[0].ids)
    assert "Today: 01 Dec 2026" in other.tokenizer.decode(other.train[0].ids)
    today = prepare(dated(), train=[ROW])
    assert today.cfg.chat_template_kwargs == (f"strftime_now={date.today().isoformat()}",)
    assert Workbench(dated(), data=today).requested.chat_template_kwargs == today.cfg.chat_template_kwargs
    assert today.report.figures["date_in_prompts"] == date.today().isoformat()
    assert "template_date" in {f.check for f in today.report.findings}
    assert prepare(config(), train=[ROW]).cfg.chat_template_kwargs is None


def test_the_day_is_not_in_the_template_that_is_saved(tmp_path):
    "A server writes its own day"
    tokenizer = load_tokenizer(dated(chat_template_kwargs=NOVEMBER))
    assert tokenizer.chat_template == DATED and tokenizer.template_arguments == {}
    assert is_own_tokenizer(tokenizer, dated()) is False
    assert "28 Nov 2026" in tokenizer.decode(encode_prompts([QUESTION], tokenizer)[0])


def test_a_skeleton_has_the_day_too():
    cfg = dated(chat_template_kwargs=NOVEMBER)
    rows = [dict(messages=[dict(role="user", content=f"{n}+1?"), ROW["messages"][1]]) for n in range(9)]
    assert all("Today: 28 Nov 2026" in text for text in texts(cfg, *rows))


def test_what_is_no_day_is_refused():
    with pytest.raises(ConfigError, match="strftime_now is 'tomorrow'; a day"):
        load_tokenizer(dated(chat_template_kwargs="strftime_now=tomorrow"))


# findings about reasoning and system messages

def findings(cfg, *rows): return {f.check: f for f in prepare(cfg, train=list(rows)).report.findings}


def test_an_empty_block_that_is_learned_is_reported_with_a_fix_that_works():
    template = THINKS.replace("{%- if m.reasoning_content %}", "{%- if m.role == 'assistant' %}")
    template = template.replace("m.reasoning_content", "(m.reasoning_content or '')")
    cfg = load_config(None, chat_template=template, eval_samples=0)
    found = findings(cfg, ROW, ROW)["train_empty_reasoning"]
    assert found.status == "warn" and "2 answers" in found.says and found.fix.settings == dict(
        chat_template_kwargs=("enable_thinking=False",))
    assert "train_empty_reasoning" not in findings(load_config(cfg, **found.fix.settings), ROW, ROW)
    thinks = dict(messages=[*QUESTION, dict(role="assistant", content="2", reasoning_content="1 and 1")])
    assert "train_empty_reasoning" not in findings(cfg, thinks)


def test_a_template_that_leaves_out_the_system_message_gets_it_in_the_question():
    template = "{%- for m in messages if m.role != 'system' %}" + THINKS.partition("{%- for m in messages %}")[2]
    told = dict(messages=[dict(role="system", content="Be brief."), *ROW["messages"]])
    cfg = load_config(None, chat_template=template, eval_samples=0)
    assert "Be brief.\n\n1+1?" in texts(cfg, told)[0]
    assert "train_system" in findings(cfg, told) and "train_system" not in findings(config(), told)


CHANNELS = ("{%- for m in messages %}{%- if '<|channel|>' in m.content %}{{- raise_exception('no tags in content') }}"
            "{%- endif %}{{- '<|start|>' + m.role }}{%- if m.thinking %}"
            "{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}"
            "{%- if m.role == 'assistant' %}{{- '<|channel|>final' }}{%- endif %}"
            "{{- '<|message|>' + m.content + '<|end|>' }}{%- endfor %}"
            "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}")


def channel_tokenizer():
    tokenizer = load_tokenizer(load_config(None, chat_template=CHANNELS))
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens(dict(additional_special_tokens=names))
    return tokenizer


def learned(text):
    tokenizer = channel_tokenizer()
    talk = [*QUESTION, dict(role="assistant", content=text)]
    (_, labels), = encode({"row": talk}, tokenizer)
    return tokenizer.decode([label for label in labels if label != -100])


def test_channels_in_the_text_of_an_answer():
    "Reasoning that a row writes as the template does is reasoning; other tags are refused with what to leave out"
    thought = "<|channel|>analysis<|message|>1 and 1<|end|><|start|>assistant<|channel|>final<|message|>2<|end|>"
    assert learned("<think>1 and 1</think>2") == thought
    assert learned(thought.removesuffix("<|end|>")) == thought
    with pytest.raises(SftError, match=r"Fix: leave <\|channel\|>final<\|message\|> out of the text"):
        learned("<|channel|>final<|message|>2")


def test_roles_that_follow_each_other_are_refused_with_what_helps():
    template = ("{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
                "{{- raise_exception('roles must alternate') }}{%- endif %}"
                + THINKS.partition("{%- for m in messages %}")[2])
    tokenizer = load_tokenizer(load_config(None, chat_template=template))
    with pytest.raises(SftError, match="join messages of one role that follow each other"):
        encode({"row": [*QUESTION, *ROW["messages"]]}, tokenizer)


MENTIONS = ["The model writes </think> when it is done.", "Use `</think>` to close.", "Use <think> and </think> tags.",
            "```\n<think>x</think>\n```\nok", "<|end_of_thought|>"]


def label_of(answer, template):
    cfg = load_config(None, eval_samples=0, **dict(chat_template=template) if template else {})
    data = prepare(cfg, train=[dict(messages=[*QUESTION, dict(role="assistant", content=answer)])])
    return data.tokenizer.decode([l for l in data.train[0].labels if l != -100]).removesuffix("<|im_end|>")


@pytest.mark.parametrize("answer", MENTIONS)
@pytest.mark.parametrize("name", [None, "thinks", "qwen3", "qwen3_5_nothink"])
def test_an_answer_may_mention_the_tags_of_reasoning(name, answer):
    "It is learned as it is; templates that look for reasoning in a text do so where the key of reasoning is no string"
    template = TEMPLATES.get(name, THINKS).replace("if not thought and", "if thought is not string and")
    assert label_of(answer, name and template).removeprefix(EMPTY) == answer


@pytest.mark.parametrize("answer", MENTIONS[:4])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_nothink"])
def test_a_template_that_takes_a_mentioned_tag_as_reasoning(name, answer):
    with pytest.raises(SftError, match="its text is not written unchanged|a part of its text is taken as reasoning"):
        label_of(answer, TEMPLATES[name])


def test_a_block_that_nothing_opened_is_refused():
    row = dict(messages=[*QUESTION, dict(role="assistant", content="One and one.\n</think>\n\n2")])
    with pytest.raises(SftError, match="</think> closes reasoning that is not open"):
        prepare(load_config(None, eval_samples=0), train=[row])


def test_arguments_of_a_row_have_names():
    row = dict(messages=[*QUESTION, dict(role="assistant", content="2")], chat_template_kwargs={1: 2, "a": 3})
    with pytest.raises(SftError, match="chat_template_kwargs is .*; an object"): prepare(config(), train=[row])


def empty_blocks_of(*rows, **more):
    data = prepare(config(chat_template=TEMPLATES["qwen3_5_nothink"], **more), train=list(rows))
    return [f.fix for f in data.report.findings if f.check == "train_empty_reasoning"]


def test_the_fix_for_empty_blocks_is_in_the_rows_if_these_have_arguments():
    "A setting would change nothing"
    for more in ({}, dict(chat_template_kwargs=OFF)):
        fix, = empty_blocks_of(ROW | dict(chat_template_kwargs=ON), ROW, **more)
        assert not fix.settings and '"chat_template_kwargs": {"enable_thinking": false} in these rows' in str(fix)
    assert empty_blocks_of(ROW | dict(chat_template_kwargs=OFF), ROW) == []


def test_reasoning_in_a_text_replaces_the_empty_block_of_the_template():
    row = dict(messages=[*QUESTION, dict(role="assistant", content="2", reasoning_content="One and one.")],
               chat_template_kwargs=ON)
    how = dict(chat_template=TEMPLATES["deepseek_v4"], eval_samples=0)
    for reasoning in ("auto", "inline"):
        data = prepare(load_config(None, reasoning=reasoning, **how), train=[row])
        assert data.tokenizer.decode(data.train[0].ids).count("<think>") == 1, reasoning
        assert data.tokenizer.decode(data.train[0].ids).endswith("One and one.\n</think>\n\n2<|im_end|>"), reasoning


def test_reasoning_that_a_template_refuses_in_a_text_is_written_in_front_of_it():
    row = dict(messages=[*QUESTION, dict(role="assistant", content="2", reasoning_content="One and one.")])
    template = "{%- for m in messages %}{%- if '<think>' in m.content %}{{- raise_exception('no tags in content') }}"
    cfg = load_config(None, chat_template=template + "{%- endif %}{%- endfor %}" + THINKS, eval_samples=0,
                      reasoning="inline")
    assert texts(cfg, row)[0].endswith("assistant\n<think>\nOne and one.\n</think>\n\n2<|im_end|>")
