"Arguments of the chat template: one setting for all code that renders a prompt, which a row's own replace"
import pytest
from transformers import AutoTokenizer

from sft_nb.config import load_config
from sft_nb.evaluation.openai_client import request_body
from sft_nb.report import ConfigError
from sft_nb.tokens.cache import token_inputs
from sft_nb.tokens.encode import encode_prompts
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


def config(**more): return load_config(None, chat_template=THINKS, eval_samples=0, **more)


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
