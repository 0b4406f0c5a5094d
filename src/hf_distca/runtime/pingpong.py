"""Two computations in turns, in one thread: ping-pong.

Each *half* is a greenlet. Whenever one has launched an exchange it calls `take_turns`, and the other half computes while the
messages travel. Nothing runs at the same time, so there are no locks, and every rank switches at the same places. Autograd runs
backward in the reverse order of forward: the halves take turns there by themselves.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["run_halves", "take_turns"]

T = TypeVar("T")


class _Half(greenlet):
    """A half with what torch keeps per thread, which a switch between greenlets does not change."""

    def __init__(self, run: Callable[[], object], device_type: str) -> None:
        super().__init__(run)
        # Collectors of router logits and the like are found through context variables: both halves see the caller's.
        self.gr_context = contextvars.copy_context()
        self.device_type = device_type
        self.modes = _modes(device_type)

    def resume(self) -> object:
        """Let the half run until it takes turns or ends."""
        outside = _modes(self.device_type)
        _set_modes(self.device_type, self.modes)
        try:
            return self.switch()
        finally:
            self.modes = _modes(self.device_type)
            _set_modes(self.device_type, outside)


def run_halves(first: Callable[[], T], second: Callable[[], T], device_type: str) -> tuple[T, T]:
    """Run two functions in turns, the first one first.

    An exception in one of them ends the other at the place where it waits, and is raised as it was.

    Args:
        first, second: the halves; they may call `take_turns` any number of times.
        device_type: the device whose autocast state each half has for itself.
    """
    results: list[T] = [None, None]  # type: ignore[list-item]

    def store(place: int, run: Callable[[], T]) -> None:
        results[place] = run()

    halves = [_Half(lambda: store(0, first), device_type), _Half(lambda: store(1, second), device_type)]
    try:
        while not all(half.dead for half in halves):
            for half in halves:
                if not half.dead:
                    half.resume()
    finally:
        for half in halves:
            if not half.dead:
                half.throw(GreenletExit)
    return results[0], results[1]


def take_turns() -> None:
    """Inside a half, let the other one run; elsewhere do nothing."""
    current = getcurrent()
    if isinstance(current, _Half) and current.parent is not None:
        current.parent.switch()


def _modes(device_type: str) -> tuple[bool, bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _set_modes(device_type: str, modes: tuple[bool, bool, torch.dtype]) -> None:
    grad, autocast, dtype = modes
    torch.set_grad_enabled(grad)
    torch.set_autocast_enabled(device_type, autocast)
    torch.set_autocast_dtype(device_type, dtype)
