"""Losses of rows and of single tokens, of which no more logits are computed than are needed."""
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from shapes import model as made

from sft_nb.evaluation import perplexity
from sft_nb.evaluation.perplexity import forgetting
from sft_nb.model import loss
from sft_nb.model.loss import head_of, row_losses, supervised_logits
from sft_nb.extras.losses import token_costs

DRAW = torch.Generator().manual_seed(3)


def row(n:int, supervised:int)->tuple[list[int],list[int]]:
    ids = torch.randint(3, 768, (n,), generator=DRAW).tolist()
    return ids, [-100] * (n - supervised) + ids[n - supervised:]


ROWS = [row(40, 5), row(9, 8), row(25, 0), row(17, 17)]


def by_the_model(model, ids:list[int], labels:list[int])->np.ndarray:
    "Nats of each supervised token, from the logits of all tokens"
    with torch.no_grad(): logits = model(torch.tensor([ids])).logits[0, :-1].double()
    targets = torch.tensor(labels[1:])
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none", ignore_index=-100)
    return nats[targets != -100].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt2", "qwen3_moe", "mamba"])
def test_losses_are_those_of_all_logits(kind):
    model = made(kind).eval()
    expected = [by_the_model(model, *r) for r in ROWS]
    nats, counts = row_losses(model, ROWS, batch_tokens=64)
    assert nats == pytest.approx([x.sum() for x in expected], rel=1e-4) and [*counts] == [5, 8, 0, 16]
    for head in (head_of(model), None):
        for (ids, labels), nats in zip(ROWS, expected):
            cost = token_costs(model, ids, labels, head=head)
            assert cost.loss[~np.isnan(cost.loss)] == pytest.approx(nats, rel=1e-4)
            assert (np.isnan(cost.loss) == np.isnan(cost.sure)).all()


@pytest.mark.parametrize("adapter", [
    dict(), dict(use_dora=True), dict(modules_to_save=["lm_head"]), dict(target_modules=["q_proj", "lm_head"])],
    ids=str)
def test_an_adapter_counts_wherever_it_is(adapter):
    torch.manual_seed(1)
    how = dict(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM") | adapter
    model = get_peft_model(made("qwen3"), LoraConfig(**how)).eval()
    if "modules_to_save" in adapter:
        with torch.no_grad(): model.get_output_embeddings().weight.mul_(1.1)
    tuned = [by_the_model(model, *r).sum() for r in ROWS]
    with model.disable_adapter(): base = [by_the_model(model, *r).sum() for r in ROWS]
    assert row_losses(model, ROWS)[0] == pytest.approx(tuned, rel=1e-4)
    before, after, moved = perplexity._losses_before_and_after(model, None, ROWS, 64)
    assert (before, after) == (pytest.approx(base, rel=1e-4), pytest.approx(tuned, rel=1e-4))
    assert moved[2] == 0 and (moved[[0, 1, 3]] > 0).all()
    separate = made("qwen3")
    assert perplexity._losses_before_and_after(model, separate, ROWS, 64) == pytest.approx(
        np.array([before, after, moved]), rel=1e-4, abs=1e-6)


def test_tokens_that_peft_puts_before_a_prompt_are_read():
    model = get_peft_model(made("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    assert head_of(model) is None and head_of(model.get_base_model()) is not None


def test_no_more_logits_are_computed_than_are_needed():
    model, heads = made("qwen3").eval(), []
    model.get_output_embeddings().register_forward_hook(lambda layer, args, out: heads.append(out[..., 0].numel()))
    ids, labels = row(600, 7)
    head = head_of(model)
    heads.clear()
    chunks = [*supervised_logits(model, dict(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])), head)]
    assert heads == [7] and [len(at) for at, _, _ in chunks] == [7]
    heads.clear()
    token_costs(model, ids, labels, head=head)
    assert heads == [7]
    row_losses(model, [(ids, labels)])
    assert max(heads) == 8   # by which the head is recognised


def test_half_as_many_texts_where_memory_runs_out():
    model, sizes, real = made("qwen3").eval(), [], loss.supervised_logits
    def tight(model, batch, head):
        sizes.append(len(batch["labels"]))
        if sizes[-1] > 1: raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, batch, head)
    expected = forgetting(model, ROWS, base=made("qwen3"))
    with patch.object(perplexity, "supervised_logits", tight), patch.object(loss, "supervised_logits", tight):
        assert forgetting(model, ROWS, base=made("qwen3")) == expected and sizes[:2] == [4, 2]
        sizes.clear()
        nats = row_losses(model, ROWS)[0]
    assert nats == pytest.approx(row_losses(model, ROWS)[0]) and sizes.count(1) == 4
    with patch.object(loss, "supervised_logits", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(torch.OutOfMemoryError): row_losses(model, ROWS)
    assert [len(x) for x in row_losses(model, [])] == [0, 0]
