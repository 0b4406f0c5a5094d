"""Rows of tensors that travel: which go to which rank, and how they are taken from tensors and put back.

Rows travel in runs, which slices of documents are. A step larger than 1 takes the rows of one head group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from hf_distca.borrowed import copy_each

__all__ = ["PoolRun", "Rows", "Run", "add_rows", "joined", "pieces", "put_rows", "rows_of"]


class Run(NamedTuple):
    """Rows start, start + step, ... of a tensor, so many of them, and the rank that they go to."""

    rank: int
    start: int
    rows: int
    step: int = 1


class PoolRun(NamedTuple):
    """Keys [start, start + rows) of a section of the message, or of this rank's own, `step` apart, if `section` is None.

    Sections of the second hop, if there is one, count on after those of the first.
    """

    section: int | None
    start: int
    rows: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a tensor go to which rank, and how many come from each.

    Attributes:
        runs: the rows that are sent, in the order in which they arrive; runs for one rank are neighbours, and ranks in order.
        receive: rows that come from each rank that sends any, in the order of ranks.
    """

    runs: tuple[Run, ...]
    receive: Mapping[int, int]

    @cached_property
    def runs_by_rank(self) -> dict[int, list[Run]]:
        """`runs` by the rank that they go to, in the order of ranks."""
        return {rank: list(runs) for rank, runs in groupby(self.runs, key=lambda run: run.rank)}

    @cached_property
    def send(self) -> dict[int, int]:
        """Rows to each rank that is sent any, in the order of ranks."""
        return {rank: sum(run.rows for run in runs) for rank, runs in self.runs_by_rank.items()}

    @cached_property
    def way_back(self) -> Rows:
        """The rows that travel when what was received goes back where it came from, in the order it came."""
        starts = accumulate(self.receive.values(), initial=0)
        runs = [Run(rank, start, rows) for (rank, rows), start in zip(self.receive.items(), starts, strict=False)]
        return Rows(tuple(runs), self.send)


def rows_of(tensor: torch.Tensor, start: int, rows: int, step: int = 1) -> torch.Tensor:
    """Rows start, start + step, ..., so many of them, as a view, or the tensor itself if it has no others."""
    if step > 1:
        return tensor[start : start + step * rows : step]
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, start, rows)


def joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows of several tensors one after another in a new tensor; without any, none of those of `like`."""
    return torch.cat(list(pieces)) if pieces else like.new_empty((0, *like.shape[1:]))


def pieces(runs: Sequence[Run | PoolRun], sections: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The rows of each run, which lie one after another in sections. No run is in two of them."""
    left, rest = iter(sections), 0
    for run in runs:
        if not rest:
            section = next(left)
            rest = len(section)
        yield rows_of(section, len(section) - rest, run.rows)
        rest -= run.rows


def put_rows(tensors: Sequence[torch.Tensor], runs: Sequence[Run], sections: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write the rows in the sections of each tensor where the runs say, by one operation a tensor."""
    for tensor, came in zip(tensors, sections, strict=True):
        if runs:
            copy_each([rows_of(tensor, *run[1:]) for run in runs], list(pieces(runs, came)))


def add_rows(grad_TKD: torch.Tensor, runs: Sequence[Run | PoolRun], addends: Iterable[torch.Tensor]) -> torch.Tensor:
    """Gradients with what is added to the rows of each run, one after another: sums in float32 or float64, if there are runs."""
    total = grad_TKD if not runs or grad_TKD.dtype == torch.float64 else grad_TKD.float()
    for run, rows_TKD in zip(runs, addends, strict=True):
        rows_of(total, *run[1:]).add_(rows_TKD)
    return total
