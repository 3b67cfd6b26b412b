"""No column is ignored silently: it is honoured, refused or named in the report."""
import datasets
import pytest
from conftest import shared
from samples import finding, no_eval, supervised, trl_template, write

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer

SUM = dict(question="1+1?", answer="2")
ASKED = dict(prompt="1+1?", completion="2")
TALK = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
WRONG = [TALK[0], dict(role="assistant", content="3")]


def chat(tokenizer, *rows, **settings): return prepare(no_eval(task="chat", **settings), tokenizer, train=list(rows))


def warned(data)->set[str]: return {f.check for f in data.report.findings if f.status == "warn"}


def ids(data)->list[list[int]]: return [x["input_ids"] for x in data.train.tokens]


@pytest.fixture(scope="module")
def plain(tokenizer): return ids(chat(tokenizer, SUM))


def test_columns_that_nobody_reads_are_named(tokenizer, plain):
    rows = [SUM | dict(thought="easy", topic=None), SUM | dict(thought="hard", id=3)]
    data = chat(tokenizer, *rows)
    found = finding(data, "train_columns")
    assert ids(data) == plain * 2 and data.train.seen.unread == dict(thought=2, id=1)
    assert found.status == "warn" and found.says.startswith("thought is not used")   # an id cannot be learned
    assert found.fix.settings == dict(ignore_columns=("thought",))
    quiet = chat(tokenizer, *rows, ignore_columns=("thought", "id"))
    assert "train_columns" not in {f.check for f in quiet.report.findings} and ids(quiet) == ids(data)
    ordinary = chat(tokenizer, SUM | dict(id=3, agent="Ann", sent="2024-01-01"))   # nothing to be warned of
    assert finding(ordinary, "train_columns").status == "ok" and "train_columns" not in warned(ordinary)
    assert ordinary.report.figures["columns_not_learned_from"] == "id, agent, sent"


def test_a_text_and_its_label_are_proposed_as_question_and_answer(tokenizer):
    rows = [dict(text="my parcel is late", label="shipping"), dict(text="I cannot log in", label="account")]
    found = finding(prepare(no_eval(), tokenizer, train=rows), "train_columns")
    assert found.fix.settings["fields"] == ("question=text", "answer=label")
    assert str(found.fix).endswith("ignore_columns=('label',), or a task that reads them"), str(found.fix)
    data = prepare(no_eval(fields=found.fix.settings["fields"]), tokenizer, train=rows)
    assert supervised(tokenizer, data)[0].startswith("shipping") and "train_columns" not in warned(data)
    other = finding(prepare(no_eval(), tokenizer, train=[dict(text="a poem", mood="sad")]), "train_columns")
    assert "fields" not in other.fix.settings


def test_what_messages_hold_that_nobody_reads_is_named_or_refused(tokenizer, plain):
    def talk(**more): return dict(messages=[TALK[0] | more, TALK[1]])
    rows = talk(mood="glad", tool_calls=None), talk(id=3), dict(conversations=[TALK[0] | dict(mood="sad"), TALK[1]])
    data = chat(tokenizer, *rows)
    assert ids(data) == plain * 3
    assert data.train.seen.unread == {"messages.mood": 1, "messages.id": 1, "conversations.mood": 1}
    assert chat(tokenizer, rows[0], ignore_columns="messages.mood").train.seen.unread == {}
    with pytest.raises(SftError, match="it has messages.images, and only text is learned here"):
        chat(tokenizer, talk(images=["a.png"]))


def test_what_a_task_of_ones_own_reads_is_used(tokenizer):
    class Labelled:
        name, fields = "labelled", ("text",)
        def messages(self, row): return [TALK[0] | dict(content=row["text"]), TALK[1] | dict(content=str(row["label"]))]
        def rows(self, split, **_): return []
        def score(self, text, row): ...
    rows = [dict(text="a", label=False, weight=.5), dict(text="b", label=True, weight=.5)]
    with pytest.raises(SftError, match="weight is 0.5"): prepare(no_eval(), tokenizer, task=Labelled(), train=rows)
    data = prepare(no_eval(ignore_columns="weight"), tokenizer, task=Labelled(), train=rows)
    assert supervised(tokenizer, data) == ["False<|im_end|>", "True<|im_end|>"] and data.train.seen.unread == {}


