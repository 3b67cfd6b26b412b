"""The loss is the loss that is meant, an evaluation leaves training as it was, and a run tells what happened."""
import json, shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from sft_nb.collate import DataCollatorForCausalLM
from sft_nb.config import load_config
from sft_nb.data import prepare
from sft_nb.model import guard_4bit, load_base, load_model
from sft_nb.report import ConfigError, SftError
from sft_nb.run import Run, create_run
from sft_nb.train import build_trainer, resume, train


def first_step(tmp_path, **overrides):
    "A config of one step over eight rows, and its data"
    cfg = load_config("demo", runs_dir=str(tmp_path), max_steps=1, max_samples=8, eval_samples=0, per_device_train_batch_size=8, **overrides)
    return cfg, prepare(cfg)


def by_hand(model, batch)->float:
    "Mean of -log p over the supervised tokens, in float64, from the logits"
    with torch.no_grad(): logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.double().numpy()
    labels, total, n = batch["labels"].numpy(), 0., 0
    import numpy as np
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
    batch = DataCollatorForCausalLM(data.tokenizer, 8)(list(data.train.tokens))
    assert train(cfg, data=data).metrics()[0]["loss"] == pytest.approx(by_hand(load_model(cfg, data.tokenizer), batch), rel=1e-5)


def test_the_first_loss_is_the_one_that_the_plain_trainer_reports(tmp_path):
    from transformers import Trainer, TrainingArguments
    cfg, data = first_step(tmp_path)
    args = TrainingArguments(str(tmp_path/"plain"), per_device_train_batch_size=8, max_steps=1, logging_steps=1, report_to=[], use_cpu=True, remove_unused_columns=False,
                             label_names=["labels"], disable_tqdm=True, save_strategy="no")
    plain = Trainer(load_model(cfg, data.tokenizer), args, train_dataset=data.train.tokens, data_collator=DataCollatorForCausalLM(data.tokenizer, 8))
    plain.train()
    theirs = next(l["loss"] for l in plain.state.log_history if "loss" in l)
    assert train(cfg, data=data).metrics()[0]["loss"] == pytest.approx(theirs, rel=1e-5)


