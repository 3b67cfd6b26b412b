"""The systems that sft_nb was built after: their own settings and command lines, word for word up to the program's
name, mean what they meant, or are refused with what to write instead."""
import json
import os
from dataclasses import replace

import pytest
from learner import shape

from sft_nb.cli import commands, main
from sft_nb.config.load import load_config
from sft_nb.model.finetuning.parallelism import deepspeed_config
from sft_nb.base.report import ConfigError
from sft_nb.config.settings import defaults
from sft_nb.tasks.core import task_names


def needs(*names):
    "Skip if a task or a setting does not exist yet"
    missing = [n for n in names if n not in task_names() and n not in defaults()]
    return pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)}")


@pytest.fixture
def train(tmp_path, monkeypatch):
    "The config of an `sft_nb train` command line, in a separate folder"
    def config(line):
        met = []
        def meet(cfg):
            met.append(cfg)
            raise SystemExit(0)
        monkeypatch.setattr(commands, "_new_run", meet)
        monkeypatch.setattr("sft_nb.training.launch.launch", meet)
        with pytest.raises(SystemExit): main(["train", *line.replace("\\\n", " ").split()])
        return met[0]
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"): monkeypatch.setenv(name, "")
    return config


def said(cfg, **wanted): return {name: getattr(cfg, name) for name in wanted}


# 000: translation by domain

@needs("domain", "translate")
def test_000_command(train, tmp_path):
    (tmp_path/"data/prepared").mkdir(parents=True)
    for side in ("train", "val", "test"): (tmp_path/f"data/prepared/technology_{side}.jsonl").write_text("{}\n")
    for config in ("", "--config translate "):
        cfg = train(config + "--domain technology --data_dir data/prepared")
        assert (cfg.domain, cfg.train_file) == ("technology", ("data/prepared",))


THEIRS_000 = """
load_in_4bit, bnb_4bit_quant_type, bnb_4bit_compute_dtype, bnb_4bit_use_double_quant = True, "nf4", "bfloat16", True
use_4bit = True
r, lora_alpha, lora_dropout, bias, task_type = 16, 32, 0.05, "none", "CAUSAL_LM"
target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
max_length, num_train_epochs, per_device_train_batch_size, gradient_accumulation_steps = 512, 3, 4, 4
learning_rate, warmup_ratio, optim, pad_to_multiple_of = 2e-4, 0.03, "paged_adamw_32bit", 8
eval_strategy = save_strategy = "steps"
eval_steps, save_steps, load_best_model_at_end, metric_for_best_model = 100, 100, True, "eval_loss"
greater_is_better, save_total_limit, report_to, remove_unused_columns = False, 2, "none", False
gradient_checkpointing, gradient_checkpointing_kwargs = True, {"use_reentrant": False}
"""


def test_000_settings_are_those_of_the_config(tmp_path):
    (tmp_path/"theirs.py").write_text(THEIRS_000)
    theirs, ours = load_config(tmp_path/"theirs.py"), load_config("translate")
    same = dict.fromkeys("""method lora_r lora_alpha lora_dropout max_length num_train_epochs learning_rate warmup_steps
        per_device_train_batch_size gradient_accumulation_steps optim eval_steps save_steps save_total_limit
        load_best_model_at_end metric_for_best_model bnb_4bit_quant_type""".split())
    assert said(theirs, **same) == said(ours, **same)
    assert (theirs.dtype, theirs.report_to, theirs.gradient_checkpointing) == ("bfloat16", None, True)
    assert "pad_to_multiple_of = 8" in theirs.accepted


# 001: unit conversion

THEIRS_001 = """
output_dir, logging_dir = "homework/sft_model", "homework/sft_model"
report_to="tensorboard"
gradient_checkpointing=True
learning_rate=2e-4
num_train_epochs=3
per_device_train_batch_size=32
save_strategy="epoch"
logging_steps=10
save_total_limit=1
label_names=["labels"]
"""


