"""Two processes, each with half of every weight, compute what one process computes."""
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from shapes import SHAPES, model
from torch.multiprocessing.spawn import start_processes

from sft_nb.config.load import load_config
from sft_nb.extras.kernels import compile_layers, fuse_lora
from sft_nb.model.loss import add_supervised_loss
from sft_nb.model.finetuning.checkpointing import recompute_layers, recompute_parts
from sft_nb.extras.fsdp import shard, whole_weights, whole_when_saved
from sft_nb.extras.sharded_memory import passing_bytes
from sft_nb.model.finetuning.parallelism import Division
from sft_nb.planning.plan import plan
from sft_nb.training.guards import all_finite, own_part, weight_norms

STILL = dict(gpt2=dict(resid_pdrop=0., embd_pdrop=0., attn_pdrop=0.))
CASES = {kind: dict(kind=kind, method="full", **STILL.get(kind, {})) for kind in SHAPES}
CASES |= {f"{kind}, adapter": dict(kind=kind, **STILL.get(kind, {})) for kind in ("qwen3", "gemma2", "gpt2")}
CASES |= {f"qwen3, {name}": dict(kind="qwen3", **how) for name, how in dict(
    recomputed=dict(prepare=lambda m: recompute_layers(m, keep_attention=False)),
    kept=dict(prepare=lambda m: recompute_layers(m, keep_attention=True)),
    full_again=dict(method="full", prepare=lambda m: recompute_layers(m, keep_attention=False)),
    parts=dict(prepare=lambda m: recompute_parts(m)),
    fused=dict(prepare=fuse_lora),
    compiled=dict(   # tracing takes its time for each adapter
        target_modules=["q_proj", "down_proj"], num_hidden_layers=1,
        prepare=lambda m: compile_layers(m, backend="eager")),
    bfloat16=dict(dtype=torch.bfloat16),
    dora=dict(use_dora=True),
    head=dict(target_modules=["q_proj", "lm_head"], tie_word_embeddings=False),
    saved=dict(modules_to_save=["lm_head"], tie_word_embeddings=False),
    one_rank=dict(r=1)).items()}
HERE = [name for name in CASES if name not in SHAPES or name in ("qwen3", "gemma2", "smollm3", "gpt2")]
OTHERS = [name for name in CASES if name not in HERE]
ADAPTER = ("use_dora", "target_modules", "modules_to_save", "r")


def rows()->torch.Tensor:
    return torch.randint(3, 700, (4, 12), generator=torch.Generator().manual_seed(3))


def made(kind:str, method="lora", prepare=None, dtype=torch.float32, **more):
    "A model in train mode with trained weights in float32"
    torch.manual_seed(1)
    how = dict(r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)
    how |= {name: more.pop(name) for name in ADAPTER if name in more}
    two = dict(n_layer=2) if kind == "gpt2" else dict(num_hidden_layers=2)
    m = model(kind, attention="varlen", attention_dropout=0., dtype=dtype, **two | more)
    if method == "lora": m = get_peft_model(m, LoraConfig(**how))
    for p in m.parameters():
        if p.requires_grad: p.data = p.data.float()
    m.train()
    if prepare: prepare(m)
    assert add_supervised_loss(m)
    return m