@pytest.mark.parametrize("column, bad, good", [
    ("label", False, True), ("label", "false", "True"), ("kto_tag", False, True), ("kto_tag", 0, 1),
    ("label", 0, 1.), ("weight", 0, 1),
    ("loss_weight", "0.0", 1.)])
def test_a_row_that_is_called_bad_is_not_learned(tokenizer, plain, column, bad, good):
    data = chat(tokenizer, ASKED | {column: good}, ASKED | dict(completion="3") | {column: bad})
    assert ids(data) == plain and [d["where"] for d in data.dropped] == ["train rows row 2"]
    assert data.dropped[0]["reason"].startswith(f"{column} is ") and data.train.seen.unread == {}


def test_a_label_of_zero_beside_prompt_and_completion_is_a_verdict(tokenizer, plain):
    "KTO's false, as a table writes it; the report says how to keep the rows if it is a class"
    rows = [ASKED | dict(label=1), ASKED | dict(completion="3", label=0), ASKED | dict(completion="4", label="0")]
    data = chat(tokenizer, *rows)
    found = finding(data, "train_label")
    assert ids(data) == plain and data.train.seen.label_zero == 2
    assert found.status == "warn" and found.fix.settings == dict(ignore_columns=("label",))
    assert chat(tokenizer, *rows, ignore_columns="label").train.n_kept == 3


def test_a_class_is_no_verdict(tokenizer):
    data = chat(tokenizer, SUM | dict(label=0), SUM | dict(label=1), ASKED | dict(label=2))
    assert data.train.n_kept == 3 and "train_columns" in warned(data) and "train_label" not in warned(data)


@pytest.mark.parametrize("column", ["images", "image", "audios", "videos"])
def test_what_is_no_text_is_refused(tokenizer, column):
    with pytest.raises(SftError, match=f"row 1: it has {column}, and only text is learned here") as e:
        chat(tokenizer, SUM | {column: ["a.png"]})
    assert "ignore_columns" in str(e.value) and len(str(e.value)) <= 300
    assert chat(tokenizer, SUM | {column: []}, SUM | {column: None}).train.n_kept == 2


def test_of_two_answers_the_chosen_one_is_learned_behind_one_prompt(tokenizer, plain):
    spelled = [
        dict(prompt="1+1?", chosen="2", rejected="3"),
        dict(prompt="1+1?", chosen=TALK, rejected=WRONG),
        dict(prompt=TALK[:1], chosen=TALK, rejected=WRONG),
        dict(prompt=TALK[:1], chosen=TALK[1:], rejected=WRONG[1:]),
        dict(chosen=TALK, rejected=WRONG),
        dict(prompt="1+1?", chosen="1+1?2", rejected="1+1?3"),
        dict(prompt=TALK[:1], completion=TALK)]
    data = chat(tokenizer, *spelled)
    said = finding(data, "train_pairs").says
    assert ids(data) == plain * 7 and said.startswith("6 preference rows: SFT on the chosen answer")
    assert "same score" not in said
    with pytest.raises(SftError, match="chosen is text, and there is no prompt"):
        chat(tokenizer, dict(chosen="1+1? 2", rejected="1+1? 3"))


def test_a_context_stands_above_its_question(tokenizer):
    for row in (SUM, dict(instruction="1+1?", output="2")):
        data = chat(tokenizer, row | dict(context="In base 2."), row | dict(context="1+1"), row | dict(context=""))
        says = [tokenizer.decode(i) for i in ids(data)]
        assert ["In base 2.\n\n1+1?" in says[0], says[1], data.train.seen.unread] == [True, says[2], {}]


