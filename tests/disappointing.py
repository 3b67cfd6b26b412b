"""Runs that disappoint, each for one reason that is known, and runs that do not. `python benchmarks/explain.py` and
tests/evaluation/test_explain.py train them; `TINY` and `REAL` have the settings of their bases."""
import random
from dataclasses import dataclass
from pathlib import Path

from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.runs.directory import Run
from sft_nb.tasks.arithmetic import Arithmetic
from sft_nb.tokens.prepare import prepare
from sft_nb.training.train import train

TINY = dict(model="tiny", method="lora", learning_rate=5e-3, max_steps=30, per_device_train_batch_size=8)
REAL = dict(model="smollm2-q4_1", method="lora", learning_rate=1e-3, max_steps=24, per_device_train_batch_size=8)
COMMON = dict(gradient_accumulation_steps=1, lora_dropout=0., max_length=128, eval_samples=40, logging_steps=2,
              per_device_eval_batch_size=40, preflight=False, num_train_epochs=100, device="cpu", dtype="float32")

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Leo".split()
THINGS = "apples pears books cards coins pens shells stones".split()


def sums(n:int=400, *, held_out:bool=False)->list[dict]:
    rows = Arithmetic().rows("eval" if held_out else "train", n=n)
    return [dict(question=r["question"], answer=r["answer"]) for r in rows]


def kinds(n:int=300, *, held_out:bool=False)->list[dict]:
    "Two labels: are there more, or fewer? Held-out rows have other numbers"
    draw, rows = random.Random(held_out), []
    while len(rows) < n:
        (who, friend), thing = draw.sample(NAMES, 2), draw.choice(THINGS)
        k, gives = draw.randint(10, 99), draw.random() < .5
        if (k % 5 == 0) != held_out: continue
        what = "gives more." if gives else "loses some."
        rows.append(dict(question=f"{who} has {k} {thing}. {friend} {what}", answer="1" if gives else "2"))
    return rows


def products(n:int=400, *, held_out:bool=False)->list[dict]:
    "A task that is too hard for `tiny`, whose answers do follow from their prompts"
    draw, rows = random.Random(held_out), []
    for _ in range(n):
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        rows.append(dict(question=f"{a} * {b} =", answer=f"#### {a * b}"))
    return rows


def exchanged(rows:list[dict], share:float)->list[dict]:
    "A share of the rows with the answer of another of them, or of two labels the other one"
    out, labels = [dict(r) for r in rows], sorted({r["answer"] for r in rows})
    some = random.Random(1).sample(range(len(rows)), round(share * len(rows)))
    for k, j in zip(some, [*some[1:], some[0]]):
        if len(labels) == 2: out[k]["answer"] = labels[rows[k]["answer"] == labels[0]]
        else: out[k]["answer"] = rows[j]["answer"]
    return out


def make_run(folder, base:dict, name:str, rows:list[dict], held:list[dict], *, task:str="arithmetic",
             scored:dict|None=None, **settings)->Run:
    "Train on rows, and evaluate as `scored` says; None: not at all"
    cfg = load_config("default", **COMMON | base | dict(task=task, runs_dir=str(folder), run_name=name) | settings)
    run = train(prepare(cfg, train=rows, eval=held))
    if scored is not None: evaluate(run, shots=0, progress=False, **scored)
    return run


SCORER = '''from sft_nb.tasks.core import Score, task
@task("question", "answer")
def exact(text, row):
    "The whole answer, as in the rows"
    expected = row["answer"].split("####")[-1].strip()
    return Score(text == expected, text, expected)
TASK = exact
'''


def with_outliers(at:str, out:Path)->str:
    "A model with the same function, and some channels 256 times larger in weights that are stored in 4 bits"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            reads = {layer.input_layernorm: [attention.q_proj, attention.k_proj, attention.v_proj],
                     layer.post_attention_layernorm: [mlp.gate_proj, mlp.up_proj]}
            for norm, read in reads.items():
                norm.weight[::16] /= 256
                for linear in read: linear.weight[:, ::16] *= 256
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(at).save_pretrained(out)
    return str(out)


@dataclass(frozen=True)
class Problem:
    "A run that disappoints"
    cause:str        # in `CAUSES`
    make:object      # (folder, base) -> run


def _sums(name, cause, *, rows=None, held=None, scored=None, **settings):
    def make(folder, base):
        own = {k: v(folder) if callable(v) else v for k, v in settings.items()}
        learned, asked = (rows or (lambda base: sums()))(base), (held or (lambda: sums(40, held_out=True)))()
        return make_run(folder, base, name, learned, asked, scored=scored, **own)
    return name, Problem(cause, make)


def _kinds(name, cause, **how):
    how = dict(rows=lambda base: kinds(), held=lambda: kinds(40, held_out=True)) | how
    return _sums(name, cause, task="classify", **how)


def without_end(rows:list[dict], model:str)->list[dict]:
    "Rows as tokens, whose answers have no end token: none is added"
    from sft_nb.tokens.encode import encode_prompts
    from sft_nb.tokens.tokenizer import load_tokenizer
    tokenizer = load_tokenizer(load_config("default", model=model))
    prompts = encode_prompts([[dict(role="user", content=r["question"])] for r in rows], tokenizer)
    answers = tokenizer([r["answer"] for r in rows], add_special_tokens=False).input_ids
    return [dict(input_ids=[*p, *a], labels=[-100] * len(p) + a) for p, a in zip(prompts, answers)]