def test_001_training_arguments_are_a_config(tmp_path):
    (tmp_path/"theirs.py").write_text(THEIRS_001)
    theirs, ours = load_config(tmp_path/"theirs.py"), load_config("units")
    assert (theirs.runs_dir, theirs.run_name, theirs.report_to) == ("homework", "sft_model", ("tensorboard",))
    same = dict.fromkeys("""save_steps save_total_limit learning_rate num_train_epochs per_device_train_batch_size
        gradient_checkpointing logging_steps""".split())
    assert said(theirs, **same) == said(ours, **same)
    assert {name.split(" = ")[0] for name in theirs.accepted} == {"label_names", "logging_dir"}


def test_001_the_collator_is_called_as_theirs(tokenizer):
    from sft_nb.batches.layout import DataCollatorForCausalLM
    from sft_nb.base.report import SftError
    collator = DataCollatorForCausalLM(tokenizer=tokenizer, pad_to_multiple_of=8, return_tensors="pt")
    rows = [dict(input_ids=[1] * n, labels=[1] * n) for n in (80, 103)]   # seed 000: "expected sequence of length 80"
    assert collator(rows)["labels"].shape == (2, 104)
    with pytest.raises(SftError, match="return_tensors is 'np'"): DataCollatorForCausalLM(tokenizer, None, "np")


@needs("units_rft")
def test_001_each_config_has_its_task():
    assert [load_config(name).task for name in ("units", "units_rft")] == ["units", "units_rft"]


@pytest.mark.parametrize("config, learned", [
    ("units", "<answer>6000.0</answer>"), ("units_rft", "6 * 1000 = <answer>6000</answer>")])
def test_001_rows_that_are_lists(tmp_path, config, learned):
    "[question, number, reasoning], as their files have them: no setting names the columns"
    from sft_nb.tokens.prepare import prepare
    rows = [["How many g are in 6 kg?", 6000.0, "6 * 1000 = <answer>6000</answer>"]]
    (tmp_path/"rft.json").write_text(json.dumps(rows))
    data = prepare(load_config(config, model="tiny", train_file=str(tmp_path/"rft.json"), eval_samples=0))
    text = data.tokenizer.decode(data.train.tokens[0]["input_ids"])
    assert learned in text and "6 kg?" in text


@pytest.mark.parametrize("config", ["units", "units_rft", "nli_cot", "nli_minimal"])
def test_the_tasks_rows_fit_their_config(tmp_path, config):
    "With the tokenizer that ships: nothing is cut or left out"
    from sft_nb.tokens.prepare import prepare
    how = dict(model="tiny", max_samples=20, eval_samples=10, cache_dir=str(tmp_path))
    data = prepare(load_config(config, **how))
    assert (len(data.train.tokens), len(data.eval.tokens)) == (20, 10)


# 002: GSM8K

QUICK = """--model Qwen/Qwen2.5-0.5B-Instruct \\
    --max-samples 10 \\
    --batch-size 2 \\
    --gradient-accumulation-steps 4 \\
    --num-epochs 1 \\
    --max-length 128 \\
    --no-wandb"""
FULL = """--model Qwen/Qwen2.5-0.5B-Instruct \\
    --max-samples 500 \\
    --batch-size 2 \\
    --gradient-accumulation-steps 16 \\
    --num-epochs 3 \\
    --max-length 256 \\
    --max-time 1800 \\
    --wandb"""


@pytest.mark.parametrize("config", ["", "--config gsm8k "])
@pytest.mark.parametrize("line, wanted", [
    (QUICK, dict(max_samples=10, gradient_accumulation_steps=4, num_train_epochs=1, max_length=128, wandb=False)),
    (FULL, dict(max_samples=500, gradient_accumulation_steps=16, num_train_epochs=3, max_time=1800, wandb=True))])
def test_002_commands(train, config, line, wanted):
    cfg = train(config + line)
    assert said(cfg, **wanted) == wanted and cfg.per_device_train_batch_size == 2
    assert cfg.task == ("gsm8k" if config else "auto")


