"""Keys of one rank under a plan: the pool that its tasks read, and what it passes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hf_distca.runtime.exchange import joined, part_of, pieces
from hf_distca.runtime.format import Rows

__all__ = ["KeyPool", "KeyRelay", "PoolRun", "accumulator"]


class PoolRun(NamedTuple):
    """Keys [start, start + rows) of a section of the message, or of this rank's own, `step` apart, if `section` is None.

    Sections of the second hop, if there is one, count on after those of the first.
    """

    section: int | None
    start: int
    rows: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class KeyPool:
    """How received keys and this rank's own make the pool in which every document's prefix is one run.

    Attributes:
        pieces: what the pool is made of, in its order.
        way_back: rows of the pool that came from the ranks that hold them, in the order they came, and how many copies come back
            from each.
    """

    pieces: tuple[PoolRun, ...]
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens of the pool."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def own(self) -> list[tuple[int, PoolRun]]:
        """Runs of this rank's own keys: row of the pool, and the run."""
        starts = itertools.accumulate((piece.rows for piece in self.pieces), initial=0)
        return [(first, piece) for first, piece in zip(starts, self.pieces, strict=False) if piece.section is None]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from own rows and the message's sections."""
        from_each = ((own_TKD if piece.section is None else sections[piece.section], piece) for piece in self.pieces)
        return joined([part_of(tensor, *piece[1:]) for tensor, piece in from_each], own_TKD)

    def add_own(self, grad_TKD: torch.Tensor, pool_TKD: torch.Tensor) -> torch.Tensor:
        """Gradients of this rank's own keys, wide enough for sums, with those of the pool that was made of them added."""
        if not self.own:
            return grad_TKD
        total = accumulator(grad_TKD)
        for row, (_, *run) in self.own:
            target = part_of(total, *run)
            target.add_(pool_TKD.narrow(0, row, len(target)))
        return total


@dataclass(frozen=True, eq=False)
class KeyRelay:
    """The second hop of keys: what this rank passes on as a relay, and what comes from other relays.

    Attributes:
        pieces: what is passed on, of sections of the first hop.
        rows: rows of the pool where each piece lies: (row of the pool, rows).
        keys: rows of what is passed on that go to other ranks, and of theirs that come.
        way_back: rows of the pool that came from relays, in the order they came, and how many copies come back from each.
    """

    pieces: tuple[PoolRun, ...]
    rows: tuple[tuple[int, int], ...]
    keys: Rows
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens that are passed on."""
        return sum(piece.rows for piece in self.pieces)

    def pick(self, sections: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """What is passed on, of the sections of k or of v; without rows, of the shape of those of `like`."""
        return joined([part_of(sections[piece.section], *piece[1:]) for piece in self.pieces if piece.section is not None], like)

    def add_copies(self, pool_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of a pool with those of the copies that were passed on, rank after rank so that the sum has one order."""
        if not self.size:
            return pool_TKD
        passed = pool_TKD.new_zeros((self.size, *pool_TKD.shape[1:]), dtype=accumulator(pool_TKD[:0]).dtype)
        for run, piece in zip(self.keys.runs, pieces(self.keys.runs, sections), strict=True):
            passed.narrow(0, run.start, run.rows).add_(piece)
        total, start = accumulator(pool_TKD), 0
        for row, rows in self.rows:
            total.narrow(0, row, rows).add_(passed.narrow(0, start, rows))
            start += rows
        return total


def accumulator(grad_TKD: torch.Tensor) -> torch.Tensor:
    """Sums of copies are taken in float32, or in float64 for float64 gradients."""
    return grad_TKD if grad_TKD.dtype == torch.float64 else grad_TKD.float()
