"""Every check fires on a planted defect and is quiet without it; what cannot be looked at is skipped; nothing is noticed afterwards."""
import copy, json, os, random, shutil, sys
from dataclasses import replace
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import shared
from shapes import folder

import sft_nb.preflight   # the function has the name of the module
from sft_nb.collate import DataCollatorFlattening, DataCollatorForCausalLM
from sft_nb.config import load_config
from sft_nb.data import prepare
from sft_nb.memory import resolve
from sft_nb.model import load_base, load_model
from sft_nb.preflight import (CHECKS, Bench, Evaluated, FirstStep, Learned, Slope, Survey, check_bos, check_derivative, check_device, check_disk, check_ends, check_evaluation, check_formats, check_gpu, check_gradient, check_hub, check_ids,
                              check_kept, check_labels, check_learns, check_loss, check_mask, check_masked, check_measured, check_memory, check_moves, check_order, check_pad, check_padding, check_positions, check_prepared, check_prompts,
                              check_shapes, check_special_tokens, check_supervised, check_tracking, check_trainable, check_versions, check_vocabulary, check_width, check_writable, collator_for, learn_some, preflight, run_check, slopes, survey, take_step, untrained)
from sft_nb.report import ConfigError, SftError

MODULE = sys.modules["sft_nb.preflight"]
SMALL = dict(max_samples=16, eval_samples=8, drop_duplicates=True, per_device_train_batch_size=4, per_device_eval_batch_size=8)
END = 2   # <|im_end|> of the tiny tokenizer


def small(**more): return load_config("demo", **SMALL | more)
def status(found)->str: return "ok" if found is None else found.status
def bad(report)->dict: return {f.check: f for f in report.findings if f.status in ("warn", "fail")}


@pytest.fixture(scope="session")
def data(): return prepare(small())


@pytest.fixture(scope="session")
def plan(data): return resolve(small(), data)[1]


@pytest.fixture(scope="session")
def rows(data): return [data.train.tokens[k] for k in range(3)]


@pytest.fixture
def bench(data): return Bench(small(), data=data)


@pytest.fixture(scope="session")
def base(tokenizer): return load_base(load_config(method="lora"), tokenizer)


# the machine

def test_versions():
    assert check_versions(["torch>=1", "numpy>=2.0", "nothing-of-this-name ; extra == 'track'"]) is None
    old = check_versions(["torch>=99", "nothing-of-this-name>=1"])
    assert old.status == "fail" and "nothing-of-this-name is not installed" in old.says and "'torch>=99'" in old.fix
    assert check_versions(None).status == "skipped"


def test_a_source_tree_without_metadata_skips_the_versions(bench, monkeypatch):
    def missing(name): raise MODULE.PackageNotFoundError(name)
    monkeypatch.setattr(MODULE, "requires", missing)
    assert bench.requirements is None


def test_device(monkeypatch):
    assert check_device(small()).status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_check("environment.device", check_device, SimpleNamespace(asked=small(device="cuda")))[0].status == "fail"


def test_a_card_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(MODULE, "nvidia_cards", lambda: 2)
    assert check_gpu(small()).status == "warn" and "2 NVIDIA cards are here" in check_gpu(small()).says
    assert check_gpu(small(device="cpu")) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_gpu(small()) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(MODULE, "nvidia_cards", lambda: 0)
    assert check_gpu(small()) is None


def test_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=400))
    cfg = small(runs_dir=str(tmp_path/"not/yet/there"))   # save_total_limit 2: four of them
    assert [check_disk(cfg, n).status for n in (101, 100, 51, 50)] == ["fail", "warn", "warn", "ok"]


def test_writable(tmp_path):
    assert check_writable(small(runs_dir=str(tmp_path/"a/b"))) is None and not list(tmp_path.iterdir())
    (tmp_path/"file").write_text("")
    assert check_writable(small(runs_dir=str(tmp_path/"file/runs"))).status == "fail"


def test_tracking(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path/"netrc"))
    assert check_tracking(small()) is None
    monkeypatch.setattr(MODULE, "find_spec", lambda name: None)
    assert "not installed" in check_tracking(small(wandb=True)).says
    monkeypatch.setattr(MODULE, "find_spec", lambda name: True)
    assert "ask for one" in check_tracking(small(wandb=True)).says
    (tmp_path/"netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check_tracking(small(wandb=True)) is None
    (tmp_path/"netrc").unlink()
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "x")):
        monkeypatch.setenv(name, value)
        assert check_tracking(small(wandb=True)) is None
        monkeypatch.delenv(name)


