"""Rows of several tensors from every rank to every rank, as one asynchronous all-to-all.

`launch` packs and starts, `Pending.sections` finishes. All messages are packed by one operation whatever the number of ranks and
parts, and nothing here takes time for ranks that neither send nor receive. How messages are laid out is in `runtime.format`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.format import Format, Formats, Rows, pack, views
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.trace import Mark, Tracer

__all__ = ["Expected", "Landed", "Part", "Pending", "expect", "joined", "launch", "part_of", "row_bytes"]


class Part(NamedTuple):
    """One tensor of a message, (rows, ...), and where its rows go. It must be contiguous."""

    tensor: torch.Tensor
    rows: Rows


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
        return [views(received, *kind, found) for kind, found in zip(self._kinds, self._sections, strict=True)]


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
    sent = pack([part.tensor for part in parts], form.pieces)
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
