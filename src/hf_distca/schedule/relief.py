"""`relieve`: let servers pass keys on where that makes the slowest rank earlier.

A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are hidden
behind compute, what they receive. Documents that late ranks send
to several servers get relays, those with the most to pass on first. What a server passes on is measured so that all of a
document's relays end together, each with what it has to do anyway: water poured over their seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_distca.schedule.compiled import column
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.passing import Needs, pass_on
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
    relays = _relays(load)
    if relays is None:
        return load
    relieved = load.with_relays(relays)
    return relieved if relieved.slowest_seconds < load.slowest_seconds * (1 - _GAIN) else load


def _relays(load: PlanLoad) -> Relays | None:
    """Runs that are passed on."""
    rows, ranks = load.transfers, load.plan.layout.world_size
    sent, received = load.wire_seconds
    compute = load.compute_seconds
    unchanged = float((received if load.overlapped else compute + received).max())
    seconds = sent.copy() if load.overlapped else compute + sent
    late = seconds > unchanged
    documents = np.unique(rows.document[(rows.source != rows.server) & late[rows.source]])
    if not len(documents):
        return None
    rows = only(rows, np.isin(rows.document, documents))
    needs, order = _needs(load, rows, documents)
    runs = (_room(needs.rank), _room(needs.rank), _room(needs.rank), _room(needs.rank))
    work, saved = column(seconds), column(np.zeros(ranks, dtype=np.int64))
    count = pass_on(needs, column(order), work, unchanged, saved, runs)
    if not count:
        return None
    found = np.array([part[:count] for part in runs], dtype=np.int64)
    found = found[:, np.lexsort(found[1::-1])]
    return Relays(documents[found[0]], *found[1:])


def _needs(load: PlanLoad, rows: KeyTransfers, documents: IntArray) -> tuple[Needs, IntArray]:
    """Which keys of these documents servers need, and the documents by how much there is to pass on."""
    layout, width = load.plan.layout, load.plan.layout.longest + 1
    place, each = np.arange(len(documents) + 1), load.cost.transfer_seconds(0, 1) * layout.heads_of(documents)
    rows = only(rows, np.argsort(rows.document, kind="stable"))
    at = np.searchsorted(documents, rows.document)
    document, rank, reach, end = _able(rows, at, len(documents))

    remote = np.flatnonzero(rows.source != rows.server)
    sends = Sends(only(rows, remote), documents, width)
    # Positions at which more or fewer ranks are sent what follows, as far as two ranks need keys.
    edges = [at[remote] * width + rows.start[remote], at[remote] * width + rows.end[remote]]
    position = np.unique(np.concatenate([place[:-1] * width, place[:-1] * width + end, *edges]))
    of = position // width
    inside = position - of * width <= end[of]
    of, position = of[inside], (position - of * width)[inside]
    more = sends.below(of, position) - position

    order = remote[np.lexsort((rows.start[remote], at[remote]))]
    needs = Needs(
        *(column(part[order]) for part in (rows.start, rows.end, rows.source)),
        column(np.searchsorted(at[order], place)),
        column(rank),
        column(reach),
        column(np.searchsorted(document, place)),
        column(position),
        column(more),
        column(np.searchsorted(of, place)),
        column(each),
    )
    times = layout.heads_of(documents) * sends.below(place[:-1], np.full(len(documents), layout.longest))
    return needs, np.argsort(-times, kind="stable")


def _able(rows: KeyTransfers, at: IntArray, documents: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Columns of (document, rank, keys that it needs) of those that can pass keys on; and the last key that two ranks need.

    `at` is the place of the document of each row; rows are in order of it, and those of a server follow each other.
    """
    last = np.flatnonzero(np.append((at[1:] != at[:-1]) | (rows.server[1:] != rows.server[:-1]), True))
    document, rank, need = at[last], rows.server[last], rows.end[last]
    first = np.searchsorted(at, np.arange(documents))
    source = rows.source[first]
    alone = np.minimum.reduceat(rows.source, first) == np.maximum.reduceat(rows.source, first)
    # A rank that holds a document alone has all keys, whether it needs them or not.
    other = ~(alone[document] & (rank == source[document]))
    document, rank, need = document[other], rank[other], need[other]
    order = np.lexsort((need, document))
    bounds = np.searchsorted(document[order], np.arange(documents + 1))
    second = order[np.maximum(bounds[1:] - 2, 0)]
    end = np.where(np.diff(bounds) > 1, need[second], 0)
    holders = np.flatnonzero(alone & (end > 0))
    document, rank, need = np.append(document, holders), np.append(rank, source[holders]), np.append(need, end[holders])
    order = np.lexsort((rank, need, document))
    return document[order], rank[order], need[order], end


def _room(like: Any) -> Any:
    return column(np.zeros(len(like), dtype=np.int64))