def test_hub(monkeypatch, tmp_path):
    import huggingface_hub.constants as constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert check_hub(small()) is None and check_hub(small(model=str(tmp_path))) is None
    assert check_hub(small(model="nobody/nothing")).status == "fail" and "nobody/other" in check_hub(small(tokenizer="nobody/other")).says
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert check_hub(small(model="nobody/nothing")) is None


# the rows

def surveyed(ids, labels): return survey(datasets.Dataset.from_dict(dict(input_ids=ids, labels=labels)), ends=[END], bos=1, vocabulary=768)


def test_survey_reads_every_defect_and_nothing_else():
    assert surveyed([[1, 5, END], [4]], [[-100, 5, END], [-100]]) == Survey(2, [1], 1, [], [])
    assert surveyed([[1, 1, 5], [5, 800], [-1, 5], [5, 6]], [[-100, -100, 5], [-100, -100], [-100, 5], [-100, 7]]) == Survey(4, [1], 0, [0], [1, 2, 3])
    assert survey(datasets.Dataset.from_dict(dict(input_ids=[[1, 1], [5, END]], labels=[[-100, 1], [-100, END]])).select([1]), ends=[END], bos=1, vocabulary=9) == Survey(1, [], 1, [], [])


@pytest.mark.parametrize("check, wrong", [(check_masked, Survey(9, [3], 9, [], [])), (check_bos, Survey(9, [], 9, [3], [])), (check_ids, Survey(9, [], 9, [], [3]))])
def test_rows(check, wrong):
    assert check(Survey(9, [], 9, [], [])) is None
    assert check(wrong).status == "fail" and "number 3" in check(wrong).says


def test_ends(data):
    split = lambda seen, count={}: SimpleNamespace(train=SimpleNamespace(meta=dict(seen=seen, count=count)))
    chat, text = split(dict(messages=9)), split({"text": 9, "rows with more": 1})
    assert [status(check_ends(Survey(100, [], n, [], []), chat)) for n in (0, 89, 90, 100)] == ["fail", "warn", "ok", "ok"]
    assert check_ends(Survey(100, [], 0, [], []), text).status == "warn"
    assert "--max-length" in check_ends(Survey(100, [], 0, [], []), split(dict(messages=9), {"rows cut": 100})).fix


def test_truncation_that_takes_every_end(tokenizer):
    "seed 003: no row kept its end token, and nobody said so"
    cfg = small(task="chat", max_length=12, on_long="cut")
    made = prepare(cfg, tokenizer, train=[dict(question="Who?", answer="one two three four five six seven eight nine ten " * 2)] * 3)
    assert bad(preflight(cfg, data=made))["data.ends"].status == "fail"


def test_kept():
    meta = lambda **count: SimpleNamespace(train=SimpleNamespace(n_read=100, meta=dict(count={k.replace("_", " "): v for k, v in count.items()})))
    assert check_kept(meta(rows_dropped=10)) is None
    assert [check_kept(d).status for d in (meta(rows_dropped=6, rows_cut=5), meta(rows_dropped=50, longest_dropped=99))] == ["warn", "fail"]
    assert check_kept(meta(rows_dropped=50, longest_dropped=99)).fix == "--max-length 99"


def test_pad(tokenizer):
    survey = Survey(9, [], 9, [], [])
    assert check_pad(tokenizer, survey) is None
    other = copy.deepcopy(tokenizer)
    other.pad_token = other.eos_token
    assert check_pad(other, survey).status == "warn" and check_pad(other, replace(survey, ended=0)).status == "fail"
    other.pad_token = None
    assert check_pad(other, survey).status == "fail"


def test_prompts(data, tokenizer):
    other = copy.deepcopy(tokenizer)
    assert check_prompts(data, small()).status == "ok"
    other.chat_template = other.chat_template.replace("assistant\\n", "assistant: ")
    assert check_prompts(replace(data, tokenizer=other), small()).status == "fail"
    assert check_prompts(data, small(train_on_prompt=True)).status == "skipped"
    text = small(task="chat")
    assert check_prompts(prepare(text, tokenizer, train=[dict(text="Only text.")]), text).status == "skipped"


