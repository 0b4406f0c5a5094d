"""Redistribution of batches that ranks drew from loaders that cannot be replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey, check_equal
from hf_distca.agreement.dealt_share import DealSettings
from hf_distca.agreement.documents import (
    DOCUMENT_KEYS,
    PACKING_KEYS,
    PackedDocuments,
    TokenBatch,
)
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.errors import UnsupportedError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks.dealt_trainers import wrap_trainers
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray

__all__ = ["share_tokens"]

_KNOWN_COLUMNS = {"input_ids", "labels", "shift_labels", "attention_mask", *DOCUMENT_KEYS}
# What is dealt by until a layer has run: causal pairs, whatever the layer is.
_PLACEHOLDER_SHAPE = AttentionShape(1, 1, 1, 1, 1)


def share_tokens(batches: Sequence[Any]) -> list[Any]:
    """Deal tokens that ranks drew from their loaders among them: equal tokens, and about equal
    attention.

    Every micro-batch is dealt by itself, over the attention group: documents stay whole where they
    fit and are cut where one outweighs a rank, as by `document_shares` in the loader. Token ids and
    labels travel once, on the control group: per call two small collectives and one exchange of as
    many tokens as move. No further planning is needed then.

    The loss must be a sum over all ranks' targets divided by their number, as the Trainer computes
    it.

    Args:
        batches: micro-batches, as many on every rank, each with ``input_ids`` of shape (rows,
            tokens) and the other columns of `PackingCollator` or a padding collator: ``labels``,
            ``position_ids``, ``attention_mask``, ``distca_documents``. Of the arguments that TRL's
            packing and `DataCollatorWithFlattening` add for flash attention, ``cu_seq_lens_q`` is
            read; all are dropped and recomputed.

    Returns:
        As many batches of shape (1, tokens), with ``shift_labels``; unchanged in a group of one.

    Raises:
        UnsupportedError: if a batch holds other columns, which would not travel, or positions that
            skip some in a document.
        LayoutError: if a batch does not hold the documents that it declares.
        DistCADesyncError: if not all ranks call it, with as many batches.
    """
    wrap_trainers()
    session = current_session()
    group, progress = session.join_trainers(), session.planner.resume_progress()
    if group.size == 1 or not batches:
        return list(batches)
    place = f"sharing tokens from micro-batch {progress.next_number} on"
    with group.reporting(place):
        drawn = [_DrawnBatch.read_batch(batch) for batch in batches]
        rows = group.gather(
            np.concatenate(
                [
                    [len(drawn), *(len(batch.lengths) for batch in drawn)],
                    *(batch.lengths for batch in drawn),
                ]
            ),
            doing=place,
        )
        check_equal(
            group,
            np.array([row[0] for row in rows]),
            "numbers of micro-batches",
            place,
            "draw as many on every rank",
        )
        # The lengths in each micro-batch of each rank.
        lengths = [np.split(row[1 + len(drawn) :], np.cumsum(row[1 : len(drawn)])) for row in rows]
        costs = {
            key._replace(nano=0): progress.costs.get_cost(key) for key in progress.pop_recent_keys()
        }
        shared = [
            _deal_batch(session, costs, number, [rank_lengths[number] for rank_lengths in lengths])
            for number in range(len(drawn))
        ]
        tokens = _exchange_tokens(group, drawn, shared, place)
    return [
        _make_batch(shared_batch, columns_T2, batch["input_ids"].device)
        for shared_batch, columns_T2, batch in zip(shared, tokens, batches, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _DrawnBatch:
    """Tokens of a batch without padding.

    Attributes:
        lengths: (documents,) number of tokens of each.
        columns_T2: int64 ids, and the label that follows each.
    """

    lengths: IntArray
    columns_T2: torch.Tensor

    @classmethod
    def read_batch(cls, batch: Mapping[str, Any]) -> _DrawnBatch:
        if unknown := sorted(batch.keys() - _KNOWN_COLUMNS - {*PACKING_KEYS}):
            raise UnsupportedError(
                f"a batch holds {', '.join(unknown)}, and share_tokens deals"
                f" {', '.join(sorted(_KNOWN_COLUMNS))} only: tokens go to other ranks, so leave the"
                " rest out."
            )
        documents = TokenBatch.of(batch).read_documents(training=True)
        if documents.span_ranks:
            raise UnsupportedError(
                "a batch is a share of dealt documents already: share_tokens is for batches that"
                " are not."
            )
        indices: slice | torch.Tensor = slice(None)
        if documents.token_indices is not None:
            indices = torch.from_numpy(documents.token_indices)
        lengths = documents.runs[:, 2]
        _check_positions(batch.get("position_ids"), indices, lengths)
        columns = [
            batch[name].reshape(-1).cpu()[indices]
            for name in ("input_ids", "labels", "shift_labels")
            if name in batch
        ]
        if "shift_labels" not in batch:
            labels = columns[-1]
            columns.append(torch.cat([labels[1:], labels.new_full((1,), IGNORED_LABEL)]))
            columns[-1][np.cumsum(lengths) - 1] = IGNORED_LABEL
        return cls(lengths, torch.stack([columns[0], columns[-1]], dim=1).long())


def _check_positions(
    positions: torch.Tensor | None, indices: slice | torch.Tensor, lengths: IntArray
) -> None:
    """Raise if positions skip some inside a document: they are recomputed from its length."""
    if positions is None:
        return
    step = np.diff(positions.reshape(-1).cpu()[indices].numpy())
    inside = np.ones(len(step) + 1, dtype=np.bool_)
    inside[np.cumsum(lengths) - 1] = False  # from one document to the next
    if (jumps := np.flatnonzero((step != 1) & inside[:-1])).size:
        raise UnsupportedError(
            f"position_ids of a batch change by {step[jumps[0]]} after token {jumps[0]}, inside a"
            " document: share_tokens counts positions of what it deals anew, and these would be"
            " lost. Leave such batches as they are."
        )


@dataclass(frozen=True, eq=False)
class _SharedBatch:
    """A dealt micro-batch.

    Attributes:
        packed: this rank's share.
        home_ranks: (documents,) rank that drew each.
        first_tokens: (documents,) index of its first token among those of its home.
    """

    packed: PackedDocuments
    home_ranks: IntArray
    first_tokens: IntArray

    def list_runs(self, rank: int) -> list[tuple[int, int, int]]:
        """List the runs of a rank: (rank that drew it, index of its first token there, number of
        tokens).
        """
        segments = (
            []
            if self.packed.dealt_share is None
            else self.packed.dealt_share.whole_layout.list_segments(rank)
        )
        return [
            (
                int(self.home_ranks[s.document]),
                int(self.first_tokens[s.document]) + s.start,
                s.length,
            )
            for s in segments
        ]


def _deal_batch(
    session: Session, costs: dict[PlanKey, CostModel], number: int, lengths: Sequence[IntArray]
) -> _SharedBatch:
    group, planner = session.join_trainers(), session.planner
    all_lengths = np.concatenate(lengths)
    home_ranks = np.repeat(np.arange(group.size), [len(rank_lengths) for rank_lengths in lengths])
    first_tokens = np.concatenate(
        [np.cumsum(rank_lengths) - rank_lengths for rank_lengths in lengths]
    )
    tokens, remainder = divmod(int(all_lengths.sum()), group.size)
    dealing = DealSettings(
        group.size,
        [tokens + (rank < remainder) for rank in range(group.size)],
        costs or {PlanKey(_PLACEHOLDER_SHAPE, "cpu"): CostModel.of_pairs(_PLACEHOLDER_SHAPE)},
        session.config,
        group.per_node,
    )
    return _SharedBatch(
        dealing.make_share(
            all_lengths, (0, planner.resume_progress().number + number + 1), group.rank
        ),
        home_ranks,
        first_tokens,
    )


def _exchange_tokens(
    group: AttentionGroup, drawn: Sequence[_DrawnBatch], shared: Sequence[_SharedBatch], place: str
) -> list[torch.Tensor]:
    """Exchange tokens, and return the (tokens, 2) columns of this rank's share of every
    micro-batch.
    """
    pieces = [
        [
            batch.columns_T2[start : start + tokens]
            for batch, shared_batch in zip(drawn, shared, strict=True)
            for home, start, tokens in shared_batch.list_runs(rank)
            if home == group.rank
        ]
        for rank in range(group.size)
    ]
    runs = [batch.list_runs(group.rank) for batch in shared]
    receive = np.zeros(group.size, dtype=np.int64)
    for home, _, tokens in chain.from_iterable(runs):
        receive[home] += tokens
    arrived = group.all_to_all(
        torch.cat([drawn[0].columns_T2[:0], *chain.from_iterable(pieces)]),
        [sum(map(len, rank_pieces)) for rank_pieces in pieces],
        receive.tolist(),
        doing=place,
    )
    begin = np.cumsum(receive) - receive
    columns = []
    for batch_runs in runs:
        parts = [arrived[:0]]
        for home, _, tokens in batch_runs:
            parts.append(arrived[begin[home] : begin[home] + tokens])
            begin[home] += tokens
        columns.append(torch.cat(parts))
    return columns


def _make_batch(
    shared: _SharedBatch, columns_T2: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    """Make the batch of a share for the model."""
    ids, targets = columns_T2.unbind(1)
    labels = torch.full_like(targets, IGNORED_LABEL)  # shifted, they would lack the targets at cuts
    positions = torch.from_numpy(shared.packed.positions)
    rows = {"input_ids": ids, "labels": labels, "shift_labels": targets, "position_ids": positions}
    return {
        **{name: row[None].to(device) for name, row in rows.items()},
        "distca_documents": shared.packed,
    }
