"""Handles for masks that are made again in a recompute.

If a checkpoint contains a whole model, the recompute makes the mask a second time. With a new
handle, the recompute would plan, exchange and compute attention again. It could also run a layer
as nano-batches although the layer ran whole in the forward. So the forward stores its handles with
the checkpoint. The recompute makes masks in the same order, and gets the stored handles.

A reentrant checkpoint cannot be detected in its forward, so its recompute plans again. All ranks
plan again at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from weakref import WeakKeyDictionary

from hf_distca.integration.handle import MaskStandIn
from hf_distca.runtime.saved_tensors import SavedTensors

# Each checkpoint has a list of the handles that its forward made, in order. Each of its recomputes
# has an iterator over the handles that it has not used yet.
_masks: WeakKeyDictionary[
    object, tuple[list[MaskStandIn], dict[Hashable, Iterator[MaskStandIn]]]
] = WeakKeyDictionary()


def reuse_forward_handle(new: MaskStandIn) -> MaskStandIn:
    """Return the handle of the forward if this is a recompute, else the new handle.

    Checkpoints may be nested. The recompute of an outer checkpoint runs the forwards of inner
    checkpoints again.
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
