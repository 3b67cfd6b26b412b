"""How fast is a training step, and what does it take? TRL, the plain Trainer, and sft_nb.

    python benchmarks/train_step.py [--json] [--times 3] [--shape 50m] [--rows 8] [--only plain flat]

LoRA (r 16, all linear layers, no dropout) on a shape with random weights and the Qwen3 vocabulary, on real GSM8K rows.
Of 64 rows, those that `group_by_length` would put into one batch are trained, the same ones in each step, so that the
libraries hardly pad; TRL's defaults, which do not group, get rows as they come. The contenders take turns; of each turn
the second step counts; medians. On a CPU seconds of processor time are compared, in which other programs do not count.

- `trl`: TRL with nothing set but what a step needs: bfloat16, checkpointing, no grouping.
- `trl_best`: as an expert sets it: no checkpointing, grouped, the base in bfloat16, only supervised positions scored.
  TRL does that where Triton is; on a CPU it scores every position, so here it is made to. On a GPU also Liger's kernels
  and rows without padding, where `liger-kernel` and `flash-attn` are installed.
- `plain`: transformers' Trainer with peft, grouped, the base in bfloat16; `plain_float32`: the same in float32.
- `flat`: sft_nb as `auto` sets it. `as_is`: with peft's own layers. `padded`: rows padded. On a GPU also compiled, and
  with Liger's kernels.

`ratio` is `flat` / the best of the libraries, in non-padding tokens per second; `ratio_trl`, `ratio_trl_best`,
`ratio_plain` are against one of them. Peak memory comes from a process of its own for each. On a GPU `mfu` is the share
of the card's dense bfloat16 peak. Writes benchmarks/results/train_step.json (train_step_SHAPE.json for other shapes).
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from common import resident_mib, save, shared, template

VOCABULARY = 151_936
SHAPES = {
    "50m": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=10, num_attention_heads=8,
                num_key_value_heads=4, head_dim=32),
    "0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, head_dim=64),   # of Qwen2.5-0.5B
    "4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
               num_key_value_heads=8, head_dim=128),
    "7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, head_dim=128)}
NAMES = {"trl": "TRL's defaults", "trl_best": "TRL as an expert sets it", "plain": "plain Trainer",
         "plain_float32": "plain Trainer, float32", "padded": "sft_nb padded", "as_is": "sft_nb, peft's own layers",
         "flat": "sft_nb"}
COMPILED, LIGER = {"compiled": "sft_nb compiled"}, {"liger": "sft_nb with Liger's kernels"}   # on a GPU
KERNELS = dict(as_is="none", compiled="compile", liger="liger")
LIBRARIES = ("trl", "trl_best", "plain", "plain_float32")


def settings(a, folder:str, rows:Path, n:int)->dict:
    return dict(
        model=folder + "/model", tokenizer=str(shared("tokenizers/qwen3")),
        chat_template=str(template("qwen3_training.jinja")), task="gsm8k",
        train_file=str(rows), max_samples=n, eval_samples=0, max_length=4096,
        method="lora", lora_dropout=0., runs_dir=folder + "/runs", cache_dir=folder + "/cache",
        gradient_checkpointing=False, per_device_train_batch_size=a.rows, gradient_accumulation_steps=1, max_steps=2,
        logging_steps=1, save_steps=1000, warmup_steps=0, learning_rate=1e-4)


def library_trainer(name:str, cfg, data, folder:str):
    "TRL's or transformers' own trainer on the same tokens and labels"
    import torch
    from transformers import AutoModelForCausalLM, set_seed
    gpu, low = torch.cuda.is_available(), name != "plain_float32"
    dtype, device = torch.bfloat16 if low else torch.float32, "cuda" if gpu else "cpu"
    attention = "flash_attention_2" if name == "trl_best" and at_its_best().get("padding_free") else None
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype, device_map={"": device},
                                                 attn_implementation=attention)
    same = dict(
        output_dir=folder + "/out", per_device_train_batch_size=cfg.per_device_train_batch_size, max_steps=2,
        learning_rate=cfg.learning_rate, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=not gpu)
    set_seed(cfg.seed)
    if name.startswith("plain"): return plain_trainer(model, cfg, data, same | dict(bf16=low))
    if name == "trl": return trl_trainer(cfg.model, cfg, data, same)   # which loads it as it wants
    return trl_trainer(model, cfg, data, same | at_its_best())


def at_its_best()->dict:
    "TRL's settings for speed, of what this machine has"
    import torch
    best = dict(gradient_checkpointing=False)
    if not torch.cuda.is_available(): return best
    if find_spec("liger_kernel"): best["use_liger_kernel"] = True
    if find_spec("flash_attn"): best["padding_free"] = True
    return best


def lora(cfg):
    from peft import LoraConfig
    return LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, lora_dropout=0., target_modules="all-linear",
                      task_type="CAUSAL_LM")


def plain_trainer(model, cfg, data, same:dict):
    from peft import get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
    args = TrainingArguments(**same, remove_unused_columns=False, label_names=["labels"])
    return Trainer(model=get_peft_model(model, lora(cfg)), args=args, train_dataset=data.train.tokens,
                   data_collator=DataCollatorForSeq2Seq(data.tokenizer))


def trl_trainer(model, cfg, data, same:dict):
    from trl import SFTConfig, SFTTrainer
    args = SFTConfig(**same, max_length=None, dataset_kwargs=dict(skip_prepare_dataset=True))
    return SFTTrainer(model=model, args=args, train_dataset=data.train.tokens, processing_class=data.tokenizer,
                      peft_config=lora(cfg))


def our_trainer(name:str, cfg, data):
    from sft_nb.runs.directory import create_run
    from sft_nb.training.train import build_trainer
    from sft_nb.workbench import Workbench
    cfg = replace(cfg, padding_free=name != "padded", kernels=KERNELS.get(name, "auto"))
    return build_trainer(Workbench(cfg, is_resolved=True, data=data), create_run(cfg))


def timed(trainer):
    "A function that trains two steps and returns the second one's seconds, those of the processor, and the first loss"
    import torch
    from transformers import TrainerCallback
    at, spent = [], []
    class Clock(TrainerCallback):
        def tick(self, *args, **kwargs):
            if torch.cuda.is_available(): torch.cuda.synchronize()
            at.append(time.perf_counter())
            spent.append(time.process_time())
        on_step_begin = on_step_end = tick
    trainer.add_callback(Clock())
    def job():
        at.clear()
        spent.clear()
        trainer.train()
        loss = next(line["loss"] for line in trainer.state.log_history if "loss" in line)
        return at[3] - at[2], spent[3] - spent[2], loss
    return job


def prepared(a, folder:str, grouped:bool=True):
    "The config and its rows: those of a batch of `group_by_length`, or the first ones; the model is made if need be"
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    cfg = load_config(**settings(a, folder, shared("data/gsm8k/train.jsonl"), 64 if grouped else a.rows))
    if not Path(cfg.model).exists(): make_model(a.shape, cfg.model)
    data = prepare(cfg)
    if not grouped: return cfg, data
    middle, by_length = len(data.train.lengths) // 2, data.train.lengths.argsort(kind="stable")
    chosen = [data.train.row(int(n))[1] for n in by_length[middle - a.rows // 2:][:a.rows]]
    rows = Path(folder)/"rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    cfg = load_config(**settings(a, folder, rows, a.rows))
    return cfg, prepare(cfg)


def make_model(shape:str, folder:str)->None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed
    set_seed(0)
    config = AutoConfig.for_model("qwen3", **SHAPES[shape], vocab_size=VOCABULARY, tie_word_embeddings=shape != "7b",
                                  max_position_embeddings=262_144, attention_dropout=0.)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def names(a)->dict[str,str]:
    "Who takes part on this machine"
    import torch
    known = NAMES
    if torch.cuda.is_available(): known = NAMES | COMPILED | (LIGER if find_spec("liger_kernel") else {})
    return {name: text for name, text in known.items() if not a.only or name in a.only}


def contender(name:str, a, folder:str):
    cfg, data = prepared(a, folder, grouped=name != "trl")
    if name == "trl_best": return with_compact_head(timed(library_trainer(name, cfg, data, folder)))
    if name in LIBRARIES: return timed(library_trainer(name, cfg, data, folder))
    return timed(our_trainer(name, cfg, data))


def with_compact_head(job):
    "TRL scores supervised positions alone, as it does where Triton is"
    def run():
        with patch("trl.trainer.utils._use_triton", lambda device: True): return job()
    return run


def peak_mib(name:str, a, folder:str)->int:
    "Peak of a process that trains two steps: of the card's memory, or of the process"
    line = [sys.executable, __file__, "--one", name, "--shape", a.shape, "--rows", str(a.rows), "--folder", folder]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode: raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])["peak_mib"]


def one(a)->None:
    import torch
    contender(a.one, a, a.folder)()
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else resident_mib()
    print(json.dumps(dict(peak_mib=round(peak))))


def compare(a, folder:str)->dict:
    import torch
    gpu = torch.cuda.is_available()
    data = {grouped: prepared(a, folder, grouped)[1] for grouped in (True, False)}
    jobs = {n: contender(n, a, folder) for n in names(a)}
    seconds, processor, losses = {n: [] for n in jobs}, {n: [] for n in jobs}, {}
    for _ in range(a.times):
        for n, job in jobs.items():
            took, spent, loss = job()
            seconds[n].append(round(took, 3))
            processor[n].append(round(spent, 3))
            losses.setdefault(n, loss)
    del jobs
    tokens = {n: int(data[n != "trl"].train.lengths.sum()) for n in seconds}
    rate = {n: tokens[n] / statistics.median(s) for n, s in (seconds if gpu else processor).items()}
    against = {f"ratio_{n}": round(rate["flat"] / rate[n], 2) for n in rate if n != "flat"}
    grouped = [loss for n, loss in losses.items() if n != "trl"]   # of the same rows
    return dict(
        ratio=min(r for n, r in against.items() if n.removeprefix("ratio_") in LIBRARIES), **against,
        tokens_per_second={n: round(r, 1) for n, r in rate.items()}, seconds=seconds, processor_seconds=processor,
        first_loss=losses, largest_loss_difference=max(grouped) - min(grouped), tokens=tokens, rows=a.rows,
        threads=torch.get_num_threads(), supervised=int(data[True].train.stats["supervised"].sum()), shape=a.shape,
        **_mfu(a, rate["flat"], data[True]))


def _mfu(a, rate:float, data)->dict:
    """Share of the card's peak; products of LoRA training: 4 operations a weight and token, attention by the squares of
    the rows, the head for supervised tokens"""
    import torch
    if not torch.cuda.is_available(): return {}
    from sft_nb.model.hardware import this_device
    s, n = SHAPES[a.shape], data.train.lengths.astype(float)
    heads = s["head_dim"] * (2 * s["num_attention_heads"] + 2 * s["num_key_value_heads"])
    linear = s["num_hidden_layers"] * s["hidden_size"] * (heads + 3 * s["intermediate_size"])
    head = 4 * VOCABULARY * s["hidden_size"] * data.train.stats["supervised"].sum() / n.sum()
    attention = 7 * s["num_hidden_layers"] * s["num_attention_heads"] * s["head_dim"] * (n**2).sum() / n.sum()
    peak = this_device("cuda", torch.bfloat16).tflops * 1e12
    return dict(mfu=round(rate * (4 * linear + head + attention) / peak, 3))


def options():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=3)
    p.add_argument("--shape", choices=list(SHAPES), default="50m")
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument("--no-memory", action="store_true", help="do not start a process for each contender's peak")
    p.add_argument("--only", nargs="+", choices=[*NAMES, *COMPILED, *LIGER], help="contenders; flat is one of them")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    return p.parse_args()


def show(result:dict)->None:
    for n in result["tokens_per_second"]:
        peak = f"   peak {result['peak_mib'][n]:>7,} MiB" if "peak_mib" in result else ""
        print(f"{(NAMES | COMPILED | LIGER)[n]:<26} {result['tokens_per_second'][n]:>9,.0f} tokens/s{peak}")
    print(f"sft_nb / the best of the libraries: {result['ratio']:.1f}x; "
          f"first losses differ by at most {result['largest_loss_difference']:.1e}")


def main():
    a = options()
    if a.one: return one(a)
    import torch
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()): result = compare(a, folder)
        if not a.no_memory: result["peak_mib"] = {n: peak_mib(n, a, folder) for n in names(a)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    name = "train_step" if a.shape == "50m" else f"train_step_{a.shape}"
    result = save(name, device, **result)
    if a.json: print(json.dumps(result))
    else: show(result)


if __name__ == "__main__": main()
