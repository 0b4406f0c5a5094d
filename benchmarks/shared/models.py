"""Small Llamas that scripts train."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def llama_config(
    sizes: tuple[int, int, int], heads: tuple[int, int], words: int, **more: Any
) -> LlamaConfig:
    """A Llama by width, width of its feed-forward layers and number of layers; query and key/value
    heads; and vocabulary.
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


def plain_model_of(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> LlamaForCausalLM:
    """A Llama of these layers and heads of 64, and as wide as they are together, or `hidden`."""
    torch.manual_seed(0)
    hidden, heads = hidden or arguments.heads * 64, arguments.heads
    config = llama_config(
        (hidden, hidden * 172 // 64, arguments.layers),
        (heads, max(heads // 2, 1)),
        512,
        head_dim=64,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).train()


def model_of(
    arguments: argparse.Namespace, implementation: str, hidden: int | None = None
) -> DistributedDataParallel:
    """The same under DDP."""
    return DistributedDataParallel(plain_model_of(arguments, implementation, hidden))
