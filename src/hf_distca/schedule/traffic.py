"""Who needs how many keys of which documents, and what ranks send and receive for it.

A server needs the keys of a document from position 0 to the last row that it computes. So a document is described by its segments
and by one number a server, of which there are far fewer than runs of keys from a rank to a server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import Ints, array, column, compiled, entry, room
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.plan import Plan

__all__ = ["KeyTraffic", "first_need", "needed"]


class _Segments(NamedTuple):
    """Those of a layout and, by place, its documents."""

    order: Any
    place: Any
    start: Any
    end: Any
    rank: Any
    documents: Any
    spans: Any


class _Tasks(NamedTuple):
    """Columns of a plan."""

    place: Any
    end: Any
    home: Any
    server: Any


class KeyTraffic(NamedTuple):
    """The documents of a plan without a window that are exchanged: on several ranks, or moved in part.

    Attributes:
        documents: their places among those of the layout.
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

    @classmethod
    def of(cls, plan: Plan) -> KeyTraffic:
        """That of a plan."""
        layout = plan.layout
        most, rows, tasks, ranks = len(layout.documents), len(layout.document), len(plan.document), layout.world_size
        documents, heads, segments, needs = room(most), room(most, float), room(most + 1), room(most + 1)
        start, end, source, own = room(rows), room(rows), room(rows), room(rows)
        server, need = room(tasks), room(tasks)
        parts = layout.by_document, layout.place, layout.start, layout.end, layout.rank, layout.documents, layout.spans
        found, held, asked = _gather(
            _Segments(*map(column, parts)),
            _Tasks(*map(column, (plan.place, plan.end, plan.home, plan.server))),
            layout.groups,
            cls(documents, heads, start, end, source, own, segments, server, need, needs),
            (room(ranks), room(ranks)),
        )
        return cls(
            documents=array(documents)[:found],
            heads=array(heads, float)[:found],
            start=array(start)[:held],
            end=array(end)[:held],
            source=array(source)[:held],
            own=array(own)[:held],
            segments=array(segments)[: found + 1],
            server=array(server)[:asked],
            need=array(need)[:asked],
            needs=array(needs)[: found + 1],
        )

    def tokens(self, ranks: int) -> tuple[FloatArray, FloatArray]:
        """K/V tokens that each rank sends and receives if nobody passes any on; those of a head group count in part."""
        sent, received = room(ranks, float), room(ranks, float)
        _count(KeyTraffic(*map(column, self)), sent, received)
        return array(sent, float), array(received, float)


@entry
def _gather(
    segments: _Segments, tasks: _Tasks, groups: int, traffic: KeyTraffic, scratch: tuple[Ints, Ints]
) -> tuple[int, int, int]:
    """Fill the columns of a traffic in, document by document.

    Args:
        segments, tasks: of the plan, in order of document and position.
        groups: head groups of the layout.
        traffic: columns that are long enough.
        scratch: zeros, two for each rank.

    Returns:
        How many documents, segments and needs there are.
    """
    asked, need = scratch
    documents = held = needs = at = 0
    row = 0
    while row < len(tasks.place):
        first, place, exchanged = row, tasks.place[row], segments.spans[tasks.place[row]]
        while row < len(tasks.place) and tasks.place[row] == place:
            exchanged = exchanged or tasks.home[row] != tasks.server[row]
            row += 1
        if not exchanged:
            continue
        traffic.documents[documents], traffic.segments[documents], traffic.needs[documents] = place, held, needs
        traffic.heads[documents] = 1.0 if groups == 1 or segments.documents[place] % (groups + 1) == 0 else 1.0 / groups
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
        while at < len(segments.order) and segments.place[segments.order[at]] == place:
            segment = segments.order[at]
            rank = segments.rank[segment]
            traffic.start[held], traffic.end[held], traffic.source[held] = segments.start[segment], segments.end[segment], rank
            traffic.own[held] = need[rank] if asked[rank] == documents else 0
            held += 1
            at += 1
    traffic.segments[documents], traffic.needs[documents] = held, needs
    return documents, held, needs


@entry
def _count(traffic: KeyTraffic, sent: Any, received: Any) -> None:
    """Add what is sent and received of all documents."""
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
