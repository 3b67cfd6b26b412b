"""Labels: exactly the answer and its end are learned, and what stands before is what generation is given."""
import json
from pathlib import Path

import pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.config import load_config
from sft_nb.data import choose_pad, encode, encode_prompts, load_tokenizer, prepare, read_jsonl, segments
from sft_nb.report import ConfigError, SftError

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30).filter(lambda s: s.strip() == s)
talks = st.lists(st.tuples(words, words), min_size=1, max_size=4).map(
    lambda turns: [m for q, a in turns for m in (dict(role="user", content=q), dict(role="assistant", content=a))])
relaxed = how(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def supervised_turns(labels):
    "Runs of labels that are not -100"
    turns, run = [], []
    for l in [*labels, -100]:
        if l != -100: run.append(l)
        elif run: turns.append(run); run = []
    return turns


@given(talks)
@relaxed
def test_the_answers_and_their_ends_and_nothing_else(tokenizer, talk):
    (ids, labels), = encode({"row": talk}, tokenizer)
    assert all(l in (-100, i) for i, l in zip(ids, labels))
    assert [tokenizer.decode(t) for t in supervised_turns(labels)] == [m["content"] + "<|im_end|>" for m in talk if m["role"] == "assistant"]


@given(talks)
@relaxed
def test_what_stands_before_a_turn_is_what_generation_is_given(tokenizer, talk):
    (ids, labels), = encode({"row": talk}, tokenizer)
    starts = [i for i, l in enumerate(labels) if l != -100 and labels[i - 1] == -100]
    for start, turn in zip(starts, range(1, len(talk), 2)):
        assert encode_prompts([talk[:turn]], tokenizer)[0] == ids[:start]


REAL = [("qwen3", "qwen3_training.jinja"), ("qwen3", "qwen2_5.jinja"), ("smollm2", None), ("gpt2", None), ("mistral-v3-hf", None), ("phi-3-hf", None), ("oasst-tiny", None)]

@pytest.mark.parametrize("name,template", REAL)
def test_real_tokenizers_on_gsm8k(name, template):
    "GSM8K through real vocabularies, with a chat template that trl ships and without one"
    rows = [json.loads(l) for l in shared("data/gsm8k/train.jsonl").open()][:200]
    tok = load_tokenizer(load_config(tokenizer=str(shared(f"tokenizers/{name}"))))
    if template:
        import trl
        file = Path(trl.__file__).parent/"chat_templates"/template
        if not file.exists(): pytest.skip(f"this trl ships no {template}")
        tok.chat_template = file.read_text()
    talks = {f"row {i}": [dict(role="user", content=r["question"]), dict(role="assistant", content=r["answer"])] for i, r in enumerate(rows)}
    assert tok.pad_token_id != tok.eos_token_id
    for (ids, labels), talk in zip(encode(talks, tok), talks.values()):
        n = next(i for i, l in enumerate(labels) if l != -100)
        assert encode_prompts([talk[:-1]], tok)[0] == ids[:n]
        learned = tok.decode(labels[n:])
        assert learned.endswith(talk[-1]["content"] + tok.eos_token), learned[-80:]
        assert labels[-1] == tok.eos_token_id and labels.count(tok.eos_token_id) == 1
        if tok.bos_token_id not in (None, tok.eos_token_id): assert ids.count(tok.bos_token_id) == (1 if ids[0] == tok.bos_token_id else 0)


def test_a_text_that_carries_its_own_bos_gets_no_second_one():
    "The 100 rows of this sample begin with a literal <s>, and the tokenizer adds one too"
    tok = load_tokenizer(load_config(tokenizer=str(shared("tokenizers/mistral-v3-hf"))))
    texts = [json.loads(l)["text"] for l in shared("data/mistral_nli_sample/sample_ft.jsonl").open()]
    assert sum(tok(t)["input_ids"][:2] == [1, 1] for t in texts) == 100
    for t in texts: assert encode_prompts([[dict(role="user", content=t)]], tok)[0][:2] != [1, 1]


def test_pad_is_never_the_end_and_is_explained():
    expected = {"qwen3": "own", "smollm2": "reserved", "mistral-v3-hf": "reserved|unknown", "phi-3-hf": "reserved|unknown|placeholder", "gpt2": "added", "oasst-tiny": "own"}
    from transformers import AutoTokenizer
    for name, why in expected.items():
        tok = AutoTokenizer.from_pretrained(shared(f"tokenizers/{name}"))
        pad, reason = choose_pad(tok)
        assert tok.pad_token_id not in (None, tok.eos_token_id) and any(w in reason for w in why.split("|")), (name, pad, reason)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, tokenizer):
    from transformers import PreTrainedTokenizerFast
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end token"): load_tokenizer(load_config(tokenizer=str(tmp_path)))


@given(st.binary(max_size=300))
@how(max_examples=300, deadline=None)
def test_no_file_gives_another_error_than_ours(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("f")/"rows.jsonl"
    file.write_bytes(content)
    try: rows = read_jsonl(file)
    except SftError as e: assert "rows.jsonl" in str(e) and "Fix:" in str(e)
    else: assert all(isinstance(r, dict) for r in rows.values())


def test_gsm8k_in_qwen_tokens_has_its_known_figures():
    "77.4% of the training rows are longer than 128 tokens of question and answer; 2 rows than 512"
    cfg = load_config("gsm8k", tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/gsm8k/train.jsonl")), eval_samples=0)
    data = prepare(cfg)
    assert (data.train.n_read, len(data.train.rows)) == (7473, 7471)
    assert [d["reason"] for d in data.dropped] == ["longer than max_length 512"] * 2
    lengths = [len(x) for x in data.train.tokens["input_ids"]]
    assert abs(sum(n > 128 for n in lengths) / 7473 - .774) < .01


def test_held_out_rows_that_are_trained_on_are_found(tmp_path, tokenizer):
    (tmp_path/"a.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    data = prepare(load_config(train_file=str(tmp_path/"a.jsonl"), eval_file=str(tmp_path/"a.jsonl")), tokenizer)
    finding = next(f for f in data.report.findings if f.check == "held_out")
    assert (finding.status, finding.says[:9]) == ("warn", "2 held-ou")


def test_messages_and_prompt_completion_are_the_same_rows(tmp_path, tokenizer):
    talk = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
    (tmp_path/"a.jsonl").write_text(json.dumps(dict(messages=talk)) + "\n" + json.dumps(dict(prompt="1+1?", completion="2")) + "\n")
    data = prepare(load_config(task="chat", train_file=str(tmp_path/"a.jsonl"), eval_samples=0), tokenizer)
    first, second = data.train.tokens
    assert first == second and data.eval is None
    assert tokenizer.decode([l for l in first["labels"] if l != -100]) == "2<|im_end|>"


def test_a_row_of_another_form_is_named_with_its_line(tmp_path, tokenizer):
    (tmp_path/"a.jsonl").write_text('{"prompt": "1+1?", "completion": "2"}\n{"text": "1+1=2"}\n')
    with pytest.raises(SftError, match="a.jsonl line 2: it has the fields text"): prepare(load_config(task="chat", train_file=str(tmp_path/"a.jsonl"), eval_samples=0), tokenizer)
