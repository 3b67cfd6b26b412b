"""Real rows through real tokenizers, mixtures and splits: from `prepare` to the tokens."""
import json, random
from functools import cache

import pytest
from conftest import shared
from samples import finding, no_eval, pairs, supervised, trl_template, write

from sft_nb.config.load import load_config, save_config
from sft_nb.base.report import ConfigError, edit, MissingFileError, SftError
from sft_nb.rows.sources import read_rows
from sft_nb.tokens.encode import encode_prompts
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


@cache
def loaded(name, template):
    "A tokenizer that several tests read, and the settings that load it, which takes a second"
    how = dict(tokenizer=str(shared(f"tokenizers/{name}")), chat_template=trl_template(template) if template else None)
    return load_tokenizer(no_eval(**how)), how


def gsm8k(n): return [json.loads(l) for l in shared("data/gsm8k/train.jsonl").open()][:n]


# figures of real rows

WHOLE = pytest.mark.soak   # the whole set; its first rows in the suite

@pytest.mark.parametrize("n, too_long, over_128", [(1000, 1, .758), pytest.param(7473, 2, .774, marks=WHOLE)])
def test_gsm8k_in_qwen_tokens_has_its_known_figures(n, too_long, over_128):
    "77.4% of the training rows are longer than 128 tokens of question and answer; 2 rows than 512"
    cfg = load_config("gsm8k", tokenizer=str(shared("tokenizers/qwen3")), eval_samples=0,
                      train_file=str(shared("data/gsm8k/train.jsonl")), max_samples=n)
    data = prepare(cfg)
    assert (data.train.n_read, data.train.n_kept) == (n, n - too_long)
    assert [d["reason"] for d in data.dropped] == ["longer than max_length 512"] * too_long
    assert abs(sum(n > 128 for n in data.train.lengths) / n - over_128) < .01


REAL = [("qwen3", "qwen3_training.jinja"), ("qwen3", "qwen2_5.jinja"), ("smollm2", None), ("gpt2", None),
        ("mistral-v3-hf", None), ("phi-3-hf", None), ("oasst-tiny", None)]

@pytest.mark.parametrize("name,template", REAL)
def test_real_rows_through_real_tokenizers(name, template):
    "GSM8K with a chat template that trl ships and without one: prompts are those of inference, one end, one BOS"
    rows = gsm8k(100)
    tok, how = loaded(name, template)
    cfg = no_eval(**how, max_length=2000)
    data = prepare(cfg, tok, train=rows)
    assert len(data.train.tokens) == 100 and data.train.duplicates() == 0
    for x, row in zip(data.train.tokens, rows):
        ids, labels = x["input_ids"], x["labels"]
        n = next(i for i, l in enumerate(labels) if l != -100)
        assert encode_prompts([[dict(role="user", content=row["question"])]], tok)[0] == ids[:n]
        assert tok.decode(labels[n:]).endswith(row["answer"] + tok.eos_token)
        assert labels[-1] == tok.eos_token_id and labels.count(tok.eos_token_id) == 1
        if tok.bos_token_id in (None, tok.eos_token_id): continue
        assert ids.count(tok.bos_token_id) == (ids[0] == tok.bos_token_id)


@pytest.mark.parametrize("n, others", [(500, 14), pytest.param(2000, 75, marks=WHOLE)])
def test_the_prompt_is_a_prefix_where_the_tokenizer_alone_would_not_make_it_one(n, others):
    """Without a separator the tokens of the question are no prefix of those of question + answer in 75 of the first
    2000 rows, 14 of them among the first 500; here they always are"""
    rows = gsm8k(n)
    cfg = no_eval(tokenizer=str(shared("tokenizers/qwen3")), prompt_separator="", max_length=2000)
    tok = load_tokenizer(cfg)
    together = tok([r["question"] + r["answer"] for r in rows])["input_ids"]
    alone = tok([r["question"] for r in rows])["input_ids"]
    assert sum(t[:len(a)] != a for t, a in zip(together, alone)) == others
    for x, a, r in zip(prepare(cfg, tok, train=rows).train.tokens, alone, rows):
        n = len(a)
        assert x["input_ids"][:n] == a and x["labels"][:n] == [-100] * n
        assert tok.decode(x["labels"][n:]) == r["answer"] + tok.eos_token


