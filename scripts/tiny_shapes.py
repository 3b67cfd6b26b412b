"""A config of a few thousand parameters for each causal type of transformers, derived from its class's defaults."""

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = {   # names of a size in configs -> a small value; only names that a config has are set
    64: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim attention_hidden_size "
        "input_embedding_size output_embedding_size lru_width mamba_d_ssm embedding_dim hidden_dim "
        "backbone_hidden_size",
    96: "intermediate_size n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff ffn_hidden_size d_inner "
        "shared_intermediate_size shared_experts_intermediate_size intermediate_size_mlp feed_forward_size "
        "dense_intermediate_size block_ff_dim",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
       "num_heads attention_heads encoder_attention_heads decoder_attention_heads num_encoder_layers "
       "num_decoder_layers num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts "
       "n_routed_experts moe_num_experts swa_num_attention_heads conv_L_cache num_linear_attention_heads num_blocks",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk "
       "moe_k index_n_heads linear_num_key_heads n_mamba_heads num_query_groups moe_num_shared_experts",
    16: "head_dim v_head_dim qk_nope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim kv_channels "
        "mamba_d_head mamba_head_dim mamba_headdim attention_head_dim attention_head_size dim_head d_head swa_head_dim "
        "swa_v_head_dim linear_head_dim query_pre_attn_scalar mamba_d_state state_size ssm_state_size mamba_dt_rank",
    8: "qk_rope_head_dim mamba_chunk_size chunk_size rotary_dim hidden_size_per_layer_input laurel_rank",
    32: "moe_intermediate_size q_lora_rank kv_lora_rank expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size o_lora_rank",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups first_k_dense_replace num_nextn_predict_layers "
       "n_shared_experts num_shared_experts type_vocab_size",
    512: "max_position_embeddings n_positions model_max_length max_seq_len context_length n_ctx max_target_positions "
         "original_max_position_embeddings index_topk",   # with fewer tokens, the scores of a random indexer tie
    7: "sliding_window sliding_window_size attention_window_size local_attention window_size",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SIDES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
             head_dim=16, num_channels=3, per_layer_config=None, adapter_in_dim=32,
             adapter_input_size=32, adapter_out_dim=64)   # of towers that text rows never use


_ROPE = dict(rope_type="default", rope_theta=10000.)
_MAMBA = dict(mamba_n_heads=8)
_DOTS = dict(num_key_value_heads=4, swa_num_key_value_heads=4, head_dim=24, swa_head_dim=24, per_layer_config={})
_QWEN4 = dict(indexer_budget=16, indexer_compress_ratio=4, indexer_head_dim=16, indexer_n_heads=2, indexer_kv_heads=1,
              linear_num_value_heads=4, hc_lowrank=8, ngram_vocab_size_base=64, split_ngram_parts=2,
              make_ngram_vocab_size_divisible_by=8, ple_embed_dim=16)
_PICTURES = dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, codebook_size=64, embed_dim=8,
                 latent_channels=8, attn_resolutions=[])
