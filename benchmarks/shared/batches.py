"""Batches of random documents that scripts train on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import hf_distca
from hf_distca.agreement.documents import PackedDocuments


def choose_lengths(tokens: int, number: int) -> list[int]:
    """Return the length of one long document, or of eight short ones with as many tokens."""
    return [[tokens], [tokens // 8] * 8][number]


def make_batch(lengths: list[int], seed: int) -> dict[str, Any]:
    """Make one row of documents with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, 512, (n,), generator=generator).tolist() for n in lengths]
    return hf_distca.PackingCollator()([{"documents": documents}])


def draw_lengths(tokens: int, ranks: int) -> list[int]:
    """Draw the document lengths of a global batch, in a loader's order: one of half a rank, one of
    a rank and a quarter, and shorter ones.
    """
    total, lengths = tokens * ranks, [tokens // 2, tokens * 5 // 4]
    choose = np.random.default_rng(0)
    while sum(lengths) < total:
        length = int(choose.lognormal(np.log(tokens / 16), 0.8)) + 1
        lengths.append(min(length, total - sum(lengths)))
    return lengths


def make_share(documents: list[torch.Tensor], packed: PackedDocuments) -> dict[str, Any]:
    """Make a rank's batch from its shares of documents; labels are each document's next tokens."""
    targets = [torch.cat([document[1:], torch.tensor([-100])]) for document in documents]
    starts = packed.starts or (0,) * len(packed.lengths)
    numbers = packed.documents or tuple(range(len(packed.lengths)))
    runs = list(zip(numbers, starts, packed.lengths, strict=True))
    ids, labels = (
        torch.cat([rows[d][s : s + n] for d, s, n in runs])[None] for rows in (documents, targets)
    )
    positions = torch.from_numpy(packed.positions)[None]
    return {
        "input_ids": ids,
        "labels": labels,
        "shift_labels": labels,
        "position_ids": positions,
        "distca_documents": packed,
    }
