"""The cheapest slice of a segment: closed forms of a cost model.

Query rows [x, y) of a document, moved to a server that holds none of its keys, exchange q * (y - x) + kv * y bytes and move
about p * (y**2 - x**2) / 2 seconds, with q and kv the bytes of a query and of a key token and p the seconds of a query-key
pair. For F seconds, with n = y - x rows, y = F / (p * n) + n / 2; the bytes q * n + kv * (F / (p * n) + n / 2) are least at
n = sqrt(F * kv / (p * (q + kv / 2))). Keys that the server holds anyway, as home of a part of the document or for a slice
that it already has, are free. `windows.BandPrice` is the same for layers with a sliding window.

With a window of w keys, rows [x, y) from position w on take p * w * (y - x) seconds, wherever they lie, and moving them
exchanges q * (y - x) + kv * (y - x + w - 1) bytes: the keys of a window come on top once a slice, so the cheapest slice is
one long run, and at the end of its segment it leaves one run behind. Rows before position w see all that is before them,
and `Price` knows the cheapest slice of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from hf_distca.schedule.cost import CostModel

__all__ = ["BandPrice", "Price"]


@dataclass(frozen=True, slots=True)
class Price:
    """A cost model as scalars: seconds of a task, query row, key and query-key pair; bytes of a moved query and key token.

    `window` is the cost model's; this class prices tasks that see all keys before them. A byte inside a node counts as `near`.
    """

    task: float
    row: float
    key: float
    pair: float
    kernel_tile: int
    tile: int
    query_bytes: float
    key_bytes: float
    window: int | None
    near: float = 1.0

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
            near=cost.near,
        )

    def with_exchange(self, bytes_per_second: float) -> Self:
        """The prices of a server that receives what it computes, one after the other."""
        row, key = self.query_bytes / bytes_per_second, self.key_bytes / bytes_per_second
        return replace(self, row=self.row + row, key=self.key + key)

    def of_group(self, groups: int) -> Self:
        """The prices of one of so many head groups: a part of all but the task itself."""
        row, key, pair = self.row / groups, self.key / groups, self.pair / groups
        return replace(
            self, row=row, key=key, pair=pair, query_bytes=self.query_bytes / groups, key_bytes=self.key_bytes / groups
        )

    @property
    def least_bytes(self) -> float:
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


@dataclass(frozen=True, slots=True)
class BandPrice(Price):
    """A cost model with a window as scalars. Keys that a server holds are not looked at: all are paid for."""

    window: int

    @property
    def least_bytes(self) -> float:
        """Fewest bytes exchanged for a moved query row: it takes its own key along."""
        return self.query_bytes + self.key_bytes

    def most_seconds(self, end: int) -> float:
        """Most seconds that a query row before `end` takes, in slices of at least a tile."""
        keys = min(end, self.window)
        return self.row + self.pair * keys + (self.task + self.key * (keys + self.tile)) / self.tile

    def keys(self, start: int, end: int, held: int) -> int:
        """Keys that query rows [start, end) need."""
        return end - max(start - self.window + 1, 0)

    def seconds(self, start: int, end: int) -> float:
        """Seconds of query rows [start, end), 0 if there are none."""
        rows = end - start
        if rows <= 0:
            return 0.0
        tiled = -(-rows // self.kernel_tile) * self.kernel_tile
        # Rows that see a whole window, and those before them.
        full = min(max(end - self.window, 0), rows)
        rest = rows - full
        pairs = full * self.window + rest * (end - full - (rest - 1) / 2)
        return self.task + self.key * min(end, rows + self.window - 1) + tiled * (self.row + self.pair * pairs / rows)

    def start_for(self, end: int, want: float) -> float:
        """Start of the slice that ends at `end` and takes `want` seconds; below 0 if the document is too short."""
        window, pair = self.window, self.pair
        if end <= window:
            return Price.start_for(self, end, want)
        start = end - max(want - self.task - self.key * (window - 1), 0.0) / (self.row + self.key + pair * window)
        if start >= window - 1:
            return start
        # Beyond the first `start` rows: what the document takes up to `end`, less row * start + pair * start**2 / 2.
        pairs = window * (window + 1) / 2 + (end - window) * window
        rest = self.task + (self.key + self.row) * end + pair * pairs - want
        half = self.row + pair / 2
        return (math.sqrt(half * half + 2 * pair * rest) - half) / pair if rest > 0 else -1.0

    def slice(self, start: int, end: int, want: float, most: float, held: int) -> tuple[int, int]:
        """The cheapest slice of rows [start, end) that takes about `want` seconds, as `Price.slice` finds it.

        Never more than `most` seconds, unless a single tile of rows takes more.
        """
        if end <= self.window:
            return Price.slice(self, start, end, want, most, held)
        best = self.tail(start, end, want, most)
        head = self.window // self.tile * self.tile
        if head > start:
            among_first = Price.slice(self, start, head, want, most, held)
            if self.bytes_per_second(*among_first) < self.bytes_per_second(*best):
                return among_first
        return best

    def tail(self, start: int, end: int, want: float, most: float) -> tuple[int, int]:
        """The slice at the end of rows [start, end) that comes nearest to `want` seconds without passing `most`."""
        tile, last = self.tile, (end - 1) // self.tile * self.tile
        x = max(min(int(max(self.start_for(end, want), 0.0) / tile + 0.5) * tile, last), start)
        # At most a few: `start_for` does not know that rows count in whole kernel tiles.
        while x < last and self.seconds(x, end) > most:
            x = x // tile * tile + tile
        return x, end

    def bytes_per_second(self, start: int, end: int) -> float:
        """Bytes exchanged per second of work moved with rows [start, end)."""
        moved = self.query_bytes * (end - start) + self.key_bytes * self.keys(start, end, 0)
        return moved / self.seconds(start, end)
