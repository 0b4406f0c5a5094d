"""Orders packed rows inside each optimizer step, so that the attention work of nodes is about equal
in every micro-batch. The work of a row depends on the lengths of its documents, which this file
also reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler
from tqdm.auto import tqdm

from hf_distca.data.reading import is_stored_dataset, read_document_lengths
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import IntArray

# Work is rounded to whole numbers up to this value, so that sums are the same on every machine.
_MAX_WORK = 2**32
# Columns that tell which documents a row has; `PackingCollator` reads the same ones. If rows have
# several of these columns, the first one is used.
_DOCUMENT_COLUMNS = ("documents", "seq_lengths", "position_ids")
_ROWS_PER_READ = 1024  # rows of a `datasets.Dataset` that are read at once


@dataclass(frozen=True)
class StepPlaces:
    """Places for the rows of an optimizer step, in the order in which ranks read the rows.

    Place ``((m * nodes + n) * ranks_per_node + r) * rows_per_rank + k`` is row k of rank r of node
    n in micro-batch m.

    Attributes:
        nodes: number of nodes. The ranks of a node balance attention among themselves.
        ranks_per_node: number of ranks of a node. The ranks of a node have consecutive numbers.
        rows_per_rank: number of rows of a rank in a micro-batch.
        micro_batches: number of micro-batches of a step.

    Raises:
        ConfigError: if a number is not at least 1.
    """

    nodes: int
    ranks_per_node: int
    rows_per_rank: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # `isinstance` would accept True as a number.
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def micro_batch_rows(self) -> int:
        """Number of rows of all ranks in a micro-batch."""
        return self.ranks * self.rows_per_rank

    def place(self, work: IntArray) -> IntArray:
        """Find an order of rows in which nodes have about equal work in each micro-batch.

        Rows are divided into parts, one for each node in each micro-batch. Each row, from the
        heaviest to the lightest, goes to the part that has the least work and still has room. Parts
        stay uneven if one row has more work than the average part. Because light parts wait for
        heavy parts, the parts of a micro-batch are chosen to have similar work. Rows keep their
        order if the new order is not better.

        Args:
            work: (rows,) int64 work of each row. The rows are one or more whole micro-batches.

        Returns:
            (rows,) int64 index of the row for each place.
        """
        parts = _make_even_parts(work, len(work) // (self.ranks_per_node * self.rows_per_rank))
        parts = parts[np.argsort(-work[parts].sum(axis=1), kind="stable")]
        ranks = [part[_make_even_parts(work[part], self.ranks_per_node)] for part in parts]
        order = np.concatenate(ranks, axis=None)
        is_better = self.compute_busiest(work[order]).sum() < self.compute_busiest(work).sum()
        return order if is_better else np.arange(len(work))

    def compute_busiest(self, work: IntArray) -> IntArray:
        """Compute the work of the busiest node in each micro-batch, (micro-batches,) int64.

        Args:
            work: (rows,) int64 work of the row at each place.
        """
        nodes = work.reshape(-1, self.nodes, self.ranks_per_node * self.rows_per_rank)
        return np.asarray(nodes.sum(axis=2).max(axis=1))


class RowPlacement(BatchSampler):
    """Batches of another batch sampler, with the rows of each optimizer step in a new order.

    A step keeps its rows, and batches keep their size. Only the order inside a step changes, so
    that nodes have about equal work in each micro-batch. The order depends only on the rows of the
    step and their work, so it is the same on all ranks.

    This sampler yields the batches of all ranks, which `accelerate.data_loader.BatchSamplerShard`
    expects. Ranks take batches in turn; with ``split_batches``, they divide each batch. The inner
    sampler decides about epochs, seeds, and the batches that a resumed run skips. Each epoch begins
    with a new step.

    Args:
        batch_sampler: makes batches of row indices. All but the last have ``batch_size`` rows.
        work: (rows of the data set,) attention work of each row, in any unit.
        places: the places that a step has for rows. ``places.micro_batch_rows`` must be a multiple
            of ``batch_size``.
        even_batches: fill the last micro-batch of an epoch with the epoch's first rows, as
            accelerate would. If False, rows that do not fill a micro-batch come last, in their
            order. With one rank, or a sampler that drops the last batch, no rows are added.

    Raises:
        ConfigError: if an argument is out of range.
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
                f"rows ({places.ranks} ranks with {places.rows_per_rank} rows each). Choose a "
                "batch size that divides the rows of a micro-batch."
            )
        self.batch_sampler = batch_sampler
        self.places = places
        self.batch_size = size
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        scale = _MAX_WORK / max(weights.max(initial=0), 1e-300)
        self.work: IntArray = np.rint(weights * scale).astype(np.int64)
        self._fills_last = even_batches and not self.drop_last and places.ranks > 1

    def __getattr__(self, name: str) -> Any:
        # Accelerate and the Trainer call `set_epoch` of the inner sampler, if it has one.
        if name == "batch_sampler":  # Not set yet in a new copy: avoid recursion.
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def sampler(self) -> Any:
        """Sampler of the inner batch sampler. Accelerate replaces it, so that all ranks agree."""
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
        first: list[int] = []  # the first rows of the epoch
        whole = self.places.micro_batch_rows
        for batch in self.batch_sampler:
            if len(first) < whole:
                first += batch
            rows += batch
            if len(rows) >= whole * self.places.micro_batches:
                yield from self._place_batches(rows)
                rows = []
        if self._fills_last and len(rows) % whole:
            rows += islice(cycle(first), whole - len(rows) % whole)
        yield from self._place_batches(rows)

    def _place_batches(self, rows: list[int]) -> Iterator[list[int]]:
        """Yield the batches of a step, with the rows of whole micro-batches in the new order."""
        whole = len(rows) - len(rows) % self.places.micro_batch_rows
        numbers = np.array(rows, dtype=np.int64)
        if whole:
            numbers[:whole] = numbers[:whole][self.places.place(self.work[numbers[:whole]])]
        placed = numbers.tolist()
        for begin in range(0, len(placed), self.batch_size):
            yield placed[begin : begin + self.batch_size]


