"""`relieve`: let servers pass keys on where that makes the slowest rank earlier.

A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are hidden
behind compute, what they receive. Documents that late ranks send
to several servers get relays, those with the most to pass on first. What a server passes on is measured so that all of a
document's relays end together, each with what it has to do anyway: water poured over their seconds.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import KeyTransfers, Relays
from hf_distca.schedule.relays import Sends, only

__all__ = ["relieve"]

# How much earlier the slowest rank must be, as a part of its seconds.
_GAIN = 0.005


def relieve(load: PlanLoad) -> PlanLoad:
    """The load of the plan with relays, or as it is if they gain nothing.

    Args:
        load: of a plan without relays. One with a window is left as it is, for what a server needs is a window of keys then,
            which few share; and so is one in waves. Nodes are not looked at when runs are measured out, only when their gain is.
    """
    plan, waves = load.plan, load.waves
    if plan.window is not None or not plan.moved or plan.layout.world_size < 3:
        return load
    if waves is not None and waves.count > 1:
        return load
    if load.overlapped and load.slowest_seconds <= float(load.compute_seconds.max()):
        return load
    relays = _Relief(load).relays()
    if relays is None:
        return load
    relieved = load.with_relays(relays)
    return relieved if relieved.slowest_seconds < load.slowest_seconds * (1 - _GAIN) else load


class _Relief:
    def __init__(self, load: PlanLoad) -> None:
        self.layout, self.rows = load.plan.layout, load.transfers
        sent, received = load.wire_seconds
        compute = load.compute_seconds
        self.unchanged = float((received if load.overlapped else compute + received).max())
        # Seconds of each rank as a sender; they grow for relays and fall for the ranks that these relieve.
        self.seconds = sent.copy() if load.overlapped else compute + sent
        self.each = float(load.cost.transfer_seconds(0, 1))

    def relays(self) -> Relays | None:
        """Runs that are passed on."""
        rows, late = self.rows, self.seconds > self.unchanged
        remote = rows.source != rows.server
        documents = np.unique(rows.document[remote & late[rows.source]])
        rows = only(rows, np.isin(rows.document, documents))
        rows = only(rows, np.argsort(rows.document, kind="stable"))
        sends = Sends(only(rows, rows.source != rows.server), documents, self.layout.longest + 1)
        first, last = (np.searchsorted(rows.document, documents, side) for side in ("left", "right"))
        heads = self.layout.heads_of(documents)
        times = heads * sends.below(np.arange(len(documents)), np.full(len(documents), self.layout.longest))
        found: list[tuple[int, int, int, int]] = []
        for place in np.argsort(-times, kind="stable").tolist():
            part = slice(int(first[place]), int(last[place]))
            if not (self.seconds[rows.source[part]] > self.unchanged).any():
                continue  # those who send it were relieved of others
            sharing = _Sharing(only(rows, part), self.layout.world_size)
            if len(sharing.ranks) > 1:
                each = self.each * float(heads[place])
                found += [(int(documents[place]), *run) for run in self._runs(sharing, sends, place, each)]
        return Relays(*np.array(sorted(found), dtype=np.int64).T) if found else None

    def _runs(self, sharing: _Sharing, sends: Sends, place: int, each: float) -> list[tuple[int, int, int]]:
        """Runs of one document as (start, end, relay); what ranks send with them, `each` of a key, is added to their seconds."""
        shared, ranks = sharing.shared, sharing.ranks
        seconds = self.seconds.copy()
        saved = sharing.saved(shared)
        seconds[sharing.sources] += each * saved
        room = _poured(seconds[ranks], each * sends.more(place, shared))
        able = room > 0
        if not able.any():
            return []
        # Only those that need the last keys can pass them on.
        reach = sharing.need[able]
        if shared > (furthest := int(reach.max())):
            shared, saved = furthest, sharing.saved(furthest)
        self.seconds[sharing.sources] += each * saved
        runs = _cut(sends.steps(place, shared), ranks[able], reach, room[able])
        cuts = np.array([start for start, *_ in runs] + [shared])
        more = np.diff(sends.below(np.full(len(cuts), place), cuts) - cuts)
        self.seconds[[rank for *_, rank in runs]] += each * more
        return runs


class _Sharing:
    """Who holds and who needs the keys of one document.

    Attributes:
        sources: ranks that hold some.
        ranks, need: ranks that can pass keys on, and how many from position 0 on; those with fewest first.
        shared: two ranks need keys up to here.
    """

    def __init__(self, rows: KeyTransfers, ranks: int) -> None:
        self.rows, self.sources = rows, np.unique(rows.source)
        need = np.zeros(ranks, dtype=np.int64)
        np.maximum.at(need, rows.server, rows.end)
        if len(self.sources) == 1:
            need[self.sources] = 0
        self.shared = int(np.partition(need, -2)[-2])
        if len(self.sources) == 1:
            need[self.sources] = self.shared  # it has them all, whether it needs them or not
        able = np.flatnonzero(need)
        self.ranks = able[np.argsort(need[able], kind="stable")]
        self.need = need[self.ranks]

    def saved(self, shared: int) -> IntArray:
        """Tokens, not above 0, that each source sends more if each key before `shared` leaves it but once."""
        rows = only(self.rows, (self.rows.source != self.rows.server) & (self.rows.start < shared))
        end = np.minimum(rows.end, shared)
        starts, segment = np.unique(rows.start, return_inverse=True)
        furthest, source = starts.copy(), np.zeros_like(starts)
        np.maximum.at(furthest, segment, end)
        source[segment] = rows.source
        count = len(self.sources)
        once = np.bincount(np.searchsorted(self.sources, source), weights=furthest - starts, minlength=count)
        sent = np.bincount(np.searchsorted(self.sources, rows.source), weights=end - rows.start, minlength=count)
        return (once - sent).astype(np.int64)


def _poured(seconds: FloatArray, amount: float) -> FloatArray:
    """What each gets of an amount that is poured over these seconds so that they end level."""
    order = np.sort(seconds)
    # With the first n of them filled up to the n-th: what that takes.
    level = np.cumsum(order)
    takes = order * np.arange(1, len(order) + 1) - level
    count = int(np.searchsorted(takes, amount, side="right"))
    return np.maximum((amount + float(level[count - 1])) / count - seconds, 0.0)


def _cut(steps: tuple[IntArray, IntArray], ranks: IntArray, reach: IntArray, room: FloatArray) -> list[tuple[int, int, int]]:
    """Runs (start, end, relay) with as much to pass on as the relays have room for, none beyond what its relay needs.

    Args:
        steps: positions, and what is to be passed on of the keys before each; it grows evenly in between.
        ranks, reach, room: of the relays, in order of their reach: how many keys they need, and shares of what is passed on.
    """
    position, amount = (column.tolist() for column in steps)
    runs: list[tuple[int, int, int]] = []
    at, done, left = 0, 0.0, float(room.sum())
    for rank, limit, share in zip(ranks.tolist(), reach.tolist(), room.tolist(), strict=True):
        wanted = done + (amount[-1] - done) * min(share / left, 1.0) if left > 0 else amount[-1]
        left -= share
        step = min(bisect_right(amount, wanted), len(amount) - 1)
        rise = amount[step] - amount[step - 1]
        part = (wanted - amount[step - 1]) / rise if rise else 1.0
        end = position[step - 1] + part * (position[step] - position[step - 1])
        stop = min(int(end + 0.5), limit)
        if rank == ranks[-1]:
            stop = position[-1]
        if stop > at:
            runs.append((at, stop, rank))
            at = stop
            done = _between(position, amount, at)
    return runs


def _between(position: list[int], amount: list[float], at: int) -> float:
    step = min(bisect_right(position, at), len(position) - 1)
    width = position[step] - position[step - 1]
    return amount[step - 1] + (amount[step] - amount[step - 1]) * (at - position[step - 1]) / width
