"""Who needs how many keys of which documents, and what ranks send and receive for it.

A server needs the keys of a document from position 0 to the last row that it computes. So a document is described by its segments
and by one number a server, of which there are far fewer than runs of keys from a rank to a server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_distca.schedule.compiled import Floats, Ints, compiled, interpreted
from hf_distca.schedule.index import Segments, Tasks
from hf_distca.schedule.plan import Plan

__all__ = ["Gathered", "KeyTraffic", "count_tokens", "first_need", "gather", "needed", "numbers_for", "unpacked"]


class KeyTraffic(NamedTuple):
    """The documents of a plan without a window that are exchanged: on several ranks, or moved in part.

    Attributes:
        documents: their numbers.
        heads: what part of the heads each is.
        start, end, source: segments, in order of document and position; those of the d-th document from `segments[d]` to
            `segments[d + 1]`.
        own: of each segment, how many keys of the document its rank needs itself.
        server, need: servers and how many keys they need, in order of document, number and server; from `needs[d]`.
    """

    documents: Any
    heads: Any
    start: Any
    end: Any
    source: Any
    own: Any
    segments: Any
    server: Any
    need: Any
    needs: Any


class Gathered(NamedTuple):
    """A `KeyTraffic` as it is handed over: all in two columns.

    Attributes:
        numbers, heads: see `unpacked`.
        sizes: documents, segments and needs that there is room for, and how many there are.
    """

    numbers: Any
    heads: Any
    sizes: Any

    @classmethod
    def room(cls, plan: Plan) -> Gathered:
        """Room for that of a plan; none if it has a window."""
        layout = plan.layout
        most = (len(layout.documents), len(layout.document), len(plan.document)) if plan.window is None else (0, 0, 0)
        return cls(np.zeros(interpreted(numbers_for)(*most), dtype=np.int64), np.zeros(most[0]), np.array((*most, 0, 0, 0)))


@compiled
def numbers_for(documents: int, segments: int, needs: int) -> int:
    """How many numbers a traffic has with so many rows."""
    return 3 * documents + 2 + 4 * segments + 2 * needs


@compiled
def unpacked(gathered: Gathered) -> KeyTraffic:
    """The traffic in columns of their own, with as many documents as there are."""
    numbers, heads, sizes = gathered
    documents, segments, needs = sizes[0], sizes[1], sizes[2]
    exchanged, numbers = numbers[: sizes[3]], numbers[documents:]
    first, numbers = numbers[: documents + 1], numbers[documents + 1 :]
    asked, numbers = numbers[: documents + 1], numbers[documents + 1 :]
    start, end, numbers = numbers[:segments], numbers[segments : 2 * segments], numbers[2 * segments :]
    source, own, numbers = numbers[:segments], numbers[segments : 2 * segments], numbers[2 * segments :]
    return KeyTraffic(exchanged, heads, start, end, source, own, first, numbers[:needs], numbers[needs : 2 * needs], asked)


@compiled
def gather(segments: Segments, tasks: Tasks, groups: int, gathered: Gathered, scratch: Ints) -> None:
    """Fill the columns of a traffic in, document by document.

    Args:
        segments: of the layout, or of the one before documents were split by heads, where their groups have one place.
        tasks: in order of document and position.
        groups: head groups that documents are split in; 1 if none is.
        gathered: room for all.
        scratch: zeros, two for each rank.
    """
    sizes, ranks = gathered.sizes, len(scratch) // 2
    sizes[3] = sizes[0]
    traffic = unpacked(gathered)
    asked, need = scratch[:ranks], scratch[ranks:]
    documents = held = needs = at = 0
    row = 0
    while row < len(tasks.place):
        first, number, place, exchanged = row, tasks.document[row], tasks.place[row], segments.spans[tasks.place[row]]
        while row < len(tasks.place) and tasks.document[row] == number:
            exchanged = exchanged or tasks.home[row] != tasks.server[row]
            row += 1
        if not exchanged:
            continue
        traffic.documents[documents], traffic.segments[documents], traffic.needs[documents] = number, held, needs
        traffic.heads[documents] = 1.0 if groups == 1 or number % (groups + 1) == 0 else 1.0 / groups
        documents += 1
        # The last task of a server needs most. Those that need fewer keys come first.
        begin = needs
        for task in range(row - 1, first - 1, -1):
            server = tasks.server[task]
            if asked[server] != documents:
                asked[server], need[server] = documents, tasks.end[task]
                traffic.server[needs], traffic.need[needs] = server, tasks.end[task]
                needs += 1
        for step in range((needs - begin) // 2):
            one, other = begin + step, needs - 1 - step
            traffic.server[one], traffic.server[other] = traffic.server[other], traffic.server[one]
            traffic.need[one], traffic.need[other] = traffic.need[other], traffic.need[one]
        while segments.place[segments.order[at]] < place:
            at += 1
        following = at
        while following < len(segments.order) and segments.place[segments.order[following]] == place:
            segment = segments.order[following]
            rank = segments.rank[segment]
            traffic.start[held], traffic.end[held], traffic.source[held] = segments.start[segment], segments.end[segment], rank
            traffic.own[held] = need[rank] if asked[rank] == documents else 0
            held += 1
            following += 1
    traffic.segments[documents], traffic.needs[documents] = held, needs
    sizes[3], sizes[4], sizes[5] = documents, held, needs


@compiled
def count_tokens(traffic: KeyTraffic, sent: Floats, received: Floats) -> None:
    """Add the K/V tokens that each rank sends and receives if nobody passes any on; those of a head group count in part."""
    for document in range(len(traffic.documents)):
        heads, first, last = traffic.heads[document], traffic.needs[document], traffic.needs[document + 1]
        for row in range(first, last):
            received[traffic.server[row]] += heads * traffic.need[row]
        for segment in range(traffic.segments[document], traffic.segments[document + 1]):
            start, end, source = traffic.start[segment], traffic.end[segment], traffic.source[segment]
            first = first_need(traffic, first, last, start)
            kept = max(min(traffic.own[segment], end) - start, 0)
            received[source] -= heads * kept
            sent[source] += heads * (needed(traffic, first, last, start, end) - kept)


@compiled
def first_need(traffic: KeyTraffic, first: int, last: int, start: int) -> int:
    """The first of these rows of `server` and `need` that needs a key at `start`; `last` if there is none."""
    while first < last and traffic.need[first] <= start:
        first += 1
    return first


@compiled
def needed(traffic: KeyTraffic, first: int, last: int, start: int, end: int) -> int:
    """How often keys [start, end) of a document are needed by these rows, all of which need some of them or later ones."""
    tokens = 0
    for row in range(first, last):
        if traffic.need[row] >= end:
            return int(tokens + (last - row) * (end - start))
        tokens += traffic.need[row] - start
    return int(tokens)
