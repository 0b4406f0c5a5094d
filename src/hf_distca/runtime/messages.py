"""Rows of several tensors from every rank to every rank, as one asynchronous exchange.

Rows travel in runs, which slices of documents are. A step larger than 1 takes the rows of one head group. `launch` packs and
starts, `Pending.sections` finishes. The message to one rank holds the rows of each part one after another,
each part padded to 16 bytes so that float32 and bfloat16 can share it::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...

Where everything lies is worked out once for all layers (`Format`). All messages are packed by one operation whatever the number
of ranks and parts, and nothing here takes time for ranks that neither send nor receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from hf_distca.borrowed import copy_each
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.meter import Mark

__all__ = [
    "Format",
    "Formats",
    "Part",
    "Pending",
    "PoolRun",
    "Rows",
    "Run",
    "add_rows",
    "aside",
    "joined",
    "launch",
    "pack",
    "pieces",
    "put_rows",
    "rows_of",
]

_ALIGNMENT = 16
NOBODY = range(0)
# What bytes are copied as: a GPU copies eight at a time about as fast as one.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


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


class Part(NamedTuple):
    """One tensor of a message, (rows, ...), and where its rows go. It must be contiguous."""

    tensor: torch.Tensor
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


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
        send, receive: size of the message to and from each rank that has one, in the order of ranks.
        payload: size of all that is sent, without padding.
        between: the part of it that goes to ranks of other nodes.
    """

    pieces: list[_Piece]
    sections: list[list[tuple[int, int]]]
    send: dict[int, int]
    receive: dict[int, int]
    payload: int
    between: int

    @classmethod
    def of(cls, parts: Sequence[tuple[Rows, int]], near: range = NOBODY) -> Format:
        """Of parts given by their rows and the bytes of a row; the ranks `near` are on this node."""
        sizes = [(rank, rows.send[rank] * size) for rows, size in parts for rank in rows.send]
        between = sum(size for rank, size in sizes if rank not in near)
        form = cls([], [[] for _ in parts], {}, {}, sum(size for _, size in sizes), between)
        for rank in sorted({rank for rows, _ in parts for rank in rows.send}):
            form.send[rank] = 0
            for number, (rows, row_bytes) in enumerate(parts):
                form.pieces.extend(_Piece.of(number, run, row_bytes) for run in rows.runs_by_rank.get(rank, []))
                size = rows.send.get(rank, 0) * row_bytes
                if padding := -size % _ALIGNMENT:
                    form.pieces.append(_Piece(None, 0, padding))
                form.send[rank] += size + padding
        offset = 0
        for rank in sorted({rank for rows, _ in parts for rank in rows.receive}):
            begin = offset
            for section, (rows, row_bytes) in zip(form.sections, parts, strict=True):
                if count := rows.receive.get(rank, 0):
                    section.append((offset, count))
                    offset -= -count * row_bytes // _ALIGNMENT * _ALIGNMENT
            form.receive[rank] = offset - begin
        return form


Formats = dict[tuple[tuple[Rows, int], ...], Format]


class Pending:
    """An exchange under way. Holds what it sends and receives until it is waited for, and nothing afterwards.

    Attributes:
        sent_bytes, between_bytes: sent to other ranks, and to those of other nodes, without padding.
        device: where its messages are.
        transfer: what is waited for; None if there is nothing, or nothing any more.
        before: sections of an earlier exchange whose last parts are those of this one, which go in front of its own.
        first: of that exchange, if another stream has waited for it: the memory that it sends is not used again before.
        launched: when it began, for who measures how long it travels.
    """

    def __init__(self, parts: Sequence[Part], form: Format, transfer: Transfer | None, received: torch.Tensor) -> None:
        self.sent_bytes, self.between_bytes, self.device = form.payload, form.between, received.device
        self.transfer = transfer
        self.first: Transfer | None = None
        self.before: list[list[torch.Tensor]] = []
        self.launched: Mark = 0.0
        # Dtypes and row shapes are all that is needed of the parts: what was packed may go.
        self._kinds = [(part.tensor.dtype, part.tensor.shape[1:]) for part in parts]
        self._sections, self._received = form.sections, received

    def sections(self) -> list[list[torch.Tensor]]:
        """The received rows of each part as views of one message, rank after rank without those that sent none. Once only.

        On CUDA only the current stream waits, not the host.
        """
        if self.transfer is not None:
            self.transfer.wait()
        came = [_views(self._received, *kind, sections) for kind, sections in zip(self._kinds, self._sections, strict=True)]
        before, self.before = self.before, []
        del self._received
        self.transfer = self.first = None
        alone = len(before) - len(came) if before else 0
        return before[:alone] + [first + second for first, second in zip(before[alone:], came, strict=True)] if before else came


@contextmanager
def aside(channel: Channel | None, device: torch.device) -> Iterator[bool]:
    """On CUDA, work goes to a stream of its own, which begins when the current one has done what it was given. Says whether so.

    An exchange must be launched inside: whoever waits for it waits for the work, too. Memory that is made inside is freed for
    later work of that stream alone, which waits for the current one again. Over gloo the host waits: there is no such stream.
    """
    if device.type != "cuda" or channel is None or channel.over_gloo:
        yield False
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield True


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: what is packed there is small, and others wait for it."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def launch(
    channel: Channel | None,
    parts: Sequence[Part],
    formats: Formats | None = None,
    name: str | None = None,
    near: range = NOBODY,
) -> Pending:
    """Start an exchange. Every rank of the channel must launch the same exchanges in the same order; None is a group of one.

    The parts must have the same dtypes and row shapes on every rank. Ranks may send and receive nothing. A format that is not
    among `formats`, made before for parts with these rows, is added; `name` says what the exchange is, for errors, and the
    ranks `near` are on this node.
    """
    formats = {} if formats is None else formats
    kinds = tuple((part.rows, part.row_bytes) for part in parts)
    if (form := formats.get(kinds)) is None:
        form = formats[kinds] = Format.of(kinds, near)
    sent = pack([part.tensor for part in parts], form.pieces)
    if channel is None:
        return Pending(parts, form, None, sent)
    received = sent.new_empty(sum(form.receive.values()))
    return Pending(parts, form, channel.start(received, sent, form.receive, form.send, name), received)


def pack(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece]) -> torch.Tensor:
    """The messages, one after another, uint8."""
    if not pieces:
        return tensors[0].new_empty(0, dtype=torch.uint8)
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    padding = flat[0].new_zeros(_ALIGNMENT) if any(piece.part is None for piece in pieces) else flat[0]
    return torch.cat([piece.cut(padding if piece.part is None else flat[piece.part]) for piece in pieces])


def _views(
    message: torch.Tensor, dtype: torch.dtype, row: tuple[int, ...], sections: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Sections of a message, given by first byte and number of rows, as tensors."""
    typed = message.view(dtype)
    strides = [math.prod(row[place:]) for place in range(len(row) + 1)]
    return [typed.as_strided((rows, *row), strides, start // dtype.itemsize) for start, rows in sections]
