"""An answer of which parts are excluded is learned in part: by characters, for every tokenizer, or refused."""
import pytest
from conftest import shared
from samples import no_eval, supervised, write

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.rows.readers import to_messages
from sft_nb.tokens.prepare import prepare
from sft_nb.tokens.tokenizer import load_tokenizer

ASKED = dict(role="user", content="2+2?")


def parts(*texts)->list[dict]: return [dict(type="text", text=text, train=learned) for text, learned in texts]


SLIP = dict(role="assistant", content=parts(("BADPART ", False), ("good part", True)))


def learned(tokenizer, *messages, **settings)->list[str]:
    data = prepare(no_eval(task="chat", **settings), tokenizer, train=[dict(messages=list(messages))])
    return supervised(tokenizer, data)


def every_tokenizer():
    folder = shared("tokenizers")
    return sorted(path for path in folder.iterdir() if (path/"tokenizer.json").exists())


def test_every_real_tokenizer_learns_the_good_part_alone():
    for path in every_tokenizer():
        tokenizer = load_tokenizer(load_config(tokenizer=str(path)))
        try: found, = learned(tokenizer, ASKED, SLIP)
        except SftError as e:
            assert "chat template" in str(e), path.name   # it refuses, or changes, such a conversation
            continue
        whole, = learned(tokenizer, ASKED, SLIP | dict(content="BADPART good part"))
        assert "BAD" not in found and "good part" in found and found.strip() in whole, (path.name, found)


def test_a_token_across_the_border_is_excluded(tokenizer):
    whole, = learned(tokenizer, ASKED, SLIP | dict(content="wonderful"))
    for k in range(1, 9):
        halves = parts(("wonderful"[:k], False), ("wonderful"[k:], True))
        found, = learned(tokenizer, ASKED, SLIP | dict(content=halves))
        assert whole.endswith(found) and len(found) <= len("wonderful"[k:] + "<|im_end|>")


def test_the_end_token_follows_the_last_part(tokenizer):
    assert learned(tokenizer, ASKED, SLIP | dict(content=parts(("good", True), (" BAD", False)))) == ["good"]
    both = parts(("good", True), (" BAD", False), (" end", True))
    assert learned(tokenizer, ASKED, SLIP | dict(content=both)) == ["good end<|im_end|>"]


def test_parts_in_earlier_answers_and_in_a_supervised_prompt(tokenizer):
    talk = [ASKED, SLIP, ASKED, dict(role="assistant", content="4")]
    assert learned(tokenizer, *talk) == [" good part<|im_end|>4<|im_end|>"]
    whole, = learned(tokenizer, *talk, train_on_prompt=True)
    assert "BADPART" not in whole and whole.count("2+2?") == 2 and "good part" in whole


def test_parts_beside_reasoning_and_calls(tokenizer):
    thinking, inline = SLIP | dict(reasoning_content="hm"), load_tokenizer(load_config(reasoning="inline"))
    assert learned(inline, ASKED, thinking, reasoning="inline") == ["<think>\nhm\n</think>\n\n good part<|im_end|>"]
    call = dict(type="function", function=dict(name="f", arguments=dict(a=1)))
    last = dict(content=parts(("good", True), ("\nBADPART", False)), tool_calls=[call])
    found, = learned(tokenizer, ASKED, SLIP | last)   # a call follows the last part, and is learned
    assert "BAD" not in found and found.startswith("good") and '"a": 1' in found and found.endswith("<|im_end|>")


