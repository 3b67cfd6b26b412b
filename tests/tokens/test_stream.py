"""What is wrong with a row stops the preparation with its place, or is counted; it is never another error than ours."""
import pytest
from hypothesis import HealthCheck, given, settings as how, strategies as st
from samples import no_eval, pairs

from sft_nb.config import load_config
from sft_nb.report import SftError
from sft_nb.rows.formats import FORMATS
from sft_nb.tasks.core import task_of
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.stream import Reader
from sft_nb.tokens.template import Template


def test_a_bad_row_stops_or_is_counted(tokenizer):
    rows = pairs(5) + [dict(a=1), dict(messages=[dict(role="user", content="?")]), dict(question="\ud800", answer="2"),
                       dict(input_ids=[10**6], labels=[10**6])]
    wrong = ((rows[5], "it has the fields a"), (rows[7], "lone surrogate"), (rows[8], "not in the vocabulary"))
    for bad, says in wrong:
        with pytest.raises(SftError, match=says): prepare(no_eval(task="chat"), tokenizer, train=[*rows[:5], bad])
    data = prepare(no_eval(task="chat", on_bad_row="drop"), tokenizer, train=rows)
    assert data.train.n_kept == 5
    assert [d["where"] for d in data.dropped] == [f"train rows row {k}" for k in (6, 7, 8, 9)]


def test_several_rows_of_a_batch_with_half_a_character(tokenizer):
    rows = [*pairs(3), dict(question="\ud800", answer="2"), dict(question="3", answer="\udfff")]
    data = prepare(no_eval(task="chat", on_bad_row="drop"), tokenizer, train=rows)
    assert data.train.n_kept == 3 and data.train.reasons == {"half a character (a lone surrogate)": 2}


def test_the_size_of_the_batches_changes_nothing(tokenizer, monkeypatch):
    rows = pairs(150) + [dict(question="?", answer="")]
    prints = set()
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("sft_nb.tokens.stream._BATCH", size)
        data = prepare(no_eval(task="chat", max_length=70, on_long="cut"), tokenizer, train=(r for r in rows))
        prints.add((data.train.fingerprint, str(data.report)))
    assert len(prints) == 1


# what is malformed never gives another error than ours

WORDS = ["user", "assistant", "system", "tool", "human", "gpt", "Hi", "{", "[]", "\ud800"]
KEYS = "role content from value name arguments function tool_calls train weight text type".split()
simple = (st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=True) | st.text(max_size=8)
          | st.sampled_from(WORDS))


def nested(x): return st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(KEYS), x, max_size=4)


more = {"response", "labels", "tools", "system", "history", "input", "completion_mask", "extra", "label", "weight",
        "context", "attention_mask", "seq_lengths", "position_ids", "chat_template_kwargs", "images"}
fields = sorted({f for names in FORMATS.values() for f in names} | more)
row = st.dictionaries(st.sampled_from(fields), st.recursive(simple, nested, max_leaves=8), max_size=4)


@pytest.fixture(scope="module")
def reader(tokenizer): return Reader(no_eval(task="chat"), task_of(load_config(task="chat")), Template(tokenizer))


@given(st.lists(row, min_size=20, max_size=20))
@how(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_rows_are_errors_of_ours(reader, rows):
    "200 times 20 rows"
    for k, row in enumerate(rows):
        try: batch = next(reader.batches([(f"row {k}", row)]))
        except SftError as e:
            assert f"row {k}" in str(e) and "Fix:" in str(e)
            continue
        try: reader.encode(batch)
        except SftError as e: assert f"row {k}" in str(e)
