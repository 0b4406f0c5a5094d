"""What one rank does under a plan, in numbers: rows that it sends and gets, pools, and the tasks it runs. All of it is compiled.

One pass goes through the documents and adds what concerns the rank to chains; then these are written down one after another.
`runtime.route` makes objects of the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hf_distca.schedule.chains import (
    CHAINS,
    FIRST,
    KINDS,
    LAST,
    NEXT,
    OF,
    PLACE,
    ROWS,
    START,
    TOTAL,
    Book,
    added,
    chain_of,
    emptied,
    full,
    put,
)
from hf_distca.schedule.compiled import Ints, array, column, compiled, entry, room
from hf_distca.schedule.index import IntArray, Segments, Tasks
from hf_distca.schedule.key_runs import first_key
from hf_distca.schedule.share_keys import Rank, Relays, Span, add_keys
from hf_distca.schedule.share_numbers import numbers_in, write_wave

if TYPE_CHECKING:
    from hf_distca.schedule.plan import Plan

__all__ = ["share_of"]

_NONE: IntArray = np.zeros(0, dtype=np.int64)
# Records that most ranks need no more than.
_RECORDS = 256


def share_of(plan: Plan, rank: int, waves: IntArray | None = None, wave: int = 0) -> list[int]:
    """The numbers of one rank, in the order in which `share_numbers` writes them.

    Args:
        plan: what is to be done.
        rank: the one that does it.
        waves: of each task the wave in which it travels; None if there is one wave.
        wave: the one that is wanted.
    """
    layout, relays = plan.layout, plan.relays
    first, last = layout.offsets[rank : rank + 2].tolist()
    ranks, hops = layout.world_size, 1 if relays is None else 2
    context = int(layout.length[first : first + layout.context[rank]].sum())
    one = Rank(rank, ranks, first, context, layout.groups, plan.window or 0, -1 if waves is None else wave, hops)
    travels = column(_NONE if waves is None else waves)
    columns = layout.columns, plan.columns, travels, Relays(*map(column, relays or (_NONE,) * 4))
    records = _RECORDS
    while True:
        out = room(numbers_in(ranks, records))
        count = _fill(*columns, one, Book.of(ranks, last - first, records), out)
        if count:
            numbers: list[int] = array(out)[:count].tolist()
            return numbers
        records *= 4


@entry
def _fill(segments: Segments, tasks: Tasks, waves: Ints, relays: Relays, one: Rank, book: Book, out: Ints) -> int:
    """Write the numbers down; how many there are, or 0 if there is no room."""
    at = 0
    for kept in (False, True):
        if kept:
            for chain in range(len(book.chains)):
                emptied(book, chain)
        _go_through(segments, tasks, waves, relays, one, book, kept)
        more = book.chains[CHAINS.kept][TOTAL] > 0
        at = write_wave(one, book, 1 if kept else one.hops, out, at)
        if full(book):
            return 0
        if not more:
            break
    return at


@compiled
def _go_through(segments: Segments, tasks: Tasks, waves: Ints, relays: Relays, one: Rank, book: Book, kept: bool) -> None:
    """Fill chains in: of a wave and of tasks on own tensors; or, if `kept`, of tasks of head groups on this rank's own keys."""
    task = at = relay = 0
    while task < len(tasks.document) and not full(book):
        document, first_task, concerned = tasks.document[task], task, False
        while task < len(tasks.document) and tasks.document[task] == document:
            concerned = concerned or tasks.server[task] == one.rank or tasks.home[task] == one.rank
            task += 1
        while segments.document[segments.order[at]] < document:
            at += 1
        first = at
        while at < len(segments.order) and segments.document[segments.order[at]] == document:
            concerned = concerned or segments.rank[segments.order[at]] == one.rank
            at += 1
        while relay < len(relays.document) and relays.document[relay] < document:
            relay += 1
        first_relay = relay
        while relay < len(relays.document) and relays.document[relay] == document:
            relay += 1
        if concerned:
            span = Span(document, first_task, task, first, at, first_relay, relay)
            _look(segments, tasks, waves, span, one, book, kept)
            _add(segments, relays, span, one, book)