@needs("units")
def test_002_a_real_model_without_rows_is_no_toy(tmp_path, monkeypatch, capsys):
    "With a stand-in for the model, which cannot be downloaded here"
    monkeypatch.chdir(tmp_path)
    line = QUICK.replace("\\\n", " ").replace("Qwen/Qwen2.5-0.5B-Instruct", shape()).split()
    assert main(["train", *line, "--tokenizer", "tiny"]) == 2
    said = capsys.readouterr().err
    assert "there are no rows" in said and "--train-file" in said and "gsm8k" in said
    assert not (tmp_path/"runs").exists()


# 003: summaries at 200k tokens

THEIRS_003 = """
MAX_SEQ_LENGTH = 262144
output_dir, run_name = "./qwen_legal_multigpu", "qwen3-4b-zero2"
lora_r, lora_alpha, task_type, bias = 64, 32, "CAUSAL_LM", "none"
per_device_train_batch_size, per_device_eval_batch_size, gradient_accumulation_steps, num_gpus = 1, 1, 8, 4
learning_rate, num_train_epochs, eval_strategy, eval_steps, save_steps, save_total_limit = 1e-4, 1, "steps", 200, 200, 3
bf16, bf16_full_eval, load_best_model_at_end, dataloader_num_workers = True, True, False, 4
gradient_checkpointing, gradient_checkpointing_kwargs = True, {"use_reentrant": False}
report_to, ddp_find_unused_parameters, load_in_4bit = "wandb", False, False
"""
ZERO2 = 'deepspeed = "./experiments/009_text_summary/ds_config_zero2.json"\n'
DS_CONFIG = dict(   # what its notes say of the file
    zero_optimization=dict(stage=2, overlap_comm=True, contiguous_gradients=True, reduce_bucket_size=5e8,
                           allgather_bucket_size=5e8), bf16=dict(enabled=True), gradient_clipping=1.0,
    train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=8)


def test_003_numbers(tmp_path):
    (tmp_path/"theirs.py").write_text(THEIRS_003)
    theirs, ours = load_config(tmp_path/"theirs.py"), load_config("long_summary")
    same = dict.fromkeys("""method max_length lora_r lora_alpha learning_rate num_train_epochs num_processes eval_steps
        gradient_accumulation_steps per_device_train_batch_size save_steps save_total_limit load_best_model_at_end
        gradient_checkpointing""".split())
    assert said(theirs, **same) == said(ours, **same)
    assert (theirs.run_name, theirs.wandb_name) == ("qwen_legal_multigpu", "qwen3-4b-zero2")
    assert theirs.report_to == ("wandb",)


def test_003_a_comma_is_refused_with_words(tmp_path):
    (tmp_path/"theirs.py").write_text(THEIRS_003.replace("262144", "262144,") + ZERO2)
    with pytest.raises(ConfigError, match="the comma at the end makes it one"): load_config(tmp_path/"theirs.py")


def test_003_zero2_from_their_own_file(tmp_path):
    "It is found beside the config, and contradicts nothing in it"
    file = tmp_path/"experiments/009_text_summary/ds_config_zero2.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(DS_CONFIG))
    (tmp_path/"theirs.py").write_text(THEIRS_003 + ZERO2)
    cfg = load_config(tmp_path/"theirs.py")
    assert deepspeed_config(**cfg.values(deepspeed_config))["zero_optimization"] == DS_CONFIG["zero_optimization"]
    says = "gradient_clipping is 1.0, and max_grad_norm is 0.5; one number. Fix: max_grad_norm=1.0"
    other = replace(cfg, max_grad_norm=.5).values(deepspeed_config)
    with pytest.raises(ConfigError, match=says): deepspeed_config(**other)


# 004: NLI with reasoning

