"""Two processes that share every row compute what one process computes."""
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, folder, model
from torch.multiprocessing.spawn import start_processes

from sft_nb.batches.layout import DataCollatorFlattening, CollatorWithPositions
from sft_nb.config.load import load_config
from sft_nb.model.attention import choose_attention
from sft_nb.model.loss import add_supervised_loss
from sft_nb.model.finetuning.checkpointing import recompute_layers
from sft_nb.extras.sequence_parallel import in_shares
from sft_nb.extras.sharding import check_sharing
from sft_nb.planning import search
from sft_nb.planning.plan import plan
from sft_nb.base.report import ConfigError

LENGTHS = (5, 11, 2, 15)   # 33 tokens: one is added, and the second row lies on both sides of the border
CASES = dict.fromkeys(SHAPES, {}) | {
    "gpt2": dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.),
    "one head of keys": dict(kind="llama", num_key_value_heads=1),
    "recomputed": dict(kind="qwen3", again=dict(keep_attention=False)),
    "attention kept": dict(kind="qwen3", again=dict(keep_attention=True)),
    "bfloat16": dict(kind="qwen3", dtype=torch.bfloat16)}


def rows()->list[dict]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 768, (n,), generator=draw).tolist() for n in LENGTHS]
    return [dict(input_ids=row, labels=[-100] * (len(row) // 2) + row[len(row) // 2:]) for row in ids]


def computed(collate, kind:str, again=None, **more)->list:
    "Loss, supervised and right tokens, tokens, gradients; sums over the processes"
    torch.manual_seed(1)
    base = model(kind, attention="varlen", attention_dropout=0., **more)
    m = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    if again: recompute_layers(m, **again)
    assert add_supervised_loss(m)
    batch = CollatorWithPositions(collate)(rows())
    out = m(**batch, supervised=True)
    out.loss.backward()
    tokens = batch["share"].tokens if "share" in batch else batch["input_ids"].numel()
    counts = [torch.tensor(float(n)) for n in (out.n_tokens, out.n_correct, tokens)]
    found = [out.loss.detach(), *counts, *(p.grad for p in m.parameters() if p.requires_grad)]
    if dist.is_initialized():
        for t in found: dist.all_reduce(t)
    return found


def one_of_two(rank:int, place:str):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2,
                            timeout=timedelta(minutes=5))
    collate = in_shares(DataCollatorFlattening(), 2, supervised=True)
    found = {name: computed(collate, **dict(kind=name) | how) for name, how in CASES.items()}
    if rank == 0: torch.save(found, f"{place}/found.pt")
    dist.barrier()
    os._exit(0)   # a forked test must not run the cleanup


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    start_processes(one_of_two, (str(place),), nprocs=2, start_method="fork")
    return torch.load(place/"found.pt")


@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_gradients_are_those_of_one_process(by_two, name):
    got, want = by_two[name], computed(DataCollatorFlattening(), **dict(kind=name) | CASES[name])
    near = 2e-2 if name == "bfloat16" else 1e-5
    assert torch.equal(torch.stack(got[1:4]), torch.stack(want[1:4])) or name == "bfloat16"
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= near * theirs.norm().clamp(min=1e-6)


# settings

def refusal(**how):
    with pytest.raises(ConfigError) as e:
        plan(load_config("demo", **dict(num_processes=2, sequence_parallel_size=2) | how), lengths=[20, 9])
    return str(e.value)


@pytest.mark.parametrize("how, says", [
    (dict(attn_implementation="sdpa"), "the attention of qwen3 is sdpa"),
    (dict(padding_free=False), "padding_free: it is False and sequence_parallel_size is set"),
    (dict(sequence_parallel_size=4, num_processes=4), "6 heads cannot be split among 4 processes")])
def test_what_cannot_be_shared_is_refused(how, says): assert says in refusal(**how)


def test_a_model_that_reaches_from_row_to_row_is_refused(tmp_path):
    said = refusal(model=folder(tmp_path, "mamba"), tokenizer="tiny", init="random", method="full")
    assert said.startswith("sequence_parallel_size: ") and "sequence_parallel_size=1" in said


def test_the_plan_is_of_a_share():
    "What lies on a card: all weights, and the activations of a third of a row"
    how = dict(model="tiny", method="lora", gradient_checkpointing=False, max_length=8192, device="cpu")
    configs = [load_config(**how, num_processes=n, sequence_parallel_size=n) for n in (1, 3)]
    alone, shared = (plan(cfg, lengths=[8192], device="h100-80gb") for cfg in configs)
    share = shared.parts["activations"] / alone.parts["activations"]
    assert .3 < share < .37
    assert shared.settings["attn_implementation"] == "varlen" and shared.settings["padding_free"]
    assert alone.parts["weights"] == shared.parts["weights"]


def test_flash_attention_gives_way(monkeypatch):
    monkeypatch.setattr(search.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(search, "choose_attention", lambda wanted, device, *how: (
        ("flash_attention_2", "it is installed") if device == "cuda" else choose_attention(wanted, device, *how)))
    made = plan(load_config("demo", num_processes=2, sequence_parallel_size=2), lengths=[20], device="h100-80gb")
    assert made.settings["attn_implementation"] == "varlen"


def test_processes_that_cannot_be_split_into_groups_have_two_ways_out():
    cfg = load_config("demo", sequence_parallel_size=2)
    check_sharing(cfg, 4)
    with pytest.raises(ConfigError, match="3 processes cannot be split into groups of 2") as e: check_sharing(cfg, 3)
    assert e.value.fix.settings == dict(num_processes=2)
    assert [fix.settings for fix in e.value.fix.otherwise] == [dict(sequence_parallel_size=1)]
