"""Find which tokens a token sees under a mask function of transformers. The answer is read from the
functions of which the mask function is composed, and from their closures. No dense mask is made,
and no tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_distca.borrowed import (
    BOTH_WAYS_MASK_PARTS,
    CAUSAL_MASK_PARTS,
    MASK_BLOCKS,
    MASK_BOTH_WAYS,
    MASK_BOTH_WAYS_WINDOW,
    MASK_CHUNKS,
    MASK_UNION,
    MASK_WINDOW,
)
from hf_distca.integration.seen_ahead import Ahead

_BLOCKS = "a union with blocks"


def read_mask(
    function: Callable[..., Any], local_size: int | None, *, use_vmap: bool
) -> tuple[int | None, int | None, Ahead | None] | str:
    """Find which tokens of its document a token sees under a mask function.

    Args:
        function: the mask function.
        local_size: number of tokens of the window or chunk, as the caller of the mask gives it.
        use_vmap: whether the model adds its own mask functions.

    Returns:
        The window, the chunk, and which later tokens a token sees. If distca does not compute the
        mask, a text that names the unsupported features.
    """
    functions = _list_functions(function)
    parts = dict(functions)
    overlays = [found for name, found in functions if name == _BLOCKS] if _BLOCKS in parts else []
    both_ways = MASK_BOTH_WAYS in parts
    known = BOTH_WAYS_MASK_PARTS if both_ways else CAUSAL_MASK_PARTS | {_BLOCKS}
    foreign = sorted(parts.keys() - known)
    has_chunks = MASK_CHUNKS in parts
    if foreign or (use_vmap and not overlays) or len(overlays) + has_chunks > 1:
        return ", ".join(foreign) or "a custom mask function"
    if has_chunks:
        return None, local_size, None
    if both_ways:
        two_way = parts.get(MASK_BOTH_WAYS_WINDOW)
        return two_way and two_way["sliding_window"] + 1, None, Ahead()
    if not overlays:
        return local_size, None, None
    windows = [found["sliding_window"] for name, found in functions if name == MASK_WINDOW]
    return min(windows, default=local_size), None, overlays[0]


def _list_functions(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """List the functions of which a mask function is composed, each by its name and the variables
    of its closure. A function that adds blocks to a mask is listed with the name `_BLOCKS`, and
    with an `Ahead` instead of variables.
    """
    name = _get_name(function)
    if not getattr(function, "__closure__", None):
        return [(name, {})]
    closure: Any = _read_closure(function)
    parts = [
        part
        for value in closure.values()
        for part in (value if isinstance(value, (tuple, list)) else (value,))
        if callable(part)
    ]
    if name == MASK_UNION:
        blocks = [part for part in parts if _get_name(part) == MASK_BLOCKS]
        if len(blocks) == 1 and len(parts) == 2:
            parts.remove(blocks[0])
            ids = _read_closure(blocks[0])["block_sequence_ids"]
            name, closure = _BLOCKS, Ahead(ids, MASK_WINDOW in dict(_list_functions(parts[0])))
    return [(name, closure), *[found for part in parts for found in _list_functions(part)]]


def _read_closure(function: Any) -> dict[str, Any]:
    """Return the variables in the closure of a function, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell.cell_contents for name, cell in cells}


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__).split(".")[0]
