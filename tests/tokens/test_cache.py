"""Prepared rows are found again, and nothing else is."""
import errno
import json
import os
import re
import resource
import shutil

import pytest
from samples import no_eval, pairs, write
from tokenizers import Tokenizer

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
from sft_nb.tokens import prepare as prepare_module
from sft_nb.tokens.cache import _tokenizer_digest, entry_damage, seal_entry
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def test_what_was_prepared_is_found_and_what_changed_is_not(tmp_path, tokenizer, monkeypatch):
    work, run = [], prepare_module._write_side
    def counted(*a):
        work.append(1)
        return run(*a)
    monkeypatch.setattr(prepare_module, "_write_side", counted)
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


# what is found is whole

@pytest.fixture
def entry(tmp_path, tokenizer):
    "Prepared rows in a separate cache: the folder of the entry, and how to prepare them"
    file = write(tmp_path/"a.jsonl", pairs(30))
    cfg = no_eval(train_file=file, cache_dir=str(tmp_path/"cache"))
    def ask(): return prepare(cfg, tokenizer).train
    return ask().folder, ask


def turned(file, at=-20):
    "Flip one bit of a file"
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def resealed(folder):
    turned(folder/"tokens.arrow", at=(folder/"tokens.arrow").stat().st_size//2)
    (folder/"entry.json").unlink()
    seal_entry(folder)


DAMAGE = {
    "tokens.arrow has changed since": lambda f: turned(f/"tokens.arrow"),
    "stats.npz has changed since": lambda f: turned(f/"stats.npz"),
    "meta.json has 0 bytes instead of": lambda f: (f/"meta.json").write_text(""),
    "tokens.arrow has .* bytes instead of": lambda f: os.truncate(f/"tokens.arrow", 100),
    "dropped.jsonl cannot be read": lambda f: (f/"dropped.jsonl").unlink(),
    "entry.json cannot be read": lambda f: (f/"entry.json").write_text("["),
    "cut.jsonl, .*tokens.arrow is not there": lambda f: (f/"entry.json").write_text("{}"),
    "its fingerprint does not match its tokens|its tokens cannot be read": resealed,
}


@pytest.mark.parametrize("says, harm", DAMAGE.items(), ids=DAMAGE)
def test_what_is_damaged_is_made_again_and_a_line_says_so(entry, capsys, says, harm):
    folder, ask = entry
    first, tokens = ask().fingerprint, (folder/"tokens.arrow").read_bytes()
    assert capsys.readouterr().err == ""
    harm(folder)
    again = ask()
    line, = capsys.readouterr().err.splitlines()
    assert re.search(f"sft_nb: prepared rows in .* are damaged .({says})", line)
    assert again.fingerprint == first and (folder/"tokens.arrow").read_bytes() == tokens and entry_damage(folder) == ""
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_damage_that_cannot_be_taken_away_is_not_used(entry, monkeypatch):
    folder, ask = entry
    first = ask().fingerprint
    (folder/"meta.json").write_text("{}")
    monkeypatch.setattr(prepare_module, "remove_entry", lambda place: None)   # of another user
    again = ask()
    assert again.fingerprint == first and again.folder != folder


def test_an_entry_is_flushed_before_it_has_its_name(tmp_path, tokenizer, monkeypatch):
    order, fsync, rename = [], os.fsync, type(tmp_path).rename
    def flushed(handle):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        return fsync(handle)
    def named(self, to):
        order.append("rename")
        return rename(self, to)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(type(tmp_path), "rename", named)
    cfg = no_eval(train_file=write(tmp_path/"a.jsonl", pairs(3)), cache_dir=str(tmp_path/"cache"))
    prepare(cfg, tokenizer)
    assert {"tokens.arrow", "meta.json", "stats.npz", "entry.json"} <= set(order[:order.index("rename")])
    assert order[order.index("rename"):] == ["rename", "data"]


@pytest.mark.parametrize("home, folder, file", [(0o700, 0o700, 0o600), (0o750, 0o750, 0o640), (0o2775, 0o2775, 0o644)])
def test_who_may_read_the_folder_may_read_its_entries(entry, home, folder, file):
    place, ask = entry
    shutil.rmtree(place)
    place.parent.chmod(home)
    ask()
    assert {p.stat().st_mode & 0o7777 for p in place.iterdir()} == {file}
    assert place.stat().st_mode & 0o7777 == folder


def test_what_was_half_made_long_ago_is_swept(entry):
    place, ask = entry
    shutil.rmtree(place)
    old, young, other = (place.parent/name for name in (f"{'a' * 32}.x", f"{'b' * 32}.x", "mine.x"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder/"tokens.arrow").write_text("")
    for path in (old/"tokens.arrow", old, other/"tokens.arrow", other): os.utime(path, (0, 0))
    ask()
    assert [old.exists(), young.exists(), other.exists()] == [False, True, True]


def test_rows_that_change_while_they_are_read_poison_nothing(tmp_path, tokenizer, monkeypatch):
    file, run, changes = tmp_path/"a.jsonl", prepare_module._write_side, []
    cfg = no_eval(train_file=write(file, pairs(5)), cache_dir=str(tmp_path/"cache"))
    def changing(*a):
        run(*a)
        if changes: write(file, pairs(changes.pop()))
    monkeypatch.setattr(prepare_module, "_write_side", changing)
    changes[:] = [7]
    assert prepare(cfg, tokenizer).train.n_read == 7
    write(file, pairs(5))
    assert prepare(cfg, tokenizer).train.n_read == 5 and not changes   # the key of five rows does not hold seven
    changes[:] = [13, 12, 11]
    write(file, pairs(10))
    with pytest.raises(SftError, match="a.jsonl: the rows change while they are read"): prepare(cfg, tokenizer)
    assert not list((tmp_path/"cache").rglob("*.*.*"))


@pytest.mark.parametrize("step", ["numpy.savez", "sft_nb.tokens.prepare.seal_entry"])
def test_a_full_disk_is_an_error_of_ours(tmp_path, tokenizer, monkeypatch, step):
    def full(*a, **k): raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(step, full)
    cfg = no_eval(train_file=write(tmp_path/"a.jsonl", pairs(3)), cache_dir=str(tmp_path/"cache"))
    with pytest.raises(SftError, match="it cannot hold more .No space left on device.*room for the prepared rows"):
        prepare(cfg, tokenizer)
    assert not list((tmp_path/"cache/data").iterdir())


def test_a_file_size_limit_is_told_as_a_full_disk(tmp_path, tokenizer):
    "A real one: the kernel refuses the bytes of tokens.arrow"
    cfg = no_eval(train_file=write(tmp_path/"a.jsonl", pairs(3000)), cache_dir=str(tmp_path/"cache"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(SftError, match="it cannot hold more"): prepare(cfg, tokenizer)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_cache_that_cannot_be_written(tmp_path, tokenizer, monkeypatch, capsys):
    "One that was asked for is refused; instead of the usual one, a temporary folder that is named"
    (tmp_path/"no").write_text("a file, not a folder")
    file = write(tmp_path/"a.jsonl", pairs(3))
    with pytest.raises(ConfigError, match="cache_dir.*cannot be written"):
        prepare(no_eval(train_file=file, cache_dir=str(tmp_path/"no")), tokenizer)
    monkeypatch.delenv("SFT_NB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path/"no"))
    data = prepare(no_eval(train_file=file), tokenizer)
    assert data.train.n_kept == 3 and "cannot be written, so the cache is" in capsys.readouterr().err


def test_the_digest_of_a_tokenizer_covers_more_than_its_vocabulary():
    def digest(change):
        tok = load_tokenizer(load_config())
        content = json.loads(tok.backend_tokenizer.to_str())
        change(content)
        tok._tokenizer = Tokenizer.from_str(json.dumps(content))
        return _tokenizer_digest(tok)
    same = digest(dict)
    assert digest(dict) == same
    assert digest(lambda content: content["model"]["merges"].reverse()) != same
    assert digest(lambda content: content.update(normalizer=dict(type="Lowercase"))) != same

    tok = load_tokenizer(load_config())
    assert _tokenizer_digest(tok) == _tokenizer_digest(tok) == same   # kept, and the same as one that was made anew
    content = json.loads(tok.backend_tokenizer.to_str())
    content["model"]["merges"].reverse()
    tok._tokenizer = Tokenizer.from_str(json.dumps(content))
    assert _tokenizer_digest(tok) != same   # what was kept is of the other backend
