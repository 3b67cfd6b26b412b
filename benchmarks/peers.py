"""The same real job with sft_nb, TRL's SFTTrainer and transformers' Trainer: what each learns, and what it costs.

    python benchmarks/peers.py expert [nli ...] [--seeds 1 2 3] [--steps 40] [--rows 16] [--eval-samples 100]
    python benchmarks/peers.py defaults [nli units ...] [--rows 320] [--eval-samples 60] [--add] [--json]

`expert`: LoRA as an expert sets it, with the same settings for all: rows and their order, batch, steps, rank, learning
rate, schedule, weights in bfloat16 and the adapter in float32, no checkpointing. TRL gets `prompt` and `completion` as
messages, the Trainer the same tokens with labels. `--rows` are those of one step.
`defaults`: what the first example of each documentation gives, with one pass over `--rows` rows: sft_nb and TRL
(`trl`, all weights) get the model and `messages`; `trl_lora` is TRL's example with `LoraConfig()`; `plain` is
transformers' guide to fine-tuning, which learns the whole text.

Each training has a process of its own, and the tools take turns. `cpu_seconds` is what the training loop computed, with
one thread: its time on a quiet core; `process_cpu_seconds` has imports, loading, checks and saving as well. `peak_mib`
is of the whole process, `before_mib` until the first step. Each result is scored by the same code, on the same held-out
rows, with stock transformers and peft, in bfloat16: `loss` in nats per supervised token of sft_nb's encoding, and
greedy answers. `supervised` counts the labels that a tool learns, `after_end` those after the end token (the line break
of ChatML); `same_labels`: the others are those of sft_nb in every row. On a CPU, TRL computes the logits of every
token; on a GPU, only those of supervised ones. Writes benchmarks/results/peers_MODE_JOB.json after each training;
`--add` continues a file of the same sizes.
"""
import argparse, hashlib, json, os, random, statistics, sys, tempfile, time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")   # also that of the processes that train

from common import HERE, resident_mib, save
from real import in_own_process, JOBS

SAME = dict(   # settings that all three know
    learning_rate=3e-4, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.01, max_grad_norm=1.,
    optim="adamw_torch", gradient_checkpointing=False, gradient_accumulation_steps=1, logging_steps=10)
LORA = dict(r=16, lora_alpha=32, lora_dropout=0., target_modules="all-linear", task_type="CAUSAL_LM")
GUIDE = dict(   # transformers' guide to fine-tuning
    per_device_train_batch_size=2, gradient_accumulation_steps=8, gradient_checkpointing=True, bf16=True,
    learning_rate=2e-5, logging_steps=10)
TOOLS = dict(expert=("sft_nb", "trl", "plain"), defaults=("sft_nb", "trl", "trl_lora", "plain"))


def config(a:dict, **settings):
    from sft_nb.config.load import load_config
    return load_config(model="smollm2", seed=a["seed"], runs_dir=a["folder"] + "/runs", **settings)


def conversations(rows:list[dict], task, tokenizer)->list[list[dict]]:
    "The messages of each row, as sft_nb writes them for this tokenizer's template"
    from sft_nb.tokens.conversations import conversation
    from sft_nb.tokens.template import Template
    t = Template(tokenizer)
    return [[dict(role=m["role"], content=m["content"]) for m in t.adapt_messages(conversation(task, row, f"row {k}"))]
            for k, row in enumerate(rows)]


def training_rows(a:dict, task, tokenizer)->list[list[dict]]:
    "The rows of a run: a sample that depends on the seed"
    rows = JOBS[a["job"]].rows()[0]
    n = a["rows"] * a["steps"] if a["mode"] == "expert" else a["rows"]
    return conversations(random.Random(a["seed"]).sample(rows, min(n, len(rows))), task, tokenizer)


def clock(measured:dict):
    "A callback that measures the training loop and its steps"
    from transformers import TrainerCallback
    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            measured["before_mib"] = round(resident_mib())
            self.began = time.process_time(), time.perf_counter()
        def on_step_begin(self, *args, **kwargs): self.step = time.process_time()
        def on_step_end(self, *args, **kwargs):
            measured.setdefault("steps", []).append(time.process_time() - self.step)
        def on_train_end(self, args, state, control, **kwargs):
            cpu, wall = self.began
            measured.update(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall, n_steps=state.global_step)
    return Clock()


