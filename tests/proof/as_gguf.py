"""Convert a folder with the tiny model's shape (Qwen3) or a Llama's to GGUF: enough of llama.cpp's converter for tests.
Its name for a pre-tokenizer that splits digits like ours is smollm."""
import json
from pathlib import Path

import gguf
from safetensors.torch import load_file

FILES = dict(F32=0, F16=1, Q4_0=2, Q8_0=7, BF16=32)   # general.file_type


def vocabulary(folder: Path, rows: int) -> tuple[list[str], list[int], list[str]]:
    "Tokens, their types and the merges"
    said = json.loads((folder/"tokenizer.json").read_text())
    added = {t["content"]: t["id"] for t in said["added_tokens"]}
    names = {i: t for t, i in (said["model"]["vocab"] | added).items()}
    types = [3 if names.get(i) in added else 1 if i in names else 5 for i in range(rows)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    return [names.get(i, f"[PAD{i}]") for i in range(rows)], types, merges


def pairs_apart(weight, heads: int):
    "llama.cpp rotates neighbouring rows of a Llama's queries and keys, transformers those half a head apart"
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def convert(folder: Path, out: Path, kind: str = "F32", *, says: int | None = None, template: str | None = None,
            add_bos: bool = False, ends: int = 2, bos: int | None = 0, context: int | None = None, head=None,
            temperature: float | None = None, weights: Path | None = None) -> Path:
    "Write the file, optionally with a fault"
    config = json.loads((folder/"config.json").read_text())
    tokens, types, merges = vocabulary(folder, config["vocab_size"])
    arch, splits = config["model_type"], json.loads((folder/"tokenizer.json").read_text())["pre_tokenizer"]
    w = gguf.GGUFWriter(str(out), arch)
    w.add_name("tiny")
    w.add_context_length(context or config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    w.add_file_type(FILES[kind] if says is None else says)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm" if "Digits" in json.dumps(splits) else "gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_eos_token_id(ends)
    w.add_pad_token_id(config["pad_token_id"] or 3)
    w.add_rope_dimension_count(config["head_dim"])
    w.add_vocab_size(config["vocab_size"])
    if bos is not None: w.add_bos_token_id(bos)
    w.add_add_bos_token(add_bos)
    if temperature: w.add_sampling_temp(temperature)
    w.add_chat_template(template or (folder/"chat_template.jinja").read_text())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    tensors = load_file((weights or folder)/"model.safetensors")
    if head: tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * head
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        heads = dict(q_proj=config["num_attention_heads"], k_proj=config["num_key_value_heads"])
        if arch == "llama" and (n := heads.get(name.split(".")[-2])): data = pairs_apart(data, n)
        to = gguf.GGMLQuantizationType[kind if data.ndim > 1 else "F32"]
        w.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(data, to), raw_dtype=to)
    for step in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file, w.close): step()
    return out
