"""Rows of several tensors from every rank to every rank, as one asynchronous exchange.

Rows travel in contiguous runs: slices of documents. A step larger than 1 takes the rows of one head
group. `launch` packs and starts, `Pending.receive_sections` finishes. The message to one rank
holds the rows of each part one after another, each part padded to 16 bytes so that float32 and
bfloat16 can share it::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...

Offsets are computed once for all layers (`MessageLayout`). All messages are packed by one
operation whatever the number of ranks and parts, and nothing here takes time for ranks that neither
send nor receive.
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

_ALIGNMENT = 16
NOBODY = range(0)
# What bytes are copied as: a GPU copies eight at a time about as fast as one.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RowRun(NamedTuple):
    """`rows` rows of a tensor, from `start` on, `step` apart, and the rank that they go to."""

    rank: int
    start: int
    rows: int
    step: int = 1


class PoolRun(NamedTuple):
    """Keys [start, start + rows) of a section of the message, or of this rank's own, `step` apart,
    if `section` is None.

    Sections of the second hop, if there is one, count on after those of the first.
    """

    section: int | None
    start: int
    rows: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor to send to each rank, and row counts to receive from each.

    Attributes:
        runs: the rows that are sent, in the order in which they arrive; runs for one rank are
            neighbours, and ranks in order.
        receive: rows that come from each rank that sends any, in the order of ranks.
    """

    runs: tuple[RowRun, ...]
    receive: Mapping[int, int]

    @cached_property
    def runs_by_rank(self) -> dict[int, list[RowRun]]:
        """`runs` by destination rank, in the order of ranks."""
        return {rank: list(runs) for rank, runs in groupby(self.runs, key=lambda run: run.rank)}

    @cached_property
    def send(self) -> dict[int, int]:
        """Number of rows to each rank that gets any, in the order of ranks."""
        return {rank: sum(run.rows for run in runs) for rank, runs in self.runs_by_rank.items()}

    @cached_property
    def way_back(self) -> Rows:
        """The reverse exchange: rows that travel when everything received goes back to its sender,
        in the order of arrival.
        """
        starts = accumulate(self.receive.values(), initial=0)
        return Rows(tuple(map(RowRun, self.receive, starts, self.receive.values())), self.send)


def view_rows(tensor: torch.Tensor, start: int, rows: int, step: int = 1) -> torch.Tensor:
    """Return `rows` rows from `start` on, `step` apart, as a view; the tensor itself if it has no
    others.
    """
    if step > 1:
        return tensor[start : start + step * rows : step]
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, start, rows)


