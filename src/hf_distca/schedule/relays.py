"""Relays, which bring the keys of a document to servers in two hops.

Without relays, every server gets the keys it needs from the ranks that hold them, and a rank that
holds a long document sends it once for every server. With relays, the first part of a document is
cut into runs, one for each of its *relays*. A relay is a server that needs the run anyway. In the
first hop a run goes from the ranks that hold it to its relay. In the second hop it goes from the
relay to the other servers that need it. No rank receives more or less than before; only the sending
is shared. Gradients of keys go the same way back, and the relay adds them up.

A rank may be the relay of keys that it holds itself. These keys, and all keys without a relay, go
to all servers in the first hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.layout import (
    BoolArray,
    FloatArray,
    IntArray,
    Layout,
    enumerate_ranges,
    mark_changes,
)
from hf_distca.schedule.plan import KeyTransfers, Relays

if TYPE_CHECKING:
    from hf_distca.schedule.load import PlanLoad


def find_units(layout: Layout, document: IntArray, rank: IntArray, per_node: int) -> IntArray:
    """Number the units of servers that share relays of a document.

    Each node where tokens of the document lie has its own unit. All other nodes share one unit.
    """
    nodes = -(-layout.world_size // per_node) + 1
    place = layout.find_places(document) * nodes
    unit = place + 1 + rank // per_node
    homes = np.sort(layout.place * nodes + 1 + layout.rank // per_node)
    return np.where(homes[np.searchsorted(homes, unit) - len(homes)] == unit, unit, place)


def with_sending_ranks(layout: Layout, keys: KeyTransfers, relays: Relays | None) -> KeyTransfers:
    """Return the keys that servers need from other ranks.

    `source` is the sending rank: a relay, or a rank that holds the keys.
    """
    remote_keys = _select_rows(keys, keys.source != keys.server)
    if relays is None:
        return remote_keys
    rows, relay = with_relay_hops(layout, remote_keys, relays)
    return rows._replace(source=np.where((relay < 0) | (relay == rows.server), rows.source, relay))


def with_relay_hops(
    layout: Layout, keys: KeyTransfers, relays: Relays | None
) -> tuple[KeyTransfers, IntArray]:
    """Cut the rows of `keys` where the runs of relays begin and end.

    Return the rows, and the relay of each row (-1 for keys without a relay).
    """
    if relays is None:
        return keys, np.full(len(keys.document), -1)
    # Keys without a relay lie after the runs of their unit. They form one more run, with relay -1.
    # Positions are shifted, so that all units form one increasing sequence.
    units = [
        find_units(layout, document, rank, relays.per_node)
        for document, rank in ((keys.document, keys.server), (relays.document, relays.relay))
    ]
    known = np.union1d(*units)
    width = int(max(relays.end.max(), keys.end.max(initial=0))) + 1
    base, relayed = (np.searchsorted(known, unit) * width for unit in units)
    end = np.append(relayed + relays.end, np.arange(1, len(known) + 1) * width - 1)
    order = np.argsort(end, kind="stable")
    end = end[order]
    relay = np.append(relays.relay, np.full(len(known), -1))[order]
    row, run = enumerate_ranges(
        np.searchsorted(end, base + keys.start, side="right"),
        np.searchsorted(end, base + keys.end) + 1,
    )
    cut = KeyTransfers(*(column[row] for column in keys))
    base = base[row]
    start = np.maximum(cut.start, np.append(0, end)[run] - base)
    end = np.minimum(cut.end, end[run] - base)
    return cut._replace(start=start, end=end), relay[run]


def _select_rows(rows: KeyTransfers, mask: BoolArray) -> KeyTransfers:
    """Select the rows that `mask` marks."""
    # One index is five times faster than a mask on each of the five columns.
    index = np.flatnonzero(mask)
    return KeyTransfers(*(column[index] for column in rows))


def add_relays(load: PlanLoad, min_gain: float = 0.0) -> PlanLoad:
    """Return the load of the plan with relays, or `load` itself if relays do not gain enough.

    Relays only change sending. So the plan cannot end before every rank has computed and received.
    (If exchanges are hidden behind compute, only receiving counts.) A rank is *late* if its sending
    ends after this time. Documents that late ranks send to several servers get relays.

    Args:
        load: load of a plan without relays. A plan with a window is left unchanged, because a
            server then needs only a window of keys, which few servers share.
        min_gain: fraction of the slowest rank's seconds that relays must gain.
    """
    plan, slowest = load.plan, load.slowest_seconds
    if plan.window is not None or not plan.moved:
        return load
    other_seconds = np.zeros(plan.layout.world_size) if load.overlapped else load.compute_seconds
    unchanged = float((other_seconds + load.wire_seconds[1]).max())
    if unchanged >= slowest * (1 - min_gain):
        return load
    relays = _choose_relays(load, other_seconds, unchanged)
    if relays is None:
        return load
    relayed_load = load.with_relays(relays)
    gain = slowest - relayed_load.slowest_seconds
    return relayed_load if gain > 0 and gain >= min_gain * slowest else load


def _choose_relays(load: PlanLoad, other_seconds: FloatArray, unchanged: float) -> Relays | None:
    """Choose relays for the documents that late ranks send. Return None if late ranks send no
    document to several servers.

    The time `unchanged` is the earliest possible end of the plan with relays (see `add_relays`).
    Relays forward keys in proportion to the seconds that they have left before this time.
    """
    layout, keys = load.plan.layout, load.needed_keys
    per_node = load.ranks.per_node or layout.world_size
    seconds = other_seconds + load.wire_seconds[0]
    place = layout.find_places(keys.document)
    late = np.zeros_like(layout.has_many_ranks)
    late[place[(keys.source != keys.server) & (seconds[keys.source] > unchanged)]] = True
    if not late.any():
        return None
    keys = _select_rows(keys, late[place])
    # For each server and document, the last row has the end of the keys that the server needs.
    last = np.append(mark_changes(keys.server, keys.document), True)[1:]
    document, server, key_end = keys.document[last], keys.server[last], keys.end[last]
    unit = find_units(layout, document, server, per_node)
    order = np.lexsort((server, key_end, unit))
    unit, document, server, key_end = (
        column[order] for column in (unit, document, server, key_end)
    )
    # A rank's spare seconds are those until the time `unchanged`, if the rank sends each of its own
    # keys only once. They are divided equally among the documents whose keys the rank may forward.
    resent = _count_resent(_select_rows(keys, keys.source != keys.server), layout)
    spare_seconds = unchanged - seconds + load.cost.key_seconds * resent
    weight = np.maximum(spare_seconds, 0.0)[server] / np.bincount(server)[server]
    place = np.cumsum(mark_changes(unit)) - 1
    total = np.bincount(place, weights=weight)[place]
    weight = np.where(np.bincount(place)[place] > 1, np.where(total > 0, weight, 1.0), 0.0)
    runs = _divide_keys(unit, server, key_end, weight)
    if runs is None:
        return None
    run_unit, start, end, relay = runs
    return Relays(document[np.searchsorted(unit, run_unit)], start, end, relay, per_node)


def _divide_keys(
    unit: IntArray, server: IntArray, key_end: IntArray, weight: FloatArray
) -> tuple[IntArray, ...] | None:
    """Divide the keys of each unit into runs, one for each relay.

    Relays forward keys in proportion to their weights. But a relay forwards only keys that it needs
    itself, and servers of weight 0 forward nothing.

    Args:
        unit, server, key_end: one row for each server of each unit, with the keys [0, key_end) that
            the server needs. Rows are in order of unit and key_end.
        weight: weight of each server.

    Returns:
        Unit, start, end and relay of each run; None if there are no runs.
    """
    forwarding = np.flatnonzero(weight > 0)
    # For each `key_end`, count how often the keys before it are sent again after their first send.
    # From one `key_end` to the next, the count grows linearly.
    place = np.cumsum(mark_changes(unit)) - 1
    times = np.searchsorted(place, place, side="right") - 1 - np.arange(len(place))
    resent = _sum_running(place, times * (key_end - _shift_down(place, key_end)))
    # Points for interpolation: the positions and their counts. They are shifted, so that all units
    # form one increasing sequence.
    width, most = int(key_end.max()) + 1, float(resent.max()) + 1
    documents = np.arange(place[-1] + 1)
    rows = np.argsort(np.append(documents, place), kind="stable")
    positions = np.append(documents * width, place * width + key_end)[rows]
    amounts = np.append(documents * most, place * most + resent)[rows]
    # The second largest `key_end` of the unit. Only one server needs the keys after this position.
    second = key_end[np.searchsorted(place, place, side="right") - 2][forwarding]
    unit, server, key_end, place = (column[forwarding] for column in (unit, server, key_end, place))
    parts = _sum_running(place, weight[forwarding])
    last = np.searchsorted(place, place, side="right") - 1
    end = np.minimum(second, key_end[last])
    # Rounding makes this sum 0 if the weights of earlier units are much larger.
    total = np.maximum(parts[last], np.finfo(np.float64).tiny)
    resent_target = (np.interp(place * width + end, positions, amounts) - place * most) * (
        parts / total
    )
    run_end = (
        np.interp(place * most + resent_target, amounts, positions) - place * width + 0.5
    ).astype(np.int64)
    run_end = np.where(
        last == np.arange(len(place)), end, np.minimum(np.minimum(run_end, key_end), end)
    )
    run_end = np.maximum(run_end, _shift_down(place, run_end))
    run_start = _shift_down(place, run_end)
    runs = run_end > run_start
    columns = (unit, run_start, run_end, server)
    return tuple(column[runs] for column in columns) if runs.any() else None


def _shift_down(place: IntArray, values: IntArray) -> IntArray:
    """Return, for each row, the value of the row before it; 0 for the first row of a unit."""
    return np.where(mark_changes(place), 0, np.append(0, values)[:-1])


def _sum_running(place: IntArray, values: npt.NDArray[Any]) -> Any:
    """Return running sums of the values, which start again in each unit."""
    sums = np.cumsum(values)
    return sums - (sums - values)[np.searchsorted(place, place)]


def _count_resent(remote_keys: KeyTransfers, layout: Layout) -> FloatArray:
    """Count the K/V tokens that each rank sends again, after it has sent them once.

    A token with a fraction of the heads counts as this fraction of a token.
    """
    tokens = remote_keys.end - remote_keys.start
    order = np.lexsort((-tokens, remote_keys.start, remote_keys.document))
    resent = order[~mark_changes(remote_keys.document[order], remote_keys.start[order])]
    resent.sort()
    weights = (tokens * layout.compute_head_fractions(remote_keys.document))[resent]
    return np.bincount(
        remote_keys.source[resent], weights=weights, minlength=layout.world_size
    ).astype(np.float64)
