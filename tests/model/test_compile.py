"""Compiled layers: two programs for any number of batches, the same numbers, and only for training."""
import pytest
import torch
from peft import LoraConfig, get_peft_model
from shapes import model
from torch._dynamo.utils import counters

from sft_nb.batches.layout import DataCollatorFlattening
from sft_nb.config.load import load_config
from sft_nb.model import attention
from sft_nb.model.adapter import load_model, spare_casts
from sft_nb.extras.kernels import compile_layers
from sft_nb.model.precision import use_kernels
from sft_nb.model.loss import add_supervised_loss
from sft_nb.base.report import ConfigError


def each(cu, *tensors): return zip(*(t.split(cu.diff().tolist()) for t in tensors))


@torch.library.custom_op("sft_nb_tests::varlen", mutates_args={})
def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, longest: int, scale: float
           ) -> torch.Tensor:
    "The result of the GPU kernel, computed on a CPU: (T, heads, size)"
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return torch.cat([attend(*qkv)[0].transpose(0, 1) for qkv in each(cu, q, k, v)]).contiguous()


@torch.library.custom_op("sft_nb_tests::varlen_backward", mutates_args={})
def varlen_backward(d: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float
                    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, found = q.shape[1] // k.shape[1], []
    for q_, k_, v_, d_ in each(cu, q, k, v, d):
        T, size = q_.shape[0], q_.shape[-1]
        q_, d_ = q_.transpose(0, 1), d_.transpose(0, 1)
        k_, v_ = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (k_, v_))
        p = (q_ @ k_.mT * scale).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf")).softmax(-1)
        d_p = d_ @ v_.mT
        d_s = p * (d_p - (d_p * p).sum(-1, keepdim=True)) * scale
        summed = [x.view(-1, groups, T, size).sum(1) for x in (d_s.mT @ q_, p.mT @ d_)]
        found.append([x.transpose(0, 1) for x in (d_s @ k_, *summed)])
    return tuple(torch.cat(x).contiguous() for x in zip(*found))


@varlen.register_fake
def _(q, k, v, cu, longest, scale): return torch.empty_like(q).contiguous()


@varlen_backward.register_fake
def _(d, q, k, v, cu, scale): return tuple(torch.empty_like(x).contiguous() for x in (q, k, v))


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.scale = inputs[5]


varlen.register_autograd(lambda ctx, d: (*varlen_backward(d.contiguous(), *ctx.saved_tensors, ctx.scale), *[None] * 3),
                         setup_context=remember)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    "One call of an operator for all documents"
    import torch.nn.attention.varlen as stock
    def kernel(q, k, v, cu, cu_k, longest, longest_k, *, scale, **how): return varlen(q, k, v, cu, longest, scale)
    monkeypatch.setattr(stock, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_flash_can_compute", lambda *how: True)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def learner(kind:str, kernels:str):
    torch.manual_seed(0)
    wanted = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    m = spare_casts(get_peft_model(model(kind, attention="varlen"), wanted)).train()
    add_supervised_loss(m)
    use_kernels(m, kernels)
    return m


def batches(n:int):
    draw = torch.Generator().manual_seed(5)
    for _ in range(n):
        lengths = torch.randint(4, 40, (int(torch.randint(2, 6, (), generator=draw)),), generator=draw).tolist()
        rows = [torch.randint(3, 700, (k,), generator=draw).tolist() for k in lengths]
        yield DataCollatorFlattening()([dict(input_ids=ids, labels=ids) for ids in rows])


def losses(m, n:int)->list[tuple]:
    "For each batch: the loss, and the norm of each gradient"
    found = []
    for batch in batches(n):
        m.zero_grad()
        loss = m(**batch, use_cache=False, supervised=True).loss
        loss.backward()
        found.append((loss.item(), *(p.grad.norm().item() for p in m.parameters() if p.grad is not None)))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("kind, kernels", [("qwen3", "auto"), ("mistral", "none")])
def test_two_programs_for_six_batches_and_not_a_bit_differs(as_on_a_gpu, kind, kernels):
    m = learner(kind, kernels)
    want = losses(m, 6)
    compile_layers(m, backend="aot_eager")
    assert losses(m, 6) == want
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


def test_two_programs_from_the_first_batch_on_and_not_a_bit_differs(as_on_a_gpu):
    "Layers that have computed nothing yet: what they learn of each other makes no third one"
    m = learner("qwen3", "auto")
    compile_layers(m, backend="aot_eager")
    found = losses(m, 6)
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]
    assert all(x.reads_with.proven for x in m.modules() if getattr(x, "reads_with", None))
    assert found == losses(learner("qwen3", "auto"), 6)


def test_only_training_is_compiled(as_on_a_gpu):
    m = learner("qwen3", "auto")
    compiled = compile_layers(m, backend="aot_eager")
    batch = next(batches(1))
    with torch.no_grad(): m(**batch, use_cache=False, supervised=True)
    m.eval()(**batch, use_cache=False, supervised=True)
    assert not counters["stats"]["unique_graphs"]
    compiled.undo()
    losses(m.train(), 1)
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_cpu_is_refused(tokenizer, method):
    with pytest.raises(ConfigError, match="compile needs a CUDA device, and the model is on cpu.*Fix: kernels='auto'"):
        load_model(load_config(method=method, kernels="compile", device="cpu"), tokenizer)