def test_a_text_that_carries_its_own_bos_gets_no_second_one():
    """The 100 rows of this sample begin with a literal <s> and end with </s>; the plain tokenizer makes [1, 1, ...] of
    all of them"""
    file, name = shared("data/mistral_nli_sample/sample_ft.jsonl"), str(shared("tokenizers/mistral-v3-hf"))
    tok = load_tokenizer(load_config(tokenizer=name))
    assert sum(tok(json.loads(l)["text"])["input_ids"][:2] == [1, 1] for l in file.open()) == 100
    how = dict(tokenizer=name, train_file=str(file), max_length=1000)
    eos, space = tok.eos_token_id, tok.convert_tokens_to_ids("\u2581")
    for x in prepare(no_eval(**how), tok).train.tokens:
        ids, labels = x["input_ids"], x["labels"]
        assert ids.count(1) == 1 and ids[0] == 1 and labels[0] == -100
        assert ids.count(eos) == 1 and labels[-1] in (eos, space)
    answers = prepare(no_eval(**how, response_template="[/INST]"), tok)
    assert supervised(tok, answers)[0].strip().startswith("{")


ALL = dict(gsm8k="gsm8k/train.jsonl", nli="mistral_nli_sample/sample_ft.jsonl",
           units="unit_conversion_deepmind/train.jsonl", chats="fastchat_chat/dummy_conversation.json",
           tools="glaive_toolcall/glaive_toolcall_en_demo.json")

@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tokenizer,template", [("qwen3", "qwen3.jinja"), ("smollm2", None), ("mistral-v3-hf", None)])
def test_every_real_set_of_a_known_format_goes_in(name, tokenizer, template):
    tok, how = loaded(tokenizer, template)
    cfg = no_eval(**how, train_file=str(shared("data/" + ALL[name])), max_length=4096, max_samples=100)
    data = prepare(cfg, tok)
    s = data.train
    assert s.n_read == s.n_kept + s.counts.dropped and s.n_kept > .9 * s.n_read
    assert finding(data, "train_ends").status == "ok" or name == "nli"


def test_tool_calls_are_learned_also_where_the_template_has_no_place_for_them(tokenizer):
    rows = json.loads(shared("data/glaive_toolcall/glaive_toolcall_en_demo.json").read_text())
    calls = [(r, m) for r in rows for m in r["conversations"] if m["from"] == "function_call"]
    row, call = calls[0]
    name = json.loads(call["value"])["name"]
    data = prepare(no_eval(max_length=10_000), tokenizer, train=[row])
    assert any(f'"name": "{name}"' in says for says in supervised(tokenizer, data))
    assert name in tokenizer.decode(data.train.tokens[0]["input_ids"])


def test_which_answers_are_supervised(tokenizer):
    talk = [m for k in range(3) for m in (dict(role="user", content=f"q{k}"), dict(role="assistant", content=f"a{k}"))]
    def said(talk=talk, **how): return supervised(tokenizer, prepare(no_eval(task="chat", **how), tokenizer,
                                                                     train=[dict(messages=talk)]))
    def marked(which, **mark): return [m | (mark if m["content"] in which else {}) for m in talk]
    assert said() == ["a0<|im_end|>a1<|im_end|>a2<|im_end|>"] and said(train_on_turns="last") == ["a2<|im_end|>"]
    assert said(marked(["a1"], train=False)) == ["a0<|im_end|>a2<|im_end|>"]
    assert said(marked(["a2"], weight=0), train_on_turns="all") == ["a0<|im_end|>a1<|im_end|>"]
    whole, = said(train_on_prompt=True)
    assert "q0" in whole and "a2" in whole
    with pytest.raises(SftError, match="no row is left to learn from: 1 row with no answer that is trained"):
        said(marked(["a0", "a1", "a2"], train=False))


# mixtures and splits

