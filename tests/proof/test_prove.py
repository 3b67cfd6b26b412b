"""Served equals trained: each planted fault is named as the first failed stage, and clean chains have none. The twelve:
template, bos, stop, adapter, tied, dtype, sampling, context, tokenizer, thinking, system, cut."""
import builtins
import copy
import json
import re
import shutil
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from served import assert_named, edited, FEW, OTHER, TEMPLATE
from stub_server import listening, Stub
from transformers import AutoTokenizer

from sft_nb.base.progress import progress_listener
from sft_nb.base.report import ConfigError, SftError
from sft_nb.proof import prove as proving# the module
from sft_nb.proof import folder as merged_folder
from sft_nb.proof.folder import Expected, Folder
from sft_nb.extras import folder_checks
from sft_nb.extras.folder_checks import tokenizer_of
from sft_nb.extras.gguf_checks import Gguf
from sft_nb.extras.openai_client import RenderedPrompt, Server
from sft_nb.runs.directory import Run
from sft_nb.tokens.tokenizer import ASSETS
from sft_nb.workbench import Workbench

APIS = ("vLLM", "llama.cpp", "plain")


def by(served, stub=None, **how):
    "The proof for a server"
    stub = stub or Stub(served.tuned, served.tokenizer)
    with listening(stub) as url: return served.prove(server=url, **how)


def stub(served, model=None, **how): return Stub(model or served.tuned, served.tokenizer, **how)


@pytest.mark.parametrize("api", APIS)
def test_a_right_server_is_all_the_same(served, api):
    proof = by(served, stub(served, api=api, logprobs=api != "plain"))
    assert proof.same, str(proof)
    assert {s.finding.status for s in proof.stages} <= {"ok", "skipped"}
    assert api == "plain" or [s.finding.check for s in proof.stages if s.finding.status == "skipped"] == []


PROMPT_FAULTS = dict(
    template=dict(template=OTHER), bos=dict(bos_twice=True), system=dict(system="You are a pirate. Be a pirate."),
    thinking=dict(thinks=True), cut=dict(cut=40))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", PROMPT_FAULTS)
def test_what_is_wrong_with_a_prompt_is_named(served, api, name):
    assert_named(by(served, stub(served, api=api, **PROMPT_FAULTS[name])), name)


LOSSES = dict(
    system=("system messages are left out", lambda talk: [m for m in talk if m["role"] != "system"]),
    history=("earlier turns are left out", lambda talk: [*(m for m in talk[:-1] if m["role"] == "system"), talk[-1]]),
    both=("all messages but the last are left out", lambda talk: talk[-1:]))


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_server_that_drops_messages_is_named(served, api, name):
    says, keeps = LOSSES[name]
    proof = by(served, stub(served, api=api, keeps=keeps))
    assert_named(proof, "history")
    assert proof.broken.finding.says == says


def test_a_server_whose_template_refuses_several_turns_is_named(served):
    template = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}" + TEMPLATE
    assert_named(by(served, stub(served, template=template)), "template")


def test_a_folder_that_cannot_be_used_is_a_finding(served):
    "Nothing that is in a folder may end a proof with an exception"
    def proof_of(name, file, **settings):
        folder = served.copy(name)
        edited(folder/file, **settings)
        return served.prove(folder=folder)
    in_4_bits = dict(quant_method="bitsandbytes", load_in_4bit=True)
    declared = proof_of("declared", "config.json", quantization_config=in_4_bits)
    assert_named(declared, "dtype", link="folder")
    assert "config.json declares bitsandbytes" in declared.broken.finding.says
    healed = proof_of("healed", "generation_config.json", token_healing=True)
    assert_named(healed, "generation", link="folder")
    assert "take token_healing out of" in str(healed.fix)
    odd = proof_of("odd", "config.json", architectures=["Nothing"], model_type="nothing")
    assert_named(odd, "shape", link="folder")
    for file in ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"):
        damaged = served.copy("damaged")
        (damaged/file).write_text("{")
        proof = served.prove(folder=damaged)
        assert not proof.same and proof.broken.link == "folder" and proof.fix, file


