"""Which server computes which query tokens: `CATask` and `Plan`, with invariants, JSON and a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from hf_distca.errors import PlanError
from hf_distca.schedule.layout import IntArray, Layout

__all__ = ["CATask", "KeyTransfers", "Plan"]


class CATask(NamedTuple):
    """Query tokens [start, end) of a document, owned by `home`, computed by `server` against keys [0, end)."""

    document: int
    start: int
    end: int
    home: int
    server: int


class KeyTransfers(NamedTuple):
    """K/V tokens that servers need: tokens [start, end) of a document, held by `source`. One row per run and server."""

    document: IntArray
    start: IntArray
    end: IntArray
    source: IntArray
    server: IntArray


@dataclass(frozen=True, eq=False)
class Plan:
    """The tasks of all ranks for one micro-batch, in five columns, ordered by document and start.

    Building a plan checks it: every query token of the layout is computed exactly once, each task lies in one segment of its
    home rank, and every server exists. Keys need no check of their own: a layout holds its documents from 0 to their end.

    Attributes:
        layout: the placement that the plan is for.
        document, start, end, home, server: the columns of `CATask`.
    """

    layout: Layout
    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray

    def __post_init__(self) -> None:
        order = np.lexsort((self.start, self.document))
        for column in CATask._fields:
            object.__setattr__(self, column, np.asarray(getattr(self, column), dtype=np.int64)[order])
        _check(self)

    @classmethod
    def local(cls, layout: Layout) -> Plan:
        """The plan that moves nothing: every rank computes its own segments."""
        return cls(layout, layout.document, layout.start, layout.end, layout.rank, layout.rank)

    @classmethod
    def from_tasks(cls, layout: Layout, tasks: Sequence[CATask | tuple[int, int, int, int, int]]) -> Plan:
        """Build from rows, as hand-written plans do."""
        columns = np.array(tasks, dtype=np.int64).reshape(-1, 5)
        return cls(layout, *(columns[:, i] for i in range(5)))

    @property
    def tasks(self) -> list[CATask]:
        """The tasks as rows."""
        columns = (getattr(self, name).tolist() for name in CATask._fields)
        return [CATask(*row) for row in zip(*columns, strict=True)]

    @cached_property
    def moved(self) -> bool:
        """Whether anything is exchanged: a query is moved, or the keys of a document do not lie in one run."""
        return bool((self.home != self.server).any() or self.layout.scattered)

    def key_transfers(self, rank: int | None = None) -> KeyTransfers:
        """K/V runs each server needs, one copy per document: its longest prefix. Runs the server holds itself included.

        With `rank`, only those that this rank sends or receives.
        """
        layout = self.layout
        tasks, segments = np.arange(len(self.document)), np.arange(len(layout.document))
        if rank is not None:
            mine = layout.document[layout.rank == rank]
            tasks = tasks[(self.server == rank) | np.isin(self.document, mine)]
            segments = segments[np.isin(layout.document, self.document[tasks])]
        return _join_keys(self, tasks, segments, rank)

    def to_json(self) -> str:
        """The plan and its layout as JSON: ``{"tasks": [[document, start, end, home, server], ...], "rank_segments": ...}``."""
        ranks = [[[s.document, s.start, s.end] for s in self.layout.segments(r)] for r in range(self.layout.world_size)]
        return json.dumps({"tasks": [list(task) for task in self.tasks], "rank_segments": ranks}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; the plan is checked like any other."""
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the text is not JSON: {error}.") from error
        if not isinstance(data, dict) or (missing := {"tasks", "rank_segments"} - data.keys()):
            found = f"missing: {sorted(missing)}" if isinstance(data, dict) else f"found: {type(data).__name__}"
            raise PlanError(f"a plan in JSON is an object with the keys 'tasks' and 'rank_segments', {found}.")
        layout = Layout.from_segments([[(d, a, b - a) for d, a, b in rank] for rank in data["rank_segments"]])
        return cls.from_tasks(layout, data["tasks"])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of layout and tasks. Ranks that hold equal digests carry out the same plan."""
        layout = self.layout
        columns = [layout.document, layout.start, layout.length, layout.offsets, *(getattr(self, c) for c in CATask._fields)]
        text = hashlib.sha256()
        for column in columns:
            text.update(np.int64(len(column)).tobytes() + np.ascontiguousarray(column).tobytes())
        return text.hexdigest()


def _check(plan: Plan) -> None:
    layout, servers = plan.layout, plan.server
    if len(servers) and (servers.min() < 0 or servers.max() >= layout.world_size):
        row = int(np.flatnonzero((servers < 0) | (servers >= layout.world_size))[0])
        raise PlanError(f"{plan.tasks[row]} names a server outside the {layout.world_size} ranks of the layout.")
    order = np.lexsort((layout.start, layout.document))
    segment_document, segment_start = layout.document[order], layout.start[order]
    segment_end, segment_rank = layout.end[order], layout.rank[order]
    if len(plan.document) and not len(order):
        raise PlanError(f"{len(plan.document)} task(s) for a layout without tokens, the first is {plan.tasks[0]}.")
    # Tasks are ordered like the sorted segments: the segment of a task is the last one that starts at or before it.
    # Documents count by their place among the layout's, for a document number times a length may not fit in 64 bits.
    width, documents = int(max(layout.longest, plan.end.max(initial=0))) + 1, np.unique(segment_document)
    segment_key = np.searchsorted(documents, segment_document) * width + segment_start
    at = np.searchsorted(segment_key, np.searchsorted(documents, plan.document) * width + plan.start, side="right") - 1
    at = np.maximum(at, 0)
    inside = (
        (segment_document[at] == plan.document)
        & (segment_start[at] <= plan.start)
        & (plan.start < plan.end)
        & (plan.end <= segment_end[at])
        & (segment_rank[at] == plan.home)
    )
    if not inside.all():
        row = int(np.flatnonzero(~inside)[0])
        raise PlanError(f"{plan.tasks[row]} does not lie in one segment of its home rank.")
    expected = np.concatenate([[0], plan.end[:-1]])[: len(plan.end)]
    fresh = np.concatenate([[True], plan.document[1:] != plan.document[:-1]])[: len(plan.end)]
    wrong = np.flatnonzero(plan.start != np.where(fresh, 0, expected))
    if len(wrong):
        row = int(wrong[0])
        seen = 0 if fresh[row] else int(expected[row])
        raise PlanError(f"{plan.tasks[row]} starts where position {seen} is next: every query token must be computed once.")
    computed, held = int((plan.end - plan.start).sum()), int(layout.length.sum())
    if computed != held:
        raise PlanError(f"the tasks compute {computed} query tokens, the layout holds {held}.")


def _join_keys(plan: Plan, tasks: IntArray, segments: IntArray, rank: int | None) -> KeyTransfers:
    """Join (server, document, longest prefix) with the segments of the document."""
    layout = plan.layout
    order = tasks[np.lexsort((plan.end[tasks], plan.document[tasks], plan.server[tasks]))]
    server, document, end = plan.server[order], plan.document[order], plan.end[order]
    last = np.concatenate([(server[1:] != server[:-1]) | (document[1:] != document[:-1]), [True]])[: len(order)]
    server, document, end = server[last], document[last], end[last]

    by_document = segments[np.lexsort((layout.start[segments], layout.document[segments]))]
    first = np.searchsorted(layout.document[by_document], document, side="left")
    count = np.searchsorted(layout.document[by_document], document, side="right") - first
    need = np.repeat(np.arange(len(document)), count)
    within = np.arange(len(need)) - np.repeat(np.cumsum(count) - count, count)
    segment = by_document[np.repeat(first, count) + within]

    start, stop = layout.start[segment], np.minimum(layout.end[segment], end[need])
    source, to = layout.rank[segment], server[need]
    keep = start < stop
    if rank is not None:
        keep &= (source == rank) | (to == rank)
    return KeyTransfers(document[need][keep], start[keep], stop[keep], source[keep], to[keep])
