"""Masks that a recompute makes again: it gets the masks of its forward.

A checkpoint around a whole model makes the mask a second time. With another handle the
recompute would plan, exchange and attend once more, or cut layers in two where the forward did not.
So the forward leaves its handles with the checkpoint, and the recompute, which makes masks in the
same order, takes them from there. Reentrant checkpoints leave no trace of themselves in forward:
their recompute plans again, as all ranks do at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from weakref import WeakKeyDictionary

from hf_distca.integration.handle import MaskStandIn
from hf_distca.runtime.saved_tensors import SavedTensors

# By checkpoint: the handles that its forward made, in order, and for each recompute the rest of
# them.
_masks: WeakKeyDictionary[
    object, tuple[list[MaskStandIn], dict[Hashable, Iterator[MaskStandIn]]]
] = WeakKeyDictionary()


def reuse_forward_handle(new: MaskStandIn) -> MaskStandIn:
    """Return the forward's handle for a mask that was just made, if this is a recompute; else the
    new one.

    Checkpoints may lie in each other: the inner ones run forward again in the recompute of an outer
    one.
    """
    handle = new
    for hooks in SavedTensors.get_current().hooks:
        if (running := hooks.checkpoint) is None:
            continue
        checkpoint, recompute = running
        handles, remaining = _masks.setdefault(checkpoint, ([], {}))
        if recompute is None:
            handles.append(handle)
        else:
            original = next(remaining.setdefault(recompute, iter(handles)), handle)
            if original.batch_shape == new.batch_shape:
                handle = original
    return handle
