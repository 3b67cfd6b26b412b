"""Batches: every row once, by seed and epoch alone, for any number of processes; and no document reads another."""
import numpy as np
import pytest
import torch
from conftest import shared
from hypothesis import HealthCheck, given, settings as how, strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from sft_nb.batches.layout import DataCollatorFlattening
from sft_nb.config.load import load_config
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import model_path
from sft_nb.batches.packing import batch_sampler, BatchSampler, pack_rows, split_to_count, TrainingRows

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=120)
modes = st.sampled_from([dict(batch_size=1), dict(batch_size=7), dict(batch_size=7, group_by_length=True),
                         dict(max_tokens=60), dict(max_tokens=200)])
in_order = st.sampled_from([dict(batch_size=7, shuffle=False), dict(max_tokens=60, shuffle=False)])


@given(lengths, modes | in_order, st.integers(0, 3), st.integers(1, 4), st.integers(0, 5))
@how(max_examples=300, deadline=None)
def test_every_row_is_in_one_batch_of_one_process(n, mode, seed, world, epoch):
    if len(n) < world: return
    ranks = [BatchSampler(n, seed=seed, epochs=3, rank=r, world_size=world, **mode) for r in range(world)]
    for b in ranks: b.set_epoch(epoch)
    parts = [list(b) for b in ranks]
    assert [len(p) for p in parts] == [len(ranks[0])] * world and all(b for p in parts for b in p)
    every = [r for p in parts for b in p for r in b]
    assert sorted(r for r in every if r >= 0) == list(range(len(n)))
    batches = [b for p in parts for b in p]
    # work without labels, only where nothing could be split
    assert not any(r < 0 for r in every) or max(map(len, batches)) == 1
    if "max_tokens" in mode: assert all(sum(n[r if r >= 0 else ~r] for r in b) <= mode["max_tokens"] for b in batches)
    else: assert all(len(b) <= mode["batch_size"] for b in batches)
    assert [list(b) for b in ranks] == parts


@given(lengths, modes)
@how(max_examples=100, deadline=None)
def test_epochs_differ_and_seeds_differ(n, mode):
    if len(n) < 30: return
    b = BatchSampler(n, seed=1, epochs=2, **mode)
    first = list(b)
    b.set_epoch(1)
    assert list(b) != first and len(list(b)) == len(first)
    assert list(BatchSampler(n, seed=2, epochs=2, **mode)) != first
    assert list(BatchSampler(n, seed=1, epochs=2, **mode)) == first


@given(lengths, in_order, st.integers(0, 3))
@how(max_examples=100, deadline=None)
def test_rows_that_are_not_shuffled_come_in_the_order_of_the_file(n, mode, epoch):
    assert [r for b in BatchSampler(n, epochs=2, **mode).all_batches(epoch) for r in b] == list(range(len(n)))


@pytest.mark.parametrize("mode", [dict(batch_size=4), dict(batch_size=4, group_by_length=True), dict(max_tokens=60)])
def test_epochs_beyond_those_that_were_asked_for_differ_too(mode):
    "`max_steps` may go through more epochs than `num_train_epochs`"
    b = BatchSampler(np.random.default_rng(0).integers(1, 60, 100), epochs=1, **mode)
    epochs = [b.all_batches(e) for e in range(5)]
    assert len({str(e) for e in epochs}) == 5 and {len(e) for e in epochs} == {b.n}
    if "max_tokens" not in mode: assert len({str(sorted(map(sorted, e))) for e in epochs}) == 5   # other neighbours too


def test_every_epoch_has_as_many_batches_as_the_one_that_needs_most():
    "More rows than are packed together (2,048), and budgets no larger than the longest: each epoch needs other batches"
    n = np.random.default_rng(1).integers(1, 60, 3000)
    for seed in range(3):
        b = BatchSampler(n, max_tokens=60, epochs=4, seed=seed)
        needed = [len(b.draw_batches(e)) for e in range(4)]
        assert needed[0] < max(needed) == len(b) and {len(b.all_batches(e)) for e in range(4)} == {len(b)}


def test_the_steps_of_two_processes_have_the_rows_of_one():
    "Micro-batches k and k+1 of one process are those of two processes, except for the last"
    n = np.random.default_rng(0).integers(1, 500, 999)
    for mode in (dict(max_tokens=2048), dict(batch_size=4), dict(batch_size=4, group_by_length=True)):
        one = list(BatchSampler(n, **mode))
        two = [list(BatchSampler(n, rank=r, world_size=2, **mode)) for r in range(2)]
        both = [b for pair in zip(*two) for b in pair]
        assert both[:len(one) - 1] == one[:len(one) - 1]


def test_gsm8k_at_4096_is_at_least_97_percent_full():
    cfg = load_config(tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/gsm8k/train.jsonl")),
                      eval_samples=0, max_length=4096)
    n = prepare(cfg).train.lengths
    for seed in (0, 1, 2):
        b = BatchSampler(n, max_tokens=4096, seed=seed)
        assert n.sum() / (len(b) * 4096) >= .97


