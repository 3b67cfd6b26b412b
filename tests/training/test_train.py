"""The loss is the intended one, an evaluation does not affect training, and a run records what happened."""
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import shared
from learner import curve, learner, values, weights
from transformers import Qwen3Config, Trainer, TrainerCallback, TrainingArguments

from sft_nb.batches.layout import DataCollatorForCausalLM
from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.model.adapter import load_model
from sft_nb.model.load import guard_4bit, load_base
from sft_nb.base.report import ConfigError, SftError
from sft_nb.evaluation.generations import answer_rows
from sft_nb.evaluation.evaluate import evaluate
from sft_nb.runs.checkpoint import step_of
from sft_nb.runs.directory import Run, create_run
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.guards import Guards
from sft_nb.training.train import build_trainer, resume, train
from sft_nb.workbench import Workbench


# --- the first loss

def first_step(tmp_path, **overrides):
    "A config of one step over eight rows, and its data"
    one = dict(runs_dir=str(tmp_path), max_steps=1, max_samples=8, eval_samples=0, preflight=False,
               per_device_train_batch_size=8)
    cfg = load_config("demo", **one | overrides | dict(max_new_tokens=1))
    return cfg, prepare(cfg)


def first_loss(cfg, data)->float: return train(cfg, data=data).metrics()[0]["loss"]
def padded(data, rows): return DataCollatorForCausalLM(data.tokenizer, 8)(list(rows.tokens))


def by_hand(model, batch)->float:
    "Mean of -log p over the supervised tokens, in float64, from the logits"
    with torch.no_grad(): out = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    logits, labels, total, n = out.logits.double().numpy(), batch["labels"].numpy(), 0., 0
    for b in range(labels.shape[0]):
        for t in range(1, labels.shape[1]):
            if labels[b, t] == -100: continue
            z = logits[b, t - 1]
            total += z.max() + np.log(np.exp(z - z.max()).sum()) - z[labels[b, t]]
            n += 1
    return total / n


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_the_first_loss_is_the_one_calculated_by_hand(tmp_path, method):
    cfg, data = first_step(tmp_path, method=method)
    expected = by_hand(load_model(cfg, data.tokenizer), padded(data, data.train))
    assert first_loss(cfg, data) == pytest.approx(expected, rel=1e-5)


def test_the_first_loss_is_the_one_that_the_plain_trainer_reports(tmp_path):
    cfg, data = first_step(tmp_path)
    args = TrainingArguments(
        str(tmp_path/"plain"), per_device_train_batch_size=8, max_steps=1, logging_steps=1, report_to=[], use_cpu=True,
        remove_unused_columns=False, label_names=["labels"], disable_tqdm=True, save_strategy="no")
    plain = Trainer(load_model(cfg, data.tokenizer), args, train_dataset=data.train.tokens,
                    data_collator=DataCollatorForCausalLM(data.tokenizer, 8))
    plain.train()
    theirs = next(line["loss"] for line in plain.state.log_history if "loss" in line)
    assert first_loss(cfg, data) == pytest.approx(theirs, rel=1e-5)


def test_the_loss_does_not_depend_on_the_split_into_micro_batches(tmp_path):
    cfg, data = first_step(tmp_path, **learner())
    def first(b): return replace(cfg, per_device_train_batch_size=b, gradient_accumulation_steps=8 // b)
    lines = [train(first(b), data=data).metrics()[0] for b in (8, 4, 2, 1)]
    assert all(m["loss"] == pytest.approx(lines[0]["loss"], rel=1e-5) for m in lines)
    assert all(m["grad_norm"] == pytest.approx(lines[0]["grad_norm"], rel=1e-3) for m in lines)


def test_packed_padded_and_grouped_batches_have_the_same_first_loss(tmp_path):
    "The mean over the tokens of a step, however its rows are laid out; against the float64 calculation"
    cfg, data = first_step(tmp_path, **learner())
    expected = by_hand(load_model(cfg, data.tokenizer), padded(data, data.train))
    packed = dict(max_tokens_per_batch=4096, gradient_accumulation_steps=1)
    tight = dict(max_tokens_per_batch=100, gradient_accumulation_steps=8)
    for how in (packed, tight, dict(group_by_length=True)):
        assert first_loss(replace(cfg, **how), data) == pytest.approx(expected, rel=1e-5), how


def test_the_held_out_loss_is_a_mean_over_tokens_whatever_the_batches(tmp_path):
    "Rows of very different lengths, a learning rate of 0: the same number for every batch size, and the one by hand"
    rows = [dict(question=f"{i} " * (1 + 7 * (i % 3)), answer="word " * (1 + 12 * (i % 4))) for i in range(10)]
    file = tmp_path/"rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    base = load_config(**learner(), train_file=str(file), eval_file=str(file), runs_dir=str(tmp_path), max_steps=1,
                       eval_steps=1, learning_rate=0., max_length=1024, preflight=False)
    data = prepare(base)
    def held_out(b): return values(train(replace(base, per_device_eval_batch_size=b), data=data), "eval_loss")[0]
    losses = [held_out(b) for b in (1, 4, 10)]
    expected = by_hand(load_model(base, data.tokenizer), padded(data, data.eval))
    assert losses == pytest.approx([expected] * 3, rel=1e-5)


