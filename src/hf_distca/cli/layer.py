"""Options of the verbs that plan: what a layer of attention is like, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.profiles import Profile

__all__ = ["CostName", "Layer"]

_LIMIT = 2**31  # what follows counts with 64 bits


class CostName(StrEnum):
    """Cost models by name."""

    pairs = "pairs"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of attention in bfloat16, and the devices and links that run it."""

    tile: Annotated[int, typer.Option(help="Documents are cut at multiples of this where tokens allow.")] = 128
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128
    window: Annotated[int | None, typer.Option(help="Keys that a position sees, if all layers have a sliding window.")] = None
    measured: Annotated[
        str | None,
        typer.Option("--cost-model", help="Profile to take seconds from instead: a file, or a shipped one.", show_default=False),
    ] = None
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node; its links are faster.", show_default=False)] = None
    link_gigabytes: Annotated[
        float | None, typer.Option(help="GB/s that a rank sends to other nodes.", show_default="as the cost model")
    ] = None
    node_gigabytes: Annotated[
        float | None, typer.Option(help="GB/s that a rank sends inside its node.", show_default="as the cost model")
    ] = None
    ranks_per_link: Annotated[int, typer.Option(help="Ranks of a node that share a link to other nodes.")] = 1

    def cost_model(self, cost: CostName) -> CostModel:
        """That of the measured profile, or else the built-in cost model of this name, with the links of the options.

        Raises:
            ConfigError: if an option is out of its range.
        """
        from hf_distca.errors import ConfigError
        from hf_distca.schedule.cost import AttentionShape, CostModel

        for option, rate in (("--link-gigabytes", self.link_gigabytes), ("--node-gigabytes", self.node_gigabytes)):
            if rate is not None and not 1e-9 <= rate <= 1e9:
                raise ConfigError(f"{option} {rate:g}: a rate is a number from 1e-9 to 1e9 GB/s.")
        for name in ("tile", "query_heads", "key_value_heads", "head_dim", "window", "ranks_per_node", "ranks_per_link"):
            number = getattr(self, name)
            if number is not None and number >= _LIMIT:
                raise ConfigError(f"--{name.replace('_', '-')} {number}: the limit is 2**31.")
        shape = AttentionShape(self.query_heads, self.key_value_heads, self.head_dim, self.head_dim, 2)
        if self.measured is not None:
            model = self._profile(self.measured).cost_model(shape, self.window, tile=self.tile)
        elif cost is CostName.pairs:
            model = CostModel.pairs(shape)
        else:
            model = CostModel.analytic(shape, device_type=cost.value, tile=self.tile)
        link, node = self.link_gigabytes, self.node_gigabytes
        return replace(
            model,
            window=self.window,
            exchange_bytes_per_second=model.exchange_bytes_per_second if link is None else link * 1e9,
            node_bytes_per_second=model.node_bytes_per_second if node is None else node * 1e9,
            ranks_per_link=self.ranks_per_link,
        )

    def _profile(self, source: str) -> Profile:
        """A profile by name or file, which errors name."""
        from hf_distca.errors import ConfigError
        from hf_distca.schedule.profiles import Profile

        try:
            return Profile.load(source)
        except ConfigError as error:
            raise ConfigError(str(error) if source in str(error) else f"{source}: {error}") from error