def test_a_template_that_changes_the_parts_is_refused(tokenizer, tmp_path):
    (tmp_path/"strips.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    strips = load_tokenizer(load_config(chat_template=str(tmp_path/"strips.jinja")))
    blank = SLIP | dict(content=parts(("  BADPART ", False), ("good part  ", True)))
    assert learned(strips, ASKED, blank) == [" good part<|im_end|>"]
    squeezed = (tmp_path/"strips.jinja").read_text().replace("| trim", "| replace('  ', ' ')")
    (tmp_path/"squeezes.jinja").write_text(squeezed)
    squeezes = load_tokenizer(load_config(chat_template=str(tmp_path/"squeezes.jinja")))
    with pytest.raises(SftError, match="the chat template changes it; .*one text, with a flag of the whole message"):
        learned(squeezes, ASKED, SLIP | dict(content=parts(("BADPART  ", False), ("good", True))))
    inline = load_tokenizer(load_config(reasoning="inline"))
    with pytest.raises(SftError, match="the chat template writes it twice"):
        learned(inline, ASKED, SLIP | dict(reasoning_content="BADPART good part"), reasoning="inline")


def test_a_tokenizer_without_offsets_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(SftError, match="this tokenizer does not tell where its tokens are; a fast tokenizer"):
        learned(tokenizer, ASKED, SLIP)


@pytest.mark.parametrize("key, off, on", [("train", False, True), ("weight", 0, 1), ("loss", False, True),
                                          ("loss_mask", 0, 1), ("masked", True, False)])
def test_parts_have_the_flags_of_messages(key, off, on):
    content = [dict(type="text", text="BAD") | {key: off}, dict(type="text", text="good") | {key: on}]
    found = to_messages(dict(messages=[ASKED, dict(role="assistant", content=content)]))[1]
    assert found == dict(role="assistant", content="BADgood", train_parts=[["BAD", False], ["good", True]])
    with pytest.raises(SftError, match=f"{key} of a part of message 2 is 0.5"):
        to_messages(dict(messages=[ASKED, dict(role="assistant", content=[content[0] | {key: .5}])]))


def test_spans_of_axolotl_are_parts(tokenizer):
    answer = dict(role="assistant", content="BADPART good part")
    spans = [dict(begin_offset=0, end_offset=7, train=False), dict(begin_offset=8, end_offset=16, train=True)]
    assert learned(tokenizer, ASKED, answer | dict(train_detail=spans)) == [" good part<|im_end|>"]
    for wrong in (spans[:1], spans[1:], [spans[0], spans[1] | dict(begin_offset=9)], [dict(begin_offset=0)], [3]):
        with pytest.raises(SftError, match="train_detail of message 2 is .*spans from 0 to 16"):
            learned(tokenizer, ASKED, answer | dict(train_detail=wrong))


def test_flags_of_parts_and_of_their_message():
    def read(flags, **message): return to_messages(dict(messages=[ASKED, dict(
        role="assistant", content=parts(*zip(("a", "b"), flags))) | message]))[1]
    assert read((False, False)) == dict(role="assistant", content="ab", train=False)
    assert read((True, True)) == dict(role="assistant", content="ab")
    assert read((False, False), train=False)["train"] is False and "train_parts" in read((False, True), train=True)
    with pytest.raises(SftError, match="message 2 is not learned, and parts of it are"): read((False, True), weight=0)
    thought = [dict(type="thinking", thinking="hm", train=False), dict(type="text", text="4")]
    with pytest.raises(SftError, match="reasoning or a call of message 2 is marked as not learned"):
        to_messages(dict(messages=[ASKED, dict(role="assistant", content=thought)]))


def test_parts_of_a_file_are_counted(tmp_path, tokenizer):
    file = write(tmp_path/"a.jsonl", [dict(messages=[ASKED, SLIP])] * 3)
    data = prepare(no_eval(task="chat", train_file=file), tokenizer)
    assert data.report.figures["train"]["excluded_by_flags"] == "3 answers in part" and data.train.seen.unread == {}


def test_the_check_of_prompts_leaves_out_answers_in_part(tokenizer):
    "Their labels do not show where the answer begins"
    from sft_nb.checks.rows import prompts_differ
    whole = dict(messages=[ASKED, dict(role="assistant", content="4")])
    data = prepare(no_eval(task="chat"), tokenizer, train=[dict(messages=[ASKED, SLIP]), whole])
    assert prompts_differ(data) == ([], 1)
