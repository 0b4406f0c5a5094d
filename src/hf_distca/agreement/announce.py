"""Announcements: ranks tell each other their settings, documents and measurements before they plan.

An announcement is one row of integers, so nothing that comes from another rank is executed or
unpickled. The rows of all ranks are read together as columns, so each further rank costs only a few
array elements.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.agreement.batch_plan import Measurement
from hf_distca.agreement.documents import Documents
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray, Layout, enumerate_ranges

# A row holds these header numbers, the measurements of plans, the share numbers, and the requests.
# A request holds the numbers of a row of `AnnouncedDocuments.header`, and then its runs. A run is a
# triple (document, start, length) if documents span ranks, else only its length.
(
    _COUNT,
    _SETTINGS,
    _EXCHANGES,
    _CHECKSUM,
    _REQUEST_COUNT,
    _MEASURED_COUNT,
    _SHARE_NUMBER_COUNT,
) = range(7)
HEADER_SIZE = 7
_REQUEST_SIZE = 5
FIGURE_COUNT = len(Measurement._fields)
SharedSettings = Mapping[str, str]  # Names and values that must be equal on all ranks.
_MAX_VALUE_LENGTH = 80  # Errors shorten longer values to this number of characters.


class PlanKey(NamedTuple):
    """Key that tells the plans of a micro-batch apart, by kind of layer and part of the batch.

    Attributes:
        shape: number of heads, width of heads and bytes per element in the layer.
        device: type of the device that runs the layer.
        window: the most keys that a query sees; None if it sees all earlier keys.
        chunk: length of the chunks that documents are cut into; None if documents stay whole.
        nano: 0 for the whole batch, 1 and 2 for its nano-batches.
    """

    shape: AttentionShape
    device: str
    window: int | None = None
    chunk: int | None = None
    nano: int = 0


# Documents, and the key of the plan that is requested for them.
Request = tuple[Documents, PlanKey]


@dataclass(frozen=True, eq=False)
class Announcement:
    """Announcement of one rank.

    Attributes:
        count: number of announcements so far; for recurrent layers, see `check_document_kinds`.
        settings: hash of the settings that must be equal on all ranks.
        exchanges: number of exchanges (dispatches and returns) so far.
        checksum: checksum of these exchanges, which depends on their layers and their order.
        figures: this rank's measurements of earlier plans.
        documents: documents of each requested plan, with the number of the nano-batch (0 for a
            whole batch).
        share_numbers: numbers that identify a dealt share: epoch and number of its global batch,
            digest of its documents, and digest of each plan. Empty without a share.
    """

    count: int = 0
    settings: int = 0
    exchanges: int = 0
    checksum: int = 0
    figures: Sequence[Measurement] = ()
    documents: Sequence[tuple[Documents, int]] = ()
    share_numbers: Sequence[int] = ()

    def to_row(self) -> IntArray:
        """Encode the announcement as a flat int64 array."""
        header = [
            self.count,
            self.settings,
            self.exchanges,
            self.checksum,
            len(self.documents),
            len(self.figures),
            len(self.share_numbers),
        ]
        parts: list[npt.ArrayLike] = [header, np.reshape(self.figures, -1), self.share_numbers]
        for documents, nano in self.documents:
            parts.append(
                [
                    documents.span_ranks,
                    nano,
                    documents.context_tokens > 0
                    if documents.copied_tokens is None
                    else 1 + documents.context_runs,
                    len(documents.runs),
                    documents.home_pairs,
                ]
            )
            # If documents do not span ranks, lengths alone describe them.
            runs = documents.runs if documents.span_ranks else documents.runs[:, 2]
            parts.append(runs.reshape(-1))
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


class AnnouncedDocuments(NamedTuple):
    """Documents of all ranks for one requested plan.

    Attributes:
        header: (ranks, 5) int64. Column 0: 1 if documents may span ranks, else 0. Column 1: number
            of the nano-batch, or 0 for a whole batch. Column 2: 0 without context (keys without
            queries), 1 if the first run is context, or 1 + n if documents share prefixes and the
            first n runs are context. Column 3: number of runs. Column 4: number of query-key pairs
            that the rank computes outside of the plan.
        numbers: runs of all ranks, in rank order: (runs, 3) int64 if documents span ranks, else
            only their lengths, (runs,) int64.
    """

    header: IntArray
    numbers: IntArray

    def split_by_rank(self) -> list[IntArray]:
        """Split `numbers` into one array for each rank."""
        return np.split(self.numbers, np.cumsum(self.header[:-1, 3]))

    def build_layout(self) -> Layout:
        """Build the layout of the documents.

        If documents do not span ranks, the first run of a rank may be context (keys without
        queries). The rank's second run then continues the same document.
        """
        span_ranks, _, has_context, counts, _ = self.header.T
        offsets = np.concatenate([[0], np.cumsum(counts)])
        if not span_ranks.any():
            length = self.numbers
            document = np.arange(len(length))
            start = np.zeros_like(length)
            cut = offsets[:-1][has_context > 0]
            document[cut] = cut + 1
            start[cut + 1] = length[cut]
            return Layout(document, start, length, offsets, has_context)
        document, start, length = (np.ascontiguousarray(column) for column in self.numbers.T)
        if has_context.any():  # ranks number documents independently
            document = document + np.repeat(np.arange(len(counts)), counts) * 2**32
            return Layout(document, start, length, offsets, np.maximum(has_context - 1, 0))
        if (document >= 0).any():
            return Layout(document, start, length, offsets)
        runs = list(zip(start.tolist(), length.tolist(), strict=True))
        return Layout.from_runs([runs[begin:end] for begin, end in pairwise(offsets.tolist())])


@dataclass(frozen=True, eq=False)
class Announcements:
    """Announcements of all ranks, in rank order.

    Attributes:
        header: (ranks, 7) int64, the header numbers of each rank's row.
        numbers: the rows of all ranks, one after another, as a flat int64 array.
        offsets: (ranks,) int64 index in `numbers` at which each rank's row begins.
    """

    header: IntArray
    numbers: IntArray
    offsets: IntArray

    @classmethod
    def from_rows(cls, rows: Sequence[IntArray]) -> Announcements:
        """Decode the rows of all ranks."""
        numbers = np.concatenate(rows)
        sizes = np.fromiter(map(len, rows), np.int64, len(rows))
        offsets = np.cumsum(sizes) - sizes
        return cls(numbers[offsets[:, None] + np.arange(HEADER_SIZE)], numbers, offsets)

    @property
    def figures(self) -> IntArray:
        """Measurements that the ranks announced, (ranks, measured plans, 5) int64.

        All ranks must have announced measurements of the same number of plans.
        """
        plans = int(self.header[0, _MEASURED_COUNT])
        numbers = self._read_columns(self.offsets + HEADER_SIZE, FIGURE_COUNT * plans)
        return numbers.reshape(len(numbers), plans, FIGURE_COUNT)

    @property
    def share_numbers(self) -> IntArray:
        """`Announcement.share_numbers` of each rank, (ranks, numbers) int64.

        All rows are equal if the shares belong to the same global batch and have the same plans.
        Every rank must have announced the same count of numbers.
        """
        begin = self.offsets + HEADER_SIZE + FIGURE_COUNT * self.header[:, _MEASURED_COUNT]
        return self._read_columns(begin, int(self.header[0, _SHARE_NUMBER_COUNT]))

    def read_documents(self) -> list[AnnouncedDocuments]:
        """Decode the documents of all ranks, for each plan that every rank requests."""
        figures = FIGURE_COUNT * self.header[:, _MEASURED_COUNT]
        begin = self.offsets + HEADER_SIZE + figures + self.header[:, _SHARE_NUMBER_COUNT]
        requested = []
        for _ in range(int(self.header[:, _REQUEST_COUNT].min())):
            header = self._read_columns(begin, _REQUEST_SIZE)
            begin = begin + _REQUEST_SIZE
            end = begin + header[:, 3] * np.where(header[:, 0], 3, 1)
            numbers = self.numbers[enumerate_ranges(begin, end)[1]]
            numbers = numbers.reshape(-1, 3) if header[:, 0].all() else numbers
            requested.append(AnnouncedDocuments(header, numbers))
            begin = end
        return requested

    def _read_columns(self, begin: IntArray, count: int) -> IntArray:
        """Read `count` numbers of each rank's row, from its index `begin` on: (ranks, count)."""
        return np.asarray(self.numbers[begin[:, None] + np.arange(count)])


