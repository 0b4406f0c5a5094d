"""The model, the packed batches and the settings that all tests of engines share."""

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
    """The same random weights every time, in training mode."""
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


def natively_sharded(sizes: dict[str, int], implementation: str, folder: Path) -> PreTrainedModel:
    """The tiny model, laid out on its ranks by transformers."""
    from transformers.distributed import DistributedConfig

    return loaded(implementation, folder, distributed_config=DistributedConfig(**sizes))


def loaded(implementation: str, folder: Path, **options: Any) -> PreTrainedModel:
    """The tiny model, written and loaded with `from_pretrained`."""
    folders = [folder]  # in a distributed world only rank 0 writes: all read what it wrote
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        tiny_llama(implementation).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folders[0], attn_implementation=implementation, **options
    )
    dist.barrier()  # the folder may be removed now
    return model


def row(number: int) -> dict[str, list[list[int]]]:
    """A packed row of 96 tokens: one long document if `number` is even, else many short ones."""
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
