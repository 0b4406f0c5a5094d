"""Two computations in turns, in one thread: ping-pong.

Each *half* is a greenlet. Whenever one has launched an exchange it calls `take_turns`, and the other half computes while the
messages travel. Nothing runs at the same time, so there are no locks, and every rank switches at the same places. Autograd runs
backward in the reverse order of forward: the halves take turns there by themselves.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["run_halves", "take_turns"]

T = TypeVar("T")


class _Half(greenlet):
    """A half with what torch keeps per thread, which a switch between greenlets does not change."""

    def __init__(self, run: Callable[[], object], device_type: str) -> None:
        super().__init__(run)
        # Collectors of router logits and the like are found through context variables: both halves see the caller's.
        self.gr_context = contextvars.copy_context()
        self.device_type = device_type
        self.modes = _Modes.current(device_type)

    def resume(self) -> object:
        """Let the half run until it takes turns or ends."""
        outside = _Modes.current(self.device_type)
        self.modes.set(self.device_type)
        try:
            return self.switch()
        finally:
            self.modes = _Modes.current(self.device_type)
            outside.set(self.device_type)


# Dynamo keeps per thread whether it compiles: a half inside attention, where it does not, would find it on again after a turn.
@torch.compiler.disable  # type: ignore[untyped-decorator]
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


class _Modes(NamedTuple):
    """What torch keeps per thread and layers may change around attention."""

    grad: bool
    autocast: bool
    autocast_dtype: torch.dtype
    dispatch: tuple[TorchDispatchMode, ...]

    @classmethod
    def current(cls, device_type: str) -> _Modes:
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return cls(torch.is_grad_enabled(), autocast, dtype, tuple(_get_current_dispatch_mode_stack()))

    def set(self, device_type: str) -> None:
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled(device_type, self.autocast)
        torch.set_autocast_dtype(device_type, self.autocast_dtype)
        current = _get_current_dispatch_mode_stack()
        if tuple(current) != self.dispatch:
            for _ in current:
                _pop_mode()
            for mode in self.dispatch:
                _push_mode(mode)