def test_the_loss_does_not_depend_on_the_split_into_micro_batches(tmp_path):
    cfg, data = first_step(tmp_path)
    losses = [train(replace(cfg, per_device_train_batch_size=b, gradient_accumulation_steps=8 // b), data=data).metrics()[0] for b in (8, 4, 2, 1)]
    assert all(l["loss"] == pytest.approx(losses[0]["loss"], rel=1e-5) for l in losses)
    assert all(l["grad_norm"] == pytest.approx(losses[0]["grad_norm"], rel=1e-3) for l in losses)


def has_avx512bf16()->bool:
    from bitsandbytes.nn.modules import has_avx512bf16
    return has_avx512bf16()


def losses_with_a_look_in_between(tmp_path, monkeypatch, *, guarded:bool, look:bool)->list[float]:
    "Losses of 30 steps, evaluated at step 10 or not, with the guard or without"
    if not guarded: monkeypatch.setattr("sft_nb.model.guard_4bit", lambda model: 0)
    monkeypatch.setattr("sft_nb.loss.head_of", lambda model: None)   # it looks at the model in eval mode too, as padding_free, the receipt and preflight do
    monkeypatch.setattr(import_module("sft_nb.train").Guards, "_receipt", lambda self: None)
    cfg = load_config("demo", padding_free=False, preflight=False, runs_dir=str(tmp_path), max_steps=30, logging_steps=1, max_samples=480, eval_samples=16, eval_steps=10 if look else None)
    run = train(cfg)
    monkeypatch.undo()
    return [m["loss"] for m in run.metrics() if "loss" in m]


def test_an_evaluation_in_the_middle_changes_nothing(tmp_path, monkeypatch):
    "bitsandbytes repacks 4-bit weights in place on CPUs with AVX512-BF16; the guard keeps the losses equal to the last bit"
    undisturbed = losses_with_a_look_in_between(tmp_path, monkeypatch, guarded=True, look=False)
    assert losses_with_a_look_in_between(tmp_path, monkeypatch, guarded=True, look=True) == undisturbed


def test_without_the_guard_an_evaluation_ruins_the_training(tmp_path, monkeypatch):
    if not has_avx512bf16(): pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes does not repack its weights")
    good = losses_with_a_look_in_between(tmp_path, monkeypatch, guarded=True, look=True)
    bad = losses_with_a_look_in_between(tmp_path, monkeypatch, guarded=False, look=True)
    assert bad[:10] == pytest.approx(good[:10]) and sum(bad[-5:]) > 1.05 * sum(good[-5:])


def test_the_guard_is_on_every_layer_of_every_quantised_base(tokenizer):
    from bitsandbytes.nn import Linear4bit
    base = load_base(load_config(), tokenizer)
    layers = [m for m in base.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == guard_4bit(base) == 28 and not any(m.support_avx512bf16_for_cpu for m in layers)


def test_a_run_directory_holds_what_it_promises(trained):
    names = {p.name for p in trained.path.iterdir()}
    assert {"config.json", "environment.json", "data.json", "metrics.jsonl", "status.json", "loss.png", "checkpoints", "adapter"} <= names
    assert trained.status["state"] == "finished" and trained.status["step"] == 60
    assert [p.name for p in trained.checkpoints()] == ["checkpoint-30", "checkpoint-60"]
    steps = [json.loads(l)["step"] for l in (trained.path/"metrics.jsonl").read_text().splitlines() if "loss" in json.loads(l)]
    assert steps == [1, 10, 20, 30, 40, 50, 60]


def test_a_run_can_be_repeated_from_its_config(trained, tmp_path):
    again = load_config(trained.path/"config.json", runs_dir=str(tmp_path), max_steps=1)
    assert train(again).metrics()[0]["loss"] == trained.metrics()[0]["loss"]


def test_no_secret_gets_into_a_run(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY"): monkeypatch.setenv(name, "hf_very_secret_word")
    run = train(load_config("demo", runs_dir=str(tmp_path), max_steps=1, max_samples=16, eval_samples=0))
    for file in run.path.rglob("*"):
        if file.is_file(): assert b"hf_very_secret_word" not in file.read_bytes(), file


def test_resuming_goes_on_without_a_gap_or_a_double_line(tmp_path):
    cfg = load_config("demo", runs_dir=str(tmp_path), max_steps=12, max_samples=200, eval_samples=0, logging_steps=1, save_steps=5)
    whole = train(cfg)
    part = create_run(replace(cfg, run_name="part"))
    prepare(cfg).report.save(part.path/"data.json")
    trainer = build_trainer(part.config, part, load_model(cfg, prepare(cfg).tokenizer), prepare(cfg))
    trainer.args.max_steps = 12
    class Crash(Exception): pass
    from transformers import TrainerCallback
    class At(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 8: raise Crash
    trainer.add_callback(At())
    with pytest.raises(Crash): trainer.train()
    part.set_status("failed", reason="crash", step=8)
    resume(part.path)
    curve = lambda r: [(m["step"], m["loss"]) for m in r.metrics() if "loss" in m]
    assert curve(part) == curve(whole)
    a, b = ((r.adapter/"adapter_model.safetensors").read_bytes() for r in (part, whole))
    assert a == b


def test_packed_padded_and_grouped_batches_have_the_same_first_loss(tmp_path):
    "The mean over the tokens of a step, however its rows are laid out; against the float64 calculation"
    cfg, data = first_step(tmp_path)
    batch = DataCollatorForCausalLM(data.tokenizer, 8)(list(data.train.tokens))
    reference = by_hand(load_model(cfg, data.tokenizer), batch)
    for how in (dict(max_tokens_per_batch=4096, gradient_accumulation_steps=1), dict(max_tokens_per_batch=100, gradient_accumulation_steps=8), dict(group_by_length=True)):
        run = train(replace(cfg, **how), data=data)
        assert run.metrics()[0]["loss"] == pytest.approx(reference, rel=1e-5), how


@pytest.mark.parametrize("how", [dict(max_tokens_per_batch=256), dict(group_by_length=True)], ids=["packed", "grouped"])
def test_a_run_that_is_stopped_in_the_middle_of_an_epoch_sees_the_same_batches(tmp_path, how):
    "Loss after loss and byte after byte, in the second epoch"
    cfg = load_config("demo", runs_dir=str(tmp_path), max_samples=96, num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, logging_steps=1, save_steps=1, eval_samples=0, save_total_limit=100, **how)
    whole = train(cfg)
    stop = int(.75 * whole.status["step"])
    part = train(replace(cfg, run_name="part"))
    for c in part.checkpoints():
        if int(c.name.split("-")[1]) > stop: shutil.rmtree(c)
    shutil.rmtree(part.adapter)
    part.set_status("failed", reason="killed", step=stop)
    resume(part.path)
    curve = lambda r: [(m["step"], m["loss"]) for m in r.metrics() if "loss" in m]
    assert curve(part) == curve(whole)
    assert (part.adapter/"adapter_model.safetensors").read_bytes() == (whole.adapter/"adapter_model.safetensors").read_bytes()


def test_bad_data_leaves_no_run_behind(tmp_path):
    (tmp_path/"empty.jsonl").touch()
    with pytest.raises(SftError, match="there is no row in it"): train(load_config("demo", runs_dir=str(tmp_path/"runs"), train_file=str(tmp_path/"empty.jsonl")))
    assert not (tmp_path/"runs").exists()


def test_an_optimiser_that_is_not_there_is_named_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="optim"): train(load_config("demo", runs_dir=str(tmp_path/"runs"), optim="adam_but_better", max_samples=16, eval_samples=0))
    assert not (tmp_path/"runs").exists()


def test_a_random_model_of_another_shape_trains_with_a_real_tokenizer(tmp_path):
    from conftest import shared
    from transformers import Qwen3Config
    Qwen3Config(vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True).save_pretrained(tmp_path/"shape")
    cfg = load_config("gsm8k", model=str(tmp_path/"shape"), init="random", tokenizer=str(shared("tokenizers/qwen3")), train_file=str(shared("data/gsm8k/train.jsonl")),
                      eval_file=str(shared("data/gsm8k/test.jsonl")), runs_dir=str(tmp_path), max_samples=32, eval_samples=8, max_steps=4, batch_size=4, gradient_accumulation_steps=1, max_new_tokens=8, learning_rate=1e-2, logging_steps=1)
    run = train(cfg)
    from sft_nb.evaluate import evaluate
    e = evaluate(run, progress=False)
    losses = [m["loss"] for m in run.metrics() if "loss" in m]
    assert losses[0] == pytest.approx(11.9, abs=.3) and losses[-1] < losses[0]   # ln 151,669 = 11.93
    assert e.base.n == 8 and Run(run.path).status["state"] == "finished"


def test_the_held_out_loss_is_a_mean_over_tokens_whatever_the_batches(tmp_path):
    "Rows of very different lengths, a learning rate of 0: the same number for every batch size, and the one by hand"
    rows = [dict(question=f"{i} " * (1 + 7 * (i % 3)), answer="word " * (1 + 12 * (i % 4))) for i in range(10)]
    (tmp_path/"rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = load_config(train_file=str(tmp_path/"rows.jsonl"), eval_file=str(tmp_path/"rows.jsonl"), runs_dir=str(tmp_path), max_steps=1, eval_steps=1, learning_rate=0., max_length=1024, preflight=False)
    data = prepare(base)
    losses = [next(m["eval_loss"] for m in train(replace(base, per_device_eval_batch_size=b), data=data).metrics() if "eval_loss" in m) for b in (1, 4, 10)]
    expected = by_hand(load_model(base, data.tokenizer), DataCollatorForCausalLM(data.tokenizer, 8)(list(data.eval.tokens)))
    assert losses == pytest.approx([expected] * 3, rel=1e-5)


def test_other_rows_under_the_same_name_are_not_resumed(tmp_path):
    file = tmp_path/"rows.jsonl"
    lines = [json.dumps(dict(question=f"{i}?", answer=f"{i}")) for i in range(12)]
    file.write_text("\n".join(lines))
    run = train(load_config(train_file=str(file), runs_dir=str(tmp_path/"runs"), max_steps=5, max_time=0., eval_samples=0))
    file.write_text("\n".join(lines[:9]))
    with pytest.raises(ConfigError, match="not those it began with"): resume(run)
    file.write_text("\n".join(lines))
    assert resume(run).status["state"] == "finished"


def test_a_row_that_no_batch_can_hold_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(SftError, match="a batch holds 20.*--max-tokens-per-batch"): train(load_config("demo", runs_dir=str(tmp_path/"runs"), max_samples=50, max_tokens_per_batch=20))
    assert not (tmp_path/"runs").exists()


def test_a_run_on_rows_of_ones_own_without_held_out_rows(tmp_path):
    "Trains, says that nothing is held out, and an evaluation asks for rows"
    from sft_nb.cli import main
    from sft_nb.evaluate import evaluate
    rows = tmp_path/"mine.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"{k}+1?", completion=str(k + 1))) + "\n" for k in range(40)))
    assert main(["train", "--train-file", str(rows), "--max-steps", "2", "--runs-dir", str(tmp_path/"runs"), "--max-tokens-per-batch", "256"]) == 0
    run = tmp_path/"runs"/"mine-tiny-1"
    assert json.loads((run/"status.json").read_text())["state"] == "finished"
    with pytest.raises(ConfigError, match="no rows are held out.*--eval-file"): evaluate(run, progress=False)
    e = evaluate(run, eval_file=str(rows), eval_samples=4, progress=False)
    assert e.base.n == e.tuned.n == 4 and e.base.answers[0].expected == "1"


def test_plain_text_cannot_be_asked_unless_it_says_where_the_answer_begins(tmp_path):
    from sft_nb.evaluate import answer_rows
    from sft_nb.labels import load_tokenizer
    from sft_nb.model import load_base
    cfg = load_config(task="chat", max_new_tokens=3)
    tok, rows = load_tokenizer(cfg), {"row 1": dict(text="Q: 1+1? A: 2")}
    model = load_base(cfg, tok)
    with pytest.raises(SftError, match="row 1: it has no prompt"): answer_rows(model, tok, rows, cfg, progress=False)
    answer, = answer_rows(model, tok, rows, replace(cfg, response_template="A:"), progress=False).answers
    assert (answer.prompt, answer.expected) == ("Q: 1+1? A:", "2")
