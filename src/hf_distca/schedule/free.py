"""Who has how much to do: ranks that may take work, and the heaviest. All of it is compiled."""

from __future__ import annotations

from hf_distca.schedule.compiled import Floats, Ints, compiled
from hf_distca.schedule.state import CAP, FLOOR, FREE, LOW, MEAN, Servers

__all__ = ["change", "drop", "nearest", "server_for", "settle"]


@compiled
def _heavier(work: Floats, one: int, other: int) -> bool:
    return (-work[one], one) < (-work[other], other)


@compiled
def settle(work: Floats, heaviest: Ints, rank: int) -> None:
    """Bring a rank whose work has changed to its place among the heaviest."""
    at = 0
    while heaviest[at] != rank:
        at += 1
    while at > 0 and _heavier(work, rank, heaviest[at - 1]):
        heaviest[at] = heaviest[at - 1]
        at -= 1
    while at + 1 < len(heaviest) and _heavier(work, heaviest[at + 1], rank):
        heaviest[at] = heaviest[at + 1]
        at += 1
    heaviest[at] = rank


@compiled
def _free_at(servers: Servers, work: float, rank: int) -> int:
    """Where in `free` a rank with so much work stands, or would stand."""
    low, high = 0, servers.counts[FREE]
    while low < high:
        middle = (low + high) // 2
        other = servers.free[middle]
        if servers.work[other] < work or (servers.work[other] == work and other < rank):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def drop(servers: Servers, rank: int) -> None:
    """Take a rank out of `free`, if it is there."""
    at = _free_at(servers, servers.work[rank], rank)
    if at < servers.counts[FREE] and servers.free[at] == rank:
        servers.counts[FREE] -= 1
        for place in range(at, servers.counts[FREE]):
            servers.free[place] = servers.free[place + 1]


@compiled
def change(servers: Servers, rank: int, moved: float) -> None:
    """A rank has so many seconds of work more."""
    drop(servers, rank)
    servers.work[rank] += moved / servers.speed[rank]
    if servers.work[rank] < servers.level[MEAN]:
        at = _free_at(servers, servers.work[rank], rank)
        for place in range(servers.counts[FREE], at, -1):
            servers.free[place] = servers.free[place - 1]
        servers.free[at] = rank
        servers.counts[FREE] += 1


@compiled
def server_for(servers: Servers, surplus: float) -> int:
    """A server that the surplus fits exactly, or else the emptiest."""
    work, speed, level = servers.work, servers.speed, servers.level
    emptiest = servers.free[0]
    if (level[LOW] - work[emptiest]) * speed[emptiest] > surplus:
        at = _free_at(servers, level[FLOOR] - surplus, 0)
        if at < servers.counts[FREE]:
            fits = servers.free[at]
            if work[fits] + surplus / speed[fits] <= level[CAP]:
                return fits
    return emptiest


@compiled
def nearest(servers: Servers, per_node: int, source: int, but: int) -> int:
    """The emptiest server in the node of the source, if it may take work; -1 if not, or if nodes do not matter."""
    best = -1
    first = source // max(per_node, 1) * per_node
    for rank in range(first, first + per_node):
        if rank != but and servers.work[rank] < servers.level[FLOOR] and (best < 0 or servers.work[rank] < servers.work[best]):
            best = rank
    return best