@compiled
def _look(segments: Segments, tasks: Tasks, waves: Ints, span: Span, one: Rank, book: Book, kept: bool) -> None:
    """Find the tasks of a document that concern this rank, and which of its keys each server needs."""
    emptied(book, CHAINS.tasks)
    emptied(book, CHAINS.needs)
    before, group = book.chains[CHAINS.all][TOTAL], one.groups > 1 and span.document % (one.groups + 1) > 0
    at, run = span.first, 0  # the segment of a task, and the document position where the run of tokens begins that it is in
    for row in range(span.first_task, span.last_task):
        start, end, home, server = tasks.start[row], tasks.end[row], tasks.home[row], tasks.server[row]
        while segments.end[segments.order[at]] <= start:
            at += 1
            if not _continues(segments, segments.order[at - 1], segments.order[at]):
                run = segments.start[segments.order[at]]
        segment, first = segments.order[at], first_key(start, one.window)
        token = segments.token[segment] - segments.start[segment] if home == one.rank else 0
        here, travels = home == server == one.rank and first >= run, one.wave < 0 or waves[row] == one.wave
        if kept:
            if here and group:
                _need(book, chain_of(KINDS.latest, one.ranks, server), server, first, end, before)
                put(book, CHAINS.tasks, chain_of(KINDS.homes, one.ranks, home), start, end - start, token)
            continue
        if travels:
            _need(book, chain_of(KINDS.latest, one.ranks, server), server, first, end, before)
        if here and group:
            book.chains[CHAINS.kept][TOTAL] += end - start
        elif here:
            put(book, chain_of(KINDS.mine, one.ranks, segment - one.first), span.document, start, end - start, token)
        elif travels and server == one.rank:
            put(book, CHAINS.tasks, chain_of(KINDS.homes, one.ranks, home), start, end - start, token)
        elif travels and home == one.rank:
            put(book, CHAINS.tasks, chain_of(KINDS.queries, one.ranks, server), start, end - start, token)


@compiled
def _continues(segments: Segments, before: int, segment: int) -> bool:
    """Whether a segment lies on the rank of the one before it in its document, right behind it."""
    behind = segments.token[before] + segments.end[before] - segments.start[before]
    return bool(segments.rank[before] == segments.rank[segment] and behind == segments.token[segment])


@compiled
def _need(book: Book, latest: int, server: int, start: int, end: int, before: int) -> None:
    """Let a server need keys [start, end) of the document whose records come behind those `before`."""
    row = book.chains[latest][LAST]
    if row > before and start <= book.records[row][START] + book.records[row][ROWS]:
        book.records[row][ROWS] = end - book.records[row][START]
        return
    added(book, CHAINS.needs, server, start, end - start, server)
    book.chains[latest][LAST] = book.chains[CHAINS.needs][LAST]


@compiled
def _add(segments: Segments, relays: Relays, span: Span, one: Rank, book: Book) -> None:
    """Add keys and tasks of a document to the chains that they go in; those on all heads once for each group if there are any."""
    if full(book):
        return
    group = span.document % (one.groups + 1) if one.groups > 1 else 1
    for part in range(max(group, 1), (group if group > 0 else one.groups) + 1):
        add_keys(segments, relays, span, one, part, book)
        _add_tasks(span.document - group + part, one, part, book)


@compiled
def _add_tasks(document: int, one: Rank, part: int, book: Book) -> None:
    """Add the tasks of a document, and their query rows. `part` is its head group, or 1 if there is none."""
    need, task = book.chains[CHAINS.needs][FIRST], book.chains[CHAINS.tasks][FIRST]
    while task > 0:
        record = book.records[task]
        task, chain, start, rows = record[NEXT], record[OF], record[START], record[ROWS]
        query = record[PLACE] + start - one.context
        if chain < chain_of(KINDS.homes, one.ranks, 0):
            put(book, chain, -part, query, rows, one.rank)
            continue
        while book.records[need][OF] != one.rank or book.records[need][START] + book.records[need][ROWS] < start + rows:
            need = book.records[need][NEXT]
        put(book, chain, document, start, rows, book.records[need][PLACE])
        if chain == chain_of(KINDS.homes, one.ranks, one.rank):
            put(book, chain_of(KINDS.queries, one.ranks, one.rank), -part, query, rows, one.rank)
