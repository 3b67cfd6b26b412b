"""Check a GPU in three calls of at most ten minutes each: are results correct, how fast is it, is the plan right?

    python scripts/gpu_day.py --call correctness      # kernels against the layers they replace; then tests/gpu
    python scripts/gpu_day.py --call speed            # tokens a second, and the share of the card's peak, by kernels
    python scripts/gpu_day.py --call memory           # planned against allocated

Models are created on the GPU, in bfloat16 with random weights; nothing large is written. A case that would not
finish in time is skipped and listed. `--size small` is for a CPU. Each call prints a table row by row, saves it in
gpu_CALL.json in `--out`, and exits with 1 if something is wrong."""
import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sft_nb.batches.layout import CollatorWithPositions, DataCollatorFlattening, eval_mode
from sft_nb.config.load import Config, load_config
from sft_nb.model.adapter import add_adapter
from sft_nb.model.attention import register_varlen
from sft_nb.extras.offloading import OnHost, offload_saved_tensors
from sft_nb.model.finetuning.checkpointing import OnDevice, recompute_layers
from sft_nb.extras import cuda_graphs
from sft_nb.model.generation import Decoder
from sft_nb.model.hardware import choose_device, free_memory, is_out_of_memory, this_device
from sft_nb.extras.kernels import (
    compile_layers, fuse_gates, fuse_lora, fuse_norms, fuse_rotary, use_liger)
from sft_nb.model.precision import use_kernels
from sft_nb.model.load import guard_4bit, quiet
from sft_nb.model.loss import add_supervised_loss
from sft_nb.model.precision import adapters_to_float32
from sft_nb.planning.plan import plan
from sft_nb.planning.simulate import MemoryTracker
from sft_nb.tokens.tokenizer import load_tokenizer

QWEN = dict(vocab_size=151_936, tie_word_embeddings=True, head_dim=128, num_key_value_heads=8)
SHAPES = {
    "tiny": dict(vocab_size=768, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16),
    "0.6b": QWEN | dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "4b": QWEN | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "8b": QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                      tie_word_embeddings=False)}
KINDS = ("qwen3", "llama", "mistral", "gemma2", "gemma3_text", "phi3")
KEPT, RECOMPUTED, SENT = "", "recomputed", "sent to host memory"   # what happens to saved activations
SPEED = dict(
    small=[("tiny", "lora", "auto", KEPT, 128), ("tiny", "qlora", "auto", RECOMPUTED, 128),
           ("tiny", "lora", "auto", SENT, 128)],
    full=[("4b", "lora", "auto", KEPT, 8192), ("4b", "lora", "none", KEPT, 8192), ("4b", "lora", "liger", KEPT, 8192),
          ("4b", "qlora", "auto", KEPT, 8192), ("4b", "lora", "auto", RECOMPUTED, 8192),
          ("4b", "lora", "auto", SENT, 8192), ("0.6b", "full", "auto", KEPT, 16384),
          ("8b", "lora", "auto", RECOMPUTED, 16384), ("8b", "qlora", "auto", RECOMPUTED, 16384),
          ("4b", "lora", "compile", KEPT, 8192)])   # size, method, kernels, activations, tokens
ANSWERS = dict(small=[("tiny", 4, 20, 20)],
               full=[("0.6b", 32, 1000, 64), ("4b", 32, 1000, 64)])   # size, prompts, tokens of each, new tokens
MEMORY = dict(
    small=[("tiny", "lora", False, 256), ("tiny", "full", True, 256)],
    full=[("0.6b", "lora", False, 4096), ("0.6b", "full", True, 8192), ("4b", "lora", False, 4096),
          ("4b", "lora", True, 32768), ("4b", "qlora", False, 4096), ("4b", "qlora", True, 16384),
          ("8b", "lora", False, 4096), ("8b", "qlora", True, 16384)])   # size, method, checkpointing, tokens


def make_config(folder:str, size:str, method:str, tokens:int, kind="qwen3", **how)->Config:
    "The config for a model without weights"
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)   # a type's own ids may be out of range
    shape = AutoConfig.for_model(kind, max_position_embeddings=262_144, **SHAPES[size] | special)
    shape.save_pretrained(folder)
    return load_config(model=folder, tokenizer="tiny", init="random", method=method, max_length=tokens, lora_dropout=0.,
                       max_tokens_per_batch=tokens, **how)


