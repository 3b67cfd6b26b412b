"""Rows that many machines prepare are the same bytes as those of one, or are refused."""
import errno
import json
import random
import shutil
from dataclasses import replace

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from samples import no_eval, pairs, write

from sft_nb.checks.rows import check_kept
from sft_nb.cli.commands import data_command
from sft_nb.config import load_config
from sft_nb.report import ConfigError, SftError
from sft_nb.tokens import shards
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.shards import merge_shards, prepare_shard

SAME = ("tokens.arrow", "dropped.jsonl", "cut.jsonl", "meta.json", "stats.npz")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("sft_nb.tokens.pipeline._BATCH", 16)
    monkeypatch.setattr("sft_nb.tokens.pipeline._FEW", 1)


@pytest.fixture
def home(tmp_path):
    "A folder with a space in its name"
    folder = tmp_path/"two words"
    folder.mkdir()
    return folder


def odd_rows(n=250):
    "Rows in several formats, some of which are dropped, cut, unread or there twice"
    rows, chance = pairs(n), random.Random(1)
    for k in range(0, n, 23):
        rows[k] = chance.choice([dict(a=1), dict(question="?", answer=""), rows[3], dict(text="so it is"),
                                 dict(messages=[dict(role="user", content="1?"), dict(role="assistant", content="2")])])
    rows[77]["note"] = "odd"
    return rows


def config(home, **more):
    how = dict(task="chat", train_file=write(home/"rows.jsonl", odd_rows()), max_length=70, on_long="cut",
               on_bad_row="drop", cache_dir=str(home/"cache"))
    return no_eval(**how | more)


def sharded(cfg, tokenizer, n, where):
    for k in range(n, 0, -1): prepare_shard(cfg, f"{k}/{n}", where, tokenizer)   # in no order that matters


@pytest.mark.parametrize("n, more", [
    (1, {}), (2, dict(on_long="split")), (3, dict(num_workers=2)), (5, dict(on_long="drop")),
    (3, dict(max_samples=100)), (2, dict(min_length=30)), (4, dict(train_on_prompt=True)),
    (2, dict(chat_template="none")), (40, {})])
def test_shards_are_the_bytes_of_one_machine(tokenizer, home, small_blocks, n, more):
    cfg = config(home, **more)
    sharded(cfg, tokenizer, n, str(home/"shards"))
    merge_shards(cfg, str(home/"shards"), home/"whole", tokenizer)
    alone = prepare(cfg, tokenizer).train
    for name in SAME: assert (home/"whole"/name).read_bytes() == (alone.folder/name).read_bytes(), name


def test_rows_that_are_held_out_are_there_as_rows(tokenizer, home, small_blocks):
    cfg = replace(config(home), eval_fraction=.2, eval_samples=40)
    sharded(cfg, tokenizer, 3, str(home/"shards"))
    merge_shards(cfg, str(home/"shards"), home/"whole", tokenizer)
    alone = prepare(cfg, tokenizer)
    data = prepare(replace(cfg, train_file=(str(home/"whole"),), eval_fraction=None), tokenizer)
    assert data.eval.fingerprint == alone.eval.fingerprint and data.eval.n_read == 40
    assert data.train.fingerprint == alone.train.fingerprint and data.train.counts == alone.train.counts
    with pytest.raises(ConfigError, match="eval_fraction: there is a validation file: eval.jsonl"):
        prepare(replace(cfg, train_file=(str(home/"whole"),)), tokenizer)


