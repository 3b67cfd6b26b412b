"""A pretrained model: it answers, llama.cpp reads its file alike, and a short training on real rows is learned."""
import csv
import json
import math
import urllib.request

import pytest
import torch
from conftest import shared

from sft_nb.batches.layout import rows_stay_apart
from sft_nb.checks.core import CHECKS, run_check
from sft_nb.checks.preflight import Evidence
from sft_nb.config.load import load_config
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.model.generation import continue_tokens, reads_padding
from sft_nb.model.load import load_base
from sft_nb.runs.locate import find_target
from sft_nb.tokens.encode import encode_prompts
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

pytestmark = pytest.mark.real
QUESTION = [dict(role="user", content="What is the capital of France?")]
TEXTS = ("In 1997, 12,345.67 people paid $89 each; 3x4=12.", "Grüße! 你好, мир 🙂 naïve", "١٢٣ ½ 2² ⅷ", "a" * 200,
         "def f(x):\n    return  x+1\n\n\n# it's   DON'T can't\t\ttabs", " <|im_end|> <|endoftext|>x ",
         "\r\nwindows\r\n", "e\u0301 \u00a0 \u3000 \u200b")


@pytest.fixture(scope="module")
def llama_cpp(smollm2_gguf):
    "Asks llama.cpp's server, which has the original file"
    x = pytest.importorskip("xllamacpp")
    p = x.CommonParams()
    p.model.path, p.n_ctx, p.n_parallel, p.port, p.warmup = str(smollm2_gguf), 512, 1, 0, False
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    running = [x.Server(p)]

    def ask(path, **body):
        request = urllib.request.Request(running[0].listening_address + path, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer: return json.load(answer)
    yield ask
    running.clear()


def test_it_knows_the_capital_of_france_and_stops(smollm2):
    cfg = load_config(model=smollm2, method="lora", dtype="float32", device="cpu")
    tokenizer = load_tokenizer(cfg)
    prompts = encode_prompts([QUESTION], tokenizer)
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.decode(prompts[0])   # the template's default
    answer, = continue_tokens(load_base(cfg, tokenizer), tokenizer, prompts, max_new_tokens=24)
    assert "Paris" in answer.text and answer.ended


def test_rounding_in_bfloat16_is_not_taken_for_padding_that_is_read(smollm2):
    "It was: all answers came one at a time, at a fifth of the speed"
    cfg = load_config(model=smollm2, method="lora", dtype="bfloat16", device="cpu")
    model = load_base(cfg, load_tokenizer(cfg))
    assert not reads_padding(model) and rows_stay_apart(model)


def test_llama_cpp_reads_the_file_alike(smollm2, llama_cpp):
    cfg = load_config(model=smollm2, method="lora", dtype="float32", device="cpu")
    tokenizer = load_tokenizer(cfg)
    for text in TEXTS:
        theirs = llama_cpp("/tokenize", content=text, add_special=False, parse_special=True)["tokens"]
        assert theirs == tokenizer(text, add_special_tokens=False).input_ids, text
    ids, = encode_prompts([QUESTION], tokenizer)
    asked = llama_cpp("/apply-template", messages=QUESTION)["prompt"]
    assert llama_cpp("/tokenize", content=asked, parse_special=True)["tokens"] == ids
    told = llama_cpp("/completion", prompt=ids, n_predict=1, n_probs=20, temperature=0)
    likely = {t["id"]: t["logprob"] for t in told["completion_probabilities"][0]["top_logprobs"]}
    with torch.no_grad(): ours = load_base(cfg, tokenizer)(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    off = [abs(float(ours[token]) - value) for token, value in likely.items()]
    assert max(off) < .5 and math.fsum(off) / len(off) < .15, off   # it multiplies by inputs rounded to 8 bits


def test_twelve_steps_on_real_rows_are_learned_and_the_adapter_finds_its_base(smollm2, tmp_path):
    lines = sorted(shared("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:600], key=len)[:60]
    rows = [dict(question=r["question"], answer=f"#### {r['answer'].split()[-1]}") for r in map(json.loads, lines)]
    cfg = load_config(
        model=smollm2, method="lora", learning_rate=1e-3, max_steps=12, per_device_train_batch_size=4, logging_steps=1,
        gradient_accumulation_steps=1, preflight=False, runs_dir=str(tmp_path), eval_samples=4, max_new_tokens=12)
    run = train(cfg, data=prepare(cfg, train=rows[4:], eval=rows[:4]))
    losses = [m["loss"] for m in run.metrics() if "loss" in m]
    assert run.config.model == smollm2 and sum(losses[-3:]) < .5 * sum(losses[:3])
    assert find_target(run.adapter).config.model == smollm2
    e = evaluate(run, progress=False)
    in_form = [sum("####" in answer.text for answer in scores.answers) for scores in (e.base, e.tuned)]
    assert in_form[1] > in_form[0]


@pytest.mark.parametrize("rows, first", [
    ("nli", 0), *(pytest.param(*chosen, marks=pytest.mark.soak) for chosen in (("nli", 700), ("units", 0)))])
def test_bfloat16_rounds_but_rows_that_read_each_other_are_found(smollm2, rows, first):
    "Answers of two to four tokens, whose loss changes by several percent with the width of a batch"
    if rows == "units":
        lines = shared("data/unit_conversion_deepmind/train.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = [json.loads(line) for line in lines[first:first + 40]]
    else:
        with shared("data/med_nli/MED.tsv").open(encoding="utf-8") as file:
            table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[first:first + 40]
        chosen = [dict(question=f"Premise: {r['sentence1']}\nHypothesis: {r['sentence2']}\nDoes it follow?",
                       answer=r["gold_label"]) for r in table]
    cfg = load_config(model=smollm2, method="lora", dtype="bfloat16", device="cpu", eval_samples=4,
                      per_device_train_batch_size=16)
    seen = Evidence(Workbench(cfg, data=prepare(cfg, train=chosen)))
    for name in ("step.order", "step.width", "step.evaluation"):
        found, = run_check(name, CHECKS[name], seen)
        assert found.status == "ok", found
    batch = {name: v for name, v in seen.some_batch.items() if name in ("input_ids", "labels")}
    batch |= dict(position_ids=torch.arange(batch["input_ids"].shape[1])[None])
    vars(seen)["some_batch"] = batch   # positions run on, and where rows begin is not known
    found, = run_check("step.width", CHECKS["step.width"], seen)
    assert found.status == "fail"
