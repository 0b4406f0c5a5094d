"""Layers that run as two halves give the numbers of whole layers, and of each document alone under sdpa in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import LENGTHS, PAIRS, model_for, oracle, relative, summed_loss, tokens_of

import hf_distca
from hf_distca.integration import layers
from hf_distca.integration.session import current_session
from ranks import RankPool

Rows = list[list[int]]  # the documents of each row of a batch

# What lies on each of three ranks: rows of document numbers.
PLACEMENTS: dict[str, list[Rows]] = {
    "skewed": [[[0, 3]], [[1, 2, 4]], [[5, 6]]],
    "one document each": [[[0]], [[4]], [[3]]],
    "a rank with one token": [[[0, 6]], [[1]], [[2, 4]]],
    "several rows, padded": [[[0], [4], [3]], [[2], [6]], [[5], [1]]],
    "all on one rank": [[[0, 1, 2, 3, 4, 5, 6]], [[]], [[]]],
}


def batch_of(rows: Rows) -> dict[str, torch.Tensor]:
    length = max([sum(LENGTHS[d] for d in row) for row in rows] + [3 if not any(rows) else 1])
    ids, positions = torch.zeros(2, len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for place, row in enumerate(rows):
        at = 0
        for d in row:
            end = at + LENGTHS[d]
            ids[place, at:end], positions[place, at:end] = tokens_of(d, LENGTHS[d]), torch.arange(LENGTHS[d])
            mask[place, at:end] = 1
            at = end
    batch = {"input_ids": ids, "position_ids": positions}
    return batch if mask.all() else {**batch, "attention_mask": mask}


def configure(**settings: Any) -> None:
    config = hf_distca.DistCAConfig(**{"tile": 8, "min_gain": 0.0, "cost_model": PAIRS, "ping_pong": True, **settings})
    hf_distca.configure(config)


def step(rank: int, placement: str, reentrant: bool | None, use_cache: bool) -> tuple[Any, ...]:
    """Loss and gradients summed over ranks, logits of this rank's documents, and counts."""
    configure(kernel="reference")
    rows = PLACEMENTS[placement][rank]
    model = model_for(2, "distca", torch.float64)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    logits = model(**batch_of(rows), use_cache=use_cache).logits
    pieces, losses = {}, [logits.sum() * 0]
    for place, row in enumerate(rows):
        at = 0
        for d in row:
            pieces[d] = logits[place, at : at + LENGTHS[d]]
            losses.append(summed_loss(pieces[d], tokens_of(d, LENGTHS[d]), 0, LENGTHS[d]))
            at += LENGTHS[d]
    loss = torch.stack(losses).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    total = loss.detach()
    for tensor in (total, *grads.values()):
        dist.all_reduce(tensor)
    meter = current_session().meter
    counts = [meter.calls, meter.dispatches, meter.returns, meter.kernel_calls]
    return float(total), {d: piece.detach() for d, piece in pieces.items()}, grads, counts, meter.sent_bytes


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("reentrant", "use_cache"), [(None, False), (None, True), (True, False), (False, False)])
def test_halves_are_exact(
    rank_pool: Callable[[int], RankPool], placement: str, reentrant: bool | None, use_cache: bool
) -> None:
    documents = sorted(d for rows in PLACEMENTS[placement] for row in rows for d in row)
    loss, logits, grads = oracle(documents, 2, torch.float64)
    results = rank_pool(3)(step, placement, reentrant, use_cache)
    for total, pieces, rank_grads, _, _ in results:
        assert total == pytest.approx(loss, rel=1e-9)
        for d, piece in pieces.items():
            assert relative(piece, logits[d]) <= 1e-9
        for name, grad in rank_grads.items():
            assert relative(grad, grads[name]) <= 1e-9, name
    assert sum(sent for *_, sent in results) > 0, "nothing was exchanged, so nothing was tested"
    counts = [counts for *_, counts, _ in results]
    assert counts[0][1:] == counts[1][1:] == counts[2][1:]
    # Per layer, two halves; each with a dispatch and a return forward and backward, recomputed or not.
    assert counts[0][1:3] == [2 * 2 * 2, 2 * 2 * 2]