def _make_even_parts(work: IntArray, parts: int) -> IntArray:
    """Divide rows into parts of the same number of rows and about the same work.

    Each row, from the heaviest to the lightest, goes to the part that has the least work and still
    has room.

    Returns:
        (parts, rows of a part) int64 indices.
    """
    size = len(work) // parts
    rows_of: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    for row in np.argsort(-work, kind="stable").tolist():
        total, part = lightest[0]
        rows_of[part].append(row)
        if len(rows_of[part]) < size:
            heapq.heapreplace(lightest, (total + int(work[row]), part))
        else:
            heapq.heappop(lightest)
    return np.array(rows_of, dtype=np.int64)


def find_row_documents(
    rows: Any, end_of_document: int | None = None, *, quiet: bool = False
) -> tuple[IntArray, IntArray]:
    """Find the documents of all rows of a data set.

    Args:
        rows: a `datasets.Dataset`, or a sequence of mappings. A column ``documents``,
            ``seq_lengths`` or ``position_ids`` tells where documents begin, as for
            `PackingCollator`. Without such a column, each row of ``input_ids`` is one document. No
            other columns are read from a `datasets.Dataset`.
        end_of_document: id of the last token of each document. If given, documents are found in
            ``input_ids`` instead.
        quiet: show no progress bar.

    Returns:
        The number of tokens of each document, and the index of its row, (documents,) int64 each.

    Raises:
        LayoutError: if rows are not mappings, or have no column that tells their documents.
    """
    column = _choose_column(rows, end_of_document)
    if column == "input_ids" and end_of_document is None:
        return read_document_lengths(rows, quiet=quiet), np.arange(len(rows))
    lengths = [np.zeros(0, dtype=np.int64)]
    counts = [np.zeros(0, dtype=np.int64)]
    for values, count in _read_blocks(rows, column, quiet=quiet):
        if column in ("input_ids", "position_ids"):
            starts = _find_starts(values, count, end_of_document)
            values = np.diff(starts, append=len(values))
            count = np.diff(np.searchsorted(starts, np.cumsum(count)), prepend=0)
        lengths.append(values.astype(np.int64))
        counts.append(count)
    documents = np.concatenate(counts)
    return np.concatenate(lengths), np.repeat(np.arange(len(documents)), documents)


def _choose_column(rows: Any, end_of_document: int | None) -> str:
    """Choose the column that tells which documents are in a row."""
    if is_stored_dataset(rows):
        names: list[str] = list(rows.column_names)
    else:
        row = rows[0] if len(rows) else {"input_ids": []}
        if not hasattr(row, "keys"):
            raise LayoutError(
                f"rows have type {type(row).__name__}: they must be mappings with input_ids."
            )
        names = list(row.keys())
    choices = ("input_ids",) if end_of_document is not None else (*_DOCUMENT_COLUMNS, "input_ids")
    column: str | None = next((name for name in choices if name in names), None)
    if column is None:
        raise LayoutError(
            f"rows have the columns {', '.join(names) or 'none'}. The length of documents is read "
            f"from {' or '.join(choices)}: add such a column."
        )
    return column


def _find_starts(values: IntArray, count: IntArray, end_of_document: int | None) -> IntArray:
    """Find the indices at which documents begin, (documents,) int64.

    Args:
        values: (tokens,) positions of rows, or their tokens if `end_of_document` is given.
        count: (rows,) number of tokens of each row.
        end_of_document: id of the last token of each document.
    """
    is_start = np.zeros(len(values) + 1, dtype=np.bool_)
    is_start[np.cumsum(count) - count] = True
    if end_of_document is None:
        is_start[:-1] |= values == 0
    else:
        is_start[1:] |= values == end_of_document
    return np.flatnonzero(is_start[:-1])


def _read_blocks(rows: Any, column: str, *, quiet: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Read a column in blocks of rows. Yield the numbers in a block, and their count in each row.

    For the column ``documents``, the numbers are the lengths of the documents.
    """
    with tqdm(
        total=len(rows), desc=f"reading {column}", delay=1.0, disable=quiet, unit=" rows"
    ) as bar:
        if is_stored_dataset(rows):
            stored = rows.with_format("arrow", columns=[column])
            for first in range(0, len(rows), _ROWS_PER_READ):
                values = stored[first : first + _ROWS_PER_READ].column(column).combine_chunks()
                yield _read_stored_lists(values)
                bar.update(len(values))
            return
        for number in range(len(rows)):
            value = rows[number][column]
            value = [len(document) for document in value] if column == "documents" else value
            numbers = np.asarray(value if value is not None else [], dtype=np.int64).reshape(-1)
            yield numbers, np.array([len(numbers)])
            bar.update()


def _read_stored_lists(values: Any) -> tuple[IntArray, IntArray]:
    """Read the numbers in an Arrow array of lists, and the count of numbers in each list.

    For lists of lists, the numbers are the lengths of the inner lists.
    """
    import pyarrow.compute as pc

    count = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    inner = pc.list_flatten(values)
    if hasattr(inner.type, "value_type"):
        inner = pc.fill_null(pc.list_value_length(inner), 0)
    return inner.to_numpy(zero_copy_only=False), count.astype(np.int64)
