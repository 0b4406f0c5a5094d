"""Hooks on tensors saved for backward, by which activation checkpointing and offloading work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from hf_distca import borrowed


class Hooks(NamedTuple):
    """A pair that packs a tensor when it is saved and unpacks it in backward."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    @property
    def is_recompute(self) -> bool:
        """True if these are the hooks of a checkpoint: they drop what is saved, and compute it
        again in backward.
        """
        return "checkpoint" in getattr(self.pack, "__module__", "")

    @property
    def checkpoint(self) -> tuple[object, Hashable | None] | None:
        """Checkpoint that these hooks belong to, and its recompute that runs, None in its forward.

        None for other hooks. Reentrant checkpoints have no hooks. Names are those that
        `torch.utils.checkpoint` has in 2.13.
        """
        pack = inspect.unwrap(self.pack)
        held = (
            inspect.getclosurevars(pack).nonlocals
            if self.is_recompute and inspect.isfunction(pack)
            else {}
        )
        if "target_frame_ref" in held:
            return held["target_frame_ref"](), held["gid"]
        return (held["frame"], None) if "frame" in held else None


class SavedTensors(NamedTuple):
    """The hooks of this thread.

    Attributes:
        hooks: the last pair is in force.
        forbidden_reason: if hooks may not be set, the error that says so.
    """

    hooks: tuple[Hooks, ...]
    forbidden_reason: str | None

    @classmethod
    def get_current(cls) -> SavedTensors:
        """Return the hooks that are set now."""
        hooks = tuple(reversed(list(_suspend_hooks())))
        current = cls(hooks, borrowed.why_saved_tensor_hooks_are_forbidden())
        if hooks:
            current._restore_hooks()
        return current

    def set(self) -> None:
        """Replace the hooks that are set now by these."""
        for _ in _suspend_hooks():
            pass
        self._restore_hooks()

    @property
    def is_recomputed(self) -> bool:
        """True if tensors saved now will be recomputed."""
        return bool(self.hooks) and self.hooks[-1].is_recompute

    @property
    def hooks_outside_checkpoints(self) -> Hooks | None:
        """Hooks for tensors that a checkpoint itself saves; None where these stay as they are."""
        return next((hooks for hooks in reversed(self.hooks) if not hooks.is_recompute), None)

    def _restore_hooks(self) -> None:
        borrowed.allow_saved_tensor_hooks()
        for hooks in self.hooks:
            borrowed.push_saved_tensor_hooks(*hooks)
        if self.forbidden_reason is not None:
            borrowed.forbid_saved_tensor_hooks(self.forbidden_reason, False)


def _suspend_hooks() -> Iterator[Hooks]:
    """Remove and yield the active saved-tensor hooks, innermost first: only the innermost one is
    visible.
    """
    while (hooks := borrowed.top_saved_tensor_hooks(True)) is not None:
        borrowed.pop_saved_tensor_hooks()
        yield Hooks(*hooks)
