"Checks of the rows: each fires on a planted defect and is quiet without it"
import copy
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
from learner import learner
from planted import END, bad, small, status
from transformers import AutoConfig

from sft_nb.base.report import edit
from sft_nb.checks.preflight import preflight
from sft_nb.config.load import load_config
from sft_nb.checks.rows import (Survey, check_best_figure, check_bos, check_ends, check_ids, check_kept, check_masked,
                                check_pad, check_prepared, check_prompts, check_row_lengths, check_score, survey)
from sft_nb.tasks.core import Score, task
from sft_nb.tokens.accounting import Counts
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.pipeline import RowStatistics


@pytest.fixture(scope="module")
def data(): return prepare(small())


def tokens(ids, labels): return datasets.Dataset.from_dict(dict(input_ids=ids, labels=labels))
def surveyed(ids, labels): return survey(tokens(ids, labels), ends=[END], bos=1, vocabulary=768)


def test_survey_reads_every_defect_and_nothing_else():
    assert surveyed([[1, 5, END], [4]], [[-100, 5, END], [-100]]) == Survey(2, [1], 1, [], [])
    ids, labels = [[1, 1, 5], [5, 800], [-1, 5], [5, 6]], [[-100, -100, 5], [-100, -100], [-100, 5], [-100, 7]]
    assert surveyed(ids, labels) == Survey(4, [1], 0, [0], [1, 2, 3])
    some = tokens([[1, 1], [5, END]], [[-100, 1], [-100, END]]).select([1])
    assert survey(some, ends=[END], bos=1, vocabulary=9) == Survey(1, [], 1, [], [])


def test_survey_of_several_pieces():
    one, two = tokens([[1, 5, END]], [[-100, 5, END]]), tokens([[4], [1, 1, 5]], [[-100], [-100, -100, 7]])
    both = datasets.concatenate_datasets([one, two, one])
    assert survey(both, ends=[END], bos=1, vocabulary=768) == Survey(4, [1], 2, [2], [2])


@pytest.mark.parametrize("check, wrong", [(check_masked, Survey(9, [3], 9, [], [])),
                                          (check_bos, Survey(9, [], 9, [3], [])),
                                          (check_ids, Survey(9, [], 9, [], [3]))])
def test_rows(check, wrong):
    assert check(Survey(9, [], 9, [], [])) is None
    assert check(wrong).status == "fail" and "number 3" in check(wrong).says


@pytest.mark.parametrize("kind, more, limit", [
    ("gpt2", dict(n_positions=60), 60), ("llama", dict(max_position_embeddings=60), 60),
    ("llama", dict(max_position_embeddings=15, rope_parameters=dict(
        rope_type="yarn", factor=4., original_max_position_embeddings=15)), 60),
    ("gpt_oss", dict(max_position_embeddings=60, rope_parameters=dict(
        rope_type="yarn", factor=30., original_max_position_embeddings=2)), 60),
    ("mistral", dict(sliding_window=8, max_position_embeddings=4096), None), ("bloom", {}, None),
    ("mamba", {}, None), ("falcon", dict(alibi=True, max_position_embeddings=60), None),
    ("falcon", dict(alibi=False, max_position_embeddings=60), 60), ("jamba", dict(max_position_embeddings=60), None),
    ("gemma3", dict(text_config=dict(max_position_embeddings=60)), 60), ("rwkv", dict(context_length=60), None)])
def test_rows_longer_than_the_positions_of_a_model(data, kind, more, limit):
    found = check_row_lengths(data, AutoConfig.for_model(kind, **more))
    assert (found is None) == (limit is None)
    if not limit: return
    assert found.status == "fail" and "rows are longer than the 60 positions of tiny" in found.says
    assert "max_length=60" in str(found.fix)
    assert check_row_lengths(prepare(small(max_length=60)), AutoConfig.for_model(kind, **more)) is None


def test_ends():
    def split(seen, **counts): return SimpleNamespace(train=SimpleNamespace(seen=seen, counts=Counts(**counts)))
    chat, text = split(RowStatistics(dict(messages=9))), split(RowStatistics(dict(text=9), with_more=1))
    found = [status(check_ends(Survey(100, [], n, [], []), chat)) for n in (0, 89, 90, 100)]
    assert found == ["fail", "warn", "ok", "ok"]
    assert check_ends(Survey(100, [], 0, [], []), text).status == "warn"
    assert "end token after each row" in str(check_ends(Survey(100, [], 0, [], []), chat).fix)
    cut = split(RowStatistics(dict(messages=9)), cut=100)
    assert "max_length" in str(check_ends(Survey(100, [], 0, [], []), cut).fix)