def test_an_address_that_is_no_folder(tokenizer, home, small_blocks):
    cfg, where = config(home), "memory://bucket/rows"
    sharded(cfg, tokenizer, 3, where)
    merge_shards(cfg, where, home/"whole", tokenizer)
    alone = prepare(cfg, tokenizer).train.folder
    assert (home/"whole"/"tokens.arrow").read_bytes() == (alone/"tokens.arrow").read_bytes()
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_a_job_that_was_killed_is_started_again(tokenizer, home, small_blocks, monkeypatch):
    "Its shard is not there before its last file is; one that is there is not made again"
    cfg, out = config(home), home/"shards"

    class Killed(BaseException): "Nobody catches it"
    put_file, sent = LocalFileSystem.put_file, []
    def put(fs, source, to, **how):
        if len(sent) == 8: raise Killed
        sent.append(to)
        put_file(fs, source, to, **how)
    with monkeypatch.context() as m:
        m.setattr(LocalFileSystem, "put_file", put)
        with pytest.raises(Killed): prepare_shard(cfg, "1/2", str(out), tokenizer)
    assert list((home/"cache"/"data").iterdir()) == []
    first = prepare_shard(cfg, "1/2", str(out), tokenizer)
    assert "Fix: take the duplicates out of the rows" in str(first) and "held_out" not in str(first)
    monkeypatch.setattr(shards, "_write_side_checked", None)   # is not called
    assert str(prepare_shard(cfg, "1/2", str(out), tokenizer)) == str(first)
    with pytest.raises(SftError, match="shard 2 of 2 is not there; all of them. Fix: prepare shard 2 of 2 with"):
        merge_shards(cfg, str(out), home/"whole", tokenizer)
    with pytest.raises(SftError, match="nowhere: there is no shard in it; .*Fix: name the folder that"):
        merge_shards(cfg, str(home/"nowhere"), home/"whole", tokenizer)
    assert not (home/"whole").exists()


def test_shards_of_other_rows_or_settings(tokenizer, home, small_blocks):
    cfg, out = config(home), str(home/"shards")
    prepare_shard(cfg, "1/2", out, tokenizer)
    with pytest.raises(SftError, match="shard-1-of-2: it was made with another train on prompt than this one"):
        prepare_shard(replace(cfg, train_on_prompt=True), "1/2", out, tokenizer)
    with pytest.raises(SftError, match="shard-1-of-2: it is one of 2, and this one is one of 3; .*a shard of 2"):
        prepare_shard(cfg, "3/3", out, tokenizer)
    write(home/"rows.jsonl", odd_rows()[1:])
    with pytest.raises(SftError, match="shard-1-of-2: it was made with another rows than this one.*away, if it is the"):
        prepare_shard(cfg, "2/2", out, tokenizer)   # before an hour is spent on it
    prepare_shard(cfg, "2/2", str(home/"elsewhere"), tokenizer)
    shutil.move(home/"elsewhere"/"shard-2-of-2", out)
    with pytest.raises(SftError, match="shard-2-of-2: it was made with another rows than shard-1-of-2"):
        merge_shards(cfg, out, home/"whole", tokenizer)


def test_a_shard_without_a_page_is_noticed(tokenizer, home, small_blocks):
    "Also where somebody has sealed it again"
    cfg, out = config(home), home/"shards"
    sharded(cfg, tokenizer, 2, str(out))
    shard = out/"shard-1-of-2"
    pages = (shard/"pages.jsonl").read_text().splitlines(True)
    (shard/"pages.jsonl").write_text("".join(pages[:-1]))
    with pytest.raises(SftError, match="shard-1-of-2: pages.jsonl is not as it was written"):
        merge_shards(cfg, str(out), home/"whole", tokenizer)
    (shard/"pages.jsonl").write_text("".join(pages[:2] + pages[3:]))
    (shard/"entry.json").unlink()
    shards.seal(shard)
    with pytest.raises(SftError, match="shard-1-of-2: its next row is 96, and 64 rows came before"):
        merge_shards(cfg, str(out), home/"whole", tokenizer)


@pytest.mark.parametrize("file", ["meta.json", "made.json", "tokens.arrow"])
def test_a_shard_that_lost_something_is_prepared_again(tokenizer, home, small_blocks, file):
    cfg, out = config(home), str(home/"shards")
    sharded(cfg, tokenizer, 2, out)
    shard = home/"shards/shard-1-of-2"
    if file == "tokens.arrow": (shard/file).write_bytes((shard/file).read_bytes()[:-100])
    else: (shard/file).unlink()
    with pytest.raises(SftError, match=f"shard-1-of-2: {file} is not as it was written; .*prepare it again"):
        merge_shards(cfg, out, home/"whole", tokenizer)
    prepare_shard(cfg, "1/2", out, tokenizer)
    merge_shards(cfg, out, home/"whole", tokenizer)


