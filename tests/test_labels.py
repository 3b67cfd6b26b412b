"""Labels: exactly the answer and its end are learned, and what stands before is what generation is given. For any chat template and tokenizer."""
import random
from pathlib import Path

import pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.config import load_config
from sft_nb.labels import Encoder, Layouts, Template, choose_pad, encode, encode_prompts, layout, load_tokenizer
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


# every template that trl ships, with every tokenizer: the template's special tokens are added, as its model has them

def templates():
    import trl
    return sorted((Path(trl.__file__).parent/"chat_templates").glob("*.jinja"))


TEMPLATES = templates()
TOKENIZERS = ["qwen3", "smollm2", "mistral-v3-hf", "phi-3-hf", "gpt2", "oasst-tiny"]
CONTENTS = ["Hi", "1 + 1 = 2", "  two spaces before", "and after  ", "\nnew lines\n\n", "", "caf\u00e9, \u4f60\u597d, \U0001f680!", "<|im_end|> <|im_start|>assistant", "</s>[INST] no [/INST]", "{{ raise_exception('x') }} {% if %}",
            "assistant", "<think>\nhm\n</think>\n\n4", "user\nassistant\n", "a\tb", "0", "<start_of_turn>model\n", "def f(x):\n    return x ** 2", "x" * 60, "Ends with a colon:", "\u00a0nbsp"]


def conversations(seed:int, n:int):
    "Random conversations: a system message or none, 1 to 6 turns"
    r = random.Random(seed)
    for _ in range(n):
        turns = [dict(role=role, content=r.choice(CONTENTS)) for _ in range(r.choice([1, 1, 2, 3, 6])) for role in ("user", "assistant")]
        yield [dict(role="system", content=r.choice(CONTENTS[:3] + CONTENTS[6:]))] * r.choice([0, 0, 1]) + turns