def test_padding_is_no_example_and_packed_rows_are_several(tokenizer, plain):
    one, = plain
    packed = dict(input_ids=one + one, seq_lengths=[len(one)] * 2)
    restarts = dict(input_ids=one + one, position_ids=[*range(len(one))] * 2)
    n = len(one)
    padded = dict(input_ids=[0, 0, *one], attention_mask=[0, 0] + [1] * n, labels=[0, 0, *one])
    both = dict(input_ids=one + [0, 0], attention_mask=[1] * n + [0, 0], position_ids=[*range(n), 0, 0])
    data = chat(tokenizer, packed, restarts, padded, both)
    assert ids(data) == plain * 6 and data.train.n_read == 4 and data.train.seen.unread == {}
    for row, says in ((packed | dict(seq_lengths=[3]), "seq_lengths add up to 3"),
                      (padded | dict(attention_mask=[1]), f"{n + 2} input_ids and 1 attention_mask")):
        with pytest.raises(SftError, match=says): chat(tokenizer, row)


def test_columns_that_datasets_filled_with_none_are_not_there(tokenizer, plain):
    "One set of all formats: every row has all columns, and every message all keys"
    call = dict(type="function", function=dict(name="f", arguments='{"a": 1}'))
    rows = [dict(messages=TALK), SUM, ASKED, dict(instruction="1+1?", output="2"), dict(chosen=TALK, rejected=WRONG),
            dict(messages=[TALK[0], dict(role="assistant", tool_calls=[call])]), dict(messages=TALK, images=[])]
    every = {k: None for row in rows for k in row}
    padded = datasets.Dataset.from_list([every | row for row in rows])
    data = prepare(no_eval(task="chat"), tokenizer, train=padded)
    assert ids(data)[:5] + ids(data)[6:] == plain * 6 and data.train.seen.unread == {}


def test_arguments_for_the_template_reach_it(tokenizer, plain):
    off, on = (SUM | dict(chat_template_kwargs=dict(enable_thinking=x)) for x in (False, True))
    name, template = str(shared("tokenizers/qwen3")), trl_template("qwen3.jinja")
    qwen = load_tokenizer(load_config(tokenizer=name, chat_template=template))
    says = supervised(qwen, chat(qwen, off, on))
    assert says[0] == "2<|im_end|>" and says[1].startswith("<think>")   # where it does not think, the prompt says so


def test_arguments_for_no_template_are_named(tokenizer):
    none = load_tokenizer(load_config(chat_template="none"))
    data = chat(none, SUM | dict(chat_template_kwargs=dict(enable_thinking=True)))
    assert data.train.seen.unread == dict(chat_template_kwargs=1)


def test_tools_and_a_system_message_stand_beside_every_format(tokenizer):
    beside = dict(system="Be brief.", tools=[dict(name="divide")])
    told = {tokenizer.decode(i) for row in (SUM, ASKED, dict(messages=TALK), dict(instruction="1+1?", output="2"))
            for i in ids(chat(tokenizer, row | beside))}
    assert len(told) == 1 and "Be brief." in min(told) and "divide" in min(told)
    with pytest.raises(SftError, match="two system messages"):
        chat(tokenizer, dict(messages=[dict(role="system", content="Be long."), *TALK], system="Be brief."))


def test_bad_answers_are_not_asked_for_again(tmp_path, tokenizer):
    from sft_nb.tasks.core import get_task
    from sft_nb.tokens.conversations import read_split
    file = write(tmp_path/"a.jsonl", [ASKED | dict(label=k % 2 == 0) for k in range(4)])
    held_out = read_split(load_config(eval_file=file), get_task("chat"), "eval")
    assert list(held_out) == ["a.jsonl line 1", "a.jsonl line 3"]


def test_a_second_text_of_a_message_is_named(tokenizer):
    asked = dict(role="user", content="Hi")
    def talk(**more): return dict(messages=[asked, dict(role="assistant", content="Yes") | more])
    assert chat(tokenizer, talk(body="No, it is not.")).train.seen.unread == {"messages.body": 1}
    assert chat(tokenizer, talk(body="Yes")).train.seen.unread == {}   # the same
