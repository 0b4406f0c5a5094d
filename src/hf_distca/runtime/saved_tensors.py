"""What happens to tensors that are saved for backward: activation checkpointing and offloading work by hooks for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from hf_distca import borrowed

__all__ = ["Hooks", "SavedTensors"]


class Hooks(NamedTuple):
    """A pair that packs a tensor when it is saved and unpacks it in backward."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    @property
    def recompute(self) -> bool:
        """Whether these are the hooks of a checkpoint: they drop what is saved, and compute it again in backward."""
        return "checkpoint" in getattr(self.pack, "__module__", "")

    @property
    def checkpoint(self) -> tuple[object, Hashable | None] | None:
        """The checkpoint whose hooks these are, and which recompute of it runs, None in its forward.

        None for other hooks. Reentrant checkpoints have no hooks. Names are those that `torch.utils.checkpoint` has in 2.13.
        """
        pack = inspect.unwrap(self.pack)
        held = inspect.getclosurevars(pack).nonlocals if self.recompute and inspect.isfunction(pack) else {}
        if "target_frame_ref" in held:
            return held["target_frame_ref"](), held["gid"]
        return (held["frame"], None) if "frame" in held else None


class SavedTensors(NamedTuple):
    """The hooks of this thread.

    Attributes:
        hooks: the last pair is in force.
        forbidden: if hooks may not be set, the error that says so.
    """

    hooks: tuple[Hooks, ...]
    forbidden: str | None

    @classmethod
    def current(cls) -> SavedTensors:
        """Those that are set now."""
        hooks = tuple(reversed(list(_taken_off())))
        current = cls(hooks, borrowed.why_saved_tensor_hooks_are_forbidden())
        if hooks:
            current._put_on()
        return current

    def set(self) -> None:
        """Set these in place of those that are set now."""
        for _ in _taken_off():
            pass
        self._put_on()

    @property
    def recomputed(self) -> bool:
        """Whether what is saved now will be computed again."""
        return bool(self.hooks) and self.hooks[-1].recompute

    @property
    def beyond_checkpoints(self) -> Hooks | None:
        """The hooks for what a checkpoint itself saves; None where that stays as it is."""
        return next((hooks for hooks in reversed(self.hooks) if not hooks.recompute), None)

    def _put_on(self) -> None:
        borrowed.allow_saved_tensor_hooks()
        for hooks in self.hooks:
            borrowed.push_saved_tensor_hooks(*hooks)
        if self.forbidden is not None:
            borrowed.forbid_saved_tensor_hooks(self.forbidden, False)


def _taken_off() -> Iterator[Hooks]:
    """The hooks in force, the last pair first, which are in force no more. Only the last one can be seen."""
    while (hooks := borrowed.top_saved_tensor_hooks(True)) is not None:
        borrowed.pop_saved_tensor_hooks()
        yield Hooks(*hooks)
