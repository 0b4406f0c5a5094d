"""The cheapest slice of a segment in layers with a sliding window.

With a window of w keys, rows [x, y) from position w on take p * w * (y - x) seconds, wherever they lie, and moving them
exchanges q * (y - x) + kv * (y - x + w - 1) bytes: the keys of a window come on top once a slice, so the cheapest slice is
one long run, and at the end of its segment it leaves one run behind. Rows before position w see all that is before them,
and `slices.Price` knows the cheapest slice of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hf_distca.schedule.slices import Price

__all__ = ["BandPrice"]


@dataclass(frozen=True, slots=True)
class BandPrice(Price):
    """A cost model with a window as scalars. Keys that a server holds are not looked at: all are paid for."""

    window: int

    @property
    def least_bytes(self) -> int:
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
