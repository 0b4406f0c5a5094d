"""What a rank announces to the others before they share attention: settings, documents, and what it measured.

An announcement is one row of integers, so nothing that comes from another rank is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import version

import numpy as np

from hf_distca.agreement.documents import LocalDocuments
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import IntArray, Layout

__all__ = ["Announcement", "Asked", "Kind", "Slot", "agree", "check_equal", "layout_of"]

# This header, (nanoseconds, bytes) of each measured plan, then of each plan that is asked for (spans, half, context,
# documents) and its documents.
_COUNT, _SETTINGS, _EXCHANGES, _REQUESTS, _MEASURED = range(5)
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
class Asked:
    """One rank's side of a plan that is asked for; `context` says whether its first document begins with context."""

    spans: bool
    half: int
    context: int
    rows: IntArray


@dataclass(frozen=True, eq=False)
class Announcement:
    """What one rank announces.

    Attributes:
        count: announcements so far.
        settings: fingerprint of what ranks must have in common.
        exchanges: dispatches and returns so far.
        figures: int64 (measured plans, 2), kernel nanoseconds and sent bytes of each.
        requests: the plans that are asked for.
    """

    count: int
    settings: int
    exchanges: int
    figures: IntArray
    requests: list[Asked]

    @classmethod
    def of(
        cls, requests: Sequence[tuple[LocalDocuments, Kind]], figures: Sequence[tuple[int, int]], count: int, exchanges: int
    ) -> Announcement:
        """This rank's announcement."""
        asked = [Asked(local.spans, kind.half, int(local.context > 0), local.rows) for local, kind in requests]
        measured = np.array(figures, dtype=np.int64).reshape(-1, 2)
        return cls(count, _fingerprint(_common(kind for _, kind in requests)), exchanges, measured, asked)

    def row(self) -> IntArray:
        """The announcement as int64 numbers."""
        parts = [self.count, self.settings, self.exchanges, len(self.requests), len(self.figures)], self.figures.reshape(-1)
        asked = [([one.spans, one.half, one.context, len(one.rows)], one.rows.reshape(-1)) for one in self.requests]
        return np.concatenate([np.asarray(part, dtype=np.int64) for pair in (parts, *asked) for part in pair])

    @classmethod
    def read(cls, row: IntArray) -> Announcement:
        """The announcement that a row holds."""
        at = _HEADER + 2 * int(row[_MEASURED])
        figures, requests = row[_HEADER:at].reshape(-1, 2), []
        for _ in range(int(row[_REQUESTS])):
            spans, half, context, count = row[at : at + _REQUEST].tolist()
            begin, at = at + _REQUEST, at + _REQUEST + 3 * count
            requests.append(Asked(bool(spans), half, context, row[begin:at].reshape(-1, 3)))
        return cls(int(row[_COUNT]), int(row[_SETTINGS]), int(row[_EXCHANGES]), figures, requests)


def agree(announced: Sequence[Announcement], kinds: Iterable[Kind], group: AttentionGroup, place: str) -> None:
    """Compare what ranks announced, in one order on all of them.

    Raises:
        DistCADesyncError: if anything differs; settings by name, which takes one more exchange.
    """
    forwards = "every rank must run the same number of training forwards"
    check_equal(group, [one.count for one in announced], "numbers of plans asked for", place, forwards)
    if len({one.settings for one in announced}) > 1:
        raise _settings_differ(_common(kinds), group, place)
    for asked in zip(*(one.requests for one in announced), strict=False):
        spans, halves = [one.spans for one in asked], [one.half for one in asked]
        check_equal(group, spans, "ways of giving documents", place, "use the same collator on every rank")
        check_equal(group, halves, "nano-batches (0 is a whole batch)", place, "give every rank the same model")
    for counts, what, remedy in (
        ([len(one.requests) for one in announced], "numbers of plans at once", "give every rank as many micro-batches a step"),
        ([one.exchanges for one in announced], "numbers of exchanges up to here", "run the same layers on every rank"),
        ([len(one.figures) for one in announced], "numbers of measured micro-batches", forwards),
    ):
        check_equal(group, counts, what, place, remedy)


def check_equal(group: AttentionGroup, values: Sequence[int], what: str, place: str, remedy: str) -> None:
    """Compare one number of each rank.

    Raises:
        DistCADesyncError: if they are not all the same.
    """
    if len(set(values)) > 1:
        by_rank = ", ".join(f"rank {rank}: {int(value)}" for rank, value in zip(group.ranks, values, strict=True))
        raise DistCADesyncError(f"ranks have different {what} in {place}: {by_rank}; {remedy}.")


def layout_of(ranks: Sequence[Asked]) -> Layout:
    """The layout of what ranks ask for; the first row of a rank with context is the beginning of the document in its second."""
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


def _common(kinds: Iterable[Kind]) -> tuple[tuple[DistCAConfig, CostModel], ...]:
    """What ranks must have in common."""
    return tuple(dict.fromkeys((kind.config, kind.cost) for kind in kinds))


@lru_cache
def _fingerprint(common: tuple[tuple[DistCAConfig, CostModel], ...]) -> int:
    return int.from_bytes(hashlib.sha256(_by_name(common).encode()).digest()[:7], "big")


def _by_name(common: tuple[tuple[DistCAConfig, CostModel], ...]) -> str:
    """What ranks must have in common, as JSON of names and values."""
    values: dict[str, list[str]] = {"hf-distca": [version("hf-distca")]}
    for config, cost in common:
        for part in (config, cost.shape, cost):
            for name in (field.name for field in fields(part) if field.name not in ("shape", "name")):
                values.setdefault(name, []).append(repr(getattr(part, name)))
    return json.dumps({name: ", ".join(dict.fromkeys(each)) for name, each in values.items()})


def _settings_differ(common: tuple[tuple[DistCAConfig, CostModel], ...], group: AttentionGroup, place: str) -> DistCADesyncError:
    own = np.frombuffer(_by_name(common).encode(), dtype=np.uint8).astype(np.int64)
    rows = group.gather(own, doing=f"comparing settings of {place}")
    settings = [json.loads(bytes(row.astype(np.uint8)).decode()) for row in rows]
    different = [name for name in settings[0] if len({str(one.get(name)) for one in settings}) > 1]
    by_name = "; ".join(
        f"{name} is " + ", ".join(f"{one.get(name)} on rank {rank}" for rank, one in zip(group.ranks, settings, strict=True))
        for name in different
    )
    return DistCADesyncError(
        f"ranks have different settings (DistCAConfig, attention heads and widths, version) in {place}: {by_name}; "
        "give every rank the same ones."
    )
