"""What `tiny` gives config fields: by field name, and for the types that need more than that."""

from __future__ import annotations

from typing import Any

ALWAYS = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Widths are multiples of 16: grouped matrix products on a CPU ask for rows of a multiple of 16
# bytes.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "ffn_hidden_size": 96,
    "dim_ff": 96,
    "dff": 96,
    "d_inner": 96,
    "mlp_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "attention_chunk_size": 8,
    "is_decoder": True,
    "add_cross_attention": False,
    "depth": 1,
    "rotary_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "hc_lowrank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "image_size": 32,
    "mm_embed_dim": 64,
    "mm_posemb_size": 64,
    "output_proj_dims": 64,
    "position_embedding_size": 64,
    "shape_vocab_size": 96,
    "shape_embed_dim": 64,
    "pronunciation_vocab_size": 96,
    "pronunciation_embed_dim": 64,
    "nemo_conv_channels": 64,
    "ext_pw_out_channel": 64,
    "depthwise_separable_out_channel": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

# Types whose causal LM is built from a part of the type's own config.
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
# By default only every fourth layer has no rotation.
OVERRIDES["smollm3"]["no_rope_layers"] = [1, 0]
