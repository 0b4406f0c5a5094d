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

from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray, KeyTransfers, Layout, expanded
from hf_distca.schedule.plan import Relays

if TYPE_CHECKING:
    from hf_distca.schedule.load import PlanLoad

__all__ = ["relieve", "routed", "senders"]

Array = TypeVar("Array", IntArray, FloatArray)


def senders(keys: KeyTransfers, relays: Relays | None) -> KeyTransfers:
    """What servers need from other ranks, with the rank that sends it as `source`: a relay, or one that holds it."""
    away = _only(keys, keys.source != keys.server)
    if relays is None:
        return away
    rows, relay = routed(away, relays)
    return rows._replace(source=np.where((relay < 0) | (relay == rows.server), rows.source, relay))


def routed(keys: KeyTransfers, relays: Relays | None) -> tuple[KeyTransfers, IntArray]:
    """Rows cut where the runs of relays begin and end, and the relay of each; -1 for keys without one."""
    if relays is None:
        return keys, np.full(len(keys.document), -1)
    spread = _among(keys.document, relays.document)
    cut, relay = _cut(_only(keys, spread), relays)
    return _joined([_only(keys, ~spread), cut]), np.concatenate([np.full(int((~spread).sum()), -1), relay])


def _among(values: IntArray, ordered: IntArray) -> npt.NDArray[np.bool_]:
    """Which values occur in an array that is in order; `numpy.isin` would sort both first."""
    if not len(ordered):
        return np.zeros(len(values), dtype=np.bool_)
    return np.asarray(ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values)


def _only(rows: KeyTransfers, which: npt.NDArray[np.bool_]) -> KeyTransfers:
    """Some of the rows."""
    # Five times faster than five masks.
    index = np.flatnonzero(which)
    return KeyTransfers(*(column[index] for column in rows))


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
    row, run = expanded(first, first + count)
    cut = KeyTransfers(*(column[row] for column in rows))
    cut = cut._replace(start=np.maximum(cut.start, relays.start[run]), end=np.minimum(cut.end, relays.end[run]))
    rest = _without_relay(rows, relays)
    return _joined([cut, rest]), np.concatenate([relays.relay[run], np.full(len(rest.document), -1)])


def _without_relay(rows: KeyTransfers, relays: Relays) -> KeyTransfers:
    """The part of each row behind the last run of its document."""
    last = np.flatnonzero(np.concatenate([relays.document[1:] != relays.document[:-1], [True]]))
    start = np.maximum(rows.start, relays.end[last][np.searchsorted(relays.document[last], rows.document)])
    return _only(rows._replace(start=start), start < rows.end)


def relieve(load: PlanLoad, least: float = 0.0) -> PlanLoad:
    """The load of the plan with relays, or as it is if they gain nothing.

    A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are
    hidden behind compute, what they receive. Documents that late ranks send to several servers get relays.

    Args:
        load: of a plan without relays. One with a window is left as it is, for what a server needs is a window of keys then,
            which few share; and so is one in waves.
        least: part of the seconds of the slowest rank that relays have to gain.
    """
    plan, waves, slowest = load.plan, load.waves, load.slowest_seconds
    if plan.window is not None or not plan.moved or (waves is not None and waves.count > 1):
        return load
    beside = np.zeros(plan.layout.world_size) if load.overlapped else load.compute_seconds
    unchanged = float((beside + load.wire_seconds[1]).max())
    if unchanged >= slowest * (1 - least):
        return load
    relays = _relays(load, beside, unchanged)
    if relays is None:
        return load
    relieved = load.with_relays(relays)
    gain = slowest - relieved.slowest_seconds
    return relieved if gain > 0 and gain >= least * slowest else load


def _relays(load: PlanLoad, beside: FloatArray, unchanged: float) -> Relays | None:
    """Relays of documents that late ranks send, if any of these has several servers.

    Each passes on in proportion to the seconds that it has left before `unchanged`.
    """
    layout, keys = load.plan.layout, load.needed_keys
    away = _only(keys, keys.source != keys.server)
    seconds = beside + load.wire_seconds[0]
    late = np.unique(away.document[seconds[away.source] > unchanged])
    away, keys = (_only(rows, _among(rows.document, late)) for rows in (away, keys))
    if not len(away.document):
        return None
    needs = _KeyReaches.of(keys)
    # Seconds that each rank has left to pass keys on, once its own leave it but once; shared by all documents it may do it for.
    key_seconds = float(load.cost.transfer_seconds(0, 1))
    left = unchanged - seconds + key_seconds * _again(away, layout)
    candidates = np.bincount(needs.server, minlength=layout.world_size)
    weight = np.maximum(left, 0.0)[needs.server] / candidates[needs.server]
    total = np.bincount(needs.place, weights=weight)[needs.place]
    weight = np.where(needs.servers > 1, np.where(total > 0, weight, 1.0), 0.0)
    return needs.relays(weight)


