"""What travels inside nodes and between them, and how long that takes.

Inside a node, every rank has a link to the others; to other nodes, it has one of its own or shares one with ranks of its node
(`CostModel.ranks_per_link`). These are different wires that carry at the same time: what a rank sends takes the longer of both,
and so does what it receives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.ranks import Ranks

__all__ = ["NodeBytes", "wire_seconds"]


class NodeBytes(NamedTuple):
    """Bytes that each rank sends and receives; arrays of shape (ranks,)."""

    sent_inside: FloatArray
    sent_between: FloatArray
    received_inside: FloatArray
    received_between: FloatArray

    @classmethod
    def of(cls, messages: tuple[IntArray, IntArray, FloatArray], count: int, per_node: int) -> NodeBytes:
        """Sums of messages.

        Args:
            messages: (source, server, bytes) of each; none goes from a rank to itself.
            count: number of ranks.
            per_node: ranks of a node.
        """
        source, server, amount = messages
        inside = source // per_node == server // per_node

        def summed(rank: IntArray) -> tuple[FloatArray, FloatArray]:
            near, far = (np.bincount(rank[some], weights=amount[some], minlength=count) for some in (inside, ~inside))
            return near.astype(np.float64), far.astype(np.float64)

        return cls(*summed(source), *summed(server))


def wire_seconds(moved: NodeBytes, cost: CostModel, ranks: Ranks) -> tuple[FloatArray, FloatArray]:
    """Seconds that each rank sends and receives, without the fixed part of exchanges; arrays of shape (ranks,)."""
    inside = cost.node_bytes_per_second or cost.exchange_bytes_per_second
    sent = np.maximum(moved.sent_inside / inside, _between_seconds(moved.sent_between, cost, ranks))
    received = np.maximum(moved.received_inside / inside, _between_seconds(moved.received_between, cost, ranks))
    return sent, received


def _between_seconds(amount: FloatArray, cost: CostModel, ranks: Ranks) -> FloatArray:
    """Seconds that each rank's link to other nodes is busy with the bytes of all ranks that share it."""
    per_node = ranks.per_node or len(amount)
    shared = min(cost.ranks_per_link, per_node)
    place = np.arange(len(amount))
    link = place // per_node * -(-per_node // shared) + place % per_node // shared
    return np.asarray((np.bincount(link, weights=amount) / (np.bincount(link) * cost.exchange_bytes_per_second))[link])
