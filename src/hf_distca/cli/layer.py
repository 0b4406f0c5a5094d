"""Options that say what a layer of attention is like, and what it costs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel

__all__ = ["CostName", "HeadDim", "KeyValueHeads", "QueryHeads", "Window", "cost_model"]


class CostName(StrEnum):
    """Cost models by name."""

    pairs = "pairs"
    cpu = "cpu"
    cuda = "cuda"


QueryHeads = Annotated[int, typer.Option(help="Query heads of a layer.")]
KeyValueHeads = Annotated[int, typer.Option(help="Key/value heads of a layer.")]
HeadDim = Annotated[int, typer.Option(help="Width of a head.")]
Window = Annotated[int | None, typer.Option(help="Keys that a position sees, if all layers have a sliding window.")]


def cost_model(
    cost: CostName, query_heads: int, key_value_heads: int, head_dim: int, *, tile: int, window: int | None
) -> CostModel:
    """The built-in cost model of this name, for a layer in bfloat16."""
    from dataclasses import replace

    from hf_distca.schedule.cost import AttentionShape, CostModel

    shape = AttentionShape(query_heads, key_value_heads, head_dim, head_dim, 2)
    pairs = cost is CostName.pairs
    model = CostModel.pairs(shape) if pairs else CostModel.analytic(shape, device_type=cost.value, tile=tile)
    return replace(model, window=window)
