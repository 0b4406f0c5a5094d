"""Rows of several tensors from every rank to every rank, as one asynchronous all-to-all.

`launch` packs and starts, `Pending.wait` finishes. A message to one rank holds the rows of each part one after another, each
part padded to 16 bytes so that float32 and bfloat16 can share it::

    to rank 0: | part 0 rows | part 1 rows | ...   to rank 1: | part 0 rows | part 1 rows | ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.trace import Mark, Tracer

__all__ = ["Part", "Pending", "Rows", "launch"]

_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Rows:
    """Which rows of a tensor go to which rank, and how many come back from each.

    Attributes:
        index: int64 row numbers on the tensor's device, those for rank 0 first; None for all rows in order.
        send, receive: rows to and from each rank, one number per rank.
    """

    index: torch.Tensor | None
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @cached_property
    def way_back(self) -> Rows:
        """The rows that travel when what was received goes back where it came from, in the order it came."""
        return Rows(None, self.receive, self.send)

    @cached_property
    def index_per_rank(self) -> tuple[torch.Tensor, ...] | None:
        """`index`, cut by destination."""
        return None if self.index is None else torch.split(self.index, list(self.send))


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor of a message, (rows, ...), and where its rows go. It must be contiguous."""

    tensor: torch.Tensor
    rows: Rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.tensor.shape[1:]) * self.tensor.element_size()


class Pending:
    """An exchange under way. Holds what it sends and receives until it is waited for, and nothing afterwards."""

    def __init__(self, transfer: Transfer | None, parts: Sequence[Part], sent: torch.Tensor, received: torch.Tensor) -> None:
        self._transfer, self._buffers = transfer, (sent, received)
        self._watch: tuple[Tracer, str, Mark | None] | None = None
        # Dtypes and row shapes are all that is needed of the parts: what was packed may go.
        self._parts = [Part(part.tensor.new_empty((0, *part.tensor.shape[1:])), part.rows) for part in parts]

    def watch(self, tracer: Tracer, name: str) -> None:
        """Let `tracer` record how long the message travels, under this name, and how long it is waited for."""
        self._watch = tracer, name, tracer.now()

    def sections(self) -> list[list[torch.Tensor]]:
        """The received rows of each part as views of one message, rank after rank without those that sent none. Once only.

        On CUDA only the current stream waits, not the host.
        """
        waiting = None if self._watch is None else self._watch[0].now()
        if self._transfer is not None:
            self._transfer.wait()
        if self._watch is not None:
            tracer, name, launched = self._watch
            tracer.since(waiting, "wait")
            tracer.since(launched, name)
        _, received = self._buffers
        del self._transfer, self._buffers
        return _unpack(self._parts, received)

    def wait(self) -> list[torch.Tensor]:
        """The received rows of each part, (sum of `receive`, ...), those of rank 0 first. Once only."""
        return [_joined(found, part.tensor) for found, part in zip(self.sections(), self._parts, strict=True)]


def launch(channel: Channel | None, parts: Sequence[Part]) -> Pending:
    """Start an exchange. Every rank of the channel must launch the same exchanges in the same order; None is a group of one.

    The parts must have the same dtypes and row shapes on every rank. Ranks may send and receive nothing.
    """
    device = parts[0].tensor.device
    send_bytes = _message_bytes(parts, [part.rows.send for part in parts])
    receive_bytes = _message_bytes(parts, [part.rows.receive for part in parts])
    sent = _pack(parts, send_bytes)
    received = torch.empty(sum(receive_bytes), dtype=torch.uint8, device=device)
    if channel is None:
        return Pending(None, parts, sent, received.copy_(sent))
    return Pending(channel.start(received, sent, receive_bytes, send_bytes), parts, sent, received)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _message_bytes(parts: Sequence[Part], counts: Sequence[tuple[int, ...]]) -> list[int]:
    sizes = [[_padded(n * part.row_bytes) for n in rows] for part, rows in zip(parts, counts, strict=True)]
    return [sum(column) for column in zip(*sizes, strict=True)]


def _pack(parts: Sequence[Part], send_bytes: Sequence[int]) -> torch.Tensor:
    sent = torch.empty(sum(send_bytes), dtype=torch.uint8, device=parts[0].tensor.device)
    offset = 0
    starts = [list(accumulate(part.rows.send, initial=0)) for part in parts]
    for rank in range(len(send_bytes)):
        for part, start in zip(parts, starts, strict=True):
            count = part.rows.send[rank]
            if not count:
                continue
            section = _section(sent, offset, count, part)
            if part.rows.index_per_rank is None:
                section.copy_(part.tensor[start[rank] : start[rank] + count])
            else:
                torch.index_select(part.tensor, 0, part.rows.index_per_rank[rank], out=section)
            offset += _padded(count * part.row_bytes)
    return sent


def _unpack(parts: Sequence[Part], received: torch.Tensor) -> list[list[torch.Tensor]]:
    sections: list[list[torch.Tensor]] = [[] for _ in parts]
    offset = 0
    for rank in range(len(parts[0].rows.receive)):
        for part, found in zip(parts, sections, strict=True):
            if count := part.rows.receive[rank]:
                found.append(_section(received, offset, count, part))
                offset += _padded(count * part.row_bytes)
    return sections


def _section(buffer: torch.Tensor, offset: int, count: int, part: Part) -> torch.Tensor:
    """`count` rows shaped and typed as those of `part`, as a view of the bytes from `offset`."""
    size = count * part.row_bytes
    return buffer[offset : offset + size].view(part.tensor.dtype).view(count, *part.tensor.shape[1:])


def _joined(sections: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if not sections:
        return like.new_empty((0, *like.shape[1:]))
    return sections[0] if len(sections) == 1 else torch.cat(sections)
