"""The report finds what nobody would look for, and each example knows its row."""
import copy, re

import datasets, pandas
import pytest
from samples import finding, no_eval, pairs, write

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError, SftError
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


@pytest.mark.parametrize("question, share, says", [
    ("1+1?", .2, "every row of a.jsonl falls into a held-out share of 0.2. Fix: eval_fraction=None, or more rows"),
    ("1+2?", .5, "none of the rows falls into a held-out share of 0.5; .*Fix: eval_file='rows.jsonl'")])
def test_one_row_cannot_be_cut_in_two(tmp_path, tokenizer, question, share, says):
    file = write(tmp_path/"a.jsonl", [dict(question=question, answer="2")])
    with pytest.raises(SftError, match=says):
        prepare(load_config(task="chat", train_file=file, eval_fraction=share), tokenizer)


def test_what_a_foreign_template_and_a_last_word_say():
    foreign = load_tokenizer(load_config())
    foreign.chat_template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot_id|>{% endfor %}"
                             "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    talk = [dict(role="user", content="a"), dict(role="assistant", content="b"), dict(role="user", content="bye")]
    data = prepare(no_eval(), foreign, train=[*pairs(3), dict(messages=talk)])
    warned = {f.check for f in data.report.findings if f.status == "warn"}
    assert {"template_end", "train_more"} <= warned and "<|eot_id|>" in str(data.report)


@pytest.mark.parametrize("behind, ends", [("", False), ("\n", False), ("<|im_end|>\n", True)])
def test_an_end_token_that_the_template_does_not_write_is_a_finding(behind, ends):
    bare = load_tokenizer(load_config())
    bare.chat_template = ("{% for m in messages %}{{ m.role }}: {{ m.content }}BEHIND{% endfor %}"
                          "{% if add_generation_prompt %}assistant: {% endif %}").replace("BEHIND", behind)
    data = prepare(no_eval(), bare, train=pairs(3))
    assert all(x["labels"][-1] == bare.eos_token_id for x in data.train.tokens)
    found = [f for f in data.report.findings if f.check == "template_end"]
    assert len(found) == (not ends) and all(f"{bare.eos_token} is appended" in f.says for f in found)


def test_the_row_behind_an_example(tokenizer):
    rows = pairs(30)
    rows[3] = dict(question="?", answer="")
    s = prepare(no_eval(task="chat"), tokenizer, train=rows).train
    assert s.row(2) == ("train rows row 3", rows[2]) and s.row(3) == ("train rows row 5", rows[4])


def test_every_finding_but_the_ends_of_training_rows(tokenizer):
    data = prepare(load_config("demo", max_length=60, on_long="cut"), tokenizer)
    rest = [f for f in data.report.findings if f.check != "train_ends"]
    assert data.findings_but_ends == rest and len(rest) == len(data.report.findings) - 1


# what a template did to answers

def found_in(tokenizer, template, *rows, **settings):
    "Findings of the training rows by their check, and the figure of reasoning"
    tok = copy.deepcopy(tokenizer)
    tok.chat_template, tok.reasoning = template or tok.chat_template, settings.get("reasoning", "auto")
    report = prepare(no_eval(task="chat", **settings), tok, train=[dict(messages=m) for m in rows]).report
    return {f.check: f for f in report.findings}, report.figures["train"].get("reasoning")


def asked(*answers): return [m for a in answers for m in (dict(role="user", content="1?"), dict(role="assistant", **a))]


CALL = dict(content="", tool_calls=[dict(function=dict(name="f", arguments={}))])
NO_HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TWO_ENDS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|><|pad|>{% endfor %}"
OTHERWISE = "{% for m in messages %}{{ loop.length }} {{ m.content }}<|im_end|>{% endfor %}"
THINKING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.reasoning_content %}<think>"
            "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize("template, answers, check, status, says", [
    (None, [dict(content=""), dict(content="2")], "train_empty", "warn", "1 answer is empty, so not supervised"),
    (None, [CALL], "train_tools", "warn", "the calls of 1 row are written as JSON text"),
    (NO_HEADER, [dict(content="2")], "train_header", "warn",
     r"writes '<\|im_start\|>assistant' in front of an answer, and does not end the prompt with it .*train rows row 1"),
    (TWO_ENDS, [dict(content="2")], "template_end", "warn",
     r"ends every answer with <\|endoftext\|> <\|pad\|>.*tokenizer, <\|im_end\|>, is not among them"),
    (OTHERWISE, [dict(content="2")], "train_parted", "ok", "only the answer's own words are supervised"),
])
def test_what_a_template_does_to_answers_is_said(tokenizer, template, answers, check, status, says):
    found, _ = found_in(tokenizer, template, asked(*answers))
    assert found[check].status == status and re.search(says, found[check].says), found[check]
    plain, _ = found_in(tokenizer, None, asked(dict(content="2")))
    assert check not in plain


