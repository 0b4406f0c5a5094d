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
from hf_distca.schedule.passing import Passing, pass_on
from hf_distca.schedule.plan import Relays
from hf_distca.schedule.traffic import KeyTraffic

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
    relieved = _relays(load)
    return relieved if relieved is not None and relieved.slowest_seconds < load.slowest_seconds * (1 - _GAIN) else load


def _relays(load: PlanLoad) -> PlanLoad | None:
    """The load with keys passed on, if any can be."""
    traffic, layout = load.key_traffic, load.plan.layout
    if not len(traffic.documents):
        return None
    sent, received = load.wire_seconds
    compute = load.compute_seconds
    unchanged = float((received if load.overlapped else compute + received).max())
    seconds = column(sent.copy() if load.overlapped else compute + sent)
    tokens, saved = column(load.key_tokens[0].copy()), column(np.zeros(layout.world_size, dtype=np.int64))
    passing, order = _passing(load)
    runs = (_room(passing.rank), _room(passing.rank), _room(passing.rank), _room(passing.rank))
    columns = KeyTraffic(*(column(part) for part in traffic)), Passing(*(column(part) for part in passing))
    count = pass_on(*columns, column(order), seconds, unchanged, saved, tokens, runs)
    if not count:
        return None
    found = np.array([part[:count] for part in runs], dtype=np.int64)
    found = found[:, np.lexsort(found[1::-1])]
    return load.with_relays(Relays(layout.documents[traffic.documents[found[0]]], *found[1:]), np.asarray(tokens))


def _passing(load: PlanLoad) -> tuple[Passing, IntArray]:
    """What can be passed on, and the documents of the traffic by how much that is, most first."""
    traffic, width = load.key_traffic, load.plan.layout.longest + 1
    documents = np.arange(len(traffic.documents))
    of_need, of_segment = (np.repeat(documents, np.diff(bounds)) for bounds in (traffic.needs, traffic.segments))
    document, rank, reach, end = _able(traffic, of_need, of_segment)
    # Positions at which more or fewer ranks are sent what follows, as far as two ranks need keys.
    edges = [of_need * width + traffic.need, of_segment * width + traffic.start, of_segment * width + traffic.own]
    position = np.sort(np.concatenate([documents * width, documents * width + end, *edges]))
    position = position[np.append(True, position[1:] != position[:-1])[: len(position)]]
    of = position // width
    inside = position - of * width <= end[of]
    of, position = of[inside], (position - of * width)[inside]
    kept = np.maximum(np.minimum(traffic.own, traffic.end), traffic.start)
    more = _below(of_need, np.zeros_like(traffic.need), traffic.need, of, position, width) - position
    more -= _below(of_segment, traffic.start, kept, of, position, width)
    steps = np.searchsorted(of, np.append(documents, len(documents)))
    each = load.cost.transfer_seconds(0, 1) * traffic.heads
    passing = Passing(rank, reach, np.searchsorted(document, np.append(documents, len(documents))), position, more, steps, each)
    return passing, np.argsort(-(traffic.heads * more[steps[1:] - 1]), kind="stable")


def _below(of: IntArray, start: IntArray, end: IntArray, document: IntArray, position: IntArray, width: int) -> IntArray:
    """Tokens of some runs [start, end) of documents, in order of these, before positions of documents."""
    total = np.zeros(len(position), dtype=np.int64)
    for edge, sign in ((start, 1), (end, -1)):
        edges = np.sort(of * width + edge)
        sums = np.append(0, np.cumsum(edges % width))
        first = np.searchsorted(edges, document * width)
        count = np.searchsorted(edges, document * width + position) - first
        total += sign * (count * position - (sums[first + count] - sums[first]))
    return total


def _able(traffic: KeyTraffic, of_need: IntArray, of_segment: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Columns of (document, rank, keys that it needs) of those that can pass keys on; and the last key that two ranks need.

    `of_need` and `of_segment` are the documents of the rows.
    """
    source, furthest = traffic.source[traffic.segments[:-1]], traffic.need[traffic.needs[1:] - 1]
    others = (traffic.source != source[of_segment]) & (traffic.start < furthest[of_segment])
    alone = np.bincount(of_segment, weights=others, minlength=len(source)) == 0
    # A rank that holds a document alone has all keys, whether it needs them or not.
    rest = ~(alone[of_need] & (traffic.server == source[of_need]))
    document, rank, need = of_need[rest], traffic.server[rest], traffic.need[rest]
    bounds = np.searchsorted(document, np.arange(len(source) + 1))
    end = np.where(np.diff(bounds) > 1, np.append(need, 0)[np.maximum(bounds[1:] - 2, 0)], 0)
    holders = np.flatnonzero(alone & (end > 0))
    document, rank, need = np.append(document, holders), np.append(rank, source[holders]), np.append(need, end[holders])
    order = np.lexsort((rank, need, document))
    return document[order], rank[order], need[order], end


def _room(like: Any) -> Any:
    return column(np.zeros(len(like), dtype=np.int64))
