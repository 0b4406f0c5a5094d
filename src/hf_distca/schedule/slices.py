"""The cheapest slice of a piece: closed forms of a cost model, for `schedule.prices.Price`. All are compiled.

Query rows [x, y) of a document, moved to a server that holds none of its keys, exchange q * (y - x) + kv * y bytes and move
about p * (y**2 - x**2) / 2 seconds, with q and kv the bytes of a query and of a key token and p the seconds of a query-key
pair. For F seconds, with n = y - x rows, y = F / (p * n) + n / 2; the bytes q * n + kv * (F / (p * n) + n / 2) are least at
n = sqrt(F * kv / (p * (q + kv / 2))). Keys that the server holds anyway, as home of a part of the document or for a slice
that it already has, are free.

With a window of w keys, rows [x, y) from position w on take p * w * (y - x) seconds, wherever they lie, and moving them
exchanges q * (y - x) + kv * (y - x + w - 1) bytes: the keys of a window come on top once a slice, so the cheapest slice is
one long run, and at the end of its segment it leaves one run behind. Rows before position w see all that is before them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hf_distca.schedule.compiled import compiled

if TYPE_CHECKING:
    from hf_distca.schedule.prices import Price

__all__ = ["keys", "least_bytes", "most_seconds", "seconds", "slice_of", "start_for"]


@compiled
def seconds(price: Price, start: int, end: int) -> float:
    """Seconds of query rows [start, end), 0 if there are none."""
    rows = end - start
    if rows <= 0:
        return 0.0
    tiled = -(-rows // price.kernel_tile) * price.kernel_tile
    if price.window == 0:
        return price.task + price.key * end + tiled * (price.row + price.pair * (end - (rows - 1) / 2))
    # Rows that see a whole window, and those before them.
    full = min(max(end - price.window, 0), rows)
    rest = rows - full
    pairs = full * price.window + rest * (end - full - (rest - 1) / 2)
    read = min(end, rows + price.window - 1)
    return price.task + price.key * read + tiled * (price.row + price.pair * pairs / rows)


@compiled
def keys(price: Price, start: int, end: int, held: int) -> int:
    """Keys that query rows [start, end) need beyond the first `held` ones; with a window, those held are not looked at."""
    return max(end - held, 0) if price.window == 0 else end - max(start - price.window + 1, 0)


@compiled
def least_bytes(price: Price) -> float:
    """Fewest bytes exchanged for a moved query row."""
    return price.query_bytes if price.window == 0 else price.query_bytes + price.key_bytes


@compiled
def most_seconds(price: Price, end: int) -> float:
    """Most seconds that a query row before `end` takes, in slices of at least a tile."""
    if price.window == 0:
        return price.row + price.pair * end + (price.task + price.key * end) / price.tile
    seen = min(end, price.window)
    return price.row + price.pair * seen + (price.task + price.key * (seen + price.tile)) / price.tile


@compiled
def start_for(price: Price, end: int, want: float) -> float:
    """Start of the slice that ends at `end` and takes `want` seconds; below 0 if the document is too short."""
    window = price.window
    if window == 0 or end <= window:
        half = price.pair * (end + 0.5) + price.row
        left = max(want - price.task - price.key * end, 0.0)
        square = half * half - 2 * price.pair * left
        return end - 2 * left / (half + math.sqrt(square)) if square > 0 else -1.0
    start = end - max(want - price.task - price.key * (window - 1), 0.0) / (price.row + price.key + price.pair * window)
    if start >= window - 1:
        return start
    # Beyond the first `start` rows: what the document takes up to `end`, less row * start + pair * start**2 / 2.
    pairs = window * (window + 1) / 2 + (end - window) * window
    rest = price.task + (price.key + price.row) * end + price.pair * pairs - want
    half = price.row + price.pair / 2
    return (math.sqrt(half * half + 2 * price.pair * rest) - half) / price.pair if rest > 0 else -1.0


@compiled
def end_for(price: Price, start: int, want: float) -> float:
    """End of the slice that begins at `start` and takes `want` seconds, of rows that see all before them."""
    linear = 0.5 + (price.row + price.key) / price.pair
    right = 2 * (want - price.task + price.row * start) / price.pair + start * (start + 1.0)
    return math.sqrt(max(linear * linear + right, 0.0)) - linear


@compiled
def _end_of(price: Price, rows: float, want: float) -> float:
    """End of the slice that takes `want` seconds with `rows` rows that see all before them."""
    return (want - price.task - price.row * rows) / (price.key + rows * price.pair) + (rows - 1) / 2


@compiled
def _place(price: Price, start: int, end: int, tiles: int, want: float) -> tuple[int, int]:
    """Where in [start, end) a slice of so many tiles takes `want` seconds, or nearest to it.

    Rows come in tiles, and a tile of rows deep in a document takes long: shifting the slice is the finer adjustment.
    """
    tile, rows = price.tile, tiles * price.tile
    x = int((_end_of(price, rows, want) - rows) / tile + 0.5) * tile
    x = min(x, -(-(end - rows) // tile) * tile)
    if x <= start:
        return start, min((start + rows) // tile * tile, end)
    return x, min(x + rows, end)


@compiled
def _among_all(price: Price, start: int, end: int, want: float, most: float, held: int) -> tuple[int, int]:
    """`slice_of` rows that see all before them."""
    # The rows of the slice of so many seconds that exchanges the fewest bytes, wherever in a document that is.
    rows = math.sqrt(want * price.key_bytes / (price.pair * (price.query_bytes + price.key_bytes / 2)))
    y = _end_of(price, rows, want)
    # Keys that are there cost nothing: a later slice has fewer rows.
    last = min(end, held) if held > start and y <= held else end
    if y > last or y < held:
        rows = last - start_for(price, last, want)
    elif y - rows < start:
        rows = end_for(price, start, want) - start
    tiles = max(int(rows / price.tile + 0.5), 1)
    x, stop = _place(price, start, last, tiles, want)
    # Fewer rows lie deeper in the document, and may be too many seconds again by what tiles round up.
    while tiles > 1 and seconds(price, x, stop) > most:
        tiles -= 1
        x, stop = _place(price, start, last, tiles, want)
    return x, stop


@compiled
def _tail(price: Price, start: int, end: int, want: float, most: float) -> int:
    """Where the slice at the end of rows [start, end) begins that comes nearest to `want` seconds without passing `most`."""
    tile, last = price.tile, (end - 1) // price.tile * price.tile
    x = max(min(int(max(start_for(price, end, want), 0.0) / tile + 0.5) * tile, last), start)
    # At most a few: `start_for` does not know that rows count in whole kernel tiles.
    while x < last and seconds(price, x, end) > most:
        x = x // tile * tile + tile
    return x


@compiled
def _bytes_per_second(price: Price, start: int, end: int) -> float:
    moved = price.query_bytes * (end - start) + price.key_bytes * keys(price, start, end, 0)
    return moved / seconds(price, start, end)


@compiled
def slice_of(price: Price, start: int, end: int, want: float, most: float, held: int) -> tuple[int, int]:
    """The cheapest slice of rows [start, end) that takes about `want` seconds, for a server that holds `held` keys.

    Never more than `most` seconds, unless a single tile of rows takes more.
    """
    window = price.window
    if window == 0 or end <= window:
        return _among_all(price, start, end, want, most, held)
    x = _tail(price, start, end, want, most)
    head = window // price.tile * price.tile
    if head > start:
        first, stop = _among_all(price, start, head, want, most, held)
        if _bytes_per_second(price, first, stop) < _bytes_per_second(price, x, end):
            return first, stop
    return x, end
