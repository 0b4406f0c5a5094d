"""Saved-tensor hooks of torch, which activation checkpointing and offloading use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from hf_distca import borrowed


class Hooks(NamedTuple):
    """A pair of hooks: one packs a tensor when it is saved, the other unpacks it in backward."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    @property
    def is_recompute(self) -> bool:
        """True if these hooks belong to a checkpoint, which recomputes tensors in backward."""
        return "checkpoint" in getattr(self.pack, "__module__", "")

    @property
    def checkpoint(self) -> tuple[object, Hashable | None] | None:
        """The checkpoint of these hooks, and the id of its running recompute (None in forward).

        The property is None if these hooks do not belong to a checkpoint. Reentrant checkpoints
        have no hooks. The code reads variables of `torch.utils.checkpoint` by the names that they
        have in torch 2.13.
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
    """The saved-tensor hooks of this thread.

    Attributes:
        hooks: stack of pairs; the last pair is active.
        forbidden_reason: if setting hooks is forbidden, the text of the error; else None.
    """

    hooks: tuple[Hooks, ...]
    forbidden_reason: str | None

    @classmethod
    def get_current(cls) -> SavedTensors:
        """Return the current hooks."""
        hooks = tuple(reversed(list(_suspend_hooks())))
        current = cls(hooks, borrowed.why_saved_tensor_hooks_are_forbidden())
        if hooks:
            current._restore_hooks()
        return current

    def set(self) -> None:
        """Replace this thread's current hooks with these hooks."""
        for _ in _suspend_hooks():
            pass
        self._restore_hooks()

    @property
    def is_recomputed(self) -> bool:
        """True if tensors saved now will be recomputed."""
        return bool(self.hooks) and self.hooks[-1].is_recompute

    @property
    def hooks_outside_checkpoints(self) -> Hooks | None:
        """The innermost hooks that do not belong to a checkpoint; None if there are none.

        These hooks pack the inputs of checkpoints.
        """
        return next((hooks for hooks in reversed(self.hooks) if not hooks.is_recompute), None)

    def _restore_hooks(self) -> None:
        borrowed.allow_saved_tensor_hooks()
        for hooks in self.hooks:
            borrowed.push_saved_tensor_hooks(*hooks)
        if self.forbidden_reason is not None:
            borrowed.forbid_saved_tensor_hooks(self.forbidden_reason, False)


def _suspend_hooks() -> Iterator[Hooks]:
    """Remove the current saved-tensor hooks and yield them, innermost first.

    The hooks must be removed, because torch shows only the innermost pair.
    """
    while (hooks := borrowed.top_saved_tensor_hooks(True)) is not None:
        borrowed.pop_saved_tensor_hooks()
        yield Hooks(*hooks)
