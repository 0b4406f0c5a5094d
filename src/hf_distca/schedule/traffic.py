"""Who needs how many keys of which documents, and what ranks send and receive for it.

A server needs the keys of a document from position 0 to the last row that it computes. So a document is described by its segments
and by one number a server, of which there are far fewer than runs of keys from a rank to a server.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_distca.schedule.compiled import column, compiled, entry
from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.plan import Plan

__all__ = ["KeyTraffic", "first_need", "needed"]


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
        tasks = np.flatnonzero(plan.exchanged)
        # Tasks are in order of document and position: the last one of a server needs most.
        tasks = tasks[np.argsort(plan.server[tasks], kind="stable")]
        server, place = plan.server[tasks], plan.place[tasks]
        last = np.append((server[1:] != server[:-1]) | (place[1:] != place[:-1]), True)[: len(tasks)]
        server, place, need = server[last], place[last], plan.end[tasks][last]
        chosen = np.zeros(len(layout.documents), dtype=np.bool_)
        chosen[place] = True
        documents = np.flatnonzero(chosen)
        rows = layout.by_document
        rows = rows[chosen[layout.place[rows]]]
        # What is in order of server and then of document: what a rank needs of its own segments is found in it.
        key, wanted = server * len(chosen) + place, layout.rank[rows] * len(chosen) + layout.place[rows]
        at = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
        own = np.where(key[at] == wanted, need[at], 0)
        order = np.lexsort((server, need, place))
        server, place, need = server[order], place[order], need[order]
        return cls(
            documents,
            layout.heads_of(layout.documents[documents]),
            layout.start[rows],
            layout.end[rows],
            layout.rank[rows],
            own,
            np.searchsorted(layout.place[rows], np.append(documents, len(chosen))),
            server,
            need,
            np.searchsorted(place, np.append(documents, len(chosen))),
        )

    def tokens(self, ranks: int) -> tuple[FloatArray, FloatArray]:
        """K/V tokens that each rank sends and receives if nobody passes any on; those of a head group count in part."""
        sent, received = column(np.zeros(ranks)), column(np.zeros(ranks))
        _count(KeyTraffic(*map(column, self)), sent, received)
        return np.asarray(sent), np.asarray(received)


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
