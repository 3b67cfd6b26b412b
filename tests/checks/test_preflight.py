"All checks together: planted defects are caught, clean configs are not flagged, and nothing is changed afterwards"
import json, random

import numpy as np
import pytest
import torch
from conftest import shared
from learner import learner
from planted import bad, save_dead, save_noise, statuses
from planted import small as small_qlora
from shapes import folder

from sft_nb.checks.core import CHECKS
from sft_nb.checks.preflight import Evidence
from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.model.load import load_base
from sft_nb.planning.plan import plan as make_plan
from sft_nb.tokens.prepare import prepare
from sft_nb.workbench import Workbench


def small(**more): return small_qlora(**learner() | more)


DEMO = dict(model="tiny", init="pretrained", tokenizer=None)   # in the place of the synthetic learner


@pytest.fixture(scope="module")
def data(): return prepare(small())


def test_the_report_is_text_html_and_json(data):
    report = preflight(small(), data=data, plan=make_plan(small(), data))
    assert json.loads(json.dumps(report.to_dict()))["status"] == report.status
    assert "checks passed" in str(report) and "step.derivative" in report._repr_html_()
    expected = {"seconds", "first_loss", "loss_of_guessing", "gradient_norm", "trained_parameters"}
    assert expected <= set(report.figures)
    # the first two speak with others' names, the third if there are some
    assert set(CHECKS) - {f.check for f in report.findings} <= {"data.prepared", "plan.memory", "data.near_duplicates"}


# nothing is noticed

def test_rng_state_is_put_back(data):
    def seed():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
    def draw(): return random.random(), np.random.rand(), torch.rand(1)
    seed()
    expected = draw()
    seed()
    preflight(small(lora_dropout=.1), data=data)
    assert draw() == expected


@pytest.mark.parametrize("more", [DEMO | dict(method="qlora"), dict(gradient_checkpointing=True)],
                         ids=["qlora", "checkpointing"])
def test_a_model_that_is_handed_in_is_as_before(data, more):
    cfg = small(**more)
    model = load_model(cfg, data.tokenizer).eval()
    before, inner = {n: p.detach().clone() for n, p in model.named_parameters()}, model.get_base_model()
    assert not bad(preflight(cfg, data=data, model=model))
    for n, p in model.named_parameters():
        assert torch.equal(p, before[n]) and p.dtype == before[n].dtype and p.grad is None
    assert not model.training and "forward" not in vars(inner) and not inner.is_gradient_checkpointing


def test_a_workbench_keeps_its_rows_and_forgets_its_model(data):
    bench = Workbench(small(), data=data)
    first, plan = bench.model, bench.plan
    before = {n: p.detach().clone() for n, p in first.named_parameters()}
    assert not bad(preflight(bench))
    assert "model" not in vars(bench) and bench.plan is plan and bench.data is data and not bench.failures
    assert all(torch.equal(p, before[n]) for n, p in first.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in bench.model.named_parameters())


def test_a_frozen_adapter_that_is_handed_in(data):
    model = load_model(small(), data.tokenizer).requires_grad_(False)
    found = set(bad(preflight(small(), data=data, model=model)))
    assert {"model.trainable", "step.gradient", "step.derivative"} <= found


# evidence

def test_evidence_is_made_once_and_failures_are_shared(data):
    bench = Workbench(small(model="nobody/nothing", init="pretrained"), data=data)
    seen = Evidence(bench)
    assert seen.survey is seen.survey and seen.failures is bench.failures
    with pytest.raises(Exception, match="nobody/nothing") as one: seen.model.train()
    with pytest.raises(Exception, match="nobody/nothing") as two: seen.score({})
    assert one.value is two.value and list(seen.failures) == ["plan"]


# all together

def pair(question, answer="A long enough answer."): return dict(question=question, answer=answer)
def chat(**more): return small(task="chat", **more)


def defects(dead:str="", noise:str="")->dict:
    "Name -> config, rows (None: the demo's), and the check that must fire"
    long = "one two three four five six seven eight nine ten " * 2
    far = [pair(f"Who {k}?", "Ann.") for k in range(3)] + [pair(f"Where {k}?", "far away " * 40) for k in range(4)]
    special = [pair(f"Who {k}?", "Ann <|im_end|> Ben") for k in range(4)]
    return {
        "learning rate 0": (small(learning_rate=0.), None, "learning.learns"),
        "learning rate far too high": (small(learning_rate=.9, method="full"), None, "learning.learns"),
        "ends are cut off": (chat(max_length=16, on_long="cut"), [pair("Who?", long)] * 3, "data.ends"),
        "most rows are dropped": (chat(max_length=64), far, "data.kept"),
        "special tokens in a text": (chat(), special, "data.train_special"),
        "dead end token": (small(**DEMO | dict(model=dead)), None, "model.special_tokens"),
        "no tokenizer of this model": (small(**DEMO | dict(model="nobody/nothing")), None, "environment.hub"),
        "nowhere to write": (small(runs_dir="/proc/runs"), None, "environment.writable"),
        "no GPU": (small(device="cuda"), None, "environment.device"),
        "a base that knows nothing": (small(**DEMO | dict(model=noise)), None, "step.loss"),
    }


