"""GGUF files and llama.cpp itself: clean files are all the same, planted faults are named."""
from types import SimpleNamespace

import pytest
import torch
from as_gguf import convert
from served import assert_named, base_weights, OTHER

from sft_nb.extras.gguf_checks import Gguf, gguf_weights

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def llama_cpp():
    "Starts llama.cpp's server with a file; all servers are stopped after the last test"
    x = pytest.importorskip("xllamacpp")
    running = []

    def start(file, temperature=None, lora=None):
        p = x.CommonParams()
        p.model.path, p.n_ctx, p.n_parallel, p.port, p.warmup = str(file), 512, 1, 0, False
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        if temperature is not None: p.sampling.temp = temperature
        if lora is not None:
            adapter = x.CommonAdapterLoraInfo()
            adapter.path, adapter.scale = str(lora), 1.
            p.lora_adapters = [adapter]
        running.append(x.Server(p))
        return running[-1].listening_address
    yield start
    running.clear()


def file_of(served, name="model", kind="F32", **how):
    return convert(served.merged, served.folder/f"{name}.gguf", kind, **how)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_a_clean_file_that_llama_cpp_serves_is_all_the_same(served, llama_cpp, kind):
    file = file_of(served, kind, kind)
    proof = served.prove(gguf=file, server=llama_cpp(file, temperature=0))
    assert proof.same, str(proof)
    checks = {s.name: s.finding.status for s in proof.stages}
    assert set(checks.values()) == {"ok"}, str(proof)
    assert {"gguf weights", "gguf tied", "server prompt", "server texts", "server sampling"} <= {*checks}


def test_its_own_temperature_is_told_and_no_fault(served, llama_cpp):
    proof = served.prove(server=llama_cpp(file_of(served)))
    assert proof.same and proof.stages[-1].finding.says == "without a temperature it samples at 0.8"


def test_a_coarse_file_is_a_coarse_one_and_still_the_run(served, llama_cpp):
    file = file_of(served, "coarse", "Q4_0")
    proof = served.prove(gguf=file, server=llama_cpp(file, temperature=0))
    names = [s.name for s in proof.stages]
    assert "gguf weights" in names and "server adapter" in names
    assert proof.same or proof.broken.name in ("server quantisation", "server texts"), str(proof)


FAULTS = dict(
    template=dict(template=OTHER), stop=dict(ends=0), context=dict(context=32), sampling=dict(temperature=.7),
    tied=dict(head=1.5), dtype=dict(says=7))


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_file_is_named(served, name):
    proof = served.prove(gguf=file_of(served, "broken", **FAULTS[name]))
    assert_named(proof, name, link="gguf")


def test_a_second_bos_is_named(served):
    from served import TEMPLATE
    proof = served.prove(gguf=file_of(served, "broken", template="{{ bos_token }}" + TEMPLATE))
    assert_named(proof, "bos", link="gguf")
    without = TEMPLATE.replace("{{ bos_token }}", "")
    assert served.prove(gguf=file_of(served, "right", template=without, add_bos=True)).same
    assert_named(served.prove(gguf=file_of(served, "broken", template=without)), "bos", link="gguf")


def test_a_file_of_the_base_is_named(served):
    proof = served.prove(gguf=file_of(served, "broken", weights=base_weights()))
    assert_named(proof, "adapter", link="gguf")


def test_llama_cpp_with_a_short_context_or_the_base_is_named(served, llama_cpp):
    served_base = llama_cpp(file_of(served, "of_base", weights=base_weights()), temperature=0)
    assert_named(served.prove(server=served_base), "adapter")


def test_what_is_no_gguf_file_is_said(served):
    from sft_nb.base.report import ConfigError
    with pytest.raises(ConfigError, match="there is no such file"): served.prove(gguf="nothing.gguf")
    with pytest.raises(ConfigError, match="not a GGUF file"): served.prove(gguf=served.merged/"config.json")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def on_a_file(request, tmp_path_factory):
    "A run whose base is a GGUF file, and its adapter for that file; a Llama keeps queries and keys in another order"
    from served import ASSETS, Served, TEMPLATE
    from small_gguf import write_gguf
    from sft_nb.extras.gguf_checks import gguf_adapter
    folder = tmp_path_factory.mktemp("on_a_file")
    if request.param == "llama": base = write_gguf(folder/"base.gguf", "F32")
    else: base = convert(ASSETS/"tiny", folder/"base.gguf", template=TEMPLATE)
    from sft_nb.config.load import load_config
    from sft_nb.training.train import train
    run = train(load_config(
        "demo", model=str(base), tokenizer=None, runs_dir=str(folder/"runs"), method="lora", max_steps=14,
        max_samples=112, eval_samples=6, save_steps=100, learning_rate=1e-2, per_device_train_batch_size=8,
        preflight=False, max_new_tokens=24, max_length=512))
    return Served(folder, run, folder/"none"), base, gguf_adapter(run, folder/"adapter.gguf")


