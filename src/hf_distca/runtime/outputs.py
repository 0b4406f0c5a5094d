"""Outputs of a micro-batch's layers, kept at home so that activation checkpointing repeats no attention and no exchange.

The first forward leaves o and lse of every layer in a store that lives as long as the micro-batch's handle. Without
checkpointing that is until the model's forward returns. With it, each checkpoint holds the handle among its arguments until its
backward is over; the recompute finds the outputs there, and rebuilds q, k and v only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hf_distca.borrowed import changes_in_place, in_backward
from hf_distca.errors import UnsupportedError

__all__ = ["LayerOutputs", "OutputStore"]


class _Kept(NamedTuple):
    """Outputs of a forward, and the version of o_THV at that time."""

    o_THV: torch.Tensor
    lse_TH: torch.Tensor
    version: int


@dataclass(frozen=True, eq=False)
class OutputStore:
    """o_THV and lse_TH by layer. A module that is called more than once in a forward is left out: which call would it be?"""

    kept: dict[int, _Kept] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def of(self, module: torch.nn.Module) -> LayerOutputs:
        """The place of one attention module."""
        return LayerOutputs(self, id(module), type(module).__name__)


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """One layer's place in a store."""

    store: OutputStore
    layer: int
    name: str

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The outputs of the first forward, if this is a recompute: a forward that runs inside backward.

        Raises:
            UnsupportedError: if the output was changed in place since: the recompute cannot have what it was.
        """
        if not in_backward():
            return None
        kept = self.store.kept.get(self.layer)
        if kept is None:
            return None
        if _version(kept.o_THV) != kept.version:
            raise UnsupportedError(
                f"the output of attention in {self.name} was changed in place after the forward, and activation checkpointing "
                "needs it in backward: change a copy of it, or switch checkpointing off."
            )
        return kept.o_THV, kept.lse_TH

    def keep(self, o_THV: torch.Tensor, lse_TH: torch.Tensor) -> None:
        """Remember the outputs of a forward."""
        if self.layer in self.store.kept or self.layer in self.store.repeated:
            self.drop()
            self.store.repeated.add(self.layer)
        else:
            # Detached: a tensor that is returned to autograd would hold the graph, which holds the handle and so the store.
            self.store.kept[self.layer] = _Kept(o_THV.detach(), lse_TH.detach(), _version(o_THV))

    def drop(self) -> None:
        """Forget them: backward has used them."""
        self.store.kept.pop(self.layer, None)


def _version(tensor: torch.Tensor) -> int:
    """Grows with every change in place, of any view. Tensors made in inference mode have none, and no backward either."""
    return 0 if tensor.is_inference() else changes_in_place(tensor)
