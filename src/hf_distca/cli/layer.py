"""Options that say what a layer of attention is like, and what it costs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel

__all__ = [
    "CostName",
    "CostProfile",
    "HeadDim",
    "KeyValueHeads",
    "LinkRate",
    "NodeRate",
    "QueryHeads",
    "RanksPerLink",
    "RanksPerNode",
    "Window",
    "cost_model",
    "with_links",
]


class CostName(StrEnum):
    """Cost models by name."""

    pairs = "pairs"
    cpu = "cpu"
    cuda = "cuda"


QueryHeads = Annotated[int, typer.Option(help="Query heads of a layer.")]
KeyValueHeads = Annotated[int, typer.Option(help="Key/value heads of a layer.")]
HeadDim = Annotated[int, typer.Option(help="Width of a head.")]
Window = Annotated[int | None, typer.Option(help="Keys that a position sees, if all layers have a sliding window.")]
CostProfile = Annotated[
    str | None,
    typer.Option("--cost-model", help="Profile to take seconds from instead: a file, or a shipped one.", show_default=False),
]


RanksPerNode = Annotated[int | None, typer.Option(help="Ranks of a node; its links are faster.", show_default=False)]
LinkRate = Annotated[
    float | None,
    typer.Option("--link-gigabytes", help="GB/s that a rank sends to other nodes.", show_default="as the cost model"),
]
NodeRate = Annotated[
    float | None,
    typer.Option("--node-gigabytes", help="GB/s that a rank sends inside its node.", show_default="as the cost model"),
]
RanksPerLink = Annotated[int, typer.Option(help="Ranks of a node that share a link to other nodes.")]


def cost_model(
    cost: CostName,
    query_heads: int,
    key_value_heads: int,
    head_dim: int,
    *,
    tile: int,
    window: int | None,
    measured: str | None = None,
) -> CostModel:
    """That of a measured profile, or else the built-in cost model of this name; for a layer in bfloat16."""
    from dataclasses import replace

    from hf_distca.schedule.cost import AttentionShape, CostModel
    from hf_distca.schedule.profiles import Profile

    shape = AttentionShape(query_heads, key_value_heads, head_dim, head_dim, 2)
    if measured is not None:
        return Profile.load(measured).cost_model(shape, window, tile=tile)
    pairs = cost is CostName.pairs
    model = CostModel.pairs(shape) if pairs else CostModel.analytic(shape, device_type=cost.value, tile=tile)
    return replace(model, window=window)


def with_links(model: CostModel, link: float | None, node: float | None, ranks_per_link: int) -> CostModel:
    """The model with other rates of links, in GB/s; None for its own."""
    from dataclasses import replace

    from hf_distca.errors import ConfigError

    for option, rate in (("--link-gigabytes", link), ("--node-gigabytes", node)):
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"{option} {rate:g}: a rate is more than 0 GB/s.")
    return replace(
        model,
        exchange_bytes_per_second=model.exchange_bytes_per_second if link is None else link * 1e9,
        node_bytes_per_second=model.node_bytes_per_second if node is None else node * 1e9,
        ranks_per_link=ranks_per_link,
    )