def test_a_task_that_was_changed_in_between(home, small_blocks):
    "Code is part of what a shard was made with, as it is of what the cache keeps"
    def task(end):
        (home/"mine.py").write_text(
            "from sft_nb.tasks.chat import Chat\nclass Mine(Chat):\n    name = 'mine'\n    def messages(self, row):\n"
            f"        return [*super().messages(row)[:-1], dict(role='assistant', content='{end}')]\n")
        return config(home, task=str(home/"mine.py"), trust_remote_code=True)
    prepare_shard(task("!"), "1/2", str(home/"shards"))
    for part in ("1/2", "2/2"):
        with pytest.raises(SftError, match="shard-1-of-2: it was made with another version of the code than this one"):
            prepare_shard(task("?"), part, str(home/"shards"))


def test_who_scores_nothing_holds_out_the_same(tokenizer, home, small_blocks):
    cfg = replace(config(home), eval_fraction=.2)
    for part, n in (("1/3", 0), ("2/3", 5), ("3/3", 200)):
        prepare_shard(replace(cfg, eval_samples=n), part, str(home/"s"), tokenizer)
    merge_shards(cfg, str(home/"s"), home/"whole", tokenizer)
    held_out = (home/"whole"/"eval.jsonl").read_text().splitlines()
    assert len(held_out) == prepare(replace(cfg, eval_samples=200), tokenizer).eval.n_read > 20
    data = prepare(replace(cfg, train_file=(str(home/"whole"),), eval_fraction=None, eval_samples=40), tokenizer)
    assert data.eval.fingerprint == prepare(replace(cfg, eval_samples=40), tokenizer).eval.fingerprint


@pytest.mark.parametrize("rows, says", [
    (odd_rows(), "none of 250 rows is left: .*longer.*prepare the shards again"),
    ([], "there is no row in any of them")])
def test_nothing_is_left(tokenizer, home, small_blocks, rows, says):
    cfg = config(home, max_length=3, on_long="drop", train_file=write(home/"these.jsonl", rows))
    sharded(cfg, tokenizer, 2, str(home/"shards"))
    with pytest.raises(SftError, match=says): merge_shards(cfg, str(home/"shards"), home/"whole", tokenizer)
    assert not (home/"whole").exists()


def test_a_fix_for_what_came_prepared(tokenizer, home, small_blocks):
    "A larger max_length would be refused"
    cfg = config(home, max_length=45, on_long="drop")
    sharded(cfg, tokenizer, 2, str(home/"shards"))
    merge_shards(cfg, str(home/"shards"), home/"whole", tokenizer)
    data = prepare(replace(cfg, train_file=(str(home/"whole"),)), tokenizer)
    assert "prepare the shards again, with a larger max_length" in str(check_kept(data).fix)
    assert "prepare the shards again" in str(data.report) and "max_length=" not in str(data.report)
    assert "max_length=" in str(check_kept(prepare(cfg, tokenizer)).fix)


def test_an_address_of_this_process_alone(home):
    for line in ("--shard 1/2 --out memory://x", "--merge memory://x --out y"):
        with pytest.raises(ConfigError, match="memory:// is a place of this process alone.*Fix: --out shards"):
            data_command(line.split())


@pytest.fixture
def whole(tokenizer, home, small_blocks):
    cfg = config(home)
    sharded(cfg, tokenizer, 3, str(home/"shards"))
    merge_shards(cfg, str(home/"shards"), home/"whole", tokenizer)
    return replace(cfg, train_file=(str(home/"whole"),))


def test_a_part_of_what_was_prepared_and_a_mixture(tokenizer, home, whole):
    alone = prepare(config(home), tokenizer).train
    some = prepare(replace(whole, max_samples=20), tokenizer).train
    assert [x.ids for x in some[:20]] == [x.ids for x in alone[:20]] and len(some) == 20
    more = write(home/"more.jsonl", pairs(30, seed=5))
    mixed = prepare(replace(whole, train_file=(str(home/"whole"), more), train_weights=(.5, 1.)), tokenizer).train
    assert len(alone) // 3 < len(mixed) < len(alone)
    place, row = prepare(whole, tokenizer).train.row(7)
    assert place == "whole example 8" and row["input_ids"] == list(alone[7].ids)


