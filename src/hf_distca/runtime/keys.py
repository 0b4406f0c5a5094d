"""Keys of one rank under a plan: the pool that its tasks read, and what it passes on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hf_distca.runtime.exchange import joined, part_of
from hf_distca.runtime.format import Rows

__all__ = ["KeyPool", "Passing", "Piece"]


class Piece(NamedTuple):
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

    pieces: tuple[Piece, ...]
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens of the pool."""
        return sum(piece.rows for piece in self.pieces)

    @cached_property
    def own(self) -> list[tuple[int, Piece]]:
        """Runs of this rank's own keys: row of the pool, and the run."""
        at = itertools.accumulate((piece.rows for piece in self.pieces), initial=0)
        return [(first, piece) for first, piece in zip(at, self.pieces, strict=False) if piece.section is None]

    def assemble(self, own_TKD: torch.Tensor, sections: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pool of keys or of values, (size, key/value heads, width), from own rows and the message's sections."""
        from_each = ((own_TKD if piece.section is None else sections[piece.section], piece) for piece in self.pieces)
        return joined([part_of(tensor, *piece[1:]) for tensor, piece in from_each], own_TKD)


@dataclass(frozen=True, eq=False)
class Passing:
    """The second hop of keys: what this rank passes on as a relay, and what comes from other relays.

    Attributes:
        pieces: what is passed on, of sections of the first hop.
        rows: rows of the pool where each piece lies: (row of the pool, rows).
        keys: rows of what is passed on that go to other ranks, and of theirs that come.
        way_back: rows of the pool that came from relays, in the order they came, and how many copies come back from each.
    """

    pieces: tuple[Piece, ...]
    rows: tuple[tuple[int, int], ...]
    keys: Rows
    way_back: Rows

    @cached_property
    def size(self) -> int:
        """Tokens that are passed on."""
        return sum(piece.rows for piece in self.pieces)