def test_prompts_of_several_turns(tokenizer):
    cfg = small(task="chat")
    talk = lambda k: [dict(role=r, content=f"{c} {k}") for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    made = prepare(cfg, tokenizer, train=[dict(messages=talk(k)) for k in range(3)])
    assert "6 answers" in check_prompts(made, cfg).says
    broken = datasets.Dataset.from_list([dict(input_ids=i[:-8] + [7] + i[-7:], labels=l) for i, l in zip(made.train.tokens["input_ids"], made.train.tokens["labels"])])   # in front of the second answer
    assert check_prompts(replace(made, train=replace(made.train, tokens=broken)), cfg).says.startswith("3 of the first rows")


def test_the_data_report_is_taken_over(data):
    names = {f.check for f in check_prepared(data)}
    assert {"train_dropped", "held_out"} <= names and "train_ends" not in names
    twice = prepare(small(drop_duplicates=False, task="chat"), train=[dict(question="a", answer="b")] * 4)
    assert bad(preflight(small(task="chat"), data=twice))["data.train_duplicates"].status == "warn"


# plan and memory

def test_memory(data):
    _, plan = resolve(small(), data)
    tight = replace(plan, device=replace(plan.device, gib=.1), findings=[])
    assert check_memory(plan, small())[0].status == "ok"
    assert check_memory(tight, small()).status == "fail"
    assert check_memory(None, replace(small(), sources=dict(method="plan (it was odd)"))) .says == "plan (it was odd)"
    assert bad(preflight(small(), data=data, plan=tight))["plan.memory"].status == "fail"


def test_measured(data):
    _, plan = resolve(small(), data)
    step = FirstStep(1., {}, 1, 1., int(plan.allocated - plan.parts["optimiser"]))
    assert check_measured(plan, step).status == "ok" and check_measured(plan, replace(step, peak_bytes=2 * step.peak_bytes)).status == "warn"
    assert check_measured(plan, replace(step, peak_bytes=None)).status == check_measured(None, step).status == "skipped"


# the model

def test_trainable(data, tokenizer):
    fresh = lambda **more: load_model(small(method="lora", **more), tokenizer)
    assert check_trainable(fresh(), small()).status == "ok"
    assert check_trainable(fresh(modules_to_save="lm_head", train_tokens="<|im_end|>"), small()).status == "ok"
    def says(model, cfg=small()):
        found = check_trainable(model, cfg)
        assert found.status == "fail"
        return found.says
    assert "no parameter" in says(fresh().requires_grad_(False))
    model = fresh()
    next(p for n, p in model.named_parameters() if "lora_A" in n).requires_grad_(False)
    assert "1 tensors of the adapter are frozen" in says(model)
    model = fresh()
    model.get_input_embeddings().weight.requires_grad_(True)
    assert "of the base are trained" in says(model)
    model = fresh(lora_target_modules="q_proj")
    model.peft_config["default"].target_modules = {"q_proj", "v_proj"}
    assert "4 targeted modules have no adapter" in says(model)
    full = load_model(small(method="full"), tokenizer)
    assert check_trainable(full, small(method="full")).status == "ok"
    full.get_input_embeddings().requires_grad_(False)
    assert "1 parameters are frozen" in says(full, small(method="full"))


def test_formats(tokenizer):
    model = load_model(small(method="lora"), tokenizer)
    assert check_formats(model, torch.float32) is None
    model.get_output_embeddings().weight.data = model.get_output_embeddings().weight.data.bfloat16()
    assert check_formats(model, torch.float32).status == "fail"


def test_vocabulary(tokenizer, base):
    assert check_vocabulary(base, tokenizer) is None
    more = copy.deepcopy(tokenizer)
    more.add_tokens([f"<new{k}>" for k in range(40)])
    assert "785 tokens and the embedding 768" in check_vocabulary(base, more).says
    head, said = copy.deepcopy(base), copy.deepcopy(base)
    head.lm_head = torch.nn.Linear(192, 700, bias=False)
    assert "the head 700" in check_vocabulary(head, tokenizer).says
    said.config.vocab_size = 760
    assert "vocab_size 760" in check_vocabulary(said, tokenizer).says


@pytest.fixture(scope="session")
def dead(base, tokenizer, tmp_path_factory):
    "The tiny base, whose <|im_end|> was initialised anew"
    path, other = tmp_path_factory.mktemp("dead"), copy.deepcopy(base)
    with torch.no_grad(): other.get_input_embeddings().weight[END] = .02 * torch.randn(192, generator=torch.Generator().manual_seed(0))
    other.save_pretrained(path), tokenizer.save_pretrained(path)
    return str(path)


def test_special_tokens(dead, data, tokenizer):
    look = lambda **more: check_special_tokens(load_model(small(method="lora", **more), tokenizer), tokenizer, data, small(**{"method": "lora"} | more))
    assert look() is None
    assert look(model=dead).status == "fail" and "<|im_end|>" in look(model=dead).fix
    assert look(model=dead, train_tokens="<|im_end|>") is None
    assert look(model=dead, modules_to_save="lm_head").status == "warn"   # the head learns to write it; the embedding is read as it was
    assert check_special_tokens(load_model(small(method="full", model=dead), tokenizer), tokenizer, data, small(method="full")) is None
    assert look(init="random").status == "skipped"


def test_untrained_rows_by_either_sign():
    dice = torch.Generator().manual_seed(0)
    weight = .1 * torch.randn(200, 64, generator=dice) + .5
    weight[:20] = -1 + .01 * torch.randn(20, 64, generator=dice)   # unused: a cloud of their own
    weight[100] = weight[0] + .01 * torch.randn(64, generator=dice)
    weight[101] = .02 * torch.randn(64, generator=dice)
    weight[102] = 0
    asked, common = [100, 101, 102, 103], list(range(120, 170))
    assert untrained(weight, asked, unused=[list(range(20))], common=common) == [100, 101, 102]
    assert untrained(weight, asked, unused=[[0, 1]], common=common) == [101, 102]   # too few to make a cloud
    assert untrained(.03 * weight, asked, unused=[list(range(20))], common=common, spread=.02) == [100]   # small rows are common here, so that sign tells nothing
    assert untrained(.03 * weight, asked, unused=[[]], common=common, spread=.02) is None
    assert untrained(weight, asked, unused=[[]], common=[]) is None and untrained(weight, [], unused=[[]], common=common) == []


def test_special_tokens_that_cannot_be_told(data, tokenizer, monkeypatch):
    monkeypatch.setattr(MODULE, "untrained", lambda *args, **kwargs: None)
    assert check_special_tokens(load_model(small(), tokenizer), tokenizer, data, small()).status == "skipped"


# the batch

@pytest.fixture(params=["padded", "flat"])
def batch(request, rows, tokenizer): return (DataCollatorForCausalLM(tokenizer, 8) if request.param == "padded" else DataCollatorFlattening(False))(rows)


def lengths_of(rows): return [len(r["input_ids"]) for r in rows]


def test_a_good_batch(batch, rows, tokenizer):
    n = lengths_of(rows)
    assert [check_shapes(batch), check_mask(batch, n), check_positions(batch, n), check_padding(batch, n, tokenizer), check_labels(batch)] == [None] * 5


def test_broken_batches(rows, tokenizer):
    n, padded, flat = lengths_of(rows), DataCollatorForCausalLM(tokenizer, 8)(rows), DataCollatorFlattening(False)(rows)
    assert check_shapes(padded | dict(labels=padded["labels"][:, 1:])).status == "fail"
    assert check_mask(padded | dict(attention_mask=torch.ones_like(padded["input_ids"])), n).status == "fail"
    assert check_mask(padded | dict(attention_mask=padded["attention_mask"].flip(1)), n).status == "fail"
    assert check_positions(flat | dict(position_ids=torch.arange(sum(n))[None]), n).status == "fail"
    assert check_positions(flat | dict(attention_mask=torch.ones_like(flat["input_ids"])), n).status == "fail"
    assert check_positions({k: v for k, v in flat.items() if k != "position_ids"}, n).status == "fail"
    labels = padded["labels"].masked_fill(padded["attention_mask"] == 0, tokenizer.pad_token_id)
    assert "write padding" in check_padding(padded | dict(labels=labels), n, tokenizer).says
    assert "left" in check_padding(padded | dict(input_ids=padded["input_ids"].flip(1), labels=torch.full_like(labels, -100)), n, tokenizer).says
    assert check_labels(flat | dict(labels=flat["labels"].roll(-1, 1))).status == "fail"


def test_batches_without_anything_to_learn():
    learn = np.array([3, 0, 0, 4])
    assert check_supervised([[0, 1], [2, 3]], learn) is None
    assert "1 of 2 batches" in check_supervised([[0, 3], [1, 2]], learn).says


def test_collator_for(tokenizer, base, tmp_path):
    assert [collator_for(small(padding_free=p), base, tokenizer)[1] for p in (True, False)] == [True, False]
    opt = load_base(load_config(model=folder(tmp_path, "falcon"), tokenizer="tiny", init="random", method="lora"), tokenizer)   # ALiBi: distances reach across the border
    with pytest.raises(ConfigError, match="read"): collator_for(small(padding_free=True), opt, tokenizer)
    planned = small(padding_free=True)
    assert collator_for(replace(planned, sources=planned.sources | dict(padding_free="plan (auto)")), opt, tokenizer)[1] is False


# the step

def test_loss():
    look = lambda loss, cfg=small(): check_loss(FirstStep(loss, {}, 1, 1.), 768, cfg).status   # ln(768) is 6.64
    assert [look(x) for x in (2., 6.3, 7.7, 13.4, 0., float("nan"), float("inf"))] == ["ok", "warn", "warn", "fail", "fail", "fail", "fail"]
    assert [look(x, small(init="random")) for x in (6.7, 7.7, 13.4, 0.)] == ["ok", "warn", "warn", "fail"]


def test_gradient():
    look = lambda norms: check_gradient(FirstStep(1., norms, 1, 1.))
    assert look({"a.lora_A.w": 0., "a.lora_B.w": 1.}).status == "ok"
    assert look({"a.lora_A.w": 0., "a.lora_B.w": 1., "b.lora_A.w": 0., "b.lora_B.w": 0.}).says.startswith("1 of 2")
    assert look({"a.lora_B.w": 1., "b.experts.3.lora_B.w": 0., "embed.trainable_tokens_delta": 0.}).status == "ok"
    assert look({"a.weight": 1., "b.weight": 0.}).status == "warn"
    assert [look(n).status for n in ({"a.weight": float("nan")}, {"a.weight": 0.}, {})] == ["fail"] * 3


@pytest.mark.parametrize("padding_free", [True, False])
def test_order_and_width(data, padding_free):
    bench = Bench(small(method="lora", padding_free=padding_free), data=data)
    assert check_order(bench.score, bench.some_batch, bench.reversed_batch, 1e-4) is None and check_width(bench.score, bench.some_batch, bench.wide_batch, 1e-4) is None
    for look in (check_order, check_width): assert (nan := look(lambda batch: float("nan"), {}, {}, 1e-4)).status == "fail" and "the loss of the first rows is nan" in nan.says
    wide = bench.wide_batch
    assert check_width(bench.score, bench.some_batch, wide | dict(labels=wide["labels"].masked_fill(wide["attention_mask"] == 0, 5)), 1e-4).status == "fail"


def test_rows_that_read_each_other(data):
    "field note: with the cache on, or positions that run on, a flattened batch reads across its rows"
    bench = Bench(small(method="lora"), data=data)
    runs_on = lambda b: b | dict(position_ids=torch.arange(b["input_ids"].shape[1])[None]) if "position_ids" in b else b
    assert check_order(bench.score, runs_on(bench.some_batch), runs_on(bench.reversed_batch), 1e-4).status == "fail"
    assert check_width(bench.score, runs_on(bench.some_batch), bench.wide_batch, 1e-4).status == "fail"


def test_evaluation():
    assert check_evaluation(Evaluated(2., 3., 3.)).status == "ok"
    assert check_evaluation(Evaluated(2., 3., 3.001)).status == check_evaluation(Evaluated(float("nan"), 3., 3.)).status == check_evaluation(Evaluated(2., 3., float("nan"))).status == "fail"


def test_derivative():
    look = lambda *s, slack=.02, coarse=False: check_derivative([Slope("x", 1., *one) for one in s], slack, coarse).status
    assert look((1., .001)) == look((1.01, .015)) == "ok"
    assert look((1., 0.), (1.1, .001)) == look((.9, 0.)) == look((0., 0.)) == look((float("nan"), 0.)) == "fail"
    assert look((1.1, .5)) == look((1., 0.), (1.03, .001)) == "skipped"
    assert [look((x, .01), slack=.3, coarse=True) for x in (.8, .2, 1.2, 1.4, 1.7)] == ["ok", "skipped", "ok", "skipped", "fail"]   # rounding only takes away
    assert check_derivative([], .02, False).status == "fail"


def test_slopes_leave_the_model_as_it_was(bench):
    before = {n: p.detach().clone() for n, p in bench.model.named_parameters()}
    assert len(slopes(bench.model, bench.loss, bench.score, bench.some_batch)) == 4
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in bench.model.named_parameters())