def test_tokens_of_another_making_are_refused(tokenizer, home, whole):
    wrong = (dict(max_length=71), "it was made with max_length 70, and max_length is 71 now.*Fix: max_length=70"), (
        dict(on_long="split"), "it was made with on_long 'cut', and on_long is 'split' now"), (
        dict(task="gsm8k"), "it was made with task chat, and task is gsm8k now.*Fix: task='chat'"), (
        dict(chat_template="none"), "it was made with another chat template.*set chat_template to that of the shards")
    for settings, says in wrong:
        cfg = replace(whole, **settings)
        with pytest.raises(ConfigError, match=says): prepare(cfg)
    content = bytearray((home/"whole"/"tokens.arrow").read_bytes())
    content[5000] ^= 1
    (home/"whole"/"tokens.arrow").write_bytes(content)
    with pytest.raises(SftError, match="tokens.arrow holds other bytes than were written"): prepare(whole, tokenizer)


def test_shards_are_no_rows(home, whole):
    for folder in (home/"shards", home/"shards"/"shard-2-of-3"):
        with pytest.raises(SftError, match="this is one of 3 shards, or a folder of them.*--merge"):
            prepare(replace(whole, train_file=(str(folder),)))


def test_places_that_cannot_be_reached(tokenizer, home, small_blocks, monkeypatch):
    cfg = config(home)
    def absent(*args, **how): raise ImportError("Install s3fs to access S3")
    with monkeypatch.context() as m:
        m.setattr(fsspec.core, "url_to_fs", absent)
        with pytest.raises(SftError, match="not installed; a place that can be reached. Fix: pip install s3fs"):
            prepare_shard(cfg, "1/2", "s3://bucket/rows", tokenizer)
    (home/"file").write_text("")
    with pytest.raises(SftError, match="file/rows: it cannot be read or written"):
        prepare_shard(cfg, "1/2", str(home/"file"/"rows"), tokenizer)
    for out in (home, "s3://bucket/whole"):
        with pytest.raises(ConfigError, match="--out: it is .*a new folder of this machine. Fix: --out"):
            merge_shards(cfg, str(home), out, tokenizer)
    with pytest.raises(ConfigError, match=f"Fix: --out '{home}/new'"):
        merge_shards(cfg, str(home), f"file://{home}/new", tokenizer)
    assert not (home/"s3:").exists()


@pytest.mark.parametrize("number, says", [(errno.ENOSPC, "it takes no more.*room for the prepared rows"),
                                          (errno.EIO, None)])
def test_a_disk_that_takes_no_more(tokenizer, home, small_blocks, monkeypatch, number, says):
    def full(*args, **how): raise OSError(number, "is full")
    monkeypatch.setattr(shards, "_write_side_checked", full)
    with pytest.raises(SftError if says else OSError, match=says):
        prepare_shard(config(home), "1/2", str(home/"out"), tokenizer)
    assert not (home/"out").exists() and list((home/"cache"/"data").iterdir()) == []


def test_rows_that_change_while_a_shard_is_made(tokenizer, home, small_blocks, monkeypatch):
    cfg, fill = config(home), shards._write_side_checked
    def slow(*args, **how):
        write(home/"rows.jsonl", odd_rows()[5:])
        return fill(*args, **how)
    monkeypatch.setattr(shards, "_write_side_checked", slow)
    with pytest.raises(SftError, match="the rows change while they are read"):
        prepare_shard(cfg, "1/2", str(home/"out"), tokenizer)
    assert not (home/"out").exists()


def test_a_run_learns_from_them_as_from_the_rows(home, small_blocks):
    from sft_nb.training.train import train
    rows = write(home/"rows.jsonl", pairs(120))
    cfg = load_config("demo", task="chat", train_file=rows, eval_fraction=.1, max_steps=3, eval_samples=8,
                      max_length=200, logging_steps=1, preflight=False, runs_dir=str(home/"runs"),
                      cache_dir=str(home/"cache"))
    for k in (1, 2): prepare_shard(cfg, f"{k}/2", str(home/"shards"))
    merge_shards(cfg, str(home/"shards"), home/"whole")
    shutil.rmtree(home/"shards")
    a = train(replace(cfg, run_name="rows"))
    b = train(replace(cfg, run_name="tokens", train_file=(str(home/"whole"),), eval_fraction=None))
    losses = [[m["loss"] for m in run.metrics() if "loss" in m] for run in (a, b)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert json.loads((home/"whole"/"made.json").read_text())["task"] == "chat"
