"Checks of the first step and of the gradient: each fires on a planted defect and is quiet without it"
from dataclasses import replace
from functools import partial

import pytest
import torch
from learner import learner
from planted import bad, small

from sft_nb.batches.layout import DataCollatorForCausalLM
from sft_nb.checks.preflight import Evidence
from sft_nb.checks.step import _FINE, _choose_walk, Slope, check_derivative, slopes
from sft_nb.checks.preflight import preflight
from sft_nb.checks.step import (Evaluated, FirstStep, check_evaluation, check_gradient, check_loss, check_order,
                                check_width, take_step)
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench


@pytest.fixture(scope="module")
def data(): return prepare(small())


@pytest.fixture
def seen(data): return Evidence(Workbench(small(**learner()), data=data))


def test_loss():
    def look(loss, **more): return check_loss(FirstStep(loss, {}, 1, 1.), 768, **more).status   # ln(768) is 6.64
    found = [look(x) for x in (2., 6.3, 7.7, 13.4, 0., float("nan"), float("inf"))]
    assert found == ["ok", "warn", "warn", "fail", "fail", "fail", "fail"]
    assert [look(x, init="random") for x in (6.7, 7.7, 13.4, 0.)] == ["ok", "warn", "warn", "fail"]


def test_a_base_that_expects_other_answers_has_the_right_tokenizer():
    found = [check_loss(FirstStep(7.7, {}, 1, 1., text_loss=x), 768, model="gpt2") for x in (4., 6.5)]
    assert [f.status for f in found] == ["warn", "warn"] and "expects other answers" in found[0].says
    assert [f.fix.says("shell").split(" ")[1] for f in found] == ["--system-prompt", "--tokenizer"]


@pytest.mark.parametrize("padding_free", [True, False])
def test_the_loss_of_whole_rows_is_measured_where_that_of_answers_is_worse_than_guessing(data, padding_free):
    bench = Workbench(small(padding_free=padding_free), data=data)
    rows = bench.rows([0, 1])
    batch, plain = bench.layout.collate(rows), partial(take_step, bench.model, bench.loss)
    assert plain(batch).text_loss is None and plain(batch, guessing=100.).text_loss is None
    whole = [dict(row, labels=[-100, *row["input_ids"][1:]]) for row in rows]
    expected = float(bench.loss(bench.layout.collate(whole)))
    assert plain(batch, guessing=0.).text_loss == pytest.approx(expected, rel=.1)   # one token more where rows meet


def test_the_toy_has_no_other_tokenizer_to_propose():
    def fix(**more): return check_loss(FirstStep(7.7, {}, 1, 1.), 768, **more).fix.says("shell")
    assert fix(model="tiny") == "a --model trained on such text"
    assert fix(model="gpt2").startswith("the --tokenizer that this --model was trained with, or")


def test_gradient():
    def look(norms): return check_gradient(FirstStep(1., norms, 1, 1.))
    assert look({"a.lora_A.w": 0., "a.lora_B.w": 1.}).status == "ok"
    dry = {"a.lora_A.w": 0., "a.lora_B.w": 1., "b.lora_A.w": 0., "b.lora_B.w": 0.}
    assert look(dry).says.startswith("1 of 2") and look(dry).status == "fail"
    assert look({"a.lora_B.w": 1., "b.experts.3.lora_B.w": 0., "embed.trainable_tokens_delta": 0.}).status == "ok"
    assert look({"a.weight": 1., "b.weight": 0.}).status == "warn"
    assert [look(n).status for n in ({"a.weight": float("nan")}, {"a.weight": 0.}, {})] == ["fail"] * 3


@pytest.mark.parametrize("padding_free", [True, False])
def test_order_and_width(data, padding_free):
    seen = Evidence(Workbench(small(**learner(), padding_free=padding_free), data=data))
    assert check_order(seen.score, seen.some_batch, seen.reversed_batch, 1e-4) is None
    assert check_width(seen.score, seen.some_batch, seen.wide_batch, 1e-4) is None
    wide = seen.wide_batch
    labels = wide["labels"].masked_fill(wide["attention_mask"] == 0, 5)
    assert check_width(seen.score, seen.some_batch, wide | dict(labels=labels), 1e-4).status == "fail"


