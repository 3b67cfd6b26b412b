"""A pretrained model: it answers, llama.cpp reads its file alike, and a short training on real rows is learned."""
import json
import math
import urllib.request

import pytest
from conftest import shared

from sft_nb.config import load_config
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.model.generate import continue_tokens
from sft_nb.model.load import load_base
from sft_nb.runs.locate import find_target
from sft_nb.tokens.encode import encode_prompts
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import train

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
    import torch
    with torch.no_grad(): ours = load_base(cfg, tokenizer)(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    off = [abs(float(ours[token]) - value) for token, value in likely.items()]
    assert max(off) < .5 and math.fsum(off) / len(off) < .15, off   # it multiplies by inputs rounded to 8 bits


def test_twelve_steps_on_real_rows_are_learned_and_the_adapter_finds_its_base(smollm2, tmp_path):
    lines = shared("data/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
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