def quantise(model)->None:
    "Quantise the linear layers except the head to 4 bits, one by one"
    from bitsandbytes.nn import Linear4bit, Params4bit
    head = model.get_output_embeddings()
    for path, layer in [*model.named_modules()]:
        if type(layer) is not torch.nn.Linear or layer is head: continue
        parent, _, name = path.rpartition(".")
        packed = Linear4bit(layer.in_features, layer.out_features, bias=layer.bias is not None, quant_type="nf4",
                            compute_dtype=layer.weight.dtype, device="meta")
        packed.weight = Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
        packed.bias = layer.bias
        setattr(model.get_submodule(parent), name, packed.to(layer.weight.device))
    model.is_loaded_in_4bit = True
    guard_4bit(model)


def half_of(device:str)->torch.dtype: return torch.bfloat16 if device == "cuda" else torch.float32


def make_model(cfg:Config, device:str, *, kernels="none", checkpointing=False, learned=True):
    "A model ready to train, with random weights created on the device"
    register_varlen()
    half = half_of(device)
    tokenizer = load_tokenizer(cfg)
    with quiet(), torch.device(device):
        torch.manual_seed(0)
        shape, dtype = AutoConfig.from_pretrained(cfg.model), torch.float32 if cfg.method == "full" else half
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="varlen")
    if cfg.method == "qlora": quantise(model)
    model = add_adapter(model, tokenizer, cfg).to(device)
    if cfg.method != "full": adapters_to_float32(model)
    if learned:   # an adapter whose B is 0 has no effect
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name: p.normal_(std=.02)
    use_kernels(model, kernels)
    add_supervised_loss(model, max_logits_mib=cfg.max_logits_mib)
    if checkpointing: recompute_layers(model, keep_attention=True)
    return model.train()