def test_a_run_that_cannot_be_loaded_is_a_finding(served, monkeypatch):
    def fail(*args, **how): raise RuntimeError("a tensor is missing")
    monkeypatch.setattr(proving, "answer_as_reference", fail)
    assert_named(served.prove(), "answers", link="adapter")


def test_a_proof_is_shown_where_it_cannot_be_kept(served, monkeypatch, capfd):
    def full(*args): raise OSError(30, "Read-only file system")
    monkeypatch.setattr(proving.Proof, "save", full)
    assert served.prove().stages
    assert "proof-adapter.json cannot be written (Read-only file system). Fix: make it" in capfd.readouterr().err


def test_what_tokenizer_json_sets_is_a_warning(served):
    folder = served.copy("limits")
    cut = dict(direction="Right", max_length=64, strategy="LongestFirst", stride=0)
    edited(folder/"tokenizer.json", truncation=cut)
    found, = [s.finding for s in served.prove(folder=folder).stages if s.name == "folder tokenizer"]
    assert found.status == "warn" and "tokenizer.json sets truncation (64)" in found.says


def test_lost_turns_are_named_by_answers_alone(served, monkeypatch):
    monkeypatch.setattr(Server, "rendered", lambda self, conversation: RenderedPrompt())
    monkeypatch.setattr(Server, "tokens", lambda self, text: None)
    proof = by(served, stub(served, keeps=lambda talk: talk[:2] if len(talk) > 2 else talk, logprobs=False))
    assert_named(proof, "history")
    assert "only questions of several turns are answered differently" in proof.broken.finding.says


def fewer_merges(folder):
    "Replace the tokenizer of a folder"
    said = json.loads((folder/"tokenizer.json").read_text())
    said["model"]["merges"] = said["model"]["merges"][:200]
    (folder/"tokenizer.json").write_text(json.dumps(said))
    return folder


def other_tokenizer(served): return AutoTokenizer.from_pretrained(fewer_merges(served.copy("fewer")))


@pytest.mark.parametrize("api", APIS)
def test_another_tokenizer_is_named(served, api):
    assert_named(by(served, Stub(served.tuned, other_tokenizer(served), api=api)), "tokenizer")


@pytest.mark.parametrize("tells", [True, False], ids=["told", "found out"])
def test_a_short_context_is_named(served, tells):
    proof = by(served, stub(served, context=72, tells_context=tells))
    assert_named(proof, "context")


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "texts"])
def test_an_adapter_that_is_ignored_is_named(served, logprobs):
    assert_named(by(served, stub(served, served.base, logprobs=logprobs)), "adapter")


@pytest.mark.parametrize("api", APIS)
def test_a_missing_stop_token_is_named(served, api):
    proof = by(served, stub(served, api=api, ends=[]))
    assert_named(proof, "stop")
    assert ("gguf-set-metadata" in str(proof.fix)) == (api == "llama.cpp")


def test_a_temperature_from_generation_config_is_named(served):
    folder = served.copy("hot")
    edited(folder/"generation_config.json", temperature=1.5)
    proof = by(served, stub(served, temperature=1.5, root=str(folder)))
    assert_named(proof, "sampling")
    assert "temperature is 1.5" in proof.broken.finding.says and "generation_config.json" in str(proof.fix)
    assert by(served, stub(served, temperature=1.5), sends=dict(temperature=0)).same


def test_what_llama_cpp_says_of_itself_is_no_fault(served):
    proof = by(served, stub(served, api="llama.cpp", temperature=1.5))
    assert proof.same and proof.stages[-1].finding.status == "warn"
    assert_named(by(served, stub(served, temperature=1.5)), "sampling")   # and elsewhere it is


def rounded(model, step):
    "A copy whose weights are rounded to a grid"
    other = copy.deepcopy(model)
    for w in other.parameters():
        if w.dim() == 2: w.data = (w.data / step).round() * step
    return other


def test_a_wrong_dtype_is_named(served):
    served_in_8_bits = rounded(served.tuned, .02)
    proof = by(served, stub(served, served_in_8_bits), folder=served.merged)
    assert_named(proof, "dtype")
    assert proof.broken.figures["weights"] == "float32"


