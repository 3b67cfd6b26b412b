"""What is wrong with a row stops the preparation with its place, or is counted; it is never another error than ours."""
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, HealthCheck, settings as how, strategies as st
from samples import no_eval, pairs

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.settings import FORMATS
from sft_nb.tasks.chat import Chat
from sft_nb.tasks.core import task_of
from sft_nb.extras import template_cache, workers
from sft_nb.tokens import conversations
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.pipeline import Reader
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


def chats(n:int)->list[dict]:
    "Rows that are conversations already"
    return [dict(messages=[dict(role="user", content=p["question"]), dict(role="assistant", content=p["answer"])])
            for p in pairs(n)]


def test_a_plain_conversation_is_not_translated_and_rarely_rendered(tokenizer, monkeypatch):
    translated, laid_out = [], []
    translate, lay_out = conversations.to_messages, template_cache.split_conversation
    monkeypatch.setattr(conversations, "to_messages", lambda *a, **k: translated.append(1) or translate(*a, **k))
    monkeypatch.setattr(template_cache, "split_conversation", lambda *a, **k: laid_out.append(1) or lay_out(*a, **k))
    reader = Reader(no_eval(task="chat"), Chat(), Template(tokenizer))
    rows = [(f"row {k}", row) for k, row in enumerate(chats(2600))]
    assert sum(len(batch.rows) for batch in reader.batches(rows)) == 2600
    assert not translated
    assert len(laid_out) < 60   # before and by the first skeleton, then every 64th row


@pytest.mark.parametrize("settings", [{}, dict(system_prompt="Be brief."), dict(train_on_turns="last"),
                                      dict(ignore_columns=("messages",), on_bad_row="drop")])
def test_plain_conversations_are_read_like_all_others(tokenizer, monkeypatch, settings):
    user, answer = dict(role="user", content="1+1?"), dict(role="assistant", content="2")
    talks = [[user, answer], [user, answer, user], [user, answer, user, dict(role="assistant", content="")],
             [user, answer | dict(train=False), user, answer], [user | dict(content=" "), answer],
             [user | dict(name="x"), answer], [user, dict(role="gpt", content="2")],
             [user, answer | dict(content="<|im_end|>")], [], [user]]
    rows = [(f"row {k}", dict(messages=talk)) for k, talk in enumerate(talks)] + [("row x", chats(1)[0] | dict(id=3))]
    def read():
        reader = Reader(load_config(task="chat", **dict(on_bad_row="drop") | settings), Chat(), Template(tokenizer))
        return [(batch.rows, batch.seen) for batch in reader.batches(rows)]
    fast = read()
    monkeypatch.setattr(conversations, "_plain_messages", lambda *_: None)
    assert fast == read()


def test_several_rows_of_a_batch_with_half_a_character(tokenizer):
    rows = [*pairs(3), dict(question="\ud800", answer="2"), dict(question="3", answer="\udfff")]
    data = prepare(no_eval(task="chat", on_bad_row="drop"), tokenizer, train=rows)
    assert data.train.n_kept == 3 and data.train.reasons == {"half a character (a lone surrogate)": 2}


def test_the_size_of_the_batches_changes_nothing(tokenizer, monkeypatch):
    rows = pairs(150) + [dict(question="?", answer="")]
    prints = set()
    for size in (1, 7, 64, 1000):
        monkeypatch.setattr("sft_nb.tokens.pipeline._BATCH", size)
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


malformed = given(st.lists(row, min_size=20, max_size=20))

