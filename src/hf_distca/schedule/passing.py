"""Which servers pass on which keys of a document, and how many: the loop behind `schedule.relief`. All of it is compiled.

Documents follow one another, for what a relay passes on counts for the next document.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import compiled, entry

__all__ = ["Needs", "pass_on"]


class Needs(NamedTuple):
    """Which keys of which documents servers need, in three lists of rows, each by document.

    Attributes:
        start, end, source: runs that are sent, those of a document in order of their start; from `sends[d]` to `sends[d + 1]`.
        rank, reach: ranks that can pass keys on and how many from position 0 on, those with the fewest first; from `able[d]`.
        position, more: positions up to the last key that two ranks need; and of the keys before each how many are sent beyond
            the first time, which grows evenly in between. From `steps[d]`.
        each: seconds of sending one key of each document.
    """

    start: Any
    end: Any
    source: Any
    sends: Any
    rank: Any
    reach: Any
    able: Any
    position: Any
    more: Any
    steps: Any
    each: Any


@entry
def pass_on(needs: Needs, order: Any, seconds: Any, unchanged: float, saved: Any, runs: tuple[Any, Any, Any, Any]) -> int:
    """Give documents relays that end together, each with what it has to do anyway.

    Args:
        needs: which keys servers need.
        order: documents, by their place in `needs`.
        seconds: of each rank as a sender; they grow for relays and fall for the ranks that these relieve.
        unchanged: seconds that relays cannot change. Only documents that a later rank sends get any.
        saved: zeros, one for each rank.
        runs: room for columns of place, start, end and relay, as long as `needs.rank`.

    Returns:
        How many runs there are.
    """
    count = 0
    for place in order:
        first, last = needs.able[place], needs.able[place + 1]
        if last - first < 2 or not _late(needs, place, seconds, unchanged):
            continue  # those who send it were relieved of others
        end = needs.position[needs.steps[place + 1] - 1]
        _save(needs, place, end, saved)
        level = _poured(needs, place, end, seconds, saved)
        # Only those that need the last keys can pass them on.
        reach = 0
        for row in range(first, last):
            if level > _relieved(needs, place, row, seconds, saved):
                reach = needs.reach[row]
        if reach == 0:
            continue
        begin = count
        count = _cut(needs, place, min(end, reach), level, seconds, saved, runs, count)
        if reach < end:
            _save(needs, place, reach, saved)
        for row in range(needs.sends[place], needs.sends[place + 1]):
            seconds[needs.source[row]] += needs.each[place] * saved[needs.source[row]]
            saved[needs.source[row]] = 0
        for row in range(begin, count):
            passed = _more_at(needs, place, runs[2][row]) - _more_at(needs, place, runs[1][row])
            seconds[runs[3][row]] += needs.each[place] * passed
    return count


@compiled
def _late(needs: Needs, place: int, seconds: Any, unchanged: float) -> bool:
    """Whether a rank that sends a document ends after what relays cannot change."""
    for row in range(needs.sends[place], needs.sends[place + 1]):
        if seconds[needs.source[row]] > unchanged:
            return True
    return False


@compiled
def _save(needs: Needs, place: int, end: int, saved: Any) -> None:
    """Tokens, not above 0, that each source sends more if each key before `end` leaves it but once."""
    first, last = needs.sends[place], needs.sends[place + 1]
    for row in range(first, last):
        saved[needs.source[row]] = 0
    furthest = 0
    for row in range(first, last):
        start, source = needs.start[row], needs.source[row]
        if start >= end:
            break
        stop = min(needs.end[row], end)
        # Runs that begin together are of one segment.
        if row == first or start != needs.start[row - 1]:
            furthest = start
        if stop > furthest:
            saved[source] += stop - furthest
            furthest = stop
        saved[source] -= stop - start


@compiled
def _relieved(needs: Needs, place: int, row: int, seconds: Any, saved: Any) -> float:
    """Seconds of one that can pass keys on, when each key leaves its source but once."""
    rank = needs.rank[row]
    return float(seconds[rank] + needs.each[place] * saved[rank])


@compiled
def _poured(needs: Needs, place: int, end: int, seconds: Any, saved: Any) -> float:
    """The level to which all that can be passed on fills those that can do it, poured over their seconds."""
    amount = needs.each[place] * _more_at(needs, place, end)
    level, before = 0.0, -1
    while True:
        total, count = amount, 0
        for row in range(needs.able[place], needs.able[place + 1]):
            work = _relieved(needs, place, row, seconds, saved)
            # Those above the level that all would fill cannot be below the one that fewer do.
            if before < 0 or work < level:
                total += work
                count += 1
        if count == before or count == 0:
            return level
        level, before = total / count, count


@compiled
def _cut(
    needs: Needs,
    place: int,
    end: int,
    level: float,
    seconds: Any,
    saved: Any,
    runs: tuple[Any, Any, Any, Any],
    count: int,
) -> int:
    """Runs before `end` with as much to pass on as relays have room for below `level`, none beyond what its relay needs.

    Returns:
        How many runs there are then.
    """
    left, relays = 0.0, 0
    for row in range(needs.able[place], needs.able[place + 1]):
        left += max(level - _relieved(needs, place, row, seconds, saved), 0.0)
        relays += level > _relieved(needs, place, row, seconds, saved)
    all_more = _more_at(needs, place, end)
    at, done = 0, 0.0
    for row in range(needs.able[place], needs.able[place + 1]):
        room = level - _relieved(needs, place, row, seconds, saved)
        if room <= 0:
            continue
        relays -= 1
        wanted = done + (all_more - done) * min(room / left, 1.0)
        left -= room
        stop = end if relays == 0 else min(_position_of(needs, place, wanted, end), needs.reach[row])
        if stop > at:
            runs[0][count], runs[1][count], runs[2][count], runs[3][count] = place, at, stop, needs.rank[row]
            count += 1
            at = stop
            done = _more_at(needs, place, at)
    return count


@compiled
def _step(column: Any, first: int, last: int, value: float) -> int:
    """The first row of a column from `first`, which grows to `last`, that is more than a value; `last` if none is."""
    while first < last:
        middle = (first + last) // 2
        if column[middle] > value:
            last = middle
        else:
            first = middle + 1
    return first


@compiled
def _more_at(needs: Needs, place: int, at: int) -> float:
    """Of the keys of a document before a position, how many are sent beyond the first time."""
    position, more = needs.position, needs.more
    step = _step(position, needs.steps[place] + 1, needs.steps[place + 1] - 1, at)
    width = position[step] - position[step - 1]
    return float(more[step - 1] + (more[step] - more[step - 1]) * (at - position[step - 1]) / width)


@compiled
def _position_of(needs: Needs, place: int, wanted: float, end: int) -> int:
    """The position before which so many keys are sent beyond the first time."""
    position, more = needs.position, needs.more
    step = _step(more, needs.steps[place] + 1, needs.steps[place + 1] - 1, wanted)
    rise = more[step] - more[step - 1]
    part = (wanted - more[step - 1]) / rise if rise else 1.0
    return min(int(position[step - 1] + part * (position[step] - position[step - 1]) + 0.5), end)
