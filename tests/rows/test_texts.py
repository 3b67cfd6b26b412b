"""Detect texts that should not be learned: rendered chats, HTML, fillers and boilerplate, without false alarms."""
import json

import pytest
from conftest import shared

from sft_nb.config.load import load_config
from sft_nb.base.report import FIX_LANGUAGES, fix_language, SftError
from sft_nb.rows.sources import open_rows
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer

KINDS = ("texts", "markers", "end_markers", "cut_reasoning")


def found(rows, **settings)->dict:
    "What preparation finds in the texts of some rows"
    cfg = load_config(**dict(model="tiny", task="chat", eval_samples=0, max_length=10**6) | settings)
    data = prepare(cfg, train=rows)
    findings = {f.check.removeprefix("train_"): f for f in data.report.findings}
    return {name: findings[name] for name in KINDS if name in findings}


def asked(*answers): return [dict(question=f"Ticket {k}?", answer=a) for k, a in enumerate(answers)]


FREE = [f"Reset the router {k} times." for k in range(90)]


@pytest.mark.parametrize("answers, says", [
    (["<p>Restart&nbsp;it.</p>"] * 10, "10 hold HTML, as in '<p>Restart&nbsp;it.</p>'"),
    (["N/A", "n/a", "-"] * 4, "12 are placeholders, as 'N/A'"),
    (["Please contact support."] * 10, "10 are 'Please contact support.'")])
def test_flaws_of_answers_are_one_finding(answers, says):
    seen = found(asked(*FREE, *answers))
    assert list(seen) == ["texts"] and seen["texts"].status == "warn" and says in seen["texts"].says
    assert not found(asked(*FREE, *answers[:3]))   # fewer than one in twenty


def test_reasoning_that_was_cut_short():
    thought = [f"<think>\n{k} and so on\n</think>\n\n{k}" for k in range(30)]
    assert not found(asked(*thought))
    cut = asked(*thought, "<think>\nFirst, I add 1 and")
    with pytest.raises(SftError, match="never closed.*Fix: on_bad_row='drop'"): found(cut)
    assert not found(cut, on_bad_row="drop")


def test_reasoning_that_was_cut_short_without_a_template(tmp_path):
    "In plain text there are no blocks that must be closed"
    tokenizer = load_tokenizer(load_config(cache_dir=str(tmp_path)))
    tokenizer.chat_template = None
    rows = asked(*["<think>\n1 and so on\n</think>\n\n1"] * 30, "<think>\nFirst, I add 1 and")
    data = prepare(load_config(task="chat", eval_samples=0, max_length=10**6), tokenizer, train=rows)
    seen, = [f for f in data.report.findings if f.check == "train_cut_reasoning"]
    assert seen.says.startswith("of 31 answers looked at, 1 opens its reasoning and never closes it")


def test_labels_and_numbers_are_no_flaws():
    phrases = ["not enough information", "supported by the text"]
    for answers in (["yes", "no", "none", "unknown"], phrases, ["0", "1", "2.5"], ["entailment", "neutral", "N/A"]):
        assert not found(asked(*answers * 25)), answers


def test_the_end_of_a_conversation_is_no_boilerplate():
    talk = [("user", "Hi {}"), ("assistant", "Try {}."), ("user", "Thanks"), ("assistant", "You're welcome, any time!")]
    rows = [dict(messages=[dict(role=r, content=c.format(k)) for r, c in talk]) for k in range(30)]
    assert not found(rows)


@pytest.mark.parametrize("text, marker", [
    ("<s>[INST] 1+{}? [/INST] 2", "[/INST]"),
    ("<|im_start|>user\n1+{}?<|im_end|>\n<|im_start|>assistant\n2", "<|im_start|>assistant\n"),
    ("<start_of_turn>user\n1+{}?<end_of_turn>\n<start_of_turn>model\n2", "<start_of_turn>model\n"),
    ("<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n2",
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ("### Instruction:\n1+{}?\n\n### Response:\n2", "### Response:")])
def test_rendered_chats_are_reported_with_the_template_that_cuts_them(text, marker):
    rows = [dict(text=text.format(k)) for k in range(20)]
    seen = found(rows)
    assert list(seen) == ["markers"] and seen["markers"].fix.settings == dict(response_template=marker)
    assert found(rows, task="text")["markers"].fix.settings == dict(response_template=marker)
    assert not found(rows, response_template=marker)
    for language in FIX_LANGUAGES:
        with fix_language(language): assert "\n" not in str(seen["markers"].fix)


def test_a_template_inside_of_a_template_is_reported():
    rows = [dict(prompt=f"<s>[INST] {k}? [/INST]", completion=f"{k}.</s>") for k in range(20)]
    seen = found(rows)
    assert "own template is written around it" in seen["markers"].says
    assert "20 of 20 answers looked at end with '</s>'" in seen["end_markers"].says


def test_text_without_markers_is_not_suspected():
    assert not found([dict(text=f"Roses are red, violets are {k}.") for k in range(20)])


def test_rows_that_nobody_here_wrote():
    "Of real rows, only those that hold a rendered chat are reported"
    seen = found(str(shared("data/mistral_nli_sample/sample_ft.jsonl")))
    assert list(seen) == ["markers", "end_markers"] and "100 of 100 rows" in seen["markers"].says
    pairs = [row for _, row in open_rows(shared("data/med_nli/MED.tsv"))[0]]
    labels = [dict(question=row["sentence1"], answer=row["gold_label"]) for row in pairs]
    seeds = map(json.loads, shared("data/self_instruct_seed/seed_tasks.jsonl").open())
    instances = [dict(i, instruction=r["instruction"]) for r in seeds for i in r["instances"]]
    assert not found(labels) and not found(instances, on_bad_row="drop")
    for name in ("gsm8k/test.jsonl", "unit_conversion_deepmind/test.jsonl", "fastchat_chat/dummy_conversation.json",
                 "glaive_toolcall/glaive_toolcall_en_demo.json"):
        assert not found(str(shared(f"data/{name}"))), name


def test_later_rows_are_sampled():
    from sft_nb.tokens.pipeline import _ALL_OF, _OF_A_BLOCK
    data = prepare(load_config(model="tiny", task="chat", eval_samples=0), train=asked(*map(str, range(2000))))
    assert data.train.seen.texts["looked_at"] == _ALL_OF + 2 * _OF_A_BLOCK
