"""GGUF files of a small llama with random weights: what llama.cpp's converter writes, as far as a test needs it."""
from pathlib import Path

import gguf
import numpy as np

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
BYTES = [*map(chr, [*range(33, 127), *range(161, 173), *range(174, 256)]), *map(chr, range(256, 324))]
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", *BYTES, "ab"]


def write_gguf(path: Path, kind: str = "Q8_0", *, arch: str = "llama", hidden: int = 64, scale: float = .1,
               tensors: dict | None = None, without: tuple = (), tokens: bool = True, **metadata) -> Path:
    "Further metadata by name: numbers and texts, with _ for a dot and __ for an underscore"
    path = Path(path)
    w, draw = gguf.GGUFWriter(str(path), arch), np.random.default_rng(0)
    numbers = dict(context_length=512, embedding_length=hidden, block_count=1, feed_forward_length=2 * hidden,
                   vocab_size=len(WORDS))
    for key, n in numbers.items(): w.add_uint32(f"{arch}.{key}", n)
    w.add_head_count(2)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.)
    w.add_rope_dimension_count(hidden // 2)
    w.add_tokenizer_model("gpt2")
    w.add_token_list(WORDS)
    w.add_token_types([3] * 4 + [1] * (len(WORDS) - 4))
    w.add_token_merges(["a b"])
    w.add_chat_template(TEMPLATE)
    ends = dict(bos=1, eos=0, eot=2, padding=3)
    for name, number in ends.items(): w.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, value in metadata.items():
        key = "_".join(part.replace("_", ".") for part in name.split("__"))
        add = {int: w.add_uint32, float: w.add_float32, str: w.add_string}[type(value)]
        add(key, value)
    shapes = {"token_embd.weight": (len(WORDS), hidden), "output_norm.weight": (hidden,)}
    shapes |= {f"blk.0.attn_{name}.weight": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}_norm.weight": (hidden,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.ffn_{name}.weight": (2 * hidden, hidden) for name in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = (hidden, 2 * hidden)
    for name, shape in shapes.items():
        values = draw.normal(0, scale, shape).astype(np.float32)
        to = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
        if name not in without: w.add_tensor(name, gguf.quantize(values, to), raw_dtype=to)
    for name, values in (tensors or {}).items(): w.add_tensor(name, values)
    for step in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file, w.close): step()
    return path