@pytest.mark.parametrize("check", [check_order, check_width])
def test_a_loss_that_is_not_finite(check):
    nan = check(lambda batch: float("nan"), {}, {}, 1e-4)
    assert nan.status == "fail" and "the loss of the first rows is nan" in nan.says


def test_rows_that_read_each_other(data):
    "field note: with the cache on, or positions that run on, a flattened batch reads across its rows"
    seen = Evidence(Workbench(small(method="lora"), data=data))
    assert "position_ids" in seen.some_batch
    def runs_on(batch):   # and nobody says where the rows are
        left = {name: v for name, v in batch.items() if not name.startswith(("cu_seq_lens", "max_length"))}
        return left | dict(position_ids=torch.arange(batch["input_ids"].shape[1])[None])
    some, reversed_ = runs_on(seen.some_batch), runs_on(seen.reversed_batch)
    assert check_order(seen.score, some, reversed_, 1e-4).status == "fail"
    assert check_width(seen.score, some, seen.wide_batch, 1e-4).status == "fail"


class Rounds(torch.nn.Module):
    "Adds to hidden vectors what bfloat16 does to a pretrained model: other noise for another width of the batch"
    def __init__(self, layer, size):
        super().__init__()
        self.layer, self.size = layer, size

    def forward(self, x):
        out = self.layer(x)
        draw = torch.Generator().manual_seed(out.shape[1])
        return out + self.size * torch.randn(out.shape, generator=draw) * out.std()


def test_rounding_of_a_few_supervised_tokens_is_no_leak(data):
    "Noise that changes the loss of three tokens a row by 4% changes that of all tokens by 0.5%"
    seen = Evidence(Workbench(small(method="lora", dtype="bfloat16", device="cpu"), data=data))
    rows = [row | dict(labels=[-100] * (len(row["labels"]) - 3) + row["labels"][-3:]) for row in seen.few_rows]
    vars(seen)["few_rows"] = rows
    model = seen.model.get_base_model().model
    model.norm = Rounds(model.norm, .15)
    def apart(a, b): return abs(seen.score(a) - seen.score(b)) / seen.score(b)
    padded = [apart(seen.few_batch, DataCollatorForCausalLM(seen.tokenizer, 8 * n)(rows)) for n in range(1, 7)]
    assert max(padded) > seen.tolerance
    assert check_width(seen.score, seen.some_batch, seen.wide_batch, seen.tolerance) is None
    assert check_order(seen.score, seen.some_batch, seen.reversed_batch, seen.tolerance) is None
    labels = seen.wide_batch["labels"].masked_fill(seen.wide_batch["attention_mask"] == 0, 5)
    assert check_width(seen.score, seen.some_batch, seen.wide_batch | dict(labels=labels), .02).status == "fail"


def test_evaluation():
    nan = float("nan")
    assert check_evaluation(Evaluated(2., 3., 3.)).status == "ok"
    for wrong in (Evaluated(2., 3., 3.001), Evaluated(nan, 3., 3.), Evaluated(2., 3., nan)):
        assert check_evaluation(wrong).status == "fail"
    assert check_evaluation(Evaluated(2., 3., 3.001, tolerance=2e-2)).status == "ok"   # a GPU, in no fixed order
    assert check_evaluation(Evaluated(2., 3., 3.1, tolerance=2e-2)).status == "fail"


def test_an_evaluation_on_a_gpu_is_compared_as_other_losses_are(seen, monkeypatch):
    assert seen.evaluated.tolerance == 1e-6
    other = Evidence(seen.bench)
    monkeypatch.setitem(vars(other.bench), "hardware", replace(other.hardware, device="cuda"))
    assert other.evaluated.tolerance == other.tolerance > 1e-6


def test_derivative():
    def look(*found, numeric_tolerance=.02, low_precision=False):
        return check_derivative([Slope("x", 1., *one) for one in found], numeric_tolerance, low_precision).status
    assert look((1., .001)) == look((1.01, .015)) == "ok"
    assert look((1., 0.), (1.1, .001)) == look((.9, 0.)) == look((0., 0.)) == look((float("nan"), 0.)) == "fail"
    assert look((1.1, .5)) == look((1., 0.), (1.03, .001)) == "skipped"
    rounded = [look((x, .01), numeric_tolerance=.3, low_precision=True) for x in (.8, .2, 1.2, 1.4, 1.7)]
    assert rounded == ["ok", "skipped", "ok", "skipped", "fail"]   # rounding only takes away
    assert check_derivative([], .02, False).status == "fail"


