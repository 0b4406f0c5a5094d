"""Assignment of query tokens to servers: `CATask` and `Plan`, with invariants, JSON and a
digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.errors import PlanError
from hf_distca.schedule.layout import (
    BoolArray,
    IntArray,
    Layout,
    enumerate_ranges,
    mark_changes,
    require_integers,
)
from hf_distca.schedule.placement import build_layout


class CATask(NamedTuple):
    """Query tokens [start, end) of a document, owned by `home`, computed by `server` against keys
    [0, end).

    In a plan with a window, the keys are [max(0, start - window + 1), end).
    """

    document: int
    start: int
    end: int
    home: int
    server: int


class KeyTransfers(NamedTuple):
    """K/V tokens that servers need: tokens [start, end) of a document, held by `source`.

    There is one row for each run and server.
    """

    document: IntArray
    start: IntArray
    end: IntArray
    source: IntArray
    server: IntArray


class Relays(NamedTuple):
    """Runs of keys that relays forward; see `schedule.relays`.

    A relay is a server that gets a run first, and forwards it to the other servers of its unit
    (`schedule.relays.find_units`) that need it. The runs of a unit follow each other from position
    0, and each run has its own relay.

    Attributes:
        document, start, end, relay: the columns.
        per_node: number of ranks of a node. Without nodes, it is at least the number of all ranks.
    """

    document: IntArray
    start: IntArray
    end: IntArray
    relay: IntArray
    per_node: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The tasks of all ranks for one micro-batch, in five columns, ordered by document and start.

    Building a plan checks it: every query token of the layout is computed exactly once, each task
    lies in one segment of its home rank, and every server exists. Keys need no check, because a
    layout holds every document from 0 to its end.

    Attributes:
        layout: the placement that the plan is for.
        document, start, end, home, server: the columns of `CATask`.
        window: keys that a query position sees, its own included, in the layers that the plan is
            for; None if it sees all keys before it.
        relays: keys that are forwarded; None if every server gets its keys from the ranks that hold
            them. The JSON leaves them out, because they follow from the rest and from a cost model
            (`schedule.relays`).
        segment: for each task, its row of the layout.
        moved: True if a query is moved, or if the keys of a document do not lie in one run. Tokens
            must then be exchanged, except in the rare case that no window reaches from one run into
            another.
    """

    layout: Layout
    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    window: int | None = None
    relays: Relays | None = None
    segment: IntArray = field(init=False, repr=False)
    moved: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise PlanError(
                f"window={self.window!r} must be a whole number of at least 1, because a query"
                " position sees itself, or None for no window."
            )
        if self.window is not None and self.layout.groups > 1:
            raise PlanError(
                f"window={self.window}: only documents of layers without a window can be split by"
                " heads."
            )
        columns = [
            np.ascontiguousarray(getattr(self, name), dtype=np.int64) for name in CATask._fields
        ]
        document, start = columns[:2]
        if (
            (document[1:] < document[:-1])
            | ((document[1:] == document[:-1]) & (start[1:] < start[:-1]))
        ).any():
            order = np.lexsort((start, document))
            columns = [column[order] for column in columns]
        vars(self).update(zip(CATask._fields, columns, strict=True))
        vars(self).update(
            segment=self._find_segments(),
            moved=self.layout.is_scattered or bool((self.home != self.server).any()),
        )

    def _find_segments(self) -> IntArray:
        """Find the row of the layout that each task lies in.

        Raise an error unless the tasks compute every query token exactly once.
        """
        layout = self.layout
        self._check_tasks(
            (self.server < 0) | (self.server >= layout.world_size),
            f"names a server outside the {layout.world_size} ranks of the layout",
        )
        held = int(layout.length[layout.has_queries].sum())
        self._check_tasks(
            np.full(len(self.document), not held), "is in a plan for a layout without tokens"
        )
        segment = layout.by_document[
            np.maximum(layout.find_segments(layout.find_places(self.document), self.start), 0)
        ]
        self._check_tasks(
            (self.start < 0)
            | (layout.document[segment] != self.document)
            | (self.start >= self.end)
            | (self.end > layout.end[segment])
            | (self.home != layout.rank[segment])
            | ~layout.has_queries[segment],
            "does not lie in one segment of its home rank",
        )
        expected = layout.start[segment]
        expected[1:] = np.where(segment[1:] == segment[:-1], self.end[:-1], expected[1:])
        wrong = self.start != expected
        following = expected[wrong.argmax()] if len(wrong) else 0
        self._check_tasks(
            wrong,
            f"does not start at position {following}, which is next: every query token must be"
            " computed once",
        )
        computed = int((self.end - self.start).sum())
        if computed != held:
            raise PlanError(
                f"the tasks compute {computed} query tokens, but the layout has {held}: every query"
                " token must be computed once."
            )
        return segment

    def _check_tasks(self, wrong: BoolArray, what: str) -> None:
        """Raise an error about the first wrong task, if there is any."""
        if wrong.any():
            raise PlanError(f"{self.tasks[int(wrong.argmax())]} {what}.")

    @classmethod
    def make_local(cls, layout: Layout, window: int | None = None) -> Plan:
        """Make the plan that moves nothing: every rank computes its own segments."""
        rows = layout.by_document[layout.has_queries[layout.by_document]]
        rank = layout.rank[rows]
        return cls(
            layout, layout.document[rows], layout.start[rows], layout.end[rows], rank, rank, window
        )

    @classmethod
    def from_tasks(
        cls,
        layout: Layout,
        tasks: Sequence[CATask | tuple[int, int, int, int, int]],
        window: int | None = None,
    ) -> Plan:
        """Build a plan from rows, for example from tasks written by hand."""
        rows = require_integers(
            tasks, "tasks as (document, start, end, home, server)", (-1, 5), PlanError
        )
        document, start, end, home, server = rows.T
        return cls(layout, document, start, end, home, server, window)

    def with_relays(self, relays: Relays | None) -> Plan:
        """Return the plan with these relays, without checking the relays or the tasks."""
        plan = copy(self)
        vars(plan).update(relays=relays)
        vars(plan).pop("digest", None)
        return plan

    @property
    def tasks(self) -> list[CATask]:
        """The tasks as rows."""
        return list(map(CATask, *(getattr(self, name).tolist() for name in CATask._fields)))

    @cached_property
    def place(self) -> IntArray:
        """Index of each task's document in `layout.documents`."""
        return self.layout.place[self.segment]

    @cached_property
    def heads(self) -> npt.NDArray[np.float64]:
        """Fraction of the heads that each task computes: 1, or less for a head group."""
        return self.layout.compute_head_fractions(self.document)

    @cached_property
    def first_key(self) -> IntArray:
        """First key that each task needs."""
        return (
            np.zeros_like(self.start)
            if self.window is None
            else np.maximum(self.start - (self.window - 1), 0)
        )

    @cached_property
    def needs_exchange(self) -> BoolArray:
        """True for each task that does not run on its home, or whose keys do not lie in one run of
        its home's tokens.
        """
        return np.asarray(
            (self.home != self.server) | (self.first_key < self.layout.run_start[self.segment])
        )

    def list_key_transfers(self, tasks: IntArray | None = None) -> KeyTransfers:
        """List the runs of keys and values that each server needs, each token once. Runs are cut
        where segments end.

        Runs that the server holds itself are included.

        A server needs one prefix of each document: the longest that any of its tasks needs. In a
        plan with a window, it needs the union of the ranges that its tasks need. Rows of one server
        are in order of document and start.

        Args:
            tasks: indices of the tasks whose keys are listed, in increasing order; all tasks if not
                given.
        """
        tasks = np.arange(len(self.document)) if tasks is None else tasks
        server = self.server[tasks]
        # Tasks are in order of document and position and never overlap, so the tasks of one server
        # are also in order of their ends.
        order = np.argsort(server, kind="stable")
        tasks, server = tasks[order], server[order]
        layout = self.layout
        place = self.place[tasks]
        first = self.first_key[tasks]
        end = self.end[tasks]
        # Neighbouring rows share a run if the ranges of their keys overlap or touch.
        starts_range = mark_changes(server, place)
        starts_range[1:] |= first[1:] > end[:-1]
        server = server[starts_range]
        place = place[starts_range]
        first = first[starts_range]
        end = end[np.append(starts_range, True)[1:]]
        run, segment = enumerate_ranges(
            layout.find_segments(place, first), layout.find_segments(place, end - 1) + 1
        )
        row = layout.by_document[segment]
        first, end = (
            np.maximum(layout.start[row], first[run]),
            np.minimum(layout.end[row], end[run]),
        )
        return KeyTransfers(layout.document[row], first, end, layout.rank[row], server[run])

    def to_json(self) -> str:
        """Return the plan and its layout as JSON: ``{"tasks": [[document, start, end,
        home, server], ...], "rank_segments": ...}``.

        The keys ``"window"``, ``"context"`` and ``"groups"`` are present only if the plan needs
        them.
        """
        layout = self.layout
        data: dict[str, Any] = {
            "tasks": self.tasks,
            "rank_segments": [
                [[s.document, s.start, s.end] for s in layout.list_segments(rank)]
                for rank in range(layout.world_size)
            ],
            "window": self.window,
            "context": layout.context.tolist() if layout.context.any() else None,
            "groups": layout.groups if layout.groups > 1 else None,
        }
        return json.dumps(
            {name: value for name, value in data.items() if value is not None},
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote, and check it like any other plan."""
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the text is not JSON: {error}.") from error
        if not isinstance(data, dict) or (missing := {"tasks", "rank_segments"} - data.keys()):
            problem = (
                f"missing: {sorted(missing)}"
                if isinstance(data, dict)
                else f"found: {type(data).__name__}"
            )
            raise PlanError(
                "a plan in JSON must be an object with the keys 'tasks' and 'rank_segments'"
                f" ({problem})."
            )
        groups = data.get("groups", 1)
        if type(groups) is not int or groups < 1:
            raise PlanError(
                f"the number of head groups of a plan in JSON must be a whole number of at least 1,"
                f" got {groups!r}."
            )
        layout = replace(
            build_layout(data, "a plan in JSON"),
            context=require_integers(data.get("context", ()), "context"),
            groups=groups,
        )
        return cls.from_tasks(layout, data["tasks"], data.get("window"))

    @cached_property
    def digest(self) -> str:
        """Hash of layout, tasks, window and relays (SHA-256).

        Ranks with equal digests carry out the same plan.
        """
        layout = self.layout
        columns = (
            *(layout.document, layout.start, layout.length, layout.offsets, layout.context),
            *(getattr(self, name) for name in CATask._fields),
            np.array([self.window or 0, layout.groups]),
            *(np.atleast_1d(column) for column in self.relays or ()),
        )
        parts = [
            np.int64(len(column)).tobytes() + np.ascontiguousarray(column).tobytes()
            for column in columns
        ]
        return hashlib.sha256(b"".join(parts)).hexdigest()