def check_agreement(
    announced: Announcements, settings: SharedSettings, group: AttentionGroup, label: str
) -> list[AnnouncedDocuments]:
    """Check that all announcements agree. Every rank makes the same checks in the same order.

    If hashes of shared settings differ, a further collective finds the settings that differ.

    Returns:
        The documents of all ranks for each requested plan. Empty for dealt shares, because ranks
            announce only digests of their documents.

    Raises:
        DistCADesyncError: if anything differs.
    """
    header = announced.header
    forwards = "every rank must run the same number of training forwards"
    micro_batches = "give every rank the same number of micro-batches per step"
    layers = "run the same layers on every rank"
    check_document_kinds(group, header[:, _COUNT], label)
    check_equal(group, header[:, _COUNT], "numbers of requested plans", label, forwards)
    # Check this before the settings, because a rank without a batch has no cost models.
    has_batch = np.any(header[:, [_REQUEST_COUNT, _SHARE_NUMBER_COUNT]] > 0, axis=1).astype(int)
    check_equal(group, has_batch, "batches to plan (0: none)", label, micro_batches)
    check_shared_settings(
        group,
        header[:, _SETTINGS],
        settings,
        "ranks have different settings (DistCAConfig, attention heads and widths, version) in "
        f"{label}",
        "; give every rank the same ones.",
    )
    documents = announced.read_documents()
    for column, description, remedy in (
        (
            header[:, _SHARE_NUMBER_COUNT],
            "ways of loading batches (numbers that come with a share)",
            "give every rank its share of one data set",
        ),
        *(
            (batch.header[:, 0], "ways of giving documents", "use the same collator on every rank")
            for batch in documents
        ),
        *(
            (batch.header[:, 1], "nano-batches (0 is a whole batch)", "give every rank one model")
            for batch in documents
        ),
        (header[:, _REQUEST_COUNT], "numbers of plans at once", micro_batches),
        (header[:, _EXCHANGES], "numbers of exchanges up to here", layers),
        (header[:, _CHECKSUM], "layers in their exchanges up to here (as checksums)", layers),
        (header[:, _MEASURED_COUNT], "numbers of measured micro-batches", forwards),
    ):
        check_equal(group, column, description, label, remedy)
    if header[0, _SHARE_NUMBER_COUNT]:
        check_shares(announced.share_numbers, group, label)
    return documents