def test_a_gradient_that_is_cut(bench):
    bench.model.get_base_model().model.layers[2].mlp.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    assert check_gradient(bench.first_step).status == "ok" and check_derivative(bench.slopes, bench.slack, bench.coarse).status == "fail"


def test_a_backward_pass_that_is_too_large(bench):
    for n, p in bench.model.named_parameters():
        if p.requires_grad: p.register_hook(lambda g: 2 * g)
    assert check_derivative(bench.slopes, bench.slack, bench.coarse).status == "fail"


def test_the_bitsandbytes_bug(data, plan, monkeypatch):
    "Without the guard, a 4-bit base on a CPU with AVX512-BF16 loses its gradient at the first evaluation"
    from bitsandbytes.nn.modules import has_avx512bf16
    if not has_avx512bf16(): pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes does not repack its weights")
    monkeypatch.setattr("sft_nb.model.guard_4bit", lambda model: 0)
    found = bad(preflight(small(), data=data, plan=plan))
    assert found["step.derivative"].status == "fail" and "guard_4bit" in found["step.derivative"].fix


# ten steps

def test_learns():
    look = lambda before, after, rate=1e-3: check_learns(Learned(before, after, [], 2, 10, rate)).status
    assert [look(2., x) for x in (1., 2., 2.1, 2.3, float("nan"))] == ["ok", "warn", "warn", "fail", "fail"] and look(2., 1., 0.) == "fail"
    assert look(2., 1.9999) == "warn" and look(2., 1.99) == "ok"   # it hardly moves
    told = check_learns(Learned(8., 2.4, [], 2, 10, .5, 40.))
    assert told.status == "fail" and "40.0000 on the way" in told.says and told.fix == "--learning-rate 0.05"
    assert check_learns(Learned(8., 2.4, [], 2, 10, .5, 9.)).status == "ok"


