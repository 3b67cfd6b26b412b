"""The report finds what nobody would look for, and each example knows its row."""
import pytest
from samples import finding, no_eval, pairs, write

from sft_nb.config import load_config
from sft_nb.report import ConfigError, SftError
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer


def test_held_out_rows_that_are_trained_on_are_found(tmp_path, tokenizer):
    a = write(tmp_path/"a.jsonl", [dict(question="1+1?", answer="2"), dict(question="1+2?", answer="3")])
    found = finding(prepare(load_config(train_file=a, eval_file=a), tokenizer), "held_out")
    assert (found.status, found.says[:9]) == ("warn", "2 held-ou")


def test_what_a_small_file_or_two_settings_at_once_say(tmp_path, tokenizer):
    a = write(tmp_path/"a.jsonl", pairs(4))
    with pytest.raises(SftError, match="none of the rows falls into a held-out share of 0.001"):
        prepare(load_config(train_file=a, eval_fraction=.001), tokenizer)
    with pytest.raises(ConfigError, match="eval_file is set too"):
        prepare(load_config(train_file=a, eval_file=a, eval_fraction=.1), tokenizer)


def test_what_a_foreign_template_and_a_last_word_say():
    foreign = load_tokenizer(load_config())
    foreign.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot_id|>{% endfor %}"
                             "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    talk = [dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="bye")]
    data = prepare(no_eval(), foreign, train=[*pairs(3), dict(messages=talk)])
    warned = {f.check for f in data.report.findings if f.status == "warn"}
    assert {"template_end", "train_more"} <= warned and "<|eot_id|>" in str(data.report)


def test_the_row_behind_an_example(tokenizer):
    rows = pairs(30)
    rows[3] = dict(question="?", answer="")
    s = prepare(no_eval(task="chat"), tokenizer, train=rows).train
    assert s.row(2) == ("train rows row 3", rows[2]) and s.row(3) == ("train rows row 5", rows[4])


def test_every_finding_but_the_ends_of_training_rows(tokenizer):
    data = prepare(load_config("demo", max_length=60, on_long="cut"), tokenizer)
    rest = [f for f in data.report.findings if f.check != "train_ends"]
    assert data.findings_but_ends == rest and len(rest) == len(data.report.findings) - 1
