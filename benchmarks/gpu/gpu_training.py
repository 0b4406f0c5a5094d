"""A model of 1.3 billion weights, and rows of packed documents of unequal lengths to train it on.

Qwen2.5-1.5B's layers (28 of 1,536, 12 query and 2 key/value heads of 128) with a vocabulary of
32,768.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaForCausalLM

from gpu_models import Packed, make_documents
from gpu_setting import Setting
from hf_distca.agreement.documents import PackedDocuments
from models import make_llama_config


def build(setting: Setting) -> LlamaForCausalLM:
    hidden, wide, layers, heads = setting.size(
        quick=(64, 128, 2, 4), cpu=(256, 128, 2, 4), gpu=(1536, 8960, 28, 12)
    )
    vocabulary = setting.size(quick=64, cpu=512, gpu=32768)
    torch.manual_seed(0)
    config = make_llama_config((hidden, wide, layers), (heads, 2), vocabulary, use_cache=False)
    with torch.device(setting.device):
        return LlamaForCausalLM(config).train()


def make_batches(
    setting: Setting, model: LlamaForCausalLM, tokens: int, steps: int
) -> list[dict[str, Any]]:
    """Make rows of documents that repeat their own phrases, so that there is something to learn."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for step in range(steps):
        lengths = make_documents(tokens)
        lengths = lengths[step % len(lengths) :] + lengths[: step % len(lengths)]
        phrases = [torch.randint(model.config.vocab_size, (64,), generator=draw) for _ in lengths]
        ids = torch.cat(
            [phrase.repeat(-(-n // 64))[:n] for phrase, n in zip(phrases, lengths, strict=True)]
        )
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()[:-1]])
        labels = ids.clone()
        labels[starts] = -100
        packed = Packed(setting, model.model, lengths, embedded=False)
        rows.append(
            {
                "packed": packed,
                "input_ids": ids[None].to(setting.device),
                "labels": labels[None].to(setting.device),
            }
        )
    return rows


def arguments(row: dict[str, Any], name: str) -> dict[str, Any]:
    packed = row["packed"]
    told = (
        {"distca_documents": PackedDocuments(tuple(packed.lengths))}
        if name == "distca"
        else packed.flash
    )
    return {
        "input_ids": row["input_ids"],
        "labels": row["labels"],
        "position_ids": packed.positions,
        **told,
    }
