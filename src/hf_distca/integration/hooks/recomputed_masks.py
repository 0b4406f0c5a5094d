"""Masks that a recompute makes again: it gets the masks of its forward.

A checkpoint around a whole model makes the mask a second time. With a handle of its own the
recompute would plan, exchange and attend once more, or cut layers in two where the forward did not.
So the forward leaves its handles with the checkpoint, and the recompute, which makes masks in the
same order, takes them from there. Reentrant checkpoints leave no trace of themselves in forward:
their recompute plans anew, as all ranks do at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from hf_distca.integration.handle import AttentionHandle
from hf_distca.runtime.saved_tensors import SavedTensors

__all__ = ["handle_of_forward"]


@dataclass(eq=False)
class _Masks:
    """Handles that the forward of a checkpoint made, in order, and how many of them each recompute
    has taken.
    """

    handles: list[AttentionHandle] = field(default_factory=list)
    taken: defaultdict[Hashable, int] = field(default_factory=lambda: defaultdict(int))

    def take(self, recompute: Hashable) -> AttentionHandle | None:
        """Return the next handle, None if the forward made no more."""
        number = self.taken[recompute]
        self.taken[recompute] += 1
        return self.handles[number] if number < len(self.handles) else None


_masks: WeakKeyDictionary[object, _Masks] = WeakKeyDictionary()  # by checkpoint


def handle_of_forward(new: AttentionHandle) -> AttentionHandle:
    """Return the forward's handle for a mask that was just made, if this is a recompute; else the
    new one.

    Checkpoints may lie in each other: the inner ones run forward again in the recompute of an outer
    one.
    """
    handle = new
    for hooks in SavedTensors.current().hooks:
        if (running := hooks.checkpoint) is None:
            continue
        checkpoint, recompute = running
        masks = _masks.setdefault(checkpoint, _Masks())
        if recompute is None:
            masks.handles.append(handle)
        elif (before := masks.take(recompute)) is not None and (
            before.batch_size,
            before.length,
        ) == (new.batch_size, new.length):
            handle = before
    return handle