def test_weights_that_lost_what_was_learned_are_named(served):
    proof = by(served, stub(served, rounded(served.tuned, .3)))
    assert_named(proof, proof.broken.finding.check)
    assert proof.broken.finding.check in ("quantisation", "adapter", "texts")


def test_texts_alone_are_compared_without_log_probabilities(served):
    assert_named(by(served, stub(served, rounded(served.tuned, .12), logprobs=False)), "texts")


FOLDER_FAULTS = {
    "stop": lambda f: edited(f/"generation_config.json", eos_token_id=[0]),
    "sampling": lambda f: edited(f/"generation_config.json", temperature=.7, top_p=.8),
    "context": lambda f: edited(f/"config.json", max_position_embeddings=32),
    "template": lambda f: (f/"chat_template.jinja").write_text(OTHER),
    "shape": lambda f: edited(f/"config.json", num_hidden_layers=2),
    "dtype": lambda f: edited(f/"config.json", dtype="float16"),
}


@pytest.mark.parametrize("name", FOLDER_FAULTS)
def test_what_is_wrong_with_a_folder_is_named(served, name):
    folder = served.copy("broken")
    FOLDER_FAULTS[name](folder)
    assert_named(served.prove(folder=folder), name, link="folder")


def test_another_tokenizer_in_a_folder_is_named(served):
    assert_named(served.prove(folder=fewer_merges(served.copy("broken"))), "tokenizer", link="folder")


def weights_of(folder, change):
    from safetensors.torch import load_file, save_file
    file = folder/"model.safetensors"
    save_file(change(load_file(file)), file, metadata=dict(format="pt"))


def test_an_overwritten_head_is_named(served):
    folder = served.copy("broken")
    weights_of(folder, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] * 1.5})
    assert_named(served.prove(folder=folder), "tied", link="folder")


def test_a_folder_without_the_adapter_is_named(served):
    folder = served.copy("broken")
    served.base.save_pretrained(folder)
    edited(folder/"generation_config.json", eos_token_id=[2])
    edited(folder/"config.json", dtype="float32")
    assert_named(served.prove(folder=folder), "adapter", link="folder")


def scale_adapter(served, share):
    base = served.base.state_dict()
    return lambda w: {n: base[n] + share * (v - base[n]) if n in base else v for n, v in w.items()}

def add_noise(served):
    torch.manual_seed(0)
    return lambda w: {n: v * (1 + .01 * torch.randn_like(v)) for n, v in w.items()}

def scale_one(name, factor): return lambda served: lambda w: w | {name: w[name] * factor}

def destroy_row(served):
    torch.manual_seed(0)
    def change(w):
        embedding = w["model.embed_tokens.weight"].clone()
        embedding[-3] = embedding.std() * torch.randn_like(embedding[-3])
        return w | {"model.embed_tokens.weight": embedding}
    return change

def round_to_8_bits(served):
    def change(v):
        if v.dim() < 2: return v
        step = v.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (v / step).round() * step
    return lambda w: {n: change(v) for n, v in w.items()}


WEIGHT_FAULTS = {
    "adapter x 0.9": (lambda served: scale_adapter(served, .9), "the adapter is in them 0.90 times"),
    "1% noise": (add_noise, r"differs by [\d.]+%"),
    "one tensor 2% off": (scale_one("model.layers.1.mlp.up_proj.weight", 1.02), "1 of .*up_proj.weight differs by 2%"),
    "one tensor 10% off": (scale_one("model.norm.weight", 1.1), "model.norm.weight differs by 10%"),
    "one row of the embedding": (destroy_row, r"1 of .* row \d+ of model.embed_tokens.weight"),
    "8 bits": (round_to_8_bits, "tensors are not the run's"),
}

@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_weights_that_differ_are_never_the_same(served, fault):
    change, says = WEIGHT_FAULTS[fault]
    folder = served.copy("other-weights")
    weights_of(folder, change(served))
    proof = served.prove(folder=folder)
    assert proof.broken.name == "folder weights" and proof.exit_code == 1, str(proof)
    assert proof.verdict in ("close, not equal", "not the same")
    assert re.search(says, proof.broken.finding.says), proof.broken.finding.says


