"""Which server computes which query tokens: `CATask` and `Plan`, with invariants, JSON and a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.errors import PlanError
from hf_distca.schedule.layout import IntArray, KeyTransfers, Layout, as_integers, repeated

__all__ = ["CATask", "KeyTransfers", "Plan", "Relays"]


class CATask(NamedTuple):
    """Query tokens [start, end) of a document, owned by `home`, computed by `server` against keys [0, end).

    In a plan with a window, against keys [max(0, start - window + 1), end).
    """

    document: int
    start: int
    end: int
    home: int
    server: int


class Relays(NamedTuple):
    """Runs of keys that a server, its relay, gets first and passes on to the others that need them; see `schedule.relays`.

    Ordered by document and start. The runs of a document follow each other from position 0, each with another relay.
    """

    document: IntArray
    start: IntArray
    end: IntArray
    relay: IntArray


@dataclass(frozen=True, eq=False)
class Plan:
    """The tasks of all ranks for one micro-batch, in five columns, ordered by document and start.

    Building a plan checks it: every query token of the layout is computed exactly once, each task lies in one segment of its
    home rank, and every server exists. Keys need no check of their own: a layout holds its documents from 0 to their end.

    Attributes:
        layout: the placement that the plan is for.
        document, start, end, home, server: the columns of `CATask`.
        window: keys that a query position sees, its own included, in the layers that the plan is for; None if it sees all.
        relays: keys that are passed on; None if every server gets all from the ranks that hold them. Not in the JSON, for they
            follow from the rest and from a cost model (`schedule.relays`).
        place: of each task, the place of its document among those of the layout.
        moved: whether anything is exchanged: a query is moved, or the keys of a document do not lie in one run. A window that
            ends at every border between runs would need no exchange, and is not looked for.
    """

    layout: Layout
    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    window: int | None = None
    relays: Relays | None = None
    place: IntArray = field(init=False, repr=False)
    moved: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise PlanError(f"window={self.window!r}: a query position sees at least itself, or pass None for no window.")
        if self.window is not None and self.layout.groups > 1:
            raise PlanError(f"window={self.window}: only documents of layers without a window can be split by heads.")
        columns = [np.ascontiguousarray(getattr(self, name), dtype=np.int64) for name in CATask._fields]
        document, start = columns[:2]
        if ((document[1:] < document[:-1]) | ((document[1:] == document[:-1]) & (start[1:] < start[:-1]))).any():
            order = np.lexsort((start, document))
            columns = [column[order] for column in columns]
        for name, column in zip(CATask._fields, columns, strict=True):
            object.__setattr__(self, name, column)
        object.__setattr__(self, "place", self._check())
        object.__setattr__(self, "moved", self.layout.scattered or bool((self.home != self.server).any()))

    def _check(self) -> IntArray:
        """Refuse tasks that do not compute every query token once; of each the place of its document."""
        layout = self.layout
        self._refuse(
            (self.server < 0) | (self.server >= layout.world_size),
            f"names a server outside the {layout.world_size} ranks of the layout",
        )
        held, computed = int(layout.length[layout.queries].sum()), int((self.end - self.start).sum())
        if not held and len(self.document):
            raise PlanError(f"{len(self.document)} task(s) for a layout without tokens, the first is {self.tasks[0]}.")
        self._refuse(self.end > layout.longest, f"ends behind the longest document, which has {layout.longest} tokens")
        place = layout.place_of(self.document)
        segment = layout.segment_of(place, self.start)
        row = layout.by_document[np.maximum(segment, 0)]
        outside = (self.start < 0) | (layout.document[row] != self.document) | (self.start >= self.end)
        outside |= (self.end > layout.end[row]) | (self.home != layout.rank[row]) | ~layout.queries[row]
        self._refuse(outside, "does not lie in one segment of its home rank")
        expected = layout.start[row]
        expected[1:] = np.where(row[1:] == row[:-1], self.end[:-1], expected[1:])
        wrong = np.flatnonzero(self.start != expected)
        if len(wrong):
            self._refuse(
                self.start != expected,
                f"starts where position {expected[wrong[0]]} is next: every query token must be computed once",
            )
        if computed != held:
            raise PlanError(f"the tasks compute {computed} query tokens, the layout holds {held}.")
        return place

    def _refuse(self, wrong: npt.NDArray[np.bool_], what: str) -> None:
        """Say what is wrong with the first of some tasks."""
        if wrong.any():
            raise PlanError(f"{self.tasks[int(wrong.argmax())]} {what}.")

    @classmethod
    def local(cls, layout: Layout, window: int | None = None) -> Plan:
        """The plan that moves nothing: every rank computes its own segments."""
        rows = layout.by_document
        if layout.context.any():
            rows = rows[layout.queries[rows]]
        rank = layout.rank[rows]
        return cls(layout, layout.document[rows], layout.start[rows], layout.end[rows], rank, rank, window)

    @classmethod
    def from_tasks(
        cls, layout: Layout, tasks: Sequence[CATask | tuple[int, int, int, int, int]], window: int | None = None
    ) -> Plan:
        """Build from rows, as hand-written plans do."""
        if window is not None and type(window) is not int:
            raise PlanError(f"window={window!r} must be a whole number or None.")
        rows = as_integers(tasks, "tasks as (document, start, end, home, server)", (-1, 5), PlanError)
        document, start, end, home, server = rows.T
        return cls(layout, document, start, end, home, server, window)

    def split(self, apart: npt.NDArray[np.bool_], groups: int) -> Plan:
        """The same tasks on a layout in which some documents with all heads are split; see `Layout.split`."""
        numbers = self.document if self.layout.groups == groups else self.document * (groups + 1)
        row, part = repeated(apart[self.place], groups)
        layout = self.layout.split(apart, groups)
        return Plan(layout, numbers[row] + part, self.start[row], self.end[row], self.home[row], self.server[row], self.window)

    def with_relays(self, relays: Relays | None) -> Plan:
        """The plan with these relays. They are taken as they are."""
        plan = object.__new__(Plan)
        vars(plan).update({**vars(self), "relays": relays})
        vars(plan).pop("digest", None)
        return plan

    @property
    def tasks(self) -> list[CATask]:
        """The tasks as rows."""
        columns = (getattr(self, name).tolist() for name in CATask._fields)
        return [CATask(*row) for row in zip(*columns, strict=True)]

    @cached_property
    def heads(self) -> npt.NDArray[np.float64]:
        """What part of the heads each task computes: 1, or that of a head group."""
        return self.layout.heads_of(self.document)

    @cached_property
    def exchanged(self) -> npt.NDArray[np.bool_]:
        """Of each task, whether its document lies on several ranks, or is moved in part: the keys of all others stay at home."""
        documents = self.layout.spans.copy()
        documents[self.place[self.home != self.server]] = True
        return documents[self.place]

    def key_transfers(self, among: npt.NDArray[np.bool_] | None = None) -> KeyTransfers:
        """K/V runs each server needs, each token once, cut where segments end. Runs the server holds itself included.

        Of a document, that is its longest prefix or, in a plan with a window, the union of what its tasks need. Rows of one
        server are in order of document and start. With `among`, only what the tasks need that it is true for.
        """
        tasks = np.arange(len(self.document)) if among is None else np.flatnonzero(among)
        # Tasks are in order of document and position, and never overlap: those of one server are in order of their ends.
        tasks = tasks[np.argsort(self.server[tasks], kind="stable")]
        columns = self.server[tasks], self.document[tasks], self.start[tasks], self.end[tasks]
        return self.layout.needed_keys(*columns, window=self.window)

    def to_json(self) -> str:
        """The plan and its layout as JSON: ``{"tasks": [[document, start, end, home, server], ...], "rank_segments": ...}``.

        The keys ``"window"``, ``"context"`` and ``"groups"`` are there if the plan has them.
        """
        ranks = [[[s.document, s.start, s.end] for s in self.layout.segments(r)] for r in range(self.layout.world_size)]
        data: dict[str, Any] = {"tasks": [list(task) for task in self.tasks], "rank_segments": ranks}
        if self.window is not None:
            data["window"] = self.window
        if self.layout.context.any():
            data["context"] = self.layout.context.tolist()
        if self.layout.groups > 1:
            data["groups"] = self.layout.groups
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; the plan is checked like any other."""
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the text is not JSON: {error}.") from error
        if not isinstance(data, dict) or (missing := {"tasks", "rank_segments"} - data.keys()):
            problem = f"missing: {sorted(missing)}" if isinstance(data, dict) else f"found: {type(data).__name__}"
            raise PlanError(f"a plan in JSON is an object with the keys 'tasks' and 'rank_segments', {problem}.")
        window = data.get("window")
        if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
            raise PlanError(f"the window of a plan in JSON is a whole number or null, found: {window!r}.")
        if not (isinstance(ranks := data["rank_segments"], list) and all(isinstance(rank, list) for rank in ranks)):
            raise PlanError(f"'rank_segments' is a list of segments for each rank, found: {str(ranks)[:100]}.")
        rows = [as_integers(rank, "segments as [document, start, end]", (-1, 3), PlanError).tolist() for rank in ranks]
        layout = Layout.from_segments([[(d, a, b - a) for d, a, b in rank] for rank in rows], data.get("context", ()))
        groups = data.get("groups", 1)
        if type(groups) is not int or groups < 1:
            raise PlanError(f"the head groups of a plan in JSON are a whole number of at least 1, found: {groups!r}.")
        layout = replace(layout, groups=groups)
        return cls.from_tasks(layout, data["tasks"], window)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of layout, tasks and window. Ranks that hold equal digests carry out the same plan."""
        layout = self.layout
        columns = [layout.document, layout.start, layout.length, layout.offsets, layout.context]
        columns += [getattr(self, column) for column in CATask._fields]
        text = hashlib.sha256()
        for column in columns:
            text.update(np.int64(len(column)).tobytes() + np.ascontiguousarray(column).tobytes())
        if self.window is not None:
            text.update(b"window" + np.int64(self.window).tobytes())
        if layout.groups > 1:
            text.update(b"groups" + np.int64(layout.groups).tobytes())
        for column in self.relays or ():
            text.update(b"relays" + np.int64(len(column)).tobytes() + np.ascontiguousarray(column).tobytes())
        return text.hexdigest()
