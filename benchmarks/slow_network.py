"""A network of nodes on one machine: every exchange takes as long as its bytes would on slow links."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from hf_distca.runtime.channel import Channel, Transfer


class Links(NamedTuple):
    """Ranks of a node, one after another, and bytes per second that a rank sends, and receives, inside its node and beyond."""

    ranks_per_node: int
    inside: float
    between: float

    def seconds(self, rank: int, sizes: Mapping[int, int]) -> float:
        """Seconds for messages of so many bytes to or from these ranks, one after another."""
        node = rank // self.ranks_per_node
        return sum(
            size / (self.inside if other // self.ranks_per_node == node else self.between)
            for other, size in sizes.items()
            if other != rank
        )


class Late:
    """A message that arrives no earlier than a moment."""

    def __init__(self, transfer: Transfer, earliest: float) -> None:
        self.transfer, self.earliest = transfer, earliest

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(max(0.0, self.earliest - time.perf_counter()))


@dataclass
class Injected:
    """Seconds that exchanges of this rank were made to take, one after another."""

    seconds: float = 0.0


@contextmanager
def slow_network(links: Links) -> Iterator[Injected]:
    """Let an exchange end on a rank when it has sent and received all, in either direction one exchange after another.

    A rank waits for its own bytes only: that others get the messages of a busy rank late shows where they wait for what it does
    next. Barriers and planning are not delayed.
    """
    injected = Injected()
    original = Channel.start
    idle_at = 0.0

    def start(
        channel: Channel,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Mapping[int, int],
        send: Mapping[int, int],
        *args: Any,
    ) -> Late:
        nonlocal idle_at
        rank = channel.process_group.rank()
        seconds = max(links.seconds(rank, send), links.seconds(rank, receive))
        injected.seconds += seconds
        idle_at = max(idle_at, time.perf_counter()) + seconds
        return Late(original(channel, received, sent, receive, send, *args), idle_at)

    with patch.object(Channel, "start", start):
        yield injected