def test_moves():
    look = lambda *still, rate=1e-3: check_moves(Learned(2., 1., list(still), 2, 10, rate))
    assert look() is None and look("a").status == "warn" and look("a", "b").status == "fail"
    assert look("a", "b", rate=0.) is None   # `check_learns` says that


def test_steps_that_round_away(data):
    "adapters in bfloat16 at a small learning rate: the loss is computed, the gradient is there, and nothing moves"
    bench = Bench(small(learning_rate=1e-9), data=data)
    model, loss, score = bench.model, bench.loss, bench.score
    for p in model.parameters():
        if p.requires_grad: p.data = torch.ones_like(p, dtype=torch.bfloat16).float().add(p.data).bfloat16().float()
    class Rounded(torch.optim.SGD):
        def step(self, *args):
            super().step(*args)
            for group in self.param_groups:
                for p in group["params"]: p.data = p.data.bfloat16().float()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(MODULE, "_optimizer", lambda cfg, trained, device: Rounded(trained, lr=1e-9))
    try: done = learn_some(model, loss, score, bench.some_batch, bench.cfg, steps=2)
    finally: monkeypatch.undo()
    assert check_moves(done).status == "fail" and check_learns(done).status == "warn"


def test_nothing_to_train(bench):
    bench.model.requires_grad_(False)
    assert take_step(bench.model, bench.loss, bench.some_batch).norms == {} and slopes(bench.model, bench.loss, bench.score, bench.some_batch) == []
    with pytest.raises(SftError, match="no parameter is trained"): learn_some(bench.model, bench.loss, bench.score, bench.some_batch, small())


