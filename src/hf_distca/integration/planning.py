"""`Planner`: what ranks announce to each other before they share attention, and the plans that all of them make of it.

Several plans can be asked for at once, those of two nano-batches or of the micro-batches of an optimizer step: they take the
same two small collectives as one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError, LayoutError
from hf_distca.integration.documents import LocalDocuments
from hf_distca.integration.history import History, Micro
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.scheduler import balance

__all__ = ["Kind", "Planned", "Planner"]

# A rank's row: this header, (nanoseconds, bytes) of each measured plan, then of each plan that is asked for (half, spans,
# context, documents) and its documents.
_COUNT, _AGREEMENT, _EXCHANGES, _REQUESTS, _MEASURED = range(5)
_HEADER = 5
_REQUEST = 4

Slot = tuple[int | None, int | None, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells the plans of one micro-batch apart: the kind of layer, and the part of the batch.

    Attributes:
        cost: cost model of the layer, window included.
        chunk: length of the chunks that documents are cut into, None if they are whole.
        half: 0 for a whole batch, 1 and 2 for nano-batches.
        config: the settings that it is planned under.
    """

    cost: CostModel
    chunk: int | None
    half: int
    config: DistCAConfig

    @property
    def slot(self) -> Slot:
        """Window, chunk and half: of each a micro-batch has one plan at most."""
        return self.cost.window, self.chunk, self.half


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and what it was made of.

    Attributes:
        kind: what it is for.
        plan: the same on all ranks.
        rows: the documents that this rank announced for it, as in `LocalDocuments`.
        milliseconds: what planning took, exchange of documents included.
    """

    kind: Kind
    plan: Plan
    rows: IntArray
    milliseconds: float


class Planner:
    """Plans micro-batches together with the other ranks, and collects what was planned and measured.

    Attributes:
        history: planned and measured figures.
        number: of the micro-batch that was planned last, from 1.
    """

    def __init__(self, meter: Meter) -> None:
        self.history = History()
        self.number = 0
        self._meter = meter
        self._asked = 0
        self._used: set[Slot] = set()  # in this micro-batch
        self._recent: dict[Kind, None] = {}  # since `recent_kinds` was asked
        # What ranks measured is announced with the next plan of the same slot: until then all of it has run.
        self._measured: dict[Slot, list[tuple[Micro, Meter]]] = {}

    @property
    def next_number(self) -> int:
        """Number of a micro-batch that has not begun."""
        return self.number + 1

    def recent_kinds(self) -> list[Kind]:
        """The kinds of plan that were used since the last call, in order of first use; the same on all ranks."""
        recent, self._recent = list(self._recent), {}
        return recent

    def plan(
        self, requests: Sequence[tuple[LocalDocuments, Kind]], group: AttentionGroup, place: str | None = None
    ) -> list[Planned]:
        """Plan this rank's documents together with those of the other ranks, which must ask for the same kinds of plans.

        Args:
            requests: documents, and what the plan is for.
            group: the ranks.
            place: what is planned, for errors; the micro-batch at hand if None.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
        """
        started = time.perf_counter()
        place = place or f"micro-batch {self._number_of(kind for _, kind in requests)}"
        layouts = self._announce(requests, group, place)
        # Layers that are left whole hide nothing, whatever the settings are.
        plans = [
            balance(layout, kind.cost, replace(kind.config, ping_pong=kind.half > 0))
            for layout, (_, kind) in zip(layouts, requests, strict=True)
        ]
        # Plans come from equal inputs, but an exchange with unequal plans would hang: compare before using them.
        digests = np.array([int(plan.digest[:15], 16) for plan in plans], dtype=np.int64)
        gathered = np.stack(group.gather(digests, doing=f"comparing plans of {place}"))
        for column in gathered.T:
            _compare(column, group, "plans for the same documents", place, "use one version of hf_distca and numpy")
        milliseconds = (time.perf_counter() - started) * 1e3 / len(requests)
        return [Planned(kind, plan, local.rows, milliseconds) for (local, kind), plan in zip(requests, plans, strict=True)]

    def use(self, planned: Planned, local: LocalDocuments) -> Meter:
        """Count a plan as one of the micro-batch at hand.

        Returns:
            The meter for what is done by it.

        Raises:
            LayoutError: if it was made for other documents than `local`.
        """
        if not np.array_equal(planned.rows, local.rows):
            raise LayoutError(
                f"a micro-batch has documents of {local.rows[:, 2].tolist()} tokens, and was announced with documents of "
                f"{planned.rows[:, 2].tolist()}: leave batches as they are after plan_ahead."
            )
        kind = planned.kind
        self.number = self._number_of([kind])
        if kind.slot in self._used:
            self._used.clear()
        self._used.add(kind.slot)
        self._recent[kind] = None
        micro, meter = Micro.of(planned.plan, kind.cost, planned.milliseconds), Meter(self._meter)
        self.history.planned(micro, self.number)
        self._measured.setdefault(kind.slot, []).append((micro, meter))
        return meter

    def _number_of(self, kinds: Iterable[Kind]) -> int:
        """Number of the micro-batch that these plans are for: a new one if such a plan was used in the last one."""
        return self.number + (self.number == 0 or any(kind.slot in self._used for kind in kinds))

    def _announce(self, requests: Sequence[tuple[LocalDocuments, Kind]], group: AttentionGroup, place: str) -> list[Layout]:
        """Exchange documents; on the way, compare settings and collect what each rank measured."""
        self._asked += 1
        slots = dict.fromkeys(kind.slot for _, kind in requests)
        measured = [(slot, *pair) for slot in slots for pair in self._measured.pop(slot, [])]
        header = np.zeros(_HEADER, dtype=np.int64)
        header[_COUNT], header[_REQUESTS], header[_MEASURED] = self._asked, len(requests), len(measured)
        header[_AGREEMENT] = _fingerprint(tuple(dict.fromkeys((kind.config, kind.cost) for _, kind in requests)))
        header[_EXCHANGES] = self._meter.dispatches + self._meter.returns
        figures = [(int(meter.seconds * 1e9), meter.sent_bytes) for *_, meter in measured]
        parts = [header, np.array(figures, dtype=np.int64).reshape(-1)]
        for local, kind in requests:
            parts += [np.array([local.spans, kind.half, local.context > 0, len(local.rows)]), local.rows.reshape(-1)]
        announced = [_Announced.read(row) for row in group.gather(np.concatenate(parts), doing=f"planning {place}")]
        _compare_announced(announced, group, place)
        for at, ((_, _, half), micro, meter) in enumerate(measured):
            seconds, sent = np.stack([one.figures[at] for one in announced]).T
            # Both nano-batches go through each layer: one of them counts it.
            self.history.measured(micro, seconds / 1e9, sent, 0 if half == 2 else meter.calls)
        by_request = zip(*(one.requests for one in announced), strict=True)
        return [_layout(asked) for asked in by_request]


@dataclass(frozen=True, eq=False)
class _Asked:
    """One rank's side of a plan that is asked for."""

    spans: bool
    half: int
    context: int
    rows: IntArray


