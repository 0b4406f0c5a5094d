"""Redistribution of batches that ranks drew from loaders that cannot be replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey, check_equal
from hf_distca.agreement.dealt_share import DealSettings, DealtShare
from hf_distca.agreement.documents import (
    DOCUMENT_KEYS,
    PACKING_KEYS,
    PackedDocuments,
    TokenBatch,
)
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.hooks.dealt_trainers import wrap_trainers
from hf_distca.integration.session import Session
from hf_distca.integration.training.callback import find_session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray

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
        LayoutError: if a batch does not hold the documents that it declares, or ranks have fewer
            tokens together than there are ranks.
        DistCADesyncError: if not all ranks call it, with as many batches.
    """
    return deal_drawn_batches(find_session(), batches)


def deal_drawn_batches(session: Session, batches: Sequence[Any]) -> list[Any]:
    """Deal the tokens of micro-batches as `share_tokens` does, for a session."""
    wrap_trainers()
    group = session.join_trainers()
    progress = session.planner.resume_progress()
    if group.size == 1 or not batches:
        return list(batches)
    place = f"sharing tokens from micro-batch {progress.next_number} on"
    with group.report_errors(place):
        drawn = [_read_batch(batch) for batch in batches]
        lengths = [batch_lengths for batch_lengths, _ in drawn]
        rows = group.gather(
            np.concatenate([[len(drawn), *map(len, lengths)], *lengths]),
            doing=place,
        )
        check_equal(
            group,
            np.array([row[0] for row in rows]),
            "numbers of micro-batches",
            place,
            "draw as many on every rank",
        )
        documents = np.concatenate(
            [_list_documents(rank, row, len(drawn)) for rank, row in enumerate(rows)]
        )
        costs = {
            key._replace(nano=0): progress.costs.get_cost(key) for key in progress.pop_recent_keys()
        }
        shares, runs = zip(
            *(
                _deal_batch(session, costs, number, documents[documents[:, 0] == number])
                for number in range(len(drawn))
            ),
            strict=True,
        )
        columns_T2 = _exchange_tokens(
            group,
            torch.cat([columns for _, columns in drawn]),
            [np.concatenate(rank_runs) for rank_runs in zip(*runs, strict=True)],
            place,
        )
    parts = torch.split(columns_T2, [sum(share.lengths) for share in shares])
    return [
        _make_batch(share, part, batch["input_ids"].device)
        for share, part, batch in zip(shares, parts, batches, strict=True)
    ]


def _read_batch(batch: Mapping[str, Any]) -> tuple[IntArray, torch.Tensor]:
    """Read the documents of a batch, without padding.

    Returns:
        (documents,) number of tokens of each, and (tokens, 2) int64 ids with the label that follows
        each.
    """
    if unknown := sorted(batch.keys() - _KNOWN_COLUMNS - {*PACKING_KEYS}):
        raise UnsupportedError(
            f"a batch holds {', '.join(unknown)}, and share_tokens deals"
            f" {', '.join(sorted(_KNOWN_COLUMNS))} only: tokens go to other ranks, so leave the"
            " rest out."
        )
    documents = TokenBatch.from_batch(batch).read_documents(training=True)
    if documents.span_ranks:
        raise UnsupportedError(
            "a batch is a share of dealt documents already: share_tokens is for batches that"
            " are not."
        )
    lengths = documents.runs[:, 2]
    columns = {  # a row of positions may hold for several rows
        name: batch[name].expand(batch["input_ids"].shape).reshape(-1).cpu()
        for name in ("input_ids", "labels", "shift_labels", "position_ids")
        if batch.get(name) is not None
    }
    if documents.token_indices is not None:
        columns = {name: column[documents.token_indices] for name, column in columns.items()}
    ends = np.cumsum(lengths) - 1
    if "position_ids" in columns:
        _check_positions(columns["position_ids"].numpy(), ends)
    if "shift_labels" not in columns:
        columns["shift_labels"] = columns.get("labels", columns["input_ids"]).roll(-1)
        columns["shift_labels"][ends] = IGNORED_LABEL
    return lengths, torch.stack([columns["input_ids"], columns["shift_labels"]], dim=1).long()