DEFAULT_004 = """
model_id = "mistralai/Mistral-7B-v0.3"
output_dir = "models/nli"
use_wandb, wandb_project, wandb_name = True, "mistral7b-nli-cot", "ablation2-r16-lr2e4"
train_data, eval_data = "data/finetune/train_ft.jsonl", "data/finetune/dev_ft.jsonl"
lora_r, lora_alpha, lora_dropout = 16, 32, 0.05
target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant = True, "nf4", True
bnb_4bit_compute_dtype = torch_dtype = "bfloat16"
bias, task_type, padding_side, dataset_text_field = "none", "CAUSAL_LM", "right", "text"
max_seq_length, num_train_epochs, batch_size, grad_accumulation_steps = 512, 3, 16, 2
learning_rate, lr_scheduler_type, warmup_ratio, weight_decay, optim = 2e-4, "cosine", 0.03, 0.01, "paged_adamw_8bit"
bf16, fp16, gradient_checkpointing, packing, remove_unused_columns = True, False, True, False, False
evaluation_strategy, eval_steps, save_strategy, save_steps, save_total_limit = "steps", 250, "steps", 250, 2
load_best_model_at_end, metric_for_best_model, patience = True, "eval_loss", 3
seed, distributed_training = 42, False
"""
ABLATION2 = """
from train.configs.default import *
grad_accumulation_steps = 1
"""


@pytest.fixture
def project(tmp_path):
    "The folder of seed 004"
    (tmp_path/"train/configs").mkdir(parents=True)
    (tmp_path/"train/configs/default.py").write_text(DEFAULT_004)
    (tmp_path/"train/configs/ablation2.py").write_text(ABLATION2)
    return tmp_path


@pytest.mark.parametrize("line, wanted", [
    ("--config train/configs/ablation2.py", dict(per_device_train_batch_size=16, learning_rate=2e-4, wandb=True)),
    ("--config train/configs/ablation2.py --batch_size 4 --learning_rate 1e-4 --no_wandb",
     dict(per_device_train_batch_size=4, learning_rate=1e-4, wandb=False)),
    ("--config train/configs/ablation2.py --use_wandb --wandb_project mine --wandb_name this-one",
     dict(wandb=True, wandb_project="mine", wandb_name="this-one", run_name="nli"))])
def test_004_commands(train, project, line, wanted):
    cfg = train(line)
    assert said(cfg, **wanted) == wanted
    assert (cfg.gradient_accumulation_steps, cfg.method, cfg.dtype) == (1, "qlora", "bfloat16")
    assert cfg.lora_dropout == .05 and "imported by" in cfg.sources["lora_dropout"]
    assert "imported by" in cfg.sources["optim"]


def test_004_the_card_is_chosen_before_torch_looks(train, project):
    train("--config train/configs/ablation2.py --gpu 1")
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


def test_004_two_projects_do_not_mix(project, tmp_path_factory):
    "Both have a package `train`; each config finds its own, from any folder"
    other = tmp_path_factory.mktemp("other")
    (other/"train/configs").mkdir(parents=True)
    (other/"train/configs/default.py").write_text("lora_r = 4\n")
    (other/"train/configs/ablation2.py").write_text(ABLATION2)
    ranks = [load_config(folder/"train/configs/ablation2.py").lora_r for folder in (project, other, project)]
    assert ranks == [16, 4, 16]
    (other/"train/configs/default.py").write_text("lora_r = 5\n")
    assert load_config(other/"train/configs/ablation2.py").lora_r == 5


@pytest.mark.parametrize("name, wanted", [
    ("nli_cot", (16, 2, 2e-4, .03, 16, 32)), ("nli_ablation0", (16, 1, 1e-4, .03, 16, 32)),
    ("nli_ablation1", (16, 2, 2e-4, .05, 16, 32)), ("nli_ablation2", (16, 1, 2e-4, .03, 16, 32)),
    ("nli_ablation3", (16, 4, 1e-4, .10, 32, 64)), ("nli_minimal", (1, 1, 2e-4, .03, 8, 16)),
    ("nli_distributed", (8, 2, 2e-4, .03, 16, 32))])
