"""Test every pair of values of 21 settings in a run of three steps that is killed, resumed, evaluated and merged.

    python scripts/pairs.py                 # half an hour on two cores; writes benchmarks/results/pairs.json
    python scripts/pairs.py --rows 3 7      # some rows of the array, printed and not written

A row ends as *trained*: the killed and resumed run has the same bytes, it answers held-out rows, and its merged
model is proven to match the adapter. What cannot work is tried alone and ends as *refused*, by the config or
by preflight, with a message. Anything else is *failed*, and the script exits with 1.
`tests/training/test_pairs.py` runs a few rows, and checks that the array contains every pair."""
import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from itertools import combinations, product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT/"tests"))
RESULTS = ROOT/"benchmarks/results/pairs.json"

AGAIN, TWO = dict(gradient_checkpointing=True), dict(num_processes=2)
FACTORS = {   # factor -> value as shown in the table -> settings; the first value is the default
    "method": {"lora": dict(method="lora"), "qlora": dict(method="qlora"),
               "qlora, 8 bits": dict(method="qlora", load_in_8bit=True), "full": dict(method="full")},
    "dtype": {"float32": dict(dtype="float32"), "bfloat16": dict(dtype="bfloat16")},
    "checkpointing": {"no": dict(gradient_checkpointing=False), "yes": AGAIN | dict(keep_attention=False),
                      "attention kept": AGAIN | dict(keep_attention=True)},
    "MLPs": {"whole": dict(recompute_parts=False), "in parts": dict(recompute_parts=True)},
    "kernels": {"auto": {}, "none": dict(kernels="none")},
    "dropout": {"0": dict(lora_dropout=0.), "0.3": dict(lora_dropout=.3)},
    "attention": {"varlen": dict(attn_implementation="varlen"), "sdpa": dict(attn_implementation="sdpa"),
                  "eager": dict(attn_implementation="eager")},
    "layout": {"padded": dict(padding_free=False), "flattened": dict(padding_free=True),
               "packed": dict(max_tokens_per_batch=160),
               "grouped": dict(padding_free=False, group_by_length=True)},
    "accumulation": {"1": dict(gradient_accumulation_steps=1), "3": dict(gradient_accumulation_steps=3)},
    "DoRA": {"no": {}, "yes": dict(use_dora=True)},
    "rsLoRA": {"no": {}, "yes": dict(use_rslora=True)},
    "modules_to_save": {"none": {}, "lm_head": dict(modules_to_save=("lm_head",)),
                        "embed_tokens": dict(modules_to_save=("embed_tokens",)),
                        "norm": dict(modules_to_save=("norm",))},
    "train_tokens": {"none": {}, "<|im_end|>": dict(train_tokens=("<|im_end|>",))},
    "optimiser": {name: dict(optim=name) for name in ("adamw_torch", "adafactor", "paged_adamw_8bit")},
    "schedule": {name: dict(lr_scheduler_type=name)
                 for name in ("cosine", "constant_with_warmup", "polynomial", "reduce_lr_on_plateau")},
    "evaluation": {"each step": dict(eval_steps=1, eval_samples=4), "never": dict(eval_samples=4)},
    "choice": {"last": {}, "best": dict(load_best_model_at_end=True),
               "early stopping": dict(early_stopping_patience=1)},
    "saving": {"each step": dict(save_steps=1), "each second": dict(save_steps=2)},
    "max_time": {"none": {}, "one step": dict(max_time=.001)},
    "processes": {"1": dict(num_processes=1), "2": TWO, "2, ZeRO-2": TWO | dict(deepspeed="zero2"),
                  "2, ZeRO-3": TWO | dict(deepspeed="zero3"), "2, FSDP2": TWO | dict(fsdp=True),
                  "2, shared rows": TWO | dict(sequence_parallel_size=2)},
    "preparation": {"alone": dict(num_workers=1), "two workers": dict(num_workers=2)},
}