@malformed
@example([dict(weight=[None] * 3, messages=[None] * 3)])   # a flag for each of messages that are none
@how(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_malformed_rows_are_errors_of_ours(reader, rows):
    "50 times 20 rows"
    assert_read_or_refused(reader, rows)

@pytest.mark.soak
@malformed
@how(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_more_malformed_rows_are_errors_of_ours(reader, rows):
    "400 times 20 rows"
    assert_read_or_refused(reader, rows)

def assert_read_or_refused(reader, rows):
    for k, row in enumerate(rows):
        try: batch = next(reader.batches([(f"row {k}", row)]))
        except SftError as e:
            assert f"row {k}" in str(e) and "Fix:" in str(e)
            continue
        try: reader.encode(batch)
        except SftError as e: assert f"row {k}" in str(e)


# several processes

HALF = (dict(question="\ud800", answer="2"), dict(a=1), dict(question="?", answer=""))


def mixed_rows(n=300):
    "Rows of many lengths, some of which are dropped, cut or there twice"
    rows = pairs(n)
    for k in range(0, n, 37): rows[k] = HALF[k % 3]
    rows[n - 5] = rows[11]
    return rows


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("sft_nb.tokens.pipeline._BATCH", 16)
    monkeypatch.setattr("sft_nb.tokens.pipeline._FEW", 2)


def entry(data): return {p.name: p.read_bytes() for p in data.train.folder.iterdir() if p.name != "stats.npz"}


def many(tokenizer, workers, rows=None, **more):
    how = dict(task="chat", max_length=70, on_long="cut", on_bad_row="drop", drop_duplicates=True)
    rows = mixed_rows() if rows is None else rows
    return prepare(no_eval(**how | more, num_workers=workers), tokenizer, train=(r for r in rows))


def test_any_number_of_processes_writes_the_same_bytes(tokenizer, small_blocks, tmp_path):
    listed = tmp_path/"listed.jsonl"
    listed.write_text(json.dumps(mixed_rows()[250]))
    one, two, five = (many(tokenizer, n, drop_rows=str(listed)) for n in (1, 2, 5))
    assert one.train.totals.kinds["listed in drop_rows"] == "listed"
    assert one.train.counts.dropped > 10 < one.train.counts.cut and len(one.train.reasons) > 4
    assert entry(one) == entry(two) == entry(five) and str(one) == str(two) == str(five)
    for name, column in one.train.stats.items(): assert (column == five.train.stats[name]).all()


def test_a_task_of_a_notebook_works_in_other_processes(tokenizer, small_blocks):
    where = set()

    class Shout(Chat):
        name = "shout"
        def messages(self, row):
            where.add(os.getpid())   # of a worker: its own copy
            return [dict(role="user", content=row["q"]), dict(role="assistant", content=row["a"].upper())]
    rows = [dict(q=f"{k}?", a=f"yes {k}") for k in range(200)]
    data = prepare(no_eval(num_workers=3), tokenizer, task=Shout(), train=rows)
    assert where == {os.getpid()} and data.train.n_kept == 200
    text = tokenizer.decode([t for t in data.train.tokens[150]["input_ids"]])
    assert "YES 150" in text


@pytest.mark.parametrize("bad, says", [(dict(a=1), "has the fields a"), (HALF[0], "half a character"),
                                       (dict(input_ids=[10**6], labels=[10**6]), "not in the vocabulary")])
def test_a_bad_row_is_the_same_error_wherever_it_is_found(tokenizer, small_blocks, bad, says):
    rows, said = pairs(200), set()
    rows[150] = bad
    for n in (1, 3):
        with pytest.raises(SftError, match=f"row 151: .*{says}") as caught:
            many(tokenizer, n, rows, on_bad_row="error")
        said.add(str(caught.value))
    assert len(said) == 1 and multiprocessing.active_children() == []


class Fragile(Chat):
    "Its process dies, or fails, unless it is the one in which the rows are read"
    name, home, signal = "fragile", os.getpid(), 0

    def messages(self, row):
        if os.getpid() != self.home:
            if self.signal: os.kill(os.getpid(), self.signal)
            raise RuntimeError("I will not")
        return [dict(role="user", content=row["question"]), dict(role="assistant", content=row["answer"])]


@pytest.mark.parametrize("how", [0, signal.SIGKILL, signal.SIGTERM])
def test_what_a_worker_cannot_do_is_done_here(tokenizer, small_blocks, how):
    task = Fragile()
    task.signal, task.home = how, os.getpid()
    data = prepare(no_eval(num_workers=2), tokenizer, task=task, train=pairs(200))
    assert data.train.n_kept == 200 and multiprocessing.active_children() == []


def test_rows_that_no_other_process_can_be_handed(tokenizer, small_blocks):
    rows = [row | dict(note=lambda: 0) for row in pairs(100)]
    data = prepare(no_eval(task="chat", num_workers=2, ignore_columns=("note",)), tokenizer, train=rows)
    assert data.train.n_kept == 100


def test_no_more_processes_may_be_made(tokenizer, small_blocks, monkeypatch):
    def refused(*args): raise BlockingIOError("no more processes")
    monkeypatch.setattr("os.fork", refused)
    assert many(tokenizer, 3).train.fingerprint == many(tokenizer, 1).train.fingerprint


def test_ctrl_c_in_the_middle_of_a_fork_waits(tokenizer, small_blocks, monkeypatch):
    "There it would be lost, or leave workers that nobody ends"
    fork, begun, there = os.fork, [], []
    def interrupted():
        begun.append(1)
        if len(begun) == 2: signal.raise_signal(signal.SIGINT)
        there.append(len(begun))
        return fork()
    monkeypatch.setattr("os.fork", interrupted)
    with pytest.raises(KeyboardInterrupt): many(tokenizer, 4)
    assert there == [1, 2, 3, 4] and multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_there_is_an_end_to_what_is_asked_for(monkeypatch):
    monkeypatch.setattr(workers, "_usable_cores", lambda: 48)
    assert workers._worker_count(10**6) == 48
    assert workers._worker_count(40) == 40
    monkeypatch.setattr(workers, "_usable_cores", lambda: 2)
    assert workers._worker_count(300) == workers._MOST


def test_workers_go_with_the_process_that_made_them(tmp_path):
    script = tmp_path/"prepares.py"
    script.write_text("""if True:
        import sft_nb.tokens.pipeline as pipeline, itertools, time, sys
        from sft_nb.config.load import load_config
        from sft_nb.tasks.core import get_task
        from sft_nb.tokens.template import Template
        from sft_nb.tokens.tokenizer import load_tokenizer
        pipeline._BATCH = pipeline._FEW = 2
        cfg = load_config(task="chat", num_workers=3)
        rows = (("row", dict(question="1?", answer="2")) for k in itertools.count())
        for n, _ in enumerate(pipeline.Reader(cfg, get_task("chat"), Template(load_tokenizer(cfg)))(rows)):
            if n == 20:
                import multiprocessing
                print(*[p.pid for p in multiprocessing.active_children()], flush=True)
                time.sleep(600)
        """)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 3
    parent.kill()
    parent.wait()
    for _ in range(3000):
        if not any(_alive(pid) for pid in workers): return
        time.sleep(.1)
    raise AssertionError("a worker lives on")


def _alive(pid)->bool:
    try: return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError: return False


def test_a_line_that_is_no_json_is_left_out_by_its_place_and_reason(tmp_path, tokenizer):
    file = tmp_path/"rows.jsonl"
    lines = ['{"question": "1+1?", "answer": "2"}', '{"question": "1+2?", "answ', '{"question": "1+3?", "answer": "4"}']
    file.write_text("\n".join(lines))
    data = prepare(no_eval(task="chat", train_file=str(file), on_bad_row="drop"), tokenizer)
    assert len(data.train.tokens) == 2
    (one,) = data.dropped
    assert one["where"].endswith("line 2") and "JSON" in one["reason"] and "error" in one["row"], one
