"""Settings about rows that would have no effect, or would take each other back, are refused."""
import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, MissingFileError, edit
from sft_nb.runs.directory import Run, plot
from sft_nb.tasks.core import task
from sft_nb.tokens.conversations import source_weights
from sft_nb.tokens.prepare import prepare, with_data
from sft_nb.tokens.tokenizer import load_tokenizer
from sft_nb.training.train import resume, train
from sft_nb.evaluation.evaluate import evaluate
from learner import small

ROWS = [dict(question=f"{k}?", answer=str(k)) for k in range(20)]


def written(folder, name="rows.jsonl", rows=ROWS)->str:
    import json
    (folder/name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder/name)


def test_data_of_one_seed_is_not_trained_with_another_if_the_seed_decides_what_is_held_out(tmp_path, tokenizer):
    how = dict(task="chat", train_file=written(tmp_path), eval_fraction=.3)
    data = prepare(load_config(**how), tokenizer)
    with pytest.raises(ConfigError, match="prepared with seed 42, and this config has seed 1") as e:
        with_data(load_config(**how, seed=1), data)
    assert e.value.fix.settings == dict(seed=42)
    assert with_data(load_config(**how), data).seed == 42

    how = how | dict(eval_fraction=None)   # every row is a training row
    data = prepare(load_config(**how), tokenizer)
    assert with_data(load_config(**how, seed=1), data).seed == 1
    given = load_config(task="chat", eval_fraction=.3)   # a run keeps rows from memory as they were divided
    assert with_data(load_config(given, seed=1), prepare(given, tokenizer, train=ROWS)).seed == 1
    generated = load_config("demo", max_samples=20)
    with pytest.raises(ConfigError, match="seed"): with_data(load_config(generated, seed=1), prepare(generated))


def test_data_of_one_task_is_not_trained_as_another(tmp_path, tokenizer):
    how = dict(train_file=written(tmp_path))
    data = prepare(load_config(task="chat", **how), tokenizer)
    with pytest.raises(ConfigError, match="prepared with task 'chat', and this config has task 'gsm8k'"):
        with_data(load_config(task="gsm8k", **how), data)
    assert with_data(load_config(task="auto", **how), data).task == "chat"

    @task("question", "answer")
    def equal(text, row): return text == row["answer"]
    cfg = load_config("demo", max_samples=5)
    data = prepare(cfg, tokenizer, task=equal, train=ROWS)   # the config that `prepare` was given is no contradiction
    assert with_data(cfg, data).task == data.cfg.task == "memory:equal"


def test_weights_without_files_and_a_second_way_to_hold_out_are_refused(tmp_path, tokenizer):
    for how in (dict(train=ROWS), {}):
        with pytest.raises(ConfigError, match="train_weights: the rows come from no file"):
            prepare(load_config("demo", train_weights=(3.,)), tokenizer, **how)
    for by in (dict(eval_fraction=.5), dict(eval_rows=3)):
        with pytest.raises(ConfigError, match=f"{next(iter(by))}: held-out rows are passed too"):
            prepare(load_config(task="chat", **by), tokenizer, train=ROWS, eval=ROWS[:2])
    with pytest.raises(ConfigError, match="eval_rows: it is 20, and there are 20 rows.*Fix: eval_rows=2"):
        prepare(load_config(task="chat", train_file=written(tmp_path), eval_rows=20), tokenizer)
    most = prepare(load_config(task="chat", train_file=written(tmp_path), eval_rows=13), tokenizer)
    assert 6 < len(most.eval.tokens) < 19


def test_copies_that_a_weight_asks_for_are_neither_dropped_nor_reported(tmp_path, tokenizer):
    cfg = load_config(task="chat", train_file=(written(tmp_path),), train_weights=(2.,))
    data = prepare(cfg, tokenizer)
    assert data.train.n_read == 40 and "train_duplicates" not in {f.check for f in data.report.findings}
    with pytest.raises(ConfigError, match="drop_duplicates: a weight of 2 repeats rows"):
        source_weights(load_config(cfg, drop_duplicates=True))


def test_a_template_that_leaves_out_the_question_is_reported(tmp_path):
    file = tmp_path/"template.jinja"
    file.write_text("{% for m in messages %}{{'<|im_start|>' + m.role}}\n{% if m.role == 'user' %}{{m.text}}{% else %}"
                    "{{m.content}}{% endif %}<|im_end|>\n{% endfor %}"
                    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    cfg = load_config(task="chat", chat_template=str(file), eval_samples=0)
    found = {f.check: f for f in prepare(cfg, load_tokenizer(cfg), train=ROWS).report.findings}
    assert "leaves out what the user writes" in found["template_user"].says
    usual = prepare(load_config(task="chat", eval_samples=0), train=ROWS).report.findings
    assert "template_user" not in {f.check for f in usual}


def test_a_prompt_has_a_column_in_it():
    with pytest.raises(ConfigError, match="none of the columns is in 'Q: {qestion}'"):
        task("question", "answer", prompt="Q: {qestion}")


def test_a_run_whose_rows_have_gone_says_where_their_place_is_written(tmp_path):
    files = dict(train_file=written(tmp_path), eval_file=written(tmp_path, "held.jsonl"))
    run = train(small(tmp_path/"runs", task="chat", eval_samples=2, max_time=0., **files))
    (tmp_path/"rows.jsonl").rename(tmp_path/"elsewhere.jsonl")
    (tmp_path/"held.jsonl").rename(tmp_path/"held2.jsonl")
    says = "Fix: put it back, or write its new place into .*config.json"
    with pytest.raises(MissingFileError, match=says): resume(run)
    with pytest.raises(MissingFileError, match=says): evaluate(run, checkpoint=run.checkpoints()[0].name)
    with pytest.raises(MissingFileError, match="no-such.jsonl") as e:
        evaluate(run, checkpoint=run.checkpoints()[0].name, eval_file=(str(tmp_path/"no-such.jsonl"),))
    assert "config.json" not in str(e.value.fix)


def test_a_run_is_named_by_a_path_and_a_checkpoint_also_by_its_step(undisturbed):
    assert undisturbed.weights(6) == undisturbed.weights("checkpoint-6")
    assert len(plot(str(undisturbed.path)).axes) == len(plot(undisturbed).axes)
    for wrong in (5, None):
        with pytest.raises(ConfigError, match="run: it is of type"): Run(wrong)


def test_the_fix_of_a_full_run_as_an_earlier_adapter_is_its_model(tmp_path):
    from sft_nb.model.adapter import load_model
    run = train(small(tmp_path/"runs", method="full", max_steps=1))
    cfg = small(tmp_path/"more", method="full", adapter_name_or_path=str(run.path))
    with pytest.raises(ConfigError) as e: load_model(cfg, load_tokenizer(cfg))
    assert e.value.fix == edit(model=str(run.path/"adapter"), adapter_name_or_path=None)
