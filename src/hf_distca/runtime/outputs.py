"""Outputs of a micro-batch's layers, stored so that activation checkpointing repeats no attention
and no exchange.

The first forward stores o and lse of every layer that will be recomputed. The recompute finds them
in the store, and computes only q, k and v again. The mask handle, an argument of the checkpointed
function, keeps the store alive until the checkpoint's backward is over. No other object keeps the
store alive, in particular no tensor that a layer saves for backward.

If hooks move a checkpoint's inputs, for example to the host, they move the stored outputs too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hf_distca.borrowed import get_version, is_in_backward, top_saved_tensor_hooks
from hf_distca.errors import UnsupportedError
from hf_distca.runtime.saved_tensors import Hooks, SavedTensors


class _StoredOutputs(NamedTuple):
    """Outputs of a forward, packed by `hooks` if there are any.

    `changes` is the number of in-place changes of the first output before it was stored.
    """

    outputs: tuple[Any, ...]
    hooks: Hooks | None
    changes: int


@dataclass(frozen=True, eq=False)
class OutputStore:
    """Stored outputs of each layer.

    Outputs of a module that is called more than once in a forward are not stored, because a
    recompute could not tell the calls apart.
    """

    by_layer: dict[int, _StoredOutputs] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def find_outputs(
        self, module: torch.nn.Module, inputs: Sequence[torch.Tensor | None]
    ) -> LayerOutputs | None:
        """Return the entry for the outputs of a module that is called with these inputs.

        Return None if the current forward will not be recomputed.
        """
        recorded = torch.is_grad_enabled() and not is_in_backward()
        if recorded and top_saved_tensor_hooks(True) is None:
            return None
        saved = SavedTensors.get_current()
        # A forward that records gradients is recomputed only if the hooks of a checkpoint are set.
        # Reentrant checkpoints set no hooks, but their forward records no gradients.
        if recorded and not (
            saved.is_recomputed
            and any(tensor is not None and tensor.requires_grad for tensor in inputs)
        ):
            return None
        return LayerOutputs(
            weakref.ref(self), id(module), type(module).__name__, saved.hooks_outside_checkpoints
        )


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """One layer's entry in an `OutputStore`. The entry does not keep the store alive.

    `hooks` pack the tensors that are stored. If `hooks` is None, tensors are stored as they are.
    """

    store: weakref.ref[OutputStore]
    layer: int
    name: str
    hooks: Hooks | None

    def take_recorded(self) -> tuple[torch.Tensor, ...] | None:
        """Return the first forward's outputs if this is a recompute (a forward inside backward).

        Return None in other forwards, or if no outputs are stored.

        Raises:
            UnsupportedError: if the output was changed in place since the first forward, so that
                its old value is lost.
        """
        store = self.store()
        if (
            store is None
            or not is_in_backward()
            or (kept := store.by_layer.get(self.layer)) is None
        ):
            return None
        if kept.hooks is not None:
            return tuple(map(kept.hooks.unpack, kept.outputs))
        if _count_changes(kept.outputs[0]) != kept.changes:
            raise UnsupportedError(
                f"the output of attention in {self.name} was changed in place after the forward,"
                " and activation checkpointing needs it in backward: change a copy of it, or"
                " switch checkpointing off."
            )
        return kept.outputs

    def store_outputs(self, *outputs: torch.Tensor) -> None:
        """Store o_THV and lse_TH of a forward, or the tensors that a recurrent layer received."""
        store = self.store()
        if store is None:
            return
        if self.layer in store.by_layer or self.layer in store.repeated:
            self.discard()
            store.repeated.add(self.layer)
        else:
            # Without `detach`, there would be a cycle: the tensor holds the graph, the graph holds
            # the handle, and the handle holds the store.
            moved = tuple(tensor.detach() for tensor in outputs)
            if self.hooks is not None:
                moved = tuple(map(self.hooks.pack, moved))
            store.by_layer[self.layer] = _StoredOutputs(
                moved, self.hooks, _count_changes(outputs[0])
            )

    def discard(self) -> None:
        """Discard the outputs after backward has used them."""
        if (store := self.store()) is not None:
            store.by_layer.pop(self.layer, None)


def _count_changes(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes of a tensor and its views.

    Tensors made in inference mode have no such count, and take part in no backward.
    """
    return 0 if tensor.is_inference() else get_version(tensor)
