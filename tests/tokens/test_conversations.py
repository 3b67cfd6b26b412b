"""What becomes of a row's messages: the system prompt of the config, and rows that have one of their own."""
import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.tasks.core import task_of
from sft_nb.tokens.conversations import conversation
from sft_nb.tokens.prepare import prepare

USER, ANSWER = dict(role="user", content="1+1?"), dict(role="assistant", content="2")
OWN, BRIEF = dict(role="system", content="Mine."), dict(role="system", content="Be brief.")
TOOLS = dict(tools=[dict(type="function", function=dict(name="add", description="", parameters={}))])


def messages(row:dict, task="chat", **settings)->list[dict]:
    cfg = load_config(task=task, **settings)
    return conversation(task_of(cfg), dict(row), "row 1", cfg)


@pytest.mark.parametrize("row", [
    dict(question="1+1?", answer="2"), dict(prompt="1+1?", completion="2"), dict(messages=[USER, ANSWER])], ids=str)
def test_a_system_prompt_comes_before_rows_that_have_none(row):
    assert messages(row) == messages(row, system_prompt="") == [USER, ANSWER]
    assert messages(row, system_prompt="Be brief.") == [BRIEF, USER, ANSWER]


@pytest.mark.parametrize("row", [
    dict(messages=[OWN, USER, ANSWER]), dict(system="Mine.", instruction="1+1?", output="2")], ids=str)
@pytest.mark.parametrize("prompt", [None, "", "Be brief."])
def test_a_row_keeps_its_own_system_message(row, prompt):
    assert messages(row, system_prompt=prompt) == [OWN, USER, ANSWER]


def test_text_and_tokens_have_no_system_prompt():
    for row in (dict(text="1+1 is 2"), dict(input_ids=[5, 6], labels=[-100, 6])):
        assert messages(row, system_prompt="Be brief.") == messages(row)


def test_tools_stay_with_the_first_message():
    row = dict(messages=[USER, ANSWER], **TOOLS)
    assert messages(row, system_prompt="") == [USER | TOOLS, ANSWER]
    assert messages(row, system_prompt="Be brief.") == [BRIEF | TOOLS, USER, ANSWER]


class Calculator:
    "A task whose conversations begin with a system message"
    name, fields = "calculator", ("question", "answer")
    def rows(self, split, *, n=None, seed=42): return []
    def messages(self, row): return [OWN | TOOLS, USER, ANSWER] if row["answer"] else [OWN]
    def score(self, text, row): return text == row["answer"]


def test_the_system_message_of_a_task_is_replaced_or_left_out():
    row, own = dict(question="1+1?", answer="2"), Calculator()
    def built(row, prompt):
        return conversation(own, dict(row), "row 1", load_config(task="chat", system_prompt=prompt))
    assert built(row, None) == [OWN | TOOLS, USER, ANSWER]
    assert built(row, "Be brief.") == [BRIEF | TOOLS, USER, ANSWER]
    assert built(row, "") == [USER | TOOLS, ANSWER]
    for prompt in (None, "", "Be brief."):
        with pytest.raises(SftError, match="row 1: there is no answer"): built(row | dict(answer=""), prompt)


def test_the_system_prompt_is_trained_with():
    row = dict(question="1+1?", answer="2")
    data = prepare(load_config(task="chat", system_prompt="Be brief.", eval_samples=0), train=[row] * 4)
    text = data.tokenizer.decode(data.train.tokens[0]["input_ids"])
    assert text.index("system\nBe brief.") < text.index("1+1?")
