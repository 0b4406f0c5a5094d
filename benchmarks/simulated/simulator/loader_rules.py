"""Strategies of the loader: they assign documents to ranks, and layers exchange nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.tools.advise.document_lengths import DocumentSource
from hf_distca.tools.advise.ways import pack_rows
from simulator.setting import Setting
from simulator.work import estimate_layer_seconds

# Weight of the squared length in transformers' cost of a sample
# (BatchRebalanceSampler.QUADRATIC_COST_COEF).
_SQUARE = 0.001


def cut_into_batches(lengths: IntArray, count: int, tokens: int) -> list[IntArray]:
    """Fill `count` batches of `tokens` tokens with documents in order.

    The part after the end of a batch becomes a separate document.
    """
    rows = pack_rows(lengths, count, tokens)
    return np.split(rows.length, rows.offsets[1:-1])


def distribute_documents(lengths: IntArray, count: int, tokens: int) -> list[IntArray]:
    """Distribute documents to `count` batches of `tokens` tokens, longest first, each to the batch
    with the most room left. Documents without room are cut.

    Batches keep the order of documents.
    """
    batches: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    rooms = [(-tokens, batch) for batch in range(count)]

    def put(document: int, length: int) -> None:
        room, batch = rooms[0]
        batches[batch].append((document, length))
        heapq.heapreplace(rooms, (room + length, batch))

    left = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        if lengths[document] > -rooms[0][0]:
            left.append(document)
        else:
            put(document, int(lengths[document]))
    for document in left:
        length = int(lengths[document])
        while length:
            part = min(length, -rooms[0][0])
            put(document, part)
            length -= part
    return [np.array([length for _, length in sorted(batch)], dtype=np.int64) for batch in batches]


def draw_steps(
    documents: DocumentSource, tokens: int, micro_batches: int, count: int
) -> Iterator[list[IntArray]]:
    """Yield `count` steps of `micro_batches` micro-batches with exactly `tokens` tokens each.

    The documents of a step do not depend on the number of micro-batches that share its tokens,
    except that short documents are cut to fill micro-batches.

    Raises:
        LayoutError: if a document is longer than a micro-batch.
    """
    for batch in documents.draw_batches(tokens * micro_batches, count):
        if batch.max() > tokens:
            raise LayoutError(
                f"a document of {batch.max()} tokens is longer than a micro-batch of {tokens}:"
                " raise the tokens of a rank or the number of ranks, or bound lengths with"
                " --max-length."
            )
        yield (
            [batch] if micro_batches == 1 else distribute_documents(batch, micro_batches, tokens)
        )


def estimate_document_seconds(setting: Setting, lengths: IntArray) -> FloatArray:
    """Compute the seconds that each document adds to its rank, all layers and both directions."""
    # Seconds per token in a long row: alone, a short document would pay for reading all weights.
    tokens = float(setting.tokens_per_rank)
    token_seconds = float(estimate_layer_seconds(setting, np.full(1, tokens)).sum()) / tokens
    seconds = setting.model.layers * token_seconds * lengths.astype(np.float64)
    for window, layers in setting.model.kinds:
        seconds += layers * setting.make_cost_model(window).estimate_seconds(lengths, lengths)
    return seconds


def assign_longest_first(
    seconds: FloatArray, lengths: IntArray, bins: int, cap: int | None = None
) -> IntArray:
    """Assign each document, longest first, to the bin with the least seconds among those with room
    under the cap.

    Returns:
        The bin of each document. If no bin has room, it is the one with the fewest tokens.
    """
    room = np.full(bins, int(lengths.sum()) if cap is None else cap)
    loads = np.zeros(bins)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    for document in np.argsort(-lengths, kind="stable").tolist():
        fits = room >= lengths[document]
        chosen = np.where(fits, loads, np.inf).argmin() if fits.any() else room.argmax()
        room[chosen] -= lengths[document]
        loads[chosen] += seconds[document]
        bin_of[document] = chosen
    return bin_of


def assign_by_equal_cost(lengths: IntArray, bins: int) -> IntArray:
    """Assign documents to bins by transformers' rule: sorted by length, in runs of equal cost.

    A run of n documents costs n * (longest + 0.001 * longest ** 2). transformers climbs towards
    equal costs; here runs minimize the largest cost.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].astype(np.float64)
    sample_costs = falling + _SQUARE * falling**2

    def find_runs(cap: float) -> list[int]:
        """Find the first documents of runs that each cost at most `cap`."""
        starts: list[int] = []
        start = 0
        while start < len(sample_costs) and len(starts) <= bins:
            starts.append(start)
            start += max(int(cap // sample_costs[start]), 1)
        return starts

    dearest = float(sample_costs.max(initial=0))
    # A single run of all documents costs less, whatever the rounding.
    low = dearest
    high = dearest * (len(sample_costs) + 1)
    while high - low > 1e-3 * high:
        cap = (low + high) / 2
        low, high = (low, cap) if len(find_runs(cap)) <= bins else (cap, high)
    starts = find_runs(high)
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    bin_of[order] = np.searchsorted(starts, np.arange(len(order)), side="right") - 1
    return bin_of
