"""Delayed messages, as over a network that is slower than this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from hf_distca.runtime.channel import Channel, Transfer


class Late:
    """A message that arrives no earlier than a given time of `time.perf_counter`, in seconds."""

    def __init__(self, transfer: Transfer, earliest: float) -> None:
        self.transfer, self.earliest = transfer, earliest

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(max(0.0, self.earliest - time.perf_counter()))


@contextmanager
def late_messages(seconds: Callable[[int], float]) -> Iterator[None]:
    """Delay every message by `seconds(bytes)` after its launch, or more. `bytes` is the larger of
    what the rank sends and what it receives.
    """
    original = Channel.start

    def start(channel: Channel, received: torch.Tensor, sent: torch.Tensor, *sizes: Any) -> Late:
        took = seconds(max(received.nbytes, sent.nbytes))
        return Late(original(channel, received, sent, *sizes), time.perf_counter() + took)

    with patch.object(Channel, "start", start):
        yield