def test_files_are_mixed_by_weight(tmp_path, tokenizer):
    files = write(tmp_path/"a.jsonl", pairs(100)), write(tmp_path/"b.jsonl", pairs(400, seed=1))
    def count(**kw): return prepare(no_eval(train_file=files, **kw), tokenizer).train.n_read
    assert count() == 500 and count(train_weights=(3., 1.)) == 700 and 150 < count(train_weights=(1., .25)) < 250
    assert count(train_weights=(1., .25)) == count(train_weights=(1., .25))
    as_shares = prepare(no_eval(train_file=files, train_weights=(.3, .7)), tokenizer)
    fix = finding(as_shares, "train_weights").fix
    assert fix == edit(train_weights=(1., .583)) and as_shares.train.seen.in_files == {"a.jsonl": 100, "b.jsonl": 400}
    shared = prepare(no_eval(train_file=files, **fix.settings), tokenizer)
    counted = shared.report.figures["train"]["rows_of_files"].value
    assert counted["a.jsonl"] == 100 and counted["b.jsonl"] == pytest.approx(233, abs=30)   # drawn at random
    assert not [f for f in shared.report.findings if f.check == "train_weights"]
    for wrong in (0., -1.):
        with pytest.raises(ConfigError, match=f"a weight is {wrong:g}"): count(train_weights=(1., wrong))


def test_a_cut_share_is_no_training_row_and_duplicates_stay_together(tmp_path, tokenizer):
    rows = pairs(300)
    random.Random(3).shuffle(twice := rows + rows)
    file = write(tmp_path/"a.jsonl", twice)
    data = prepare(load_config(train_file=file, eval_fraction=.2, eval_samples=1000), tokenizer)
    assert data.train.n_read + data.eval.n_read == 600 and 60 < data.eval.n_read < 180 and data.eval.n_read % 2 == 0
    assert finding(data, "held_out").status == "ok"
    assert data.train.duplicates() == data.train.n_read // 2


SPELLED = dict(
    messages=lambda q, a: dict(messages=[dict(role="user", content=q), dict(role="assistant", content=a)]),
    system=lambda q, a: dict(system="Be brief.", prompt=q + " " * int(a), completion=a),
    text=lambda q, a: dict(text=f"{q} [/INST] {a}"))

@pytest.mark.parametrize("spell", SPELLED.values(), ids=SPELLED)
def test_rows_that_ask_the_same_are_on_one_side(tmp_path, tokenizer, spell):
    "40 questions with 10 answers each; by rows, every held-out question would be trained on"
    file = write(tmp_path/"a.jsonl", [spell(f"What about {k}?", str(j)) for j in range(10) for k in range(40)])
    cfg = load_config(task="chat", train_file=file, eval_fraction=.3, eval_samples=1000, response_template="[/INST]")
    for data in (prepare(cfg, tokenizer), prepare(cfg, tokenizer, train=[row for _, row in read_rows(file).items()])):
        assert finding(data, "held_out").status == "ok" and data.train.n_read + data.eval.n_read == 400
        assert data.eval.n_read % 10 == 0 and 0 < data.eval.n_read < 250


def test_the_rows_of_a_run_are_known_by_their_fingerprint(tmp_path):
    "Other rows under the name of a run's file are a warning; settings of other rows, or other rows, are none"
    file, run = tmp_path/"rows.jsonl", tmp_path/"runs"/"first-1"
    run.mkdir(parents=True)
    def written(answer): write(file, [dict(question=f"{k}?", answer=f"{answer} {k}") for k in range(20)])
    def found(**how): return [f for f in prepare(load_config(run/"config.json", **how)).report.findings
                              if f.check == "rows_of_the_run"]
    written("It is")
    save_config(no_eval(train_file=str(file)), run/"config.json")
    assert found() == []   # its rows are not known
    prepare(run/"config.json").report.save(run/"data.json")
    assert found() == []
    written("It was")
    finding, = found()
    assert finding.status == "warn" and "not the rows of run first-1 (fingerprints: train: " in finding.says
    assert found(max_samples=9) == found(train_file=str(file)) == []
    file.rename(tmp_path/"rows2.jsonl")
    with pytest.raises(MissingFileError, match="rows.jsonl: there is no such file.*Fix: put it back, or write") as e:
        prepare(run/"config.json")
    assert "rows2" not in str(e.value)
    with pytest.raises(MissingFileError, match="rows2"): prepare(no_eval(train_file=str(file)))
