"""The segments of documents on one rank, and the ranks that hold the other segments of these
documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hf_distca.errors import LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.messages import MessageLayouts, RowRun, Rows
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.layout import Layout, Segment, mark_changes


class HeldSegment(NamedTuple):
    """Positions [start, end) of a document, and the rank that holds them."""

    rank: int
    start: int
    end: int


class StateKey(NamedTuple):
    """Key of a row: the document and position of a token. The row belongs to this token, or to the
    segment that begins with this token.
    """

    document: int
    position: int


@dataclass(frozen=True, eq=False)
class RowNeeds:
    """Rows that segments need from earlier segments of their documents, seen from one rank.

    Attributes:
        held: `StateKey` of each row of this rank that a segment on any rank needs. Rows of position
            0 come first.
        rows: which held rows go to which ranks, and how many rows come from each rank.
        place: the index of each held or received row in a tensor of all held rows followed by all
            received rows.
    """

    held: tuple[StateKey, ...]
    rows: Rows
    place: dict[StateKey, int]

    @classmethod
    def from_triples(cls, rank: int, needs: Iterable[tuple[int, int, StateKey]]) -> RowNeeds:
        """Build from triples (rank that needs a row, rank that holds it, key of the row), in any
        order. Triples in which `rank` does not occur may be left out.
        """
        unique = set(needs)
        held = tuple(
            sorted(
                {key for _, holder, key in unique if holder == rank},
                key=lambda key: (key.position > 0, key),
            )
        )
        place = {key: index for index, key in enumerate(held)}
        sent = sorted((target, key) for target, holder, key in unique if holder == rank != target)
        received = sorted(
            (holder, key) for target, holder, key in unique if target == rank != holder
        )
        rows = Rows(
            tuple(RowRun(target, place[key], 1) for target, key in sent),
            dict(Counter(holder for holder, _ in received)),
        )
        place.update((key, len(held) + index) for index, (_, key) in enumerate(received))
        return cls(held, rows, place)


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of one rank for one micro-batch. Adjacent segments of a document are merged.

    Attributes:
        here: the segments of this rank in token order.
        cut: documents that have several segments, at least one of them on this rank. Maps the
            number of a document to all its segments, in order of position.
        exchanges: whether any document of the micro-batch lies on several ranks; the same on every
            rank.
        group: the ranks of the layout.
        meter: counts exchanges and their bytes.
        name: name of the micro-batch, the same on every rank, for errors.
        numbers: yields an index for each exchange of the micro-batch, for errors.
        layouts: message layouts that were built before, for reuse.
    """

    here: tuple[Segment, ...]
    cut: dict[int, tuple[HeldSegment, ...]] = field(default_factory=dict)
    exchanges: bool = False
    group: AttentionGroup = field(default_factory=AttentionGroup)
    meter: Meter = field(default_factory=Meter)
    name: str = "a micro-batch"
    numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    layouts: MessageLayouts = field(default_factory=dict, repr=False)
    _halos: dict[int, RowNeeds] = field(default_factory=dict, repr=False)

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Segments:
        """Make segments of whole documents with these lengths, which need no exchange."""
        return cls(tuple(Segment(document, 0, length) for document, length in enumerate(lengths)))

    @classmethod
    def from_layout(
        cls, layout: Layout, group: AttentionGroup, meter: Meter | None = None, name: str = ""
    ) -> Segments:
        """Make the segments of this rank in a layout.

        Documents that are split by heads count as whole.

        Args:
            layout: layout of the group's ranks, without context.
            group: the group. All its ranks must make their segments from the same layout, and run
                the same layers with them.
            meter: counts `state_exchanges` and `state_bytes`; by default a new one.
            name: name of the micro-batch, the same on every rank, for errors.

        Raises:
            LayoutError: if the layout has context, or another number of ranks than the group.
        """
        if layout.context.any():
            raise LayoutError(
                f"the layout has {layout.context.tolist()} context segments on its ranks, so it is"
                " the layout of a nano-batch. Recurrent layers mix tokens of both nano-batches: run"
                " them on the whole micro-batch."
            )
        if layout.world_size != group.size:
            raise LayoutError(
                f"the layout has {layout.world_size} ranks, and the group has {group.size}: give"
                " the layout of the group."
            )
        number = layout.restore_numbers(layout.document)
        columns = [number, layout.run_start, layout.end, layout.rank, layout.token]
        rows = np.stack(columns, 1)[np.lexsort((layout.end, layout.run_start, number))]
        first = np.flatnonzero(mark_changes(rows[:, 0], rows[:, 1]))
        # Merge adjacent segments: the merged segment ends where the last of them ends.
        rows[first, 2] = rows[np.append(first, len(rows))[1:] - 1, 2]
        rows = rows[first]
        mine = rows[rows[:, 3] == group.rank]
        here = tuple(
            Segment(document, start, end - start)
            for document, start, end, *_ in mine[np.argsort(mine[:, 4])].tolist()
        )
        related = rows[np.isin(rows[:, 0], mine[:, 0])].tolist()
        by_document = {
            document: tuple(HeldSegment(rank, start, end) for _, start, end, rank, _ in held)
            for document, held in itertools.groupby(related, lambda row: row[0])
        }
        cut = {document: held for document, held in by_document.items() if len(held) > 1}
        return cls(
            here,
            cut,
            bool(layout.has_many_ranks.any()),
            group,
            meter or Meter(),
            name or "a micro-batch",
        )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each segment of `here`."""
        return tuple(segment.length for segment in self.here)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Index of the first token of each segment of `here`, then the number of all tokens."""
        return tuple(itertools.accumulate(self.lengths, initial=0))

    @cached_property
    def index(self) -> dict[StateKey, int]:
        """Index in `here` of the segment that starts at each key."""
        return {
            StateKey(segment.document, segment.start): index
            for index, segment in enumerate(self.here)
        }

    @property
    def has_only_whole_documents(self) -> bool:
        """True if all documents of this rank are whole, and the rank takes part in no exchange."""
        return not (self.cut or self.exchanges)

    @cached_property
    def first_segments(self) -> tuple[int, ...]:
        """Index in `here` of each segment that is the first of a cut document, in the order of
        `summaries.held`.
        """
        return tuple(self.index[key] for key in self.summaries.held if key.position == 0)

    @cached_property
    def inner_segments(self) -> tuple[int, ...]:
        """Index in `here` of each segment that is neither the first nor the last of its document,
        in the order of `transitions.held`.
        """
        return tuple(self.index[key] for key in self.transitions.held)

    @cached_property
    def whole_documents(self) -> tuple[int, ...]:
        """Index in `here` of each whole document."""
        return tuple(
            index for index, segment in enumerate(self.here) if segment.document not in self.cut
        )

    def find_token(self, key: StateKey) -> int:
        """Return the index of a token among the tokens of this rank."""
        return next(
            offset + key.position - segment.start
            for offset, segment in zip(self.offsets, self.here, strict=False)
            if segment.document == key.document and segment.start <= key.position < segment.end
        )

    def count_tokens(self, which: Sequence[int]) -> list[int]:
        """Return the number of tokens of each of the segments `which`."""
        return [self.lengths[index] for index in which]

    def check(self, tensor: torch.Tensor, dim: int) -> None:
        """Check that an input has one row, with all tokens of this rank along `dim`.

        Raises:
            LayoutError: with the shape of the input and the number of tokens.
        """
        if tensor.shape[0] != 1 or tensor.shape[dim] != self.offsets[-1]:
            raise LayoutError(
                f"an input has shape {tuple(tensor.shape)}, and the segments of this rank have"
                f" {self.offsets[-1]} tokens: give one row with the tokens of the layout, without"
                " padding."
            )

    def select(self, tensor: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        """Return the tokens of the segments `which` along dimension 1, as a view if the segments
        are adjacent.
        """
        if which and list(which) == list(range(which[0], which[0] + len(which))):
            return tensor[:, self.offsets[which[0]] : self.offsets[which[-1] + 1]]
        parts = [tensor[:, self.offsets[index] : self.offsets[index + 1]] for index in which]
        return torch.cat(parts or [tensor[:, :0]], 1)

    def split(self, tensor: torch.Tensor, which: Sequence[int]) -> dict[int, torch.Tensor]:
        """Split the tokens that `select` returns for the segments `which`, and return them by
        segment.
        """
        return dict(zip(which, torch.split(tensor, self.count_tokens(which), 1), strict=True))

    @cached_property
    def summaries(self) -> RowNeeds:
        """`RowNeeds` for the rows from which states are composed. There is one row for each segment
        that is not the last of its document.
        """
        return RowNeeds.from_triples(self.group.rank, self._iterate_needs(0))

    @cached_property
    def transitions(self) -> RowNeeds:
        """The `RowNeeds` of `summaries` without the rows of first segments, because no state
        precedes these segments.
        """
        return RowNeeds.from_triples(self.group.rank, self._iterate_needs(1))

    def _iterate_needs(self, first: int) -> Iterator[tuple[int, int, StateKey]]:
        """Yield triples for `RowNeeds.from_triples`. The row of a segment is needed by the ranks
        that hold a later segment of the same document. The first `first` segments of each document
        are left out.
        """
        here = self.group.rank
        for document, segments in self.cut.items():
            last = {segment.rank: number for number, segment in enumerate(segments)}
            for number, segment in enumerate(segments[first:], first):
                key = StateKey(document, segment.start)
                for rank in last if segment.rank == here else (here,):
                    if last[rank] > number:
                        yield rank, segment.rank, key

    def find_halo(self, rows: int) -> RowNeeds:
        """Return the `RowNeeds` for the last `rows` tokens before each segment."""
        if rows not in self._halos:
            self._halos[rows] = RowNeeds.from_triples(self.group.rank, self._find_halo(rows))
        return self._halos[rows]

    def _find_halo(self, rows: int) -> Iterator[tuple[int, int, StateKey]]:
        here = self.group.rank
        for document, segments in self.cut.items():
            for number, segment in enumerate(segments):
                # Each segment has at least one token, so the halo lies in at most `rows` segments.
                for before in reversed(segments[max(number - rows, 0) : number]):
                    first = max(before.start, segment.start - rows)
                    if first >= before.end:
                        break
                    if here in (before.rank, segment.rank):
                        yield from (
                            (segment.rank, before.rank, StateKey(document, position))
                            for position in range(first, before.end)
                        )