@dataclass(frozen=True, eq=False)
class _Announced:
    """What one rank announced."""

    header: IntArray
    figures: IntArray
    requests: list[_Asked]

    @classmethod
    def read(cls, row: IntArray) -> _Announced:
        header = row[:_HEADER]
        at = _HEADER + 2 * int(header[_MEASURED])
        figures, requests = row[_HEADER:at].reshape(-1, 2), []
        for _ in range(int(header[_REQUESTS])):
            spans, half, context, count = row[at : at + _REQUEST].tolist()
            begin, at = at + _REQUEST, at + _REQUEST + 3 * count
            requests.append(_Asked(bool(spans), half, context, row[begin:at].reshape(-1, 3)))
        return cls(header, figures, requests)


def _compare_announced(announced: list[_Announced], group: AttentionGroup, place: str) -> None:
    forwards = "every rank must run the same number of training forwards"
    headers = np.stack([one.header for one in announced])
    columns: list[tuple[Any, str, str]] = [
        (headers[:, _COUNT], "numbers of plans asked for", forwards),
        (
            headers[:, _AGREEMENT],
            "settings (DistCAConfig, attention heads and widths, version)",
            "give every rank the same ones",
        ),
    ]
    for asked in zip(*(one.requests for one in announced), strict=False):
        spans, halves = ([getattr(one, name) for one in asked] for name in ("spans", "half"))
        columns += [
            (spans, "ways of giving documents", "use the same collator on every rank"),
            (halves, "nano-batches (0 is a whole batch)", "give every rank the same model"),
        ]
    columns += [
        (headers[:, _REQUESTS], "numbers of micro-batches to plan at once", "give every rank as many in an optimizer step"),
        (headers[:, _EXCHANGES], "numbers of exchanges up to here", "run the same layers forward and backward on every rank"),
        (headers[:, _MEASURED], "numbers of measured micro-batches", forwards),
    ]
    for values, what, remedy in columns:
        _compare(values, group, what, place, remedy)


def _compare(values: Any, group: AttentionGroup, what: str, place: str, remedy: str) -> None:
    seen = [int(value) for value in values]
    if len(set(seen)) == 1:
        return
    by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in zip(group.ranks, seen, strict=True))
    raise DistCADesyncError(f"ranks have different {what} in {place}: {by_rank}; {remedy}.")


def _layout(ranks: Sequence[_Asked]) -> Layout:
    """The layout of what ranks announced; the first row of a rank with context is the beginning of the document in its second."""
    spans, contexts = ranks[0].spans, [rank.context for rank in ranks]
    if not spans and not any(contexts):
        return Layout.from_lengths([rank.rows[:, 2].tolist() for rank in ranks])
    if not spans:
        first = np.cumsum([0, *(len(rank.rows) for rank in ranks)]).tolist()
        numbered = [
            [(base + max(place, rank.context), start, length) for place, (_, start, length) in enumerate(rank.rows.tolist())]
            for base, rank in zip(first, ranks, strict=False)
        ]
        return Layout.from_segments(numbered, contexts)
    if any((rank.rows[:, 0] >= 0).any() for rank in ranks):
        return Layout.from_segments([[tuple(row) for row in rank.rows.tolist()] for rank in ranks])
    return Layout.from_runs([list(map(tuple, rank.rows[:, 1:].tolist())) for rank in ranks])


@lru_cache
def _fingerprint(settings: tuple[tuple[DistCAConfig, CostModel], ...]) -> int:
    text = " ".join(f"{config} {cost.shape} {cost}" for config, cost in settings) + version("hf-distca")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
