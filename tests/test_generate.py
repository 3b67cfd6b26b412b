"""Batched decoding and its scores."""
import json

import pytest

from sft_nb.config import load_config
from sft_nb.evaluate import Evaluation, evaluate, wilson
from sft_nb.generate import generate
from sft_nb.model import load_adapter, load_base
from sft_nb.report import ConfigError


def ask(*questions): return [[dict(role="user", content=q)] for q in questions]


def test_greedy_equals_transformers_on_a_single_prompt(tokenizer):
    import torch
    from sft_nb.labels import encode_prompts
    base, talk = load_base(load_config(), tokenizer), ask("What is the opposite of big?")
    ids = torch.tensor(encode_prompts(talk, tokenizer))
    theirs = base.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[0, ids.shape[1]:]
    ours, = generate(base, tokenizer, talk, max_new_tokens=20)
    assert ours.text == tokenizer.decode(theirs, skip_special_tokens=True) and ours.ended


def test_sampling_differs_and_greedy_does_not(tokenizer):
    base = load_base(load_config(), tokenizer)
    talk = ask("Tell me about Ada.") * 8
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30)}) == 1
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30, temperature=1.)}) > 1


def test_an_evaluation_keeps_every_generation(trained):
    e = evaluate(trained, eval_samples=12, progress=False)
    saved = json.loads((trained.path/"eval/adapter.json").read_text())
    assert len(saved["base"]["answers"]) == len(saved["tuned"]["answers"]) == 12
    assert Evaluation.load(trained.path/"eval/adapter.json") == e
    assert e.base.answers == evaluate(trained, eval_samples=12, checkpoint="checkpoint-30", progress=False).base.answers   # greedy, the same base


def test_the_adapter_off_is_the_base(trained, tokenizer):
    questions = ask("What colour is the sky?", "Add 14 to 23.")
    model = load_adapter(trained.config, tokenizer, trained.adapter)
    with model.disable_adapter(): off = generate(model, tokenizer, questions, max_new_tokens=20)
    assert off == generate(load_base(trained.config, tokenizer), tokenizer, questions, max_new_tokens=20)


def test_a_checkpoint_that_is_not_there(trained):
    with pytest.raises(ConfigError, match="there is no checkpoint-7 in it .finished at step 60.; one of adapter, checkpoint-30, checkpoint-60. Fix: --checkpoint checkpoint-60"): evaluate(trained, checkpoint="checkpoint-7")
    with pytest.raises(ConfigError, match="eval_samples is 0"): evaluate(trained, eval_samples=0)


def test_wilson_holds_its_promise():
    "About 95% of the intervals of simulated experiments hold the true share"
    import numpy as np
    r = np.random.default_rng(0)
    hits = [lo <= p <= hi for p in (.02, .3, .5, .95) for k in r.binomial(200, p, 1000) for lo, hi in [wilson(int(k), 200)]]
    assert .93 < np.mean(hits) < .97


def test_generation_stops_at_the_templates_end_of_turn_when_eos_is_another(trained, tmp_path):
    "A base model's eos is often not what ends a turn in its chat template; training ends answers with the latter, so generation stops there too"
    import shutil
    from transformers import AutoTokenizer
    from sft_nb.labels import end_ids, encode, load_tokenizer, model_path
    shutil.copytree(model_path("tiny"), tmp_path/"base")
    tok = AutoTokenizer.from_pretrained(tmp_path/"base")
    tok.eos_token = "<|endoftext|>"
    tok.save_pretrained(tmp_path/"base")
    config = json.loads((tmp_path/"base/generation_config.json").read_text()) | dict(eos_token_id=tok.eos_token_id)
    (tmp_path/"base/generation_config.json").write_text(json.dumps(config))
    cfg = load_config(model=str(tmp_path/"base"))
    tok = load_tokenizer(cfg)
    im_end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end_ids(tok) == [im_end, tok.eos_token_id]
    (_, labels), = encode({"row": ask("Hi")[0] + [dict(role="assistant", content="Hello")]}, tok)
    assert labels[-1] == im_end
    answer, = generate(load_base(cfg, tok), tok, ask("What colour is the sky?"), max_new_tokens=30)
    assert answer.ended and "<" not in answer.text and answer.n_tokens < 12
