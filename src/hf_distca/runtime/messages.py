"""Asynchronous exchange of rows of several tensors between all ranks.

Rows travel in runs, which are slices of documents. The rows of one head group are a run with a step
larger than 1. `launch` packs the rows and starts an exchange, and `Pending.receive_sections`
finishes it. The message to one rank holds the rows of all parts, one part after another. Each part
is padded to 16 bytes so that float32 and bfloat16 can share a message::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...

Offsets, shapes and strides are computed once for all layers (`MessageLayout`). One operation packs
all messages, whatever the number of ranks and parts. Ranks that neither send nor receive cost no
time. Code that runs in every layer uses loops rather than function calls, because a Python call
takes as long as making a view of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from hf_distca.borrowed import copy_each
from hf_distca.runtime.channel import Channel, Transfer

_ALIGNMENT = 16
NOBODY = range(0)
OWN = -1  # Index of the section that stands for this rank's own tensor.
# Bytes are copied in words of these types. A GPU copies eight bytes about as fast as one.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class RowRun(NamedTuple):
    """A run of `rows` rows of a tensor, which begin at row `start` and are `step` apart.

    Attributes:
        peer: the rank to which the rows are sent. In a run of a `Pool`, `peer` is instead the index
            of the received section that has the rows, or `OWN` if this rank's tensor has them.
            Sections from relays come after sections from home ranks.
    """

    peer: int
    start: int
    rows: int
    step: int = 1


class RowCopy(NamedTuple):
    """A copy from rows [first, first + rows) of a section to rows of a tensor, which begin at row
    `start` and are `step` apart.
    """

    section: int
    first: int
    start: int
    rows: int
    step: int = 1


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor to send to each rank, and numbers of rows to receive from each rank.

    Attributes:
        runs: the rows to send, sorted by destination rank. The rows to one rank are in the order in
            which they arrive.
        receive: number of rows from each rank that sends any, in the order of ranks.
    """

    runs: tuple[RowRun, ...]
    receive: Mapping[int, int]

    @cached_property
    def runs_by_rank(self) -> dict[int, list[RowRun]]:
        """The runs for each destination rank, in the order of ranks."""
        return {rank: list(runs) for rank, runs in groupby(self.runs, key=lambda run: run.peer)}

    @cached_property
    def send(self) -> dict[int, int]:
        """Number of rows to send to each rank that receives any, in the order of ranks."""
        return {rank: sum(run.rows for run in runs) for rank, runs in self.runs_by_rank.items()}

    @cached_property
    def way_back(self) -> Rows:
        """The reverse exchange, which returns all received rows to their senders, in the order of
        arrival.
        """
        starts = accumulate(self.receive.values(), initial=0)
        return Rows(tuple(map(RowRun, self.receive, starts, self.receive.values())), self.send)

    @cached_property
    def returned(self) -> list[RowCopy]:
        """Copies that put returned rows back into the tensor from which they were sent.

        The copies read one section for each rank that returns rows.
        """
        return [
            RowCopy(section, first, *run[1:])
            for section, runs in enumerate(self.runs_by_rank.values())
            for first, run in zip(
                accumulate((run.rows for run in runs), initial=0), runs, strict=False
            )
        ]


def view_rows(tensor: torch.Tensor, start: int, rows: int, step: int = 1) -> torch.Tensor:
    """Return a view of `rows` rows, which begin at row `start` and are `step` apart.

    If these are all rows of the tensor, return the tensor itself.
    """
    if step > 1:
        return tensor[start : start + step * rows : step]
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, start, rows)


