"""How messages are laid out: which rows of tensors go to which rank, and where they lie in the message to it.

The message to one rank holds the rows of each part one after another, each part padded to 16 bytes so that float32 and bfloat16
can share it::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...

Rows travel in runs, which slices of documents are. Where a run lies in its message is worked out once for all layers (`Format`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

__all__ = ["Format", "Formats", "Rows", "Run", "pack", "views"]

_ALIGNMENT = 16
# What bytes are copied as: a GPU copies eight at a time about as fast as one.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Run(NamedTuple):
    """Rows start, start + step, ... of a tensor, so many of them, and the rank that they go to."""

    rank: int
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

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]], receive: Iterable[tuple[int, int]], step: int = 1) -> Rows:
        """From runs (rank, start, rows) in their order, neighbours to be joined, and (rank, rows) in any order."""
        joined: list[Run] = []
        to, begin, count = -1, 0, 0
        for rank, start, rows in runs:
            if rank == to and begin + count * step == start:
                count += rows
                continue
            if count:
                joined.append(Run(to, begin, count, step))
            to, begin, count = rank, start, rows
        if count:
            joined.append(Run(to, begin, count, step))
        counts: dict[int, int] = {}
        for rank, rows in sorted(receive):
            counts[rank] = counts.get(rank, 0) + rows
        return cls(tuple(joined), counts)

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
        runs, start = [], 0
        for rank, rows in self.receive.items():
            runs.append(Run(rank, start, rows))
            start += rows
        return Rows(tuple(runs), self.send)


class _Piece(NamedTuple):
    """Bytes of a message: of a part, or zeros if `part` is None; `times` times `size` of them, `stride` apart."""

    part: int | None
    start: int
    size: int
    times: int = 1
    stride: int = 0

    @classmethod
    def of(cls, part: int, run: Run, row_bytes: int) -> _Piece:
        """The rows of a run."""
        if run.step == 1:
            return cls(part, run.start * row_bytes, run.rows * row_bytes)
        return cls(part, run.start * row_bytes, row_bytes, run.rows, run.step * row_bytes)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """These bytes of a part that is given as bytes: a view, if they follow each other."""
        if self.times == 1:
            return flat.narrow(0, self.start, self.size)
        rows = flat.narrow(0, self.start, (self.times - 1) * self.stride + self.size)
        offsets = (rows.storage_offset(), self.stride, self.size)
        word = next(dtype for dtype in _WORDS if not any(offset % dtype.itemsize for offset in offsets))
        words = rows.view(word)
        size, stride = self.size // word.itemsize, self.stride // word.itemsize
        return words.as_strided((self.times, size), (stride, 1), words.storage_offset()).contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class Format:
    """Where everything lies in the messages of an exchange; in bytes unless said otherwise.

    Attributes:
        pieces: what is sent, in its order.
        sections: of each part, where the rows of each rank that sends any begin among what is received, and how many there are.
        send, receive: size of the message to and from each rank that has one.
        payload: size of all that is sent, without padding.
    """

    pieces: tuple[_Piece, ...]
    sections: tuple[tuple[tuple[int, int], ...], ...]
    send: dict[int, int]
    receive: dict[int, int]
    payload: int

    @classmethod
    def of(cls, parts: Sequence[tuple[Rows, int]]) -> Format:
        """Of parts given by their rows and the bytes of a row."""
        pieces: list[_Piece] = []
        for rank in sorted({rank for rows, _ in parts for rank in rows.send}):
            for number, (rows, row_bytes) in enumerate(parts):
                runs = rows.runs_by_rank.get(rank, [])
                pieces += [_Piece.of(number, run, row_bytes) for run in runs]
                if padding := -rows.send.get(rank, 0) * row_bytes % _ALIGNMENT:
                    pieces.append(_Piece(None, 0, padding))
        sections: list[list[tuple[int, int]]] = [[] for _ in parts]
        offset = 0
        for rank in sorted({rank for rows, _ in parts for rank in rows.receive}):
            for section, (rows, row_bytes) in zip(sections, parts, strict=True):
                if count := rows.receive.get(rank, 0):
                    section.append((offset, count))
                    offset += _padded(count * row_bytes)
        send, receive = (_sizes(parts, [getattr(rows, name) for rows, _ in parts]) for name in ("send", "receive"))
        payload = sum(sum(rows.send.values()) * row_bytes for rows, row_bytes in parts)
        return cls(tuple(pieces), tuple(map(tuple, sections)), send, receive, payload)


Formats = dict[tuple[tuple[Rows, int], ...], Format]


def views(
    message: torch.Tensor, dtype: torch.dtype, row: tuple[int, ...], sections: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Sections of a message, given by first byte and number of rows, as tensors."""
    typed = message.view(dtype)
    strides = [math.prod(row[place:]) for place in range(len(row) + 1)]
    return [typed.as_strided((rows, *row), strides, start // dtype.itemsize) for start, rows in sections]


def pack(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece]) -> torch.Tensor:
    """The messages, one after another, uint8."""
    if not pieces:
        return tensors[0].new_empty(0, dtype=torch.uint8)
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    padding = flat[0].new_zeros(_ALIGNMENT) if any(piece.part is None for piece in pieces) else flat[0]
    return torch.cat([piece.cut(padding if piece.part is None else flat[piece.part]) for piece in pieces])


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _sizes(parts: Sequence[tuple[Rows, int]], counts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Bytes of the message of each rank that has one, in the order of ranks."""
    sizes: dict[int, int] = {}
    for (_, row_bytes), rows in zip(parts, counts, strict=True):
        for rank, count in rows.items():
            sizes[rank] = sizes.get(rank, 0) + _padded(count * row_bytes)
    return dict(sorted(sizes.items()))
