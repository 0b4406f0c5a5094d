"""What ranks compute and exchange under a plan. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.compiled import Floats, Ints, array, compiled, entry, handed, room
from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.index import Segments, Tasks
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.traffic import Gathered, count_tokens, gather, unpacked

__all__ = ["Rates", "Tally", "measure"]


class Rates(NamedTuple):
    """A cost model in numbers; a rate is here the seconds of one byte or flop."""

    window: int
    tile: int
    row_bytes: int
    key_bytes: int
    pair_flops: float
    forward: tuple[float, float, float]
    backward: tuple[float, float, float]

    @classmethod
    def of(cls, cost: CostModel) -> Rates:
        """Those of a cost model."""
        shape, (one, other) = cost.shape, (cost.forward, cost.backward)
        return cls(
            window=cost.window or 0,
            tile=cost.tile,
            row_bytes=shape.query_bytes + shape.output_bytes,
            key_bytes=shape.key_value_bytes,
            pair_flops=float(shape.pair_flops),
            forward=(float(one.task_seconds), 1 / one.bytes_per_second, 1 / one.flops_per_second),
            backward=(float(other.task_seconds), 1 / other.bytes_per_second, 1 / other.flops_per_second),
        )


class Tally(NamedTuple):
    """Sums of every rank, in task order. Queries and keys of some of the heads count in part.

    Attributes:
        seconds: forward plus backward seconds of its tasks on a rank of speed 1: shape (ranks,).
        queries: query rows that it sends as a home, and that it receives as a server: shape (2, ranks).
        keys: the same of K/V tokens, if nobody passes any on. Only of plans without a window.
        traffic: who needs how many keys; as `keys`.
    """

    seconds: FloatArray
    queries: FloatArray
    keys: FloatArray
    traffic: Gathered

    @classmethod
    def of(cls, plan: Plan, cost: CostModel) -> Tally:
        """Those of a plan under a cost model, whose window is the plan's."""
        layout, traffic = plan.layout, Gathered.room(plan)
        sums = room(5 * layout.world_size, float)
        measure(layout.columns, plan.columns, layout.groups, Rates.of(cost), sums, handed(traffic), room(2 * layout.world_size))
        rows = array(sums, float).reshape(5, -1)
        return cls(rows[0], rows[1:3], rows[3:], traffic)


@entry
def measure(segments: Segments, tasks: Tasks, groups: int, rates: Rates, sums: Floats, traffic: Gathered, scratch: Ints) -> None:
    """Add all up. `sums` are seconds, queries and keys of a `Tally`; `scratch` is zeros, two for each rank."""
    ranks = len(sums) // 5
    _add_tasks(tasks, groups, rates, (sums[:ranks], sums[ranks : 2 * ranks], sums[2 * ranks : 3 * ranks]))
    if rates.window == 0:
        gather(segments, tasks, groups, traffic, scratch)
        count_tokens(unpacked(traffic), sums[3 * ranks : 4 * ranks], sums[4 * ranks :])


@compiled
def _add_tasks(tasks: Tasks, groups: int, rates: Rates, sums: tuple[Floats, Floats, Floats]) -> None:
    """`CostModel.seconds` of each task, in the same order of operations, and what rows are moved."""
    taken, sent, received = sums
    for row in range(len(tasks.start)):
        end, server = tasks.end[row], tasks.server[row]
        heads = 1.0 if groups == 1 or tasks.document[row] % (groups + 1) == 0 else 1.0 / groups
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
        taken[server] += seconds + (task + moved * 2.0 * byte + flops * 2.5 * flop)
        if tasks.home[row] != server:
            sent[tasks.home[row]] += rows * heads
            received[server] += rows * heads