class _KeyReaches(NamedTuple):
    """Servers and the keys [0, reach) of documents that they need, in order of document and reach.

    Attributes:
        document, server, reach: one row for each document and server.
        place: of the document among those that there are.
        servers: how many the document has.
        passed: how often the keys before `reach` are sent beyond the first time; which grows evenly from one reach to the next.
    """

    document: IntArray
    server: IntArray
    reach: IntArray
    place: IntArray
    servers: IntArray
    passed: IntArray

    @classmethod
    def of(cls, keys: KeyTransfers) -> Self:
        """From the keys that servers need, in order of server, document and start."""
        # What a server needs of a document ends with its last row.
        ends = np.append((keys.server[1:] != keys.server[:-1]) | (keys.document[1:] != keys.document[:-1]), True)
        document, server, reach = keys.document[ends], keys.server[ends], keys.end[ends]
        order = np.lexsort((server, reach, document))
        document, server, reach = document[order], server[order], reach[order]
        place = np.unique(document, return_inverse=True)[1]
        last = np.searchsorted(place, place, side="right") - 1
        count = np.bincount(place)[place]
        times = np.maximum(last - np.arange(len(place)), 0)
        passed = _summed(place, times * (reach - _before(place, reach)))
        return cls(document, server, reach, place, count, passed)

    def relays(self, weight: FloatArray) -> Relays | None:
        """Relays that pass on in proportion to these weights, as far as each has the keys; those of weight 0 nothing."""
        able = np.flatnonzero(weight > 0)
        if not len(able):
            return None
        place, reach = self.place[able], self.reach[able]
        parts = _summed(place, weight[able])
        last = np.searchsorted(place, place, side="right") - 1
        # Where the last keys end that two servers need and one of these has.
        second = self.reach[np.searchsorted(self.place, place, side="right") - 2]
        end = np.minimum(second, reach[last])
        # The positions before which so much is passed on: both grow from 0 in each document.
        width, most = int(self.reach.max()) + 1, float(self.passed.max()) + 1
        start = np.unique(self.place)
        rows = np.argsort(np.concatenate([start, self.place]), kind="stable")
        position = np.concatenate([start * width, self.place * width + self.reach])[rows]
        passed = np.concatenate([start * most, self.place * most + self.passed])[rows]
        wanted = (np.interp(place * width + end, position, passed) - place * most) * (parts / parts[last])
        position_of_wanted = np.interp(place * most + wanted, passed, position) - place * width
        stop = np.where(
            last == np.arange(len(place)), end, np.minimum(np.minimum((position_of_wanted + 0.5).astype(np.int64), reach), end)
        )
        stop = np.maximum(stop, _before(place, stop))
        begin = _before(place, stop)
        runs = stop > begin
        return Relays(self.document[able][runs], begin[runs], stop[runs], self.server[able][runs]) if runs.any() else None


def _before(place: IntArray, values: IntArray) -> IntArray:
    """The value of the row before, 0 in the first row of a document."""
    same = np.append(False, place[1:] == place[:-1])
    return np.where(same, np.append(0, values[:-1]), 0)


def _summed(place: IntArray, values: Array) -> Array:
    """Sums of the rows of a document up to each of its rows."""
    sums = np.cumsum(values)
    return sums - (sums - values)[np.searchsorted(place, place)]


def _again(away: KeyTransfers, layout: Layout) -> FloatArray:
    """K/V tokens that each rank sends beyond the first time; those of some of the heads count in part."""
    tokens, sent = away.end - away.start, len(away.document)
    order = np.lexsort((-tokens, away.start, away.document))
    first = np.append(True, (np.diff(away.document[order]) != 0) | (np.diff(away.start[order]) != 0))[:sent]
    again = np.ones(sent, dtype=np.bool_)
    again[order[first]] = False
    weights = (tokens * layout.heads_of(away.document))[again]
    return np.bincount(away.source[again], weights=weights, minlength=layout.world_size).astype(np.float64)