def silent_last(rows:list[dict])->list[dict]:
    def said(q, a, **flag): return [dict(role="user", content=q), dict(role="assistant", content=a, **flag)]
    hello = said("Hello!", "Hello, what is your question?")
    return [dict(messages=hello + said(r["question"], r["answer"], train=False)) for r in rows]


def written(text:str, name:str):
    def write(folder):
        file = Path(folder)/name
        file.write_text(text)
        return str(file)
    return write


def coded()->list[dict]:
    codes = random.Random(3).sample(range(1000, 9999), 400)
    return [dict(question=r["question"], answer=f"#{code}", solution=r["answer"]) for r, code in zip(sums(), codes)]


def units()->list[dict]:
    from sft_nb.extras.tasks.units import Units
    return [dict(question=r["question"], answer=r["answer"]) for r in Units().rows("eval", n=40)]


def merged(folder, base:dict)->str:
    "A model that can tell the two kinds apart"
    from sft_nb.proof.merge import merge
    first = make_run(folder, base, "first", kinds(), kinds(40, held_out=True), task="classify")
    return str(merge(first, dtype="float32"))


def second(name:str, scored:dict|None, *, outliers:bool=False, **settings):
    "A second training of such a model"
    def make(folder, base):
        model = merged(folder, base)
        if outliers: model = with_outliers(model, Path(folder)/"outliers")
        return make_run(folder, base | dict(model=model, max_steps=5, learning_rate=1e-4) | settings, name, kinds(),
                        kinds(40, held_out=True), task="classify", scored=scored)
    return make


PROBLEMS = dict([
    _kinds("rate-high", "rate_high", learning_rate=.3),
    _kinds("rate-low", "rate_low", learning_rate=2e-5, scored={}),
    _kinds("few-steps", "few_steps", max_steps=4, scored={}),
    _sums("one-rank-of-queries", "capacity", max_steps=50, lora_r=1, lora_target_modules=("q_proj",)),
    _kinds("frozen", "capacity", method="full", learning_rate=5e-4, unfrozen_parameters=(r"model\.norm",)),
    _kinds("rate-zero", "nothing_trained", learning_rate=0., max_steps=5),
    _kinds("warm-up", "warmup", warmup_steps=60, max_steps=20),
    _sums("dropout", "dropout", max_steps=50, lora_dropout=.95),
    _kinds("no-end", "no_end", rows=lambda base: without_end(kinds(), base["model"]), scored={}),
    _kinds("silent-answers", "answer_not_learned", rows=lambda base: silent_last(kinds())),
    _sums("cut-answers", "cut", max_length=50, on_long="cut", max_steps=20),
    _sums("left-out", "left_out", max_length=50, max_steps=10),
    _sums("short-answers", "short_answers", scored=dict(max_new_tokens=5), max_steps=20),
    _sums("scorer", "scorer", task=written(SCORER, "exact.py"), scored={}, max_steps=20),
    _kinds("other-template", "template", scored=dict(chat_template="zephyr")),
    _kinds("other-wording", "template", scored={}, rows=lambda base: [
        dict(r, question=f"There are two answers, and one of them is right. {r['question']}") for r in kinds()]),
    _sums("other-rows", "unlike", held=units, task="chat", max_steps=40),
    _sums("exchanged-sums", "noise", max_steps=160, learning_rate=3e-3, rows=lambda base: exchanged(sums(), .3)),
    _kinds("exchanged-labels", "noise", max_steps=80, learning_rate=2e-3, rows=lambda base: exchanged(kinds(), .3)),
    _sums("shuffled", "unrelated", rows=lambda base: exchanged(sums(), 1.), max_steps=30),
    _sums("wrong-column", "wrong_column", rows=lambda base: coded(), max_steps=30),
    _kinds("one-label", "one_label", scored={}, rows=lambda base: [
        r for r in kinds() if r["answer"] == "1"] + kinds()[:6]),
    _kinds("contradictions", "contradictions", rows=lambda base: kinds() + exchanged(kinds(), 1.)),
    _kinds("duplicates", "duplicates", rows=lambda base: kinds()[:8] * 30),
    _sums("by-heart", "overfit", rows=lambda base: sums(30), max_steps=100, eval_steps=10),
    _kinds("leak", "leak", rows=lambda base: kinds() + kinds(40, held_out=True), scored={}),
    _kinds("out-of-time", "not_ended", max_time=1., max_steps=400),
    _sums("prompts-too", "prompts_learned", train_on_prompt=True, max_steps=30)]) | {
    "base-good": Problem("base_good", second("base-good", {})),
    "four-bits": Problem("bits", second("four-bits", None, outliers=True, method="qlora"))}

HEALTHY = dict([
    _kinds("healthy-kinds", "", scored={}),
    _kinds("healthy-unscored", ""),
    _sums("healthy-sums", "", scored={}, max_steps=300, rows=lambda base: sums(3000)),
    _sums("healthy-chat", "", task="chat", scored={}, rows=lambda base: kinds(), held=lambda: kinds(40, held_out=True)),
    _sums("too-hard", "", scored={}, rows=lambda base: products(), held=lambda: products(40, held_out=True)),
    _kinds("healthy-full", "", scored={}, method="full", learning_rate=1e-3)])

ON_REAL = ("rate-high", "rate-low", "few-steps", "no-end", "scorer", "shuffled", "exchanged-labels", "short-answers",
           "other-rows", "one-label")   # of `PROBLEMS`, with `REAL`
