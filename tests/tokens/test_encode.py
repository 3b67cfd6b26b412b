"""Labels: exactly the answer and its end are supervised, and what stands before is what generation is given.
For any chat template and tokenizer."""
import random, re

import pytest
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st
from samples import trl_templates
from tokenizers.processors import TemplateProcessing

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.thoughts import split_thought
from sft_nb.tokens.encode import Encoder, encode, encode_prompts
from sft_nb.extras.template_cache import ConversationSplitter
from sft_nb.tokens.template import PROBE_CALL, Template
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.tokens.turns import end_of_answer, split_conversation, has_content


def chat_of(turns):
    return [m for q, a in turns for m in (dict(role="user", content=q), dict(role="assistant", content=a))]


characters = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])
def is_plain(text): return text.strip() == text and split_thought(text).thought is None and "<|" not in text
words = st.text(characters, min_size=1, max_size=30).filter(is_plain)   # Hypothesis tries the tags in our sources too
talks = st.lists(st.tuples(words, words), min_size=1, max_size=4).map(chat_of)
relaxed = how(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def supervised_turns(labels):
    "Runs of labels that are not -100"
    turns, run = [], []
    for l in [*labels, -100]:
        if l != -100: run.append(l)
        elif run:
            turns.append(run)
            run = []
    return turns


@given(talks)
@relaxed
def test_the_answers_and_their_ends_and_nothing_else(tokenizer, talk):
    (ids, labels), = encode({"row": talk}, tokenizer)
    assert all(l in (-100, i) for i, l in zip(ids, labels))
    answers = [m["content"] + "<|im_end|>" for m in talk if m["role"] == "assistant"]
    assert [tokenizer.decode(t) for t in supervised_turns(labels)] == answers


@given(talks)
@relaxed
def test_what_stands_before_a_turn_is_what_generation_is_given(tokenizer, talk):
    (ids, labels), = encode({"row": talk}, tokenizer)
    starts = [i for i, l in enumerate(labels) if l != -100 and labels[i - 1] == -100]
    for start, turn in zip(starts, range(1, len(talk), 2)):
        assert encode_prompts([talk[:turn]], tokenizer)[0] == ids[:start]


# every template that trl ships, with every tokenizer: the template's special tokens are added, as its model has them

TEMPLATES = trl_templates()
TOKENIZERS = ["qwen3", "smollm2", "mistral-v3-hf", "phi-3-hf", "gpt2", "oasst-tiny"]
CONTENTS = ["Hi", "1 + 1 = 2", "  two spaces before", "and after  ", "\nnew lines\n\n", "",
            "caf\u00e9, \u4f60\u597d, \U0001f680!", "<|im_end|> <|im_start|>assistant", "</s>[INST] no [/INST]",
            "{{ raise_exception('x') }} {% if %}", "assistant", "<think>\nhm\n</think>\n\n4", "user\nassistant\n",
            "a\tb", "0", "<start_of_turn>model\n", "def f(x):\n    return x ** 2", "x" * 60, "Ends with a colon:",
            "\u00a0nbsp"]


def conversations(seed:int, n:int):
    "Random conversations: a system message or none, 1 to 6 turns"
    r = random.Random(seed)
    for _ in range(n):
        turns = [dict(role=role, content=r.choice(CONTENTS))
                 for _ in range(r.choice([1, 1, 2, 3, 6])) for role in ("user", "assistant")]
        if not any(map(has_content, turns[1::2])): turns[-1]["content"] = "Hi"   # else there is nothing to learn
        yield [dict(role="system", content=r.choice(CONTENTS[:3] + CONTENTS[6:]))] * r.choice([0, 0, 1]) + turns


def said(tok, ids, start, stop):
    "What the tokens say, behind what stands before them"
    def read(x): return tok.decode(x, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    before, both = read(ids[:start]), read(ids[:stop])
    return both[len(before):] if both.startswith(before) else read(ids[start:stop])


def spans_of(examples):
    "Ids, start and stop of each supervised span; labels are -100 or the token"
    found = []
    for ids, labels in examples:
        assert len(ids) == len(labels) and all(l in (-100, i) for i, l in zip(ids, labels))
        start = None
        for k, l in enumerate([*labels, -100]):
            if l != -100 and start is None: start = k
            if l == -100 and start is not None:
                found.append((ids, start, k))
                start = None
    return found


def spaceless(s): return "".join(s.replace("\u2581", " ").split())


def check(tok, talk, examples, *, own=True):
    "The three demands, against apply_chat_template itself"
    template = Template(tok)
    parted = template.with_parts
    talk = template.adapt_messages(talk)   # reasoning in a text may be written as the template has it
    def write(m, **kw): return tok.apply_chat_template(parted(m), tokenize=False, **kw)
    def ids_of(m): return tok.apply_chat_template(parted(m), add_generation_prompt=True)["input_ids"]
    found = spans_of(examples)
    answers = [i for i, m in enumerate(talk) if m["role"] == "assistant" and has_content(m)]
    assert len(found) == len(answers), "one span for each answer that says something, and nothing of another role"
    special = {i for i, t in tok.added_tokens_decoder.items() if t.special}
    pieces = tok.convert_tokens_to_ids("\u2581the") != tok.unk_token_id
    same = spaceless if pieces else str   # sentencepiece puts a space behind each special token, in generation too
    for (ids, start, stop), i in zip(found, answers):
        assert ids[:start] == ids_of(talk[:i]), "the tokens before the span are those that generation is given"
        before, after, content = write(talk[:i], add_generation_prompt=True), write(talk[:i + 1]), talk[i]["content"]
        text, end = said(tok, ids, start, stop), tok.decode(ids[stop - 1:stop])
        ends = {tok.eos_token_id, *tok.all_special_ids, *special}
        assert ids[stop - 1] in ends, "the span ends with an end token"
        says = spaceless(content.split("</think>")[-1])   # templates may put the reasoning in another place
        assert says in spaceless(text), "content"
        assert not own or spaceless(text).endswith(says + spaceless(end)), "content and end token"
        if not after.startswith(before): continue
        asks = [dict(role="user", content="Hi")]
        header = write(asks, add_generation_prompt=True).removeprefix(write(asks))
        written = after[len(before):]
        if not before.endswith(header): written = written.removeprefix(header)   # this prompt lacks it: nobody says it
        written, text = same(written), same(text)
        unended = text.endswith(tok.eos_token) and written.startswith(text.removesuffix(tok.eos_token))
        assert written.startswith(text) or unended, "what the template wrote, or that and the tokenizer's end"


def real(name, template=None, special=()):
    tok = load_tokenizer(load_config(tokenizer=str(shared(f"tokenizers/{name}"))))
    if template is not None: tok.chat_template = template
    if special: tok.add_special_tokens(dict(additional_special_tokens=list(special)))
    return tok


def markers():
    "Special tokens that the templates write"
    marker = re.compile(r"<[|\uff5c]?[\w\u2581]+[|\uff5c]?>|\[/?[A-Z_]{3,}\]")
    return sorted({m for f in TEMPLATES for m in marker.findall(f.read_text())} - {"<think>"})


def refuses(tok, t, talk):
    "apply_chat_template refuses it as well"
    answers = [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    with pytest.raises(Exception):   # noqa: B017  a template raises what it likes
        for i in answers:
            tok.apply_chat_template(t.with_parts(talk[:i]), tokenize=False, add_generation_prompt=True)
            tok.apply_chat_template(t.with_parts(talk[:i + 1]), tokenize=False)


# two talks with every tokenizer, half of them with the special tokens of the templates; four, both ways, in `make soak`
EVERY = [pytest.param(name, own, n, id=f"{n} talks-{'its' if own else 'foreign'} tokens-{name}",
                      marks=[] if n == 2 else pytest.mark.soak)
         for k, name in enumerate(TOKENIZERS) for own in (True, False) for n in (2, 4) if n == 4 or own == (k % 2 == 0)]

@pytest.mark.parametrize("name, own, n", EVERY)
def test_every_template_of_trl(name, own, n):
    "Templates with their special tokens in the vocabulary, and as text that the tokenizer does not know"
    tok = real(name, special=markers() if own else ())
    counts, changed = dict(together=0, apart=0, refused=0, changed=0), set()
    for k, file in enumerate(TEMPLATES):
        tok.chat_template = file.read_text()
        t = Template(tok)
        lay, encoder = ConversationSplitter(t), Encoder(t)
        for talk in conversations(k, n):
            try: examples = [lay(talk) for _ in range(3)][-1]   # the third time by a skeleton, if it has one
            except SftError as e:
                if "refuses" in str(e) or "template fails" in str(e):   # it needs a bos_token, say
                    counts["refused"] += 1
                    refuses(tok, t, talk)
                else:
                    counts["changed"] += 1
                    changed.add(file.name)
                    assert "changes the answer" in str(e), e
                continue
            rows = encoder([examples], lambda _, talk=talk, t=t: split_conversation(talk, t, apart=True)).rows()
            counts["together" if len(rows) == 1 else "apart"] += 1
            try: check(tok, talk, rows, own=own)
            except AssertionError as e:
                shown = [[tok.decode(i), [tok.decode(x) for x in supervised_turns(l)]] for i, l in rows]
                raise AssertionError(f"{file.name}: {e}\n{talk}\n{shown}") from e
    print(name, own, counts, changed)
    assert counts["together"] > 25 * n and counts["apart"] > 6.25 * n, counts
    assert counts["refused"] + counts["changed"] < .15 * n * len(TEMPLATES), counts


def test_tool_turns_in_every_template_that_knows_them():
    """A call, its result and the answer after it: both answers are supervised, each behind what generation is given;
    the call has its name and argument"""
    tok, known = real("qwen3", special=markers()), []
    said = (("", "42", "It is 42."), ("Let me see.", '{"a": [1, 2]}', "caf\u00e9\n\n"), ("", "<|im_end|>", "x" * 60))
    for file in TEMPLATES:
        tok.chat_template = file.read_text()
        t = Template(tok)
        if len(t.calls.written) < 3: continue
        for before, result, answer in said:
            talk = [dict(role="user", content="Ask it."),
                    dict(role="assistant", content=before, tool_calls=[PROBE_CALL]),
                    dict(role="tool", name="probe_fn", tool_call_id="probe0001", content=result),
                    dict(role="assistant", content=answer)]
            try: lay = split_conversation(talk, t)
            except SftError as e:   # llama 3 writes a call or words, not both
                assert before and "left out when it has calls; 'Let me see.'" in str(e), (file.name, e)
                continue
            examples = Encoder(t)([lay], lambda _, talk=talk, t=t: split_conversation(talk, t, apart=True)).rows()
            try: check(tok, talk, examples, own=False)
            except AssertionError as e: raise AssertionError(f"{file.name}: {e}") from e
            call = next(tok.decode(turn) for ids, labels in examples for turn in supervised_turns(labels))
            assert "probe_fn" in call and "probe_value" in call, (file.name, call)
        known.append(file.name)
    assert len(known) > 20, known


def test_parallel_calls_in_every_template_that_knows_tools():
    "Two calls of one function are both supervised, with every argument; or the row is refused with the reason"
    tok, refused = real("qwen3", special=markers()), {}
    arguments = [dict(town='Paris "\u00e9" <b>\n2nd', days=3),
                 dict(town="London's", days=12, deep=dict(a=[1, True, None], b="x & y"))]
    calls = [dict(type="function", id=f"abcdef00{k}", function=dict(name="get_weather", arguments=given))
             for k, given in enumerate(arguments)]
    for file in TEMPLATES:
        tok.chat_template = file.read_text()
        t = Template(tok)
        if len(t.calls.written) < 3: continue
        result = dict(role="tool", name="get_weather", content="sunny")
        talk = [dict(role="user", content="Ask it."), dict(role="assistant", content="", tool_calls=calls),
                *[result | dict(tool_call_id=c["id"]) for c in calls], dict(role="assistant", content="Sunny.")]
        try: examples = split_conversation(talk, t)
        except SftError as e:
            refused[file.name] = e.found
            with pytest.raises(SftError): split_conversation(talk, t, turns="last")  # nor gone from the context
            continue
        call = next(c.text for c in examples[0] if c.supervised)
        assert call.count("Paris") == call.count("London") == 1 and "x & y" in call, (file.name, call)
        split_conversation(talk, t, turns="last")
    lost, one = "1 of 2 calls is written", "This model only supports single tool-calls at once"
    assert {name: lost in found or one in found for name, found in refused.items()} == dict.fromkeys(
        ("gptoss.jinja", "gptoss_training.jinja", "llama3_1.jinja", "llama3_2.jinja"), True), refused


def test_an_answer_of_nothing_but_its_end_token_ends_there(tokenizer):
    t = Template(tokenizer)
    assert end_of_answer("<|im_end|>\n", dict(content=""), t, closer="") == len("<|im_end|>")


def test_a_text_gets_a_bos_and_what_a_template_writes_gets_none():
    tok = load_tokenizer(load_config())
    mark = "<|im_start|>"
    bos = tok.convert_tokens_to_ids(mark)
    tok.backend_tokenizer.post_processor = TemplateProcessing(single=f"{mark} $A", special_tokens=[(mark, bos)])
    question, text = dict(role="user", content="1+1?"), dict(role="text", content="1+1?")
    plain = tok("1+1?", add_special_tokens=False)["input_ids"]
    tok.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    asked, written = encode_prompts([[question], [text]], tok)
    assert written == [bos, *plain] and asked == [*plain, tok.eos_token_id]
    (ids, _), = encode({"row": [text]}, tok)
    assert ids[:2] == [bos, plain[0]]
    (ids, _), = encode({"row": [question, dict(role="assistant", content="2")]}, tok)
    assert bos not in ids
    tok.chat_template = None
    assert encode_prompts([[question]], tok)[0][0] == bos
    (ids, _), = encode({"row": [question, dict(role="assistant", content="2")]}, tok)
    assert ids[0] == bos and ids.count(bos) == 1
