"""Context parallelism within groups of ranks: zigzag ring, all-gather, Ulysses, and WLB-LLM, which
chooses how it cuts rows.

Gathered keys are kept for backward, as in the baseline of arXiv 2510.18121 (section 3.2, and
PerDocumentCPAttention of hao-ai-lab/DistCA, commit 2afd219), or gathered again if there is no room
for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, count_causal_pairs
from hf_distca.schedule.layout import FloatArray, IntArray
from simulator.memory import compute_kernel_bytes, count_in_flight
from simulator.setting import Setting
from simulator.work import (
    Directions,
    MicroBatchWork,
    combine_layers,
    compute_fixed_seconds,
    divide_into_calls,
    estimate_copy_seconds,
    estimate_gather_rate,
    sum_by_index,
)


class SharedRows(NamedTuple):
    """Documents in rows, each shared by several ranks.

    Attributes:
        length, row: number of tokens and row of each document.
        row_count: number of rows.
    """

    length: IntArray
    row: IntArray
    row_count: int

    def sum_by_row(self, values: npt.NDArray[Any]) -> FloatArray:
        """Sum values of documents by row: (row_count,), or (2, row_count) for both directions."""
        return sum_by_index(values, self.row, self.row_count)

    @property
    def tokens(self) -> FloatArray:
        """Number of tokens of each row."""
        return self.sum_by_row(self.length)


def list_degrees(group: int) -> list[int]:
    """List the powers of two that divide the attention group."""
    return [2**power for power in range(group.bit_length()) if group % 2**power == 0]


def share_documents(cost: CostModel, rows: SharedRows, degree: int, hops: int = 1) -> Directions:
    """Compute the seconds of each rank if each document is cut into 2 * degree chunks, a head and a
    tail for each rank of its row: (2, rows).

    All ranks of a row take about as long. Chunks shorter than a tile still fill a tile. With
    `hops`, that many kernel calls each see a part of the keys, read q again and write o again.
    """
    shape, length = cost.shape, rows.length
    chunks = np.minimum(2 * degree if degree > 1 else 1, length)
    chunk_rows = -(-length // chunks)
    tiled = -(-chunk_rows // cost.tile) * cost.tile
    pairs = (
        count_causal_pairs(length, length, cost.window) * (tiled / chunk_rows)
        + tiled * chunks * (cost.tile - 1) / 2
    )
    read = length * (chunks + 1) / 2
    if cost.window is not None:
        read = np.minimum(read, length + (chunks - 1) * (cost.window - 1.0))
    # As in `CostModel.counts`; each key is in one of the calls.
    tasks = chunks * hops
    moved = length * shape.row_bytes * hops
    flops = shape.pair_flops * pairs
    backward = (
        tasks,
        2 * moved * cost.backward.row_passes + read * shape.backward_key_bytes,
        2.5 * flops,
    )
    forward = tasks, moved * cost.forward.row_passes, flops
    seconds = [
        kernel.coefficients @ np.stack([rows.sum_by_row(part / degree) for part in parts])
        for kernel, parts in ((cost.forward, forward), (cost.backward, backward))
    ]
    # Heads and tails are computed in sequence.
    return divide_into_calls(cost, np.stack(seconds), 2 if hops == 1 and degree > 1 else hops)


def share_rows(cost: CostModel, rows: SharedRows, degree: int) -> Directions:
    """Compute the seconds of the slowest rank of each row that is cut as one sequence, with a head
    chunk and a tail chunk for each rank: (2, rows).
    """
    order = np.argsort(rows.row, kind="stable")
    length, row = rows.length[order], rows.row[order]
    sizes = rows.tokens.astype(np.int64)
    begins = np.cumsum(sizes) - sizes
    starts = np.cumsum(length) - length
    cuts = (begins[:, None] + sizes[:, None] * np.arange(2 * degree + 1) // (2 * degree)).ravel()
    edges = np.unique(np.concatenate([starts, cuts]))
    piece = edges[:-1]
    end = edges[1:]
    document = np.searchsorted(starts, piece, side="right") - 1
    owner = row[document]
    # A cut rounds down, so a piece that begins at the cut may seem to lie in the previous chunk.
    chunk = (piece - begins[owner]) * (2 * degree) // np.maximum(sizes[owner], 1)
    chunk += piece >= begins[owner] + sizes[owner] * np.minimum(chunk + 1, 2 * degree) // (
        2 * degree
    )
    rank = np.minimum(chunk, 2 * degree - 1 - chunk)
    seconds = sum_by_index(
        cost.estimate_directions(end - piece, end - starts[document]),
        owner * degree + rank,
        rows.row_count * degree,
    )
    return divide_into_calls(cost, seconds.reshape(2, rows.row_count, degree).max(axis=2))


def _compute_work(
    setting: Setting,
    rows: SharedRows,
    degree: int,
    of_rows: Callable[[CostModel], tuple[Directions, Directions]],
) -> MicroBatchWork:
    """Compute the work of rows that `degree` ranks share, from the seconds of attention and of
    waiting for each row in a layer.
    """
    tokens = np.repeat(rows.tokens / degree, degree)
    nothing = np.zeros(rows.row_count * degree)

    def compute_layer(cost: CostModel) -> MicroBatchWork:
        attention, exposed = (np.repeat(seconds, degree, axis=1) for seconds in of_rows(cost))
        return MicroBatchWork(
            tokens=tokens,
            attention=attention,
            exposed=exposed,
            wire=exposed.sum(axis=0),
            received=nothing,
            pairs=float(count_causal_pairs(rows.length, rows.length, cost.window).sum()),
        )

    return combine_layers(setting, compute_layer)


def is_gathered_again(setting: Setting, degree: int) -> bool:
    """Return whether keys that are not kept must be gathered again. A layer that is repeated in
    backward gathers them anyway.
    """
    return degree > 1 and setting.checkpointing != "full"


def compute_key_bytes(setting: Setting, degree: int, *, again: bool) -> tuple[float, float]:
    """Compute the bytes of gathered keys per token of a rank, either gathered `again` in backward
    or kept for it.

    Returns:
        Received bytes: keys of the current layer unless kept, their gradients in float32, and bytes
            inside the kernel. Then kept bytes: keys of all layers in flight, if kept.
    """
    if degree == 1:
        return 0.0, 0.0
    keys = float(degree * setting.shape.key_value_bytes)
    working = 2 * keys + (degree - 1) * compute_kernel_bytes(setting.shape)[1]
    if again or not is_gathered_again(setting, degree):
        return keys + working, 0.0
    layers = setting.stage_layers * setting.model.attention_share
    return working, keys * layers * count_in_flight(setting)


def _estimate_all_to_all_rate(setting: Setting, degree: int) -> float:
    """Return the bytes per second from a rank to all others of its row, of which some are in its
    node: both links carry at once.
    """
    beside = min(degree, max(setting.ranks_per_node // setting.tensor, 1))
    away = degree - beside
    others = max(degree - 1, 1)
    seconds = max(
        away / others / setting.hardware.link_rate,
        (beside - 1) / others / setting.hardware.node_rate,
    )
    return 1 / seconds if seconds else setting.hardware.node_rate


def _compute_gathering(
    setting: Setting,
    rows: SharedRows,
    degree: int,
    cut: Callable[[CostModel, SharedRows, int], Directions],
    *,
    again: bool,
) -> MicroBatchWork:
    """Compute the work if all ranks of a row gather its keys and values, and keep them for backward
    or gather them `again`.

    Gradients of keys return in backward after heads and tails are added. Received rows are put in
    order, and so are returned ones. Heads and tails need one kernel call each, for which rows and
    keys are copied to lie in sequence.
    """
    shape = setting.shape

    def compute_rows(cost: CostModel) -> tuple[Directions, Directions]:
        others_bytes = rows.tokens * shape.key_value_bytes * (degree - 1) / degree
        once = others_bytes / estimate_gather_rate(setting, degree) + compute_fixed_seconds(
            cost, degree - 1
        )
        order = estimate_copy_seconds(setting, rows.tokens * shape.key_value_bytes)
        # A call copies q and o, and in backward q, o, do and dq. Keys of both calls are about those
        # of the row.
        taken = order + estimate_copy_seconds(setting, rows.tokens / degree * shape.row_bytes)
        # Sums are set to zero, then read with the addends, and written.
        back = once + order + 2 * order + 2 * taken
        exposed = [once + order + taken, once + order + back if again else back]
        return cut(cost, rows, degree), np.stack(exposed) * (degree > 1)

    work = _compute_work(setting, rows, degree, compute_rows)
    received, kept = compute_key_bytes(setting, degree, again=again)
    return replace(work, received=work.tokens * received, kept=work.tokens * kept)


def compute_all_gather(
    setting: Setting, rows: SharedRows, degree: int, *, again: bool = False
) -> MicroBatchWork:
    """Compute the work if each rank gathers all keys of its row before it computes its head and
    tail of every document.
    """
    return _compute_gathering(setting, rows, degree, share_documents, again=again)


def compute_wlb(
    setting: Setting, rows: SharedRows, degree: int, *, again: bool = False
) -> MicroBatchWork:
    """Compute the work of all-gather with each row cut by document or as one sequence, whichever is
    faster (arXiv 2503.17924, section 5).
    """

    def is_faster_by_document(cost: CostModel, rows: SharedRows, degree: int) -> Directions:
        by_document, by_row = (cut(cost, rows, degree) for cut in (share_documents, share_rows))
        return np.where(by_document.sum(axis=0) <= by_row.sum(axis=0), by_document, by_row)

    return _compute_gathering(setting, rows, degree, is_faster_by_document, again=again)


def compute_ring(setting: Setting, rows: SharedRows, degree: int) -> MicroBatchWork:
    """Compute the work if keys travel between neighbours, hidden behind attention."""
    shape, hardware = setting.shape, setting.hardware
    rate = (
        hardware.node_rate
        if degree * setting.tensor <= setting.ranks_per_node
        else hardware.link_rate
    )

    def compute_rows(cost: CostModel) -> tuple[Directions, Directions]:
        others_bytes = rows.tokens * shape.key_value_bytes * (degree - 1) / degree
        once = others_bytes / rate + (degree - 1) * compute_fixed_seconds(cost, 1)
        # In backward, gradients of keys travel with the keys.
        added = np.stack(
            [
                shape.output_bytes * rows.tokens,
                (shape.query_bytes + shape.key_value_bytes) * rows.tokens,
            ]
        )
        # Each of `degree` calls adds to float32 sums, which are read and written.
        merged = estimate_copy_seconds(setting, added * (1 + 8 / shape.element_bytes) / 2) * (
            degree > 1
        )
        return share_documents(cost, rows, degree, hops=degree) + merged, np.stack([once, 2 * once])

    work = _compute_work(setting, rows, degree, compute_rows)
    return replace(
        work,
        exposed=np.maximum(work.exposed - work.attention, 0),
        # The current keys and the arriving ones.
        received=work.tokens * 3 * 2 * shape.key_value_bytes * (degree > 1),
    )


def compute_ulysses(setting: Setting, rows: SharedRows, degree: int) -> MicroBatchWork:
    """Compute the work if each rank of a row computes some heads of all its documents, so that q,
    k, v and o of all tokens change ranks.
    """
    shape = setting.shape
    # If there are fewer key/value heads than ranks, each head is sent to several ranks.
    keys = shape.key_value_bytes * max(degree / shape.key_value_heads, 1)
    held = shape.query_bytes + keys + shape.output_bytes
    moved = held * (degree - 1) / degree

    def compute_rows(cost: CostModel) -> tuple[Directions, Directions]:
        tokens = rows.tokens / degree
        # q, k, v and o travel separately, and are put in order before and after.
        once = tokens * moved / _estimate_all_to_all_rate(
            setting, degree
        ) + 4 * compute_fixed_seconds(cost, degree - 1)
        once = once + 2 * estimate_copy_seconds(setting, tokens * held) * (degree > 1)
        attention = rows.sum_by_row(cost.estimate_directions(rows.length, rows.length, 1 / degree))
        return divide_into_calls(cost, attention), np.stack([once, once])

    work = _compute_work(setting, rows, degree, compute_rows)
    return replace(work, received=work.tokens * (moved + shape.output_bytes) * (degree > 1))