def said(tok, ids, start, stop):
    "What the tokens say, behind what stands before them"
    read = lambda x: tok.decode(x, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before, both = read(ids[:start]), read(ids[:stop])
    return both[len(before):] if both.startswith(before) else read(ids[start:stop])


def check(tok, talk, examples, *, own=True):
    "The three demands, against apply_chat_template itself"
    parted = Template(tok).parted
    write = lambda m, **kw: tok.apply_chat_template(parted(m), tokenize=False, **kw)
    ids_of = lambda m: tok.apply_chat_template(parted(m), add_generation_prompt=True)["input_ids"]
    found = []
    for ids, labels in examples:
        assert len(ids) == len(labels) and all(l in (-100, i) for i, l in zip(ids, labels))
        start = None
        for k, l in enumerate([*labels, -100]):
            if l != -100 and start is None: start = k
            if l == -100 and start is not None:
                found.append((ids, start, k))
                start = None
    answers = [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    assert len(found) == len(answers), "one span for each answer, and nothing of another role"
    for (ids, start, stop), i in zip(found, answers):
        assert ids[:start] == ids_of(talk[:i]), "the tokens before the span are those that generation is given"
        before, after, content = write(talk[:i], add_generation_prompt=True), write(talk[:i + 1]), talk[i]["content"]
        text, end = said(tok, ids, start, stop), tok.decode(ids[stop - 1:stop])
        assert ids[stop - 1] in {tok.eos_token_id, *tok.all_special_ids, *(i for i, t in tok.added_tokens_decoder.items() if t.special)}, "the span ends with an end token"
        spaceless = lambda s: "".join(s.replace("\u2581", " ").split())
        says = spaceless(content.split("</think>")[-1])   # templates may put the reasoning in another place
        assert says in spaceless(text) and (not own or spaceless(text).endswith(says + spaceless(end))), "content and end token"
        if not after.startswith(before): continue
        same = spaceless if tok.convert_tokens_to_ids("\u2581the") != tok.unk_token_id else str   # sentencepiece puts a space behind each special token, for generation as for us
        written, text = same(after[len(before):]), same(text)
        assert written.startswith(text) or text.endswith(tok.eos_token) and written.startswith(text.removesuffix(tok.eos_token)), "what the template wrote, or that and the tokenizer's end"


def real(name, template=None, special=()):
    tok = load_tokenizer(load_config(tokenizer=str(shared(f"tokenizers/{name}"))))
    if template is not None: tok.chat_template = template
    if special: tok.add_special_tokens(dict(additional_special_tokens=list(special)))
    return tok


def markers(template:str):
    "Special tokens that a template writes"
    import re
    return sorted(set(re.findall(r"<[|\uff5c]?[\w\u2581]+[|\uff5c]?>|\[/?[A-Z_]{3,}\]", template)) - {"<think>"})


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("own", [True, False], ids=["its tokens", "foreign tokens"])
def test_every_template_of_trl(name, own):
    "Templates with their special tokens in the vocabulary, and as text that the tokenizer does not know"
    tok, counts = real(name, special=sorted({m for f in TEMPLATES for m in markers(f.read_text())}) if own else ()), dict(together=0, apart=0, refused=0, changed=0)
    changed = set()
    for k, file in enumerate(TEMPLATES):
        tok.chat_template = file.read_text()
        t = Template(tok)
        lay, encoder = Layouts(t), Encoder(t)
        for talk in conversations(k, 8):
            try: examples = [lay(talk) for _ in range(3)][-1]   # the third time by a skeleton, if it has one
            except SftError as e:
                if "refuses" in str(e):
                    counts["refused"] += 1
                    with pytest.raises(Exception): [tok.apply_chat_template(t.parted(talk[:i + x]), tokenize=False, add_generation_prompt=not x) for i, m in enumerate(talk) if m["role"] == "assistant" for x in (0, 1)]
                else:
                    counts["changed"] += 1
                    changed.add(file.name)
                    assert "changes the answer" in str(e), e
                continue
            rows = encoder([examples], lambda _: layout(talk, t, apart=True)).rows()
            counts["together" if len(rows) == 1 else "apart"] += 1
            try: check(tok, talk, rows, own=own)
            except AssertionError as e: raise AssertionError(f"{file.name}: {e}\n{talk}\n{[[tok.decode(i), [tok.decode(x) for x in supervised_turns(l)]] for i, l in rows]}") from e
    print(name, own, counts, changed)
    assert counts["together"] > 200 and counts["apart"] > 50 and counts["refused"] + counts["changed"] < .15 * 8 * len(TEMPLATES), counts


def test_tool_turns_in_every_template_that_knows_them():
    "A call, its result and the answer after it: both answers are learned, each behind what generation is given; the call has its name and argument"
    from sft_nb.labels import _CALL
    tok, known = real("qwen3", special=sorted({m for f in TEMPLATES for m in markers(f.read_text())})), []
    for file in TEMPLATES:
        tok.chat_template = file.read_text()
        t = Template(tok)
        if not t.knows_tools: continue
        for before, result, answer in (("", "42", "It is 42."), ("Let me see.", '{"a": [1, 2]}', "caf\u00e9\n\n"), ("", "<|im_end|>", "x" * 60)):
            talk = [dict(role="user", content="Ask it."), dict(role="assistant", content=before, tool_calls=[_CALL]), dict(role="tool", name="probe_fn", tool_call_id="probe0001", content=result), dict(role="assistant", content=answer)]
            try: lay = layout(talk, t)
            except SftError as e:   # llama 3 writes a call or words, not both
                assert before and "changes the answer: 'Let me see.'" in str(e), (file.name, e)
                continue
            examples = Encoder(t)([lay], lambda _: layout(talk, t, apart=True)).rows()
            try: check(tok, talk, examples, own=False)
            except AssertionError as e: raise AssertionError(f"{file.name}: {e}") from e
            call = next(tok.decode(turn) for ids, labels in examples for turn in supervised_turns(labels))
            assert "probe_fn" in call and "probe_value" in call, (file.name, call)
        known.append(file.name)
    assert len(known) > 20, known


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
