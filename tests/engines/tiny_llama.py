"""The model, the packed batches and the settings of all engine tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_distca
import tiny_runs

LAYERS = 4

# Rank 0 holds long documents, the others equally many tokens in short ones.
LONG, SHORT = (96,), (24, 1, 23, 24, 24)


# Engines that compile may wait for each other for minutes.
settings = partial(tiny_runs.settings, timeout_seconds=None)


def tiny_llama(implementation: str = "distca") -> LlamaForCausalLM:
    """Create the model with the same random weights every time, in training mode."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=tiny_runs.VOCABULARY,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


def load_sharded(sizes: dict[str, int], implementation: str, folder: Path) -> PreTrainedModel:
    """Load the tiny model, sharded over its ranks by transformers."""
    from transformers.distributed import DistributedConfig

    return load_model(implementation, folder, distributed_config=DistributedConfig(**sizes))


def load_model(implementation: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Save the tiny model and load it with `from_pretrained`."""
    folders = [folder]  # only rank 0 saves, and all ranks load from its folder
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        tiny_llama(implementation).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folders[0], attn_implementation=implementation, **options
    )
    dist.barrier()  # after this, the folder may be removed
    return model


def row(number: int) -> dict[str, list[list[int]]]:
    """Make a packed row of 96 tokens: one long document if `number` is even, else short ones."""
    generator = torch.Generator().manual_seed(number)
    lengths = LONG if number % 2 == 0 else SHORT
    return {
        "documents": [
            torch.randint(0, tiny_runs.VOCABULARY, (n,), generator=generator).tolist()
            for n in lengths
        ]
    }


def micro_batch(number: int) -> dict[str, Any]:
    return hf_distca.PackingCollator()([row(number)])
