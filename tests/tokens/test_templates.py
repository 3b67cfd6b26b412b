"""The chat templates that ship write what their formats say; TRL's copies of the published ones are the reference."""
import pytest
from samples import trl_template
from transformers import AutoTokenizer

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.template import as_text
from sft_nb.tokens.tokenizer import _read_template, load_tokenizer, template_names

SYSTEM = [dict(role="system", content="Be brief.")]
TALK = [dict(role="user", content="1+1?"), dict(role="assistant", content="2"),
        dict(role="user", content="2+2?"), dict(role="assistant", content="4")]
WRITTEN = dict(   # as the formats' own pages write them
    alpaca="<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
           "request.\n\n### Instruction:\n1+1?\n\n### Response:\n2</s>",
    chatml="<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
    zephyr="<|user|>\n1+1?</s>\n<|assistant|>\n2</s>\n",
    mistral="<s>[INST] 1+1? [/INST] 2</s>",
    gemma="<s><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n",
    llama3="<s><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
           "<|start_header_id|>assistant<|end_header_id|>\n\n2<|eot_id|>")


@pytest.fixture(scope="module")
def rendered():
    tokenizer = AutoTokenizer.from_pretrained(load_tokenizer(load_config()).name_or_path)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    def render(template, messages, **how):
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **how)
    return render


@pytest.mark.parametrize("name", template_names())
def test_it_writes_its_format(rendered, name):
    text = _read_template(name)
    assert rendered(text, TALK[:2]) == WRITTEN[name]
    prompt = rendered(text, TALK[:1], add_generation_prompt=True)
    assert rendered(text, TALK).startswith(rendered(text, TALK[:2]).removesuffix("\n"))
    assert WRITTEN[name].startswith(prompt) and "Be brief." in rendered(text, SYSTEM + TALK)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_it_is_the_published_one(rendered, name):
    reference = open(trl_template(f"{name}.jinja")).read()
    for messages in (TALK, TALK[:1]):
        for prompt in (True, False):
            how = dict(add_generation_prompt=prompt)
            assert rendered(_read_template(name), messages, **how) == rendered(reference, messages, **how)


def test_a_template_may_be_the_setting_itself():
    template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    assert load_tokenizer(load_config(chat_template=template)).chat_template == template
    with pytest.raises(ConfigError, match="there is no such file"):
        load_tokenizer(load_config(chat_template="x" * 5000))


def test_definitions_of_tools_are_in_the_first_system_message_of_a_template_without_tools():
    ask, tools = dict(role="user", content="2+2?"), [dict(type="function", function=dict(name="add"))]
    alone = as_text([ask | dict(tools=tools)])
    after = as_text([dict(role="system", content="Be brief.", tools=tools), ask])
    assert [m["role"] for m in alone] == [m["role"] for m in after] == ["system", "user"]
    assert alone[0]["content"].startswith("Tools: [") and after[0]["content"].startswith("Be brief.\nTools: [")
    assert alone[1]["content"] == after[1]["content"] == "2+2?"


def answers_of(messages, template, **settings):
    cfg = load_config(task="chat", eval_samples=0, max_length=2048, **settings)
    tokenizer = load_tokenizer(cfg)
    tokenizer.chat_template = open(trl_template(f"{template}.jinja")).read()
    return prepare(cfg, train=[dict(messages=messages)], tokenizer=tokenizer)


@pytest.mark.parametrize("template", ["qwen3", "phi3", "gptoss", "gemma", "lfm2"])
def test_instructions_of_a_developer_are_written(template):
    "Most templates know no such role and leave the message out without a word"
    data = answers_of([dict(role="developer", content="Be brief."), *TALK[:2]], template)
    text = data.tokenizer.decode(data.train.tokens[0]["input_ids"])
    is_known = template in ("gptoss", "lfm2")   # as a role of its own, which no system prompt would be
    assert ("No system prompt in the rows" in data.report.summary) == is_known
    assert "Be brief." in text and ("train_system" in str(data.report.findings)) == (template == "gemma")


def test_the_results_of_two_calls_are_one_message_of_a_template_without_tools():
    calls = [dict(id=f"c{k}", type="function", function=dict(name="add", arguments=dict(a=k))) for k in (1, 2)]
    results = [dict(role="tool", tool_call_id=f"c{k}", content=f"sum {k}") for k in (1, 2)]
    data = answers_of([TALK[0], dict(role="assistant", content="", tool_calls=calls), *results, TALK[1]], "gemma")
    assert "<start_of_turn>user\nsum 1\nsum 2<end_of_turn>" in data.tokenizer.decode(data.train.tokens[-1]["input_ids"])


@pytest.mark.parametrize("template, is_written", [("qwen3", True), ("gptoss", False)])
def test_a_later_system_message_is_written_or_the_row_is_refused(template, is_written):
    later = [*TALK[:2], dict(role="system", content="Now in German."), *TALK[2:]]
    if is_written:
        data = answers_of(later, template)
        assert any("Now in German." in data.tokenizer.decode(x["input_ids"]) for x in data.train.tokens)
        return
    said = "leaves out message 3, 'Now in German.'; .* Fix: write later system messages into the question beside them"
    with pytest.raises(SftError, match=said): answers_of(later, template)
    in_front = [dict(role="system", content="Be brief."), dict(role="system", content="Be kind."), *TALK]
    with pytest.raises(SftError, match="leaves out message 2.* Fix: .*or join messages of one role"):
        answers_of(in_front, template)
