"""The command line as a new user sees it, wrong arguments first."""
import io, json, os, re, shlex, shutil, signal, subprocess, sys, time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from learner import learner

from sft_nb.cli import evaluation, main
from sft_nb.extras.cli.commands import complete

pytestmark = pytest.mark.usefixtures("warm_processes")

SFT_NB = [sys.executable, "-c", "import sys; from sft_nb.cli import main; sys.exit(main())"]


def small_model()->list[str]:
    "Options that replace the demo's model by the synthetic learner, with few rows and no samples"
    how = learner() | dict(max_samples=64, sample_steps=1000)
    return [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]


def shell(*args, cwd=None): return subprocess.run([*SFT_NB, *map(str, args)], capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def files(tmp_path):
    (tmp_path/"good.jsonl").write_text('{"question": "What is 1+1?", "answer": "#### 2"}\n' * 3)
    (tmp_path/"empty.jsonl").touch()
    (tmp_path/"broken.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": \n')
    (tmp_path/"fields.jsonl").write_text('{"utterance": "1+1?", "reply": "2"}\n')
    (tmp_path/"unreadable.py").write_text("class Broken(:\n")
    (tmp_path/"comma.py").write_text("from sft_nb.configs.default import *\nMAX_SEQ_LENGTH = 262144,\n")
    (tmp_path/"broken.yaml").write_text("seed: [1\n")
    (tmp_path/"list.yaml").write_text("- 1\n")
    (tmp_path/"folder").mkdir()
    (tmp_path/"cosin.yaml").write_text("seed: 1\nlr_scheduler_type: cosin\n")
    (tmp_path/"sft.sh").write_text("swift sft --model tiny --tuner_type lora --dataset good.jsonl\n")
    return tmp_path


WRONG = [  # arguments, exit code, what the message says
    (["train", "--config", "gms8k"], 2, ["config 'gms8k'", "gsm8k", "Fix: --config gsm8k"]),
    (["train", "--lerning-rate", "1"], 2, ["--lerning-rate", "--learning-rate"]),
    (["train", "--config", "comma.py"], 2,
     ["comma.py:2", "the comma at the end makes it one", "Fix: MAX_SEQ_LENGTH = 262144"]),
    (["train", "--method", "qlorra"], 2, ["--method", "qlora"]),
    (["train", "--max-length", "long"], 2, ["--max-length", "long"]),
    (["train", "--model", "./nowhere"], 2, ["./nowhere", "cannot be loaded"]),
    (["train", "--task", "algebra"], 2, ["no such task", "arithmetic, chat, classify, gsm8k"]),
    (["train", "--device", "cuda"], 2, ["device cuda", "Fix: --device auto"]),
    (["train", "--train-file", "missing.jsonl"], 1, ["missing.jsonl", "there is no such file"]),
    (["train", "--train-file", "empty.jsonl"], 1, ["empty.jsonl", "there is no row in it"]),
    (["train", "--train-file", "broken.jsonl"], 1, ["broken.jsonl line 2", "not valid JSON"]),
    (["train", "--train-file", "fields.jsonl"], 1,
     ["fields.jsonl line 1", "it has the fields utterance, reply", "no format has those"]),
    (["data", "--train-file", "good.jsonl", "--max-length", "4"], 1,
     ["longer than 4 tokens: nothing is left to learn", "--max-length "]),
    (["data", "--train-file", "good.jsonl", "--max-length", "8", "--on-long", "error"], 1,
     ["good.jsonl line 1", "max_length is 8"]),
    (["evaluate", "runs/none"], 2, ["no such directory"]),
    (["evaluate"], 2, ["run"]),
    (["evaluate", "--model", "./outputs/x"], 2, ["outputs/x", "no such directory"]),
    (["evaluate", "--checkpoint", "./x/checkpoint-400", "--num_samples", "50"], 2, ["no such directory"]),
    (["test_model.py", "--model", "./outputs/x"], 2, ["Fix: sft_nb evaluate --model ./outputs/x"]),
    (["eval_all_checkpoints.sh", "runs/x"], 2, ["Fix: sft_nb sweep runs/x"]),
    (["launch_train.sh"], 2, ["Fix: sft_nb train"]),
    (["train", "--resume", "runs/none"], 2, ["no such directory"]),
    (["train", "--resume", "runs/none", "--lr", "1e-3"], 2,
     ["--learning-rate is also given", "sft_nb train --config runs/none/config.json --lr 1e-3"]),
    (["train", "--task", "chat"], 1, ["there is no file", "--train-file rows.jsonl"]),
    (["data", "--task", "gsm8k", "--train-file", "fields.jsonl"], 1,
     ["fields.jsonl line 1", "question, answer are missing", "the row has utterance, reply"]),
    (["data", "--train-file", "good.jsonl", "--data-format", "alpaca"], 1,
     ["good.jsonl line 1", "fields instruction, output are missing", "--data-format auto"]),
    (["data", "--train-file", "good.jsonl", "--train-weights", "1", "2"], 2,
     ["2 weights for 1 files", "Fix: --train-weights 1"]),
    (["data", "--train-file", "good.jsonl", "--train-weights", "-1"], 2, ["a weight is -1"]),
    (["data", "--train-file", "good.jsonl", "--eval-fraction", "1.5"], 2, ["eval_fraction must be below 1"]),
    (["data", "--train-file", "good.jsonl", "--chat-template", "no.jinja"], 2,
     ["chat_template 'no.jinja'", "there is no such file"]),
    (["data", "--train-file", "good.jsonl", "--cache-dir", "good.jsonl"], 2,
     ["cache_dir", "cannot be written", "Fix: --cache-dir /tmp/sft_nb"]),
    (["train", "--config", "demo", "--max-tokens-per-batch", "512", "--group-by-length"], 2,
     ["max_tokens_per_batch is set too"]),
    (["data", "--train-file", "."], 1, ["broken.jsonl line 2", "not valid JSON"]),
    (["data", "--train-file", "nobody/nothing:train"], 1,
     ["dataset 'nobody/nothing:train'", "cannot be loaded from the hub"]),
    (["train", "--resume", "runs/none", "--config", "demo"], 2, ["--config is also given"]),
    (["config", "--lr-scheduler-type", "cosin"], 2, ["'cosin' is not known", "Fix: --lr-scheduler-type cosine"]),
    (["config", "--deepspeed", "zero9"], 2, ["'zero9' does not exist; zero2, zero3", "Fix: --deepspeed zero2"]),
    (["config", "--report-to", "wandbb"], 2, ["'wandbb' is not known", "Fix: --report-to wandb"]),
    (["train", "cosin.yaml"], 2, ["nothing takes 'cosin.yaml'", "Fix: --config cosin.yaml"]),
    (["train", "sft.sh"], 2, ["nothing takes 'sft.sh'", "Fix: --config sft.sh"]),
    (["config", "cosin.yaml"], 2, ["cosin.yaml:2: lr_scheduler_type 'cosin'", "Fix: lr_scheduler_type: cosine"]),
    (["train", "--config", "demo", "--optim", "adamm"], 2, ["optim: 'adamm' is not known", "Fix: --optim "]),
    (["train", "--task", "unreadable:Broken"], 2, ["unreadable:Broken", "SyntaxError"]),
    (["train", "--config", "demo", "--eval-steps", "1", "--eval-samples", "0"], 2,
     ["eval_steps is 1 and eval_samples is 0"]),
    (["train", "--num-train-epochs", "inf"], 2, ["num_train_epochs", "a number"]),
    (["train", "--max-steps", "0"], 2, ["--max-steps 0", "Fix: --max-steps 1"]),
    (["train", "--max-steps", "five"], 2, ["--max-steps five", "Fix: --max-steps 100"]),
    (["train", "--max-steps"], 2, ["--max-steps has no value", "Fix: --max-steps 100"]),
    (["plan", "--device", "h20", "--lengths", "60"], 2, ["device 'h20'", "it is not in the list", "h200-141gb"]),
    (["plan", "--config", "demo", "--lengths", "300"], 2,
     ["integers from 1 to max_length", "Fix: --max-length 300"]),
    (["train", "--config", "demo", "--effective-batch-size", "7"], 2,
     ["effective_batch_size: it is 7", "a pass takes 16 rows"]),
    (["train", "--config", "demo", "--padding-free", "False", "--max-tokens-per-batch", "200"], 2,
     ["packed rows are flattened"]),
    (["train", "--config", "demo", "--method", "lora", "--load-in-8bit"], 2, ["load_in_8bit", "Fix: --method qlora"]),
    (["plan", "--config", "demo", "--lengths", "60", "--max-tokens-per-batch", "50"], 1,
     ["the longest row is 60 tokens", "--max-tokens-per-batch 60"]),
    (["train", "--config", "demo", "--attn-implementation", "flash_attention_2"], 2,
     ["it needs a CUDA device", "Fix: --attn-implementation auto"]),
    (["train", "--config", "demo", "--gradient-checkpointing", "maybe"], 2, ["--gradient-checkpointing", "maybe"]),
    (["train", "--config", "demo", "--init-lora-weights", "pissa", "--max-steps", "1"], 2,
     ["init_lora_weights 'pissa'", "Fix: --method lora"]),
    (["merge", "runs/none"], 2, ["no such directory"]),
    (["stop", "runs/none"], 2, ["no such directory", "sft_nb runs"]),
    (["runs", "--runs-dir", "nowhere"], 2, ["there is none", "sft_nb train --config demo"]),
    (["train", "--config", "demo", "--report-to", "mlflow"], 2,
     ["'mlflow' is not known", "wandb, tensorboard, trackio"]),
    (["train", "--config", "demo", "--early-stopping-patience", "2"], 2,
     ["there is no held-out loss", "Fix: --eval-steps 100"]),
    (["train", "--config", "demo", "--learning-rate", "0", "--max-samples", "40", "--eval-samples", "0"], 1,
     ["preflight: learning.learns", "learning_rate is 0"]),
    (["check", "--config", "demo", "--learning-rate", "0", "--max-samples", "40", "--eval-samples", "0"], 1,
     ["learning_rate is 0"]),
    (["train", "--batch-size", "4", "--per-device-train-batch-size", "8"], 2, ["are one setting"]),
    (["trian"], 2, ["no such command; the nearest is train. Fix: sft_nb train"]),
    (["finetune", __file__, "--max-steps", "2"], 2,
     [f"the nearest is train. Fix: sft_nb train --train-file {__file__} --max-steps 2"]),
    (["prepare", "--config", "demo"], 2, ["no such command; the nearest is data. Fix: sft_nb data --config demo"]),
    (["resume", "runs/a"], 2, ["no such command; the nearest is train --resume. Fix: sft_nb train --resume runs/a"]),
    (["sft"], 2, ["no such command", "Fix: sft_nb train"]),
    (["evaluate", "--run", "runs/a"], 2, ["the run stands without one. Fix: sft_nb evaluate runs/a"]),
    (["nosuch"], 2, ["no such command", "Fix: sft_nb --help"]),
    (["compare", "runs/a"], 2, ["b is missing", "Fix: sft_nb compare runs/a runs/OTHER"]),
    ([], 2, ["usage"]),
]
# line | exit code | what is found | what to do
MORE_WRONG = """
trane | 2 | there is no such command | sft_nb train
TRAIN | 2 | there is no such command | sft_nb --help
train demo | 2 | nothing takes 'demo' | --config demo
train --config demo --epoch 3 | 2 | --epoch is not an option | write --epochs
train --config demo --learning-rate 1e-4 1e-5 | 2 | 1e-4 1e-5 | --learning-rate 1e-4
train --config demo --learning-rate fast | 2 | --learning-rate fast | --learning-rate auto
train --config demo --learning-rate -1 | 2 | --learning-rate -1 | --learning-rate auto
train --config demo --learning-rate 2 | 2 | --learning-rate 2 | --learning-rate auto
train --config demo --lora-r 0 | 2 | --lora-r 0 | --lora-r 16
train --config demo --lora-r 1.5 | 2 | --lora-r 1.5 | --lora-r 1
train --config demo --lora-alpha -2 | 2 | --lora-alpha -2 | --lora-alpha 32
train --config demo --lora-dropout 10 | 2 | --lora-dropout 10 | --lora-dropout 0.1
train --config demo --weight-decay 10 | 2 | --weight-decay 10 | --weight-decay 0.1
train --config demo --num-train-epochs -1 | 2 | --num-train-epochs -1 | --num-train-epochs 3
train --config demo --max-length 0 | 2 | --max-length 0 | --max-length 512
train --config demo --max-length -5 | 2 | --max-length -5 | --max-length 512
train --config demo --batch-size 0 | 2 | --batch-size 0 | --batch-size 4
train --config demo --batch-size 1.5 | 2 | --per-device-train-batch-size | --per-device-train-batch-size
train --config demo --gradient-accumulation-steps 0 | 2 | --gradient-accumulation-steps | --gradient-accumulation-steps
train --config demo --warmup-steps -1 | 2 | --warmup-steps -1 | --warmup-steps 0.03
train --config demo --save-steps -1 | 2 | --save-steps -1 | --save-steps 200
train --config demo --save-steps epochs | 2 | --save-steps epochs | --save-steps epoch
train --config demo --logging-steps 0 | 2 | --logging-steps 0 | --logging-steps 10
train --config demo --seed x | 2 | --seed x | --seed 42
train --config demo --method full-lora | 2 | --method full-lora | --method lora
train --config demo --dtype fp15 | 2 | --dtype fp15 | --dtype auto
train --config demo --device gpu | 2 | --device gpu | --device cpu
train --config demo --on-long truncat | 2 | --on-long truncat | --on-long cut
train --config demo --cut-side middle | 2 | --cut-side middle | --cut-side end
train --config demo --on-bad-row skip | 2 | --on-bad-row skip | --on-bad-row drop
train --config demo --reasoning thinking | 2 | --reasoning thinking | --reasoning inline
train --config demo --train-on-turns first | 2 | --train-on-turns first | --train-on-turns all
train --config demo --train-on-prompt sometimes | 2 | --train-on-prompt sometimes | --no-train-on-prompt
train --config demo --num-processes 0 | 2 | --num-processes 0 | --num-processes 1
train --config demo --num-processes many | 2 | --num-processes many | --num-processes 1
train --config demo --fsdp maybe | 2 | --fsdp maybe | --fsdp
train --config demo --max-grad-norm -1 | 2 | --max-grad-norm -1 | --max-grad-norm 1
train --config demo --adam-beta2 1.5 | 2 | --adam-beta2 1.5 | --adam-beta2 0.999
train --config demo --lora-target-modules | 2 | --lora-target-modules has no value | --lora-target-modules all-linear
train --config demo --bnb-4bit-quant-type int4 | 2 | --bnb-4bit-quant-type int4 | --bnb-4bit-quant-type nf4
train --config demo --eval-samples -1 | 2 | --eval-samples -1 | --eval-samples 200
train --config demo --eval-samples few | 2 | --eval-samples few | --eval-samples 200
train --config demo --max-samples -1 | 2 | --max-samples -1 | no --max-samples
train --config demo --max-time soon | 2 | --max-time soon | leave --max-time out, or write a number
train --config demo --max-time -5 | 2 | --max-time -5 | no --max-time
train --config demo --neftune-noise-alpha x | 2 | --neftune-noise-alpha x | leave --neftune-noise-alpha out
train --config demo --bf16 --fp16 | 2 | dtype is set twice, to 'bfloat16' | keep bf16 or fp16, and delete the other
train --config demo --packing maybe | 2 | --packing maybe | leave --packing out
train --train-file good.jsonl --eval-fraction 2 | 2 | --eval-fraction 2 | --eval-fraction 0.02
train --train-file good.jsonl --max-samples 0 | 2 | --max-samples 0 | no --max-samples
train --config good.jsonl | 2 | this is not a .py, .yaml or .json file | --train-file good.jsonl
train --config folder | 2 | this is not a .py, .yaml or .json file | --config default
train --config broken.yaml | 2 | while parsing a flow sequence, | correct line 1, which is: seed
train --config list.yaml | 2 | it is a list | write one setting per line, such as max_length: 512
train --config demo --config gsm8k | 2 | --config is given twice | leave one out
train --resume | 2 | --resume has no value | --resume runs/NAME
train train_file=good.jsonl | 2 | nothing takes 'train_file=good.jsonl' | --train-file good.jsonl
train --data good.jsonl | 2 | --data is not an option | --train-file good.jsonl
train --validation a.jsonl b.jsonl | 2 | --validation is not an option | --eval-file rows.jsonl
check lora-r=8 | 2 | nothing takes 'lora-r=8' | --lora-r 8
train --resume folder | 2 | there is no config.json in it | sft_nb runs
train --resume good.jsonl | 2 | there is no such directory | sft_nb runs
train --resume runs/none --from checkpoint-3 | 2 | there is no such directory | sft_nb runs
config gsm8kk | 2 | no config and no file has this name | --config gsm8k
config --config demo --lora_rr 3 | 2 | --lora_rr is not an option | write --lora-r
config --config demo --nothing 3 | 2 | --nothing is not an option | sft_nb config --help
data --train-file | 2 | --train-file has no value | --train-file rows.jsonl
data --train-file empty.jsonl | 1 | there is no row in it | look at empty.jsonl, and at the step that wrote it
data --train-file good.jsonl --show many | 2 | --show many | --show 0
data --train-file good.jsonl --show -1 | 2 | --show is -1 | --show 0
data --train-file good.jsonl --dropped x | 2 | --dropped x | --dropped 0
data --config demo --system You | 2 | --system is not an option | write --system-prompt
data --config demo --nonsense | 2 | --nonsense is not an option | sft_nb data --help
check --config nosuch | 2 | no config and no file has this name | --config default
check --config nosuch.yaml | 2 | no config and no file has this name | ls .
check --config demo --show 3 | 2 | --show is not an option | sft_nb check --help
check --config demo --max-length | 2 | --max-length has no value | --max-length 512
evaluate good.jsonl | 2 | it is a file | sft_nb runs
evaluate folder | 2 | there is no run and no model in it | sft_nb runs
merge runs/none --output x | 2 | --output is not an option; the nearest is --out | write --out
evaluate runs/none --eval-samples x | 2 | --eval-samples x | leave --eval-samples out, or write an integer
evaluate runs/none --max-new-tokens 0 | 2 | there is no such directory | sft_nb runs
evaluate runs/none --temperature hot | 2 | --temperature is not an option | sft_nb evaluate --help
evaluate a b | 2 | nothing takes 'b' | sft_nb evaluate --help
evaluate runs/none --checkpoint 5 | 2 | there is no such directory | sft_nb runs
sweep | 2 | run is missing | sft_nb sweep runs/NAME
sweep runs/none | 2 | there is no such directory | sft_nb runs
sweep folder --follow x | 2 | nothing takes 'x' | sft_nb sweep --help
compare | 2 | a is missing | sft_nb compare runs/NAME runs/OTHER
compare runs/a runs/b | 2 | there is no such directory | sft_nb runs
compare runs/a runs/b runs/c | 2 | nothing takes 'runs/c' | --model runs/c
compare a b --nothing | 2 | --nothing is not an option | sft_nb compare --help
replay runs/none | 2 | --step is missing | --step VALUE
replay runs/none --step 3 | 2 | there is no such directory | sft_nb runs
replay runs/none --step 3 --without a | 2 | 'a' is not a number of a row | --without 3 4
explain runs/none | 2 | there is no such directory | sft_nb runs
merge | 2 | run is missing | sft_nb merge runs/NAME
merge folder | 2 | there is no config.json in it | sft_nb runs
merge runs/none --out x | 2 | there is no such directory | sft_nb runs
merge runs/none --dtype int3 | 2 | --dtype int3 | --dtype bfloat16
merge good.jsonl | 2 | there is no such directory | sft_nb runs
prove | 2 | run is missing | sft_nb prove runs/NAME
prove runs/none | 2 | there is no such directory | sft_nb runs
prove folder --server notaurl | 2 | there is no config.json in it | sft_nb runs
prove good.jsonl | 2 | there is no such directory | sft_nb runs
generate runs/none | 2 | --prompt is missing | --prompt 'A question?'
chat runs/none | 2 | there is no such directory | sft_nb runs
report runs/none | 2 | there is no such directory | sft_nb runs
report | 2 | run is missing | sft_nb report runs/NAME
runs a b | 2 | there is no such directory | sft_nb runs
runs ../x | 2 | there is no such directory | sft_nb runs
runs --runs-dir good.jsonl | 2 | there is none | sft_nb train --config demo
runs --sort bogus | 2 | --sort is not an option | sft_nb runs --help
runs --state sleeping | 2 | --state is not an option | sft_nb runs --help
stop | 2 | run is missing | sft_nb stop runs/NAME
stop folder | 2 | there is no config.json in it | sft_nb runs
stop runs/none --timeout soon | 2 | --timeout soon | --timeout 120
stop runs/none --now | 2 | --now is not an option | sft_nb stop --help
search --config demo --trials 0 | 2 | no values are named | sft_nb search --learning-rate 1e-4 3e-4
completion | 2 | no shell is named; one of bash, zsh, fish | sft_nb completion bash
completion csh | 2 | there is no script for 'csh' | sft_nb completion bash
search | 2 | no values are named | sft_nb search --learning-rate 1e-4 3e-4
demo --steps x | 2 | there is no such command | sft_nb --help
demo --nothing | 2 | there is no such command | sft_nb --help
serve runs/none | 2 | merge, whose folder vLLM and others serve | sft_nb merge runs/none
help trian | 2 | there is no such command | sft_nb --help
--verison | 2 | there is no such command | sft_nb --help
--hlep | 2 | there is no such command | sft_nb --help
-x | 2 | there is no such command | sft_nb --help
train -x | 2 | -x is not an option | sft_nb train --help
train -h3 | 2 | -h3 is not an option | sft_nb train --help
train --config demo --trust-remote-code maybe | 2 | --trust-remote-code maybe | --trust-remote-code
train --config demo --router-aux-loss-coef -1 | 2 | --router-aux-loss-coef -1 | no --router-aux-loss-coef
train --config demo --sequence-parallel-size 0 | 2 | --sequence-parallel-size 0 | --sequence-parallel-size 1
train --config demo --early-stopping-patience 0 | 2 | --early-stopping-patience 0 | no --early-stopping-patience
train --config demo --eval-steps -1 | 2 | --eval-steps -1 | no --eval-steps
train --config demo --label-smoothing 2 | 2 | --label-smoothing is not an option | sft_nb train --help
train --model tiny --train-file good.jsonl --model | 2 | --model has no value | --model tiny
train --model | 2 | --model has no value | --model tiny
train --config demo --max-steps 1e3x | 2 | --max-steps 1e3x | --max-steps 1000
train --config demo --num-workers -1 | 2 | --num-workers -1 | --num-workers auto
""".strip().splitlines()
for entry in MORE_WRONG:
    line, code, *says = entry.split(" | ")
    WRONG.append((line.split(), int(code), says))


@pytest.mark.parametrize("args,code,says", WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_wrong_uses_are_clear_and_write_nothing(files, args, code, says, monkeypatch, capfd):
    monkeypatch.chdir(files)
    try: found = main([*map(str, args)])   # in this process: to load torch takes longer than to say what is wrong
    except SystemExit as e: found = e.code
    text = " ".join("".join(capfd.readouterr()).replace("│", " ").split())
    assert found == code, text
    assert all(s in text for s in says), text
    assert "Traceback" not in text and not (files/"runs").exists()


def test_a_run_name_that_is_taken(trained):
    done = shell("train", "--config", "demo", "--runs-dir", trained.path.parent, "--run-name", trained.name)
    stem = trained.name.rsplit("-", 1)[0]
    assert done.returncode == 2 and f"--run-name {stem}-2" in done.stderr
    assert "already exists (finished at step 60)" in done.stderr


def test_data_as_json_is_one_object(files):
    done = shell("data", "--train-file", files/"good.jsonl", "--eval-samples", 5, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["figures"]["train"]["rows_kept"] == 3
    statuses = {f["check"]: f["status"] for f in report["findings"]}
    assert statuses == dict(train_dropped="ok", train_ends="ok", train_duplicates="warn", held_out="skipped")


def test_data_shows_what_is_left_out(files):
    long = json.dumps(dict(question="one " * 200, answer="1"))
    (files/"long.jsonl").write_text(long + "\n" + (files/"good.jsonl").read_text())
    done = shell("data", "--train-file", files/"long.jsonl", "--max-length", 128, "--eval-samples", 0, "--dropped", 3)
    assert "long.jsonl line 1: longer than max_length 128: " in done.stdout and done.returncode == 0
    assert "\n1 of 1 dropped row shown:\n" in done.stdout and "--dropped" not in done.stdout
    done = shell("data", "--train-file", files/"long.jsonl", "--eval-file", files/"long.jsonl", "--max-length", 128,
                 "--dropped", 1)
    assert "\n2 of 2 dropped rows shown:\n" in done.stdout   # of each side


def test_data_says_that_a_config_of_another_tool_was_translated(files):
    lines = ("base_model: tiny", "model_type: LlamaForCausalLM", "sequence_len: 256", "datasets:",
             f"  - path: {files/'good.jsonl'}", "    type: alpaca_chat.load_qa")
    (files/"axolotl.yml").write_text("\n".join(lines) + "\n")
    done = shell("data", "--config", files/"axolotl.yml")
    assert done.returncode == 0, done.stderr
    assert "1 setting of another tool without an effect here" in done.stdout, done.stdout
    assert f"each is listed by: sft_nb config {files/'axolotl.yml'}" in done.stdout


def test_data_shows_the_mask_in_brackets_in_a_pipe_too(files):
    shown = ("--train-file", files/"good.jsonl", "--eval-samples", 0, "--show", 2)
    done = shell("data", *shown)
    assert done.stdout.count("[[") == 2 and "<|im_end|>]]" in done.stdout and "\x1b" not in done.stdout
    assert "\n2 of 3 examples shown:\n" in done.stdout
    first, _ = json.loads(shell("data", *shown, "--json").stdout)["shown"]
    assert first["text"] in done.stdout
    assert f"{first['where']}: {first['supervised']} of {first['tokens']} tokens are supervised" in done.stdout


def test_config_prints_values_and_sources(files):
    done = shell("config", "gsm8k", "--batch-size", 8, "--no-wandb")
    for says in ("sft_nb/configs/gsm8k.py:", "per_device_train_batch_size  8", "command line"):
        assert says in done.stdout
    everything = json.loads(shell("config", "--json").stdout)
    assert everything["sources"]["lora_r"] == "default" and everything["config"]["lora_r"] == 16
    assert len(shell("config", "gsm8k", "--all").stdout.splitlines()) == len(everything["config"])


@pytest.mark.parametrize("words", [["--padding-free", "false"], ["--padding-free=False"], ["--padding-free", "FALSE"]])
def test_true_and_false_are_read_in_any_case_beside_auto(words, capsys):
    assert main(["config", "--config", "demo", *words]) == 0
    assert "padding_free                 False" in capsys.readouterr().out


def test_evaluate_as_json(trained):
    done = shell("evaluate", trained.path, "--eval-samples", 8, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["base"]["n"] == result["tuned"]["n"] == 8
    assert len(result["tuned"]["answers"]) == 8


def test_max_time_stops_and_resume_goes_on(tmp_path):
    named = ["train", "--config", "demo", "--runs-dir", tmp_path, "--run-name", "x"]
    first = shell(*named, *small_model(), "--max-steps", 8, "--max-time", 0, "--eval-samples", 4, "--no-preflight")
    assert first.returncode == 0, first.stderr
    assert f"Continue with: sft_nb train --resume {tmp_path}/x" in first.stdout, first.stdout
    assert f"sft_nb evaluate {tmp_path}/x" in first.stdout
    again = shell(*named)
    assert again.returncode == 2 and f"sft_nb train --resume {tmp_path}/x" in again.stderr
    second = shell("train", "--resume", tmp_path/"x", "--examples", 1)
    assert second.returncode == 0 and "4 held-out rows" in second.stdout, second.stdout + second.stderr
    assert json.loads((tmp_path/"x/status.json").read_text())["state"] == "finished"


def test_a_task_of_ones_own_lies_where_the_command_is_given(files):
    (files/"capitals.py").write_text("""from sft_nb.tasks.core import Score
class Capitals:
    name, fields = "capitals", ("country", "capital")
    def rows(self, split, *, n=None, seed=42): return [dict(country="Peru", capital="Lima")] * 5
    def messages(self, row):
        return [dict(role="user", content=row["country"]), dict(role="assistant", content=row["capital"])]
    def score(self, text, row): return Score(text == row["capital"], text, row["capital"])
""")
    done = shell("data", "--task", "capitals:Capitals", "--max-samples", 3, "--json", cwd=files)
    assert done.returncode == 0 and json.loads(done.stdout)["figures"]["train"]["rows_read"] == 3, done.stderr


def test_a_run_is_repeated_from_its_config_under_another_name(trained, files):
    done = shell("train", "--config", trained.path/"config.json", *small_model(), "--max-steps", 1,
                 "--eval-samples", 0, "--runs-dir", files/"again", "--run-name", "x", "--no-preflight")
    assert done.returncode == 0 and (files/"again/x/adapter").exists(), done.stderr
    done = shell("train", "--config", files/"again/x/config.json")
    assert done.returncode == 0 and (files/"again/arithmetic-learner-1/adapter").exists(), done.stderr


PRINTS_AND_ENDS_WITH_3 = """import sys
from sft_nb.cli import console
console.COMMANDS["say"] = lambda args: [print("x" * 100_000), print("more"), 3][-1]
sys.exit(console.main(sys.argv[1:]))"""

@pytest.mark.parametrize("line, code", [("say", 3), ("--help", 0), ("train --help", 0), ("runs --rooot x", 2)])
@pytest.mark.parametrize("stdout", ["| true", ">&-"])
def test_a_reader_that_goes_away_does_not_change_the_exit_code(line, code, stdout):
    "`true` ends without reading; the shell closes the other stream before the command starts"
    command = f"{shlex.join([sys.executable, '-c', PRINTS_AND_ENDS_WITH_3])} {line} {stdout}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Broken" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_full_disk_is_not_a_reader_that_goes_away():
    command = [sys.executable, "-c", PRINTS_AND_ENDS_WITH_3, "say"]
    with open("/dev/full", "w") as full: done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr


def test_ctrl_c_is_written_down(tmp_path):
    line = f"train --config demo --runs-dir {tmp_path} --run-name x --save-steps 1 --no-preflight"
    line = [*line.split(), *small_model(), "--num-train-epochs", "99"]   # it is not finished before
    child = subprocess.Popen([*SFT_NB, *line], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.time() + 600
    while not list(tmp_path.glob("x/checkpoints/*/checkpoint.json")) and time.time() < deadline: time.sleep(.2)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=600)
    status = json.loads((tmp_path/"x/status.json").read_text())
    assert child.returncode == 130 and status["state"] == "stopped" and status["reason"] == "Ctrl-C"
    assert f"--resume {tmp_path}/x" in out
    assert (tmp_path/f"x/checkpoints/checkpoint-{status['step']}").exists()


CTRL_C_IN_AN_IMPORT = """
import os, signal, sys, time
from pathlib import Path
from sft_nb.cli import console
sys.path.insert(0, sys.argv.pop(1))
def surprise(args):
    try: import interrupted
    except BaseException as e: raise ImportError("as numpy and torch say it") from e
    time.sleep(9)
console.COMMANDS["config"] = surprise
sys.exit(console.main())
"""


WRITES_A_FILE = """
import sys
from pathlib import Path
from sft_nb.cli import console
console.COMMANDS["config"] = lambda args: Path(sys.argv[2]).write_text("x") and 0
sys.exit(console.main())
"""


@pytest.mark.parametrize(("umask", "mode"), [(0o777, 0o600), (0o227, 0o640), (0o022, 0o644)])
def test_what_it_writes_is_ones_own_to_read_and_change(umask, mode, tmp_path):
    "A umask that keeps files from their owner would make a folder of which the next step can write nothing"
    command = [sys.executable, "-c", WRITES_A_FILE, "config", str(tmp_path/"x")]
    assert subprocess.run(command, umask=umask, timeout=60).returncode == 0
    assert (tmp_path/"x").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("times", (1, 2))
def test_ctrl_c_waits_for_an_import_and_a_second_one_does_not(times, tmp_path):
    kill = "os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path/"interrupted.py").write_text(f"import os, signal\n{kill * times}print('imported', flush=True)\n")
    command = [sys.executable, "-c", CTRL_C_IN_AN_IMPORT, str(tmp_path), "config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    told = ("imported", "sft_nb: stopped") if times == 1 else ("", "")
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (130, *told)


def test_a_command_that_is_done_with_its_last_import_ends_as_it_would(tmp_path):
    "Its exit is slower than the alarm that looks whether the import is over"
    (tmp_path/"interrupted.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    script = CTRL_C_IN_AN_IMPORT.replace("time.sleep(9)", "return 0") + "\n"
    script = script.replace("sys.exit(console.main())", "code = console.main()\ntime.sleep(.2)\nsys.exit(code)")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), "config"], capture_output=True, text=True,
                          timeout=60)
    assert (done.returncode, done.stderr.strip()) in ((0, ""), (130, "sft_nb: stopped"))


def test_ctrl_c_in_the_evaluation_says_that_the_training_is_finished(trained, capsys):
    for by, code in (("", 130), ("SIGTERM", 143)):
        e = KeyboardInterrupt()
        e.by = by
        with patch("sft_nb.cli.commands._start_training", return_value=trained), \
                patch("sft_nb.evaluation.evaluate.evaluate", side_effect=e):
            assert main(["train", "--config", "demo"]) == code
        said = capsys.readouterr().err.strip()
        assert said.endswith(f"stopped; the training is finished; to score it: sft_nb evaluate {trained.path}")


def test_bash_completes_commands_options_configs_and_runs(tmp_path):
    (tmp_path/"runs/demo-1").mkdir(parents=True)
    (tmp_path/"runs/demo-1/config.json").write_text("{}")
    script = f"sft_nb() {{ {sys.executable} -m sft_nb \"$@\"; }}; eval \"$(sft_nb completion bash)\"\n"
    for words, found in ((["tra"], ["train"]), (["merge", ""], ["runs/demo-1"]), (["plan", "--card", ""], []),
                         (["train", "--config", "=", "gsm"], ["gsm8k"]), (["check", "--no-pref"], ["--no-preflight"])):
        typed = shlex.join(["sft_nb", *words])
        script += f"COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _sft_nb; echo \"${{COMPREPLY[*]}}\"\n"
        (tmp_path/"found").open("a").write(f"{' '.join(found)}\n")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | dict(PYTHONPATH=os.getcwd()))
    assert done.stdout == (tmp_path/"found").read_text(), done.stderr


def test_a_word_before_an_equal_sign_may_be_missing():
    assert complete(["=", "x"]) == complete(["", "=", ""]) == []


def test_a_folder_that_was_removed(tmp_path, monkeypatch, capsys):
    (tmp_path/"gone").mkdir()
    monkeypatch.chdir(tmp_path/"gone")
    (tmp_path/"gone").rmdir()
    assert main(["config", "demo"]) == 2
    assert capsys.readouterr().err == "sft_nb: working folder: it was removed; a folder that exists. Fix: cd.\n"


def test_python_without_docstrings():
    done = subprocess.run([sys.executable, "-OO", *SFT_NB[1:], "config", "demo"], capture_output=True, text=True)
    assert done.returncode == 2 and "it runs without docstrings (-OO)" in done.stderr


@pytest.mark.parametrize("stdin, answers", [(None, 0), (b"hi\n\xff\n", 2), (b"", 0)])
def test_a_chat_with_a_closed_or_odd_input(stdin, answers, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "_make_asker", lambda options: lambda chats: [SimpleNamespace(text="yes")])
    monkeypatch.setattr("sys.stdin", stdin and io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert main(["chat", "runs/x"]) == 0
    assert capsys.readouterr().out == "yes\n" * answers


def test_an_example_of_a_needed_number(capsys):
    assert main(["replay", "runs/x", "--step", "\u00b2"]) == 2
    assert "step takes an integer. Fix: --step 1." in capsys.readouterr().err
    assert main(["replay", "runs/x", "--step", "1", "--without", "\u00b2"]) == 2
    assert "is not a number of a row" in capsys.readouterr().err


@pytest.mark.parametrize("line, says", [
    ("compare a b --among " + "9" * 400, "among is an integer of more than 63 bits"),
    ("verdict a --min-gain nan", "--min-gain nan is not a finite number; min_gain takes a number. Fix: --min-gain 0"),
    ("generate a hi --seed " + "9" * 30, "seed is an integer of more than 63 bits"),
    ("generate a hi --temperature inf", "--temperature inf is not a finite number"),
    ("plan --lengths " + "9" * 30, "lengths is an integer of more than 63 bits")])
def test_numbers_that_cannot_be_used(line, says, capsys):
    assert main(line.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name, before", [("zsh", "autoload -Uz compinit; compinit -u; "), ("fish", "")])
def test_other_shells_can_read_their_script(name, before):
    if shutil.which(name) is None: pytest.skip(f"there is no {name} here")
    script = shell("completion", name).stdout
    done = subprocess.run([name, "-c", before + script], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def _in_a_terminal(line:str, columns:int, code:int=0, **env)->str:
    "The output of a command on a pseudo-terminal with this many columns"
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | dict(TERM="xterm", COLUMNS=str(columns)) | env
    master, slave = os.openpty()
    with open(master, "rb", buffering=0) as terminal:
        child = subprocess.Popen([sys.executable, "-m", "sft_nb", *line.split()], env=env, stdin=slave, stdout=slave,
                                 stderr=slave)
        os.close(slave)
        said = b""
        with suppress(OSError):   # Linux says so when nobody has the terminal open any more
            while part := terminal.read(65536): said += part
    assert child.wait(600) == code, said
    return said.decode()


def test_a_help_is_as_wide_as_the_terminal_and_has_no_colour_where_none_is_wanted():
    colour = re.compile(r"\x1b\[[\d;]*m")
    assert colour.search(_in_a_terminal("runs --help", 80))
    for columns in (80, 120):
        for line in ("--help", "runs --help", "train --help"):
            text = _in_a_terminal(line, columns, NO_COLOR="1")
            assert not colour.search(text) and max(map(len, text.splitlines())) <= columns, line
            assert line == "--help" or "default: None" not in text


def test_a_table_of_runs_fits_and_leaves_out_what_is_not_known(capsys):
    import pandas as pd
    known = dict(state="finished", step=1_234_567, loss=.25, by="accuracy", base=.1, tuned=.605, seconds=7_260.,
                 reason="", model="Qwen/Qwen3-4B-Instruct-2507", method="qlora", time="2026-01-01T00:00:00+0000")
    new = known | dict(by=None, base=None, tuned=None, reason="not a number at step 10, in 3 rows of a batch of 16")
    table = pd.DataFrame([dict(run=f"a-run-with-a-rather-long-name-{k}", **(new if k else known)) for k in range(3)])
    for columns in (80, 120):
        for named in (False, True):
            names = [*table["run"]] if named else []
            listed = patch("sft_nb.runs.directory.list_runs", lambda root, only: table)
            with listed, patch.dict(os.environ, COLUMNS=str(columns)): assert main(["runs", *names]) == 0
            text = capsys.readouterr().out
            assert max(map(len, text.splitlines())) <= columns
            assert "1,234,567" in text and "10.0%" in text and "60.5%" in text
            assert "None" not in text and "nan" not in text


def test_reports_fit_the_terminal_and_fixes_stay_whole(trained):
    from sft_nb.base.display import wrap_report
    lines = wrap_report(
        "  tuned  100.0%  (20 of 20; 95% interval 83.9% to 100.0%)   100% in the expected form\n"
        "  trained                      LoRA reaches 99.9% of the layer weights; embeddings and head are frozen\n"
        f"  ! rows_dropped: {'word ' * 20}Fix: sft_nb train --train-file {'x' * 90} --max-length 74", 80).split("\n")
    assert lines[:4] == ["  tuned  100.0%  (20 of 20; 95% interval 83.9% to 100.0%)",
                         "                 100% in the expected form",
                         "  trained                      LoRA reaches 99.9% of the layer weights;",
                         "                               embeddings and head are frozen"]
    assert lines[-1].strip() == f"Fix: sft_nb train --train-file {'x' * 90} --max-length 74"
    assert all(len(line) <= 80 for line in lines[:-1])
    for line in ("plan --config demo --device rtx4090-24gb", "data --config demo --max-samples 60 --eval-samples 16",
                 f"evaluate {trained.path} --eval-samples 4"):
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", _in_a_terminal(line, 80, NO_COLOR="1"))
        shown = [part.split("\r")[-1] for part in text.replace("\r\n", "\n").split("\n")]
        assert max(map(len, shown)) <= 80, [part for part in shown if len(part) > 80]
    for line, code in (("plan --config demo", 0), ("serve x", 2), ("train --max-length x --lora-r 0", 2)):
        text = _in_a_terminal(line, 60, code, NO_COLOR="1", SHELL="/bin/bash")
        shown = [part.split("\r")[-1] for part in text.replace("\r\n", "\n").split("\n")]
        assert max(map(len, shown)) <= 60, [part for part in shown if len(part) > 60]
        assert code or re.search(r"attn_implementation +varlen +auto: ", text)   # a line of a table stays one
    data = shell("data", "--config", "demo", "--max-samples", 60, "--eval-samples", 16).stdout
    assert re.search(r"share supervised +31\.4% +33\.3%", data)


@pytest.mark.parametrize("state, says", [("finished", False), ("stopped", True)])
def test_merge_says_that_a_run_is_not_finished(undisturbed, tmp_path, capsys, state, says):
    from sft_nb.base.report import SftError
    from sft_nb.runs.directory import Run
    run = Run(shutil.copytree(undisturbed.path, tmp_path/"some"))
    run.set_status(state)
    with patch("sft_nb.proof.merge.merge", side_effect=SftError("merge", "enough is seen", "", "go on")):
        assert main(["merge", str(run.path)]) == 1
    assert ("some is not finished" in capsys.readouterr().out) == says


@pytest.mark.parametrize("more, is_json", [([], False), (["--json"], True)])
def test_a_report_is_json_only_if_asked_for_and_progress_only_if_not(more, is_json, monkeypatch, capsys):
    seen = {}
    class Made(SimpleNamespace):
        def __str__(self): return "in words"
    made = Made(exit_code=0, equal=True, to_dict=lambda: dict(ready=True), text=lambda **how: "in words")
    def replayed(run, step, **how):
        seen.update(how)
        return made
    monkeypatch.setattr("sft_nb.checks.preflight.preflight", lambda cfg: made)
    monkeypatch.setattr("sft_nb.extras.replay.replay", replayed)
    monkeypatch.setattr("sft_nb.extras.cli.commands._open_run", lambda options: None)
    for line in (["check", "--config", "demo"], ["replay", "runs/x", "--step", "1", "--trust-remote-code"]):
        assert main([*line, *more]) == 0
        said = capsys.readouterr().out
        assert (json.loads(said) == dict(ready=True)) if is_json else ("in words" in said)
    assert seen["progress"] is not is_json and seen["trust_remote_code"] is True