def make_batch(model, lengths:list[int], device:str)->dict:
    draw, vocabulary = torch.Generator().manual_seed(1), min(model.config.vocab_size, 50_000)
    ids = [torch.randint(3, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    rows = [dict(input_ids=row, labels=[-100] * (len(row) // 2) + row[len(row) // 2:]) for row in ids]
    batch = CollatorWithPositions(DataCollatorFlattening())(rows)
    return {name: v.to(device) if torch.is_tensor(v) else v for name, v in batch.items()}


def run_pass(model, batch:dict, device:str)->torch.Tensor:
    "Run forward and backward passes and return the loss"
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        out = model(**batch, supervised=True, use_cache=False)
        loss = out.loss / out.n_tokens
    loss.backward()
    return loss.detach()


def measure_gradients(model, batch:dict, device:str)->tuple[float,list]:
    model.zero_grad()
    loss = run_pass(model, batch, device).item()
    return loss, [p.grad.float().clone() for p in model.parameters() if p.requires_grad]


def compare(want, got)->float:
    "The larger of the relative differences of loss and gradients"
    apart = sum(float((a - b).norm()) for a, b in zip(got[1], want[1], strict=True))
    return max(abs(got[0] - want[0]) / abs(want[0]), apart / sum(float(w.norm()) for w in want[1]))


def correctness_cases(size:str, device:str)->list[tuple[str,Callable]]:
    "Names and functions that return the difference between two ways to compute the same"
    shape, lengths = ("tiny", [5, 40, 1, 18]) if size == "small" else ("0.6b", [5, 1000, 1, 800])
    def against_plain(change, method="lora", kind="qwen3"):
        def measure(folder):
            model = make_model(make_config(folder, shape, method, sum(lengths), kind), device)
            batch = make_batch(model, lengths, device)
            want = measure_gradients(model, batch, device)
            change(model)
            return compare(want, measure_gradients(model, batch, device))
        return measure
    def rows_alone(kind):
        def measure(folder):
            model = make_model(make_config(folder, shape, "lora", sum(lengths), kind), device)
            flat = measure_gradients(model, make_batch(model, lengths, device), device)
            model.set_attn_implementation("eager")
            model.zero_grad()
            loss = n = 0
            for row in make_batch(model, lengths, device)["input_ids"].split(lengths, 1):
                labels = row.clone()
                labels[:, :max(1, row.shape[1] // 2)] = -100
                with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                    out = model(input_ids=row, labels=labels, supervised=True, use_cache=False)
                loss, n = loss + out.loss, n + out.n_tokens
            (loss / n).backward()
            grads = [p.grad.float().clone() for p in model.parameters() if p.requires_grad]
            return compare(((loss / n).item(), grads), flat)
        return measure
    def kept(waiting):
        return lambda model: recompute_layers(model, keep_attention=True, waiting=waiting)
    def sent(folder):
        model = make_model(make_config(folder, shape, "lora", sum(lengths)), device)
        batch = make_batch(model, lengths, device)
        want, hooks = measure_gradients(model, batch, device), offload_saved_tensors(model)
        found = []
        for _ in range(3):   # from the second pass on, tensors are prefetched
            with hooks: found.append(compare(want, measure_gradients(model, batch, device)))
        return max(found)
    kinds = ("qwen3", "gemma2", "phi3") if size == "small" else KINDS
    cases = [(f"flattened rows, {kind}, and eager attention", rows_alone(kind)) for kind in kinds]
    cases += [("base and adapter in one product", against_plain(fuse_lora)),
              ("the same with a base in 4 bits", against_plain(fuse_lora, "qlora")),
              ("norms as one operation", against_plain(fuse_norms)),
              ("norms of Gemma", against_plain(fuse_norms, kind="gemma2")),
              ("rotary positions in four operations", against_plain(fuse_rotary)),
              ("gates kept once", against_plain(fuse_gates)),
              ("attention kept on the device", against_plain(kept(OnDevice))),
              ("attention kept in host memory", against_plain(kept(OnHost))),
              ("saved tensors sent to host memory", sent)]
    if device == "cuda": cases.append(("compiled layers", against_plain(compile_layers)))
    if device == "cuda" and find_spec("liger_kernel"): cases.append(("Liger's kernels", against_plain(use_liger)))
    return cases


def check_correctness(a, device:str, left:Callable):
    limit = 3e-2 if device == "cuda" else 1e-4
    for name, measure in correctness_cases(a.size, device):
        row = run_case(name, measure, left, 30)
        yield row | dict(limit=limit, ok=row["apart"] < limit) if "apart" in row else row
    if device == "cuda" and left() > 60: yield run_tests(left())


def run_tests(seconds:float)->dict:
    "Run tests/gpu except for the memory peaks, which `--call memory` measures"
    tests = Path(__file__).parents[1]/"tests"/"gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", str(tests), "-k", "not predicted_peak"]
    try: done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired: return dict(case="tests/gpu", left_out="they took longer than the time left")
    if done.returncode: print(done.stdout[-8000:])
    return dict(case="tests/gpu", ok=done.returncode == 0, says=(done.stdout.strip() or done.stderr).splitlines()[-1])


def flops_of(model, lengths:list[int])->float:
    "FLOPs of forward and backward: 4 per weight and token of frozen matrices, 6 of trained ones; attention; the head"
    from sft_nb.batches.layout import BatchLengths
    from sft_nb.planning.throughput import facts_of
    facts, batch = facts_of(model), BatchLengths(tuple(lengths), True)
    frozen = 4 + 2 * facts.full
    products = batch.tokens * (frozen * facts.linear + 6 * facts.adapter + frozen * batch.share * facts.head)
    return products + 7 * sum(n * n for n in lengths) * facts.layers * facts.width   # half of each square is masked


def measure_speed(a, device:str, left:Callable):
    peak = this_device(device, half_of(device)).tflops * 1e12
    for size, method, kernels, saved, tokens in SPEED[a.size]:
        def measure(folder, size=size, method=method, kernels=kernels, saved=saved, tokens=tokens):
            if kernels == "liger" and not find_spec("liger_kernel"): return dict(left_out="Liger is not installed")
            cfg = make_config(folder, size, method, tokens)
            model = make_model(cfg, device, kernels=kernels, checkpointing=saved == RECOMPUTED)
            lengths = [tokens // 8] * 8
            batch, trained = make_batch(model, lengths, device), [p for p in model.parameters() if p.requires_grad]
            optimizer, seconds = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda"), []
            hooks = offload_saved_tensors(model) if saved == SENT else nullcontext()
            if device == "cuda": torch.cuda.reset_peak_memory_stats()
            for _ in range(6):
                began = time.perf_counter()
                with hooks: run_pass(model, batch, device)
                optimizer.step()
                optimizer.zero_grad()
                if device == "cuda": torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
            usual = median(seconds[3:])
            found = dict(ms=round(1e3 * usual, 1), tokens_per_second=round(tokens / usual))
            found |= dict(mfu=round(flops_of(model, lengths) / usual / peak, 3), ok=True)
            if device == "cuda": found |= dict(gib=round(torch.cuda.max_memory_allocated() / 2**30, 1))
            return found
        name = f"{size} {method}, kernels {kernels}, {tokens:,} tokens" + f", {saved}" * bool(saved)
        yield run_case(name, measure, left, 150 if kernels == "compile" else 60)
    for size, prompts, length, new in ANSWERS[a.size]:
        def answer(folder, size=size, prompts=prompts, length=length, new=new):
            cfg = make_config(folder, size, "lora", length + new)
            model, tokenizer = make_model(cfg, device, kernels="auto"), load_tokenizer(cfg)
            model.generation_config.eos_token_id = None   # so that each answer has the full length
            asked = make_batch(model, [length] * prompts, "cpu")["input_ids"].view(prompts, length).tolist()
            class Timed(Decoder):
                "Records the duration of each step"
                def write(self, running):
                    began = time.perf_counter()
                    super().write(running)   # synchronises with the device
                    steps.append(time.perf_counter() - began)
            def ms_a_token():
                steps.clear()
                decoder = Timed(model, tokenizer, max_new_tokens=new, batch_size=prompts)
                with torch.no_grad(), eval_mode(model): list(decoder.answers(asked))
                return round(1e3 * median(steps[new // 2:]), 2)
            steps = []
            with patch.object(cuda_graphs, "RECORDED_ON", ()): plain = ms_a_token()
            return dict(ms_a_token=ms_a_token(), plain_ms=plain, ok=True)
        yield run_case(f"{size}, {prompts} answers, a token after {length:,}", answer, left, 60)


def measure_memory(a, device:str, left:Callable):
    for size, method, checkpointing, tokens in MEMORY[a.size]:
        def measure(folder, size=size, method=method, checkpointing=checkpointing, tokens=tokens):
            cfg = make_config(folder, size, method, tokens, gradient_checkpointing=checkpointing, kernels="auto",
                              keep_attention=checkpointing, gradient_accumulation_steps=2)
            lengths = [tokens // 4] * 4
            card = this_device(device, half_of(device))
            planned = plan(cfg, device=card, lengths=lengths).allocated
            model = make_model(cfg, device, kernels="auto", checkpointing=checkpointing)
            batch, trained = make_batch(model, lengths, device), [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
            def steps():
                for k in range(4):
                    run_pass(model, batch, device)
                    if k % 2: optimizer.step()
                    if k % 2: optimizer.zero_grad()
            peak = allocated_by(steps, model, device)
            ratio = planned / peak
            found = dict(planned_gib=round(planned / 2**30, 3), allocated_gib=round(peak / 2**30, 3))
            return found | dict(ratio=round(ratio, 3), ok=.9 <= ratio <= 1.3)   # a plan may overestimate
        name = f"{size} {method}, {tokens:,} tokens" + ", checkpointing" * checkpointing
        yield run_case(name, measure, left, 60)


def allocated_by(steps:Callable, model, device:str)->int:
    "Peak bytes: from CUDA's allocator, or by counting tensors on a CPU"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        steps()
        return torch.cuda.max_memory_allocated()
    alive = MemoryTracker()
    for t in (*model.parameters(), *model.buffers()): alive.add(t)
    with alive: steps()
    return alive.peak


def run_case(name:str, measure:Callable, left:Callable, seconds:float)->dict:
    "A row of the table; failures are rows too"
    if left() < seconds: return dict(case=name, left_out=f"{left():.0f} s were left")
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder: found = measure(folder)
    except Exception as e:
        found = dict(ok=False, says=f"{type(e).__name__}: {str(e)[:300]}")
        if is_out_of_memory(e): found = dict(ok=True, left_out="the card is too small for it")
    gc.collect()
    free_memory()
    if isinstance(found, float): found = dict(apart=float(f"{found:.2g}"))
    return dict(case=name) | found | dict(seconds=round(time.monotonic() - began, 1))


CALLS = dict(correctness=check_correctness, speed=measure_speed, memory=measure_memory)


def main(args:list[str]|None=None)->int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--call", choices=CALLS, required=True)
    p.add_argument("--size", choices=("full", "small"), help="of the models; full on a GPU, small on a CPU")
    p.add_argument("--minutes", type=float, default=9.5, help="after which no new case begins")
    p.add_argument("--out", default=".", help="folder of the JSON file")
    a = p.parse_args(args)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device, _ = choose_device("auto")
    a.size = a.size or ("full" if device == "cuda" else "small")
    until = time.monotonic() + 60 * a.minutes
    name, rows = torch.cuda.get_device_name() if device == "cuda" else device, []
    result = dict(call=a.call, device=name, torch=torch.__version__, date=time.strftime("%Y-%m-%d"), rows=rows)
    for row in CALLS[a.call](a, device, lambda: until - time.monotonic()):
        facts = ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("case", "ok"))
        print(f"{'-' if 'left_out' in row else 'ok' if row.get('ok') else 'WRONG':<6} {row['case']:<58} {facts}",
              flush=True)
        rows.append(row)
        (Path(a.out)/f"gpu_{a.call}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row.get("ok", "left_out" in row) for row in rows) else 1


if __name__ == "__main__": sys.exit(main())
