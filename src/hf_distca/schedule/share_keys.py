"""Keys of one rank under a plan: which it sends and passes on, which come, and the pool that they make. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.chains import CHAINS, FIRST, KINDS, NEXT, OF, PLACE, ROWS, START, TOTAL, Book, chain_of, put
from hf_distca.schedule.compiled import Ints, compiled
from hf_distca.schedule.index import Segments

__all__ = ["Rank", "Relays", "Span", "add_keys"]


class Relays(NamedTuple):
    """Columns of those of a plan; none if it has none."""

    document: Ints
    start: Ints
    end: Ints
    relay: Ints


class Rank(NamedTuple):
    """The rank at hand, and what it has to know of the plan.

    Attributes:
        rank: its number.
        ranks: how many there are.
        first: its first segment.
        context: tokens of context that it holds.
        groups: head groups of the layout.
        window: of the plan, 0 if it has none.
        wave: the wave that is wanted, -1 for all tasks.
        hops: in which keys travel.
    """

    rank: int
    ranks: int
    first: int
    context: int
    groups: int
    window: int
    wave: int
    hops: int


class Span(NamedTuple):
    """A document, its tasks, its segments in `Segments.order` and its rows of `Relays`: from the first to before the last."""

    document: int
    first_task: int
    last_task: int
    first: int
    last: int
    first_relay: int
    last_relay: int


@compiled
def add_keys(segments: Segments, relays: Relays, span: Span, one: Rank, part: int, book: Book) -> None:
    """Add what servers need of a document, or of its head group `part`, to the messages and the pool of this rank."""
    need, pooled = book.chains[CHAINS.needs][FIRST], _pooled(one, book)
    while need > 0:
        record = book.records[need]
        start, end, server = record[START], record[START] + record[ROWS], record[OF]
        if server == one.rank:
            record[PLACE] = book.chains[CHAINS.pool][TOTAL] - start
        for at in range(span.first, span.last):
            segment = segments.order[at]
            first, last, source = max(segments.start[segment], start), min(segments.end[segment], end), segments.rank[segment]
            token = segments.token[segment] + first - segments.start[segment]
            if first >= last:
                continue
            if source == one.rank != server:
                _send(relays, span, one, book, server, first, last, token, part)
            elif source == one.rank and pooled:
                put(book, CHAINS.pool, -part, token, last - first, source)
            elif server == one.rank and pooled:
                _get(relays, span, one, book, source, first, last)
        need = record[NEXT]


@compiled
def _pooled(one: Rank, book: Book) -> bool:
    """Whether this rank runs any task of the document at hand on pools."""
    task = book.chains[CHAINS.tasks][FIRST]
    while task > 0:
        if book.records[task][OF] >= chain_of(KINDS.homes, one.ranks, 0):
            return True
        task = book.records[task][NEXT]
    return False


@compiled
def _piece(relays: Relays, span: Span, run: int, start: int, end: int) -> tuple[int, int, int]:
    """First and last of keys [start, end) that are in a run of the document, and its relay; behind the last run -1."""
    if run < span.last_relay:
        return max(start, relays.start[run]), min(end, relays.end[run]), relays.relay[run]
    return (max(start, relays.end[run - 1]) if run > span.first_relay else start), end, -1


@compiled
def _send(relays: Relays, span: Span, one: Rank, book: Book, server: int, start: int, end: int, token: int, part: int) -> None:
    """Keys [start, end) from a token on to a server: those that no other relay sends it."""
    for run in range(span.first_relay, span.last_relay + 1):
        first, last, relay = _piece(relays, span, run, start, end)
        if first < last and (relay < 0 or relay == server or relay == one.rank):
            put(book, chain_of(KINDS.keys, one.ranks, server), -part, token + first - start, last - first, one.rank)


@compiled
def _get(relays: Relays, span: Span, one: Rank, book: Book, source: int, start: int, end: int) -> None:
    """Keys [start, end) that another rank holds into the pool: from it, or from a relay in the second hop."""
    for run in range(span.first_relay, span.last_relay + 1):
        first, last, relay = _piece(relays, span, run, start, end)
        if first >= last:
            continue
        sender, chain = source, chain_of(KINDS.came, one.ranks, source)
        if relay >= 0 and relay != source and relay != one.rank:
            sender, chain = relay, chain_of(KINDS.passed_came, one.ranks, relay)
        at, place = book.chains[chain][TOTAL], book.chains[CHAINS.pool][TOTAL]
        put(book, CHAINS.pool, chain, at, last - first, sender)
        put(book, chain, chain, place, last - first, sender)
        passed = _pass_on(one, book, source, first, last) if relay == one.rank else 0
        if passed > 0:
            put(book, CHAINS.passed, chain, at, passed, place)


@compiled
def _pass_on(one: Rank, book: Book, source: int, start: int, end: int) -> int:
    """Keys [start, end) that came from `source` to all others that need them; how many of them anybody needs."""
    need, row, most = book.chains[CHAINS.needs][FIRST], book.chains[CHAINS.passed][TOTAL], 0
    while need > 0:
        record = book.records[need]
        server, rows = record[OF], min(record[START] + record[ROWS], end) - start
        if server != one.rank and server != source and rows > 0:
            chain = chain_of(KINDS.passed_keys, one.ranks, server)
            put(book, chain, chain, row, rows, one.rank)
            most = max(most, rows)
        need = record[NEXT]
    return most
