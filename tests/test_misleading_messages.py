"""Messages and figures that misled users: the last loss, a headline, a misspelt model, a missing home folder."""
import json
import logging
import socket

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, command
from sft_nb.runs.checkpoint import cannot_write
from sft_nb.tokens.prepare import prepare


def test_the_last_step_is_logged_and_told(tmp_path):
    from learner import small
    from sft_nb.cli.commands import _describe_losses
    from sft_nb.training.train import train
    run = train(small(tmp_path, max_samples=12, max_steps=5, logging_steps=3, save_steps=5))
    assert [m["step"] for m in run.metrics() if "loss" in m] == [1, 3, 5]
    assert "at step 5" in _describe_losses(run) and "of 5 steps" not in _describe_losses(run)
    run.set_status("stopped", step=8)
    assert _describe_losses(run).endswith("at step 5, the last logged of 8 steps")


def long_rows(path):
    "Nine short rows of one answer, and one that is longer than all of them together"
    def row(n):
        words = [3, 200, 200, 200] if n == 9 else [3]
        return dict(messages=[dict(role=role, content=f"row {n} " + "word " * k)
                              for k in words for role in ("user", "assistant")])
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in range(10)))
    return str(path)


@pytest.mark.parametrize("how", ["drop", "cut"])
def test_the_headline_of_a_report_says_what_is_lost(tmp_path, how):
    rows = long_rows(tmp_path/"rows.jsonl")
    cfg = load_config(train_file=rows, max_length=100, on_long=how, eval_samples=0, cache_dir=str(tmp_path))
    data = prepare(cfg)
    title, counts = data.report.title, data.train.counts
    assert "9 of 10 rows" in title if how == "drop" else "10 of 10 rows" in title
    assert f"{counts.answers_kept} of 13 answers are kept" in title and "% of their tokens" in title
    assert f"max_length {counts.length_of_most:,} would keep 99%" in title
    longer = dict(max_length=counts.length_of_most, eval_samples=0, cache_dir=str(tmp_path))
    again = prepare(load_config(train_file=rows, **longer))
    assert again.report.title == "data of task chat" and again.train.counts.answers_kept == 13


def test_rows_that_are_asked_to_go_are_not_lost(tmp_path):
    "Duplicates and what is shorter than min_length: the length that is proposed is that of the other rows"
    path = long_rows(tmp_path/"rows.jsonl")
    with open(path) as f: lines = f.read().splitlines(keepends=True)
    def report(lines, **more):
        (tmp_path/"some.jsonl").write_text("".join(lines))
        cfg = load_config(train_file=str(tmp_path/"some.jsonl"), eval_samples=0, cache_dir=str(tmp_path), **more)
        data = prepare(cfg)
        return data.report.title, data.train.counts
    title, counts = report(lines[:9] * 4, drop_duplicates=True)
    assert title == "data of task chat: 9 of 36 rows (27 left out as requested)"
    assert counts.tokens_lost == 0 and 4 * (counts.tokens - counts.tokens_requested) == counts.tokens
    once, before = report(lines, max_length=100)
    title, counts = report(lines[:9] * 30 + lines[9:], max_length=100, drop_duplicates=True)
    assert counts.length_of_most == before.length_of_most > 100 and counts.tokens_lost == before.tokens_lost
    assert title.endswith(once.partition("rows, ")[2]) and "261 left out as requested)" in title


@pytest.fixture
def no_network(monkeypatch):
    "A machine without a network, on which the hub is still asked"
    import huggingface_hub.constants as constants
    asked = []
    def refuse(*args, **kw):
        asked.append(args)
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


@pytest.mark.parametrize("name, why", [
    ("Qwen/Qwen2.5-05B", "the hub cannot be reached"), ("./nowhere", "no such folder"),
    ("runs/x/merged", "no such folder"), ("no model at all", "the hub")])
def test_a_misspelt_model_is_told_at_once(no_network, tmp_path, monkeypatch, name, why):
    from sft_nb.model.load import load_shape
    from sft_nb.tokens.tokenizer import load_tokenizer
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be loaded .*{why}"): load_tokenizer(load_config(model=name))
    with pytest.raises(ConfigError, match=f"cannot be loaded .*{why}"):
        load_shape(load_config(model=name, tokenizer="tiny"), None)
    assert len(no_network) <= 4   # six attempts for each file took 50 s


def test_a_home_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch, capsys):
    from sft_nb.tokens.cache import cache_folder
    (tmp_path/"file").write_text("")
    monkeypatch.delenv("SFT_NB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path/"file/home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    assert folder.parent.parent == tmp_path and folder.parent.stat().st_mode & 0o077 == 0
    assert f"cannot be written, so the cache is {folder.parent}" in capsys.readouterr().err
    assert len(prepare(load_config(max_samples=5, eval_samples=0)).train.tokens) == 5
    folder.parent.chmod(0o777)   # as somebody else may have made it
    assert cache_folder().parent != folder.parent


@pytest.mark.parametrize("error, says", [
    (OSError(28, "No space left on device"), "a disk with room"),
    (OSError(122, "Disk quota exceeded"), "a disk with room"),
    (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "a disk with room"),
    (PermissionError(13, "Permission denied"), "a folder that you can write to"),
    (OSError(30, "Read-only file system"), "a folder that you can write to"),
    (TypeError("cannot pickle a lock"), "nothing else in its place"), (AssertionError(), "nothing else in its place"),
])
def test_only_a_full_disk_is_told_as_one(tmp_path, error, says):
    told = cannot_write(tmp_path/"checkpoint-3", error, command("sft_nb train --resume x"))
    assert says in told.expected and ("disk with room" in told.expected) == ("disk" in says)
    assert type(error).__name__ in told.found


def test_8_bits_do_not_speak_at_each_product(caplog):
    import sft_nb   # noqa: F401
    log = logging.getLogger("bitsandbytes.autograd._functions")
    with caplog.at_level("WARNING"):
        log.warning("MatMul8bitLt: inputs will be cast from %s to float16 during quantization", "float32")
        log.warning("something else")
    assert [line.getMessage() for line in caplog.records] == ["something else"]
