"""What was prepared is found again, and nothing else."""
import shutil

import pytest
from samples import no_eval, pairs, write

from sft_nb.config import load_config
from sft_nb.report import SftError
from sft_nb.tokens import prepare as prepare_module
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def test_what_was_prepared_is_found_and_what_changed_is_not(tmp_path, tokenizer, monkeypatch):
    work, run = [], prepare_module._run
    def counted(*a):
        work.append(1)
        return run(*a)
    monkeypatch.setattr(prepare_module, "_run", counted)
    file = tmp_path/"a.jsonl"
    write(file, pairs(10))
    def runs(tok=tokenizer, **kw):
        work.clear()
        data = prepare(no_eval(train_file=str(file), cache_dir=str(tmp_path/"cache"), **kw), tok)
        return len(work), data.train.fingerprint
    first = runs()
    assert first[0] == 1 and runs() == (0, first[1])
    assert runs(max_length=400)[0] == 1 and runs(train_on_prompt=True)[0] == 1
    other = load_tokenizer(load_config())
    other.chat_template = other.chat_template.replace("<|im_start|>", "<|im_start|> ")
    assert runs(other)[0] == 1 and runs(other)[1] != first[1]
    again = load_tokenizer(load_config())
    assert runs(again) == (0, first[1])
    write(file, pairs(11))
    assert runs()[0] == 1 and runs()[0] == 0
    moved = tmp_path/"b.jsonl"
    shutil.copy(file, moved)
    file = moved
    assert runs()[0] == 0   # the same rows under another name


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path, tokenizer):
    file, cache = write(tmp_path/"a.jsonl", [*pairs(2000), dict(a=1)]), tmp_path/"cache"
    with pytest.raises(SftError): prepare(no_eval(train_file=file, cache_dir=str(cache)), tokenizer)
    assert list(cache.rglob("*.arrow")) == []


def test_lines_that_cannot_be_read_are_left_out_when_asked(tmp_path, tokenizer):
    (tmp_path/"a.jsonl").write_text('{"question": "1?", "answer": "2"}\n{"question":\n5\n')
    (tmp_path/"b.csv").write_text("question,answer\n1?,2\n1,2,3\n")
    for name, bad in (("a.jsonl", ["a.jsonl line 2", "a.jsonl line 3"]), ("b.csv", ["b.csv line 3"])):
        with pytest.raises(SftError, match=bad[0]): prepare(no_eval(train_file=str(tmp_path/name)), tokenizer)
        cfg = no_eval(train_file=str(tmp_path/name), on_bad_row="drop")
        data, again = prepare(cfg, tokenizer), prepare(cfg, tokenizer)   # found again
        assert data.train.n_kept == 1 and [d["where"] for d in data.dropped] == bad
        assert again.train.row(0) == data.train.row(0)