def test_an_adapter_is_served_on_the_original_file(on_a_file, llama_cpp):
    served, base, adapter = on_a_file
    proof = served.prove(gguf=adapter, server=llama_cpp(base, temperature=0, lora=adapter))
    assert proof.same, str(proof)
    assert {"gguf adapter", "server adapter", "server texts"} <= {s.name for s in proof.stages}
    assert_named(served.prove(server=llama_cpp(base, temperature=0)), "adapter")   # forgotten


def test_an_adapter_that_is_another_is_named(on_a_file, tmp_path):
    from small_gguf import write_gguf
    from sft_nb.extras.gguf_checks import gguf_adapter
    from sft_nb.base.report import ConfigError
    served, _, adapter = on_a_file
    content = bytearray(adapter.read_bytes())
    content[-100] ^= 255
    (tmp_path/"other.gguf").write_bytes(content)
    assert_named(served.prove(gguf=tmp_path/"other.gguf"), "adapter", link="gguf")
    other = write_gguf(tmp_path/"another.gguf", scale=.3)
    with pytest.raises(ConfigError, match="its matrix of .* is not the base's"):
        gguf_adapter(served.run, tmp_path/"a.gguf", base=other)
    assert not (tmp_path/"a.gguf").exists()


def test_what_cannot_be_an_adapter_of_a_file_is_said(served, on_a_file, monkeypatch):
    from sft_nb.extras.gguf_checks import adapter_tensors, Gguf, gguf_adapter
    from sft_nb.base.report import ConfigError
    with pytest.raises(ConfigError, match="is no GGUF file"): gguf_adapter(served.run, served.folder/"a.gguf")
    proof = served.prove(gguf=on_a_file[2])
    assert "skipped" in {s.finding.status for s in proof.stages if s.name == "gguf adapter"}
    run, base = on_a_file[0].run, on_a_file[1]
    monkeypatch.setattr("sft_nb.extras.gguf_checks.leaves_base", lambda cfg: False)
    with pytest.raises(ConfigError, match="init_lora_weights=.*, which a GGUF adapter cannot hold"):
        adapter_tensors(run, Gguf(base), run.adapter)


def test_a_base_that_was_an_8_bit_file_is_no_missing_adapter(tmp_path):
    "Its embedding, rounded to bfloat16 and then to 8 bits, returns towards itself: training did not change it"
    import gguf
    kind, chance = gguf.GGMLQuantizationType.Q8_0, torch.Generator().manual_seed(0)
    def to_8_bits(weight): return gguf.quantize(weight.numpy(), kind)
    base, merged = {}, {}
    w = gguf.GGUFWriter(str(tmp_path/"model.gguf"), "qwen3")
    w.add_block_count(1)
    for name, here, size in (("model.embed_tokens", "token_embd", 0),
                             ("model.layers.0.mlp.down_proj", "blk.0.ffn_down", .1)):
        was = torch.from_numpy(gguf.dequantize(to_8_bits(torch.randn(256, 64, generator=chance)), kind).copy())
        base[f"{name}.weight"] = was
        merged[f"{name}.weight"] = was + size * torch.randn(256, 64, generator=chance)
        in_folder = merged[f"{name}.weight"].bfloat16().float()
        w.add_tensor(f"{here}.weight", to_8_bits(in_folder), raw_dtype=kind)
    for step in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file, w.close): step()
    stage = gguf_weights(SimpleNamespace(merged=merged, base=base, run=tmp_path, learned="the adapter"),
                         Gguf(tmp_path/"model.gguf"))
    assert stage.finding.status == "ok", str(stage)
    assert stage.figures["converted from"] == "bfloat16"
