"""Work and seconds of slices of documents. `count_task_work` takes many slices as arrays, or one
slice in the compiled loop that moves work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_distca.schedule.compiled import compile_function

if TYPE_CHECKING:
    from hf_distca.schedule.cost import MarginalCost  # `cost` imports this module


def count_task_work(rows: Any, keys: Any, tile: int, window: int) -> tuple[Any, Any]:
    """Count the keys that tasks read, and the query-key pairs that they compute.

    Pairs are counted in whole kernel tiles, so a row also counts the keys of its tile that come
    after the row. `rows`, `keys` and the results are numbers for one task, or arrays for several.

    Args:
        rows: number of query rows.
        keys: document position after the last row. The last row sees all keys before this
            position, or the last `window` of them.
        tile: rows of a kernel tile.
        window: keys that a row sees, its own included; 2**62 for all.
    """
    tiled = -(-rows // tile) * tile
    # `full` rows see a whole window, and the `rest` before them see all keys up to their own.
    # `numpy.maximum` is avoided, because numba takes long to compile it for scalars.
    rest = rows - (keys - window) * (keys > window)
    rest = rest * (rest > 0)
    full = rows - rest
    unseen = keys - rows - (window - 1)
    pairs = 1.0 * full * window + rest * (keys - full - (rest - 1) / 2)
    return keys - unseen * (unseen > 0), pairs * (tiled / (rows + (rows == 0))) + tiled * (
        tile - 1
    ) / 2


_count_task_work = compile_function(count_task_work)


@compile_function
def estimate_slice_seconds(marginal: MarginalCost, heads: float, start: int, end: int) -> float:
    """Return the seconds of query rows [start, end) of a document, 0 if there are none."""
    if start >= end:
        return 0.0
    read, pairs = _count_task_work(end - start, end, marginal.tile, marginal.window)
    return float(
        marginal.task
        + heads * (marginal.row * (end - start) + marginal.key * read + marginal.pair * pairs)
    )
