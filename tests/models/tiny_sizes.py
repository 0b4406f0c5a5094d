"""The values of config fields in `tiny`: by field name, and further values by type."""

from __future__ import annotations

from typing import Any

ALWAYS = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Grouped matrix products on a CPU need rows of a multiple of 16 bytes, so widths are multiples of
# 16.
_NAMES = {
    96: (
        "vocab_size intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
        "dim_ff dff d_inner mlp_dim vocab_size_per_layer_input shape_vocab_size "
        "pronunciation_vocab_size"
    ),
    64: (
        "hidden_size d_model n_embd emb_dim embedding_size mm_embed_dim mm_posemb_size "
        "output_proj_dims position_embedding_size shape_embed_dim pronunciation_embed_dim "
        "nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel"
    ),
    32: (
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size q_lora_rank "
        "kv_lora_rank o_lora_rank image_size mamba_head_dim"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads "
        "num_experts_per_tok n_group index_n_heads linear_num_key_heads"
    ),
    1: "encoder_layers topk_group first_k_dense_replace max_window_layers depth",
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
        "encoder_attention_heads linear_num_heads mamba_n_heads mamba_num_heads "
        "linear_num_value_heads"
    ),
    16: (
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_head_dim hc_lowrank "
        "index_head_dim hidden_size_per_layer_input mamba_d_state linear_key_head_dim "
        "linear_value_head_dim"
    ),
    128: "max_position_embeddings n_positions n_ctx",
    8: (
        "num_experts num_local_experts n_routed_experts sliding_window attention_chunk_size "
        "rotary_dim index_topk"
    ),
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES |= {"initializer_range": 0.15, "init_std": 0.15}
SIZES |= {"use_sliding_window": True, "is_decoder": True, "add_cross_attention": False}

# Types whose causal LM uses a part of the config of the type.
CONFIG_TYPES = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ROPES = dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)

OVERRIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _ROPES,
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4": {"text_config": {"global_head_dim": 32}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma4_unified": {"text_config": {"global_head_dim": 32}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
    "dots1": {"n_shared_experts": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 8},
    "mimo_v2_flash": {"v_head_dim": 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
        "max_seq_len": 128,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "reformer": {"axial_pos_embds": False, "num_buckets": 4},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        }
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma3n": {"text_config": {"num_kv_shared_layers": 2}},
    "xmod": {"default_language": "en_XX"},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 4,
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "local_attention_window_len": 8,
        "global_config": {"hidden_size": 128},
        "encoder_config": {"hidden_size_global": 128},
        "decoder_config": {"hidden_size_global": 128},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}
for _name in ("laguna", "mellum", "ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3"):
    OVERRIDES[_name] = {"layer_types": ["sliding_attention", "full_attention"]}
OVERRIDES["dots3_note"] |= OVERRIDES["dots3_note_text"]
OVERRIDES["qwen4_exp"] = OVERRIDES["qwen4_exp_text"]
# By default, only every fourth layer has no rotation.
OVERRIDES["smollm3"]["no_rope_layers"] = [1, 0]