def _check_positions(positions: IntArray, ends: IntArray) -> None:
    """Raise if positions skip some inside a document: they are recomputed from its length."""
    step = np.diff(positions)
    step[ends[:-1]] = 1  # from one document to the next
    if (jumps := np.flatnonzero(step != 1)).size:
        raise UnsupportedError(
            f"position_ids of a batch change by {step[jumps[0]]} after token {jumps[0]}, inside a"
            " document: share_tokens counts positions of what it deals anew, and these would be"
            " lost. Leave such batches as they are."
        )


def _list_documents(rank: int, row: IntArray, batches: int) -> IntArray:
    """List the documents that a rank announced: (documents, 4) int64 with columns micro-batch,
    rank, index of its first token among all that the rank drew, and number of tokens.
    """
    lengths = row[1 + batches :]
    return np.stack(
        [
            np.repeat(np.arange(batches), row[1 : 1 + batches]),
            np.full_like(lengths, rank),
            np.cumsum(lengths) - lengths,
            lengths,
        ],
        axis=1,
    )


def _deal_batch(
    session: Session, costs: dict[PlanKey, CostModel], number: int, documents: IntArray
) -> tuple[PackedDocuments, list[IntArray]]:
    """Deal the documents of a micro-batch.

    Returns:
        The share of this rank; and the runs of each rank, (runs, 3) int64 with columns rank that
        drew it, index among what that drew, and number of tokens.
    """
    group = session.join_trainers()
    planner = session.planner
    tokens, remainder = divmod(total := int(documents[:, 3].sum()), group.size)
    if not tokens:
        place = f"micro-batch {planner.resume_progress().number + number + 1}"
        raise LayoutError(
            f"{place} has {total} tokens on {group.size} ranks: share_tokens deals at least one to"
            " each."
        )
    dealing = DealSettings(
        group.size,
        [tokens + (rank < remainder) for rank in range(group.size)],
        costs or {PlanKey(_PLACEHOLDER_SHAPE, "cpu"): CostModel.make_of_pairs(_PLACEHOLDER_SHAPE)},
        session.config,
        group.per_node,
    )
    packed = dealing.make_share(
        documents[:, 3], (0, planner.resume_progress().number + number + 1), group.rank
    )
    layout = cast("DealtShare", packed.dealt_share).whole_layout
    _, homes, first_tokens, _ = documents[layout.document].T
    runs = np.stack([homes, first_tokens + layout.start, layout.length], axis=1)
    return packed, [runs[layout.rank == rank] for rank in range(group.size)]


def _exchange_tokens(
    group: AttentionGroup, columns_T2: torch.Tensor, runs: Sequence[IntArray], place: str
) -> torch.Tensor:
    """Exchange tokens, by the runs of each rank, and return the (tokens, 2) columns of this rank's
    runs.
    """
    sent = [part[part[:, 0] == group.rank] for part in runs]
    wanted = runs[group.rank]
    arrived = group.all_to_all(
        torch.cat(
            [
                columns_T2[:0],
                *(columns_T2[begin : begin + n] for _, begin, n in np.concatenate(sent).tolist()),
            ]
        ),
        [int(part[:, 2].sum()) for part in sent],
        [int(wanted[wanted[:, 0] == home, 2].sum()) for home in range(group.size)],
        doing=place,
    )
    order = np.argsort(wanted[:, 0], kind="stable")  # of arrival
    pieces = torch.split(arrived, wanted[order, 2].tolist())
    return torch.cat([arrived[:0], *(pieces[index] for index in np.argsort(order))])


def _make_batch(
    packed: PackedDocuments, columns_T2: torch.Tensor, device: torch.device
) -> dict[str, Any]:
    """Make the batch of a share for the model."""
    ids, targets = columns_T2.unbind(1)
    rows = {
        "input_ids": ids,
        "labels": torch.full_like(targets, IGNORED_LABEL),  # shifted, they would lack those at cuts
        "shift_labels": targets,
        "position_ids": torch.from_numpy(packed.positions),
    }
    return {
        **{name: row[None].to(device) for name, row in rows.items()},
        "distca_documents": packed,
    }