FORBIDDEN = {   # pairs that are refused, each tried alone
    (("method", "qlora, 8 bits"), ("DoRA", "yes")),   # on a CPU
    (("modules_to_save", "embed_tokens"), ("train_tokens", "<|im_end|>")),
    (("modules_to_save", "lm_head"), ("train_tokens", "<|im_end|>")),
    (("evaluation", "never"), ("choice", "best")), (("evaluation", "never"), ("choice", "early stopping")),
    (("schedule", "reduce_lr_on_plateau"), ("evaluation", "never")),
    *product([("method", "qlora"), ("method", "qlora, 8 bits")],
             [("processes", "2, ZeRO-3"), ("processes", "2, FSDP2")]),
    *product([("optimiser", "adafactor"), ("optimiser", "paged_adamw_8bit")], [("processes", "2, FSDP2")]),
    *product([("attention", "sdpa"), ("attention", "eager"), ("layout", "padded"), ("layout", "grouped")],
             [("processes", "2, shared rows")]),
}
ALONE = [   # values that cannot run here, combined with defaults
    dict(optim="lomo"), dict(optim="galore_adamw"), dict(lr_scheduler_type="warmup_stable_decay"),
    dict(lr_scheduler_type="cosine_with_min_lr"), dict(lr_scheduler_type="polynomial", learning_rate=1e-8),
    dict(method="qlora", modules_to_save=("q_proj",)), dict(method="qlora", init_lora_weights="pissa"),
    dict(max_tokens_per_batch=160, group_by_length=True), dict(num_train_epochs=0, max_steps=-1),
    dict(padding_free=False, max_tokens_per_batch=160), dict(dtype="float16"), dict(kernels="compile"),
    dict(kernels="liger"), dict(gradient_checkpointing=True, activation_offloading=True), dict(fsdp=True),
    dict(deepspeed="zero2"), dict(sequence_parallel_size=2),
]
THREE_STEPS = dict(
    max_samples=24, max_steps=3, num_train_epochs=4, per_device_train_batch_size=2, logging_steps=1, save_total_limit=9,
    preflight=True, learning_rate=5e-3, max_new_tokens=4)


def pairs_of(row:dict)->set:
    "The pairs of values in a row, which maps factor -> value"
    return set(combinations(row.items(), 2))


def wanted()->set:
    "All pairs of values of two factors, except those that are refused"
    each = [[(factor, value) for value in values] for factor, values in FACTORS.items()]
    return {(a, b) for one, two in combinations(each, 2) for a in one for b in two} - FORBIDDEN


def array()->list[dict]:
    "Rows that cover every wanted pair"
    from allpairspy import AllPairs
    most_first = sorted(FACTORS, key=lambda factor: -len(FACTORS[factor]))
    def in_order(values)->dict:
        given = dict(zip(most_first, values))
        return {factor: given[factor] for factor in FACTORS if factor in given}
    values = AllPairs([[*FACTORS[f]] for f in most_first], filter_func=lambda some: is_allowed(in_order(some)))
    rows = [in_order(row) for row in values]
    return cheaper(rows + completed(wanted() - met(rows)))


def is_allowed(row:dict)->bool: return not pairs_of(row) & FORBIDDEN


def met(rows:list[dict])->set:
    "The pairs covered by all rows"
    return set().union(*map(pairs_of, rows))


def cheaper(rows:list[dict])->list[dict]:
    "The same pairs, with a second process or training only where a pair needs it"
    rows = list(rows)
    for k, factor in product(range(len(rows)), ("processes", "max_time")):
        less = rows[k] | {factor: next(iter(FACTORS[factor]))}
        if wanted() <= met([*rows[:k], less, *rows[k + 1:]]): rows[k] = less
    return rows


def completed(missing:set)->list[dict]:
    "Rows for the pairs missing from a greedy array: defaults, with as many of those pairs as are compatible"
    rows, left = [], sorted(missing)
    while left:
        row = {}
        for pair in left:
            more = row | dict(pair)
            if all(row.get(f, v) == v for f, v in pair) and is_allowed(with_defaults(more)): row = more
        rows.append(with_defaults(row))
        left = [pair for pair in left if pair not in pairs_of(rows[-1])]
    return rows


def with_defaults(some:dict)->dict: return {f: some.get(f, next(iter(values))) for f, values in FACTORS.items()}


def settings_of(row:dict)->dict:
    "The settings of a row for `load_config`"
    return {name: value for factor, chosen in row.items() for name, value in FACTORS[factor][chosen].items()}


