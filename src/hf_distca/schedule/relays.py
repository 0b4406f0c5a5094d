"""Keys that are passed on: who gets which keys of a document from whom, in two hops.

Without relays, every server gets the keys it needs from the ranks that hold them, and a rank that holds a long document sends it
once for every server. With relays, the first part of a document is cut in runs, one for each of its *relays*: servers that need
the run anyway. In the first hop a run goes from the ranks that hold it to its relay, in the second from the relay to the other
servers that need it. Nobody receives more or less than before; what is sent is shared. Gradients of keys go the same way back,
and the relay adds them up.

A rank may be the relay of keys that it holds itself: then they go to all servers in the first hop, as all keys do that have no
relay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import KeyTransfers, Relays

__all__ = ["Sends", "only", "senders", "sent_key_tokens"]


class Sends:
    """How often the keys of some documents are sent if nobody passes them on.

    Args:
        rows: what servers need from other ranks, of these documents alone.
        documents: their numbers, in order.
        width: more than any document position.
    """

    def __init__(self, rows: KeyTransfers, documents: IntArray, width: int) -> None:
        self.width = width
        base = np.searchsorted(documents, rows.document) * width
        self._edges = [np.sort(base + edge) for edge in (rows.start, rows.end)]
        self._totals = [np.concatenate([[0], np.cumsum(edges % width)]) for edges in self._edges]
        self._bounds = np.searchsorted(self._edges[0], np.arange(len(documents) + 1) * width)

    def below(self, place: IntArray, position: IntArray) -> IntArray:
        """Tokens of the documents at these places that are sent from before these positions, as often as they are sent."""
        first, last, sums = self._bounds[place], self._bounds[place + 1], []
        for edges, totals in zip(self._edges, self._totals, strict=True):
            at = np.clip(np.searchsorted(edges, place * self.width + position), first, last)
            sums.append(totals[at] - totals[first] + (last - at) * position)
        return np.asarray(sums[1] - sums[0], dtype=np.int64)


def senders(rows: KeyTransfers, relays: Relays | None) -> KeyTransfers:
    """What servers need from other ranks, with the rank that sends it as `source`: a relay, or one that holds it."""
    rows = only(rows, rows.source != rows.server)
    if relays is None:
        return rows
    spread = np.isin(rows.document, relays.document)
    cut, relay = _cut(only(rows, spread), relays)
    direct = (relay < 0) | (relay == cut.server)
    return _joined([only(rows, ~spread), cut._replace(source=np.where(direct, cut.source, relay))])


def sent_key_tokens(transfers: KeyTransfers, relays: Relays | None, layout: Layout) -> FloatArray:
    """K/V tokens that every rank sends, those of some of the heads counted in part: shape (ranks,)."""
    rows = only(transfers, transfers.source != transfers.server)
    ranks = layout.world_size
    if relays is None:
        return _tokens(rows.source, (rows.end - rows.start) * layout.heads_of(rows.document), ranks)
    spread = np.isin(rows.document, relays.document)
    plain, rows = only(rows, ~spread), only(rows, spread)
    sent = _tokens(plain.source, (plain.end - plain.start) * layout.heads_of(plain.document), ranks)
    # Between two cuts of runs and of segments, all keys have one relay and one rank that holds them.
    documents = np.unique(relays.document)
    width = layout.longest + 1
    held = np.flatnonzero(np.isin(layout.document, documents))
    held = held[np.lexsort((layout.start[held], layout.document[held]))]
    of_segment = np.searchsorted(documents, layout.document[held]) * width
    of_run = np.searchsorted(documents, relays.document) * width
    begin = np.unique(np.concatenate([of_segment + layout.start[held], of_run + relays.start, of_run + relays.end]))
    end = np.concatenate([begin[1:], [len(documents) * width]])
    segment = np.searchsorted(of_segment + layout.start[held], begin, side="right") - 1
    source, last = layout.rank[held][segment], (of_segment + layout.end[held])[segment]
    inside = begin < last
    begin, end, source = begin[inside], np.minimum(end, last)[inside], source[inside]
    run = np.searchsorted(of_run + relays.start, begin, side="right") - 1
    relay = np.where(begin < (of_run + relays.end)[run], relays.relay[run], source)
    sends, place = Sends(rows, documents, width), begin // width
    heads = layout.heads_of(documents)[place]
    times = heads * (sends.below(place, end - place * width) - sends.below(place, begin - place * width))
    passed = relay != source
    once = np.where(passed, heads * (end - begin), times)
    return sent + _tokens(source, once, ranks) + _tokens(relay[passed], (times - once)[passed], ranks)


def _tokens(rank: IntArray, tokens: FloatArray, ranks: int) -> FloatArray:
    return np.bincount(rank, weights=tokens, minlength=ranks).astype(np.float64)


def only(rows: KeyTransfers, which: npt.NDArray[Any] | slice) -> KeyTransfers:
    """Some of the rows."""
    return KeyTransfers(*(column[which] for column in rows))


def _joined(rows: list[KeyTransfers]) -> KeyTransfers:
    return KeyTransfers(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))


def _cut(rows: KeyTransfers, relays: Relays) -> tuple[KeyTransfers, IntArray]:
    """Rows cut where runs begin and end, and the relay of each; -1 for keys without one."""
    width = int(max(relays.end.max(), rows.end.max(initial=0))) + 1
    documents = np.unique(relays.document)
    of_run = np.searchsorted(documents, relays.document) * width
    base = np.searchsorted(documents, rows.document) * width
    first = np.searchsorted(of_run + relays.end, base + rows.start, side="right")
    count = np.maximum(np.searchsorted(of_run + relays.start, base + rows.end) - first, 0)
    row = np.repeat(np.arange(len(base)), count)
    run = np.arange(len(row)) + np.repeat(first - (np.cumsum(count) - count), count)
    cut = KeyTransfers(*(column[row] for column in rows))
    cut = cut._replace(start=np.maximum(cut.start, relays.start[run]), end=np.minimum(cut.end, relays.end[run]))
    rest = _without_relay(rows, relays)
    return _joined([cut, rest]), np.concatenate([relays.relay[run], np.full(len(rest.document), -1)])


def _without_relay(rows: KeyTransfers, relays: Relays) -> KeyTransfers:
    """The part of each row behind the last run of its document."""
    last = np.flatnonzero(np.concatenate([relays.document[1:] != relays.document[:-1], [True]]))
    return _clipped(rows, relays.end[last][np.searchsorted(relays.document[last], rows.document)], rows.end)


def _clipped(rows: KeyTransfers, start: IntArray, end: IntArray) -> KeyTransfers:
    start, end = np.maximum(rows.start, start), np.minimum(rows.end, end)
    return only(rows._replace(start=start, end=end), start < end)
