"""Small models of many architectures with random weights, for tests."""
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sft_nb.model.attention import register_varlen

sys.path.insert(0, str(Path(__file__).parents[1]/"scripts"))
from tiny_shapes import tiny_config   # noqa: E402, F401  of any type of transformers

TOKENS = dict(vocab_size=768, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SMALL = TOKENS | dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=512)
SHAPES = dict(
    qwen3=dict(tie_word_embeddings=True),
    llama={},
    mistral=dict(sliding_window=7),
    gemma2=dict(sliding_window=7, query_pre_attn_scalar=16, final_logit_softcapping=3.),
    gemma3_text=dict(sliding_window=7, query_pre_attn_scalar=16),
    phi3={},
    granite=dict(logits_scaling=3.),
    cohere=dict(logit_scale=.3),
    smollm3=dict(no_rope_layer_interval=2),
    qwen2={},
    gpt2=dict(n_embd=64, n_layer=4, n_head=4, n_positions=512),
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
MIXTURES = dict(
    qwen3_moe=EXPERTS,   # router loss
    glm4_moe=EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),   # a dense layer
)
ODD = dict(   # their flattened rows would read each other
    opt=dict(hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
             max_position_embeddings=512, dropout=0.),
    bloom=dict(hidden_size=64, n_layer=2, n_head=4),
    mamba=dict(hidden_size=64, num_hidden_layers=2, state_size=8),
    falcon=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
)


VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28,
              patch_size=14)
WITH_IMAGES = dict(   # as published: a language model with a vision tower
    gemma3=dict(text_config=dict(sliding_window=7, query_pre_attn_scalar=16), vision_config={}, mm_tokens_per_image=4,
                image_token_index=760, boi_token_index=761, eoi_token_index=762),
    mistral3=dict(text_config=dict(model_type="mistral"), vision_config=dict(model_type="pixtral", head_dim=16),
                  image_token_index=760),
    llama4=dict(   # contains a whole causal model, whose router is a linear layer
        text_config=EXPERTS | dict(num_local_experts=4, intermediate_size_mlp=96, interleave_moe_layer_step=2,
                                   attention_chunk_size=64, no_rope_layers=[1, 0]),
        vision_config=dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32),
        image_token_index=760, boi_token_index=761, eoi_token_index=762),
)


def with_images(kind:str):
    "The config of a two-layer model, with the name of its published class"
    parts = WITH_IMAGES[kind]
    text = SMALL | dict(num_hidden_layers=2) | parts["text_config"]
    named = dict(llama4="Llama4", gemma3="Gemma3", mistral3="Mistral3")[kind]
    config = parts | dict(text_config=text, vision_config=VISION | parts["vision_config"])
    return AutoConfig.for_model(kind, **config, architectures=[f"{named}ForConditionalGeneration"])


def shape(kind:str, **more):
    small = TOKENS if kind == "gpt2" or kind in ODD else SMALL
    return AutoConfig.for_model(kind, **small | (SHAPES | MIXTURES | ODD)[kind] | more)


def short_rows(path, n:int=16)->dict:
    "Settings for rows of 10 to 14 tokens, for layers that loop over tokens"
    rows = [dict(prompt=f"{k} + {k % 7 + 1} =", completion=str(2 * k) * (1 + k % 3)) for k in range(10, 10 + n)]
    (path/"short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(task="chat", chat_template="none", train_file=str(path/"short.jsonl"))


def model(kind:str, *, dtype=torch.float32, attention:str="eager", **more):
    torch.manual_seed(0)
    register_varlen()
    return AutoModelForCausalLM.from_config(shape(kind, **more), dtype=dtype, attn_implementation=attention).eval()


def folder(path, kind:str, **more)->str:
    "A folder with only the config, for `init='random'`"
    shape(kind, **more).save_pretrained(path/kind)
    return str(path/kind)
