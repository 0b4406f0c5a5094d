"""Masks that a recompute makes again: it gets the masks of its forward.

A checkpoint around a whole model makes the mask a second time. With a handle of its own the
recompute would plan, exchange and attend once more, or cut layers in two where the forward did not.
So the forward leaves its handles with the checkpoint, and the recompute, which makes masks in the
same order, takes them from there. Reentrant checkpoints leave no trace of themselves in forward:
their recompute plans anew, as all ranks do at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from hf_distca.integration.handle import AttentionHandle
from hf_distca.runtime.saved_tensors import SavedTensors

__all__ = ["reuse_forward_handle"]


@dataclass(eq=False)
class _CheckpointMasks:
    """Handles that the forward of a checkpoint made, in order, and the rest of them for each
    recompute.
    """

    handles: list[AttentionHandle] = field(default_factory=list)
    remaining: dict[Hashable, Iterator[AttentionHandle]] = field(default_factory=dict)


_masks: WeakKeyDictionary[object, _CheckpointMasks] = WeakKeyDictionary()  # by checkpoint


def reuse_forward_handle(new: AttentionHandle) -> AttentionHandle:
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
        masks = _masks.setdefault(checkpoint, _CheckpointMasks())
        if recompute is None:
            masks.handles.append(handle)
        else:
            original = next(masks.remaining.setdefault(recompute, iter(masks.handles)), handle)
            if original.batch.shape == new.batch.shape:
                handle = original
    return handle
