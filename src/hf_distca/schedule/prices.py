"""A cost model as scalars, for loops that price one slice after another."""

from __future__ import annotations

from typing import NamedTuple, Self

from hf_distca.schedule import slices
from hf_distca.schedule.compiled import interpreted
from hf_distca.schedule.cost import CostModel

__all__ = ["Price"]

_seconds, _keys = interpreted(slices.seconds), interpreted(slices.keys)
_least_bytes, _most_seconds = interpreted(slices.least_bytes), interpreted(slices.most_seconds)


class Price(NamedTuple):
    """Seconds of a task, query row, key and query-key pair, forward and backward; bytes of a moved query and key token.

    `window` is the cost model's, 0 where it has none. A byte inside a node counts as `near`. Documents are cut at multiples of
    `tile`; `kernel_tile` is the cost model's.
    """

    task: float
    row: float
    key: float
    pair: float
    kernel_tile: int
    tile: int
    query_bytes: float
    key_bytes: float
    window: int
    near: float = 1.0

    @classmethod
    def of(cls, cost: CostModel, tile: int) -> Self:
        """Prices of a cost model for documents cut at multiples of `tile`."""
        shape, forward, backward = cost.shape, cost.forward, cost.backward
        # Backward reads and writes about twice the bytes of forward and computes 2.5 times as much, as in `CostModel`.
        byte = 1 / forward.bytes_per_second + 2 / backward.bytes_per_second
        flop = 1 / forward.flops_per_second + 2.5 / backward.flops_per_second
        return cls(
            task=float(forward.task_seconds + backward.task_seconds),
            row=float(byte * (shape.query_bytes + shape.output_bytes)),
            key=float(byte * shape.key_value_bytes),
            pair=float(flop * shape.pair_flops),
            kernel_tile=cost.tile,
            tile=tile,
            query_bytes=float(shape.moved_query_bytes),
            key_bytes=float(shape.moved_key_bytes),
            window=cost.window or 0,
            near=float(cost.near),
        )

    def with_exchange(self, bytes_per_second: float) -> Self:
        """The prices of a server that receives what it computes, one after the other."""
        row, key = self.query_bytes / bytes_per_second, self.key_bytes / bytes_per_second
        return self._replace(row=self.row + row, key=self.key + key)

    @property
    def least_bytes(self) -> float:
        """Fewest bytes exchanged for a moved query row: those of the row alone, where the server holds its keys.

        With a window it takes its own key along.
        """
        return _least_bytes(self)

    def most_seconds(self, end: int) -> float:
        """Most seconds that a query row before `end` takes, in slices of at least a tile."""
        return _most_seconds(self, end)

    def keys(self, start: int, end: int, held: int) -> int:
        """Keys that query rows [start, end) need beyond the first `held` ones. With a window, those held are not looked at."""
        return _keys(self, start, end, held)

    def seconds(self, start: int, end: int) -> float:
        """Seconds of query rows [start, end), 0 if there are none."""
        return _seconds(self, start, end)