def test_a_scaled_loss_has_the_same_gradient(bench):
    plain, scaled = take_step(bench.model, bench.loss, bench.batch), take_step(bench.model, bench.loss, bench.batch, scale=1024.)
    assert scaled.norm == pytest.approx(plain.norm, rel=1e-5) and scaled.loss == plain.loss


# the runner

def test_a_check_that_crashes_is_a_finding(data, plan, monkeypatch):
    def check_odd(data): raise ZeroDivisionError("by zero\nand more")
    monkeypatch.setitem(CHECKS, "data.odd", check_odd)
    report = preflight(small(), data=data, plan=plan)
    assert bad(report)["data.odd"].says == "the check itself crashed: ZeroDivisionError: by zero" and report.exit_code == 1 and list(bad(report)) == ["data.odd"]


def test_a_check_that_asks_for_what_no_bench_has():
    with pytest.raises(AttributeError): Bench(small()).nothing


def test_rows_that_cannot_be_read(tmp_path):
    report = preflight(small(train_file=str(tmp_path/"nothing.jsonl")))
    by = {f.check: f.status for f in report.findings}
    assert by["data"] == "fail" and {s for k, s in by.items() if k.split(".")[0] in ("plan", "model", "batch", "step", "learning")} == {"skipped"} and by["environment.versions"] == "ok"
    assert sum(f.status == "fail" for f in report.findings) == 1