# --- evaluations between steps, in 4 bits

def has_avx512bf16()->bool:
    from bitsandbytes.nn.modules import has_avx512bf16
    return has_avx512bf16()


def losses_with_an_evaluation(folder, monkeypatch, *, guarded:bool, evaluated:bool)->list[float]:
    "Losses of 15 steps (6 on a CPU whose weights nobody repacks), evaluated after a third or not, guarded or not"
    steps = 15 if has_avx512bf16() else 6
    if not guarded: monkeypatch.setattr("sft_nb.model.load.guard_4bit", lambda model: 0)
    # these too run the model in eval mode, as padding_free and preflight do
    monkeypatch.setattr("sft_nb.model.loss.head_of", lambda model: None)
    monkeypatch.setattr(Guards, "_write_receipt", lambda self: None)
    eval_steps = steps // 3 if evaluated else None
    cfg = load_config("demo", padding_free=False, preflight=False, runs_dir=str(folder), max_steps=steps,
                      logging_steps=1, max_samples=120, eval_samples=16, eval_steps=eval_steps, max_new_tokens=8,
                      per_device_train_batch_size=8)
    return values(train(cfg), "loss")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    "The losses of a guarded training that is evaluated"
    with pytest.MonkeyPatch.context() as patch:
        return losses_with_an_evaluation(tmp_path_factory.mktemp("good"), patch, guarded=True, evaluated=True)


def test_an_evaluation_in_the_middle_changes_nothing(tmp_path, monkeypatch, good):
    "bitsandbytes repacks 4-bit weights in place on CPUs with AVX512-BF16; the guard keeps the losses bit for bit"
    assert losses_with_an_evaluation(tmp_path, monkeypatch, guarded=True, evaluated=False) == good


def test_without_the_guard_an_evaluation_ruins_the_training(tmp_path, monkeypatch, good):
    if not has_avx512bf16(): pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes does not repack its weights")
    bad = losses_with_an_evaluation(tmp_path, monkeypatch, guarded=False, evaluated=True)
    assert bad[:5] == pytest.approx(good[:5]) and sum(bad[-5:]) > 1.2 * sum(good[-5:])


