"""Every row is kept, cut or dropped, with its reason, and its tokens are counted."""
import numpy as np
import pytest
from samples import finding, no_eval, pairs, supervised

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.tokens.accounting import _count_answers, Counts, truncate_to_length
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def test_every_row_is_kept_cut_or_dropped_with_its_reason(tokenizer):
    rows = pairs(200) + [dict(question="?", answer=" "), dict(question="Q " * 300, answer="A")]
    whole = prepare(no_eval(task="chat", max_length=100_000), tokenizer, train=rows).train
    n_whole = int(whole.lengths.sum()) + sum(d["tokens"] for d in whole.dropped)
    for on_long in ("drop", "cut", "split"):
        cfg = no_eval(task="chat", max_length=60, min_length=12, on_long=on_long)
        s = prepare(cfg, tokenizer, train=rows).train
        assert s.n_read == 202 == s.n_kept + len(s.dropped) and sum(s.reasons.values()) == len(s.dropped)
        assert all(d["row"] == rows[int(d["where"].split()[-1]) - 1] and d["reason"] for d in s.dropped)
        assert all(12 <= n <= 60 for n in s.lengths) and (s.stats["supervised"] > 0).all() or on_long == "split"
        if on_long != "split": assert int(s.lengths.sum()) + s.counts.tokens_lost == n_whole
        assert bool(s.cut) == (on_long != "drop")


def test_answers_are_runs_of_supervised_tokens_inside_an_example():
    def count(labels, starts): return _count_answers(np.array(labels), np.array(starts))
    assert count([-100, 5, 6, -100, 7, -100, 8], [0, 3, 5]) == 3
    assert count([4, 5, 6, 7], [0, 2]) == 2                 # two examples, each of which is one answer
    assert count([-100, 5, -100, -100], [0, 2, 4]) == 1     # the last one, cut off, has no tokens


def test_cutting_the_start_keeps_the_answers(tokenizer):
    rows = [dict(question="long " * 50, answer="#### 7")]
    cut = dict(task="chat", max_length=30, on_long="cut")
    data = prepare(no_eval(cut_side="start", **cut), tokenizer, train=rows)
    assert len(data.train.tokens[0]["input_ids"]) == 30 and supervised(tokenizer, data) == ["#### 7<|im_end|>"]
    end = prepare(no_eval(**cut), tokenizer, train=[dict(question="hm", answer="7 " * 50)])
    assert finding(end, "train_ends").status == "warn" and "1 of 1" in str(end.report)
    with pytest.raises(SftError, match="its only row is longer than 30 tokens: nothing is left to learn"):
        prepare(no_eval(**cut), tokenizer, train=rows)


def test_a_turn_that_is_left_out_is_counted_though_its_row_stays():
    "A template that gives one example for each turn, and a last turn that is too long"
    tok, reason = load_tokenizer(load_config()), "a turn longer than max_length 60"
    tok.chat_template = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
                         "{{ m.content if loop.last or m.role == 'user' else '...' }}<|im_end|>\n{% endfor %}"
                         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    talk = [dict(role="user", content="a"), dict(role="assistant", content="b"),
            dict(role="user", content="c"), dict(role="assistant", content="d " * 90)]
    data = prepare(no_eval(max_length=60), tok, train=[dict(messages=talk)])
    assert len(data.train.tokens) == 1 and data.train.n_kept == 1 and data.train.reasons == {reason: 1}
    assert [d["reason"] for d in data.dropped] == [reason] and data.report.figures["train"]["rows_dropped"] == 0
    assert finding(data, "train_too_long").status == "warn"


def test_a_split_row_loses_nothing(tokenizer):
    rows = [dict(text="word " * 200)]
    s = prepare(no_eval(task="chat", max_length=30, on_long="split"), tokenizer, train=rows).train
    assert len(s.tokens) > 5 and len(s.cut) == 1
    assert s.counts.tokens_lost == len(s.tokens) - 1   # the first token of each piece is read, not learned
    assert sum(s.lengths) == sum(prepare(no_eval(task="chat", max_length=10_000), tokenizer, train=rows).train.lengths)


def test_duplicates_are_dropped_when_asked_and_counted_when_not(tokenizer):
    rows = pairs(20) * 3
    plain, once = (prepare(no_eval(task="chat", drop_duplicates=d), tokenizer, train=rows) for d in (False, True))
    assert plain.train.duplicates() == 40 and finding(plain, "train_duplicates").status == "warn"
    assert once.train.n_kept == 20 and once.train.reasons == {"duplicate of an earlier row": 40}


def test_what_is_counted_is_counted_by_kind_not_by_words(tokenizer):
    "A row whose own words name max_length is not too long"
    rows = [dict(question="1?", answer="2"), dict(max_length=10**6), dict(question="Q " * 300, answer="A")]
    s = prepare(no_eval(task="chat", max_length=60, on_bad_row="drop"), tokenizer, train=rows).train
    assert [d["kind"] for d in s.dropped] == ["unusable", "too_long"]
    assert s.counts.longest_dropped == s.dropped[1]["tokens"] > 300


def test_each_row_that_is_left_out_is_written_down_with_its_reason(tokenizer):
    assert not any(vars(Counts()).values())   # nothing is counted before the first row
    long = dict(question="Q " * 300, answer="A")
    s = prepare(no_eval(task="chat", max_length=60), tokenizer, train=[dict(question="1?", answer="2"), long]).train
    line, = s.dropped
    assert (line["kind"], line["row"], line["reason"]) == ("too_long", long, "longer than max_length 60")
    assert line["tokens"] == s.counts.too_long_tokens == s.counts.longest_dropped and s.counts.too_long == 1


def test_texts_that_begin_alike_and_end_otherwise_are_no_duplicates(tokenizer):
    "With on_long=split, all of their pieces are compared"
    begin = "Ada has 97 rings. " * 12
    rows = [dict(text=begin + end) for end in ("Ben has 3.", "Kim has 44 shells.", "Ben has 3.")]
    cfg = load_config("demo", task="chat", max_length=40, on_long="split", drop_duplicates=True, eval_samples=0)
    data = prepare(cfg, tokenizer, train=rows)
    assert [d["where"] for d in data.dropped] == ["train rows row 3"] and data.train.n_kept == 2


def test_what_is_lost_of_a_row_is_never_more_than_the_row(tokenizer):
    ids = np.arange(9, dtype=np.int32)
    for first in (0, 3, 6):
        labels = np.full(9, -100, dtype=np.int32)
        labels[first] = ids[first]   # nothing predicts the first token of a piece
        found = truncate_to_length(ids, labels, 3, on_long="split", cut_side="end")
        assert (found.examples, found.kind, found.lost) == ([], "too_long", 9)


def test_a_reason_may_quote_half_a_character(tokenizer):
    "As in JSON that was cut within an emoji"
    odd = dict(messages=[dict(role="us\ud83der", content="Hi"), dict(role="assistant", content="Hello")])
    data = prepare(no_eval(task="chat", on_bad_row="drop"), tokenizer, train=[*pairs(2), odd])
    (reason,), (dropped,) = data.train.reasons, data.train.dropped
    assert data.train.n_kept == 2 and "us\\ud83der" in reason and dropped["reason"] == reason
    str(data.report).encode()
