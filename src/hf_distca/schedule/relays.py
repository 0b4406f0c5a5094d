"""Forwarded keys: routes of the keys of a document in two hops.

Without relays, every server gets the keys it needs from the ranks that hold them, and a rank that
holds a long document sends it once for every server. With relays, the first part of a document is
cut in runs, one for each of its *relays*: servers that need the run anyway. In the first hop a run
goes from the ranks that hold it to its relay, in the second from the relay to the other servers
that need it. No rank receives more or less than before; only the sending is shared. Gradients of
keys go the same way back, and the relay adds them up.

A rank may be the relay of keys that it holds itself: then they go to all servers in the first hop,
as all keys do that have no relay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import BoolArray, IntArray, Layout, changes, expanded
from hf_distca.schedule.plan import KeyTransfers, Relays

if TYPE_CHECKING:
    from hf_distca.schedule.load import PlanLoad

__all__ = ["relieve", "routed", "senders"]

Array = TypeVar("Array", IntArray, FloatArray)


def senders(keys: KeyTransfers, relays: Relays | None) -> KeyTransfers:
    """Return the keys that servers need from other ranks, with the sending rank as
    `source`: a relay, or a rank that holds them.
    """
    away = _only(keys, keys.source != keys.server)
    if relays is None:
        return away
    rows, relay = routed(away, relays)
    return rows._replace(source=np.where((relay < 0) | (relay == rows.server), rows.source, relay))


def routed(keys: KeyTransfers, relays: Relays | None) -> tuple[KeyTransfers, IntArray]:
    """Cut rows where the runs of relays begin and end.

    Return the rows, and the relay of each; -1 for keys without one.
    """
    if relays is None:
        return keys, np.full(len(keys.document), -1)
    # The keys of a document that have no relay are its last run. Positions count on from one document to the next.
    documents, width = np.union1d(keys.document, relays.document), int(max(relays.end.max(), keys.end.max(initial=0))) + 1
    base, relayed = (np.searchsorted(documents, document) * width for document in (keys.document, relays.document))
    end = np.append(relayed + relays.end, np.arange(1, len(documents) + 1) * width - 1)
    order = np.argsort(end, kind="stable")
    end, relay = end[order], np.append(relays.relay, np.full(len(documents), -1))[order]
    row, run = expanded(np.searchsorted(end, base + keys.start, side="right"), np.searchsorted(end, base + keys.end) + 1)
    cut, base = KeyTransfers(*(column[row] for column in keys)), base[row]
    start, end = np.maximum(cut.start, np.append(0, end)[run] - base), np.minimum(cut.end, end[run] - base)
    return cut._replace(start=start, end=end), relay[run]


def _only(rows: KeyTransfers, which: BoolArray) -> KeyTransfers:
    """Select some of the rows."""
    # Five times faster than five masks.
    index = np.flatnonzero(which)
    return KeyTransfers(*(column[index] for column in rows))


def relieve(load: PlanLoad, least: float = 0.0) -> PlanLoad:
    """Return the load of the plan with relays, or unchanged if they gain nothing.

    A rank is *late* if it ends after everything that relays cannot change: compute and receiving of
    all ranks or, if exchanges are hidden behind compute, receiving alone. Documents that late ranks
    send to several servers get relays.

    Args:
        load: load of a plan without relays. A plan with a window is left unchanged, because a
            server then needs a window of keys, which few share; and so is a plan in waves.
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
    """Choose relays of documents that late ranks send, if any of these has several servers.

    Each forwards in proportion to the seconds that it has left before `unchanged`.
    """
    layout, keys = load.plan.layout, load.needed_keys
    seconds, place, late = beside + load.wire_seconds[0], layout.place_of(keys.document), np.zeros_like(layout.spans)
    late[place[(keys.source != keys.server) & (seconds[keys.source] > unchanged)]] = True
    if not late.any():
        return None
    keys = _only(keys, late[place])
    # What a server needs of a document ends with its last row.
    last = np.append(changes(keys.server, keys.document), True)[1:]
    document, server, reach = keys.document[last], keys.server[last], keys.end[last]
    order = np.lexsort((server, reach, document))
    document, server, reach = document[order], server[order], reach[order]
    # Seconds that each rank has left to pass keys on, once its own leave it but once; shared by all documents it may do it for.
    left = unchanged - seconds + load.cost.key_seconds * _again(_only(keys, keys.source != keys.server), layout)
    weight, place = np.maximum(left, 0.0)[server] / np.bincount(server)[server], np.cumsum(changes(document)) - 1
    total = np.bincount(place, weights=weight)[place]
    weight = np.where(np.bincount(place)[place] > 1, np.where(total > 0, weight, 1.0), 0.0)
    return _in_proportion(document, server, reach, weight)


def _in_proportion(document: IntArray, server: IntArray, reach: IntArray, weight: FloatArray) -> Relays | None:
    """Choose relays that forward in proportion to weights, as far as each has the
    keys; servers of weight 0 forward nothing.

    Args:
        document, server, reach: servers and the keys [0, reach) that they need, in order of
            document and reach.
        weight: weight of each server.
    """
    able = np.flatnonzero(weight > 0)
    # How often the keys before each reach are sent beyond the first time: it grows evenly from one reach to the next.
    place = np.cumsum(changes(document)) - 1
    times = np.searchsorted(place, place, side="right") - 1 - np.arange(len(place))
    passed = _summed(place, times * (reach - _before(place, reach)))
    # The positions before which so much is passed on: both grow from 0 in each document.
    width, most = int(reach.max()) + 1, float(passed.max()) + 1
    documents = np.arange(place[-1] + 1)
    rows = np.argsort(np.append(documents, place), kind="stable")
    positions = np.append(documents * width, place * width + reach)[rows]
    amounts = np.append(documents * most, place * most + passed)[rows]
    # Where the last keys end that two servers need and one of these has.
    second = reach[np.searchsorted(place, place, side="right") - 2][able]
    document, server, reach, place = document[able], server[able], reach[able], place[able]
    parts, last = _summed(place, weight[able]), np.searchsorted(place, place, side="right") - 1
    end = np.minimum(second, reach[last])
    wanted = (np.interp(place * width + end, positions, amounts) - place * most) * (parts / parts[last])
    stop = (np.interp(place * most + wanted, amounts, positions) - place * width + 0.5).astype(np.int64)
    stop = np.where(last == np.arange(len(place)), end, np.minimum(np.minimum(stop, reach), end))
    stop = np.maximum(stop, _before(place, stop))
    begin = _before(place, stop)
    runs = stop > begin
    return Relays(document[runs], begin[runs], stop[runs], server[runs]) if runs.any() else None


def _before(place: IntArray, values: IntArray) -> IntArray:
    """Return the value of the row before, 0 in the first row of a document."""
    return np.where(changes(place), 0, np.append(0, values)[:-1])


def _summed(place: IntArray, values: Array) -> Array:
    """Return the running sums of the rows of each document."""
    sums = np.cumsum(values)
    return sums - (sums - values)[np.searchsorted(place, place)]


def _again(away: KeyTransfers, layout: Layout) -> FloatArray:
    """Count K/V tokens that each rank sends beyond the first time;
    those of some of the heads count in part.
    """
    tokens = away.end - away.start
    order = np.lexsort((-tokens, away.start, away.document))
    again = order[~changes(away.document[order], away.start[order])]
    again.sort()
    weights = (tokens * layout.heads_of(away.document))[again]
    return np.bincount(away.source[again], weights=weights, minlength=layout.world_size).astype(np.float64)