def test_truncation_that_takes_every_end(tokenizer):
    "seed 003: no row kept its end token, and nobody said so"
    cfg = small(task="chat", max_length=12, on_long="cut", **learner())
    row = dict(question="Who?", answer="one two three four five six seven eight nine ten " * 2)
    made = prepare(cfg, tokenizer, train=[row] * 3)
    assert bad(preflight(cfg, data=made))["data.ends"].status == "fail"


def test_kept():
    def made(**counts):
        train = SimpleNamespace(n_read=100, counts=Counts(**counts), reasons=dict(why=counts["dropped"]))
        return SimpleNamespace(train=train, cfg=load_config(task="chat"))
    half = made(dropped=50, longest_dropped=99, too_long=50)
    assert check_kept(made(dropped=10)) is None
    assert [check_kept(d).status for d in (made(dropped=6, cut=5), half)] == ["warn", "fail"]
    assert str(check_kept(half).fix) == "max_length=99"
    look = check_kept(made(dropped=50, longest_dropped=99, too_long=3)).fix
    assert (str(look), look.says("shell")) == ("data.train.dropped", "sft_nb data --task chat --dropped 5")
    assert check_kept(made(dropped=90, requested=89)) is None
    cut = check_kept(made(dropped=0, cut=60, length_of_most=9000))
    assert (cut.status, cut.fix.says("shell")) == ("fail", "--max-length 9000")   # not train.dropped, which is empty
    assert str(check_kept(made(dropped=5, cut=60)).fix) == "a larger max_length, or look at data.train.cut"
    assert "30 of 60 rows are left out and 0 cut; 40 more" in check_kept(made(dropped=70, requested=40)).says


def test_each_reason_for_which_rows_are_left_out_has_its_own_fix(tokenizer):
    "Duplicates that the settings ask to leave out are no failure, and none that a longer max_length would bring back"
    rows = [dict(question=f"What is {k} + 1?", answer=str(k + 1)) for k in range(60)]
    rows = rows * 4 + [dict(question="?", answer="")] * 3 + [dict(question="word " * 2000, answer="1")] * 2
    data = prepare(load_config(task="chat", drop_duplicates=True), tokenizer, train=rows)
    found = {f.check: f for f in data.report.findings}
    assert (data.train.counts.dropped, data.train.counts.requested) == (185, 180)
    assert "180 duplicate" in found["train_left_out"].says and found["train_left_out"].status == "ok"
    assert found["train_dropped"].says == "3 empty answers" and "max_length" not in str(found["train_dropped"].fix)
    assert "tokens instead of" in found["train_too_long"].says
    assert str(found["train_too_long"].fix) == f"on_long='drop', or max_length={data.train.counts.longest_dropped}"
    assert check_kept(data) is None
    said = prepare(load_config(task="chat", drop_duplicates=True, on_long="drop"), tokenizer, train=rows)
    assert {f.check: f.status for f in said.report.findings}["train_too_long"] == "ok"


def test_pad(tokenizer):
    seen = Survey(9, [], 9, [], [])
    assert check_pad(tokenizer, seen) is None
    other = copy.deepcopy(tokenizer)
    other.pad_token = other.eos_token
    assert check_pad(other, seen).status == "warn" and check_pad(other, replace(seen, ended=0)).status == "fail"
    other.pad_token = None
    assert check_pad(other, seen).status == "fail"


def test_prompts(data, tokenizer):
    other = copy.deepcopy(tokenizer)
    assert check_prompts(data).status == "ok"
    other.chat_template = other.chat_template.replace("assistant\\n", "assistant: ")
    assert check_prompts(replace(data, tokenizer=other)).status == "fail"
    assert check_prompts(data, train_on_prompt=True).status == "skipped"
    text = small(task="chat")
    assert check_prompts(prepare(text, tokenizer, train=[dict(text="Only text.")])).status == "skipped"


def test_prompts_of_several_turns(tokenizer):
    cfg = small(task="chat")
    def talk(k):
        turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
        return [dict(role=role, content=f"{text} {k}") for role, text in turns]
    made = prepare(cfg, tokenizer, train=[dict(messages=talk(k)) for k in range(3)])
    assert "6 answers" in check_prompts(made).says
    ids = [i[:-8] + [7] + i[-7:] for i in made.train.tokens["input_ids"]]   # in front of the second answer
    broken = tokens(ids, list(made.train.tokens["labels"]))
    assert check_prompts(replace(made, train=replace(made.train, tokens=broken))).says.startswith(
        "3 of the first rows")


