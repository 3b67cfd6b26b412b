"""Padded or flattened: the choice, its reason, and the matching collator."""

import numpy as np
import pytest
import transformers
from hypothesis import given, settings as how, strategies as st
from packaging.version import Version
from shapes import ODD, model, shape

from sft_nb.batches.layout import DataCollatorFlattening, DataCollatorForCausalLM
from sft_nb.batches.layout import (
    choose_layout, collator_for, largest_batch, rows_of_largest_batch, should_flatten, takes_flattened)
from sft_nb.config.load import load_config
from sft_nb.model.attention import register_varlen, varlen_attention, varlen_mask
from sft_nb.base.report import ConfigError

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@pytest.mark.parametrize("how, attention, name, reason", [
    (dict(), "varlen", "flattened", "auto: varlen keeps rows apart"),
    (dict(), "flash_attention_2", "flattened", "auto: flash_attention_2 keeps rows apart"),
    (dict(), "kernels-community/flash-attn3", "flattened", "auto: kernels-community/flash-attn3 keeps rows apart"),
    (dict(), "sdpa", "padded", "auto: sdpa would compute all pairs of tokens"),
    (dict(), None, "padded", "auto: the default attention would compute all pairs of tokens"),
    (dict(padding_free=True), "sdpa", "flattened", "requested"),
    (dict(padding_free=False), "varlen", "padded", "requested"),
    (dict(max_tokens_per_batch=99), "sdpa", "flattened", "rows are packed"),
], ids=str)
def test_the_layout_and_its_reason(tokenizer, how, attention, name, reason):
    layout = choose_layout(attention, shape("qwen3"), tokenizer, **load_config(**how).values(choose_layout))
    assert (layout.name, layout.reason) == (name, reason)
    assert isinstance(layout.collate, DataCollatorFlattening if layout.flat else DataCollatorForCausalLM)
    if layout.flat: assert layout.collate.return_seq_lens == takes_flattened(attention)
    else: assert layout.collate.pad_to_multiple_of == 8


@pytest.mark.parametrize("kind", list(ODD))
def test_a_model_whose_rows_would_read_each_other(tokenizer, kind):
    "The plan's choice is overridden; a requested one is refused, by the config if it says so, else by the model"
    if kind == "falcon" and Version(transformers.__version__) >= Version("5.24"):
        pytest.skip("since 5.24 transformers gives Falcon's mask the positions, and its rows stay apart")
    m = model(kind, **{"init_std" if kind == "opt" else "initializer_range": .3})
    asked = load_config(padding_free=True)
    with pytest.raises(ConfigError, match="reach across rows.*Fix: padding_free=False"):
        collator_for(asked, m, tokenizer)
    with pytest.raises(ConfigError, match="reach across rows"):
        collator_for(load_config(max_tokens_per_batch=99), m, tokenizer)
    auto = choose_layout("sdpa", m.config, tokenizer, model=m)
    assert not auto.flat
    if kind in ("bloom", "mamba"): return   # known by the config: no plan chooses it
    planned = dict(padding_free=True, is_planned=True)
    assert should_flatten("varlen", m.config, **planned) == (True, "chosen by the plan")
    layout = choose_layout("varlen", m.config, tokenizer, m, **planned)
    assert layout.name == "padded" and "would read each other" in layout.reason
    with pytest.raises(ConfigError, match="read each other"):
        choose_layout("varlen", m.config, tokenizer, m, max_tokens_per_batch=99, **planned)


@pytest.mark.parametrize("fault", [None, "reads the other rows", "wrong numbers"])
def test_a_kernel_of_the_hub_is_probed(tokenizer, monkeypatch, fault):
    "Flattened rows, if the results equal PyTorch's attention on each row alone"
    name, m = "kernels-community/flash-attn3", model("qwen3", initializer_range=.3)
    def kernel(module, q, k, v, mask, **how):
        if fault == "reads the other rows": mask = None
        out = varlen_attention(module, q, k, v, mask, **{n: how[n] for n in ("dropout", "scaling")})[0]
        return (1.1 * out if fault == "wrong numbers" else out), None
    register_varlen()
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, kernel)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, varlen_mask)
    m.config._attn_implementation = name
    layout = choose_layout(name, m.config, tokenizer, m, padding_free=True, is_planned=True)
    assert layout.flat == (fault is None) and m.config._attn_implementation == name
    if not fault: return
    with pytest.raises(ConfigError, match="read each other"):
        choose_layout(name, m.config, tokenizer, model=m, padding_free=True)


@given(lengths, st.one_of(st.none(), st.integers(60, 300)), st.integers(1, 9))
@how(max_examples=100, deadline=None)
def test_the_rows_of_the_largest_batch_are_not_larger_than_its_bound(n, budget, size):
    "The plan's largest batch bounds every batch of the rows, and contains the longest"
    rows = rows_of_largest_batch(n, batch_size=size, max_tokens=budget)
    bound = largest_batch(n, batch_size=size, max_tokens=budget, flat=True)
    assert len(set(rows)) == len(rows) and n[rows[0]] == max(n) == bound.lengths[0]
    assert sum(n[r] for r in rows) <= bound.tokens
    if budget is None: assert [n[r] for r in rows] == list(bound.lengths) == sorted(n, reverse=True)[:size]
    else: assert bound.tokens == min(budget, sum(n))
    assert largest_batch(np.array(n), batch_size=size, max_tokens=budget, flat=True) == bound
