"""Small models of many architectures with random weights, for tests."""
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    qwen3_moe=EXPERTS,   # a loss of its routers
    glm4_moe=EXPERTS | dict(n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),   # a dense layer
)
ODD = dict(   # flattened rows would read each other
    opt=dict(hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
             max_position_embeddings=512, dropout=0.),
    bloom=dict(hidden_size=64, n_layer=2, n_head=4),
    mamba=dict(hidden_size=64, num_hidden_layers=2, state_size=8),
    falcon=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
)


def shape(kind:str, **more):
    small = TOKENS if kind == "gpt2" or kind in ODD else SMALL
    return AutoConfig.for_model(kind, **small | (SHAPES | MIXTURES | ODD)[kind] | more)


def model(kind:str, *, dtype=torch.float32, attention:str="eager", **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(shape(kind, **more), dtype=dtype, attn_implementation=attention).eval()


def folder(path, kind:str, **more)->str:
    "A folder with the config alone: for `init='random'`"
    shape(kind, **more).save_pretrained(path/kind)
    return str(path/kind)
