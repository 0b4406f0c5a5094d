"""The cheapest slice of a segment: closed forms of a cost model.

Query rows [x, y) of a document, moved to a server that holds none of its keys, exchange q * (y - x) + kv * y bytes and move
about p * (y**2 - x**2) / 2 seconds, with q and kv the bytes of a query and of a key token and p the seconds of a query-key
pair. For F seconds, with n = y - x rows, y = F / (p * n) + n / 2; the bytes q * n + kv * (F / (p * n) + n / 2) are least at
n = sqrt(F * kv / (p * (q + kv / 2))). Keys that the server holds anyway, as home of a part of the document or for a slice
that it already has, are free. `windows.BandPrice` is the same for layers with a sliding window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from hf_distca.schedule.cost import CostModel

__all__ = ["Price"]


@dataclass(frozen=True, slots=True)
class Price:
    """A cost model as scalars: seconds of a task, query row, key and query-key pair; bytes of a moved query and key token.

    `window` is the cost model's; this class prices tasks that see all keys before them.
    """

    task: float
    row: float
    key: float
    pair: float
    kernel_tile: int
    tile: int
    query_bytes: int
    key_bytes: int
    window: int | None

    @classmethod
    def of(cls, cost: CostModel, tile: int) -> Self:
        """Prices of a cost model for documents cut at multiples of `tile`."""
        shape, forward, backward = cost.shape, cost.forward, cost.backward
        # Backward reads and writes about twice the bytes of forward and computes 2.5 times as much, as in `CostModel`.
        byte = 1 / forward.bytes_per_second + 2 / backward.bytes_per_second
        flop = 1 / forward.flops_per_second + 2.5 / backward.flops_per_second
        return cls(
            task=forward.task_seconds + backward.task_seconds,
            row=byte * (shape.query_bytes + shape.output_bytes),
            key=byte * shape.key_value_bytes,
            pair=flop * shape.pair_flops,
            kernel_tile=cost.tile,
            tile=tile,
            query_bytes=shape.moved_query_bytes,
            key_bytes=shape.moved_key_bytes,
            window=cost.window,
        )

    @property
    def least_bytes(self) -> int:
        """Fewest bytes exchanged for a moved query row: those of the row alone, where the server holds its keys."""
        return self.query_bytes

    def most_seconds(self, end: int) -> float:
        """Most seconds that a query row before `end` takes, in slices of at least a tile."""
        return self.row + self.pair * end + (self.task + self.key * end) / self.tile

    def keys(self, start: int, end: int, held: int) -> int:
        """Keys that query rows [start, end) need beyond the first `held` ones."""
        return max(end - held, 0)

    def seconds(self, start: int, end: int) -> float:
        """Seconds of query rows [start, end), 0 if there are none."""
        rows = end - start
        if rows <= 0:
            return 0.0
        tiled = -(-rows // self.kernel_tile) * self.kernel_tile
        return self.task + self.key * end + tiled * (self.row + self.pair * (end - (rows - 1) / 2))

    def start_for(self, end: int, want: float) -> float:
        """Start of the slice that ends at `end` and takes `want` seconds; below 0 if the document is too short."""
        half = self.pair * (end + 0.5) + self.row
        seconds = max(want - self.task - self.key * end, 0.0)
        square = half * half - 2 * self.pair * seconds
        return end - 2 * seconds / (half + math.sqrt(square)) if square > 0 else -1.0

    def end_for(self, start: int, want: float) -> float:
        """End of the slice that begins at `start` and takes `want` seconds."""
        linear = 0.5 + (self.row + self.key) / self.pair
        right = 2 * (want - self.task + self.row * start) / self.pair + start * (start + 1.0)
        return math.sqrt(max(linear * linear + right, 0.0)) - linear

    def slice(self, start: int, end: int, want: float, most: float, held: int) -> tuple[int, int]:
        """The cheapest slice of rows [start, end) that takes about `want` seconds, for a server that holds `held` keys.

        Never more than `most` seconds, unless a single tile of rows takes more.
        """
        rows = self.cheapest_rows(want)
        y = self.end_of(rows, want)
        # Keys that are there cost nothing: a later slice has fewer rows.
        last = min(end, held) if held > start and y <= held else end
        if y > last or y < held:
            rows = last - self.start_for(last, want)
        elif y - rows < start:
            rows = self.end_for(start, want) - start
        tiles = max(int(rows / self.tile + 0.5), 1)
        x, y = self.place(start, last, tiles, want)
        if tiles > 1 and self.seconds(x, y) > most:
            x, y = self.place(start, last, tiles - 1, want)
        return x, y

    def cheapest_rows(self, want: float) -> float:
        """Rows of the slice of `want` seconds that exchanges the fewest bytes, wherever in a document that is."""
        return math.sqrt(want * self.key_bytes / (self.pair * (self.query_bytes + self.key_bytes / 2)))

    def end_of(self, rows: float, want: float) -> float:
        """End of the slice that takes `want` seconds with `rows` rows."""
        return (want - self.task - self.row * rows) / (self.key + rows * self.pair) + (rows - 1) / 2

    def place(self, start: int, end: int, tiles: int, want: float) -> tuple[int, int]:
        """Where in [start, end) a slice of so many tiles takes `want` seconds, or nearest to it.

        Rows come in tiles, and a tile of rows deep in a document takes long: shifting the slice is the finer adjustment.
        """
        tile, rows = self.tile, tiles * self.tile
        x = int((self.end_of(rows, want) - rows) / tile + 0.5) * tile
        x = min(x, -(-(end - rows) // tile) * tile)
        return (start, min((start + rows) // tile * tile, end)) if x <= start else (x, min(x + rows, end))