def train_sft_nb(a:dict, talks:list, tokenizer, measured:dict):
    from sft_nb.tokens.prepare import prepare
    from sft_nb.training.train import train
    settings = dict(num_train_epochs=1)
    if a["mode"] == "expert":
        settings = SAME | dict(
            method="lora", lora_r=LORA["r"], lora_alpha=LORA["lora_alpha"], lora_dropout=0., shuffle=False,
            per_device_train_batch_size=a["rows"], max_steps=a["steps"], max_length=4096)
    cfg = config(a, eval_samples=0, **settings)
    data = prepare(cfg, train=[dict(messages=talk) for talk in talks])
    run = train(cfg, data, callbacks=[clock(measured)])
    used = {name: getattr(run.config, name) for name in ("method", *SAME, "per_device_train_batch_size", "max_length")}
    return data.train.tokens, run.path/"adapter", used


def train_trl(a:dict, talks:list, tokenizer, measured:dict):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer
    if a["mode"] == "expert":
        rows = [dict(prompt=talk[:-1], completion=talk[-1:]) for talk in talks]
        args, lora = same_arguments(SFTConfig, a, max_length=None, model_init_kwargs=dict(dtype="bfloat16")), LORA
    else:
        rows = [dict(messages=talk) for talk in talks]
        args, lora = SFTConfig(**run_arguments(a)), {} if a["tool"] == "trl_lora" else None
    trainer = SFTTrainer(model=a["base"], args=args, train_dataset=Dataset.from_list(rows),
                         peft_config=None if lora is None else LoraConfig(**lora))
    return trainer.train_dataset, *trained(trainer, a, measured)


def train_plain(a:dict, talks:list, tokenizer, measured:dict):
    from peft import get_peft_model, LoraConfig
    from transformers import (
        AutoModelForCausalLM, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, set_seed, Trainer,
        TrainingArguments)
    set_seed(a["seed"])
    model = AutoModelForCausalLM.from_pretrained(a["base"], dtype="bfloat16")   # as the hub's, with `auto`
    if a["mode"] == "expert":
        model, args = get_peft_model(model, LoraConfig(**LORA)), same_arguments(TrainingArguments, a)
        rows, collator = [prompt_and_answer(talk, tokenizer) for talk in talks], DataCollatorForSeq2Seq(tokenizer)
    else:
        args = TrainingArguments(**run_arguments(a), **GUIDE)
        texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
        rows = [dict(tokenizer(text, truncation=True, max_length=512, add_special_tokens=False)) for text in texts]
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collator)
    learned = [row if "labels" in row else dict(labels=collator([row])["labels"][0].tolist()) for row in rows]
    return learned, *trained(trainer, a, measured)


