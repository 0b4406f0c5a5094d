"""Which servers pass on which keys of a document, and how many: the loop behind `schedule.relief`. All of it is compiled.

Documents follow one another, for what a relay passes on counts for the next document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hf_distca.schedule.compiled import Floats, Ints, compiled, entry
from hf_distca.schedule.traffic import first_need, needed

if TYPE_CHECKING:
    from hf_distca.schedule.traffic import KeyTraffic

__all__ = ["Passing", "pass_on"]


class Passing(NamedTuple):
    """What can be passed on of the documents of a `KeyTraffic`, in two lists of rows, each by document.

    Attributes:
        rank, reach: ranks that can pass keys on and how many from position 0 on, those with the fewest first; from `able[d]`.
        position, more: positions up to the last key that two ranks need; and of the keys before each how many are sent beyond
            the first time, which grows evenly in between. From `steps[d]`.
        each: seconds of sending one key of each document.
    """

    rank: Any
    reach: Any
    able: Any
    position: Any
    more: Any
    steps: Any
    each: Any


@entry
def pass_on(
    traffic: KeyTraffic,
    passing: Passing,
    order: Ints,
    seconds: Floats,
    unchanged: float,
    saved: Ints,
    tokens: Floats,
    runs: tuple[Ints, Ints, Ints, Ints],
) -> int:
    """Give documents relays that end together, each with what it has to do anyway.

    Args:
        traffic, passing: who needs which keys, and who can pass them on.
        order: documents of the traffic, one after the other.
        seconds: of each rank as a sender; they grow for relays and fall for the ranks that these relieve.
        unchanged: seconds that relays cannot change. Only documents that a later rank sends get any.
        saved: zeros, one for each rank.
        tokens: that each rank sends, which change as `seconds` do.
        runs: room for columns of document, start, end and relay, as long as `passing.rank`.

    Returns:
        How many runs there are.
    """
    count = 0
    for document in order:
        first, last = passing.able[document], passing.able[document + 1]
        if last - first < 2 or not _late(traffic, document, seconds, unchanged):
            continue  # those who send it were relieved of others
        end = passing.position[passing.steps[document + 1] - 1]
        _save(traffic, document, end, saved)
        level = _poured(passing, document, end, seconds, saved)
        # Only those that need the last keys can pass them on.
        reach = 0
        for row in range(first, last):
            if level > _relieved(passing, document, row, seconds, saved):
                reach = passing.reach[row]
        if reach == 0:
            continue
        begin = count
        count = _cut(passing, document, min(end, reach), level, seconds, saved, runs, count)
        if reach < end:
            _save(traffic, document, reach, saved)
        each, heads = passing.each[document], traffic.heads[document]
        for segment in range(traffic.segments[document], traffic.segments[document + 1]):
            rank = traffic.source[segment]
            seconds[rank] += each * saved[rank]
            tokens[rank] += heads * saved[rank]
            saved[rank] = 0
        for row in range(begin, count):
            rank, passed = runs[3][row], _more_at(passing, document, runs[2][row]) - _more_at(passing, document, runs[1][row])
            seconds[rank] += each * passed
            tokens[rank] += heads * passed
    return count


@compiled
def _late(traffic: KeyTraffic, document: int, seconds: Floats, unchanged: float) -> bool:
    """Whether a rank that sends a document ends after what relays cannot change."""
    furthest = traffic.need[traffic.needs[document + 1] - 1]
    for segment in range(traffic.segments[document], traffic.segments[document + 1]):
        if traffic.start[segment] < furthest and seconds[traffic.source[segment]] > unchanged:
            return True
    return False


@compiled
def _save(traffic: KeyTraffic, document: int, end: int, saved: Ints) -> None:
    """Tokens, not above 0, that each source sends more if each key before `end` leaves it but once."""
    first, last = traffic.needs[document], traffic.needs[document + 1]
    for segment in range(traffic.segments[document], traffic.segments[document + 1]):
        saved[traffic.source[segment]] = 0
    for segment in range(traffic.segments[document], traffic.segments[document + 1]):
        start, stop, source = traffic.start[segment], min(traffic.end[segment], end), traffic.source[segment]
        if start >= stop:
            return
        first = first_need(traffic, first, last, start)
        # The last that any other rank needs.
        other = last - 1
        if other >= first and traffic.server[other] == source:
            other -= 1
        once = min(traffic.need[other], stop) - start if other >= first else 0
        kept = max(min(traffic.own[segment], stop) - start, 0)
        saved[source] += once - (needed(traffic, first, last, start, stop) - kept)


@compiled
def _relieved(passing: Passing, document: int, row: int, seconds: Floats, saved: Ints) -> float:
    """Seconds of one that can pass keys on, when each key leaves its source but once."""
    rank = passing.rank[row]
    return float(seconds[rank] + passing.each[document] * saved[rank])


@compiled
def _poured(passing: Passing, document: int, end: int, seconds: Floats, saved: Ints) -> float:
    """The level to which all that can be passed on fills those that can do it, poured over their seconds."""
    amount = passing.each[document] * _more_at(passing, document, end)
    level, before = 0.0, -1
    while True:
        total, count = amount, 0
        for row in range(passing.able[document], passing.able[document + 1]):
            work = _relieved(passing, document, row, seconds, saved)
            # Those above the level that all would fill cannot be below the one that fewer do.
            if before < 0 or work < level:
                total += work
                count += 1
        if count == before or count == 0:
            return level
        level, before = total / count, count


@compiled
def _cut(
    passing: Passing,
    document: int,
    end: int,
    level: float,
    seconds: Floats,
    saved: Ints,
    runs: tuple[Ints, Ints, Ints, Ints],
    count: int,
) -> int:
    """Runs before `end` with as much to pass on as relays have room for below `level`, none beyond what its relay passing.

    Returns:
        How many runs there are then.
    """
    left, relays = 0.0, 0
    for row in range(passing.able[document], passing.able[document + 1]):
        left += max(level - _relieved(passing, document, row, seconds, saved), 0.0)
        relays += level > _relieved(passing, document, row, seconds, saved)
    all_more = _more_at(passing, document, end)
    at, done = 0, 0.0
    for row in range(passing.able[document], passing.able[document + 1]):
        room = level - _relieved(passing, document, row, seconds, saved)
        if room <= 0:
            continue
        relays -= 1
        wanted = done + (all_more - done) * min(room / left, 1.0)
        left -= room
        stop = end if relays == 0 else min(_position_of(passing, document, wanted, end), passing.reach[row])
        if stop > at:
            runs[0][count], runs[1][count], runs[2][count], runs[3][count] = document, at, stop, passing.rank[row]
            count += 1
            at = stop
            done = _more_at(passing, document, at)
    return count


@compiled
def _step(column: Ints, first: int, last: int, value: float) -> int:
    """The first row of a column from `first`, which grows to `last`, that is more than a value; `last` if none is."""
    while first < last:
        middle = (first + last) // 2
        if column[middle] > value:
            last = middle
        else:
            first = middle + 1
    return first


@compiled
def _more_at(passing: Passing, document: int, at: int) -> float:
    """Of the keys of a document before a position, how many are sent beyond the first time."""
    position, more = passing.position, passing.more
    step = _step(position, passing.steps[document] + 1, passing.steps[document + 1] - 1, at)
    width = position[step] - position[step - 1]
    return float(more[step - 1] + (more[step] - more[step - 1]) * (at - position[step - 1]) / width)


@compiled
def _position_of(passing: Passing, document: int, wanted: float, end: int) -> int:
    """The position before which so many keys are sent beyond the first time."""
    position, more = passing.position, passing.more
    step = _step(more, passing.steps[document] + 1, passing.steps[document + 1] - 1, wanted)
    rise = more[step] - more[step - 1]
    part = (wanted - more[step - 1]) / rise if rise else 1.0
    return min(int(position[step - 1] + part * (position[step] - position[step - 1]) + 0.5), end)