def check_document_kinds(group: AttentionGroup, counts: IntArray, label: str) -> None:
    """Raise if recurrent layers get different kinds of documents on different ranks.

    The kinds are whole documents, numbered parts of documents, and parts of a share. Recurrent
    layers announce nothing for whole documents.

    Args:
        group: the ranks.
        counts: (ranks,) `Announcement.count` of each rank: -1 for numbered parts, -2 for parts of a
            share. If it is 0 or more, the rank's documents are whole, and it announces attention.
        label: description of the batch, for errors.
    """
    subject = "documents in recurrent layers (0: all whole, 1: numbered parts, 2: parts of a share)"
    remedy = "use the same data set and collator on every rank"
    check_equal(group, np.maximum(-counts, 0), subject, label, remedy)


def check_shares(share_numbers: IntArray, group: AttentionGroup, label: str) -> None:
    """Raise if the ranks' shares belong to different batches or have different plans.

    Args:
        share_numbers: (ranks, numbers) int64, `Announcement.share_numbers` of each rank; digests
            of plans may be left out.
        group: the ranks.
        label: description of the batch, for errors.

    Raises:
        DistCADesyncError: if shares or plans differ. The error names the difference.
    """
    order = (
        "all ranks must read their shares in order, one per batch, without shuffling and without "
        "workers out of order"
    )
    arguments = (
        "give document_shares the same documents, seed and other arguments on every rank, with all "
        "documents, not a part for each rank (split_dataset_by_node, shard). The documents must "
        "not change from one reading to the next"
    )
    kinds = [
        ("epochs of their global batches", "call set_epoch on every rank"),
        ("global batches", order),
        ("documents in the same global batch (as checksums)", arguments),
        (
            "plans for the same documents of a global batch",
            f"{arguments}, and use one version of hf_distca and numpy",
        ),
    ]
    for index, column in enumerate(share_numbers.T):
        description, remedy = kinds[min(index, 3)]
        check_equal(group, column, description, label, remedy)