@given(lengths, modes, st.integers(1, 4), st.integers(1, 7))
@how(max_examples=100, deadline=None)
def test_batches_by_number_are_the_batches_of_the_epochs(n, mode, world, accumulation):
    "`batches[k]` for every k, and each of them in one step"
    if len(n) < world: return
    b = BatchSampler(n, epochs=3, rank=world - 1, world_size=world, **mode)
    want = []
    for epoch in range(3):
        b.set_epoch(epoch)
        want += list(b)
    b.set_epoch(1)
    assert [b[k] for k in range(3 * len(b))] == want
    assert list(b) == want[len(b):2 * len(b)]
    steps = [b.micro_batches(step, accumulation) for step in range(1, b.steps(accumulation) + 1)]
    assert [k for step in steps for k in step] == list(range(3 * len(b)))
    assert all(0 < len(step) <= accumulation and step[0] // len(b) == step[-1] // len(b) for step in steps)
    with pytest.raises(IndexError): b[-1]


class _Epochs(DataLoader):
    def set_epoch(self, epoch): self.batch_sampler.set_epoch(epoch)


class _Recording(Trainer):
    "Records the rows of every micro-batch by optimiser step"
    def get_train_dataloader(self):
        self.seen = {}
        rows = TrainingRows(self.train_dataset)
        return _Epochs(rows, batch_sampler=self.sampler, collate_fn=lambda rows: dict(rows=rows))

    def training_step(self, model, inputs, num_items_in_batch=None):
        seen = self.seen.setdefault(self.state.global_step + 1, [])
        seen.append([tuple(row["input_ids"]) for row in inputs["rows"]])
        return super().training_step(model, inputs, num_items_in_batch)


class _Nothing(torch.nn.Module):
    "A model that has a loss"
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, rows): return dict(loss=self.weight ** 2)


MODES = [dict(batch_size=7), dict(max_tokens_per_batch=200), dict(group_by_length=True),
         dict(max_tokens_per_batch=200, shuffle=False)]

@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("accumulation, epochs", [(1, 1), (3, 2), (4, 2.5), (1000, 2)])
def test_a_step_has_the_rows_that_transformers_trainer_gives_it(tmp_path, mode, accumulation, epochs):
    "The reference is transformers' own loop over the rows of the demo, the remainder of an epoch included"
    cfg = load_config("demo", max_samples=100, eval_samples=0, num_train_epochs=epochs, **mode)
    data = prepare(cfg)
    b = batch_sampler(data.train.lengths, **cfg.values(batch_sampler))
    how = TrainingArguments(
        tmp_path, gradient_accumulation_steps=accumulation, num_train_epochs=epochs, report_to=[], use_cpu=True,
        remove_unused_columns=False, save_strategy="no", disable_tqdm=True, logging_strategy="no")
    trainer = _Recording(_Nothing(), how, train_dataset=data.train.tokens)
    trainer.sampler = batch_sampler(data.train.lengths, **cfg.values(batch_sampler))
    trainer.train()
    assert len(trainer.seen) == trainer.state.global_step == np.ceil(b.steps(accumulation) / b.epochs * epochs)
    ids = [tuple(row["input_ids"]) for row in data.train.tokens]
    for step, seen in trainer.seen.items():
        assert seen == [[ids[r] for r in b[k]] for k in b.micro_batches(step, accumulation)]


docs = st.lists(st.lists(st.integers(4, 1000), min_size=2, max_size=24), min_size=1, max_size=6)

@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float64).eval()


@given(docs)
@how(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_document_sees_another(model, rows):
    "Logits of a flattened batch against separate forward passes, in float64: only a leak can make a difference"
    rows = [[i % model.config.vocab_size for i in r] for r in rows]
    batch = DataCollatorFlattening(return_seq_lens=False)([dict(input_ids=r, labels=r) for r in rows])
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([r]), use_cache=False).logits[0] for r in rows])
    assert (together - alone).abs().max() < 1e-5
    firsts = np.cumsum([0, *map(len, rows)])[:-1]
    assert (batch["labels"][0, firsts] == -100).all() and (batch["labels"][0] == -100).sum() == len(rows)


@given(lengths)
@how(max_examples=100, deadline=None)
def test_no_two_batches_would_fit_into_one(n):
    "The guarantee of any-fit packing: at most twice the least number of batches"
    n = np.array(n)
    size = sorted(int(n[b].sum()) for b in pack_rows(n, 60, np.arange(len(n))))
    assert len(size) < 2 or size[0] + size[1] > 60


def test_processes_that_have_no_row_of_their_own_repeat_one_that_is_not_learned_again():
    assert split_to_count([[0]], 3) == [[0], [~0], [~0]]
    assert split_to_count([[4], [2, 0, 1]], 4) == [[4], [2], [0], [1]]
