"""When ranks end under tasks that are no `Plan` yet, with keys passed on where that gains something. All of it is compiled.

It is what `PlanLoad` and `relieve` find of the plan, to the last digit, where ranks are in no nodes, and there is neither a
window nor a bound of transient bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from hf_distca.schedule.compiled import Floats, Ints, compiled, interpreted
from hf_distca.schedule.ends import EXCHANGES_PER_LAYER, RELAY_EXCHANGES, Link, ends_of
from hf_distca.schedule.passing import Senders, pass_on, room_for
from hf_distca.schedule.tally import Rates, measure
from hf_distca.schedule.traffic import Gathered, numbers_for

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.index import Segments, Tasks
    from hf_distca.schedule.layout import Layout

__all__ = ["Scale", "late_from", "may_gain", "pays", "room_to_weigh", "weigh"]

# How much earlier the slowest rank must be for keys to be passed on, as a part of its seconds.
_GAIN = 0.005


class Scale(NamedTuple):
    """How tasks are weighed.

    Attributes:
        rates, link: what tasks and exchanges take.
        groups: head groups of the layout, before any document is split.
        scattered: of the layout.
        relayed: whether servers may pass keys on.
        least: part of the seconds of the slowest rank that passing keys on has to gain at least.
        weighs: whether anything is weighed at all.
    """

    rates: Rates
    link: Link
    groups: int
    scattered: bool
    relayed: bool
    least: float
    weighs: bool

    @classmethod
    def of(cls, layout: Layout, cost: CostModel, *, overlapped: bool, relayed: bool, weighs: bool = True) -> Self:
        """That of a cost model, for plans of a layout."""
        link = Link.of(cost, EXCHANGES_PER_LAYER, overlapped)
        return cls(Rates.of(cost), link, layout.groups, layout.scattered, relayed, 0.0, weighs)


@compiled
def may_gain(ranks: int, slowest: float, compute: float, overlapped: bool) -> bool:
    """Whether passing keys on may make the slowest rank earlier, where the one that computes most does it for so long."""
    return ranks > 2 and not (overlapped and slowest <= compute)


@compiled
def late_from(slowest: float) -> float:
    """The seconds from which a rank is too late for passing keys on to pay."""
    return slowest * (1 - _GAIN)


@compiled
def pays(slowest: float, relieved: float, least: float) -> bool:
    """Whether passing keys on makes the slowest rank early enough."""
    return relieved < slowest * (1 - _GAIN) and slowest - relieved >= least * slowest


def room_to_weigh(tasks: int, segments: int, ranks: int) -> tuple[int, int, int]:
    """How many runs are passed on at most, and how many integers and floats `weigh` needs room for.

    Args:
        tasks, segments: rows at most, of which each head group counts. There are no more documents than segments.
        ranks: number of ranks.
    """
    runs, integers, floats = room_for(segments, segments, tasks, ranks)
    return runs, interpreted(numbers_for)(segments, segments, tasks) + 6 + 2 * ranks + integers, 13 * ranks + segments + floats


@compiled
def weigh(
    segments: Segments,
    tasks: Tasks,
    groups: int,
    speed: Floats,
    scale: Scale,
    passed: Ints,
    room: tuple[Ints, Floats],
    most: int,
) -> tuple[int, float, float]:
    """Add up what ranks do, see when they end, and whether passing keys on makes the last of them earlier.

    Args:
        segments: of the layout before documents are split by heads.
        tasks: in order of document and start; documents are numbered as after that, places are those before.
        groups: head groups that documents are split in; 1 if none is.
        speed: of each rank.
        scale: how they are weighed.
        passed: room for columns of what is passed on, as `pass_on` fills them in.
        room: as much as `room_to_weigh` says. The floats begin with the seconds that each rank computes and exchanges.
        most: documents, segments and head groups of them at most.

    Returns:
        How many runs are passed on, when the slowest rank ends, and how long the one that computes most does it.
    """
    ranks, (numbers, floats) = len(speed), room
    compute, exchange, floats = floats[:ranks], floats[ranks : 2 * ranks], floats[2 * ranks :]
    sums, ends, floats = floats[: 5 * ranks], floats[5 * ranks : 8 * ranks], floats[8 * ranks :]
    later, heads, floats = floats[: 3 * ranks], floats[3 * ranks : 3 * ranks + most], floats[3 * ranks + most :]
    sizes, scratch, numbers = numbers[:6], numbers[6 : 6 + 2 * ranks], numbers[6 + 2 * ranks :]
    size = numbers_for(most, most, len(tasks.start))
    gathered, numbers = Gathered(numbers[:size], heads, sizes), numbers[size:]
    sizes[0], sizes[1], sizes[2] = most, most, len(tasks.start)
    for at in range(5 * ranks):
        sums[at] = 0.0
    for at in range(2 * ranks):
        scratch[at] = 0
    measure(segments, tasks, groups, scale.rates, sums, gathered, scratch)
    largest = 0.0
    for rank in range(ranks):
        compute[rank], exchange[rank] = sums[rank] / speed[rank], 0.0
        largest = max(largest, compute[rank])
    moved = scale.scattered
    for row in range(len(tasks.home)):
        moved = moved or tasks.home[row] != tasks.server[row]
    if not moved:
        return 0, largest, largest
    queries, keys = sums[ranks : 3 * ranks], sums[3 * ranks :]
    slowest = ends_of(compute, queries, keys, scale.link, ends)
    runs = 0
    if scale.relayed and may_gain(ranks, slowest, largest, scale.link.overlapped):
        sides = (compute, queries, keys, ends)
        runs, slowest = _relieved(gathered, sides, scale, slowest, passed, (numbers, floats), later)
    for rank in range(ranks):
        exchange[rank] = later[2 * ranks + rank] if runs else ends[2 * ranks + rank]
    return runs, slowest, largest


@compiled
def _relieved(
    gathered: Gathered,
    sides: tuple[Floats, Floats, Floats, Floats],
    scale: Scale,
    slowest: float,
    passed: Ints,
    room: tuple[Ints, Floats],
    later: Floats,
) -> tuple[int, float]:
    """Pass keys on if that pays: how many runs, and when the slowest rank ends then.

    `sides` are the seconds that ranks compute, the queries and keys that they send and receive, and when they end, as `ends_of`
    says; `later` is when they do with what is passed on. The keys that are sent are those of the latter then.
    """
    (compute, queries, keys, ends), link, ranks = sides, scale.link, len(sides[0])
    each = link.key_bytes / link.bytes_per_second
    sent, received, tokens = ends[:ranks], ends[ranks : 2 * ranks], keys[:ranks]
    senders = Senders(compute, sent, received, tokens, each, link.overlapped, late_from(slowest))
    runs = pass_on(gathered, senders, passed, room[0], room[1])
    if not runs:
        return 0, slowest
    for rank in range(ranks):
        tokens[rank] = room[1][rank]
    relieved = ends_of(compute, queries, keys, _with_relays(link), later)
    return (runs, relieved) if pays(slowest, relieved, scale.least) else (0, slowest)


@compiled
def _with_relays(link: Link) -> Link:
    exchanges = link.exchanges + RELAY_EXCHANGES
    return Link(link.query_bytes, link.key_bytes, link.bytes_per_second, link.exchange_seconds, exchanges, link.overlapped)
