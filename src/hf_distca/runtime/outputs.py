"""Outputs of a micro-batch's layers, kept at home so that activation checkpointing repeats no attention and no exchange.

The first forward leaves o and lse of every layer in a store that lives as long as the micro-batch's handle. Without
checkpointing that is until the model's forward returns. With it, each checkpoint holds the handle among its arguments until its
backward is over; the recompute finds the outputs there, and rebuilds q, k and v only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["LayerOutputs", "OutputStore"]


@dataclass(frozen=True, eq=False)
class OutputStore:
    """o_THV and lse_TH by layer. A module that is called more than once in a forward is left out: which call would it be?"""

    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def of(self, module: torch.nn.Module) -> LayerOutputs:
        """The place of one attention module."""
        return LayerOutputs(self, id(module))


@dataclass(frozen=True, eq=False)
class LayerOutputs:
    """One layer's place in a store."""

    store: OutputStore
    layer: int

    def take(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The outputs of the first forward, if this is a recompute: a forward that runs inside backward."""
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - there is no public way to ask
            return None
        return self.store.kept.get(self.layer)

    def keep(self, o_THV: torch.Tensor, lse_TH: torch.Tensor) -> None:
        """Remember the outputs of a forward."""
        if self.layer in self.store.kept or self.layer in self.store.repeated:
            self.drop()
            self.store.repeated.add(self.layer)
        else:
            # Detached: a tensor that is returned to autograd would hold the graph, which holds the handle and so the store.
            self.store.kept[self.layer] = o_THV.detach(), lse_TH.detach()

    def drop(self) -> None:
        """Forget them: backward has used them."""
        self.store.kept.pop(self.layer, None)
