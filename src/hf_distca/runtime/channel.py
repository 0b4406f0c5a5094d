"""The data communicator of core attention: starts exchanges and waits for them, and matches them by
their purpose.

gloo matches messages by their order alone. If ranks disagree about what comes next, a message that
is longer than the awaited one ends the receiving process, and a shorter one is taken in silence. So
over gloo an exchange is a set of tagged messages, where the tag encodes what is exchanged: messages
that do not belong together never meet, and waiting for one that never comes ends in an error. Other
backends have no tags; there an exchange is one all-to-all.

gloo sends host memory only. Tensors of another device are copied to the host first, for which the
host waits, and back afterwards.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist

from hf_distca.runtime.monitor import BREAK_TAG, FailureMonitor, compute_reserved_seconds


@dataclass(eq=False)
class Channel:
    """A communicator as one call of core attention sees it.

    Attributes:
        process_group: where messages travel.
        monitor: receives a report if a message does not come.
        timeout_seconds: how long a rank waits for the others.
        where: purpose of the exchanges, in words that are the same on every rank.
        forward_exchanges: how many of the exchanges belong to forward; those after them belong to
            backward.
        launched: exchanges launched so far.
    """

    process_group: dist.ProcessGroup
    monitor: FailureMonitor
    timeout_seconds: float
    where: str = "core attention"
    forward_exchanges: int | None = None
    launched: int = 0
    _sum: list[int] = field(
        default_factory=lambda: [0]
    )  # the checksum, one for all calls of `make_call_channel`

    @property
    def checksum(self) -> int:
        """Number below 2**32 that depends on all launches so far, here and in all calls of
        `make_call_channel`, but not on sizes.

        Equal on two ranks that launched the same exchanges in the same order. Layers of one
        micro-batch have messages of equal sizes: where they have no tags, nothing else shows that
        two ranks exchanged those of different layers.
        """
        return self._sum[0]

    def make_call_channel(self, where: str, forward_exchanges: int) -> Channel:
        """Return the channel of a call with this many exchanges in forward."""
        return replace(self, where=where, forward_exchanges=forward_exchanges, launched=0)

    def begin_backward(self) -> None:
        """Count subsequent exchanges as backward ones, also in a recompute, which launched none in
        forward.
        """
        self.launched = max(self.launched, self.forward_exchanges or 0)

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
        name: str | None = None,
    ) -> Transfer:
        """Start to send and receive messages, which lie one after another in `sent` and `received`,
        both uint8.

        Args:
            received, sent: the messages of all ranks, in the order of ranks.
            receive_bytes, send_bytes: size of the message by rank, in the order of ranks; those
                without one may be left out.
            name: name of the exchange, for errors.
        """
        direction = ""
        if self.forward_exchanges is not None:
            direction = " in forward" if self.launched < self.forward_exchanges else " in backward"
        doing = f"waiting for the {name or 'exchange'}{direction} of {self.where}"
        tag = _compute_checksum(doing, self.launched) % BREAK_TAG
        self._sum[0] = _compute_checksum(doing, self.launched, self._sum[0])
        self.launched += 1
        landing = received if self._is_staged(received) else None
        received = received if landing is None else torch.empty_like(received, device="cpu")
        sent = sent.to("cpu", copy=True) if self._is_staged(sent) else sent
        transfer = Transfer(self, [], received, sent, doing, tag, landing)
        self.monitor.under_way.add(transfer)
        launch = self._start_tagged if self.is_gloo else self._start_all_to_all
        try:
            # One message after another: if a rank has left, those that were started before must be
            # seen through.
            for work in launch(transfer, receive_bytes, send_bytes):
                transfer.works.append(work)
        except RuntimeError as error:
            raise self.monitor.give_up(doing, error) from error
        return transfer

    @property
    def is_gloo(self) -> bool:
        """True if messages are tagged, and waits for them bounded."""
        return self.process_group.name() == "gloo"

    @property
    def under_way(self) -> bool:
        """True if there are messages that this rank has not waited for."""
        return any(transfer.works for transfer in tuple(self.monitor.under_way))

    def _is_staged(self, message: torch.Tensor) -> bool:
        return self.is_gloo and message.device.type != "cpu"

    def _start_all_to_all(
        self, transfer: Transfer, receive_bytes: Mapping[int, int], send_bytes: Mapping[int, int]
    ) -> Iterator[dist.Work | None]:
        group = self.process_group
        arriving, leaving = (
            [sizes.get(rank, 0) for rank in range(group.size())]
            for sizes in (receive_bytes, send_bytes)
        )
        yield dist.all_to_all_single(
            transfer.received, transfer.sent, arriving, leaving, group=group, async_op=True
        )

    def _start_tagged(
        self, transfer: Transfer, receive_bytes: Mapping[int, int], send_bytes: Mapping[int, int]
    ) -> Iterator[dist.Work | None]:
        group = self.process_group
        rank_here = self.process_group.rank()
        received = _split_messages(transfer.received, receive_bytes)
        sent = _split_messages(transfer.sent, send_bytes)
        if rank_here in sent:
            received.pop(rank_here).copy_(sent.pop(rank_here))
        for rank, message in received.items():
            yield dist.irecv(message, group=group, group_src=rank, tag=transfer.tag)
        for rank, message in sent.items():
            yield dist.isend(message, group=group, group_dst=rank, tag=transfer.tag)


@dataclass(eq=False)
class Transfer:
    """An exchange under way.

    `works` are those of its parts that were not waited for yet. `wait` copies the received bytes
    from their buffer to `landing`, if there is one.
    """

    channel: Channel
    works: list[dist.Work | None]
    received: torch.Tensor
    sent: torch.Tensor
    doing: str
    tag: int
    landing: torch.Tensor | None

    def wait(self) -> None:
        """Wait until all has arrived and left; on CUDA only the current stream waits.

        Raises:
            DistCADesyncError: if other ranks do not take part in time.
        """
        # From now on: what this rank did since the launch is not the others' time.
        seconds = self.channel.timeout_seconds
        try:
            wait_for_works(
                self.works,
                time.monotonic() + seconds - compute_reserved_seconds(seconds)
                if self.channel.is_gloo
                else None,
            )
        except RuntimeError as error:
            raise self.channel.monitor.give_up(self.doing, error) from error
        if self.landing is not None:
            self.landing.copy_(self.received)

    def drain(self, deadline: float) -> None:
        """Wait until `time.monotonic()` reaches the deadline, even if the exchange cannot succeed:
        gloo loses messages whose buffers are freed, and other ranks' waits, while they are
        half-way. Never raises.
        """
        works, self.works = self.works, []
        for work in works if self.channel.is_gloo else []:
            with suppress(RuntimeError):
                wait_for_works([work], deadline)

    def __del__(self) -> None:
        if self.works:  # after an exception nobody waits
            self.drain(self.channel.monitor.compute_deadline())


def wait_for_works(works: list[dist.Work | None], deadline: float | None) -> None:
    """Wait for messages until a deadline, if there is one.

    After an exception `works` holds those that were not waited for.
    """
    while works:
        work = works.pop(0)  # to be waited for once only
        if work is not None and deadline is not None:
            work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        elif work is not None:
            work.wait()


def _compute_checksum(text: str, number: int, before: int = 0) -> int:
    return zlib.crc32(f"{text} {number}".encode(), before)


def _split_messages(buffer: torch.Tensor, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Cut a buffer into views: the message of each rank that has one."""
    starts = accumulate(sizes.values(), initial=0)
    return {
        rank: buffer[start : start + size]
        for (rank, size), start in zip(sizes.items(), starts, strict=False)
        if size
    }
