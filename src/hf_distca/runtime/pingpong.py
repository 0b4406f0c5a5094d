"""Ping-pong: two computations in turns, in one thread.

Each nano-batch is a greenlet. Whenever one has launched an exchange it calls
`yield_to_other_nano_batch`, and the other one computes while the messages travel. Nothing runs at
the same time, so there are no locks, and every rank switches at the same places. Autograd runs
backward in the reverse order of forward: the nano-batches take turns there by themselves.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from hf_distca import borrowed
from hf_distca.borrowed import TorchDispatchMode
from hf_distca.runtime.saved_tensors import SavedTensors

T = TypeVar("T")


class _NanoBatch(greenlet):
    """A nano-batch with the per-thread state of torch, which a switch between greenlets does not
    change.
    """

    def __init__(self, compute: Callable[[], Any], device_type: str) -> None:
        super().__init__()
        # Collectors of router logits and the like are found through context variables: both
        # nano-batches see the caller's.
        self.gr_context = contextvars.copy_context()
        self.compute, self.device_type = compute, device_type
        self.modes = _Modes.get_current(device_type)

    def run(self) -> None:
        self.result = self.compute()

    def resume(self, step: Callable[[], object]) -> None:
        """Continue by a step such as `switch`, with its own modes in place, until it yields or
        ends.
        """
        outside = _Modes.get_current(self.device_type)
        self.modes.set(self.device_type)
        try:
            # Its result is dropped here: a `GreenletExit` holds frames, and those what
            # checkpointing leaves when they go.
            step()
        finally:
            self.modes = _Modes.get_current(self.device_type)
            outside.set(self.device_type)


# Dynamo keeps per thread whether it compiles: inside attention, where it does not, a nano-batch
# would find it on after a turn.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_nano_batches(
    first: Callable[[], T], second: Callable[[], T], device_type: str
) -> tuple[T, T]:
    """Run two functions in turns, the first one first.

    An exception in one of them ends the other at the place where it waits, and is raised as it was.

    Args:
        first, second: the nano-batches; they may call `yield_to_other_nano_batch` any number of
            times.
        device_type: the device whose autocast state each nano-batch has for itself.
    """
    both = [_NanoBatch(first, device_type), _NanoBatch(second, device_type)]
    try:
        while not all(nano_batch.dead for nano_batch in both):
            for nano_batch in both:
                if not nano_batch.dead:
                    nano_batch.resume(nano_batch.switch)
    finally:
        for nano_batch in both:
            if not nano_batch.dead:
                nano_batch.resume(partial(nano_batch.throw, GreenletExit))
    return both[0].result, both[1].result


def yield_to_other_nano_batch() -> None:
    """Yield to the other nano-batch, if this code runs inside a nano-batch."""
    current = getcurrent()
    if isinstance(current, _NanoBatch) and current.parent is not None:
        current.parent.switch()


def find_checkpointed_parts(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules below a layer that checkpoint their activations themselves, by a wrapper
    or by hooks.

    Nano-batches of a layer may pass tensors from inside such a part to each other. Backward
    recomputes the second one's part first, before the first one's tensors exist.
    """
    return [
        module
        for module in layer.modules()
        if module is not layer and borrowed.is_checkpointed(module)
    ]


class _Modes(NamedTuple):
    """Per-thread state of torch that layers may change around attention."""

    grad: bool
    autocast: bool
    autocast_dtype: torch.dtype
    autocast_cache: bool
    dispatch: tuple[TorchDispatchMode, ...]
    saved: SavedTensors

    @classmethod
    def get_current(cls, device_type: str) -> _Modes:
        return cls(
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
            tuple(borrowed.dispatch_modes()),
            SavedTensors.get_current(),
        )

    def set(self, device_type: str) -> None:
        torch.set_grad_enabled(self.grad)
        torch.set_autocast_enabled(device_type, self.autocast)
        torch.set_autocast_dtype(device_type, self.autocast_dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        current = borrowed.dispatch_modes()
        if tuple(current) != self.dispatch:
            for _ in current:
                borrowed.pop_dispatch_mode()
            for mode in self.dispatch:
                borrowed.push_dispatch_mode(mode)
        self.saved.set()
