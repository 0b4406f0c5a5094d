"""Argument names of the functions that kernels call, and the sources of these names."""

from __future__ import annotations


def names(text: str) -> list[str]:
    return text.split()


# flash_attn_interface.py of FlashAttention 3: Dao-AILab/flash-attention, folder hopper, commit
# 01afd16.
FLASH_ATTN_3 = {
    "_flash_attn_forward": names(
        "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k"
        " max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin"
        " seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left"
        " window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata"
        " num_splits pack_gqa sm_margin"
    ),
    "_flash_attn_backward": names(
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q"
        " max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap"
        " deterministic sm_margin"
    ),
}

# flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
FLASH_ATTN_4 = {
    "_flash_attn_fwd": names(
        "q k v qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k"
        " min_seqlen_k page_table softmax_scale causal softcap window_size_left window_size_right"
        " learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits pack_gqa"
        " _arch score_mod mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars"
        " q_descale k_descale v_descale gather_kv_indices scheduler_metadata seqlen_k_per_split"
        " disable_scheduler_metadata gather_bwd_recompute_p"
    ),
    "_flash_attn_bwd": names(
        "q k v out dout lse softmax_scale causal softcap window_size_left window_size_right"
        " m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB"
        " dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q"
        " cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv"
        " score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors dlse"
        " learnable_sink"
    ),
}
