"""Documents, the settings of a deal, and checks of shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.config import DistCAConfig
from hf_distca.data.global_batches import BatchPieces
from hf_distca.schedule.cost import AttentionShape, CostModel

SHAPE = AttentionShape(4, 2, 16, 16, 4)
ROWS = ("input_ids", "labels", "shift_labels", "position_ids")


def make_dealing(ranks: int, tokens_per_rank: int, **settings: Any) -> Dealing:
    key = PlanKey(SHAPE, "cpu")
    config = DistCAConfig(tile=8, min_gain=0.0, **settings)
    return Dealing(ranks, tokens_per_rank, {key: CostModel.make_of_pairs(SHAPE)}, config)


def draw_lengths(count: int = 60, longest: int = 700, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(3.5, 1.2, count).astype(int) + 1
    return np.minimum(lengths, longest).tolist()


def make_rows(lengths: list[int], *, labels: bool = False) -> list[dict[str, list[int]]]:
    """Make rows whose tokens encode the document and the position."""
    rows = [
        {"input_ids": [1000 * number + at for at in range(length)]}
        for number, length in enumerate(lengths)
    ]
    if labels:
        for row in rows:
            row["labels"] = [
                -100 if at < 3 else -token for at, token in enumerate(row["input_ids"])
            ]
    return rows


def expect(
    pieces: BatchPieces, rows: list[dict[str, list[int]]], pad: int = 0
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Map (piece, position) of a global batch to (token, its label, label of the next token)."""
    found = {}
    columns = zip(
        pieces.documents.tolist(), pieces.starts.tolist(), pieces.ends.tolist(), strict=True
    )
    for number, (document, start, end) in enumerate(columns):
        count = end - start
        tokens = [pad] * count if document < 0 else rows[document]["input_ids"][start:end]
        labels = (
            [-100] * count
            if document < 0
            else rows[document].get("labels", rows[document]["input_ids"])[start:end]
        )
        shifted = [*labels[1:], -100]
        found.update({(number, at): (tokens[at], labels[at], shifted[at]) for at in range(count)})
    return found


def check_shares(
    shares: list[dict[str, Any]], expected: dict[tuple[int, int], tuple[int, int, int]], tokens: int
) -> None:
    """Check that shares hold each token of a global batch once, with position and labels."""
    found = {}
    for share in shares:
        packed = share["distca_documents"]
        assert packed.dealt_share is not None
        assert all(
            share[name].shape == (tokens,) and share[name].dtype == torch.int64 for name in ROWS
        )
        ids, labels, shifted, positions = (share[name].tolist() for name in ROWS)
        at = 0
        for document, start, length in zip(
            packed.documents, packed.starts, packed.lengths, strict=True
        ):
            assert positions[at : at + length] == list(range(start, start + length))
            for offset in range(length):
                label = expected[document, start + offset][1]
                assert labels[at + offset] == (
                    label if offset and packed.dealt_share.ranks == 1 else -100
                )
                assert (document, start + offset) not in found
                found[document, start + offset] = (ids[at + offset], label, shifted[at + offset])
            at += length
        assert at == tokens
    assert found == expected
