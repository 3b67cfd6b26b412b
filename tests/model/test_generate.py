"""Batched decoding."""
import json
import shutil

import torch
from transformers import AutoTokenizer

from sft_nb.config import load_config
from sft_nb.tokens.tokenizer import load_tokenizer, model_path
from sft_nb.tokens.encode import encode, encode_prompts, end_ids
from sft_nb.model.generate import generate
from sft_nb.model.load import load_base
from sft_nb.model.adapter import load_adapter


def ask(*questions): return [[dict(role="user", content=q)] for q in questions]


def test_greedy_equals_transformers_on_a_single_prompt(tokenizer):
    base, talk = load_base(load_config(), tokenizer), ask("What is the opposite of big?")
    ids = torch.tensor(encode_prompts(talk, tokenizer))
    how = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    theirs = base.generate(input_ids=ids, **how)[0, ids.shape[1]:]
    ours, = generate(base, tokenizer, talk, max_new_tokens=20)
    assert ours.text == tokenizer.decode(theirs, skip_special_tokens=True) and ours.ended


def test_sampling_differs_and_greedy_does_not(tokenizer):
    base = load_base(load_config(), tokenizer)
    talk = ask("Tell me about Ada.") * 8
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30)}) == 1
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30, temperature=1.)}) > 1


def test_the_adapter_off_is_the_base(trained, tokenizer):
    questions = ask("What colour is the sky?", "Add 14 to 23.")
    model = load_adapter(trained.config, tokenizer, trained.adapter)
    with model.disable_adapter(): off = generate(model, tokenizer, questions, max_new_tokens=20)
    assert off == generate(load_base(trained.config, tokenizer), tokenizer, questions, max_new_tokens=20)


def test_generation_stops_at_the_templates_end_of_turn_when_eos_is_another(trained, tmp_path):
    "A base's eos is often not what ends a turn in its template; training ends answers with the latter, so both stop"
    shutil.copytree(model_path("tiny"), tmp_path/"base")
    tok = AutoTokenizer.from_pretrained(tmp_path/"base")
    tok.eos_token = "<|endoftext|>"
    tok.save_pretrained(tmp_path/"base")
    file = tmp_path/"base/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(eos_token_id=tok.eos_token_id)))
    cfg = load_config(model=str(tmp_path/"base"))
    tok = load_tokenizer(cfg)
    im_end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end_ids(tok) == [im_end, tok.eos_token_id]
    (_, labels), = encode({"row": ask("Hi")[0] + [dict(role="assistant", content="Hello")]}, tok)
    assert labels[-1] == im_end
    answer, = generate(load_base(cfg, tok), tok, ask("What colour is the sky?"), max_new_tokens=30)
    assert answer.ended and "<" not in answer.text and answer.n_tokens < 12
