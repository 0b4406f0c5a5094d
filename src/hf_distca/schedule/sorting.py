"""Orders of rows by what their columns say. All of it is compiled."""

from __future__ import annotations

from typing import Any

from hf_distca.schedule.compiled import Ints, compiled

__all__ = ["DOWN", "UP", "sort", "sort_in_groups"]

# Least first, or most first.
UP, DOWN = 1, -1


@compiled
def sort(order: Ints, scratch: Ints, first: Any, second: Any, way: int) -> None:
    """Sort rows 0, 1, ...: runs that are in order already are merged two by two. Rows that are equal stay in their order.

    Args:
        order: for the result.
        scratch: room for as many.
        first, second: columns to sort by, the first one up or down.
        way: `UP` or `DOWN`.
    """
    for row in range(len(order)):
        order[row] = row
    _merge(order, scratch, first, second, way)


@compiled
def sort_in_groups(order: Ints, scratch: Ints, ends: Ints, first: Any, second: Any, width: int) -> None:
    """Sort rows 0, 1, ..., least first, as `sort` does: sooner where they come in no order, and few of them in each group.

    Args:
        order, scratch, first, second: as for `sort`.
        ends: room for an integer of each group.
        width: row r is in group ``first[r] // width``.
    """
    for group in range(len(ends)):
        ends[group] = 0
    for row in range(len(order)):
        ends[first[row] // width] += 1
    begin = 0
    for group in range(len(ends)):
        ends[group], begin = begin, begin + ends[group]
    for row in range(len(order)):
        group = first[row] // width
        order[ends[group]] = row
        ends[group] += 1
    begin = 0
    for end in ends:
        if end > begin + 1:
            _merge(order[begin:end], scratch[begin:end], first, second, UP)
        begin = end


@compiled
def _merge(order: Ints, scratch: Ints, first: Any, second: Any, way: int) -> None:
    """Sort rows that come in some order."""
    count = len(order)
    while True:
        runs, begin = 0, 0
        while begin < count:
            middle = _end_of_run(order, begin, first, second, way)
            end = _end_of_run(order, middle, first, second, way)
            one, other = begin, middle
            for at in range(begin, end):
                if other == end or (one < middle and not _before(order[other], order[one], first, second, way)):
                    scratch[at] = order[one]
                    one += 1
                else:
                    scratch[at] = order[other]
                    other += 1
            runs, begin = runs + 1, end
        for at in range(count):
            order[at] = scratch[at]
        if runs <= 1:
            return


@compiled
def _end_of_run(order: Ints, begin: int, first: Any, second: Any, way: int) -> int:
    """The first place from one on at which rows are no longer in order."""
    if begin < len(order):
        begin += 1
    while begin < len(order) and not _before(order[begin], order[begin - 1], first, second, way):
        begin += 1
    return begin


@compiled
def _before(one: int, other: int, first: Any, second: Any, way: int) -> bool:
    return (way * first[one], second[one]) < (way * first[other], second[other])