def swap_layers(w):
    "Swap the first two layers"
    def other(name): return re.sub(r"(?<=layers\.)[01](?=\.)", lambda k: str(1 - int(k[0])), name)
    return {other(name): v for name, v in w.items()}

def scale_row(name, row, factor):
    "Or an element of a vector"
    def change(w):
        changed = w[name].clone()
        changed[row] *= factor
        return w | {name: changed}
    return lambda f, _=None: weights_of(f, change)

def edit_tokenizer(change):
    def plant(f, _):
        said = json.loads((f/"tokenizer.json").read_text())
        change(said)
        (f/"tokenizer.json").write_text(json.dumps(said))
    return plant

def exchange_entries(said):
    "The last two, which no text of the comparison holds"
    vocabulary = said["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]

def lose_last_merge(said): said["model"]["merges"].pop()
def take_spaces(said): said["added_tokens"][1]["lstrip"] = True
def rename_end_token(f, _): edited(f/"tokenizer_config.json", eos_token="<|pad|>")

def generates(**settings): return lambda f, _: edited(f/"generation_config.json", **settings)

UP = "model.layers.1.mlp.up_proj.weight"
MORE_FAULTS = {   # what is done to a folder, and what the first broken stage says
    "the adapter twice": (lambda f, served: weights_of(f, scale_adapter(served, 2.)), "adapter is in them 2.00 times"),
    "two layers swapped": (lambda f, _: weights_of(f, swap_layers), "of model.layers.1."),
    "a tensor is not there": (lambda f, _: weights_of(f, lambda w: {n: v for n, v in w.items() if n != UP}), UP),
    "a tensor of zeros": (lambda f, _: weights_of(f, lambda w: w | {UP: torch.zeros_like(w[UP])}), UP),
    "another epsilon": (lambda f, _: edited(f/"config.json", rms_norm_eps=.1), "rms_norm_eps is 0.1"),
    "a window": (lambda f, _: edited(f/"config.json", sliding_window=4, use_sliding_window=True), "sliding_window"),
    "a penalty": (generates(repetition_penalty=1.8), "repetition_penalty is 1.8"),
    "an answer of a least length": (generates(min_new_tokens=40), "min_new_tokens is 40"),
    "an ordinary token ends answers": (generates(eos_token_id=[2, 22]), "it also ends at "),
    "a limit cuts answers": (generates(max_new_tokens=2), "max_new_tokens is 2, which cuts "),
    "a limit with the prompt cuts answers": (generates(max_length=20), "max_length is 20, which cuts "),
    "two entries of the vocabulary exchanged": (edit_tokenizer(exchange_entries), "2 tokens have other numbers"),
    "a merge is lost": (edit_tokenizer(lose_last_merge), "its merges or scores"),
    "a special token takes spaces": (edit_tokenizer(take_spaces), "'<|im_start|>' is another kind of token"),
    "another end token": (rename_end_token, "eos_token is '<|pad|>'"),
    "one element of a norm": (scale_row("model.norm.weight", 5, 1.02), "element 5 of model.norm.weight differs by 2%"),
    "one row 5% off": (scale_row("model.embed_tokens.weight", 17, 1.05), "row 17 of model.embed_tokens.weight differs"),
    "another end by force": (generates(forced_eos_token_id=5), "forced_eos_token_id is 5"),
}

@pytest.mark.parametrize("fault", MORE_FAULTS)
def test_more_of_what_may_be_wrong_with_a_folder_is_named(served, fault):
    plant, says = MORE_FAULTS[fault]
    folder = served.copy("broken")
    plant(folder, served)
    proof = served.prove(folder=folder)
    assert proof.exit_code == 1 and not proof.same and says in str(proof.broken.finding), str(proof)


def move_template(f):
    "Where earlier versions of transformers keep it"
    edited(f/"tokenizer_config.json", chat_template=(f/"chat_template.jinja").read_text())
    (f/"chat_template.jinja").unlink()

HEALTHY = {
    "as it is": lambda f: None,
    "more files": lambda f: (f/"README.md").write_text("# mine"),
    "another version": lambda f: edited(f/"config.json", transformers_version="4.40.0"),
    "a template in the config": move_template,
    "the head beside the embedding": lambda f: weights_of(f, lambda w: w | {
        "lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    "another order of tensors": lambda f: weights_of(f, lambda w: dict(reversed(w.items()))),
    "greedy, in words": lambda f: edited(f/"generation_config.json", do_sample=False),
    "one more special end": lambda f: edited(f/"generation_config.json", eos_token_id=[2, 0]),
    "a limit that cuts nothing": lambda f: edited(f/"generation_config.json", max_new_tokens=512),
    "a longer context": lambda f: edited(f/"config.json", max_position_embeddings=4096),
    "padding on the left": lambda f: edited(f/"tokenizer_config.json", padding_side="left"),
    "without a cache": lambda f: edited(f/"config.json", use_cache=False),
}

@pytest.mark.parametrize("change", HEALTHY)
def test_what_is_no_fault_raises_no_alarm(served, change):
    folder = served.copy("healthy")
    HEALTHY[change](folder)
    proof = served.prove(folder=folder)
    assert proof.same and proof.exit_code == 0, str(proof)


def test_weights_that_answer_alike_are_close_and_not_equal(served):
    folder = served.copy("close")
    weights_of(folder, destroy_row(served))
    proof = served.prove(folder=folder)
    assert proof.verdict == "close, not equal" and str(proof).splitlines()[0].endswith("and the answers agree")
    assert proof.to_dict()["verdict"] == proof.verdict and "close, not equal" in proof._repr_html_()


def test_declared_quantisation_is_no_fault(served):
    folder = served.copy("int8")
    weights_of(folder, round_to_8_bits(served))
    proof = served.prove(folder=folder, quantised="int8")
    assert proof.same and "off by what int8 explains" in str(proof)
    with pytest.raises(ConfigError, match="one of int8, fp8"): served.prove(folder=folder, quantised="q9")


@pytest.mark.parametrize("name, value", dict(
    no_repeat_ngram_size=3, bad_words_ids=[[5]], suppress_tokens=[7], typical_p=.9, num_beams=4).items())
def test_settings_that_change_a_greedy_answer_are_named(served, name, value):
    folder = served.copy("broken")
    edited(folder/"generation_config.json", **{name: value})
    proof = served.prove(folder=folder)
    assert_named(proof, "sampling", link="folder")
    assert f"{name} is {value}" in proof.broken.finding.says


@pytest.mark.parametrize("change, says", [
    (dict(rope_parameters=dict(rope_theta=123.0, rope_type="default")), "rope_theta is 123.0 and was"),
    (dict(num_key_value_heads=1), "num_key_value_heads is 1"), (dict(hidden_act="relu"), "hidden_act is 'relu'"),
    (dict(num_hidden_layers=2), "num_hidden_layers is 2 and was"),   # which its own config class refuses
    (dict(head_dim="x"), "head_dim is 'x'"), (dict(model_type="no-such-type"), "model_type is 'no-such-type'"),
])
def test_another_shape_in_a_config_is_named(served, change, says):
    folder = served.copy("broken")
    edited(folder/"config.json", **change)
    assert says in folder_shape_of(served, folder).finding.says


def folder_shape_of(served, folder):
    from sft_nb.extras.folder_checks import folder_shape
    served.prove(folder=served.merged)   # so that what is expected is known
    run, source = served.run, served.run.weights("adapter")
    x = proving.Expected(proving.Workbench(run.config, is_resolved=True), source, run.path, None)
    return folder_shape(x, Folder(folder))


def test_another_text_of_a_template_is_named_even_if_these_prompts_are_the_same(served):
    folder = served.copy("broken")
    text = (folder/"chat_template.jinja").read_text()
    (folder/"chat_template.jinja").write_text(text.replace("m['content']", "m['content'] | trim"))
    proof = served.prove(folder=folder)
    assert_named(proof, "template", link="folder")
    assert "the text of the template differs: line 1" in proof.broken.finding.says


def test_weights_that_are_not_finite_are_named(served):
    folder = served.copy("broken")
    def overflow(w): return w | {"model.norm.weight": torch.full_like(w["model.norm.weight"], float("inf"))}
    weights_of(folder, overflow)
    assert_named(served.prove(folder=folder), "dtype", link="folder")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clean_folder_is_all_the_same(served, dtype):
    out = served.copy(dtype)
    weights_of(out, lambda w: {name: v.to(getattr(torch, dtype)) for name, v in w.items()})
    edited(out/"config.json", dtype=dtype)
    heard = []
    with progress_listener(heard.append): proof = served.prove(folder=out)
    assert proof.same and {s.finding.status for s in proof.stages} == {"ok"}, str(proof)
    assert any(str(p).startswith("comparing 1 of ") and p.what == "tensors" for p in heard)


def test_a_proof_is_kept_and_can_be_read(served):
    proof = by(served, stub(served, system="<script>alert(1)</script>"))
    said = json.loads((served.run.path/"eval/proof-adapter.json").read_text())
    assert (said["same"], said["broken"]) == (False, "server system") and said["stages"][-1]["fix"]
    assert "<script>" not in proof._repr_html_() and "&lt;script&gt;" in proof._repr_html_()


def test_a_key_is_sent_and_never_shown(served, monkeypatch):
    locked = stub(served, key="sesame-open-1234")
    with pytest.raises(SftError, match="Invalid key.*SFT_NB_SERVER_KEY"): by(served, locked)
    monkeypatch.setenv("SFT_NB_SERVER_KEY", "sesame-open-1234")
    proof = by(served, locked)
    assert proof.same and "sesame" not in json.dumps(proof.to_dict())


def test_a_server_is_asked_before_a_model_is_loaded(served, monkeypatch):
    monkeypatch.setattr(proving, "answer_as_reference", None)
    with pytest.raises(SftError, match="nothing answers there"): served.prove(server="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="it is not a valid address"): served.prove(server="localhost")
    with pytest.raises(ConfigError, match="no such folder"): served.prove(folder="nowhere")


def test_a_limit_that_is_less_than_the_runs_own_is_a_warning(served):
    folder = served.copy("short")
    edited(folder/"generation_config.json", max_new_tokens=20)
    proof = served.prove(folder=folder)
    stage = next(s for s in proof.stages if s.name == "folder stop")
    assert proof.same and stage.finding.status == "warn", str(proof)
    assert "max_new_tokens is 20, and an answer of the run may have 24" in stage.finding.says


@pytest.fixture(scope="module")
def expected(served):
    bench, source = proving.Workbench(served.run.config, is_resolved=True), served.run.weights("adapter")
    reference = proving.answer_as_reference(bench, served.run, source, **FEW)
    return Expected(bench, source, served.run.path, reference)


def test_an_end_that_an_answer_holds_is_named(served, expected):
    "Even if it is a special token"
    first = expected.reference.tuned[0]
    r = replace(expected.reference, tuned=[replace(first, tokens=[0, *first.tokens])])
    x = Expected(expected.bench, expected.source, expected.run, r)
    assert folder_checks.compare_ends(x, "folder", [2, 0], "", "edit").is_broken
    assert not folder_checks.compare_ends(expected, "folder", [2, 0], "", "edit").is_broken


def test_an_answer_that_ends_elsewhere_is_named(served, expected):
    folder = served.copy("broken")
    edited(folder/"generation_config.json", eos_token_id=[2, expected.reference.tuned[0].tokens[1]])
    stage = merged_folder.folder_answers(expected, Folder(folder))
    assert stage.is_broken and "the first ends elsewhere" in stage.finding.says, str(stage)


@pytest.mark.parametrize("lead, is_broken", [(.001, False), (3., True)])
def test_another_text_is_a_fault_unless_two_tokens_nearly_tied(served, expected, monkeypatch, lead, is_broken):
    first, *others = expected.reference.tuned
    first = replace(first, top=[{first.tokens[0]: -.1, 5: -.1 - lead}, *first.top[1:]])
    found = [replace(first, tokens=[5, *first.tokens[1:]], text="another"), *others]
    monkeypatch.setattr(merged_folder, "answer_greedily", lambda *args, **how: found)
    r = replace(expected.reference, tuned=[first, *others])
    x = Expected(expected.bench, expected.source, expected.run, r)
    stage = merged_folder.folder_answers(x, Folder(served.merged))
    assert stage.is_broken == is_broken
    assert ("no token nearly tied" if is_broken else "where two tokens nearly tie") in stage.finding.says


def test_one_destroyed_row_among_150000_is_named(tmp_path):
    from safetensors.torch import save_file
    torch.manual_seed(0)
    name, w = "model.embed_tokens.weight", torch.randn(151_936, 8)
    x = Expected(None, None, None, None)
    x.base = x.merged = {name: w}
    broken = w.clone()
    broken[140_000] = torch.randn(8)
    (tmp_path/"config.json").write_text("{}")
    x.merge_again = lambda folder: "merge again"
    save_file({name: broken.bfloat16()}, tmp_path/"model.safetensors")
    stage = folder_checks.folder_weights(x, Folder(tmp_path))
    assert stage.is_broken and f"1 of 1 tensors is not the run's: row 140000 of {name}" in stage.finding.says


def test_a_full_run_is_all_the_same(tmp_path):
    from learner import small
    from sft_nb.proof.merge import merge
    from sft_nb.training.train import train
    run = train(small(tmp_path, method="full", max_steps=3))
    proof = proving.prove(run, folder=merge(run, out=tmp_path/"merged", prompts=2), prompts=2, max_new_tokens=12)
    assert proof.same and proof.stages[-1].name == "folder answers", str(proof)


def test_a_qlora_run_is_all_the_same(undisturbed_qlora, tmp_path):
    "Until one row of the embedding, which is no part of the adapter, is damaged"
    from sft_nb.proof.merge import merge
    out = merge(undisturbed_qlora, out=tmp_path/"merged", prompts=2)
    proof = proving.prove(undisturbed_qlora, folder=out, prompts=2, max_new_tokens=12)
    assert proof.same and proof.stages[-1].name == "folder answers", str(proof)
    scale_row("model.embed_tokens.weight", 17, 1.05)(out)
    proof = proving.prove(undisturbed_qlora, folder=out, prompts=2, max_new_tokens=12)
    assert proof.broken.name == "folder weights"
    assert "1 of 46 tensors is not the run's: row 17 of model.embed_tokens.weight" in proof.broken.finding.says


def test_a_run_on_plain_text_is_asked_as_text(tmp_path):
    from learner import small
    from sft_nb.training.train import train
    from sft_nb.workbench import Workbench
    run = train(small(tmp_path, method="full", chat_template="none", learning_rate=3e-2, max_steps=3))
    model = Workbench(run.config, is_resolved=True).trained(run.adapter)
    tokenizer = AutoTokenizer.from_pretrained(run.adapter)
    for how in (dict(), dict(bos_twice=True)):
        if how: tokenizer.bos_token = "<|endoftext|>"
        with listening(Stub(model, tokenizer, **how)) as url:
            proof = proving.prove(run, server=url, prompts=2, max_new_tokens=8)
        assert proof.same == (not how), str(proof)


class Odd(BaseHTTPRequestHandler):
    "Answers the same to everything"
    code, said, headers_sent, waits, raw = 200, "", {}, 0, False

    def do_GET(self):
        time.sleep(self.waits)
        if self.raw: return self.wfile.write(self.said.encode() + b"\r\n\r\n")
        self.send_response(self.code)
        for name, value in self.headers_sent.items(): self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.said.encode())

    def log_message(self, *args): ...


@pytest.fixture
def odd():
    "Starts a server that does not serve a model"
    running = []

    def start(**how):
        running.append(ThreadingHTTPServer(("127.0.0.1", 0), type("Odder", (Odd,), how)))
        threading.Thread(target=running[-1].serve_forever, args=(.02,), daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}"
    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("how, says", [
    (dict(said="<html>Welcome to nginx</html>"), "does not answer with JSON but with '<html>"),
    (dict(said="[1, 2]"), "does not answer with JSON"),
    (dict(said='{"object": "list"}'), "its list of models has no data"),
    (dict(said='{"data": []}'), "it lists 0 models"),
    (dict(said="<h1>no</h1>", code=404), r"error \(404\); a server that speaks OpenAI's API"),
    (dict(said='{"detail": "overloaded"}', code=503), r"error \(503: overloaded\).*server's log"),
    (dict(code=302, headers_sent=dict(Location="http://127.0.0.1:1/")), "no redirection"),
    (dict(said='{"data": [', headers_sent={"Content-Length": "90"}), "does not answer with JSON"),
    (dict(said="SSH-2.0-OpenSSH", raw=True), "nothing answers there"),
    (dict(waits=60), "there is no answer within 0.2 seconds.*timeout"),
])
def test_what_is_no_server_of_openais_api_says_so(tokenizer, odd, how, says):
    patience = .2 if "waits" in how else 60
    with pytest.raises(SftError, match=says): print(Server(odd(**how), tokenizer, timeout=patience).name)


@pytest.mark.parametrize("file, text, says", [
    ("config.json", "{", "config.json: it cannot be read"),
    ("model.safetensors", "x", "model.safetensors: it is damaged"),
    ("tokenizer.json", "{", "tokenizer in .*: it cannot be loaded"),
])
def test_a_damaged_folder_says_which_file(tmp_path, tokenizer, file, text, says):
    folder = shutil.copytree(ASSETS/"tiny", tmp_path/"folder")
    (folder/file).write_text(text)
    with pytest.raises(SftError, match=says):
        f = Folder(folder)
        print(f.config, f.tensors, tokenizer_of(f, tokenizer))


def test_an_adapter_is_no_merged_folder(tmp_path):
    (tmp_path/"adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it holds an adapter, not a model"): Folder(tmp_path)


def test_files_cannot_be_read_without_their_package(tmp_path, monkeypatch):
    def without(name, *more):
        if name == "gguf": raise ImportError(name)
        return found(name, *more)
    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    (tmp_path/"model.gguf").write_text("GGUF")
    with pytest.raises(ConfigError, match="the package gguf is not installed"): Gguf(tmp_path/"model.gguf")


def test_the_context_of_a_model_with_a_vision_tower_is_that_of_its_language_model(tmp_path):
    from types import SimpleNamespace

    from shapes import with_images
    from sft_nb.extras.folder_checks import folder_context
    shape = with_images("gemma3")
    expected = SimpleNamespace(bench=SimpleNamespace(shape=shape), reference=SimpleNamespace(longest_row_tokens=93))
    for n, status in ((512, "ok"), (64, "fail")):
        shape.text_config.max_position_embeddings = n
        stage = folder_context(expected, SimpleNamespace(path=tmp_path, config=shape.to_dict()))
        assert stage.finding.status == status


def test_a_prompt_is_a_conversation_up_to_its_last_question(served, monkeypatch, tmp_path):
    talk = [dict(role=role, content=text) for role, text in (
        ("system", "Count."), ("user", "1+1?"), ("assistant", "It is 2."), ("user", "2+3?"), ("assistant", "It is 5."))]
    ids = [dict(role="tokens", content="1 2"), dict(role="assistant", content="3")]
    bench = Workbench(served.run.config, is_resolved=True)
    run = Run(shutil.copytree(served.run.path, tmp_path/"copy"))   # the answers of the run itself are kept
    for chats, prompt in ((dict(a=ids, b=talk), talk[:-1]), (dict(a=ids), [dict(role="user", content="Hello")])):
        monkeypatch.setattr(proving, "held_out_chats", lambda *_, chats=chats: chats)
        found = proving.answer_as_reference(bench, run, run.adapter, prompts=2, max_new_tokens=2)
        assert found.tuned[0].conversation == found.base[0].conversation == prompt
        assert served.tokenizer.decode(found.tuned[0].prompt).count(prompt[-1]["content"]) == 1
        assert len(found.tuned) == len(found.base) == (1 if len(prompt) > 3 else 2)   # or one of several turns is made
