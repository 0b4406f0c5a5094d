"""`relieve`: let servers pass keys on where that makes the slowest rank earlier.

A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are hidden
behind compute, what they receive. Documents that late ranks send
to several servers get relays, those with the most to pass on first. What a server passes on is measured so that all of a
document's relays end together, each with what it has to do anyway: water poured over their seconds.
"""

from __future__ import annotations

import numpy as np

from hf_distca.schedule.compiled import array, column, room
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.passing import Passing, Runs, pass_on
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
    if unchanged >= load.slowest_seconds * (1 - _GAIN):
        return None
    seconds = column(sent.copy() if load.overlapped else compute + sent)
    tokens, needs, segments = column(load.key_tokens[0].copy()), len(traffic.need), len(traffic.start)
    runs = Runs(*(room(needs + len(traffic.documents)) for _ in Runs._fields))
    steps = needs + 2 * segments + 2
    passing = Passing(room(needs + 1), room(needs + 1), room(steps), room(steps), room(3), room(layout.world_size))
    order = column(np.arange(len(traffic.documents))), room(len(traffic.documents), float), room(len(traffic.documents))
    each = float(load.cost.transfer_seconds(0, 1))
    count = pass_on(KeyTraffic(*map(column, traffic)), passing, order, each, seconds, unchanged, tokens, runs)
    if not count:
        return None
    found = np.array([part[:count] for part in runs], dtype=np.int64)
    found = found[:, np.lexsort(found[1::-1])]
    return load.with_relays(Relays(layout.documents[traffic.documents[found[0]]], *found[1:]), array(tokens, float))
