"""Settings that meet: the covering array holds every pair, its table is up to date, and rows that once broke train."""
import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT/"scripts"))
import pairs   # noqa: E402

from sft_nb.base.report import edit, SftError   # noqa: E402

pytestmark = pytest.mark.usefixtures("warm_processes")


def test_every_pair_of_values_is_in_the_array():
    rows = pairs.array()
    met = pairs.met(rows)
    assert pairs.wanted() - met == set() and met & pairs.FORBIDDEN == set()
    assert len(rows) < 50 < len(pairs.wanted()) / 20


def test_a_pair_that_the_array_has_left_out_is_added():
    (row,) = pairs.completed({(("method", "full"), ("processes", "2"))})
    assert (row["method"], row["processes"], row["DoRA"]) == ("full", "2", "no")


def test_the_table_is_of_this_array_and_nothing_in_it_failed():
    made = json.loads(pairs.RESULTS.read_text())
    rows = pairs.array()
    assert [line["row"] for line in made["table"][:len(rows)]] == rows
    assert {line["outcome"] for line in made["table"][:len(rows)]} == {"trained"}
    refused = made["table"][len(rows):]
    assert [line["row"] for line in refused[:len(pairs.FORBIDDEN)]] == [dict(pair) for pair in sorted(pairs.FORBIDDEN)]
    assert len(refused) == len(pairs.FORBIDDEN) + len(pairs.ALONE)
    assert all(line["outcome"] == "refused" and line["says"] for line in refused)


@pytest.mark.parametrize("row", [
    dict(method="qlora", dtype="bfloat16", checkpointing="yes", dropout="0.3", modules_to_save="embed_tokens"),
    pytest.param(dict(dtype="bfloat16", schedule="polynomial", processes="2, ZeRO-2"), marks=pytest.mark.soak),
    dict(method="qlora, 8 bits", DoRA="yes"), dict(modules_to_save="lm_head", train_tokens="<|im_end|>")], ids=str)
def test_rows_that_once_broke(row):
    "They train, are resumed byte for byte, and merge; or are refused with a sentence of ours"
    if "ZeRO" in row.get("processes", ""): pytest.importorskip("deepspeed")
    found = pairs.attempt(pairs.settings_of(row))
    assert found["outcome"] == ("trained" if "dtype" in row else "refused"), found["says"]
    assert "could not be created" not in found["says"]


@pytest.mark.parametrize("error, outcome", [
    (SftError("a", "b", "c", edit(seed=1)), "refused"), (KeyError("HOME"), "failed")], ids=str)
def test_only_a_sentence_of_ours_is_a_refusal(error, outcome, monkeypatch):
    def look(folder, settings): raise error
    monkeypatch.setattr(pairs, "look", look)
    assert pairs.attempt({})["outcome"] == outcome
