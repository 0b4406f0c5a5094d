"""A tiny model whose attention is worth balancing."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_distca.schedule.cost import AttentionShape, CostModel

# Only causal pairs count, and moving is free: with real costs nothing this small is worth moving.
PAIRS = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 4))


def llama(
    *, key_value_heads: int = 2, layers: int = 2, implementation: str = "distca"
) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        vocab_size=61,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()