def test_a_header_that_the_prompt_lacks_is_one_finding(tokenizer):
    header, _ = found_in(tokenizer, NO_HEADER, asked(dict(content="2")))
    assert "train_header" in header and "template_prompt" not in header
    thinks = NO_HEADER + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    other, _ = found_in(tokenizer, thinks, asked(dict(content="2")))
    assert "train_empty_reasoning" in other and not {"template_prompt", "train_header"} & {*other}


def test_texts_of_one_token_teach_only_to_end(tokenizer):
    rows = [dict(text="a"), dict(text="a"), dict(text="A text of several tokens.")]
    found = finding(prepare(no_eval(task="chat"), tokenizer, train=rows), "train_one_token")
    assert found.status == "warn" and found.says.startswith("2 rows of text have one token")
    assert found_in(tokenizer, None, asked(dict(content="2")))[0].get("train_one_token") is None


def test_what_became_of_the_reasoning_is_said(tokenizer):
    thoughts = [dict(content="2", reasoning_content=hm) for hm in ("1 and 1", "so")]
    rows = [asked(thoughts[0], dict(content="3"), thoughts[1]), asked(dict(content="2"))]
    assert found_in(tokenizer, THINKING, *rows)[1] == "kept in 2 turns, removed by the template from 1, empty in 1"
    assert found_in(tokenizer, None, *rows, reasoning="inline")[1] == "kept in 2 turns, empty in 1"
    assert found_in(tokenizer, None, *rows, reasoning="drop")[1] == "empty in 1, dropped from 2"
    assert found_in(tokenizer, None, rows[1])[1] is None


BLOCK = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}OPENS{% endif %}"
         "{{ m.content }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}")