def prompt_and_answer(talk:list[dict], tokenizer)->dict:
    "Ids, and labels with -100 on the prompt, as is usual"
    prompt = tokenizer.apply_chat_template(talk[:-1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(talk, return_dict=False)
    return dict(input_ids=ids, labels=[-100] * len(prompt) + ids[len(prompt):], attention_mask=[1] * len(ids))


def run_arguments(a:dict)->dict:
    "Where to run, the budget, and no files or bars; bfloat16 without a GPU needs `use_cpu`"
    import torch
    return dict(output_dir=a["folder"] + "/out", num_train_epochs=1, seed=a["seed"], save_strategy="no", report_to=[],
                disable_tqdm=True, use_cpu=not torch.cuda.is_available())


def same_arguments(kind, a:dict, **more):
    "The settings of `expert`"
    return kind(**run_arguments(a) | SAME | more, per_device_train_batch_size=a["rows"], max_steps=a["steps"],
                train_sampling_strategy="sequential", bf16=True)


def trained(trainer, a:dict, measured:dict)->tuple[Path,dict]:
    trainer.add_callback(clock(measured))
    trainer.train()
    trainer.save_model(a["folder"] + "/saved")
    return Path(a["folder"])/"saved", {name: getattr(trainer.args, name) for name in
                                       (*SAME, "per_device_train_batch_size", "bf16", "max_length")
                                       if hasattr(trainer.args, name)}


def learned_labels(rows)->list[tuple[int,...]]:
    "The supervised tokens of each row; the first token of a row is never predicted"
    return [tuple(int(label) for label in row["labels"][1:] if label != -100) for row in rows]


def up_to_end(labels:tuple[int,...], end:int)->tuple[int,...]:
    "Labels without what a template writes after the last end token: here a line break, which sft_nb does not learn"
    return labels[:len(labels) - labels[::-1].index(end)] if end in labels else labels


def digest(labels:list[tuple[int,...]])->list[str]:
    return [hashlib.sha256(repr(row).encode()).hexdigest()[:12] for row in labels]


def train_one(a:dict)->dict:
    "Train with one tool: what it cost, and where the result is"
    from transformers import AutoTokenizer
    from sft_nb.tasks.core import get_task
    tokenizer, measured = AutoTokenizer.from_pretrained(a["base"]), {}
    talks = training_rows(a, get_task(JOBS[a["job"]].settings["task"]), tokenizer)
    train = dict(sft_nb=train_sft_nb, trl=train_trl, trl_lora=train_trl, plain=train_plain)[a["tool"]]
    rows, path, settings = train(a, talks, tokenizer, measured)
    labels = learned_labels(rows)
    ended = [up_to_end(row, tokenizer.eos_token_id) for row in labels]
    return dict(
        path=str(path), labels=digest(ended), settings={k: v if v is None or isinstance(v, (int, float, str, bool))
                                                         else str(v) for k, v in settings.items()},
        rows_given=len(talks), rows_learned=len(labels), supervised=sum(map(len, labels)),
        after_end=sum(map(len, labels)) - sum(map(len, ended)), steps=measured["n_steps"],
        cpu_seconds=round(measured["cpu"], 1), wall_seconds=round(measured["wall"], 1),
        cpu_seconds_per_step=round(statistics.median(measured["steps"]), 3),
        process_cpu_seconds=round(time.process_time(), 1), before_mib=measured["before_mib"],
        peak_mib=round(resident_mib()))


def score_one(a:dict, path:str|None)->dict:
    "Held-out loss and answers of a saved result, or of the base"
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from sft_nb.evaluation.generations import (
        answer_prompts, GenerationCache, losses_of, make_questions, score_generations)
    from sft_nb.tokens.tokenizer import load_tokenizer
    job = JOBS[a["job"]]
    is_adapter = path is not None and (Path(path)/"adapter_config.json").exists()
    weights = a["base"] if is_adapter or path is None else path
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    if is_adapter: model = PeftModel.from_pretrained(model, path)
    cfg = config(a, task=job.settings["task"])
    tokenizer = load_tokenizer(cfg)
    rows = {f"row {k}": row for k, row in enumerate(job.rows()[1][:a["eval_samples"]])}
    questions = make_questions(cfg, tokenizer, rows, likelihood=True)
    answers = answer_prompts(model.eval(), tokenizer, questions.prompts, [""] * len(rows), GenerationCache(None),
                             **questions.limits, batch_size=32)
    s = score_generations(a["tool"], questions, answers, losses_of(model, questions))
    low, high = s.interval
    figures = {name: round(float(s.figures[name]), 4) for name in job.figures if name in s.figures}
    return dict(loss=round(float(s.figures["loss"]), 4), accuracy=round(float(s.accuracy), 4),
                interval=[round(float(low), 4), round(float(high), 4)], n=s.n, stopped=round(float(s.ended), 4),
                **figures, score_cpu_seconds=round(time.process_time(), 1),
                answers=[x.text[:60] for x in s.answers[:3]])


def base_folder()->str:
    "The folder of the base, which all tools load"
    from sft_nb.config.bases import choose_base, dequantised
    name = choose_base("smollm2")
    return str(dequantised(name) or name)


def summary(runs:list[dict])->dict:
    "Of each tool the medians over seeds; `ratio`: its cost / that of sft_nb with the same seed"
    found = {}
    for tool in dict.fromkeys(r["tool"] for r in runs):
        own = [r for r in runs if r["tool"] == tool]
        names = ("loss", "accuracy", "cpu_seconds", "cpu_seconds_per_step", "process_cpu_seconds", "peak_mib")
        found[tool] = {name: round(statistics.median(r[name] for r in own), 4) for name in names if name in own[0]}
        ours = {r["seed"]: r for r in runs if r["tool"] == "sft_nb"}
        pairs = [(r, ours[r["seed"]]) for r in own if r["seed"] in ours and tool not in ("sft_nb", "base")]
        for name in ("cpu_seconds", "process_cpu_seconds", "peak_mib") if pairs else ():
            found[tool][f"{name}_ratio"] = round(statistics.median(r[name] / our[name] for r, our in pairs), 2)
    return found


def measure(mode:str, job:str, *, seeds:list[int], add:bool, **sizes)->dict:
    "Train with every tool and seed, in turns; the results are saved after each"
    name = f"peers_{mode}_{job}"
    file, runs = HERE/"results"/f"{name}.json", []
    if add and file.exists():
        before = json.loads(file.read_text())
        if before["sizes"] == sizes: runs = before["runs"]
    def is_known(tool:str, seed:int)->bool: return any((r["tool"], r["seed"]) == (tool, seed) for r in runs)
    base = base_folder()
    for seed in seeds:
        expected = None   # the labels of sft_nb with this seed, if it is trained now
        for tool in (*(["base"] if seed == seeds[0] else []), *TOOLS[mode]):
            if is_known(tool, seed): continue
            with tempfile.TemporaryDirectory() as folder:
                a = dict(mode=mode, job=job, tool=tool, seed=seed, base=base, folder=folder, **sizes)
                run = {} if tool == "base" else in_own_process(train_one, a)
                labels, path = run.pop("labels", None), run.pop("path", None)
                if tool == "sft_nb": expected = labels
                elif labels and expected: run["same_labels"] = labels == expected
                run = dict(tool=tool, seed=seed) | run | in_own_process(score_one, a, path)
            runs.append(run)
            result = save(name, mode=mode, job=job, task=JOBS[job].settings["task"], sizes=sizes,
                          same=SAME | dict(lora=LORA) if mode == "expert" else {}, summary=summary(runs), runs=runs)
            print(f"{job}, seed {seed}, {tool}: loss {run['loss']}, accuracy {run['accuracy']:.1%}"
                  + (f"; {run['cpu_seconds']:.0f} CPU s in {run['steps']} steps, {run['peak_mib']:,} MiB"
                     if "cpu_seconds" in run else ""), file=sys.stderr, flush=True)
    return result


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("mode", choices=list(TOOLS))
    p.add_argument("jobs", nargs="*", default=["nli"], help=", ".join(JOBS))
    p.add_argument("--seeds", type=int, nargs="+", default=[1])
    p.add_argument("--steps", type=int, default=40, help="of `expert`")
    p.add_argument("--rows", type=int, help="of one step (expert, 16), or of the one pass (defaults, 320)")
    p.add_argument("--eval-samples", type=int, default=100)
    p.add_argument("--add", action="store_true", help="keep the trainings that the file of results has")
    p.add_argument("--json", action="store_true", help="print one JSON object a job and nothing else")
    a = p.parse_args()
    if unknown := {*a.jobs} - {*JOBS}: p.error(f"there is no job {', '.join(unknown)}; the jobs are {', '.join(JOBS)}")
    rows = a.rows or (16 if a.mode == "expert" else 320)
    for job in a.jobs:
        with redirect_stderr(StringIO() if a.json else sys.stderr):
            result = measure(a.mode, job, seeds=a.seeds, add=a.add, steps=a.steps, rows=rows,
                             eval_samples=a.eval_samples)
        if a.json:
            print(json.dumps(result))
            continue
        for tool, s in result["summary"].items():
            print(f"{job:<6} {tool:<9} " + "  ".join(f"{name} {value:g}" for name, value in s.items()))


if __name__ == "__main__": main()
