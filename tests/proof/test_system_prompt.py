"""A system prompt with which all training rows begin: what is served needs it, and every way to serve says so."""
import json

import pytest
import torch
from stub_server import listening, Stub
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_nb.cli import main
from sft_nb.config.load import load_config
from sft_nb.panels.conversation import GenerationState
from sft_nb.panels.generation import GenerationPanel
from sft_nb.proof.merge import merge, template_with_system_prompt
from sft_nb.proof.prove import prove
from sft_nb.base.report import ConfigError
from sft_nb.runs.directory import Run
from sft_nb.runs.locate import find_target
from sft_nb.tokens.prepare import prepare
from sft_nb.training.train import train

SYSTEM = "You count {{ figs }}.\nBe \"brief\"."
FEW = dict(prompts=2, max_new_tokens=8)


def rows(system=SYSTEM, n=48):
    first = [dict(role="system", content=system)] if system else []
    return [dict(messages=[*first, dict(role="user", content=f"Ben has {k} figs. He buys 4. How many?"),
                           dict(role="assistant", content=f"{k + 4}")]) for k in range(n)]


def settings(**how): return load_config(model="tiny", task="chat", eval_rows=8, eval_samples=4, **how)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("system")
    (folder/"rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    cfg = settings(train_file=str(folder/"rows.jsonl"), runs_dir=str(folder/"runs"), max_steps=4, save_steps=4,
                   preflight=False, method="lora", max_new_tokens=8, per_device_train_batch_size=4)
    return train(cfg)


def test_the_data_report_knows_it():
    def found(rows, **how): return prepare(settings(**how), train=rows).report.figures.get("system_prompt")
    assert found(rows()) == SYSTEM and found(rows(""), system_prompt="Be brief.") == "Be brief."
    assert found(rows("")) is None and found([*rows(n=20), *rows("Be long.", n=20)]) is None
    assert found([*rows(n=20), *rows("", n=20)]) is None


def test_a_run_and_its_adapter_know_it(run, tmp_path):
    assert run.system_prompt == find_target(run).system_prompt == SYSTEM
    copied = run.adapter.rename(tmp_path/"copied")
    try: assert find_target(copied).system_prompt == SYSTEM
    finally: copied.rename(run.adapter)
    assert find_target("tiny").system_prompt == "" and Run(run.path).system_prompt == SYSTEM


def prompts_of(monkeypatch, args):
    "What a command gives the model to read"
    import sft_nb.model.generation as generating
    seen, encode = [], generating.encode_prompts
    monkeypatch.setattr(generating, "encode_prompts", lambda talks, tok: seen.extend(talks) or encode(talks, tok))
    assert main(args) == 0
    return [[m["content"] for m in talk] for talk in seen]


@pytest.mark.parametrize("given, sent", [
    ([], [SYSTEM, "Hello"]), (["--system-prompt", ""], ["Hello"]),
    (["--system-prompt", "Be long."], ["Be long.", "Hello"])])
def test_commands_send_it_unless_another_is_given(run, monkeypatch, capsys, given, sent):
    assert prompts_of(monkeypatch, ["generate", str(run.path), "Hello", "--max-new-tokens", "2", *given]) == [sent]
    assert ("system prompt of the training rows" in capsys.readouterr().err) == (not given)


def test_panels_send_it_unless_another_is_given(run):
    state = GenerationState(run, "adapter")
    assert [m["content"] for m in state.begin("Hello").before] == [SYSTEM]
    state.new()
    assert state.begin("Hello", system="").before == []
    panel = GenerationPanel(run, "base", thread=False)
    assert panel.controls.system.value == SYSTEM
    panel.close()


def test_training_and_merging_say_it_and_the_template_can_write_it(run, tmp_path, capfd):
    plain = merge(run, out=tmp_path/"plain", prompts=2, dtype="float32")
    assert "each training row begins with the system prompt" in "".join(capfd.readouterr())
    assert find_target(plain).system_prompt == SYSTEM
    written = merge(run, out=tmp_path/"written", prompts=2, dtype="float32", write_system_prompt=True)
    assert "--write-system-prompt" not in "".join(capfd.readouterr()) and find_target(written).system_prompt == ""

    question, own = [dict(role="user", content="Hello")], dict(role="system", content="Be long.")
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (plain, written))
    def text(tokenizer, talk): return tokenizer.apply_chat_template(talk, tokenize=False)
    assert text(theirs, question) == text(ours, [dict(role="system", content=SYSTEM), *question])
    assert text(theirs, [own, *question]) == text(ours, [own, *question])

    lacking, having = (prove(run, folder=folder, **FEW) for folder in (plain, written))
    assert lacking.same and having.same, (str(lacking), str(having))
    status = [[s.finding.status for s in p.stages if s.name == "folder system"] for p in (lacking, having)]
    assert status == [["warn"], ["ok"]]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for tokenizer, want in ((ours, "warn"), (theirs, "ok")):
        with listening(Stub(model, tokenizer)) as url: proof = prove(run, folder=plain, server=url, **FEW)
        assert [s.finding.status for s in proof.stages if s.name == "server system"] == [want], str(proof)


def test_a_merge_that_cannot_write_it_says_why(run, tmp_path, monkeypatch):
    assert template_with_system_prompt("T", "S").endswith("T")
    monkeypatch.setattr(Run, "system_prompt", "")
    with pytest.raises(ConfigError, match="do not all begin with one system prompt"):
        merge(run, out=tmp_path/"x", write_system_prompt=True)
    monkeypatch.setattr(Run, "system_prompt", SYSTEM)
    monkeypatch.setattr("sft_nb.workbench.Workbench.tokenizer", type("Plain", (), dict(chat_template=None))())
    with pytest.raises(ConfigError, match="no chat template to write the system prompt into"):
        merge(run, out=tmp_path/"x", write_system_prompt=True)


def test_an_evaluation_by_perplexity_answers_in_that_word(run, capsys):
    assert main(["evaluate", str(run.path), "--by", "perplexity", "--examples", "0"]) == 0
    assert "(perplexity " in capsys.readouterr().out


def test_a_gguf_file_is_asked_for_it_too(run, tmp_path):
    gguf = pytest.importorskip("gguf")
    from as_gguf import convert
    assert gguf
    folders = [merge(run, out=tmp_path/name, prompts=2, dtype="float32", write_system_prompt=written)
               for name, written in (("plain", False), ("written", True))]
    templates = [AutoTokenizer.from_pretrained(folder).chat_template for folder in folders]
    files = [convert(folder, tmp_path/f"{folder.name}.gguf", template=template)
             for folder, template in zip(folders, templates)]
    proofs = [prove(run, folder=folders[0], gguf=file, **FEW) for file in files]
    assert all(p.same for p in proofs), "\n".join(map(str, proofs))
    assert [s.finding.status for p in proofs for s in p.stages if s.name == "gguf system"] == ["warn", "ok"]
