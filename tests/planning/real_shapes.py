"""Published shapes, written by hand, and what a plan says of each: `python tests/planning/real_shapes.py` prints the
table and writes `real_shapes.json`. Rows of one length; the token budget is one row, so that nothing is packed."""
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from sft_nb.base.report import SftError
from sft_nb.config.load import load_config
from sft_nb.model.hardware import find_device
from sft_nb.planning.plan import plan

FILE = Path(__file__).with_suffix(".json")
LENGTHS = (2048, 16_384, 65_536)
CARDS = dict(lora="h100-80gb", qlora="rtx4090-24gb", full="h200-141gb")   # a usual one for each method
SHAPES = {   # name: type, and what differs from the defaults of its config
    "gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
    "Qwen3-30B-A3B": ("qwen3_moe", dict(
        vocab_size=151_936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8)),
    "Gemma-3-27B": ("gemma3_text", dict(
        vocab_size=262_208, hidden_size=5376, intermediate_size=21_504, num_hidden_layers=62, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, sliding_window=1024, query_pre_attn_scalar=168)),
    "Llama-3.1-8B": ("llama", dict(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8)),
    "Mistral-Small-24B": ("mistral", dict(
        vocab_size=131_072, hidden_size=5120, intermediate_size=32_768, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, sliding_window=None)),
    "GLM-4.5-Air": ("glm4_moe", dict(
        vocab_size=151_552, hidden_size=4096, intermediate_size=10_944, moe_intermediate_size=1408,
        num_hidden_layers=46, num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1,
        attention_bias=True)),
    "Moonlight-16B-A3B": ("deepseek_v3", dict(   # DeepSeek-V3's layers, fewer and narrower
        vocab_size=163_840, hidden_size=2048, intermediate_size=11_264, moe_intermediate_size=1408,
        num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, n_group=1, topk_group=1)),
    "Granite-4.0-H-Tiny": ("granitemoehybrid", dict(
        vocab_size=100_352, hidden_size=1536, intermediate_size=512, shared_intermediate_size=1024,
        num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4, num_local_experts=64,
        num_experts_per_tok=6, mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128,
        layer_types=["attention" if k % 10 == 5 else "mamba" for k in range(40)])),
    "Phi-4": ("phi3", dict(
        vocab_size=100_352, hidden_size=5120, intermediate_size=17_920, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=10, max_position_embeddings=65_536, rope_theta=250_000., sliding_window=None)),
    "Qwen3.5-9B": ("qwen3_5_text", {})}


# the chunks of Qwen3.5's linear attention are simulated one by one, which takes minutes for a long row
CASES = [(name, method, n) for n in LENGTHS for name in SHAPES for method in CARDS if name != "Qwen3.5-9B" or n == 2048]


def plan_of(name:str, method:str, tokens:int, folder:str):
    "The plan for rows of so many tokens on the method's card, with 128 GiB of host memory"
    kind, how = SHAPES[name]
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoConfig.for_model(kind, **ids | dict(tie_word_embeddings=name.startswith("Gemma")) | how).save_pretrained(folder)
    cfg = load_config(model=folder, tokenizer="tiny", init="random", method=method, max_length=tokens,
                      max_tokens_per_batch=tokens, eval_steps=None)
    return plan(cfg, device=replace(find_device(CARDS[method]), host=128), lengths=[tokens] * 4)


def line_of(name:str, method:str, tokens:int)->dict:
    "The plan in figures: GiB in all, of the weights, and offloaded; what it does to save memory"
    with tempfile.TemporaryDirectory() as folder:
        try: made = plan_of(name, method, tokens, folder)
        except SftError as e: return dict(error=str(e).replace(folder, name))
    savings = "gradient_checkpointing activation_offloading keep_attention recompute_parts".split()
    return dict(gib=round(made.total / 2**30, 1), weights=round(made.parts["weights"] / 2**30, 1), fits=made.fits,
                host=round(made.host / 2**30, 1), savings=[s for s in savings if made.settings[s]],
                left_out=[f.says for f in made.findings if f.check == "ways"])


if __name__ == "__main__":
    table = json.loads(FILE.read_text()) if FILE.exists() else {}
    for case in CASES:
        key = " ".join(map(str, case))
        if key in table and key not in sys.argv[1:]: continue
        began = time.process_time()
        table[key] = line_of(*case)
        print(key, CARDS[case[1]], table[key], f"{time.process_time() - began:.1f} s", flush=True)
        FILE.write_text(json.dumps(table, indent=1) + "\n")