def config(folder:Path, settings:dict):
    from learner import small
    return small(folder, **THREE_STEPS | settings)


def trained(cfg):
    "Train a run of the config, in as many processes as it requests"
    from sft_nb.training.launch import launch
    from sft_nb.training.train import train
    if cfg.num_processes == 1: return train(cfg)
    return ended(launch(cfg))


def ended(run):
    "Wait for a launched run to end; `SftError` with its reason if it failed"
    from sft_nb.base.report import SftError
    run.wait()
    if run.status.state != "failed": return run
    raise SftError(run.name, run.status.reason, "a run that ends", run.status.fix)


def continued(run):
    "Resume the run"
    from sft_nb.runs.directory import start_process
    from sft_nb.training.train import resume
    return resume(run) if run.config.num_processes == 1 else ended(start_process(run))


def killed(run, folder:Path):
    "A copy of a run in the state of being killed after its first checkpoint"
    from sft_nb.runs.directory import Run
    shutil.copytree(run.path, folder/"killed")
    copy = Run(folder/"killed")
    first, *later = copy.checkpoints()
    for checkpoint in later: shutil.rmtree(checkpoint)
    shutil.rmtree(copy.adapter)
    copy.set_status("running", step=int(first.name.split("-")[1]))
    return copy


def weights(run)->dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(run.adapter.glob("*.safetensors"))}


def look(folder:Path, settings:dict)->str:
    "Train, kill, resume, compare, evaluate and merge; return what is wrong, empty if nothing"
    from sft_nb.evaluation.evaluate import evaluate
    from sft_nb.proof.merge import merge
    limit = settings.get("max_time")
    run = trained(config(folder, settings | dict(max_time=None)))
    if limit: again = continued(trained(config(folder, settings | dict(run_name="stopped"))))
    else: again = continued(killed(run, folder))
    if [run.status.state, again.status.state] != ["finished"] * 2: return f"{run.status}, {again.status}"
    if weights(run) != weights(again): return "what was resumed ends with other bytes"
    evaluate(run, eval_samples=2, progress=False)
    merge(run, dtype=settings.get("dtype", "float32"), prompts=2)
    return ""


def attempt(settings:dict)->dict:
    "The outcome: trained, refused before a run was created, or failed; with the message and its origin"
    from sft_nb.base.report import SftError
    began, by = time.monotonic(), ""
    with tempfile.TemporaryDirectory(prefix="sft_nb-pairs-") as folder:
        runs = Path(folder)/"runs"
        try: says = look(runs, settings)
        except SftError as e:
            says = str(e)
            by = "preflight" if "preflight: " in says else "" if runs.exists() else "config"
        except Exception as e:
            says = f"{type(e).__name__}: {e}"
            traceback.print_exc()
    outcome = "refused" if by else "failed" if says else "trained"
    return dict(outcome=outcome, by=by, says=says.split("\n")[0][:400], seconds=round(time.monotonic() - began, 1))


def tried(rows:list[dict], alone:list[dict])->list[dict]:
    "The table: each row with its outcome"
    named = [(row, settings_of(row)) for row in rows]
    named += [({name: str(value) for name, value in settings.items()}, settings) for settings in alone]
    table = []
    for k, (row, settings) in enumerate(named):
        table.append(dict(row=row) | attempt(settings))
        print(f"{k + 1:>3} of {len(named)}: {table[-1]['outcome']:<8} {table[-1]['seconds']:>6} s  {settings}  "
              f"{table[-1]['says']}", flush=True)
    return table


def main()->int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows of the array, counted from 1; all without")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "SFT_NB_CACHE" not in os.environ:   # for prepared rows, and the models of these runs
        os.environ["SFT_NB_CACHE"] = tempfile.mkdtemp(prefix="sft_nb-pairs-cache-")
        atexit.register(shutil.rmtree, os.environ["SFT_NB_CACHE"], ignore_errors=True)
    rows = array()
    if options.rows: table = tried([rows[k - 1] for k in options.rows], [])
    else:
        table = tried([*rows, *map(dict, sorted(FORBIDDEN))], ALONE)
        made = dict(pairs=len(wanted()), rows=len(rows), table=table)
        options.out.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(any(line["outcome"] == "failed" for line in table))


if __name__ == "__main__": sys.exit(main())