def test_a_model_that_cannot_be_loaded(data, plan, monkeypatch):
    def broken(cfg, tokenizer): raise OSError("truncated")
    monkeypatch.setattr(MODULE, "load_model", broken)
    by = {f.check: f for f in preflight(small(), data=data, plan=plan).findings}
    assert by["model"].says == "it could not be made: OSError: truncated" and by["step.loss"].status == "skipped" and by["data.prompts"].status == by["plan.memory"].status == "ok"


def test_a_step_that_runs_out_of_memory(data, plan, monkeypatch):
    def out(*args, **kwargs): raise torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(MODULE, "take_step", out)
    by = {f.check: f for f in preflight(small(), data=data, plan=plan).findings}
    assert by["first step"].status == "fail" and by["step.gradient"].status == "skipped" and by["step.derivative"].status == "ok"


def test_the_report_is_text_html_and_json(data, plan):
    report = preflight(small(), data=data, plan=plan)
    assert json.loads(json.dumps(report.to_dict()))["status"] == report.status and "step.derivative" in str(report) and "step.derivative" in report._repr_html_()
    assert {"seconds", "first loss", "loss of guessing, ln(V)", "gradient norm", "trained parameters"} <= set(report.figures)
    assert {n for n in CHECKS} - {f.check for f in report.findings} <= {"data.prepared", "plan.memory"}   # these two speak with others' names


def test_dice_are_put_back(data):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    preflight(small(lora_dropout=.1), data=data)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize("more", [dict(), dict(method="lora", gradient_checkpointing=True)], ids=["qlora", "checkpointing"])
def test_a_model_that_is_handed_in_is_as_before(data, more):
    cfg = small(**more)
    model = load_model(cfg, data.tokenizer).eval()
    before, inner = {n: p.detach().clone() for n, p in model.named_parameters()}, model.get_base_model()
    assert not bad(preflight(cfg, data=data, model=model))
    assert all(torch.equal(p, before[n]) and p.dtype == before[n].dtype and p.grad is None for n, p in model.named_parameters())
    assert not model.training and "forward" not in vars(inner) and not inner.is_gradient_checkpointing


def test_a_frozen_adapter_that_is_handed_in(data):
    model = load_model(small(), data.tokenizer).requires_grad_(False)
    assert {"model.trainable", "step.gradient", "step.derivative"} <= set(bad(preflight(small(), data=data, model=model)))


# all together

def defects(tokenizer, dead):
    "Name -> how to run preflight with that defect, and the checks of which one must fire"
    chat = lambda **more: small(task="chat", **more)
    pair = lambda a, b="A long enough answer.": dict(question=a, answer=b)
    cut = dict(max_length=16, on_long="cut")
    return {
        "learning rate 0": (small(learning_rate=0.), None, "learning.learns"),
        "learning rate far too high": (small(learning_rate=.9, method="full"), None, "learning.learns"),
        "ends are cut off": (chat(**cut), [pair("Who?", "one two three four five six seven eight nine ten " * 2)] * 3, "data.ends"),
        "most rows are dropped": (chat(max_length=64), [pair(f"Who {k}?", "Ann.") for k in range(3)] + [pair(f"Where {k}?", "far away " * 40) for k in range(4)], "data.kept"),
        "special tokens in a text": (chat(), [pair(f"Who {k}?", "Ann <|im_end|> Ben") for k in range(4)], "data.train_special"),
        "dead end token": (small(model=dead), None, "model.special_tokens"),
        "no tokenizer of this model": (small(model="nobody/nothing"), None, "environment.hub"),
        "nowhere to write": (small(runs_dir="/proc/runs"), None, "environment.writable"),
        "no GPU": (small(device="cuda"), None, "environment.device"),
        "a base that knows nothing": (small(model=dead + "-noise"), None, "step.loss"),
    }


