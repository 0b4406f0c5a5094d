"""Bytes of live tensors, counted operation by operation."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_distca.kernels import Kernel, ScoreOptions, TaskBatch


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations returned, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.entered = False
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __enter__(self) -> LiveBytes:
        self.entered = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.entered = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            # Storages from before, and views of them, do not count.
            self.note(tree_leaves((args, kwargs)), new=False)
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self.note(tree_leaves(result))
        return result

    def note(self, values: Sequence[object], *, new: bool = True) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                self._known.setdefault(reference.cdata, (reference, storage.nbytes() if new else 0))
        alive = self._alive()
        for _ in range(5):
            if alive <= self._peak:
                return
            time.sleep(0.002)  # for gloo's thread, see `settle`
            alive = self._alive()
        self._peak = alive

    def _alive(self) -> int:
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        return sum(size for _, size in self._known.values())

    @property
    def alive(self) -> int:
        """Return the live bytes."""
        gc.collect()
        return self._alive()

    def settle(self, expected: int = 0) -> int:
        """Return the live bytes, or wait a moment for fewer: gloo's thread still holds a message
        right after the wait for its exchange.
        """
        if self._alive() > expected:
            gc.collect()
        deadline = time.monotonic() + 2
        while (alive := self._alive()) > expected and time.monotonic() < deadline:
            time.sleep(0.005)
        return alive

    def take_peak(self) -> int:
        """Return the peak of live bytes since the last call."""
        peak, self._peak = self._peak, 0
        return peak


class OutsideKernel:
    """A kernel whose results count, but not its inner tensors."""

    name = "outside"

    def __init__(self, kernel: Kernel, live: LiveBytes) -> None:
        self.kernel, self.live = kernel, live

    def unsupported_reason(self, *arguments: Any) -> str | None:
        return self.kernel.unsupported_reason(*arguments)

    def forward(self, *tensors_tasks_scores: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._counted(self.kernel.forward, tensors_tasks_scores)

    def backward(
        self, *tensors_tasks_scores: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._counted(self.kernel.backward, tensors_tasks_scores)

    def _counted(
        self, call: Any, arguments: tuple[torch.Tensor | TaskBatch | ScoreOptions, ...]
    ) -> Any:
        self.live.paused = True
        try:
            result = call(*arguments)
        finally:
            self.live.paused = False
        if self.live.entered:  # outside the mode, results do not count
            self.live.note(result)
        return result