def step(m, mine:slice, optimizer, dtype)->float:
    ids = rows()[mine]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = m(ids, labels=ids, supervised=True)
    (out.loss / rows()[:, 1:].numel() * (4 // len(ids))).backward()   # gradients are averaged over processes
    fine, _ = all_finite([out.loss.detach()], m)
    assert fine and len(weight_norms(m))
    gradients = {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return out.loss.detach(), gradients


def computed(name:str, *, divide:bool):
    "Two steps: sums of losses, gradients of the second, weights and the optimiser's state"
    how = CASES[name]
    m = made(**how)
    mine = slice(None)
    if divide:
        mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        shard(m, "cpu")
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=.01, momentum=.9)
    if divide: whole_when_saved(optimizer)
    (first, _), (second, gradients) = (step(m, mine, optimizer, how.get("dtype")) for _ in range(2))
    losses = torch.stack([first, second])
    if not divide: return losses, gradients, m.state_dict(), optimizer.state_dict()["state"]
    dist.all_reduce(losses)
    held = sum(own_part(p).numel() for p in m.parameters()) / sum(p.numel() for p in m.parameters())
    assert held < .6, held
    return losses, {n: g.full_tensor() for n, g in gradients.items()}, whole_weights(m), optimizer.state_dict()["state"]


def one_of_two(rank:int, place:str, names:list):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2,
                            timeout=timedelta(minutes=5))
    found = {name: computed(name, divide=True) for name in names}
    if rank == 0: torch.save(found, f"{place}/found.pt")
    dist.barrier()
    os._exit(0)   # a forked test must not run the cleanup


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    return by_two_processes(place, HERE)


def by_two_processes(place, names:list):
    start_processes(one_of_two, (str(place), names), nprocs=2, start_method="fork")
    return torch.load(place/"found.pt")


def near(mine, theirs, share):
    return (mine.float() - theirs.float()).norm() <= share * theirs.float().norm().clamp(min=1e-5)


@pytest.mark.soak
def test_two_steps_of_every_other_shape(tmp_path):
    found = by_two_processes(tmp_path, OTHERS)
    for name in OTHERS: test_two_steps_are_those_of_one_process(found, name)


@pytest.mark.parametrize("name", HERE)
def test_two_steps_are_those_of_one_process(by_two, name):
    share = 2e-2 if "bfloat16" in name else 1e-5
    (losses, gradients, weights, state), (own, its, whole, kept) = by_two[name], computed(name, divide=False)
    assert near(losses, own, share) and gradients.keys() == its.keys()
    for n, g in gradients.items(): assert near(g, its[n], share), n
    assert weights and all(near(w, whole[n], share) for n, w in weights.items())
    assert weights.keys() == whole.keys() or "lora" in str(weights.keys())
    assert state.keys() == kept.keys()
    for k, of_one in state.items(): assert near(of_one["momentum_buffer"], kept[k]["momentum_buffer"], share), k


def planned(**how):
    cfg = load_config(model="tiny", method="full", gradient_checkpointing=False, device="cpu", **how)
    return plan(cfg, lengths=[512], device="h100-80gb").parts


def test_the_plan_is_of_a_shard():
    alone, eight = planned(), planned(num_processes=8, fsdp=True)
    for part in ("weights", "gradients", "optimiser"): assert .1 < eight[part] / alone[part] < .15, part
    assert eight["activations"] == alone["activations"] and eight["working"] > alone["working"]


def test_weights_are_whole_until_they_are_divided():
    "With so many processes that almost nothing is left of them, there was a moment when everything was there"
    alone, many = planned(), planned(num_processes=4096, fsdp=True)
    assert sum(many.values()) - many["outside"] >= alone["weights"]


@pytest.mark.parametrize("numbers, gathered", [(40, 4 * 40), (10**9, 4 * 10**9), (4 * 10**9, 4 * 10**9)])
def test_a_third_stage_gathers_a_billion_numbers_at_most(numbers, gathered):
    "As DeepSpeed prefetches them by default: all weights of a small model, and part of a large one"
    model = torch.nn.Module()
    model.config = SimpleNamespace(hidden_size=8, get_text_config=lambda **how: model.config)
    model.weight = torch.nn.Parameter(torch.empty(numbers, device="meta"))
    bucket = 4 * 100
    assert passing_bytes(model, Division(stage=2, bucket=100)) == bucket
    assert passing_bytes(model, Division(stage=3, bucket=100)) == bucket + gathered
    assert passing_bytes(model, Division(stage=2)) == 4 * 8 * 8
    model.weight.requires_grad_(False)
    assert passing_bytes(model, Division(stage=2, bucket=100)) == 0