def concat_rows(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Concatenate rows of several tensors into a new tensor.

    If there are no pieces, the result has zero rows, and the row shape and dtype of `like`.
    """
    return torch.cat(list(pieces)) if pieces else like.new_empty((0, *like.shape[1:]))


def put_rows(
    tensors: Sequence[torch.Tensor],
    copies: Sequence[RowCopy],
    sections: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Copy rows from sections to their places in each tensor, with one operation per tensor."""
    if not copies:
        return
    for tensor, received in zip(tensors, sections, strict=True):
        places, rows = [], []
        for section, first, start, count, step in copies:
            places.append(view_rows(tensor, start, count, step))
            rows.append(view_rows(received[section], first, count))
        copy_each(places, rows)


def add_rows(
    grad_TKD: torch.Tensor, copies: Sequence[RowCopy], sections: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Add rows of received sections to gradients, one copy after another. Return the sums.

    If `copies` is not empty, the result is float32 or float64.
    """
    total = grad_TKD if not copies or grad_TKD.dtype == torch.float64 else grad_TKD.float()
    for section, first, start, rows, step in copies:
        view_rows(total, start, rows, step).add_(view_rows(sections[section], first, rows))
    return total


class MessagePart(NamedTuple):
    """A contiguous tensor to send, (rows, ...), and the destinations of its rows."""

    tensor: torch.Tensor
    rows: Rows


# The rows of a part, their dtype, and the shape of a row.
_PartKind = tuple[Rows, torch.dtype, torch.Size]
# Bytes of a part to copy: index of the part, first byte, bytes of a block, number of blocks, and
# bytes from the start of a block to the start of the next one.
_CopySpan = tuple[int, int, int, int, int]


def _copy_strided(
    flat: torch.Tensor, start: int, size: int, times: int, stride: int
) -> torch.Tensor:
    """Copy `times` blocks of `size` bytes, `stride` bytes apart, as the widest words possible."""
    rows = flat.narrow(0, start, (times - 1) * stride + size)
    divisor = math.gcd(rows.storage_offset(), stride, size)
    word = next(dtype for dtype in _WORDS if divisor % dtype.itemsize == 0)
    words = rows.view(word)
    copied = words.as_strided(
        (times, size // word.itemsize), (stride // word.itemsize, 1), words.storage_offset()
    )
    return copied.contiguous().view(-1).view(torch.uint8)


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """Layout of the messages of an exchange. Sizes are in bytes unless stated otherwise.

    Attributes:
        pieces: spans to send, in order. If the part index of a span equals the number of parts, the
            span is padding.
        sections: for each part, its dtype, and the size, strides and offset (in elements) of the
            rows from each rank that sends any.
        send, receive: sizes of the messages to and from ranks, in the order of ranks. Ranks without
            a message are left out.
        payload: size of all sent rows, without padding.
        between: size of the sent rows that go to other nodes.
    """

    pieces: list[_CopySpan]
    sections: list[tuple[torch.dtype, list[tuple[tuple[int, ...], list[int], int]]]]
    send: dict[int, int]
    receive: dict[int, int]
    payload: int
    between: int

    @classmethod
    def from_parts(cls, parts: Sequence[_PartKind], near: range = NOBODY) -> MessageLayout:
        """Compute the layout of messages with these parts. The ranks in `near` are on this node."""
        row_bytes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in parts]
        pieces: list[_CopySpan] = []
        send: dict[int, int] = {}
        payload = between = 0
        for rank in sorted({rank for rows, *_ in parts for rank in rows.send}):
            send[rank] = 0
            for number, ((rows, *_), size) in enumerate(zip(parts, row_bytes, strict=True)):
                for _, start, count, step in rows.runs_by_rank.get(rank, []):
                    span = (count * size, 1, 0) if step == 1 else (size, count, step * size)
                    pieces.append((number, start * size, *span))
                sent = rows.send.get(rank, 0) * size
                payload, between = payload + sent, between + sent * (rank not in near)
                if padding := -sent % _ALIGNMENT:
                    pieces.append((len(parts), 0, padding, 1, 0))
                send[rank] += sent + padding
        sections: list[Any] = [(dtype, []) for _, dtype, _ in parts]
        receive: dict[int, int] = {}
        offset = 0
        for rank in sorted({rank for rows, *_ in parts for rank in rows.receive}):
            begin = offset
            for (rows, dtype, shape), size, (_, section) in zip(
                parts, row_bytes, sections, strict=True
            ):
                if count := rows.receive.get(rank, 0):
                    strides = [math.prod(shape[place:]) for place in range(len(shape) + 1)]
                    section.append(((count, *shape), strides, offset // dtype.itemsize))
                    offset -= -count * size // _ALIGNMENT * _ALIGNMENT
            receive[rank] = offset - begin
        return cls(pieces, sections, send, receive, payload, between)


MessageLayouts = dict[tuple[_PartKind, ...], MessageLayout]


class Pending:
    """An exchange under way.

    It holds its messages until `receive_sections` is called.

    Attributes:
        layout: layout of the messages.
        device: device of the messages.
        transfer: the transfer to wait for; None if there is no transfer, or if it is over.
        earlier_sections: sections that an earlier exchange received. For a part that both exchanges
            have, the sections of the earlier exchange come first.
        earlier_transfer: the transfer of the earlier exchange, if another stream has waited for it.
            This reference keeps the memory of the sent messages from being reused too early.
    """

    def __init__(
        self, layout: MessageLayout, transfer: Transfer | None, received: torch.Tensor
    ) -> None:
        self.layout, self.device, self.transfer = layout, received.device, transfer
        self.earlier_transfer: Transfer | None = None
        self.earlier_sections: list[list[torch.Tensor]] = []
        self._received = received

    def receive_sections(self) -> list[list[torch.Tensor]]:
        """Wait, and return for each part a view of the rows from each rank that sends any.

        This may be called only once. On CUDA only the current stream waits, not the host.
        """
        if self.transfer is not None:
            self.transfer.wait()
        before, self.earlier_sections = self.earlier_sections, []
        received = before[: max(len(before) - len(self.layout.sections), 0)]
        after = before[len(received) :]
        for dtype, sections in self.layout.sections:
            typed = self._received.view(dtype)
            views = after.pop(0) if after else []
            for size, strides, offset in sections:
                views.append(typed.as_strided(size, strides, offset))
            received.append(views)
        del self._received
        self.transfer = self.earlier_transfer = None
        return received


@contextmanager
def enter_side_stream(channel: Channel | None, device: torch.device) -> Iterator[bool]:
    """On CUDA, run the block on a side stream, after the work of the current stream.

    Yields whether there is a side stream. Over gloo no side stream is used, because the host waits.

    The caller must launch an exchange in the block, so that waiting for the exchange also waits for
    the side stream. After the block, the current stream may use tensors that were allocated in the
    block. Their memory is reused only in a later block, which first waits for the current stream.
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
    """Make a stream of high priority, because packing is short and other ranks wait for it."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def launch(
    channel: Channel | None,
    parts: Sequence[MessagePart],
    layouts: MessageLayouts | None = None,
    purpose: str = "exchange",
    near: range = NOBODY,
) -> Pending:
    """Start an exchange.

    Every rank of the channel must launch the same exchanges in the same order. `channel` is None in
    a group of one.

    The parts must have the same dtypes and row shapes on every rank. A rank may send or receive
    nothing. `layouts` is a cache of message layouts. For `purpose` see `Channel.start`. The ranks
    in `near` are on this node.
    """
    layouts = {} if layouts is None else layouts
    kinds: tuple[_PartKind, ...] = ()
    for tensor, rows in parts:
        kinds += ((rows, tensor.dtype, tensor.shape[1:]),)
    if (layout := layouts.get(kinds)) is None:
        layout = layouts[kinds] = MessageLayout.from_parts(kinds, near)
    sent = pack([part[0] for part in parts], layout.pieces)
    if channel is None:
        return Pending(layout, None, sent)
    received = sent.new_empty(sum(layout.receive.values()))
    transfer = channel.start(received, sent, layout.receive, layout.send, purpose)
    return Pending(layout, transfer, received)


def pack(tensors: Sequence[torch.Tensor], pieces: Sequence[_CopySpan]) -> torch.Tensor:
    """Copy the pieces of the tensors one after another into one uint8 message buffer."""
    if not pieces:
        return tensors[0].new_empty(0, dtype=torch.uint8)
    flat, copied = [], []
    for tensor in tensors:
        flat.append(tensor.view(-1).view(torch.uint8))
    for part, start, size, times, stride in pieces:
        if part == len(flat):  # this piece is padding
            flat.append(flat[0].new_zeros(_ALIGNMENT))
        copied.append(
            flat[part].narrow(0, start, size)
            if times == 1
            else _copy_strided(flat[part], start, size, times, stride)
        )
    return torch.cat(copied)
