"Checks of the batch: each fires on a planted defect and is quiet without it"
import numpy as np
import pytest
import torch
from planted import small

from sft_nb.batches.layout import DataCollatorFlattening, DataCollatorForCausalLM
from sft_nb.checks.rows import (check_labels, check_mask, check_padding, check_positions, check_shapes,
                                 check_supervised)
from sft_nb.tokens.prepare import prepare


@pytest.fixture(scope="module")
def rows():
    tokens = prepare(small()).train.tokens
    return [tokens[k] for k in range(3)]


@pytest.fixture
def lengths(rows): return [len(r["input_ids"]) for r in rows]


@pytest.fixture
def padded(rows, tokenizer): return DataCollatorForCausalLM(tokenizer, 8)(rows)


@pytest.fixture
def flat(rows): return DataCollatorFlattening(False)(rows)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_a_good_batch(layout, request, lengths, tokenizer):
    batch = request.getfixturevalue(layout)
    found = [check_shapes(batch), check_mask(batch, lengths), check_positions(batch, lengths)]
    assert [*found, check_padding(batch, lengths, tokenizer), check_labels(batch)] == [None] * 5


def test_broken_shapes_and_masks(padded, lengths):
    ones = torch.ones_like(padded["input_ids"])
    assert check_shapes(padded | dict(labels=padded["labels"][:, 1:])).status == "fail"
    assert check_mask(padded | dict(attention_mask=ones), lengths).status == "fail"
    assert check_mask(padded | dict(attention_mask=padded["attention_mask"].flip(1)), lengths).status == "fail"


def test_broken_positions(flat, lengths):
    running_on = flat | dict(position_ids=torch.arange(sum(lengths))[None])
    masked = flat | dict(attention_mask=torch.ones_like(flat["input_ids"]))
    bare = {k: v for k, v in flat.items() if k != "position_ids"}
    assert [check_positions(b, lengths).status for b in (running_on, masked, bare)] == ["fail"] * 3


def test_broken_padding_and_labels(padded, flat, lengths, tokenizer):
    labels = padded["labels"].masked_fill(padded["attention_mask"] == 0, tokenizer.pad_token_id)
    assert "write padding" in check_padding(padded | dict(labels=labels), lengths, tokenizer).says
    left = padded | dict(input_ids=padded["input_ids"].flip(1), labels=torch.full_like(labels, -100))
    assert "left" in check_padding(left, lengths, tokenizer).says
    assert check_labels(flat | dict(labels=flat["labels"].roll(-1, 1))).status == "fail"


def test_batches_without_anything_to_learn():
    learn = np.array([3, 0, 0, 4])
    assert check_supervised([[0, 1], [2, 3]], learn) is None
    assert "1 of 2 batches" in check_supervised([[0, 3], [1, 2]], learn).says
    assert check_supervised([[0], [3], [~0]], learn) is None   # a row that evens out the processes teaches nothing anew
