"""An end token, and a pad token that is another one; how tokens are drawn."""
import json
import operator
import re

import pytest
from conftest import shared
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sft_nb.config.load import load_config
from sft_nb.base.report import ConfigError
from sft_nb.tokens.display import spans, spans_html, Token
from sft_nb.tokens.tokenizer import ASSETS, choose_pad, load_tokenizer


def test_pad_is_never_the_end_and_is_explained():
    expected = {"qwen3": "own", "smollm2": "reserved", "mistral-v3-hf": "reserved|unknown",
                "phi-3-hf": "reserved|unknown|placeholder", "gpt2": "added", "oasst-tiny": "own"}
    for name, why in expected.items():
        tok = AutoTokenizer.from_pretrained(shared(f"tokenizers/{name}"))
        pad, reason = choose_pad(tok)
        assert tok.pad_token_id not in (None, tok.eos_token_id), (name, pad, reason)
        assert any(w in reason for w in why.split("|")), (name, pad, reason)


def test_a_tokenizer_without_an_end_is_refused(tmp_path, tokenizer):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no end token"): load_tokenizer(load_config(tokenizer=str(tmp_path)))


def test_a_character_of_several_tokens_is_shown_whole_far_into_a_text(tokenizer):
    text = "one two three four five six seven eight nine ten eleven twelve caf\u00e9 \U0001f680 go"
    ids = tokenizer(text)["input_ids"]
    pieces = [piece for piece, _ in spans(ids, ids, tokenizer)]
    assert pieces[-6:] == ["⋯", "⋯", "⋯", "\U0001f680", " g", "o"] and "".join(pieces).replace("⋯", "") == text


def test_a_folder_without_a_tokenizer_is_refused_before_its_rows_are_empty(tmp_path):
    given = json.loads((ASSETS/"tiny/config.json").read_text())
    (tmp_path/"config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match="there is no tokenizer in this folder") as e:
        load_tokenizer(load_config(model=str(tmp_path)))
    assert e.value.fix.says("shell").startswith("--tokenizer NAME where NAME is the folder or hub id of the model")
    (tmp_path/"config.json").write_text(json.dumps(given | dict(_name_or_path="Qwen/Qwen3-0.6B")))
    with pytest.raises(ConfigError) as e: load_tokenizer(load_config(model=str(tmp_path)))
    assert e.value.fix.settings == dict(tokenizer="Qwen/Qwen3-0.6B")
    assert load_tokenizer(load_config(model=str(tmp_path), tokenizer="tiny"))("a").input_ids
    (tmp_path/"config.json").write_text(json.dumps(dict(model_type="llama")))   # whose class needs a file
    with pytest.raises(ConfigError, match="there is no tokenizer in this folder"):
        load_tokenizer(load_config(model=str(tmp_path)))


def test_a_mistyped_shipped_name_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="Fix: model='tiny'"): load_tokenizer(load_config("demo", model="tinny"))


@pytest.mark.parametrize("kind", ["supervised", "context"])
def test_neighbouring_tokens_are_told_apart_by_a_tint(kind):
    "Every second one, so that one sees where each ends; also where some are folded"
    for n in (7, 20):
        drawn = spans_html([(f"t{k}", kind) for k in range(n)], fold=8)
        tinted = ["background" in style for style in re.findall(r"<bdi([^>]*)>", drawn)]
        assert len(tinted) == n and not any(map(operator.eq, tinted, tinted[1:])), (n, tinted)
    losses = [Token("a", kind, loss=loss) for loss in (.5, .5, 2.)]
    low, same, high = re.findall(r"<bdi[^>]*style='([^']*)'", spans_html(losses))
    assert low == same != high   # a measured one has the tint of its loss, wherever it stands


def test_a_loss_is_the_redder_the_higher_and_blue_where_it_has_fallen():
    def tint(nats):
        drawn = spans_html([Token("a", "supervised", loss=nats)])
        assert "background" not in re.search("<ins[^>]*>", drawn)[0]   # it would mix with the tint
        return [float(x) for x in re.search(r"<bdi[^>]*background:rgba\(([^)]*)\)", drawn)[1].split(",")]
    low, high, fallen = map(tint, (.5, 2., -2.))
    assert low[:3] == high[:3] and low[0] > low[2] and low[3] < high[3]
    assert fallen[2] > fallen[0] and fallen[3] == high[3]
    assert "background" in re.search("<ins[^>]*>", spans_html([Token("a", "supervised")]))[0]


def test_a_line_ends_where_its_token_ends():
    assert [part.count("<br>") for part in spans_html([(c, "context") for c in ("a", "\n", "b")]).split("</bdi>")] == [
        0, 0, 1, 0]
