"""Rows of several tensors from every rank to every rank, as one asynchronous all-to-all.

`launch` packs and starts, `Pending.sections` finishes. A message to one rank holds the rows of each part one after another, each
part padded to 16 bytes so that float32 and bfloat16 can share it::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...

Rows travel in runs, which slices of documents are. All messages are packed by one operation whatever the number of ranks and
parts, and nothing here takes time for ranks that neither send nor receive. Where a run lies in its message is worked out once
for all layers (`Format`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.trace import Mark, Tracer

__all__ = [
    "Expected",
    "Format",
    "Formats",
    "Landed",
    "Part",
    "Pending",
    "Rows",
    "Run",
    "expect",
    "joined",
    "launch",
    "part_of",
    "row_bytes",
]

_ALIGNMENT = 16


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


class Part(NamedTuple):
    """One tensor of a message, (rows, ...), and where its rows go. It must be contiguous."""

    tensor: torch.Tensor
    rows: Rows


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
        begin = flat.storage_offset() + self.start
        return flat.as_strided((self.times, self.size), (self.stride, 1), begin).reshape(-1)


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
            for found, (rows, row_bytes) in zip(sections, parts, strict=True):
                if count := rows.receive.get(rank, 0):
                    found.append((offset, count))
                    offset += _padded(count * row_bytes)
        send, receive = (_sizes(parts, [getattr(rows, name) for rows, _ in parts]) for name in ("send", "receive"))
        payload = sum(sum(rows.send.values()) * row_bytes for rows, row_bytes in parts)
        return cls(tuple(pieces), tuple(map(tuple, sections)), send, receive, payload)


Formats = dict[tuple[tuple[Rows, int], ...], Format]


class Pending:
    """An exchange under way. Holds what it sends and receives until it is waited for, and nothing afterwards.

    Attributes:
        sent_bytes: bytes sent to other ranks, without padding.
    """

    def __init__(
        self, transfer: Transfer | None, parts: Sequence[Part], form: Format, sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        self.sent_bytes = form.payload
        self._transfer, self._buffers, self._sections = transfer, (sent, received), form.sections
        self._watch: tuple[Tracer, str, Mark | None, Meter] | None = None
        # Dtypes and row shapes are all that is needed of the parts: what was packed may go.
        self._kinds = [(part.tensor.dtype, part.tensor.shape[1:]) for part in parts]

    def watch(self, tracer: Tracer, name: str, meter: Meter) -> None:
        """Let `tracer` record how long the message travels, under this name, and it and `meter` how long it is waited for."""
        self._watch = tracer, name, tracer.now(), meter

    def sections(self) -> list[list[torch.Tensor]]:
        """The received rows of each part as views of one message, rank after rank without those that sent none. Once only.

        On CUDA only the current stream waits, not the host.
        """
        _, received = self._buffers
        waiting = None if self._watch is None else self._watch[0].now()
        if self._transfer is not None:
            with nullcontext() if self._watch is None else self._watch[3].exchanging(received.device):
                self._transfer.wait()
        if self._watch is not None:
            tracer, name, launched, _ = self._watch
            tracer.since(waiting, "wait")
            tracer.since(launched, name)
        del self._transfer, self._buffers
        return [_views(received, *kind, found) for kind, found in zip(self._kinds, self._sections, strict=True)]


class Landed:
    """What two exchanges of a dispatch brought: rows of the parts of the first, and more of those of its last parts."""

    def __init__(self, first: list[list[torch.Tensor]], second: Pending) -> None:
        self._first, self._second = first, second

    def sections(self) -> list[list[torch.Tensor]]:
        """As `Pending.sections`: of each part, the sections of the first exchange and then those of the second. Once only."""
        first, more = self._first, self._second.sections()
        del self._first
        cut = len(first) - len(more)
        return first[:cut] + [one + other for one, other in zip(first[cut:], more, strict=True)]


class Expected(NamedTuple):
    """What an exchange brings that is yet to be launched, on its way from now on."""

    transfer: Transfer
    received: torch.Tensor
    form: Format


def expect(
    channel: Channel | None, parts: Sequence[tuple[Rows, int]], device: torch.device, formats: Formats, name: str
) -> Expected | None:
    """Be ready for what the exchange brings that is launched next; see `Channel.expect`.

    Args:
        channel, formats, name: as for `launch`.
        parts: rows of each part, and bytes of a row.
        device: of the parts.

    Returns:
        What `launch` is to go on with. None if nothing comes, or where an exchange is one operation.
    """
    form = _format(tuple(parts), formats)
    if channel is None or not channel.over_gloo or not form.receive:
        return None
    received = torch.empty(sum(form.receive.values()), dtype=torch.uint8, device=device)
    return Expected(channel.expect(received, form.receive, name), received, form)


def launch(
    channel: Channel | None,
    parts: Sequence[Part],
    formats: Formats | None = None,
    name: str | None = None,
    expected: Expected | None = None,
) -> Pending:
    """Start an exchange. Every rank of the channel must launch the same exchanges in the same order; None is a group of one.

    The parts must have the same dtypes and row shapes on every rank. Ranks may send and receive nothing.

    Args:
        channel: where the messages travel.
        parts: what travels.
        formats: formats made before for parts with these rows; a new one is added.
        name: what the exchange is, for errors.
        expected: what `expect` made for it.
    """
    form = _format(tuple((part.rows, row_bytes(part.tensor)) for part in parts), formats)
    sent = _pack([part.tensor for part in parts], form.pieces)
    if channel is None:
        return Pending(None, parts, form, sent, sent)
    if expected is None:
        received, transfer = sent.new_empty(sum(form.receive.values())), None
    else:
        transfer, received, foreseen = expected
        if foreseen is not form:
            raise RuntimeError(f"messages of {foreseen.receive} bytes by rank were expected, and are of {form.receive}")
    return Pending(channel.start(received, sent, form.receive, form.send, name, transfer), parts, form, sent, received)


def _format(parts: tuple[tuple[Rows, int], ...], formats: Formats | None) -> Format:
    """The format of parts, made once."""
    form = None if formats is None else formats.get(parts)
    if form is None:
        form = Format.of(parts)
        if formats is not None:
            formats[parts] = form
    return form


def part_of(tensor: torch.Tensor, start: int, rows: int, step: int = 1) -> torch.Tensor:
    """Rows start, start + step, ..., so many of them, as a view, or the tensor itself if it has no others."""
    if step > 1:
        return tensor[start : start + step * rows : step]
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, start, rows)


def joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows of several tensors one after another in a new tensor; without any, none of those of `like`."""
    return torch.cat(list(pieces)) if pieces else like.new_empty((0, *like.shape[1:]))


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one of its rows."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _sizes(parts: Sequence[tuple[Rows, int]], counts: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Bytes of the message of each rank that has one, in the order of ranks."""
    sizes: dict[int, int] = {}
    for (_, row_bytes), rows in zip(parts, counts, strict=True):
        for rank, count in rows.items():
            sizes[rank] = sizes.get(rank, 0) + _padded(count * row_bytes)
    return dict(sorted(sizes.items()))


def _pack(tensors: Sequence[torch.Tensor], pieces: Sequence[_Piece]) -> torch.Tensor:
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
