"""Small Llama models for scripts."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama_config(
    sizes: tuple[int, int, int], heads: tuple[int, int], words: int, **more: Any
) -> LlamaConfig:
    """Make the config of a Llama. `sizes` are width, feed-forward width and layers; `heads` are
    query and key/value heads; `words` is the size of the vocabulary.
    """
    hidden, wide, layers = sizes
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        vocab_size=words,
        max_position_embeddings=2**17,
        **more,
    )


def make_plain_model(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> LlamaForCausalLM:
    """Make a Llama with heads of 64, as wide as all heads together or `hidden`."""
    torch.manual_seed(0)
    hidden, heads = hidden or arguments.heads * 64, arguments.heads
    config = make_llama_config(
        (hidden, hidden * 172 // 64, arguments.layers),
        (heads, max(heads // 2, 1)),
        512,
        head_dim=64,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).train()


def make_model(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> DistributedDataParallel:
    """Make the same model under DDP."""
    return DistributedDataParallel(make_plain_model(arguments, implementation, hidden))