@pytest.mark.parametrize("how, rows, named, instead", [
    (dict(task="arithmetic"), None, "acuracy", "accuracy"),
    (dict(task="arithmetic"), None, "bleu", "accuracy"),
    (dict(task="chat"), [dict(question=f"{k}?", answer=f"{k} and more") for k in range(9)], "f2", "f1"),
], ids=str)
def test_a_figure_that_answers_do_not_have_is_noticed_before_the_training(tokenizer, how, rows, named, instead):
    made = prepare(small(eval_samples=4, **how), tokenizer, train=rows, eval=rows and rows[:4])
    found = check_best_figure(made, metric_for_best_model=named)
    assert found.status == "warn" and found.fix == edit(metric_for_best_model=instead)
    for known in ("loss", "answered", "ended", instead):
        assert check_best_figure(made, metric_for_best_model=known) is None, known
    none = prepare(small(eval_samples=0, **how), tokenizer, train=rows)
    assert check_best_figure(none, metric_for_best_model=named) is None



def test_a_task_that_cannot_score_is_found_before_the_training(tokenizer):
    @task("question", "answer")
    def forgetful(text): return True
    @task("question", "answer")
    def wordy(text, row): return Score(False, text, row["answer"], dict(f1="high"))
    @task("question", "answer")
    def fine(text, row): return text == row["answer"]
    rows = [dict(question=f"{k}?", answer=str(k)) for k in range(6)]
    for broken, says in ((forgetful, "takes 1 positional argument"), (wordy, "unsupported operand")):
        made = prepare(small(), tokenizer, task=broken, train=rows, eval=rows[:2])
        found = check_score(made)
        assert found.status == "fail" and f"task {broken.name} cannot score the answer of eval rows row 1" in found.says
        assert says in found.says
    made = prepare(small(), tokenizer, task=fine, train=rows, eval=rows[:2])
    assert check_score(made) is None and check_score(replace(made, eval=None)) is None


def test_the_figure_is_looked_for_in_the_first_held_out_row_that_is_kept(tokenizer, tmp_path):
    "The first one cannot be read, the second has no answer"
    lines = ["{broken", '{"question": "1?", "answer": ""}', '{"question": "2?", "answer": "3"}']
    (tmp_path/"eval.jsonl").write_text("\n".join(lines))
    made = prepare(small(task="chat", eval_file=(str(tmp_path/"eval.jsonl"),), on_bad_row="drop"), tokenizer,
                   train=[dict(question="a", answer="b")] * 4)
    assert check_best_figure(made, metric_for_best_model="f1") is None
    found = check_best_figure(made, metric_for_best_model="f2")
    assert found.status == "warn"
    found_by_choice = check_best_figure(made, metric_for_best_model="f2", load_best_model_at_end=True)
    assert found_by_choice.status == "fail"   # or the first checkpoint would end the training
    assert found.fix == edit(metric_for_best_model="f1")


def test_rows_without_a_prompt_have_no_answers_to_rank_checkpoints_by(tokenizer):
    rows = [dict(text=f"Some text of {k} words.") for k in range(6)]
    made = prepare(small(task="chat"), tokenizer, train=rows, eval=rows[:2])
    found = check_best_figure(made, metric_for_best_model="f1")
    assert "no prompt to answer" in found.says and found.fix == edit(metric_for_best_model="loss")
    loss = load_config(metric_for_best_model="perplexity").metric_for_best_model
    assert check_best_figure(made, metric_for_best_model=loss) is None


def test_no_figure_is_refused_where_a_task_cannot_score_an_empty_answer(data):
    class Odd:
        name, fields = "odd", data.task.fields
        def __getattr__(self, name): return getattr(data.task, name)
        def score(self, text, row): raise ZeroDivisionError
    odd = replace(data, task=Odd())
    assert data.eval is not None
    assert check_best_figure(odd, metric_for_best_model="mine") is None


def test_the_data_report_is_taken_over(data):
    names = {f.check for f in check_prepared(data)}
    assert {"data.train_dropped", "data.held_out"} <= names and "data.train_ends" not in names
    twice = prepare(small(drop_duplicates=False, task="chat"), train=[dict(question="a", answer="b")] * 4)
    assert bad(preflight(twice))["data.train_duplicates"].status == "warn"
