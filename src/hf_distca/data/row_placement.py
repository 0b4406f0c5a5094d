"""Packed rows in another order inside each optimizer step, so that nodes have equal attention in every micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler

from hf_distca.errors import ConfigError
from hf_distca.schedule.layout import IntArray

__all__ = ["RowPlacement", "StepPlaces"]

# Work is compared in whole numbers of at most this: sums of them are the same on every machine.
_MAX_WORK = 2**32


@dataclass(frozen=True)
class StepPlaces:
    """Places for the rows of an optimizer step, in the order in which its ranks read them.

    Place ``((m * nodes + n) * ranks_per_node + r) * rows_per_rank + k`` is row k of rank r of node n
    in micro-batch m.

    Attributes:
        nodes, ranks_per_node: ranks [0, n), [n, 2n), ... are nodes: ranks between which attention is
            evened anyway.
        rows_per_rank: of a micro-batch.
        micro_batches: of a step.
    """

    nodes: int
    ranks_per_node: int
    rows_per_rank: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # Not `isinstance`: True is no number of rows.
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def micro_batch_rows(self) -> int:
        """Rows of all ranks in a micro-batch."""
        return self.ranks * self.rows_per_rank

    def place(self, work: IntArray) -> IntArray:
        """Find an order of rows in which nodes have about equal work in each micro-batch.

        Heavy rows go first, each to the node and micro-batch with the least work that has room. Nodes
        that could not be made even, as with a row of more than a node's part, are put into the same
        micro-batches, where they wait for each other. Rows keep their order if this is not better.

        Args:
            work: (rows,) int64 work of each row of some whole micro-batches.

        Returns:
            (rows,) int64 index of the row for each place.
        """
        parts = _make_even_parts(work, len(work) // (self.ranks_per_node * self.rows_per_rank))
        parts = parts[np.argsort(-work[parts].sum(axis=1), kind="stable")]
        ranks = [part[_make_even_parts(work[part], self.ranks_per_node)] for part in parts]
        order = np.concatenate(ranks, axis=None)
        better = self.compute_busiest(work[order]).sum() < self.compute_busiest(work).sum()
        return order if better else np.arange(len(work))

    def compute_busiest(self, work: IntArray) -> IntArray:
        """Work of the node that has most, in each micro-batch, for the work of the row at each place."""
        nodes = work.reshape(-1, self.nodes, self.ranks_per_node * self.rows_per_rank)
        most: IntArray = nodes.sum(axis=2).max(axis=1)
        return most


class RowPlacement(BatchSampler):
    """Batches of another batch sampler, with the rows of every optimizer step placed anew.

    A step has the same rows as before, a rank equally many in each micro-batch, and batches are as
    large. Only the order inside the step is another: nodes have about equal work in each micro-batch.
    It depends on the work and the rows of the step alone, so all ranks find the same one.

    Batches are those of all ranks, as `accelerate.data_loader.BatchSamplerShard` takes them: one for
    each rank in turns, or, with ``split_batches``, one for all ranks. Epochs, seeds and what a resume
    skips are those of the sampler inside. Steps begin anew with each epoch.

    Args:
        batch_sampler: makes batches of row numbers, all but the last of ``batch_size`` rows.
        work: (rows of the data set,) attention of each row, in any unit.
        places: of the rows of a step; its ``rows_per_rank`` times its ranks must be a multiple of
            ``batch_size``.
        even_batches: fill the last micro-batch of an epoch up with the first rows, as accelerate would.
            Else rows that make no whole micro-batch come last, in their order. With one rank, or a
            sampler that drops the last batch, nothing is filled.

    Raises:
        ConfigError: if a number is out of its range.
    """

    def __init__(
        self,
        batch_sampler: Any,
        work: npt.ArrayLike,
        places: StepPlaces,
        *,
        even_batches: bool = True,
    ) -> None:
        weights = np.asarray(work, dtype=np.float64)
        if weights.ndim != 1 or not np.isfinite(weights).all() or weights.min(initial=0) < 0:
            raise ConfigError(
                f"work of shape {weights.shape} must be one finite number of at least 0 for each "
                "row."
            )
        size = getattr(batch_sampler, "batch_size", None)
        if not size or places.micro_batch_rows % size:
            raise ConfigError(
                f"batches of {size} rows do not make micro-batches of {places.micro_batch_rows} "
                f"rows: {places.ranks} ranks with {places.rows_per_rank} each."
            )
        self.batch_sampler, self.places, self.batch_size = batch_sampler, places, size
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.work: IntArray = np.rint(
            weights * (_MAX_WORK / max(weights.max(initial=0), 1e-300))
        ).astype(np.int64)
        self._fills_last = even_batches and not self.drop_last and places.ranks > 1

    def __getattr__(self, name: str) -> Any:
        # As the sampler inside: accelerate and the Trainer ask for set_epoch, and tell it if there is one.
        if name == "batch_sampler":  # before it is set, as in a copy
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """Sampler of the batch sampler inside, which accelerate replaces to have one order on all ranks."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        per_micro_batch = self.places.micro_batch_rows // self.batch_size
        count = len(self.batch_sampler)
        return -(-count // per_micro_batch) * per_micro_batch if self._fills_last else count

    def __iter__(self) -> Iterator[list[int]]:
        rows: list[int] = []
        first: list[int] = []  # of the epoch
        whole = self.places.micro_batch_rows
        for batch in self.batch_sampler:
            if len(first) < whole:
                first += batch
            rows += batch
            if len(rows) >= whole * self.places.micro_batches:
                yield from self._place_batches(rows)
                rows = []
        if self._fills_last and len(rows) % whole:
            missing = whole - len(rows) % whole
            rows += [first[index % len(first)] for index in range(missing)]
        yield from self._place_batches(rows)

    def _place_batches(self, rows: list[int]) -> Iterator[list[int]]:
        """Batches of a step, with the rows of whole micro-batches placed."""
        whole = len(rows) - len(rows) % self.places.micro_batch_rows
        numbers = np.array(rows, dtype=np.int64)
        if whole:
            numbers[:whole] = numbers[:whole][self.places.place(self.work[numbers[:whole]])]
        placed = numbers.tolist()
        for begin in range(0, len(placed), self.batch_size):
            yield placed[begin : begin + self.batch_size]


def _make_even_parts(work: IntArray, parts: int) -> IntArray:
    """Rows in parts of equally many: each, from the heaviest on, in the part with the least work that has room.

    Returns:
        (parts, rows of a part) int64 indices.
    """
    size = len(work) // parts
    held: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    for row in np.argsort(-work, kind="stable").tolist():
        total, part = lightest[0]
        held[part].append(row)
        if len(held[part]) < size:
            heapq.heapreplace(lightest, (total + int(work[row]), part))
        else:
            heapq.heappop(lightest)
    return np.array(held, dtype=np.int64)