def concat_rows(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate rows of several tensors into a new tensor; without any, return zero rows of the
    shape of `like`.
    """
    return torch.cat(list(pieces)) if pieces else like.new_empty((0, *like.shape[1:]))


def split_runs(
    runs: Sequence[RowRun | PoolRun], sections: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Cut consecutive sections into the rows of each run. No run is in two of them."""
    left = iter(sections)
    rest = 0
    for run in runs:
        if not rest:
            section = next(left)
            rest = len(section)
        yield view_rows(section, len(section) - rest, run.rows)
        rest -= run.rows


def put_rows(
    tensors: Sequence[torch.Tensor],
    runs: Sequence[RowRun],
    sections: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Write the rows in the sections of each tensor to the places of the runs, by one operation a
    tensor.
    """
    for tensor, came in zip(tensors, sections, strict=True):
        if runs:
            copy_each([view_rows(tensor, *run[1:]) for run in runs], list(split_runs(runs, came)))


def add_rows(
    grad_TKD: torch.Tensor, runs: Sequence[RowRun | PoolRun], addends: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Add addends to the rows of each run and return the gradients: sums in float32 or float64, if
    there are runs.
    """
    total = grad_TKD if not runs or grad_TKD.dtype == torch.float64 else grad_TKD.float()
    for run, rows_TKD in zip(runs, addends, strict=True):
        view_rows(total, *run[1:]).add_(rows_TKD)
    return total


class MessagePart(NamedTuple):
    """A contiguous tensor of a message, (rows, ...), and the destinations of its rows."""

    tensor: torch.Tensor
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


class _CopySpan(NamedTuple):
    """Span of bytes of a part, or zeros if `part` is None: `times` times `size` bytes, `stride`
    apart.
    """

    part: int | None
    start: int
    size: int
    times: int = 1
    stride: int = 0

    @classmethod
    def from_run(cls, part: int, run: RowRun, row_bytes: int) -> _CopySpan:
        """Return the bytes of a run's rows."""
        if run.step == 1:
            return cls(part, run.start * row_bytes, run.rows * row_bytes)
        return cls(part, run.start * row_bytes, row_bytes, run.rows, run.step * row_bytes)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Return these bytes of a part, whose bytes are `flat`: a view, if they are contiguous."""
        if self.times == 1:
            return flat.narrow(0, self.start, self.size)
        rows = flat.narrow(0, self.start, (self.times - 1) * self.stride + self.size)
        divisor = math.gcd(rows.storage_offset(), self.stride, self.size)
        word = next(dtype for dtype in _WORDS if divisor % dtype.itemsize == 0)
        words = rows.view(word)
        size, stride = self.size // word.itemsize, self.stride // word.itemsize
        return (
            words.as_strided((self.times, size), (stride, 1), words.storage_offset())
            .contiguous()
            .view(-1)
            .view(torch.uint8)
        )


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """Layout of the messages of an exchange; in bytes unless said otherwise.

    Attributes:
        pieces: spans that are sent, in order.
        sections: for each part, offset and number of the received rows of each rank that sends any.
        send, receive: size of the message to and from each rank that has one, in the order of
            ranks.
        payload: size of everything sent, without padding.
        between: size of the part of it that goes to ranks of other nodes.
    """

    pieces: list[_CopySpan]
    sections: list[list[tuple[int, int]]]
    send: dict[int, int]
    receive: dict[int, int]
    payload: int
    between: int

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[Rows, int]], near: range = NOBODY) -> MessageLayout:
        """Compute the layout of parts, given by their rows and the bytes of a row.

        The ranks `near` are on this node.
        """
        sizes = [(rank, rows.send[rank] * size) for rows, size in parts for rank in rows.send]
        form = cls(
            [],
            [[] for _ in parts],
            {},
            {},
            sum(size for _, size in sizes),
            sum(size for rank, size in sizes if rank not in near),
        )
        for rank in sorted({rank for rows, _ in parts for rank in rows.send}):
            form.send[rank] = 0
            for number, (rows, row_bytes) in enumerate(parts):
                form.pieces.extend(
                    _CopySpan.from_run(number, run, row_bytes)
                    for run in rows.runs_by_rank.get(rank, [])
                )
                size = rows.send.get(rank, 0) * row_bytes
                if padding := -size % _ALIGNMENT:
                    form.pieces.append(_CopySpan(None, 0, padding))
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


MessageLayouts = dict[tuple[tuple[Rows, int], ...], MessageLayout]


class Pending:
    """An exchange under way.

    It holds its messages until it is waited for, and nothing afterwards.

    Attributes:
        sent_bytes, between_bytes: bytes sent to other ranks, and those of them that go to other
            nodes, without padding.
        device: device of its messages.
        transfer: the transfer to wait for; None if there is none, or if it is over.
        earlier_sections: sections of an earlier exchange. Its last parts are those of this one;
            their sections go in front of its own.
        earlier_transfer: the transfer of that exchange, if another stream has waited for it; held
            so that memory it sends is not reused earlier.
    """

    def __init__(
        self,
        parts: Sequence[MessagePart],
        form: MessageLayout,
        transfer: Transfer | None,
        received: torch.Tensor,
    ) -> None:
        self.sent_bytes, self.between_bytes, self.device = (
            form.payload,
            form.between,
            received.device,
        )
        self.transfer = transfer
        self.earlier_transfer: Transfer | None = None
        self.earlier_sections: list[list[torch.Tensor]] = []
        # Dtypes and row shapes are all that is needed of the parts: what was packed may go.
        self._kinds = [(part.tensor.dtype, part.tensor.shape[1:]) for part in parts]
        self._sections, self._received = form.sections, received

    def receive_sections(self) -> list[list[torch.Tensor]]:
        """Wait, and return the received rows of each part as views of one message, rank
        after rank, senders only. May be called once.

        On CUDA only the current stream waits, not the host.
        """
        if self.transfer is not None:
            self.transfer.wait()
        came = [
            _view_sections(self._received, *kind, sections)
            for kind, sections in zip(self._kinds, self._sections, strict=True)
        ]
        before, self.earlier_sections = self.earlier_sections, []
        del self._received
        self.transfer = self.earlier_transfer = None
        alone = len(before) - len(came) if before else 0
        return (
            before[:alone]
            + [first + second for first, second in zip(before[alone:], came, strict=True)]
            if before
            else came
        )


@contextmanager
def enter_side_stream(channel: Channel | None, device: torch.device) -> Iterator[bool]:
    """Run work on a side stream on CUDA, which starts after the current stream's work.

    Yields whether there is such a stream.

    An exchange must be launched inside: waiting for the exchange also waits for this stream. Memory
    allocated inside is reused only by later work of this stream, which waits for the current one
    again. Over gloo the host waits: there is no such stream.
    """
    if device.type != "cuda" or channel is None or channel.is_gloo:
        yield False
        return
    stream = _make_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield True


@cache
def _make_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of high priority: packing there is short, and other ranks wait for it."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def launch(
    channel: Channel | None,
    parts: Sequence[MessagePart],
    formats: MessageLayouts | None = None,
    name: str | None = None,
    near: range = NOBODY,
) -> Pending:
    """Start an exchange.

    Every rank of the channel must launch the same exchanges in the
    same order; None is a group of one.

    The parts must have the same dtypes and row shapes on every rank. Ranks may send and receive
    nothing. `formats` caches formats by the rows of the parts; `name` names the exchange in errors.
    The ranks `near` are on this node.
    """
    formats = {} if formats is None else formats
    kinds = tuple((part.rows, part.row_bytes) for part in parts)
    if (form := formats.get(kinds)) is None:
        form = formats[kinds] = MessageLayout.from_parts(kinds, near)
    sent = pack([part.tensor for part in parts], form.pieces)
    if channel is None:
        return Pending(parts, form, None, sent)
    received = sent.new_empty(sum(form.receive.values()))
    return Pending(
        parts, form, channel.start(received, sent, form.receive, form.send, name), received
    )


def pack(tensors: Sequence[torch.Tensor], pieces: Sequence[_CopySpan]) -> torch.Tensor:
    """Copy the pieces of the tensors one after another into one uint8 message buffer."""
    if not pieces:
        return tensors[0].new_empty(0, dtype=torch.uint8)
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    padding = (
        flat[0].new_zeros(_ALIGNMENT) if any(piece.part is None for piece in pieces) else flat[0]
    )
    return torch.cat(
        [piece.cut(padding if piece.part is None else flat[piece.part]) for piece in pieces]
    )


def _view_sections(
    message: torch.Tensor,
    dtype: torch.dtype,
    row: tuple[int, ...],
    sections: Sequence[tuple[int, int]],
) -> list[torch.Tensor]:
    """Return sections of a message, given by first byte and number of rows, as tensors."""
    typed = message.view(dtype)
    strides = [math.prod(row[place:]) for place in range(len(row) + 1)]
    return [
        typed.as_strided((rows, *row), strides, start // dtype.itemsize) for start, rows in sections
    ]
