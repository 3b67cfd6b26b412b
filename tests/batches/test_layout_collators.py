"""A batch is its rows and padding, and nothing else."""
import torch
from hypothesis import HealthCheck, given, settings as how, strategies as st

from sft_nb.batches.layout import DataCollatorFlattening, DataCollatorForCausalLM

tokens = st.lists(st.tuples(st.integers(4, 700), st.booleans()), min_size=1, max_size=40)   # id, supervised
rows = st.lists(tokens, min_size=1, max_size=8).map(
    lambda batch: [dict(input_ids=[i for i, _ in r], labels=[i if s else -100 for i, s in r]) for r in batch])


@given(rows, st.sampled_from([None, 1, 8, 64]))
@how(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_come_back_whole_and_padding_is_padding(tokenizer, features, multiple):
    b = DataCollatorForCausalLM(tokenizer, multiple)(features)
    T = b["input_ids"].shape[1]
    assert all(t.shape == (len(features), T) and t.dtype == torch.int64 for t in b.values())
    assert T % (multiple or 1) == 0 and T - max(len(f["input_ids"]) for f in features) < (multiple or 1)
    for f, ids, labels, mask in zip(features, *(b[k].tolist() for k in ("input_ids", "labels", "attention_mask"))):
        n = len(f["input_ids"])
        padding = T - n
        assert ids == f["input_ids"] + [tokenizer.pad_token_id] * padding
        assert labels == f["labels"] + [-100] * padding
        assert mask == [1] * n + [0] * padding


@given(rows)
@how(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_to_trls_collator_where_both_can(tokenizer, features):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id, pad_to_multiple_of=8)
    theirs = collate([dict(f) for f in features])
    ours = DataCollatorForCausalLM(tokenizer, 8)(features)
    assert all(torch.equal(ours[k], theirs[k]) for k in ("input_ids", "labels", "attention_mask"))


@given(rows)
@how(max_examples=100, deadline=None)
def test_flattened_rows_are_the_rows(features):
    b = DataCollatorFlattening()(features)
    cu = b["cu_seq_lens_q"].tolist()
    assert len(cu) == len(features) + 1 and cu[0] == 0 and cu[-1] == b["input_ids"].shape[1]
    assert b["max_length_q"] == max(len(f["input_ids"]) for f in features)
    for f, i, j in zip(features, cu, cu[1:]):
        assert b["input_ids"][0, i:j].tolist() == f["input_ids"]
        assert b["labels"][0, i:j].tolist() == [-100, *f["labels"][1:]]
        assert b["position_ids"][0, i:j].tolist() == list(range(j - i))


@given(rows)
@how(max_examples=50, deadline=None)
def test_flattened_equals_transformers(features):
    from transformers import DataCollatorWithFlattening
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([dict(f) for f in features])
    ours = DataCollatorFlattening()(features)
    for k in ours: assert torch.equal(torch.as_tensor(ours[k]), torch.as_tensor(theirs[k])), k


@given(rows)
@how(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lists_arrays_and_tensors_give_the_same_batch(tokenizer, features):
    import numpy as np
    for collate in (DataCollatorForCausalLM(tokenizer, 8), DataCollatorFlattening()):
        want = collate(features)
        for kind in (lambda x: np.array(x, dtype=np.int32), torch.tensor):
            got = collate([{k: kind(v) for k, v in f.items()} for f in features])
            assert all(torch.equal(torch.as_tensor(want[k]), torch.as_tensor(got[k])) for k in want)
