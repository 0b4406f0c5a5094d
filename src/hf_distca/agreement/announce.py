"""Announcements that ranks exchange before they share attention:
settings, documents, and measurements.

An announcement is one row of integers, so nothing that comes from another rank is executed or
unpickled. The rows of all ranks are read together, as columns, so that each further rank costs only
a few array elements.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

from hf_distca.agreement.documents import Documents
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray, Layout

__all__ = [
    "FIGURE_COUNT",
    "HEADER_SIZE",
    "Announcement",
    "Announcements",
    "SharedSettings",
    "Figures",
    "PlanKey",
    "Request",
    "AnnouncedBatch",
    "check_agreement",
    "check_equal",
    "check_shared_settings",
    "check_shares",
    "collect_shared_settings",
    "hash_settings",
    "build_layout",
]

# A row holds these numbers, the figures of each measured plan, and then each plan that is asked for: (spans, nano-batch,
# whether there is context, documents) and its documents. A document is its length, or its row where documents span ranks. Of
# shares of dealt batches, only what tells whether they belong together: numbers of the batch, and digests of its plans.
(
    _COUNT,
    _SETTINGS,
    _EXCHANGES,
    _CHECKSUM,
    _REQUEST_COUNT,
    _FIGURE_ROWS,
    _SHARE_NUMBER_COUNT,
    _IS_LEAVING,
) = range(8)
HEADER_SIZE = 8
_REQUEST_SIZE = 4
# What a rank measured of a plan: kernel nanoseconds, sent bytes, nanoseconds of exchanging, calls,
# bytes sent to other nodes; `BatchPlan.own_figures` says more.
Figures = tuple[int, int, int, int, int]
FIGURE_COUNT = 5
SharedSettings = Mapping[str, str]  # what ranks must have in common: names and values
_MAX_VALUE_LENGTH = 80  # characters of a fact in an error


class PlanKey(NamedTuple):
    """Key of a plan of a micro-batch: the kind of layer, and the part of the batch.

    Attributes:
        shape: heads, widths and element bytes of the layer.
        device: type of the device that computes it.
        window: keys that a row sees at most, None for all.
        chunk: length of the chunks that documents are cut into, None if they are whole.
        nano: 0 for the whole batch, 1 and 2 for its nano-batches.
    """

    shape: AttentionShape
    device: str
    window: int | None = None
    chunk: int | None = None
    nano: int = 0


# Documents, and which plan of them is asked for.
Request = tuple[Documents, PlanKey]


@dataclass(frozen=True, eq=False)
class Announcement:
    """Announcement of one rank.

    Attributes:
        count: announcements so far.
        settings: fingerprint of everything that must be equal on all ranks.
        exchanges, checksum: number of dispatches and returns so far, and a checksum of their
            layers.
        figures, requests: figures of measured plans, and requests for plans.
        dealt: for a share, epoch and number of the global batch, and digests of its documents and
            of each plan.
        leaves: whether this rank is a server that the others should continue without.
    """

    count: int
    settings: int
    exchanges: int
    checksum: int
    figures: Sequence[Figures]
    requests: Sequence[Request] = ()
    share_numbers: Sequence[int] = ()
    is_leaving: bool = False

    def to_row(self) -> IntArray:
        """Return the announcement as int64 numbers."""
        counts = [len(self.requests), len(self.figures), len(self.share_numbers)]
        header = [
            self.count,
            self.settings,
            self.exchanges,
            self.checksum,
            *counts,
            self.is_leaving,
        ]
        parts: list[object] = [header, np.reshape(self.figures, -1), self.share_numbers]
        for documents, key in self.requests:
            parts.append(
                [documents.span_ranks, key.nano, documents.context_tokens > 0, len(documents.runs)]
            )
            parts.append(documents.announced_numbers.reshape(-1))
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


@dataclass(frozen=True, eq=False)
class AnnouncedBatch:
    """Documents of all ranks for one requested plan.

    Attributes:
        spans, nano, context: (ranks,) values from each rank; `context` is 1 where the first
            document begins with context.
        counts: (ranks,) rows of documents of each rank.
        numbers: the rows of all ranks, one after another: (rows, 3) where documents span ranks,
            else (rows,) lengths.
    """

    span_ranks: IntArray
    nano: IntArray
    has_context: IntArray
    counts: IntArray
    numbers: IntArray

    @classmethod
    def from_documents(cls, documents: Documents) -> AnnouncedBatch:
        """Make the announcement of a single rank."""
        spans, context, rows = (
            np.array([n])
            for n in (
                int(documents.span_ranks),
                int(documents.context_tokens > 0),
                len(documents.runs),
            )
        )
        return cls(spans, np.zeros_like(rows), context, rows, documents.announced_numbers)


@dataclass(frozen=True, eq=False)
class Announcements:
    """Announcements of all ranks, in rank order.

    Attributes:
        header: (ranks, 8) int64.
        numbers: all rows one after another.
        offsets: (ranks,) index of the beginning of each rank's row.
    """

    header: IntArray
    numbers: IntArray
    offsets: IntArray

    @classmethod
    def from_rows(cls, rows: Sequence[IntArray]) -> Announcements:
        """Read the announcements in the rows of all ranks."""
        numbers = np.concatenate(rows)
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        offsets = np.cumsum(sizes) - sizes
        return cls(numbers[offsets[:, None] + np.arange(HEADER_SIZE)], numbers, offsets)

    @property
    def figures(self) -> IntArray:
        """Figures of measured plans, (ranks, measured plans, 4).

        Ranks must have announced equally many.
        """
        plans = int(self.header[0, _FIGURE_ROWS])
        columns = self.offsets[:, None] + np.arange(HEADER_SIZE, HEADER_SIZE + FIGURE_COUNT * plans)
        measured: IntArray = self.numbers[columns].reshape(len(self.offsets), plans, FIGURE_COUNT)
        return measured

    @property
    def leaving_ranks(self) -> list[int]:
        """Ranks that leave."""
        leaving: list[int] = np.flatnonzero(self.header[:, _IS_LEAVING]).tolist()
        return leaving

    @property
    def share_numbers(self) -> IntArray:
        """Numbers of the ranks' shares, (ranks, numbers), equal if shares belong together.

        Ranks must have announced equally many.
        """
        first = self.offsets + HEADER_SIZE + FIGURE_COUNT * self.header[:, _FIGURE_ROWS]
        dealt: IntArray = self.numbers[
            first[:, None] + np.arange(int(self.header[0, _SHARE_NUMBER_COUNT]))
        ]
        return dealt

    def read_batches(self) -> list[AnnouncedBatch]:
        """Return the documents for each plan that all ranks request."""
        begin = (
            self.offsets
            + HEADER_SIZE
            + FIGURE_COUNT * self.header[:, _FIGURE_ROWS]
            + self.header[:, _SHARE_NUMBER_COUNT]
        )
        requests = []
        for _ in range(int(self.header[:, _REQUEST_COUNT].min())):
            spans, nano, context, count = self.numbers[begin[:, None] + np.arange(_REQUEST_SIZE)].T
            sizes = count * np.where(spans, 3, 1)
            begin = begin + _REQUEST_SIZE
            ragged = np.repeat(begin - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
            numbers = self.numbers[ragged]
            requests.append(
                AnnouncedBatch(
                    spans, nano, context, count, numbers.reshape(-1, 3) if spans.all() else numbers
                )
            )
            begin = begin + sizes
        return requests


def check_agreement(
    announced: Announcements, facts: SharedSettings, group: AttentionGroup, place: str
) -> list[AnnouncedBatch]:
    """Compare the announcements of ranks, in one order on all of them; if
    `collect_shared_settings` differ, a further exchange finds their names.

    Returns:
        The documents for each requested plan; none for shares, of which only batches and plans are
        compared.

    Raises:
        DistCADesyncError: if anything differs.
    """
    header, forwards = announced.header, "every rank must run the same number of training forwards"
    check_equal(group, header[:, _COUNT], "numbers of plans asked for", place, forwards)
    some = np.any(header[:, [_REQUEST_COUNT, _SHARE_NUMBER_COUNT]] > 0, axis=1).astype(
        np.int64
    )  # a rank without has no costs to compare either
    check_equal(
        group,
        some,
        "batches to plan (0: none)",
        place,
        "give every rank as many micro-batches a step",
    )
    settings = f"ranks have different settings (DistCAConfig, attention heads and widths, version) in {place}"
    check_shared_settings(
        group, header[:, _SETTINGS], facts, settings, "; give every rank the same ones."
    )
    shares = "give every rank its share of one data set"
    check_equal(
        group,
        header[:, _SHARE_NUMBER_COUNT],
        "ways of loading batches (numbers that come with a share)",
        place,
        shares,
    )
    stated = announced.read_batches()
    for documents in stated:
        check_equal(
            group,
            documents.span_ranks,
            "ways of giving documents",
            place,
            "use the same collator on every rank",
        )
        check_equal(
            group,
            documents.nano,
            "nano-batches (0 is a whole batch)",
            place,
            "give every rank the same model",
        )
    check_equal(
        group,
        header[:, _REQUEST_COUNT],
        "numbers of plans at once",
        place,
        "give every rank as many micro-batches a step",
    )
    layers = "run the same layers on every rank"
    check_equal(group, header[:, _EXCHANGES], "numbers of exchanges up to here", place, layers)
    check_equal(
        group,
        header[:, _CHECKSUM],
        "layers in their exchanges up to here (as checksums)",
        place,
        layers,
    )
    check_equal(
        group, header[:, _FIGURE_ROWS], "numbers of measured micro-batches", place, forwards
    )
    if header[0, _SHARE_NUMBER_COUNT]:
        check_shares(announced.share_numbers, group, place)
    return stated


def check_shares(dealt: IntArray, group: AttentionGroup, place: str) -> None:
    """Raise if ranks hold shares of different batches, or with different plans.

    Args:
        dealt: (ranks, numbers), `Announcement.dealt` of each rank; digests of plans may be left
            out.
        group: these ranks.
        place: description of the batch, for errors.

    Raises:
        DistCADesyncError: names the difference.
    """
    epoch, number, documents, *digests = dealt.T
    order = "all ranks must read their shares in order, one a batch: no shuffling, no workers out of order"
    check_equal(
        group, epoch, "epochs of their global batches", place, "call set_epoch on every rank"
    )
    check_equal(group, number, "global batches", place, order)
    arguments = (
        "give document_shares the same documents, seed and other arguments on every rank: all of "
        "the documents, not a part that was divided by rank (split_dataset_by_node, shard), which "
        "do not change from one reading to the next"
    )
    check_equal(
        group, documents, "documents in the same global batch (as checksums)", place, arguments
    )
    for digest in digests:
        versions = f"{arguments}, and use one version of hf_distca and numpy"
        check_equal(
            group, digest, "plans for the same documents of a global batch", place, versions
        )


def check_equal(
    group: AttentionGroup, values: IntArray, what: str, place: str, remedy: str
) -> None:
    """Compare one number of each rank.

    Raises:
        DistCADesyncError: if they are not all the same.
    """
    if (values != values[0]).any():
        by_rank = ", ".join(
            f"rank {rank}: {value}"
            for rank, value in zip(group.ranks, values.tolist(), strict=True)
        )
        raise DistCADesyncError(f"ranks have different {what} in {place}: {by_rank}; {remedy}.")


def build_layout(stated: AnnouncedBatch) -> Layout:
    """Build the layout of the ranks' requests.

    With context, the first row of a rank is the beginning of the document in its second.
    """
    offsets = np.concatenate([[0], np.cumsum(stated.counts)])
    if not stated.span_ranks.any():
        length = stated.numbers
        document, start = np.arange(len(length)), np.zeros_like(length)
        cut = offsets[:-1][stated.has_context > 0]
        document[cut], start[cut + 1] = cut + 1, length[cut]
        return Layout(document, start, length, offsets, stated.has_context)
    document, start, length = (np.ascontiguousarray(column) for column in stated.numbers.T)
    if (document >= 0).any():
        return Layout(document, start, length, offsets)
    runs = list(zip(start.tolist(), length.tolist(), strict=True))
    return Layout.from_runs(
        [
            runs[begin:end]
            for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
    )


def hash_settings(facts: SharedSettings) -> int:
    """Return a 60-bit hash of facts."""
    return int(hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:15], 16)


@lru_cache
def collect_shared_settings(
    config: DistCAConfig, costs: tuple[CostModel, ...], dtypes: tuple[str, ...] = ()
) -> SharedSettings:
    """Return all that must be equal on all ranks: settings, cost models, and dtypes (of
    one size they would look the same in messages).
    """
    values: dict[str, list[str]] = {"hf-distca": [version("hf-distca")]}
    for part in (config, *(part for cost in costs for part in (cost.shape, cost))):
        for name in (field.name for field in fields(part) if field.name not in ("shape", "name")):
            values.setdefault(name, []).append(repr(getattr(part, name)))
    values["dtype"] = list(dtypes)
    return {name: ", ".join(dict.fromkeys(parts)) for name, parts in values.items()}


def check_shared_settings(
    group: AttentionGroup, fingerprints: IntArray, facts: SharedSettings, what: str, remedy: str
) -> None:
    """Compare facts by their fingerprints, one of each rank.

    If these differ, ranks exchange the facts themselves.

    Raises:
        DistCADesyncError: if facts differ; names each of them, and each value with the ranks that have it.
    """
    if (fingerprints == fingerprints[0]).all():
        return
    told: list[SharedSettings] = [
        json.loads(text or "{}") for text in group.gather_text(json.dumps(facts))
    ]
    names = dict.fromkeys(name for rank_facts in told for name in rank_facts)
    by_name = []
    for name in names:
        having: dict[str, list[str]] = {}
        for rank, rank_facts in zip(group.ranks, told, strict=True):
            having.setdefault(rank_facts.get(name, "unknown"), []).append(str(rank))
        values = [
            f"{textwrap.shorten(v, _MAX_VALUE_LENGTH, placeholder=' ...')} on rank {', '.join(r)}"
            for v, r in having.items()
        ]
        by_name += [f"{name} is {', '.join(values)}"] if len(values) > 1 else []
    raise DistCADesyncError(f"{what}: {'; '.join(by_name)}{remedy}")
