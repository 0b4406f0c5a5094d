"""`relieve`: let servers pass keys on where that makes the slowest rank earlier.

A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are hidden
behind compute, what they receive. Documents that late ranks send
to several servers get relays, those with the most to pass on first. What a server passes on is measured so that all of a
document's relays end together, each with what it has to do anyway: water poured over their seconds.
"""

from __future__ import annotations

import numpy as np

from hf_distca.schedule.compiled import array, column, handed, interpreted, space
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.passing import Senders, pass_on, room_for
from hf_distca.schedule.plan import Relays
from hf_distca.schedule.weigh import late_from, may_gain, pays

__all__ = ["relieve"]

_may_gain, _late_from, _pays = interpreted(may_gain), interpreted(late_from), interpreted(pays)


def relieve(load: PlanLoad, least: float = 0.0) -> PlanLoad:
    """The load of the plan with relays, or as it is if they gain nothing.

    Args:
        load: of a plan without relays. One with a window is left as it is, for what a server needs is a window of keys then,
            which few share; and so is one in waves. Nodes are not looked at when runs are measured out, only when their gain is.
        least: part of the seconds of the slowest rank that relays have to gain.
    """
    plan, waves, slowest = load.plan, load.waves, load.slowest_seconds
    if plan.window is not None or not plan.moved or (waves is not None and waves.count > 1):
        return load
    if not _may_gain(plan.layout.world_size, slowest, float(load.compute_seconds.max()), load.overlapped):
        return load
    relieved = _relays(load)
    return relieved if relieved is not None and _pays(slowest, relieved.slowest_seconds, least) else load


def _relays(load: PlanLoad) -> PlanLoad | None:
    """The load with keys passed on, if any can be."""
    traffic, ranks, each = load.tally.traffic, load.plan.layout.world_size, float(load.cost.transfer_seconds(0, 1))
    compute, sent, received, keys = map(column, (load.compute_seconds, *load.wire_seconds, load.key_tokens[0]))
    senders = Senders(compute, sent, received, keys, each, load.overlapped, _late_from(load.slowest_seconds))
    _, _, _, documents, segments, needs = traffic.sizes.tolist()
    runs, integers, floats = room_for(documents, segments, needs, ranks)
    made, tokens = space(4 * runs), space(floats, float)
    count = pass_on(handed(traffic), senders, made, space(integers), tokens)
    if not count:
        return None
    return load.with_relays(Relays(*np.reshape(array(made), (4, runs))[:, :count]), array(tokens, float)[:ranks])
