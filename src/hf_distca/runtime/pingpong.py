"""Ping-pong: two computations that take turns in one thread.

Each nano-batch is a greenlet. When it has launched an exchange, it calls
`yield_to_other_nano_batch`, and the other nano-batch computes while the messages travel. The two
never run at the same time, so no locks are needed, and all ranks switch at the same points.
Autograd runs backward in the reverse order of forward, so the nano-batches also take turns in
backward.
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
    """A nano-batch, with the state that torch keeps per thread.

    A switch between greenlets does not change this state, so `resume` changes it.
    """

    def __init__(self, compute: Callable[[], Any], device_type: str) -> None:
        super().__init__()
        # Collectors of outputs, such as router logits, are kept in context variables. Both
        # nano-batches must see the caller's collectors.
        self.gr_context = contextvars.copy_context()
        self.compute, self.device_type = compute, device_type
        self.modes = _Modes.get_current(device_type)

    def run(self) -> None:
        self.result = self.compute()

    def resume(self, step: Callable[[], object]) -> None:
        """Set torch's state for this nano-batch, and run the nano-batch until it yields or ends.

        `step` switches to the nano-batch, or throws an exception into it.
        """
        outside = _Modes.get_current(self.device_type)
        self.modes.set(self.device_type)
        try:
            # Keep no reference to the result. It may be a `GreenletExit`, which keeps frames alive,
            # and checkpointing cleans up only when its frames are freed.
            step()
        finally:
            self.modes = _Modes.get_current(self.device_type)
            outside.set(self.device_type)


# Dynamo's state belongs to the thread, and attention turns Dynamo off. Without this line, a
# nano-batch inside attention would find Dynamo on again after the other nano-batch's turn.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_nano_batches(
    first: Callable[[], T], second: Callable[[], T], device_type: str
) -> tuple[T, T]:
    """Run two functions that take turns, beginning with `first`.

    If one function raises, the other one ends at the point where it waits, and the exception is
    raised unchanged.

    Args:
        first, second: the nano-batches. They may call `yield_to_other_nano_batch` any number of
            times.
        device_type: type of the device whose autocast state is separate for each nano-batch.
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
    """Return the modules inside a layer that checkpoint their activations.

    Nano-batches must not take turns inside such a module. The second nano-batch may use tensors
    that the first nano-batch made inside the module. Backward recomputes the module for the second
    nano-batch first, and would not find these tensors.
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
