"""The model, the packed batches and the settings that all tests of engines share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_distca
from hf_distca.schedule.cost import AttentionShape, CostModel

LAYERS = 4
VOCABULARY = 61

# With real costs nothing this small is worth moving: here only causal pairs count, and moving is
# free.
PAIRS = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))

# Rank 0 holds long documents, the others equally many tokens in short ones.
LONG, SHORT = (96,), (24, 1, 23, 24, 24)


def settings(**changes: Any) -> hf_distca.DistCAConfig:
    """Settings under which work moves between the ranks of these tests."""
    return hf_distca.DistCAConfig(**{"tile": 8, "min_gain": 0.0, "cost_model": PAIRS, **changes})


def model_config(implementation: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        attn_implementation=implementation,
    )


def tiny_llama(
    implementation: str = "distca", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """The same random weights every time, in training mode."""
    torch.manual_seed(0)
    return LlamaForCausalLM(model_config(implementation)).to(dtype).train()


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
            torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths
        ]
    }


def micro_batch(number: int) -> dict[str, Any]:
    return hf_distca.PackingCollator()([row(number)])