def test_004_ablations(name, wanted):
    cfg = load_config(name)
    found = (cfg.per_device_train_batch_size, cfg.gradient_accumulation_steps, cfg.learning_rate, cfg.warmup_steps,
             cfg.lora_r, cfg.lora_alpha)
    assert found == wanted


def test_004_the_default_is_nli_cot(project):
    theirs, ours = load_config(project/"train/configs/default.py"), load_config("nli_cot")
    same = dict.fromkeys("""model method lora_r lora_alpha lora_dropout lora_target_modules max_length learning_rate
        optim num_train_epochs per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing
        warmup_steps weight_decay eval_steps save_steps save_total_limit early_stopping_patience""".split())
    assert said(theirs, **same) == said(ours, **same)


def test_run_training_is_the_command(project):
    import subprocess
    import sys

    from conftest import ROOT
    how = dict(cwd=project, capture_output=True, text=True, env=os.environ | dict(PYTHON=sys.executable))
    line = "--config train/configs/ablation2.py --batch_size 4 --learning_rate 1e-4 --no_wandb --lerning_rate 1"
    done = subprocess.run([ROOT/"run_training.sh", *line.split()], **how)
    assert done.returncode == 2 and "write --learning-rate" in done.stderr, done.stderr


def test_run_training_is_a_container(project):
    "`--dry-run` prints the line; the card, the folders and .env are those of the wrapper"
    import shlex
    import subprocess

    from conftest import ROOT
    for name in ("data", "models"): (project/name).mkdir()
    (project/".env").write_text("HF_TOKEN=x\n")
    def line(*args, **env):
        how = dict(cwd=project, capture_output=True, text=True, check=True, env=os.environ | env)
        return shlex.split(subprocess.run([ROOT/"run_training.sh", *args, "--dry-run"], **how).stdout)
    found = line("--config", "my config.py", "--gpu", "1", "--batch_size", "4", IMAGE="mistral-nli-ft")
    assert found[:5] == ["docker", "run", "--rm", "--gpus", '"device=1"'] and "--env-file" in found
    mounts = [found[k + 1] for k, word in enumerate(found) if word == "-v"]
    assert {f"{project}:/app", f"{project}/data:/data", f"{project}/models:/models"} <= {*mounts}
    assert found[-7:] == ["mistral-nli-ft", "sft_nb", "train", "--config", "my config.py", "--batch_size", "4"]
    assert found[found.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"   # who may write in /app
    default = line()
    assert default[4] == "all" and default[-2:] == ["--config", "train/configs/default.py"]
    assert line(DATA_DIR=str(project/"models"))[-2:] and f"{project}/models:/data" in line(DATA_DIR="models")


# 000 again: all domains of a folder in one command

DOMAINS = ("economic", "education", "religious", "technology")


@pytest.fixture(params=["{d}_{s}.jsonl", "{d}/{s}.jsonl", "{d}_{s}.csv"])
def folder(tmp_path, request):
    "Rows of four domains, as messages or as a table of two languages"
    for d in DOMAINS:
        for side, n in (("train", 8), ("val", 6), ("test", 2)):
            file = tmp_path/"data"/request.param.format(d=d, s=side)
            file.parent.mkdir(parents=True, exist_ok=True)
            pairs = [(f"the {k} words of {d} for {side}", f"die {k} Worte aus {d} für {side}") for k in range(n)]
            lines = [json.dumps(dict(messages=[
                dict(role="system", content=f"You translate texts on {d}."), dict(role="user", content=a),
                dict(role="assistant", content=b)])) for a, b in pairs]
            if file.suffix == ".csv": lines = ["english,german", *(f"{a},{b}" for a, b in pairs)]
            file.write_text("\n".join(lines) + "\n")
    return tmp_path/"data"


def test_000_all_domains_have_figures_of_their_own(folder, tokenizer):
    "Fewer rows than there are: each domain has its part, and one that got worse is seen"
    from sft_nb.evaluation.evaluate import Evaluation, held_out
    from sft_nb.evaluation.generations import make_questions, score_generations
    from sft_nb.model.generation import Generation
    from sft_nb.runs.locate import Target
    cfg = load_config("translate", model="tiny", train_file=str(folder), eval_samples=16)
    rows, _, domains = held_out(Target("all", "adapter", cfg, None), tokenizer)
    assert len(rows) == 16 and sorted(domains.values()) == sorted(DOMAINS * 4)
    questions = make_questions(cfg, tokenizer, rows, domains=domains)
    right = [talk[-1]["content"] for talk in questions.chats]
    tuned = [text if domain != "religious" else "nothing" for text, domain in zip(right, questions.groups)]
    made = [score_generations(name, questions, [Generation(text, 5, True) for text in texts])
            for name, texts in (("base", ["no"] * 16), ("tuned", tuned))]
    e = Evaluation("all", "adapter", *made, by=questions.by)
    lines = {line["domain"]: line for line in e.group_table if line["model"] == "tuned"}
    assert {d: line["bleu"] for d, line in lines.items()} == dict.fromkeys(DOMAINS, "100") | dict(religious="0")
    assert all(line["rows"] == "4" and "chrf" in line for line in lines.values())
    assert "by domain" in str(e) and all(d in e._repr_html_() for d in DOMAINS)
    groups = e.to_dict()["tuned"]["groups"]
    assert groups["technology"]["figures"]["chrf"] == 100 and groups["technology"]["n"] == 4
    assert e.tuned == type(e.tuned).from_dict(json.loads(json.dumps(e.tuned.to_dict())))


def test_000_all_is_answered_with_the_line_that_reads_all(folder, capsys):
    line = ["data", "--config", "translate", "--model", "tiny", "--data_dir", str(folder)]
    assert main([*line, "--domain", "all"]) == 1
    assert "Fix: leave --domain out, which reads all of them and scores each" in capsys.readouterr().err
    assert main(line) == 0 and "From all 32 rows" in capsys.readouterr().out
    assert main([*line, "--domain", "religious"]) == 0 and "From all 8 rows" in capsys.readouterr().out


def test_004_texts_have_no_answers_to_judge(tokenizer):
    "Rows of plain text have a loss; that they are all answered alike, and five empty examples, was noise"
    from sft_nb.evaluation.evaluate import Evaluation
    from sft_nb.evaluation.generations import make_questions, score_generations
    from sft_nb.training.guards import SampleProbe
    rows = {f"row {k}": dict(text=f"[INST] {k} [/INST] {k % 3}") for k in range(6)}
    questions = make_questions(load_config(task="chat"), tokenizer, rows)
    texts = score_generations("tuned", questions, [], [dict(loss=2., supervised=9)] * 6)
    e = Evaluation("nli", "adapter", None, texts, by="loss")
    assert e.findings == [] and e.examples() == ""
    tokens = [dict(input_ids=[1, 5, 6 + k], labels=[-100, 5, 6 + k]) for k in range(6)]
    assert SampleProbe(tokenizer, tokens, []).targets == []


def test_000_the_test_files_of_all_domains_are_named_at_once(monkeypatch, tmp_path):
    "*_test.jsonl, as the shell writes it out, before and behind the run"
    asked = []
    monkeypatch.setattr("sft_nb.cli.evaluation._target_of_options", lambda *args: None)
    def evaluate(what, **how): asked.append((what, how["eval_file"]))
    monkeypatch.setattr("sft_nb.evaluation.evaluate.evaluate", evaluate)
    monkeypatch.setattr("sft_nb.cli.evaluation._print_scores", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path/"runs/all").mkdir(parents=True)
    (tmp_path/"runs/all/config.json").write_text("{}")
    files = [f"{d}_test.jsonl" for d in DOMAINS]
    for line in (["runs/all", "--eval-file", *files], ["--eval-file", *files, "runs/all"],
                 ["--eval-file", *files, "all"], ["--model", "runs/all", "--eval-file", *files]):
        main(["evaluate", *line])
    assert [(what.split("/")[-1], files) for what, files in asked] == [("all", tuple(files))] * 4
