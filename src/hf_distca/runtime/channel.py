"""The communicator for tensors of core attention, which matches messages by their purpose.

gloo matches messages with equal tags only by their order. If ranks disagree about the next
exchange, a message that is too long ends the receiving process, and a message that is too short is
accepted without an error. Over gloo, all messages of an exchange therefore have a tag that encodes
its purpose. Then messages of different exchanges never match, and a rank that waits for a message
that never comes gets an error. Over other backends, which have no tags, an exchange is one
all-to-all.

gloo sends only host memory. Before tensors on another device are sent, they are copied to the host,
and the host waits for the copy. Received bytes are copied back to the device.
"""

from __future__ import annotations

import datetime
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from hf_distca.runtime.monitor import BREAK_TAG, FailureMonitor, compute_reserved_seconds


@dataclass(eq=False)
class Channel:
    """A communicator for the exchanges of core attention.

    Attributes:
        process_group: the process group that sends the messages.
        monitor: receives a report if a message does not come.
        timeout_seconds: how long a rank waits for other ranks.
        checksum: checksum (below 2**32) of the purposes of all exchanges so far. Two ranks have
            equal checksums if they started the same exchanges in the same order. All layers of a
            micro-batch have messages of the same size, so without tags, only the checksum shows
            that two ranks exchanged messages of different layers.
    """

    process_group: dist.ProcessGroup
    monitor: FailureMonitor
    timeout_seconds: float
    checksum: int = 0

    @cached_property
    def is_gloo(self) -> bool:
        """True if messages have tags, and waits have a timeout."""
        return self.process_group.name() == "gloo"

    @cached_property
    def wait_seconds(self) -> float:
        """Seconds that a wait may take. The rest of the timeout is for reading failure reports."""
        return self.timeout_seconds - compute_reserved_seconds(self.timeout_seconds)

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
        purpose: str = "exchange",
    ) -> Transfer:
        """Start to send and receive messages.

        Args:
            received, sent: the messages of all ranks, one after another in the order of ranks, as
                uint8.
            receive_bytes, send_bytes: size of the message from or to each rank, in the order of
                ranks. Ranks without a message may be left out.
            purpose: purpose of the exchange in words that are the same on every rank, such as
                "dispatch in forward of layer 3 of micro-batch 7".
        """
        activity = f"waiting for the {purpose}"
        tag = zlib.crc32(activity.encode()) % BREAK_TAG
        self.checksum = zlib.crc32(activity.encode(), self.checksum)
        landing = None
        if self._is_staged(received):
            landing, received = received, torch.empty_like(received, device="cpu")
            sent = sent.to("cpu", copy=True)
        transfer = Transfer(self, [], received, sent, activity, tag, landing)
        self.monitor.under_way.add(transfer)
        launch = self._start_tagged if self.is_gloo else self._start_all_to_all
        try:
            launch(transfer, receive_bytes, send_bytes)
        except RuntimeError as error:
            raise self.monitor.give_up(activity, error) from error
        return transfer

    def _is_staged(self, message: torch.Tensor) -> bool:
        return self.is_gloo and message.device.type != "cpu"

    def _start_all_to_all(
        self, transfer: Transfer, receive_bytes: Mapping[int, int], send_bytes: Mapping[int, int]
    ) -> None:
        group = self.process_group
        arriving = [receive_bytes.get(rank, 0) for rank in range(group.size())]
        leaving = [send_bytes.get(rank, 0) for rank in range(group.size())]
        work = dist.all_to_all_single(
            transfer.received, transfer.sent, arriving, leaving, group=group, async_op=True
        )
        transfer.works.append(work)

    def _start_tagged(
        self, transfer: Transfer, receive_bytes: Mapping[int, int], send_bytes: Mapping[int, int]
    ) -> None:
        group, tag = self.process_group, transfer.tag
        rank_here = group.rank()
        received = _split_messages(transfer.received, receive_bytes)
        sent = _split_messages(transfer.sent, send_bytes)
        if rank_here in sent:
            received.pop(rank_here).copy_(sent.pop(rank_here))
        # Record each message as soon as it is started. If a later call fails, the started messages
        # must still be completed.
        for rank, message in received.items():
            if len(message):
                transfer.works.append(dist.irecv(message, group=group, group_src=rank, tag=tag))
        for rank, message in sent.items():
            if len(message):
                transfer.works.append(dist.isend(message, group=group, group_dst=rank, tag=tag))


@dataclass(eq=False)
class Transfer:
    """An exchange under way.

    `works` are the operations that have not been waited for yet. If `landing` is a tensor, `wait`
    copies the received bytes to it.
    """

    channel: Channel
    works: list[dist.Work | None]
    received: torch.Tensor
    sent: torch.Tensor
    activity: str
    tag: int
    landing: torch.Tensor | None

    def wait(self) -> None:
        """Wait until all messages are sent and received. On CUDA only the current stream waits.

        Raises:
            DistCADesyncError: if other ranks do not take part in time.
        """
        channel = self.channel
        # The timeout begins now, because this rank spent the time since the launch on its own work.
        deadline = time.monotonic() + channel.wait_seconds if channel.is_gloo else None
        try:
            wait_for_works(self.works, deadline)
        except RuntimeError as error:
            raise channel.monitor.give_up(self.activity, error) from error
        if self.landing is not None:
            self.landing.copy_(self.received)

    def drain(self, deadline: float) -> None:
        """Complete the messages under way, but stop when `time.monotonic()` reaches the deadline.

        If a buffer is freed while gloo sends it, the message is lost, and the receiving rank waits
        until its timeout. This method never raises, even if the exchange cannot succeed.
        """
        works, self.works = self.works, []
        for work in works if self.channel.is_gloo else []:
            with suppress(RuntimeError):
                wait_for_works([work], deadline)

    def __del__(self) -> None:
        if self.works:  # an exception kept this rank from calling `wait`
            self.drain(self.channel.monitor.compute_deadline())


def wait_for_works(works: list[dist.Work | None], deadline: float | None) -> None:
    """Wait for messages until the deadline; without a deadline, as long as necessary.

    After an exception, `works` holds the operations that have not been waited for.
    """
    while works:
        work = works.pop(0)  # removed first, because it must not be awaited twice
        if work is not None and deadline is not None:
            work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        elif work is not None:
            work.wait()


def _split_messages(buffer: torch.Tensor, sizes: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """Split a buffer into a view for the message of each rank."""
    return dict(zip(sizes, buffer.split_with_sizes(list(sizes.values())), strict=True))