@pytest.fixture(scope="module")
def broken_bases(tokenizer, tmp_path_factory):
    base = load_base(load_config(method="lora"), tokenizer)
    path = tmp_path_factory.mktemp("bases")
    return save_dead(base, tokenizer, path/"dead"), save_noise(base, tokenizer, path/"noise")


@pytest.mark.parametrize("name", list(defects()))
def test_planted_defects_are_caught(name, tokenizer, broken_bases):
    if name == "no GPU" and torch.cuda.is_available(): pytest.skip("there is a GPU")
    cfg, rows, check = defects(*broken_bases)[name]
    report = preflight(cfg, data=prepare(cfg, tokenizer, train=rows) if rows else None)
    assert check in bad(report), str(report)


SLOW = dict(dtype="bfloat16", per_device_train_batch_size=1, per_device_eval_batch_size=2)   # few CPUs have it
CLEAN = dict(
    qlora=dict(method="qlora", bnb_4bit_quant_type="fp4", lora_target_modules="attention",
               gradient_accumulation_steps=4),
    eight_bits=dict(method="qlora", load_in_8bit=True),
    bf16_qlora=dict(method="qlora", **SLOW),
    bf16_full=dict(method="full", learning_rate=1e-3, **SLOW),
    padded=dict(padding_free=False, use_rslora=True, init_lora_weights="pissa", modules_to_save="lm_head"),
    packed=dict(max_tokens_per_batch=256, train_on_prompt=True, learning_rate=1e-5),
    grouped=dict(group_by_length=True, attn_implementation="sdpa", train_tokens="<|im_end|>"),
    dora=dict(method="qlora", use_dora=True, gradient_checkpointing=True),
    new_token=dict(train_tokens="<think>", attn_implementation="eager", lora_dropout=.2),
    plain_text=dict(chat_template="none", eval_samples=0))
WITH_DEMO = ("qlora", "eight_bits", "bf16_qlora", "packed")   # what rounds a trained base, or hardly moves it


def quiet_about(report, but:tuple=()):
    assert set(bad(report)) <= set(but), str(report)


@pytest.mark.parametrize("name", [name for name in CLEAN if name not in WITH_DEMO])
def test_clean_configurations_are_not_flagged(name): quiet_about(preflight(small(**CLEAN[name])))

@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in WITH_DEMO else pytest.mark.soak) for name in CLEAN])
def test_clean_configurations_of_the_demo_are_not_flagged(name):
    quiet_about(preflight(small(**DEMO | dict(method="lora") | CLEAN[name])))


TWO_LAYERS = dict(gpt2=dict(n_layer=2), opt={})   # of `gemma2`, one whose attention slides
OTHERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("llama", "mistral", "opt")]

@pytest.mark.parametrize("kind", ["gemma2", "gpt2", *OTHERS])
def test_new_weights_of_other_shapes_are_not_flagged(tmp_path, kind):
    model = folder(tmp_path, kind, **TWO_LAYERS.get(kind, dict(num_hidden_layers=2)))
    report = preflight(small(model=model, tokenizer="tiny", init="random", method="lora", learning_rate=1e-3))
    quiet_about(report)
    assert statuses(report)["step.derivative"] == "ok"


def pairs(): return [pair(f"What is {k} + {k}?", f"It is {2 * k}.\n#### {2 * k}") for k in range(8)]
def texts(): return [dict(text=f"Ann has {k} apples. Ben has {k + 1}.") for k in range(8)]
def chats():
    turns = (("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi"), ("user", "And"), ("assistant", "Bye"))
    return [dict(messages=[dict(role=role, content=f"{text} {k}") for role, text in turns]) for k in range(8)]


@pytest.mark.parametrize("rows", [pairs, texts, chats])
def test_rows_of_other_kinds_are_not_flagged(tokenizer, rows):
    report = preflight(chat(), data=prepare(chat(), tokenizer, train=rows()))
    quiet_about(report, but=["step.loss"])   # the tiny base has never met such text, and it says so


def test_gsm8k_rows_are_not_flagged(tokenizer):
    path = next(p for p in sorted(shared("data/gsm8k").rglob("*.jsonl")) if "train" in p.name)
    with path.open() as f: rows = [json.loads(line) for line in f][:2]
    cfg = chat(max_length=512, max_new_tokens=200)
    data = prepare(cfg, tokenizer, train=[pair(r["question"], r["answer"]) for r in rows])
    quiet_about(preflight(cfg, data=data), but=["step.loss"])
