"""Inputs from the field: what they mean in the tool that they were written for is what is learned and scored."""
import json
import shutil
import subprocess
import sys

import pytest
from conftest import shared

from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError
from sft_nb.tokens.prepare import prepare


def prepare_case(name:str, file:str="rows.jsonl", **settings):
    "The prepared rows of a case"
    return prepare(load_config(train_file=str(shared(f"field_cases/{name}")/file), eval_samples=0, **settings))


def learned(data)->list[str]:
    "The supervised text of each example"
    return [data.tokenizer.decode([i for i in x["labels"] if i != -100]) for x in data.train.tokens]


def shown(data)->str: return data.tokenizer.decode(data.train.tokens[0]["input_ids"])


@pytest.mark.parametrize("file", ["swift", "verl_mask", "verl_trainable", "lf_v1", "axolotl", "swift_scale",
                                  "agentinstruct"])
def test_01_answers_that_other_tools_exclude_are_not_learned(file):
    data = prepare_case("01-loss-flags", f"{file}.jsonl")
    assert learned(data) == [f"right {i}<|im_end|>" for i in range(3)]
    assert data.report.figures["train"]["excluded_by_flags"] == "3 answers" and data.train.seen.unread == {}


def test_02_parts_that_are_excluded_are_not_learned():
    assert learned(prepare_case("02-content-parts")) == [" good part<|im_end|>"] * 3


def test_12_of_a_preference_the_chosen_answer_is_learned():
    assert learned(prepare_case("12-lf-dpo")) == [f"CHOSEN{i}<|im_end|>" for i in range(3)]


def test_14_arguments_that_were_encoded_twice_are_an_object():
    call, _ = learned(prepare_case("14-double-encoded-arguments"))[0].split("<|im_end|>")
    assert json.loads(call) == dict(name="land", arguments=dict(location="current"))


def test_17_blocks_of_anthropic_are_calls_and_their_results():
    data = prepare_case("17-anthropic-blocks")
    call = '{"name": "weather", "arguments": {"n": 0}}'
    assert learned(data)[0] == f"Looking.\n{call}<|im_end|>Cold.<|im_end|>"
    assert "4 C<|im_end|>" in shown(data) and '"parameters": {"type": "object"}' in shown(data)


def test_18_functions_are_tools():
    data = prepare_case("18-openai-functions")
    assert '"name": "weather", "description": "d"' in shown(data) and data.train.seen.unread == {}


def printed(capsys, name:str, *options)->str:
    "What `sft_nb data` prints for the rows of a case"
    main(["data", "--train-file", str(shared(f"field_cases/{name}")/"rows.jsonl"), "--eval-samples", "0", *options])
    return "".join(capsys.readouterr())


def test_07_calls_are_proposed_as_the_answer_and_tools_are_not(capsys):
    text = printed(capsys, "07-proposal-xlam")
    assert "Fix: --fields question=query answer=answers," in text and "answer=tools" not in text


def test_09_a_transcript_is_no_answer(capsys):
    text = printed(capsys, "09-proposal-glaive")
    assert "--fields" not in text and "chat, a transcript of several turns" in text


def test_15_a_system_message_that_the_template_refuses_begins_the_question(capsys):
    template = str(shared("field_cases/15-template-refuses/t.jinja"))
    data = prepare_case("15-template-refuses", chat_template=template)
    assert shown(data).startswith("<|im_start|>user\nOne word.\n\nq0<|im_end|>")
    assert learned(data) == ["a<|im_end|>"] * 3
    said = printed(capsys, "15-template-refuses", "--chat-template", template)
    assert "the system messages of 3 rows are written at the beginning of the first question" in said


def test_23_the_day_that_a_template_writes_belongs_to_the_run(tmp_path):
    "A run of November is resumed in December, without the rows that were prepared in November"
    case = shared("field_cases/23-date-in-template")
    for file in case.iterdir(): shutil.copy(file, tmp_path)
    done = subprocess.run([sys.executable, "date.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "dec, nov's cache: <|im_start|>system|Today: 01 Dec 2026" in done.stdout, done.stderr[-2000:]
    assert "template_date: the chat template writes the date into prompts: 2026-12-01" in done.stdout
    assert "RESUMED day: finished at step 6" in done.stdout, done.stdout
    kept = json.loads((tmp_path/"runs_t/day/config.json").read_text())["config"]
    assert kept["chat_template_kwargs"] == ["strftime_now=2026-11-28"]


def config_of(name:str, file:str, **overrides):
    "A config of a case, with its own rows"
    return load_config(shared(f"field_cases/{name}")/file, eval_samples=0, **overrides)


def test_04_reasoning_that_llama_factory_removes_is_removed():
    template = shared("field_cases/04-lf-enable-thinking-false")/"think.jinja"
    data = prepare(config_of("04-lf-enable-thinking-false", "lf.yaml", chat_template=str(template)))
    assert learned(data) == ["Perhaps.<|im_end|>"] * 3 and "<think>" not in shown(data)
    writes_blocks = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"""
    data = prepare(config_of("04-lf-enable-thinking-false", "lf.yaml", chat_template=writes_blocks))
    assert learned(data) == ["Perhaps.<|im_end|>"] * 3 and shown(data).count("<think>\n\n</think>\n\n") == 1


def test_05_trl_learns_conversations_whole_and_completions_alone(tmp_path):
    data = prepare(config_of("05-trl-messages", "trl.yaml"))
    assert "user\nq0<|im_end|>\n<|im_start|>assistant\na0<|im_end|>" in learned(data)[0]
    assert data.report.figures["prompts_learned_too"] == "in 3 rows (train_on_prompt: TRL's default)"
    rows = tmp_path/"pairs.jsonl"
    rows.write_text('{"prompt": "q", "completion": "a"}\n{"conversations": [{"from": "human", "value": "q"}, '
                    '{"from": "gpt", "value": "a"}]}\n')
    both = learned(prepare(config_of("05-trl-messages", "trl.yaml", train_file=str(rows))))
    assert both[0] == "a<|im_end|>" and both[1].startswith("user\nq")
    answers = config_of("05-trl-messages", "trl.yaml", assistant_only_loss=True)
    assert learned(prepare(answers)) == [f"a{i}<|im_end|>" for i in range(3)]


def test_06_a_file_that_only_predicts_is_refused_in_one_sentence():
    with pytest.raises(ConfigError) as e: config_of("06-lf-predict", "predict.yaml")
    assert "do_predict = True asks for answers to held-out rows, and no training" in str(e.value)
    assert len(str(e.value).splitlines()) == 1 and "sft_nb evaluate runs/NAME" in str(e.value)


@pytest.mark.parametrize("file, tool", [("torchtune.yaml", "torchtune"), ("litgpt.yaml", "LitGPT")])
def test_20_files_of_other_tools_are_named(file, tool):
    with pytest.raises(ConfigError, match=f"this is a config of {tool}, which is not read") as e:
        config_of("20-other-tools", file)
    assert len(str(e.value).splitlines()) == 1 and "nearest" not in str(e.value)


def test_20_swifts_file_is_read():
    cfg = config_of("20-other-tools", "swift.yaml")
    assert (cfg.method, cfg.train_file, cfg.system_prompt) == ("lora", ("rows.jsonl[:500]",), "You are terse.")


def test_13_an_encoding_is_proposed_that_gives_text(capsys):
    text = printed(capsys, "13-gbk")
    assert "iconv -f gbk " in text and "cp1252" not in text
