"""Rows of several tensors from every rank to every rank, as one asynchronous all-to-all.

`launch` packs and starts, `Pending.sections` finishes. All messages are packed by one operation whatever the number of ranks and
parts, and nothing here takes time for ranks that neither send nor receive. How messages are laid out is in `runtime.format`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from hf_distca.borrowed import copy_each
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.format import Format, Formats, Rows, Run, pack, views
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.trace import Mark, Tracer

__all__ = ["Part", "Pending", "joined", "launch", "part_of", "pieces", "put_rows"]


class Part(NamedTuple):
    """One tensor of a message, (rows, ...), and where its rows go. It must be contiguous."""

    tensor: torch.Tensor
    rows: Rows


class Pending:
    """An exchange under way. Holds what it sends and receives until it is waited for, and nothing afterwards.

    Attributes:
        sent_bytes: bytes sent to other ranks, without padding.
        before: sections of an earlier exchange whose last parts are those of this one, which go in front of its own.
    """

    def __init__(
        self, transfer: Transfer | None, parts: Sequence[Part], form: Format, sent: torch.Tensor, received: torch.Tensor
    ) -> None:
        self.sent_bytes = form.payload
        self.before: list[list[torch.Tensor]] = []
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
        came = [views(received, *kind, sections) for kind, sections in zip(self._kinds, self._sections, strict=True)]
        before, self.before = self.before, []
        del self._transfer, self._buffers
        cut = max(len(before) - len(came), 0)
        return before[:cut] + ([first + second for first, second in zip(before[cut:], came, strict=True)] if before else came)


def launch(channel: Channel | None, parts: Sequence[Part], formats: Formats | None = None, name: str | None = None) -> Pending:
    """Start an exchange. Every rank of the channel must launch the same exchanges in the same order; None is a group of one.

    The parts must have the same dtypes and row shapes on every rank. Ranks may send and receive nothing.

    Args:
        channel: where the messages travel.
        parts: what travels.
        formats: formats made before for parts with these rows; a new one is added.
        name: what the exchange is, for errors.
    """
    formats = {} if formats is None else formats
    kinds = tuple((part.rows, math.prod(part.tensor.shape[1:]) * part.tensor.element_size()) for part in parts)
    if (form := formats.get(kinds)) is None:
        form = formats[kinds] = Format.of(kinds)
    sent = pack([part.tensor for part in parts], form.pieces)
    if channel is None:
        return Pending(None, parts, form, sent, sent)
    received = sent.new_empty(sum(form.receive.values()))
    return Pending(channel.start(received, sent, form.receive, form.send, name), parts, form, sent, received)


def part_of(tensor: torch.Tensor, start: int, rows: int, step: int = 1) -> torch.Tensor:
    """Rows start, start + step, ..., so many of them, as a view, or the tensor itself if it has no others."""
    if step > 1:
        return tensor[start : start + step * rows : step]
    return tensor if rows == tensor.shape[0] else tensor.narrow(0, start, rows)


def joined(pieces: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Rows of several tensors one after another in a new tensor; without any, none of those of `like`."""
    return torch.cat(list(pieces)) if pieces else like.new_empty((0, *like.shape[1:]))


def pieces(runs: Sequence[Run], sections: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The rows of each run, which lie one after another in sections. No run is in two of them."""
    left, rest = iter(sections), 0
    for run in runs:
        if not rest:
            section = next(left)
            rest = len(section)
        yield part_of(section, len(section) - rest, run.rows)
        rest -= run.rows


def put_rows(tensors: Sequence[torch.Tensor], runs: Sequence[Run], sections: Sequence[Sequence[torch.Tensor]]) -> None:
    """Write the rows in the sections of each tensor where the runs say, by one operation a tensor."""
    for tensor, came in zip(tensors, sections, strict=True):
        if runs:
            copy_each([part_of(tensor, *run[1:]) for run in runs], list(pieces(runs, came)))
