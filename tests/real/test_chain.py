"""The whole chain on a pretrained model: trained on real rows, merged, as GGUF, served, and the same at each stage; and
what goes wrong on the way is named. The tables of the chapter on merging are printed by `-s`."""
import csv
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path += [str(Path(__file__).parents[1]/"proof")]
from as_gguf import convert
from served import assert_named, edited, proofs_of, Served
from test_prove_transformers import transformers_serve

from sft_nb.config.load import load_config
from sft_nb.proof import merge as merging
from sft_nb.proof.merge import merge, template_with_system_prompt
from sft_nb.tokens.encode import encode, encode_prompts
from sft_nb.training.train import train
from sft_nb.workbench import Workbench

pytestmark = [pytest.mark.real, pytest.mark.soak]
pytest.importorskip("gguf")
FEW = dict(prompts=2, max_new_tokens=12)


@pytest.fixture(scope="session")
def run(smollm2, tmp_path_factory):
    "LoRA in 16 bits on rows of MED, which learns the form of the answers"
    folder = tmp_path_factory.mktemp("chain")
    rows = Path(os.environ.get("SFT_NB_SHARED", Path(__file__).parents[3]/"shared"))/"data/med_nli/MED.tsv"
    if not rows.exists(): pytest.skip(f"{rows} is not here (set SFT_NB_SHARED to the folder of real rows)")
    with open(rows, encoding="utf-8") as file:
        pairs = [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    pairs = [p for p in pairs if len(p["sentence1"] + p["sentence2"]) < 160][::4]
    asks = "Premise: {sentence1}\nHypothesis: {sentence2}\nAnswer entailment or neutral."
    rows = [dict(question=asks.format(**p), answer=p["gold_label"]) for p in pairs]
    (folder/"rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return train(load_config(
        model=smollm2, task="chat", train_file=str(folder/"rows.jsonl"), eval_rows=32, eval_samples=8, method="lora",
        runs_dir=str(folder/"runs"), max_steps=40, per_device_train_batch_size=16, gradient_accumulation_steps=1,
        preflight=False, max_new_tokens=8))


@pytest.fixture(scope="session")
def bench(run): return Workbench(run.config, is_resolved=True)


@pytest.fixture(scope="session")
def served(run, tmp_path_factory):
    "The run, merged in its default format, with what it is compared with"
    folder = tmp_path_factory.mktemp("served")
    with proofs_of(Served(folder, run, merge(run, out=folder/"merged"))) as made: yield made


@pytest.fixture(scope="module")
def llama_cpp():
    "Starts llama.cpp's server with a file"
    x = pytest.importorskip("xllamacpp")
    running = []

    def start(file):
        p = x.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.port, p.warmup, p.sampling.temp = str(file), 512, 1, 0, False, 0
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        running[:] = [x.Server(p)]   # one at a time, as it holds the weights
        return running[0].listening_address
    yield start
    running.clear()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_is_merged_in_each_format(run, tmp_path, dtype):
    report = json.loads((merge(run, out=tmp_path/"merged", dtype=dtype)/"parity.json").read_text())
    figures = report["figures"]
    print(f"\n{dtype}:", {name: figures.get(name) for name in (
        "noise_of_the_format", "mean_difference", "effect_of_the_adapter", "kept_of_it", "equal_answers", "loss",
        "loss_merged", "loss_of_base")})
    assert report["status"] in ("ok", "warn")
    assert figures["mean_difference"] < 2.5 * figures.get("noise_of_the_format", 4e-5)
    assert figures["loss_merged"] - figures["loss"] < .05 and figures["kept_of_it"] > .9


def scaled(scale, only=""):
    def fault(model, base):
        for name, p in model.named_parameters():
            if only in name: p.data = base[name] + scale * (p.data - base[name])
    return fault


LAYER = "model.layers.17.mlp.down_proj.weight"
SQUARE = "model.layers.17.self_attn.o_proj.weight"


def changed(change, name):
    def fault(model, base): model.get_parameter(name).data = change(model.get_parameter(name).data)
    return fault


def swapped(model, base):
    a, b = (model.get_submodule(f"model.layers.{k}.self_attn.o_proj") for k in (17, 18))
    a.weight.data, b.weight.data = b.weight.data, a.weight.data


MERGED = {
    "adapter twice": (scaled(2), "have the adapter"), "half a scale": (scaled(.5), "have the adapter 0."),
    "base alone": (scaled(0), "not in them"), "one layer without it": (scaled(0, LAYER), f"not in it, as in {LAYER}"),
    "one layer twice": (scaled(2, LAYER), f"as in {LAYER}"), "transposed": (changed(torch.t, SQUARE), SQUARE),
    "zeros": (changed(torch.zeros_like, LAYER), "is all zeros"),
    "two layers swapped": (swapped, "holds model.layers.1"),
    "norm off by 1%": (changed(lambda w: w * 1.01, "model.norm.weight"), "model.norm.weight"),
    "a quarter too much": (scaled(1.25), "have the adapter"),
}