@pytest.mark.parametrize("opens, prompt, learned", [
    ("<think>\n\n</think>\n\n", "", True), ("<think>\n\n</think>\n\n", "<think>\n", True),
    ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", False), ("", "", False)])
def test_an_empty_block_that_is_learned_is_said(tokenizer, opens, prompt, learned):
    "As Qwen3's template writes it into answers without reasoning"
    template = BLOCK.replace("OPENS", opens).replace("PROMPT", prompt)
    said = found_in(tokenizer, template, asked(dict(content="2")), asked(dict(content="3")))[1]
    assert said == ("an empty block is learned in 2 of 2 answers looked at" if learned else None)


def test_the_end_marker_that_most_answers_carry_is_named(tokenizer):
    rows = [dict(question=f"{k}+1?", answer=f"{k + 1}{'</s>' if k % 3 else '<|eot_id|>'}") for k in range(9)]
    said = finding(prepare(no_eval(task="chat"), tokenizer, train=rows), "train_end_markers").says
    assert said.startswith("6 of 9 answers looked at end with '</s>'")


def test_rows_that_are_none_are_named_by_what_was_handed_over(tmp_path, tokenizer):
    for rows in ([], pandas.DataFrame(dict(question=[], answer=[]))):
        with pytest.raises(SftError) as e: prepare(no_eval(), tokenizer, train=rows)
        assert e.value.reason == "train rows: there are none: it is empty"
        assert str(e.value.fix) == "look at what you pass, such as len(rows), or name a file in train_file"
    (tmp_path/"a.jsonl").write_text("")
    with pytest.raises(SftError, match="a.jsonl: there is no row in it"):
        prepare(no_eval(train_file=str(tmp_path/"a.jsonl")), tokenizer)


def test_reasons_of_broken_rows_are_sentences(tmp_path, tokenizer):
    (tmp_path/"a.csv").write_text("question,answer\n1+1?,2\nalone\n2+2?,4,5\n3+3?,6\n4+4?,\n")
    data = prepare(no_eval(train_file=str(tmp_path/"a.csv"), on_bad_row="drop"), tokenizer)
    says = finding(data, "train_dropped").says
    for part in ("1 row: 1 cell, and the first line names 2", "1 row: 3 cells, and the first line names 2",
                 "1 empty answer"): assert part in says


@pytest.mark.parametrize("setting", ["train_file", "eval_file"])
def test_rows_in_memory_belong_in_prepare(setting):
    rows = pandas.DataFrame(dict(question=["1+1?"], answer=["2"]))
    for given in (rows, rows.to_dict("records"), datasets.Dataset.from_pandas(rows)):
        with pytest.raises(ConfigError, match=f"{setting} is a .*Fix: prepare.cfg, train=rows"):
            load_config(**{setting: given})


def test_only_text_is_said_to_be_learned_as_a_whole(tmp_path, tokenizer):
    talk = [dict(role="user", content="1+1?"), dict(role="assistant", content="2")]
    kinds = dict(messages=dict(messages=talk, answer="two"), text=dict(text="1+1? 2", answer="two"))
    says = {}
    for name, row in kinds.items():
        file = write(tmp_path/f"{name}.jsonl", [row | dict(id=k) for k in range(3)])
        found = finding(prepare(no_eval(task="chat", train_file=file), tokenizer), "train_columns")
        says[name] = "the whole text is learned" in found.says
    assert says == dict(messages=False, text=True)


@pytest.mark.parametrize("answer, says", [("N/A", "3 are placeholders, as 'N/A'"), ("<p>a</p>", "3 hold HTML")])
def test_three_answers_of_sixty_are_a_flaw_and_two_are_not(tmp_path, tokenizer, answer, says):
    found = {}
    for n in (2, 3):
        odd = [f"{answer}{k}" if "<" in answer else answer for k in range(n)]
        rows = [dict(question=f"{k}+1?", answer=odd[k] if k < n else f"the sum is {k + 1}") for k in range(60)]
        data = prepare(no_eval(task="chat", train_file=write(tmp_path/f"{n}.jsonl", rows)), tokenizer)
        found[n] = [f.says for f in data.report.findings if f.check == "train_texts"]
    assert found[2] == [] and says in found[3][0], found


def test_answers_that_are_labels_are_given_their_task(tmp_path, tokenizer):
    "In any format, through case and a full stop; and the task for labels is told that answers are none"
    labels = ["Spam", "ham.", "Spam", "spam", "ham"] * 8
    formats = dict(questions=lambda k, label: dict(question=f"{k}?", answer=label),
                   messages=lambda k, label: dict(messages=[dict(role="user", content=f"{k}?"),
                                                            dict(role="assistant", content=label)]))
    for name, row in formats.items():
        file = write(tmp_path/f"{name}.jsonl", [row(k, label) for k, label in enumerate(labels)])
        found = finding(prepare(no_eval(train_file=file), tokenizer), "train_labels")
        assert found.status == "skipped" and found.fix.says("shell") == "--task classify"
        assert "'Spam' 60%" in found.says
        report = prepare(no_eval(train_file=file, task="classify"), tokenizer).report
        assert "train_labels" not in [f.check for f in report.findings]
    varied = write(tmp_path/"varied.jsonl", pairs(40))
    report = prepare(no_eval(train_file=varied), tokenizer).report
    assert "train_labels" not in [f.check for f in report.findings]
    found = finding(prepare(no_eval(train_file=varied, task="classify"), tokenizer), "train_labels")
    assert found.status == "warn" and found.fix.says("shell") == "--task chat"


def test_a_template_with_a_system_prompt_of_its_own_is_named(tmp_path):
    "As those of SmolLM2 and Qwen2.5"
    talks = [[dict(role="user", content=f"{k}?"), dict(role="assistant", content=f"{k}!")] for k in range(3)]
    rows = [dict(messages=talk) for talk in talks]
    template = ("{% if messages[0].role != 'system' %}<s>system\nBe kind.</s>{% endif %}{% for m in messages %}"
                "<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
                "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
    (tmp_path/"own.jinja").write_text(template)
    cfg = load_config(chat_template=str(tmp_path/"own.jinja"), eval_samples=0, cache_dir=str(tmp_path/"cache"))
    assert "where there is none, the chat template writes 'Be kind.'" in prepare(cfg, train=rows).report.summary
    told = [dict(messages=[dict(role="system", content="Be short."), *row["messages"]]) for row in rows]
    assert prepare(cfg, train=told).report.summary.endswith("System prompt: 'Be short.'.")


def test_empty_answers_among_others_are_counted(tokenizer):
    def talk(*answers): return dict(messages=[m for text in answers for m in (
        dict(role="user", content="?"), dict(role="assistant", content=text))])
    rows = [talk("", "a"), talk("", "", "b"), talk("c", "d", "e", "f")]
    assert finding(prepare(no_eval(task="chat"), tokenizer, train=rows), "train_empty").says.startswith("3 answers are")
