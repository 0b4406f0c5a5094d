"""A network of nodes on one machine: every exchange takes as long as its bytes would on slow links."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.runtime.channel import Channel, Transfer

MOST_MESSAGES = 1 << 16  # from one rank to another


class Late:
    """A message that arrives no earlier than a moment, in seconds of `time.perf_counter`."""

    def __init__(self, transfer: Transfer, earliest: float) -> None:
        self.transfer, self.earliest = transfer, earliest

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(max(0.0, self.earliest - time.perf_counter()))


class Links(NamedTuple):
    """Ranks of a node, one after another, and bytes per second that a rank sends, and receives, inside its node and beyond.

    A rank has a link for each, and both carry in either direction at the same time.
    """

    ranks_per_node: int
    inside: float
    between: float

    def by_rate(self, rank: int, sizes: Mapping[int, int]) -> list[tuple[float, dict[int, int]]]:
        """The two links' rates, and the messages to or from this rank that each carries."""
        near = {other: size for other, size in sizes.items() if other // self.ranks_per_node == rank // self.ranks_per_node}
        far = {other: size for other, size in sizes.items() if other not in near}
        near.pop(rank, None)
        return [(self.inside, near), (self.between, far)]


class Arriving(Late):
    """An exchange that ends when its messages have left the ranks that sent them, as they noted before they sent."""

    def __init__(self, transfer: Transfer, earliest: float, left: np.ndarray, messages: list[tuple[int, int, int]]) -> None:
        super().__init__(transfer, earliest)
        self.left, self.messages = left, messages

    def wait(self) -> None:
        self.transfer.wait()
        self.earliest = max([self.earliest, *(float(self.left[message]) for message in self.messages)])
        super().wait()


@dataclass
class Injected:
    """What links of this rank were made to take.

    Attributes:
        seconds: of the busier direction of the busier link in each exchange, one after another.
        free: moments from which each link is free, by direction.
    """

    seconds: float = 0.0
    free: dict[str, list[float]] = field(default_factory=lambda: {"sent": [0.0, 0.0], "received": [0.0, 0.0]})

    def occupy(self, direction: str, link: int, seconds: float) -> float:
        """The moment at which a link begins with what takes it so long."""
        begin = max(self.free[direction][link], time.perf_counter())
        self.free[direction][link] = begin + seconds
        return begin


class SlowNetwork:
    """The links of ranks on this machine. Every rank makes one at the same point."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.counts = rank, np.zeros((2, ranks), dtype=np.int64)  # messages to, and from, each rank
        with tempfile.TemporaryDirectory() as folder:
            folders = [folder]
            dist.broadcast_object_list(folders, src=0)
            path = Path(folders[0], "left")
            if rank == 0:
                np.memmap(path, np.float64, "w+", shape=(ranks, ranks, MOST_MESSAGES))
            dist.barrier()
            # When each message from one rank to another has left: ranks of a machine have one clock.
            self.left = np.memmap(path, np.float64, "r+", shape=(ranks, ranks, MOST_MESSAGES))
            dist.barrier()

    @contextmanager
    def slow(self, links: Links) -> Iterator[Injected]:
        """Let exchanges take as long as their bytes need on these links; barriers and planning are not delayed.

        Messages of an exchange share a link evenly, so that short ones leave first.
        """
        injected, original = Injected(), Channel.start

        def start(
            channel: Channel,
            received: torch.Tensor,
            sent: torch.Tensor,
            receive: Mapping[int, int],
            send: Mapping[int, int],
            *args: Any,
        ) -> Late:
            ends, taken, messages = [0.0], [0.0], []
            for link, (rate, sizes) in enumerate(links.by_rate(self.rank, send)):
                taken.append(sum(sizes.values()) / rate)
                begin = injected.occupy("sent", link, taken[-1])
                for other, size in sizes.items():
                    self.left[self.rank, other, self.counts[0, other]] = (
                        begin + sum(min(size, one) for one in sizes.values()) / rate
                    )
                    self.counts[0, other] += 1
                ends.append(begin + taken[-1])
            for link, (rate, sizes) in enumerate(links.by_rate(self.rank, receive)):
                taken.append(sum(sizes.values()) / rate)
                ends.append(injected.occupy("received", link, taken[-1]) + taken[-1])
                messages += [(other, self.rank, int(self.counts[1, other])) for other in sizes]
                self.counts[1, list(sizes)] += 1
            injected.seconds += max(taken)
            return Arriving(original(channel, received, sent, receive, send, *args), max(ends), self.left, messages)

        with patch.object(Channel, "start", start):
            yield injected
