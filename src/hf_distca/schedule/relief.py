"""`relieve`: let servers pass keys on where that makes the slowest rank earlier.

A rank is *late* if it ends after all that relays cannot change: what ranks compute and receive, or, where exchanges are hidden
behind compute, what they receive. Documents that late ranks send
to several servers get relays, those with the most to pass on first. What a server passes on is measured so that all of a
document's relays end together, each with what it has to do anyway: water poured over their seconds.
"""

from __future__ import annotations

from hf_distca.schedule.compiled import array, column, handed, space
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.passing import Senders, pass_on, room_for
from hf_distca.schedule.plan import Relays

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
    traffic, layout = load.tally.traffic, load.plan.layout
    if not traffic.sizes[3]:
        return None
    ranks, each = layout.world_size, float(load.cost.transfer_seconds(0, 1))
    limit = load.slowest_seconds * (1 - _GAIN)
    compute, sent, received, keys = map(column, (load.compute_seconds, *load.wire_seconds, load.key_tokens[0]))
    integers, floats, most = room_for(traffic, ranks)
    made, tokens = space(integers), space(floats, float)
    count = pass_on(handed(traffic), Senders(compute, sent, received, keys, each, load.overlapped, limit), made, tokens, most)
    if not count:
        return None
    place, start, end, relay = array(made)[: 4 * most].reshape(4, most)[:, :count]
    return load.with_relays(Relays(layout.documents[place], start, end, relay), array(tokens, float)[:ranks])
