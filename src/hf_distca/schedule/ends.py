"""When ranks end that compute and exchange, where all links are alike. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.compiled import Floats, array, column, entry, space
from hf_distca.schedule.cost import CostModel, FloatArray

__all__ = ["EXCHANGES_PER_LAYER", "RELAY_EXCHANGES", "Ends", "Link", "ends_of"]

# Dispatch and return, forward and backward: what a rank that exchanges anything waits for at least.
EXCHANGES_PER_LAYER = 4
# With relays: dispatch a second time, forward and backward, and gradients of keys to relays.
RELAY_EXCHANGES = 3


class Link(NamedTuple):
    """What exchanges take.

    Attributes:
        query_bytes, key_bytes: of a moved query and key token.
        bytes_per_second: of a rank, each way.
        exchange_seconds: of one exchange, however little travels.
        exchanges: of a layer.
        overlapped: whether ranks compute meanwhile.
    """

    query_bytes: int
    key_bytes: int
    bytes_per_second: float
    exchange_seconds: float
    exchanges: int
    overlapped: bool

    @classmethod
    def of(cls, cost: CostModel, exchanges: int, overlapped: bool) -> Link:
        """That of a cost model, with so many exchanges a layer."""
        shape, rate, fixed = cost.shape, float(cost.exchange_bytes_per_second), float(cost.exchange_seconds)
        return cls(shape.moved_query_bytes, shape.moved_key_bytes, rate, fixed, exchanges, overlapped)


class Ends(NamedTuple):
    """Seconds of ranks.

    Attributes:
        wire: that each sends and receives, without the fixed part of exchanges: shape (2, ranks).
        exchange: the busier of its two roles, with the fixed part: shape (ranks,).
        slowest: of the slowest rank, compute plus exchange, or the longer of both, if overlapped.
    """

    wire: FloatArray
    exchange: FloatArray
    slowest: float

    @classmethod
    def of(cls, compute: FloatArray, queries: FloatArray, keys: FloatArray, link: Link) -> Ends:
        """From the seconds that each rank computes, and the query and key tokens that it sends and receives: (2, ranks)."""
        ranks = len(compute)
        found = space(3 * ranks, float)
        slowest = ends_of(column(compute), column(queries.reshape(-1)), column(keys.reshape(-1)), link, found)
        rows = array(found, float).reshape(3, ranks)
        return cls(rows[:2], rows[2], slowest)


@entry
def ends_of(compute: Floats, queries: Floats, keys: Floats, link: Link, found: Floats) -> float:
    """Fill wire and exchange in, one after another; the slowest rank."""
    ranks, slowest, fixed = len(compute), 0.0, link.exchanges * link.exchange_seconds
    for at in range(2 * ranks):
        found[at] = (queries[at] * link.query_bytes + keys[at] * link.key_bytes) / link.bytes_per_second
    for rank in range(ranks):
        exchange = max(found[rank], found[ranks + rank]) + fixed
        found[2 * ranks + rank] = exchange
        slowest = max(slowest, max(compute[rank], exchange) if link.overlapped else compute[rank] + exchange)
    return slowest