def test_the_guard_is_on_every_layer_of_every_quantised_base(tokenizer):
    from bitsandbytes.nn import Linear4bit
    base = load_base(load_config(method="qlora"), tokenizer)
    layers = [m for m in base.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == guard_4bit(base) == 28 and not any(m.support_avx512bf16_for_cpu for m in layers)


# --- what a run holds

def test_a_run_directory_holds_what_it_promises(trained):
    promised = {"config.json", "environment.json", "data.json", "metrics.jsonl", "status.json", "loss.png",
                "checkpoints", "adapter"}
    assert promised <= {p.name for p in trained.path.iterdir()}
    assert trained.status.state == "finished" and trained.status.step == 60
    assert [p.name for p in trained.checkpoints()] == ["checkpoint-30", "checkpoint-60"]
    lines = [json.loads(line) for line in (trained.path/"metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "loss" in m] == [1, 10, 20, 30, 40, 50, 60]


def test_a_run_can_be_repeated_from_its_config(trained, tmp_path):
    again = load_config(trained.path/"config.json", runs_dir=str(tmp_path), max_steps=1, preflight=False,
                        max_new_tokens=1)
    assert train(again).metrics()[0]["loss"] == trained.metrics()[0]["loss"]


def test_no_secret_gets_into_a_run(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY"): monkeypatch.setenv(name, "hf_very_secret_word")
    run = train(load_config("demo", **learner(), runs_dir=str(tmp_path), max_steps=1, max_samples=16, eval_samples=0))
    for file in run.path.rglob("*"):
        if file.is_file(): assert b"hf_very_secret_word" not in file.read_bytes(), file


# --- what continues

class Crash(Exception): "In the middle of a training"

class CrashAtEight(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 8: raise Crash


def test_resuming_continues_without_a_gap_or_a_double_line(tmp_path):
    cfg = load_config("demo", **learner(), runs_dir=str(tmp_path), max_steps=12, max_samples=100,
                      per_device_train_batch_size=8, eval_samples=0, logging_steps=1, save_steps=5, preflight=False)
    whole = train(cfg)
    part = create_run(replace(cfg, run_name="part"))
    data = prepare(cfg)
    data.report.save(part.path/"data.json")
    trainer = build_trainer(Workbench(part.config, is_resolved=True, data=data), part)
    trainer.add_callback(CrashAtEight())
    with pytest.raises(Crash): trainer.train()
    part.set_status("failed", reason="crash", step=8)
    resume(part.path)
    assert [line[:2] for line in curve(part)] == [line[:2] for line in curve(whole)]
    assert weights(part) == weights(whole)


@pytest.mark.parametrize("how", [dict(max_tokens_per_batch=256), dict(group_by_length=True)], ids=["packed", "grouped"])
def test_a_run_that_is_stopped_in_the_middle_of_an_epoch_sees_the_same_batches(tmp_path, how):
    "Loss after loss and byte after byte, in the second epoch"
    cfg = load_config(
        "demo", **learner(), runs_dir=str(tmp_path), max_samples=64, num_train_epochs=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, logging_steps=1, save_steps=1, eval_samples=0, save_total_limit=100,
        preflight=False, **how)
    whole = train(cfg)
    stop = int(.75 * whole.status.step)
    part = Run(shutil.copytree(whole.path, tmp_path/"part"))
    for c in part.checkpoints():
        if step_of(c) > stop: shutil.rmtree(c)
    shutil.rmtree(part.adapter)
    part.set_status("failed", reason="killed", step=stop)
    resume(part.path)
    assert [line[:2] for line in curve(part)] == [line[:2] for line in curve(whole)]
    assert weights(part) == weights(whole)


def test_other_rows_under_the_same_name_are_not_resumed(tmp_path):
    file = tmp_path/"rows.jsonl"
    lines = [json.dumps(dict(question=f"{i}?", answer=f"{i}")) for i in range(12)]
    file.write_text("\n".join(lines))
    run = train(load_config(**learner(), train_file=str(file), runs_dir=str(tmp_path/"runs"), max_steps=5, max_time=0.,
                            eval_samples=0, preflight=False))
    assert (run.status.state, run.status.stopped_by) == ("stopped", "max_time")
    file.write_text("\n".join(lines[:9]))
    with pytest.raises(ConfigError, match="have changed since the run started"): resume(run)
    file.write_text("\n".join(lines))
    assert resume(run).status.state == "finished"


# --- other models, other rows

def test_a_random_model_of_another_shape_trains_with_a_real_tokenizer(tmp_path):
    shape = Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    shape.save_pretrained(tmp_path/"shape")
    files = dict(tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/gsm8k/train.jsonl")),
                 eval_file=str(shared("data/gsm8k/test.jsonl")))
    run = train(load_config(
        "gsm8k", model=str(tmp_path/"shape"), init="random", **files, runs_dir=str(tmp_path), max_samples=32,
        eval_samples=8, max_steps=4, batch_size=4, gradient_accumulation_steps=1, max_new_tokens=8, learning_rate=1e-2,
        logging_steps=1, preflight=False))
    e = evaluate(run, progress=False)
    losses = values(run, "loss")
    assert losses[0] == pytest.approx(11.9, abs=.3) and losses[-1] < losses[0]   # ln 151,669 = 11.93
    assert e.base.n == 8 and Run(run.path).status.state == "finished"


def test_a_run_on_rows_of_ones_own_without_held_out_rows(tmp_path):
    "Trains, says that nothing is held out, and an evaluation asks for rows"
    rows = tmp_path/"mine.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"{k}+1?", completion=str(k + 1))) + "\n" for k in range(40)))
    line = (f"train --train-file {rows} --max-steps 2 --runs-dir {tmp_path/'runs'} --max-tokens-per-batch 256 "
            "--max-new-tokens 8")
    assert main(line.split()) == 0
    run = tmp_path/"runs"/"mine-tiny-1"
    assert json.loads((run/"status.json").read_text())["state"] == "finished"
    with pytest.raises(ConfigError, match="no rows are held out.*eval_file="): evaluate(run, progress=False)
    e = evaluate(run, eval_file=str(rows), eval_samples=4, progress=False)
    assert e.base.n == e.tuned.n == 4 and e.base.answers[0].expected == "1"


def test_plain_text_cannot_be_asked_unless_it_says_where_the_answer_begins(tmp_path):
    cfg = load_config(task="chat", max_new_tokens=3)
    tok, rows = load_tokenizer(cfg), {"row 1": dict(text="Q: 1+1? A: 2")}
    model = load_base(cfg, tok)
    mixed = rows | {"row 2": dict(question="1+1?", answer="2")}
    with pytest.raises(SftError, match="row 1: it has no prompt"): answer_rows(model, tok, mixed, cfg, progress=False)
    scores = answer_rows(model, tok, rows, cfg, progress=False)   # its loss is a figure all the same
    assert scores.answers[0].text == "" and scores.figures["loss"] > 0
    told = replace(cfg, response_template="A:")
    answer, = answer_rows(model, tok, rows, told, progress=False).answers
    assert (answer.prompt, answer.expected) == ("Q: 1+1? A:", "2")


def test_whoever_may_read_a_run_may_read_its_weights(trained):
    "safetensors writes files that their owner alone may read"
    files = [p for p in trained.path.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".json", ".pt")]
    assert any(p.name == "adapter_model.safetensors" for p in files)
    for p in files: assert p.stat().st_mode & 0o444 == p.parent.stat().st_mode & 0o444, p
    assert not [*(trained.path/"checkpoints").rglob("README.md")]   # peft's card, full of blanks
    assert "sft_nb card" in (trained.adapter/"README.md").read_text()
