"""Many short documents in one call of an op that takes a batch of sequences of one length.

A call of an op costs the host some 30 microseconds with what belongs to it, whatever it computes. Documents of one length that
lie one after another are such a batch as they lie. Others are gathered and filled up to the longest of their batch with copies
of their last token: causal attention hides those from the tokens before them, and in backward the gradient of their output is 0.

Suffixes as in `cpu`; here B counts the documents of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from hf_distca.kernels.base import Scores, TaskBatch

__all__ = ["Documents", "Rows", "short_documents"]

# Neighbours up to this length are a batch. At 256 tokens that saves about a tenth with 4 heads of 16, hardly any with 8 of 64.
_LONGEST = 256

# Numbers in q of a batch. 512 documents of 32 tokens take, forward and backward in float32 over one at a time, with 2**16, 2**18
# and 2**20 of them: 0.42, 0.37 and 0.40 of the time with 4 heads of 16; 0.91, 0.81 and 0.80 with 8 of 64; and 256 of them with 16
# of 128, when what belongs to a batch leaves the cache: 1.01, 1.00 and 1.07.
_NUMBERS = 2**18

# Lengths that others are filled up to, and numbers in q of a document up to which that is done. 512 documents of 1 to 64 tokens
# take 0.61 of the time with 4 heads of 16, but, if all were filled up, 1.07 with 8 of 64 and 1.28 with 16 of 128.
_FILLED = (4, 8, 12, 16, 24, 32, 48, 64)
_FILLED_NUMBERS = 2**13


@dataclass(frozen=True, slots=True)
class _Gather:
    """Rows of a pool in the order of a batch, and which of them are no copies. All int64.

    Attributes:
        rows: (documents * length,) where each row is.
        real: which of `rows` are not there to fill up.
        filled: the others.
        places: ``rows[real]``.
    """

    rows: torch.Tensor
    real: torch.Tensor
    filled: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a batch in a pool: from `start` on, or as `gather` says."""

    documents: int
    length: int
    start: int
    gather: _Gather | None

    def are_all(self, tokens: int) -> bool:
        """Whether the batch is all of a pool of so many rows as it lies."""
        return self.gather is None and self.documents * self.length == tokens

    def take(self, pool_THD: torch.Tensor, *, gradient: bool = False) -> torch.Tensor:
        """The rows (B, H, length, ...): a view, or a copy that is 0 in what fills up if it is a gradient."""
        if self.gather is None:
            rows_THD = pool_THD.narrow(0, self.start, self.documents * self.length)
        else:
            rows_THD = pool_THD.index_select(0, self.gather.rows)
            if gradient:
                rows_THD.index_fill_(0, self.gather.filled, 0)
        return rows_THD.view(self.documents, self.length, *rows_THD.shape[1:]).transpose(1, 2)

    def put(self, pool_THD: torch.Tensor, rows_BHTD: torch.Tensor) -> None:
        """Write rows to their places."""
        if self.gather is None:
            self.take(pool_THD).copy_(rows_BHTD)
        else:
            pool_THD.index_copy_(0, self.gather.places, self._real(self.gather, rows_BHTD, pool_THD.dtype))

    def add(self, pool_THD: torch.Tensor, rows_BHTD: torch.Tensor) -> None:
        """Add rows to what is in their places."""
        if self.gather is None:
            self.take(pool_THD).add_(rows_BHTD)
        else:
            pool_THD.index_add_(0, self.gather.places, self._real(self.gather, rows_BHTD, pool_THD.dtype))

    def _real(self, gather: _Gather, rows_BHTD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows_BHTD.transpose(1, 2).flatten(0, 1).index_select(0, gather.real).to(dtype)


class Documents(NamedTuple):
    """A batch of whole documents."""

    queries: Rows
    keys: Rows

    def take(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of q, k and v."""
        return self.queries.take(q_THD), self.keys.take(k_TKD), self.keys.take(v_TKD)


def short_documents(tasks: TaskBatch, scores: Scores, numbers: int) -> tuple[list[Documents], TaskBatch]:
    """Batches of the tasks that are short documents from whose rows no window hides a key, and a batch of all other tasks.

    `numbers` are those in a row of q.
    """
    lengths: dict[int, list[int]] = {}
    found: list[tuple[int, list[int]]] = []
    for task, (rows, keys) in enumerate(zip(tasks.query_length, tasks.key_length, strict=True)):
        if rows == keys <= _LONGEST and scores.window_within(keys) is None:
            filled = next((length for length in _FILLED if length >= rows), None)
            if filled is not None and filled * numbers <= _FILLED_NUMBERS:
                lengths.setdefault(filled, []).append(task)
            elif found and _follows(tasks, found[-1][1][-1], task):
                found[-1][1].append(task)
            else:
                found.append((rows, [task]))
    found += [(max(tasks.query_length[task] for task in members), members) for members in lengths.values()]
    batches = [(length, part) for length, members in found for part in _parts(members, _NUMBERS // (length * numbers))]
    taken = {task for _, members in batches for task in members}
    columns = (tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length)
    others = TaskBatch(*(tuple(x for task, x in enumerate(column) if task not in taken) for column in columns))
    return [_documents(tasks, members, length) for length, members in batches], others


def _follows(tasks: TaskBatch, before: int, task: int) -> bool:
    """Whether a task is as long as another one and lies behind it, with its rows and its keys."""
    length = tasks.query_length[before]
    queries, keys = (starts[task] - starts[before] for starts in (tasks.query_start, tasks.key_start))
    return length == tasks.query_length[task] == queries == keys


def _parts(members: list[int], most: int) -> Iterator[list[int]]:
    """Members in parts of at most so many, and of at least two: one alone is no batch."""
    if most > 1:
        parts = (members[first : first + most] for first in range(0, len(members), most))
        yield from (part for part in parts if len(part) > 1)


def _documents(tasks: TaskBatch, members: list[int], length: int) -> Documents:
    lengths = [tasks.query_length[task] for task in members]
    queries, keys = ([starts[task] for task in members] for starts in (tasks.query_start, tasks.key_start))
    return Documents(_rows(queries, lengths, length), _rows(keys, lengths, length))


def _rows(starts: Sequence[int], lengths: Sequence[int], length: int) -> Rows:
    if min(lengths) == length and all(after - before == length for before, after in pairwise(starts)):
        return Rows(len(starts), length, starts[0], None)
    at = torch.arange(length, device="cpu")
    start_B1, length_B1 = (torch.tensor(x, device="cpu")[:, None] for x in (starts, lengths))
    rows = (start_B1 + at.minimum(length_B1 - 1)).flatten()
    is_real = (at < length_B1).flatten()
    real = is_real.nonzero().flatten()
    return Rows(len(starts), length, 0, _Gather(rows, real, (~is_real).nonzero().flatten(), rows[real]))
