"""Properties of the ranks of an attention group: their speeds and their nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Ranks:
    """Speeds and nodes of ranks.

    All processes of an attention group must use equal `Ranks`, which can be compared and hashed.

    Attributes:
        speeds: relative speed of the attention kernels of each rank, about 1 on average. If a cost
            model estimates some work at one second, rank r takes ``1 / speeds[r]`` seconds for it.
            None if all ranks are equally fast.
        per_node: number n of ranks of a node; ranks [0, n), [n, 2n), ... are nodes. Exchanges
            inside a node run at ``CostModel.node_bytes_per_second``. None if nodes are not told
            apart: all exchanges then run at ``exchange_bytes_per_second``.
        fixed_seconds: seconds of each rank's other work, which cannot move; None if there is none.

    Raises:
        ConfigError: if a speed is not a positive number, or if a node has no ranks.
    """

    speeds: tuple[float, ...] | None = None
    per_node: int | None = None
    fixed_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.speeds is not None and not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(
                f"speeds={self.speeds}: each speed must be a positive number; the average rank has"
                " speed 1."
            )
        if self.per_node is not None and (type(self.per_node) is not int or self.per_node < 1):
            raise ConfigError(f"per_node={self.per_node!r} must be a whole number of at least 1.")

    @classmethod
    def from_speeds(cls, speeds: npt.ArrayLike | None, per_node: int | None = None) -> Ranks:
        """Make `Ranks` with speeds of shape (ranks,), or with equal speeds if `speeds` is None."""
        return cls(
            (
                None
                if speeds is None
                else tuple(np.asarray(speeds, dtype=np.float64).reshape(-1).tolist())
            ),
            per_node,
        )

    def check_count(self, count: int) -> None:
        """Raise an error unless these properties are for `count` ranks.

        Raises:
            ConfigError: if they are not. The message states both numbers.
        """
        if self.speeds is not None and len(self.speeds) != count:
            raise ConfigError(
                f"{len(self.speeds)} speeds were given for {count} ranks: give one for each rank,"
                " in rank order."
            )
        if self.per_node is not None and count % self.per_node:
            raise ConfigError(
                f"{count} ranks cannot be divided into nodes of {self.per_node}: per_node must"
                " divide the number of ranks."
            )

    def without_irrelevant_nodes(self, cost: CostModel) -> Ranks:
        """Return a copy without nodes if nodes make no difference to a cost model, else `self`."""
        return (
            replace(self, per_node=None)
            if self.per_node == 1 or cost.node_bytes_per_second is None
            else self
        )

    def list_speeds(self, count: int) -> list[float]:
        """Return the speed of each of `count` ranks."""
        return [1.0] * count if self.speeds is None else list(self.speeds)

    def scale_by_speed(self, seconds: FloatArray) -> FloatArray:
        """Divide seconds of work at speed 1 by the speeds of the ranks; shape (ranks,)."""
        return seconds if self.speeds is None else np.asarray(seconds / np.array(self.speeds))

    def list_links(self, cost: CostModel, count: int) -> tuple[IntArray, FloatArray]:
        """List the links of `count` ranks, inside their node and to other nodes.

        Without nodes, all ranks count as one node, whose links are as fast as links between nodes.

        Returns:
            For both links of each rank, the first rank that uses the link, and the link's bytes per
            second: two arrays of shape (2, ranks).
        """
        rank, per_node = np.arange(count), self.per_node or count
        shared = min(cost.ranks_per_link, per_node)
        link = rank - rank % per_node % shared
        rate = np.bincount(link, minlength=count)[link] * cost.exchange_bytes_per_second
        inside = cost.node_bytes_per_second if self.per_node else None
        near = np.full(count, inside or cost.exchange_bytes_per_second)
        return np.stack([rank, link]), np.stack([near, rate])


UNIFORM_RANKS = Ranks()