def check_equal(
    group: AttentionGroup, values: IntArray, description: str, label: str, remedy: str
) -> None:
    """Raise if a number differs between ranks.

    Args:
        group: the ranks.
        values: (ranks,) the number of each rank.
        description: plural noun that names the values in the error.
        label: description of the batch or step, for the error.
        remedy: advice that ends the error.

    Raises:
        DistCADesyncError: if the values are not all the same.
    """
    if (values != values[0]).any():
        by_rank = ", ".join(
            f"rank {rank}: {value}"
            for rank, value in zip(group.ranks, values.tolist(), strict=True)
        )
        raise DistCADesyncError(
            f"ranks have different {description} in {label}: {by_rank}; {remedy}."
        )


def build_local_layout(documents: Documents) -> Layout:
    """Build a layout that holds only the documents of one rank."""
    row = Announcement(documents=[(documents, 0)]).to_row()
    return Announcements.from_rows([row]).read_documents()[0].build_layout()


def hash_settings(settings: SharedSettings) -> int:
    """Return a 60-bit hash of settings."""
    return int(hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:15], 16)


@lru_cache
def collect_shared_settings(
    config: DistCAConfig, costs: tuple[CostModel, ...], dtypes: tuple[str, ...] = ()
) -> SharedSettings:
    """Collect everything that must be equal on all ranks: settings, cost models and dtypes.

    Dtypes are included because a receiver cannot tell dtypes of the same size apart.
    """
    values: dict[str, list[str]] = {"hf-distca": [version("hf-distca")]}
    for part in (config, *(part for cost in costs for part in (cost.shape, cost))):
        for name in (field.name for field in fields(part) if field.name not in ("shape", "name")):
            values.setdefault(name, []).append(repr(getattr(part, name)))
    values["dtype"] = list(dtypes)
    return {name: ", ".join(dict.fromkeys(parts)) for name, parts in values.items()}


def check_shared_settings(
    group: AttentionGroup,
    hashes: IntArray,
    settings: SharedSettings,
    description: str,
    remedy: str,
) -> None:
    """Raise if settings differ between ranks.

    If the hashes differ, all ranks exchange the settings themselves. The call is then collective.

    Args:
        group: the ranks.
        hashes: (ranks,) int64 `hash_settings` of each rank.
        settings: the settings of this rank.
        description: beginning of the error.
        remedy: end of the error.

    Raises:
        DistCADesyncError: if settings differ. The error names each such setting, and each value
            with the ranks that have it.
    """
    if (hashes == hashes[0]).all():
        return
    texts = group.gather_text(json.dumps(settings), activity="comparing settings")
    by_rank = list(map(json.loads, texts))
    differences = []
    for name in dict.fromkeys(chain.from_iterable(by_rank)):
        ranks_of = defaultdict(list)
        for rank, rank_settings in zip(group.ranks, by_rank, strict=True):
            ranks_of[rank_settings.get(name, "unknown")].append(str(rank))
        values = [
            f"{textwrap.shorten(value, _MAX_VALUE_LENGTH, placeholder=' ...')} on rank "
            f"{', '.join(ranks)}"
            for value, ranks in ranks_of.items()
        ]
        if len(values) > 1:
            differences.append(f"{name} is {', '.join(values)}")
    raise DistCADesyncError(f"{description}: {'; '.join(differences)}{remedy}")