@pytest.mark.parametrize("name", list(defects(None, "")))
def test_planted_defects_are_caught(name, tokenizer, dead, base):
    if name == "a base that knows nothing" and not os.path.exists(dead + "-noise"):
        noise = copy.deepcopy(base)
        with torch.no_grad():
            for n, p in noise.named_parameters():
                if "norm" not in n: p.normal_(0, .02)
        noise.save_pretrained(dead + "-noise"), tokenizer.save_pretrained(dead + "-noise")
    if name == "no GPU" and torch.cuda.is_available(): pytest.skip("there is a GPU")
    cfg, rows, check = defects(tokenizer, dead)[name]
    report = preflight(cfg, data=prepare(cfg, tokenizer, train=rows) if rows else None)
    assert check in bad(report), str(report)


CLEAN = dict(
    qlora=dict(bnb_4bit_quant_type="fp4", lora_target_modules="attention", gradient_accumulation_steps=4), eight_bits=dict(load_in_8bit=True), lora=dict(method="lora", learning_rate=1e-5), full=dict(method="full", learning_rate=1e-3),
    bf16_lora=dict(method="lora", dtype="bfloat16"), bf16_qlora=dict(dtype="bfloat16"), bf16_full=dict(method="full", dtype="bfloat16", learning_rate=1e-3),
    padded=dict(padding_free=False, use_rslora=True), packed=dict(max_tokens_per_batch=256), grouped=dict(group_by_length=True, attn_implementation="sdpa"), checkpointing=dict(gradient_checkpointing=True), dora=dict(use_dora=True),
    pissa=dict(method="lora", init_lora_weights="pissa"), train_tokens=dict(train_tokens="<|im_end|>"),
    new_token=dict(train_tokens="<think>"), modules_to_save=dict(method="lora", modules_to_save="lm_head"), eager=dict(attn_implementation="eager", lora_dropout=.2),
    plain_text=dict(chat_template="none", eval_samples=0), prompts_too=dict(train_on_prompt=True))


def quiet_about(report, but:tuple=()):
    assert set(bad(report)) <= set(but), str(report)


@pytest.mark.parametrize("name", list(CLEAN))
def test_clean_configurations_are_not_flagged(name): quiet_about(preflight(small(**CLEAN[name])))


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral", "gpt2", "opt"])
def test_new_weights_of_other_shapes_are_not_flagged(tmp_path, kind):
    cfg = small(model=folder(tmp_path, kind), tokenizer="tiny", init="random", method="lora", learning_rate=1e-3)
    report = preflight(cfg)
    quiet_about(report)
    assert {f.check: f.status for f in report.findings}["step.derivative"] == "ok"


@pytest.mark.parametrize("rows", [[dict(question=f"What is {k} + {k}?", answer=f"It is {2 * k}.\n#### {2 * k}") for k in range(8)], [dict(text=f"Ann has {k} apples. Ben has {k + 1}.") for k in range(8)],
                                  [dict(messages=[dict(role=r, content=f"{c} {k}") for r, c in (("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi"), ("user", "And"), ("assistant", "Bye"))]) for k in range(8)]], ids=["pairs", "text", "chats"])
def test_rows_of_other_kinds_are_not_flagged(tokenizer, rows):
    cfg = small(task="chat")
    quiet_about(preflight(cfg, data=prepare(cfg, tokenizer, train=rows)), but=["step.loss"])   # the tiny base has never met such text, and it says so


def test_gsm8k_rows_are_not_flagged(tokenizer):
    train = [json.loads(line) for line in next(p for p in sorted(shared("data/gsm8k").rglob("*.jsonl")) if "train" in p.name).open()][:2]
    cfg = small(task="chat", max_length=512)
    quiet_about(preflight(cfg, data=prepare(cfg, tokenizer, train=[dict(question=r["question"], answer=r["answer"]) for r in train])), but=["step.loss"])