OWN = dict(   # further values that a type needs, or defaults that are too large
    afmoe=dict(num_dense_layers=1), cpmant=dict(prompt_types=4, prompt_length=2),
    bamba=_MAMBA | dict(attn_layer_indices=[1, 3]),
    granitemoehybrid=_MAMBA | dict(layer_types=["linear_attention", "full_attention"] * 2),
    jamba=dict(attn_layer_period=2, attn_layer_offset=1), falcon_h1=dict(mamba_n_heads=4),
    cohere_compass_text=dict(rope_parameters=dict(full_attention=_ROPE, sliding_attention=_ROPE)),
    deepseek_v2=dict(num_experts_per_tok=2), emu3=dict(vocabulary_map={"<image>": 3}, vq_config=_PICTURES),
    longcat_flash=dict(num_layers=2, zero_expert_num=2),
    dots1=dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1),
    dots3_note=dict(text_config=_DOTS), dots3_note_text=_DOTS,
    gemma3n_text=dict(num_kv_shared_layers=0, vocab_size_per_layer_input=1024, intermediate_size=[96] * 4,
                      activation_sparsity_pattern=[.0] * 4),
    gemma4=dict(text_config=dict(vocab_size_per_layer_input=1024)),
    gemma4_text=dict(vocab_size_per_layer_input=1024),
    gpt_neo=dict(attention_types=[[["global", "local"], 2]], attention_layers=["global", "local"] * 2),
    hunyuan_v1_dense=dict(head_dim=16), hunyuan_v1_moe=dict(head_dim=16, moe_topk=2, num_experts=4),
    lfm2=dict(layer_types=["conv", "full_attention"] * 2),
    lfm2_moe=dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    mamba2=dict(num_heads=8),
    minicpm3=dict(dim_model_base=64, scale_emb=1),   # else its logits are scaled for a model 64 times as wide
    ministral=dict(head_dim=16),
    nemotron=dict(num_key_value_heads=2),
    qwen4_exp=dict(text_config=_QWEN4), qwen4_exp_text=_QWEN4,
    reformer=dict(is_decoder=True, axial_pos_embds=False),
    roc_bert=dict(pronunciation_embed_dim=16, shape_embed_dim=16, pronunciation_vocab_size=64, shape_vocab_size=64),
    xlstm=dict(chunk_size=16, qk_dim_factor=1.), xmod=dict(languages=["en_XX"], default_language="en_XX"),
    zamba=dict(layers_block_type=["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
               num_hidden_layers=5, attention_hidden_size=128, attention_head_dim=32, num_key_value_heads=4),
    zamba2=dict(layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"], n_mamba_heads=8,
                attention_hidden_size=128, attention_head_dim=32, num_key_value_heads=4, hybrid_layer_ids=[1, 3],
                adapter_rank=8),
    zaya=dict(num_experts_per_tok=1),
)
NO_CONFIG = dict(   # types without a tiny model, with the reason
    blt="reads bytes in patches, with a vocabulary of its own",
    dbrx="transformers 5.23 cannot run it (its attention asks for rope_theta, which its config no longer has)",
    gemma3n="its vision tower needs the package timm",
    gemma4_assistant="drafts tokens for another model, whose hidden states it reads",
    gemma4_unified_assistant="drafts tokens for another model, whose hidden states it reads",
    git="captions images: it has no loss without one",
    musicgen="writes audio codes, not text",
    musicgen_melody="writes audio codes, not text",
)


def _representatives(kinds:list, n:int)->list:
    "`n` layers of the kinds in a list, each kind once before any is repeated"
    each = list(dict.fromkeys(kinds))
    return (each + [k for k in kinds if k in each] * n)[:max(n, len(each))]


def _small_values(kind:str, own:dict)->dict:
    "Values to change in a default config of this type"
    default = CONFIG_MAPPING[kind]().to_dict()
    values = {name: size for name, size in SMALL.items() if isinstance(default.get(name), int)}
    if "kv_lora_rank" in default: values |= dict(num_key_value_heads=4, head_dim=8)   # MLA: as many as query heads
    values |= {name: True for name in ("is_decoder",) if default.get(name) is False}   # encoders attend to all tokens
    values |= {name: id for name, id in VOCABULARY.items() if name in default}
    layers = own.get("num_hidden_layers", 4)
    counts = [default[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in default]
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if name not in own and isinstance(default.get(name), list) and len(default[name]) in counts:
            values[name] = _representatives(default[name], layers)
            layers = max(layers, len(values[name]))
    return values


def tiny_config(kind:str, vocabulary:int=512):
    "A small config of a type; raises the errors of its class"
    own = dict(OWN.get(kind, {}))
    text = own.pop("text_config", None)
    values = _small_values(kind, own) | {name: v for name, v in own.items() if name != "vocab_size"}
    default = CONFIG_MAPPING[kind]()
    inner = default.get_text_config()
    parts = {}
    if inner is not default:
        parts["text_config"] = dict(model_type=inner.model_type) | _small_values(inner.model_type, text or {})
        parts["text_config"] |= dict(vocab_size=vocabulary) | (text or {})
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is None or part is inner or name in own: continue
        has = part.to_dict()
        parts[name] = dict(model_type=part.model_type) | {n: v for n, v in SIDES.items() if n in has}
    if "vocab_size" in default.to_dict(): values["vocab_size"] = vocabulary
    shape = AutoConfig.for_model(kind, **values | parts)
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if parts and with_images: shape.architectures = [with_images]   # as published
    return shape
