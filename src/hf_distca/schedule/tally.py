"""What ranks compute and which query rows they exchange, added up in one pass over tasks. All of it is compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import array, column, entry, room
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.plan import Plan

__all__ = ["Tally"]


class _Tasks(NamedTuple):
    """Columns of a plan, and what part of the heads each task computes."""

    start: Any
    end: Any
    home: Any
    server: Any
    heads: Any


class _Rates(NamedTuple):
    """A cost model in numbers; a rate is here the seconds of one byte or flop."""

    window: int
    tile: int
    row_bytes: int
    key_bytes: int
    pair_flops: float
    forward: tuple[float, float, float]
    backward: tuple[float, float, float]


class Tally(NamedTuple):
    """Sums of every rank, in task order; columns of shape (ranks,).

    Attributes:
        seconds: forward plus backward seconds of its tasks on a rank of speed 1.
        sent, received: query rows that it sends as a home and receives as a server; of some of the heads they count in part.
    """

    seconds: Any
    sent: Any
    received: Any

    @classmethod
    def of(cls, plan: Plan, cost: CostModel) -> Tally:
        """Those of a plan under a cost model, whose window is the plan's."""
        shape, (one, other) = cost.shape, (cost.forward, cost.backward)
        rates = _Rates(
            window=cost.window or 0,
            tile=cost.tile,
            row_bytes=shape.query_bytes + shape.output_bytes,
            key_bytes=shape.key_value_bytes,
            pair_flops=float(shape.pair_flops),
            forward=(float(one.task_seconds), 1 / one.bytes_per_second, 1 / one.flops_per_second),
            backward=(float(other.task_seconds), 1 / other.bytes_per_second, 1 / other.flops_per_second),
        )
        ranks = plan.layout.world_size
        tally = cls(room(ranks, float), room(ranks, float), room(ranks, float))
        _add_up(_Tasks(*map(column, (plan.start, plan.end, plan.home, plan.server, plan.heads))), rates, tally)
        return cls(*(array(part, float) for part in tally))


@entry
def _add_up(tasks: _Tasks, rates: _Rates, tally: Tally) -> None:
    """`CostModel.seconds` of each task, in the same order of operations."""
    for row in range(len(tasks.start)):
        end, heads, server = tasks.end[row], tasks.heads[row], tasks.server[row]
        rows = end - tasks.start[row]
        tiled = -(-rows // rates.tile) * rates.tile
        if rates.window == 0:
            read, pairs = end, rows * (end - (rows - 1) / 2)
        else:
            # Rows that see a whole window, and those before them.
            full = min(max(end - rates.window, 0), rows)
            rest = rows - full
            read = min(end, rows + rates.window - 1)
            pairs = full * rates.window + rest * (end - full - (rest - 1) / 2)
        moved = (tiled * rates.row_bytes + read * rates.key_bytes) * heads
        flops = rates.pair_flops * pairs * (tiled / rows) * heads
        task, byte, flop = rates.forward
        seconds = task + moved * byte + flops * flop
        task, byte, flop = rates.backward
        tally.seconds[server] += seconds + (task + moved * 2.0 * byte + flops * 2.5 * flop)
        if tasks.home[row] != server:
            tally.sent[tasks.home[row]] += rows * heads
            tally.received[server] += rows * heads
