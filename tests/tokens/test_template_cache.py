"""Skeletons save time and change no tokens."""
import json

import pytest
from conftest import shared
from samples import no_eval, pairs, trl_template

from sft_nb.config.load import load_config
from sft_nb.extras import template_cache
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def test_a_wrong_skeleton_is_noticed_and_everything_done_again(tokenizer, monkeypatch):
    nothing = template_cache._Literals(set(), set())
    # blind, so that only rows done both ways can tell
    monkeypatch.setattr(template_cache, "_foreseeable_questions", lambda *_: nothing)
    tok = load_tokenizer(load_config())
    tok.chat_template = ("{% for m in messages %}{% set x = '' ~ m.content %}<|im_start|>{{ m.role }}"
                         "{% if x | length < 12 %} short{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                         "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}")
    rows = [dict(question="a question that is long", answer="an answer that is long"),
            *[dict(question="q", answer="a")] * 5, *pairs(300)]
    for x, r in zip(prepare(no_eval(task="chat"), tok, train=rows).train.tokens, rows):
        talk = [dict(role="user", content=r["question"]), dict(role="assistant", content=r["answer"])]
        assert tok.decode(x["input_ids"]) == tok.apply_chat_template(talk, tokenize=False).rstrip("\n")


SETS = dict(gsm8k="gsm8k/train.jsonl", chats="fastchat_chat/dummy_conversation.json",
            tools="glaive_toolcall/glaive_toolcall_en_demo.json")

QWEN = dict(gsm8k="qwen2_5.jinja", chats="qwen3_training.jinja", tools="qwen2_5.jinja")   # the other in `make soak`

@pytest.mark.parametrize("name, template", [
    pytest.param(name, template, marks=[] if template == QWEN[name] else pytest.mark.soak)
    for name in SETS for template in ("qwen3_training.jinja", "qwen2_5.jinja")])
def test_the_tokens_are_the_same_with_and_without(tmp_path, name, template):
    prints = set()
    for skeletons in (True, False):
        cfg = no_eval(tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/" + SETS[name])),
                      chat_template=trl_template(template), max_samples=70, max_length=4096, on_bad_row="drop",
                      template_skeletons=skeletons, cache_dir=str(tmp_path/str(skeletons)))
        data = prepare(cfg)
        prints.add((data.train.fingerprint, json.dumps(data.report.to_dict())))
    assert len(prints) == 1


def test_what_a_template_asks_of_a_string_is_foreseen(tokenizer):
    tok = load_tokenizer(load_config())
    tok.chat_template = (
        "{% macro in_words(text) %}{{ text.replace('||', ' or ') }}{% endmacro %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ in_words(m.content) }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    rows = [*pairs(1500), dict(question="5 || 6, or 5+1?", answer="it is 6"), *pairs(300)]
    data = prepare(no_eval(task="chat"), tok, train=rows)
    for x, r in zip(data.train.tokens, rows):
        talk = [dict(role="user", content=r["question"]), dict(role="assistant", content=r["answer"])]
        assert tok.decode(x["input_ids"]) == tok.apply_chat_template(talk, tokenize=False).rstrip("\n")
