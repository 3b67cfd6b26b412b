"""Hybrids: convolutions and scans restart at each row of a flattened batch."""
from importlib.machinery import ModuleSpec

import pytest
import torch
from hypothesis import given, settings as how, strategies as st
from shapes import tiny_config

from sft_nb.extras import states
from sft_nb.batches.layout import DataCollatorFlattening
from sft_nb.batches.layout import choose_layout, has_states, model_class, rows_stay_apart, should_flatten
from sft_nb.extras.states import group_rows, missing_kernels, needs_row_numbers, separate_rows
from sft_nb.model.attention import choose_attention
from sft_nb.model.load import auto_class, quiet
from sft_nb.model.loss import add_supervised_loss, batch_loss
from sft_nb.base.report import ConfigError

# gated delta rule, Mamba-2 beside experts, a convolution alone, Kimi's delta rule, Mamba-2 beside attention in a layer
HYBRIDS = ["qwen3_next", "granitemoehybrid", "lfm2", "kimi_linear", "falcon_h1"]
LENGTHS = [5, 70, 2, 23, 9]   # one longer than a chunk, some shorter than the convolution


def hybrid(kind:str):
    "A model with weights large enough for states to matter"
    shape = tiny_config(kind, 500)
    attention, _ = choose_attention("auto", "cpu", torch.float32, shape)
    torch.manual_seed(0)
    with quiet(): model = auto_class(shape).from_config(shape, dtype=torch.float32, attn_implementation=attention)
    for p in model.parameters():
        if p.ndim > 1: p.data *= 3
    return model.eval()


def rows_of(lengths):
    ids = torch.randint(3, 490, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return [dict(input_ids=row[0].tolist(), labels=row[0].tolist()) for row in ids.split(lengths, 1)]


def loss_and_gradients(model, batch):
    model.zero_grad()
    total, n = batch_loss(model, batch, supervised=True)
    (total / n).backward()
    return total.item() / n.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_flattened_equals_row_by_row(kind):
    "Loss and gradients; also if layers are computed again in the backward pass, long after the forward pass"
    model, rows = hybrid(kind), rows_of(LENGTHS)
    assert has_states(model.config) and rows_stay_apart(model)
    add_supervised_loss(model)
    losses = [batch_loss(model, DataCollatorFlattening()([row]), supervised=True) for row in rows]
    alone = sum(total for total, _ in losses) / sum(n for _, n in losses)
    model.zero_grad()
    alone.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for again in (False, True):
        if again:
            model.train()   # there is no dropout in these
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        loss, found = loss_and_gradients(model, DataCollatorFlattening()(rows))
        assert loss == pytest.approx(alone.item(), rel=1e-5)
        assert found.keys() == gradients.keys()
        for name, g in gradients.items(): assert (found[name] - g).norm() <= 1e-4 * g.norm() + 1e-7, name
    told = {name: x for name, x in DataCollatorFlattening()(rows).items() if name != "labels"}
    untold = {name: told[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad(): right, wrong = (model.eval()(**x, use_cache=False).logits for x in (told, untold))
    assert (right - wrong).abs().max() > 1e-2 * right.abs().max()   # so a probe can see it


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 70))
@how(max_examples=60, deadline=None)
def test_every_row_is_in_one_group_that_holds_it(lengths, chunk):
    groups = group_rows(tuple(lengths), chunk)
    assert sorted(row for group in groups for row in group.rows) == list(range(len(lengths)))
    for width, rows in groups:
        assert all(lengths[row] <= width < lengths[row] + max(chunk, 16) for row in rows)
        assert width <= chunk or width % chunk == 0


def test_a_layout_tells_rows_and_reports_why(tokenizer):
    shape = tiny_config("lfm2", 500)
    layout = choose_layout("varlen", shape, tokenizer)
    assert layout.flat and layout.reason == "auto: varlen and states keep rows apart"
    assert choose_layout("sdpa", shape, tokenizer, padding_free=True).collate.return_seq_lens
    with pytest.raises(ConfigError, match="a state of lfm2 runs through all tokens.*Fix: sequence_parallel_size=1"):
        should_flatten("varlen", shape, sequence_parallel_size=2)


def test_rows_that_are_not_told_are_padded(tokenizer):
    "Mamba-2 hands nothing down from its outermost forward pass; the loaded model shows it"
    model = hybrid("mamba2")
    assert has_states(model.config) and not rows_stay_apart(model)
    assert not choose_layout("varlen", model.config, tokenizer, model).flat
    with pytest.raises(ConfigError, match="read each other"):
        choose_layout("varlen", model.config, tokenizer, model=model, padding_free=True)


def test_kernels_that_are_installed_stay(monkeypatch, tokenizer):
    "They are told where rows begin by transformers, and those of convolutions want the row of each token"
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file
    kind = model_class(tiny_config("qwen3_5_text", 500))
    assert missing_kernels(kind) == ["causal-conv1d", "flash-linear-attention"] and not needs_row_numbers(kind)
    before = file.causal_conv1d_fn, file.torch_chunk_gated_delta_rule
    monkeypatch.setattr(states, "find_spec", lambda name: ModuleSpec(name, None))
    separate_rows(kind)
    assert (file.causal_conv1d_fn, file.torch_chunk_gated_delta_rule) == before
    assert missing_kernels(kind) == [] and needs_row_numbers(kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert should_flatten("varlen", tiny_config("qwen3_5_text", 500))[1].endswith("keep rows apart")
    monkeypatch.setattr(states, "find_spec", lambda name: None)
    _, reason = should_flatten("varlen", tiny_config("qwen3_5_text", 500))
    assert reason.endswith("; with causal-conv1d and flash-linear-attention, states are faster")