def test_every_fault_of_a_merge_is_named_in_bfloat16(run, bench):
    "The largest ones show in the logits, too; a layer of thirty without its adapter does not"
    model = merging._with_adapter(bench, run.adapter)
    tokenizer, talks = bench.tokenizer, merging.held_out_chats(run.config, 4)
    prompts = [talk[:-1] for talk in talks.values()]
    how = dict(max_new_tokens=0, dtype=torch.float32)
    trained = merging.probe(model, tokenizer, prompts, rows=encode(talks, tokenizer), **how)
    with model.disable_adapter():
        base = merging.probe(model, tokenizer, prompts, like=trained, **how)
        in_format = merging.probe(model, tokenizer, prompts, like=trained, max_new_tokens=0, dtype=torch.bfloat16)
    noise = merging.mean_difference(base, in_format)
    prints = merging.weight_prints(model, torch.bfloat16)
    before = {name: p.data.float() for name, p in bench.base().named_parameters()}
    merged = merging.merged_model(bench, run.adapter, torch.float32)
    right = {name: p.data for name, p in merged.named_parameters()}
    for name, (plant, says) in ({"none": (lambda model, base: None, "all 2")} | MERGED).items():
        for n, p in right.items(): merged.get_parameter(n).data = p
        with torch.no_grad(): plant(merged, before)
        for p in merged.parameters(): p.data = p.data.bfloat16()
        found = merging.compare_weights(prints, merged)
        gap = merging.measure_gap(trained, merging.probe(merged, tokenizer, prompts, like=trained, max_new_tokens=0),
                                  base, noise=noise)
        print(f"{name:22s} {gap.mean / noise:6.2f} times the noise, kept {gap.kept:5.2f}, "
              f"{'explained' if gap.is_explained else 'refused':9s} {found.says[:110]}")
        assert (found.status == "ok") == (name == "none") and says in found.says, (name, found.says)


KINDS = dict(F16="float16", Q8_0="q8_0")


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_serves_what_was_trained(served, llama_cpp, kind):
    file = convert(served.merged, served.folder/f"{kind}.gguf", kind)
    proof = served.prove(folder=served.merged, gguf=file, server=llama_cpp(file), **FEW)
    print("\n", proof, sep="")
    assert proof.same, str(proof)
    done = {s.name for s in proof.stages}
    assert {"folder weights", "folder answers", "gguf weights", "server prompt", "server texts"} <= done


def test_transformers_serves_what_was_trained(served):
    with transformers_serve() as url: proof = served.prove(server=url, folder=served.merged, **FEW)
    print("\n", proof, sep="")
    assert proof.same and "server texts" in {s.name for s in proof.stages}, str(proof)


def test_the_template_writes_its_own_system_message_in_training_and_serving(served, bench):
    question = [[dict(role="user", content="Hello")]]
    trained = bench.tokenizer.decode(encode_prompts(question, bench.tokenizer)[0])
    saved = served.tokenizer.apply_chat_template(question[0], tokenize=False, add_generation_prompt=True)
    assert trained == saved and "You are a helpful AI assistant named SmolLM" in trained
    rows = bench.data.train.tokens[0]["input_ids"]
    assert bench.tokenizer.decode(rows).startswith(trained[:80])


def without_system(template): return template.split("{% endif %}{{", 1)[1].join(["{% for message in messages %}{{", ""])


def edit_weights(change):
    def fault(folder):
        from safetensors.torch import load_file, save_file
        weights = load_file(folder/"model.safetensors")
        save_file(change(weights), folder/"model.safetensors", metadata=dict(format="pt"))
    return fault


def edit_json(name, **settings): return lambda folder: edited(folder/name, **settings)


def edit_template(change):
    def fault(folder):
        file = folder/"chat_template.jinja"
        file.write_text(change(file.read_text()))
    return fault


FOLDER = {
    "weights": edit_weights(lambda w: w | {LAYER: w[LAYER] * 1.02}),
    "template, its system message is gone": edit_template(without_system),
    "system": edit_template(lambda t: template_with_system_prompt(t, "Answer in French.")),
    "stop": edit_json("generation_config.json", eos_token_id=0),
    "sampling": edit_json("generation_config.json", do_sample=True, temperature=.7),
    "context": edit_json("config.json", max_position_embeddings=32),
    "shape": edit_json("config.json", rms_norm_eps=1e-3),
    "dtype": edit_json("config.json", dtype="float16"),
    "tied": edit_json("config.json", tie_word_embeddings=False),
}


@pytest.mark.parametrize("fault", FOLDER)
def test_what_is_wrong_with_a_folder_is_named(served, fault):
    folder = served.copy("broken")
    FOLDER[fault](folder)
    proof = served.prove(folder=folder, **FEW)
    print("\n", proof.headline, proof.broken, sep="\n")
    if fault != "weights": return assert_named(proof, fault.partition(",")[0], link="folder")
    assert proof.broken.name == "folder weights" and proof.verdict == "close, not equal"   # only one of 272
    assert LAYER in proof.broken.finding.says


FILE = {
    "template": dict(template="{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    "template, a BOS of another kind": dict(add_bos=True),
    "stop": dict(ends=0), "sampling": dict(temperature=.7), "context": dict(context=32), "dtype": dict(says=7),
    "tied": dict(head=1.5),
}


@pytest.mark.parametrize("fault", FILE)
def test_what_is_wrong_with_a_file_is_named(served, fault):
    proof = served.prove(gguf=convert(served.merged, served.folder/"broken.gguf", "F16", **FILE[fault]), **FEW)
    print("\n", proof.headline, proof.broken, sep="\n")
    assert_named(proof, fault.partition(",")[0], link="gguf")


def test_a_server_of_the_base_or_with_another_template_is_named(served, bench, llama_cpp):
    base = served.folder/"base"
    bench.base().save_pretrained(base)
    file = convert(served.merged, served.folder/"base.gguf", "F16", weights=base)
    assert_named(served.prove(server=llama_cpp(file), **FEW), "adapter")
    assert_named(served.prove(gguf=file, **FEW), "adapter", link="gguf")
    other = template_with_system_prompt((served.merged/"chat_template.jinja").read_text(), "Answer in French.")
    file = convert(served.merged, served.folder/"french.gguf", "F16", template=other)
    assert_named(served.prove(server=llama_cpp(file), **FEW), "system")


def test_it_loads_without_this_package(served):
    assert AutoModelForCausalLM.from_pretrained(served.merged).dtype == torch.bfloat16