def test_flat_surroundings_contradict_no_gradient():
    "Keys of another Zamba: on long walks the loss hardly changes at all, and the shortest is rounded"
    seen = {1e-2: (1.8e-7, 2e-7), 1e-3: (5.6e-6, 3.3e-6), 1e-4: (1.07e-5, 7.7e-6), 1e-5: (1.21e-4, 2.8e-5)}
    def judged(found):
        def slope_at(move, points): return Slope("keys", 1.27e-4, *found[move])
        return check_derivative([_choose_walk(slope_at, *_FINE)], .02, False).status
    assert judged(seen) == "skipped"
    assert judged(seen | {1e-4: (1.07e-5, 1e-8)}) == "fail"   # what is sure contradicts
    assert judged(dict.fromkeys(seen, (0., 0.))) == "fail"    # nothing changes, wherever one looks


def test_a_part_with_a_small_gradient_is_walked_in_small_steps():
    "Keys of a Zamba with a loss of 6.6: 1e-4 of the loss is already far beyond where the loss is straight"
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    def loss(batch): return 6.6 + 6e-4 * model.weight.tanh().sum()
    found = slopes(model, loss, lambda batch: float(loss(batch)), {})
    assert check_derivative(found, .02, False).status == "ok" and found[0].off < .01


def test_slopes_leave_the_model_as_it_was(seen):
    before = {n: p.detach().clone() for n, p in seen.model.named_parameters()}
    assert len(slopes(seen.model, seen.loss, seen.score, seen.some_batch)) == 1   # all parts together
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in seen.model.named_parameters())


def test_checkpointing_and_dropout(data):
    "the backward pass of a checkpointed layer runs it again: nothing may be dropped then either"
    seen = Evidence(Workbench(small(gradient_checkpointing=True, lora_dropout=.5), data=data))
    assert check_derivative(seen.slopes, seen.numeric_tolerance, seen.low_precision).status == "ok"


def test_a_gradient_that_is_cut(data):
    seen = Evidence(Workbench(small(method="lora"), data=data))
    third = seen.model.get_base_model().model.layers[2].mlp
    third.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    assert check_gradient(seen.first_step).status == "ok"
    assert check_derivative(seen.slopes, seen.numeric_tolerance, seen.low_precision).status == "fail"


def test_a_backward_pass_that_is_too_large(seen):
    for p in seen.model.parameters():
        if p.requires_grad: p.register_hook(lambda g: 2 * g)
    assert check_derivative(seen.slopes, seen.numeric_tolerance, seen.low_precision).status == "fail"


def test_the_bitsandbytes_bug(data, monkeypatch):
    "Without the guard, a 4-bit base on a CPU with AVX512-BF16 loses its gradient at the first evaluation"
    from bitsandbytes.nn.modules import has_avx512bf16
    if not has_avx512bf16(): pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes does not repack its weights")
    monkeypatch.setattr("sft_nb.model.load.guard_4bit", lambda model: 0)
    found = bad(preflight(small(), data=data))
    assert found["step.derivative"].status == "fail" and "guard_4bit" in str(found["step.derivative"].fix)


def test_a_scaled_loss_has_the_same_gradient(seen):
    plain = take_step(seen.model, seen.loss, seen.batch)
    scaled = take_step(seen.model, seen.loss, seen.batch, scale=1024.)
    assert scaled.norm == pytest.approx(plain.norm, rel=1e-5) and scaled.loss == plain.loss


def test_layers_without_a_gradient_are_left_out_by_the_fix():
    "Where a kind of layer has none (Gemma 3n's `altup`), the adapter can stand beside the others"
    norms = {f"m.layers.{k}.{name}.lora_{m}.default.weight": float(name != "altup.coefs")
             for k in (0, 1) for name in ("self_attn.q_proj", "altup.coefs") for m in "AB"}
    found = check_gradient(FirstStep(1., norms, 4, 1.))
    assert found.status == "fail" and str(found.fix).startswith("lora_target_modules=('q_proj',), or gradient_check")
    norms |= {f"m.layers.1.self_attn.q_proj.lora_{m}.default.weight": 0. for m in "AB"}
    assert "lora_target_modules" not in str(check_gradient(FirstStep(1., norms, 4, 1.)).fix)
