"""Which servers pass on which keys of a document, and how many: the loop behind `schedule.relief`. All of it is compiled.

Documents follow one another, for what a relay passes on counts for the next document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hf_distca.schedule.compiled import Floats, Ints, compiled, entry
from hf_distca.schedule.sorting import DOWN, UP, sort
from hf_distca.schedule.traffic import first_need, needed, unpacked

if TYPE_CHECKING:
    from hf_distca.schedule.traffic import Gathered, KeyTraffic

__all__ = ["Senders", "pass_on", "room_for"]


# Places in `Passing.counts`: rows of `rank`, of `position`, and of all runs.
ABLE, STEPS, RUNS = range(3)


class Passing(NamedTuple):
    """What can be passed on of one document of a `KeyTraffic`.

    Attributes:
        rank, reach: ranks that can pass keys on and how many from position 0 on, those with the fewest first.
        position, more: positions up to the last key that two ranks need; and of the keys before each how many are sent beyond
            the first time, which grows evenly in between.
        counts: how many rows these columns have, at places `ABLE` and `STEPS`, and runs so far, at `RUNS`.
        saved: tokens, not above 0, that each source of the document sends more if each key leaves it but once.
    """

    rank: Ints
    reach: Ints
    position: Ints
    more: Ints
    counts: Ints
    saved: Ints


class Runs(NamedTuple):
    """Keys that are passed on, and the rank that does it."""

    document: Ints
    start: Ints
    end: Ints
    relay: Ints


class Senders(NamedTuple):
    """What ranks do if nobody passes anything on.

    Attributes:
        compute: seconds that each rank computes.
        sent, received: seconds that it sends and receives.
        tokens: keys that it sends.
        each: seconds of sending one key.
        overlapped: whether ranks compute meanwhile.
        slowest: seconds of the slowest rank from which relays have to gain something.
    """

    compute: Floats
    sent: Floats
    received: Floats
    tokens: Floats
    each: float
    overlapped: bool
    slowest: float


def room_for(documents: int, segments: int, needs: int, ranks: int) -> tuple[int, int, int]:
    """How many runs there are at most for traffic of so many rows, and how many integers and floats `pass_on` needs room for."""
    runs = needs + documents
    return runs, 6 * runs + 2 * (needs + 1) + 2 * (needs + 2 * segments + 2) + 3 + ranks, 2 * ranks + documents


@entry
def pass_on(gathered: Gathered, senders: Senders, made: Ints, integers: Ints, floats: Floats) -> int:
    """Give documents relays that end together, each with what it has to do anyway; those with most to pass on first.

    Args:
        gathered: who needs which keys.
        senders: what ranks do. Only documents that a rank sends get relays which ends after what relays cannot change.
        made: columns of document, start, end and relay one after another, to be filled with runs in order of document and start.
        integers, floats: room, as long as `room_for` says. When this ends, the floats begin with the tokens that each rank sends.

    Returns:
        How many runs there are.
    """
    traffic, ranks = unpacked(gathered), len(senders.compute)
    tokens, seconds, amount = floats[:ranks], floats[ranks : 2 * ranks], floats[2 * ranks : 2 * ranks + gathered.sizes[3]]
    unchanged = 0.0
    for rank in range(ranks):
        beside = 0.0 if senders.overlapped else senders.compute[rank]
        unchanged = max(unchanged, beside + senders.received[rank])
        seconds[rank], tokens[rank] = beside + senders.sent[rank], senders.tokens[rank]
    if unchanged >= senders.slowest:
        return 0
    most = len(made) // 4
    passed, runs, integers = _runs(made), _runs(integers[: 4 * most]), integers[4 * most :]
    order, scratch, integers = integers[:most], integers[most : 2 * most], integers[2 * most :]
    passing = _passing(integers, ranks, gathered.sizes[5] + 2 * gathered.sizes[4] + 2, gathered.sizes[5] + 1)
    documents = order[: len(amount)]
    for document in range(len(documents)):
        _look(traffic, passing, document)
        amount[document] = traffic.heads[document] * passing.more[passing.counts[STEPS] - 1]
    sort(documents, scratch, amount, amount, DOWN)
    for document in documents:
        if not _late(traffic, document, seconds, unchanged):
            continue  # those who send it were relieved of others
        _look(traffic, passing, document)
        if passing.counts[ABLE] > 1:
            _relay(traffic, passing, document, senders.each * traffic.heads[document], seconds, tokens, runs)
    count = int(passing.counts[RUNS])
    sort(order[:count], scratch, runs.document, runs.start, UP)
    for at in range(count):
        row = order[at]
        passed.document[at], passed.relay[at] = traffic.documents[runs.document[row]], runs.relay[row]
        passed.start[at], passed.end[at] = runs.start[row], runs.end[row]
    return count


@compiled
def _passing(integers: Ints, ranks: int, steps: int, needs: int) -> Passing:
    """Columns of so many rows, without any run so far."""
    rank, reach, integers = integers[:needs], integers[needs : 2 * needs], integers[2 * needs :]
    position, more, integers = integers[:steps], integers[steps : 2 * steps], integers[2 * steps :]
    counts, saved = integers[:3], integers[3 : 3 + ranks]
    counts[RUNS] = 0
    for one in range(ranks):
        saved[one] = 0
    return Passing(rank, reach, position, more, counts, saved)


@compiled
def _runs(columns: Ints) -> Runs:
    rows = len(columns) // 4
    return Runs(columns[:rows], columns[rows : 2 * rows], columns[2 * rows : 3 * rows], columns[3 * rows :])


@compiled
def _relay(
    traffic: KeyTraffic,
    passing: Passing,
    document: int,
    each: float,
    seconds: Floats,
    tokens: Floats,
    runs: Runs,
) -> None:
    """Give one document relays; `each` is the seconds of sending one of its keys."""
    end = passing.position[passing.counts[STEPS] - 1]
    _save(traffic, document, end, passing.saved)
    level = _poured(passing, each, end, seconds)
    # Only those that need the last keys can pass them on.
    reach = passing.position[0]
    for row in range(passing.counts[ABLE]):
        if level > _relieved(passing, each, row, seconds):
            reach = passing.reach[row]
    begin = passing.counts[RUNS]
    if reach > 0:
        _cut(passing, document, each, min(end, reach), level, seconds, runs)
    if reach < end:
        _save(traffic, document, reach, passing.saved)
    heads = traffic.heads[document]
    for segment in range(traffic.segments[document], traffic.segments[document + 1]):
        rank = traffic.source[segment]
        seconds[rank] += each * passing.saved[rank]
        tokens[rank] += heads * passing.saved[rank]
        passing.saved[rank] = 0
    for row in range(begin, passing.counts[RUNS]):
        rank, passed = runs.relay[row], _more_at(passing, runs.end[row]) - _more_at(passing, runs.start[row])
        seconds[rank] += each * passed
        tokens[rank] += heads * passed


@compiled
def _look(traffic: KeyTraffic, passing: Passing, document: int) -> None:
    """Fill in who can pass keys on, and how many keys are sent beyond the first time."""
    first, last = traffic.segments[document], traffic.segments[document + 1]
    source, furthest, alone = traffic.source[first], traffic.need[traffic.needs[document + 1] - 1], True
    for segment in range(first, last):
        if traffic.start[segment] < furthest and traffic.source[segment] != source:
            alone = False
    count = 0
    for row in range(traffic.needs[document], traffic.needs[document + 1]):
        # A rank that holds a document alone has all keys, whether it needs them or not.
        if not (alone and traffic.server[row] == source):
            passing.rank[count], passing.reach[count] = traffic.server[row], traffic.need[row]
            count += 1
    end = passing.reach[count - 2] if count > 1 else 0
    if alone and end > 0:
        at = count
        while at > 0 and (passing.reach[at - 1], passing.rank[at - 1]) > (end, source):
            passing.rank[at], passing.reach[at] = passing.rank[at - 1], passing.reach[at - 1]
            at -= 1
        passing.rank[at], passing.reach[at] = source, end
        count += 1
    passing.counts[ABLE] = count
    _count_more(traffic, passing, document, end)


@compiled
def _count_more(traffic: KeyTraffic, passing: Passing, document: int, end: int) -> None:
    """Fill in positions up to `end`, at which more or fewer ranks are sent what follows, and how many keys come before each."""
    segment, last_segment = traffic.segments[document], traffic.segments[document + 1]
    row, last = traffic.needs[document], traffic.needs[document + 1]
    passing.position[0] = passing.more[0] = at = more = steps = 0
    while at < end:
        while traffic.need[row] <= at:
            row += 1
        # A rank is not sent what it holds itself.
        while segment < last_segment and min(traffic.own[segment], traffic.end[segment]) <= max(at, traffic.start[segment]):
            segment += 1
        step, times = min(end, traffic.need[row]), last - row - 1
        if segment < last_segment and traffic.start[segment] <= at:
            step, times = min(step, traffic.own[segment], traffic.end[segment]), times - 1
        elif segment < last_segment:
            step = min(step, traffic.start[segment])
        more += times * (step - at)
        at, steps = step, steps + 1
        passing.position[steps], passing.more[steps] = at, more
    passing.counts[STEPS] = steps + 1


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
def _relieved(passing: Passing, each: float, row: int, seconds: Floats) -> float:
    """Seconds of one that can pass keys on, when each key leaves its source but once."""
    rank = passing.rank[row]
    return float(seconds[rank] + each * passing.saved[rank])


@compiled
def _poured(passing: Passing, each: float, end: int, seconds: Floats) -> float:
    """The level to which all that can be passed on fills those that can do it, poured over their seconds."""
    amount = each * _more_at(passing, end)
    level, before = 0.0, -1
    while True:
        total, count = amount, 0
        for row in range(passing.counts[ABLE]):
            work = _relieved(passing, each, row, seconds)
            # Those above the level that all would fill cannot be below the one that fewer do.
            if before < 0 or work < level:
                total += work
                count += 1
        # Fewer each time; as many or, by what sums round to, more than before are all.
        if count == 0 or 0 <= before <= count:
            return level
        level, before = total / count, count


@compiled
def _cut(
    passing: Passing,
    document: int,
    each: float,
    end: int,
    level: float,
    seconds: Floats,
    runs: Runs,
) -> None:
    """Runs before `end` with as much to pass on as relays have room for below `level`, none beyond what its relay needs."""
    left, relays = 0.0, 0
    for row in range(passing.counts[ABLE]):
        left += max(level - _relieved(passing, each, row, seconds), 0.0)
        relays += level > _relieved(passing, each, row, seconds)
    all_more = _more_at(passing, end)
    at, done = 0, 0.0
    for row in range(passing.counts[ABLE]):
        room = level - _relieved(passing, each, row, seconds)
        if room <= 0:
            continue
        relays -= 1
        wanted = done + (all_more - done) * min(room / left, 1.0)
        left -= room
        stop = end if relays == 0 else min(_position_of(passing, wanted, end), passing.reach[row])
        if stop > at:
            count = passing.counts[RUNS]
            runs.document[count], runs.start[count], runs.end[count], runs.relay[count] = document, at, stop, passing.rank[row]
            passing.counts[RUNS] += 1
            at = stop
            done = _more_at(passing, at)


@compiled
def _step(column: Ints, last: int, value: float) -> int:
    """The first row of a column after row 0, which grows to `last`, that is more than a value; `last` if none is."""
    first = 1
    while first < last:
        middle = (first + last) // 2
        if column[middle] > value:
            last = middle
        else:
            first = middle + 1
    return first


@compiled
def _more_at(passing: Passing, at: int) -> float:
    """Of the keys of a document before a position, how many are sent beyond the first time."""
    position, more = passing.position, passing.more
    step = _step(position, passing.counts[STEPS] - 1, float(at))
    width = position[step] - position[step - 1]
    return float(more[step - 1] + (more[step] - more[step - 1]) * (at - position[step - 1]) / width)


@compiled
def _position_of(passing: Passing, wanted: float, end: int) -> int:
    """The position before which so many keys are sent beyond the first time."""
    position, more = passing.position, passing.more
    step = _step(more, passing.counts[STEPS] - 1, wanted)
    rise = more[step] - more[step - 1]
    part = (wanted - more[step - 1]) / rise if rise else 1.0
    return min(int(position[step - 1] + part * (position[step] - position[step - 1]) + 0.5), end)
