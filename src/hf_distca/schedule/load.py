"""Loads of ranks under a plan: seconds of compute and exchange, and tokens and bytes sent and
received.

Every rank has two links: one to the other ranks of its node, and one to other nodes. Several ranks
of a node may share a link to other nodes (`CostModel.ranks_per_link`). Both links work at the same
time, so sending takes as long as the busier link needs. Receiving is counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, TransientBytes, count_causal_pairs
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.schedule.plan import KeyTransfers, Plan, Relays
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.relays import with_sending_ranks

# The four exchanges are dispatch and return, in forward and in backward. A rank that exchanges
# anything waits for all four.
_EXCHANGES_PER_LAYER = 4
# Relays add a second dispatch in forward and in backward, and a return of key gradients to relays.
_RELAY_EXCHANGES = 3


class NodeBytes(NamedTuple):
    """Bytes that each rank sends and receives inside nodes and between nodes: shape (2, ranks)."""

    intra_node: FloatArray
    inter_node: FloatArray

    def estimate_seconds(self, cost: CostModel, ranks: Ranks) -> FloatArray:
        """Return the seconds that each rank needs to send and to receive its bytes: shape
        (2, ranks). The fixed seconds of an exchange are not included.
        """
        link, rate = ranks.list_links(cost, self.inter_node.shape[1])
        # A link to other nodes is busy with the bytes of all ranks that share it.
        between = [np.bincount(link[1], weights=amount)[link[1]] for amount in self.inter_node]
        return np.asarray(np.maximum(self.intra_node / rate[0], between / rate[1]))


class Traffic(NamedTuple):
    """Query rows and keys that travel, with their source and server ranks.

    A token with a fraction of the heads counts as this fraction of a token.
    """

    source: IntArray
    server: IntArray
    query_tokens: FloatArray
    key_tokens: FloatArray


@dataclass(frozen=True)
class PlanLoad:
    """Work and traffic of every rank under a plan; arrays have shape (ranks,).

    Sums are computed by `numpy.bincount` in task order, and products element by element. So every
    machine finds the same figures, and makes the same plan.

    Attributes:
        plan: the plan to weigh.
        cost: the cost model, with the window of the plan.
        overlapped: whether the plan is for a nano-batch of ping-pong. Its exchanges overlap with
            the compute of the other nano-batch, which has about as much work.
        ranks: properties of the ranks.
    """

    plan: Plan
    cost: CostModel
    overlapped: bool = False
    ranks: Ranks = UNIFORM_RANKS

    def __post_init__(self) -> None:
        if self.cost.window != self.plan.window:
            object.__setattr__(self, "cost", replace(self.cost, window=self.plan.window))

    def with_relays(self, relays: Relays) -> PlanLoad:
        """Return the load of the plan with relays, reusing figures that relays do not change."""
        load = replace(self, plan=self.plan.with_relays(relays))
        kept = {"compute_seconds", "query_tokens", "needed_keys"}
        vars(load).update({name: value for name, value in vars(self).items() if name in kept})
        return load

    def _sum_by_rank(self, rank: IntArray, weights: npt.NDArray[Any]) -> FloatArray:
        # `bincount` of an empty array returns integers, even with weights.
        return np.bincount(rank, weights=weights, minlength=self.plan.layout.world_size).astype(
            np.float64
        )

    def _sum_by_role(self, weights: FloatArray) -> FloatArray:
        """Sum amounts of traffic by sending rank (first row) and by receiving rank (second row)."""
        return np.array(
            [
                self._sum_by_rank(self.traffic.source, weights),
                self._sum_by_rank(self.traffic.server, weights),
            ]
        )

    @cached_property
    def pairs(self) -> FloatArray:
        """Causal query-key pairs that each rank computes. A pair with a fraction of the heads
        counts as this fraction of a pair.
        """
        plan = self.plan
        return self._sum_by_rank(
            plan.server,
            count_causal_pairs(plan.end - plan.start, plan.end, plan.window) * plan.heads,
        )

    @cached_property
    def compute_seconds(self) -> FloatArray:
        """Forward plus backward seconds that each rank takes for its tasks."""
        plan = self.plan
        seconds = self.ranks.scale_by_speed(
            self._sum_by_rank(
                plan.server, self.cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
            )
        )
        fixed = self.ranks.fixed_seconds
        return seconds if fixed is None else seconds + np.array(fixed)

    @cached_property
    def needed_keys(self) -> KeyTransfers:
        """Keys that each server needs, each key once. Documents that are not exchanged are left
        out.
        """
        plan = self.plan
        is_exchanged = plan.layout.has_many_ranks.copy()
        is_exchanged[plan.place[plan.home != plan.server]] = True
        return plan.list_key_transfers(np.flatnonzero(is_exchanged[plan.place]))

    @cached_property
    def traffic(self) -> Traffic:
        """All traffic: query rows, then keys, including the keys that relays forward."""
        plan = self.plan
        layout = plan.layout
        sent = with_sending_ranks(plan.layout, self.needed_keys, plan.relays)
        moved = np.flatnonzero(plan.home != plan.server)
        rows = ((plan.end - plan.start) * plan.heads)[moved]
        keys = (sent.end - sent.start) * layout.compute_head_fractions(sent.document)
        return Traffic(
            np.append(plan.home[moved], sent.source),
            np.append(plan.server[moved], sent.server),
            np.append(rows, np.zeros_like(keys)),
            np.append(np.zeros_like(rows), keys),
        )

    @cached_property
    def query_tokens(self) -> FloatArray:
        """Query tokens that each rank sends and receives: shape (2, ranks).

        A token with a fraction of the heads counts as this fraction of a token.
        """
        return self._sum_by_role(self.traffic.query_tokens)

    @cached_property
    def key_tokens(self) -> FloatArray:
        """Number of K/V tokens that each rank sends and receives, each token once per destination:
        shape (2, ranks).
        """
        return self._sum_by_role(self.traffic.key_tokens)

    @cached_property
    def exchange_bytes(self) -> FloatArray:
        """Bytes that each rank exchanges in forward and backward, returns included.

        The shape is (2, ranks). The first row is for the tokens that a rank sends in dispatches,
        and the second row is for the tokens that it receives in dispatches.
        """
        return np.asarray(
            self.query_tokens * self.cost.shape.moved_query_bytes
            + self.key_tokens * self.cost.shape.moved_key_bytes
        )

    @cached_property
    def node_bytes(self) -> NodeBytes:
        """The bytes of `exchange_bytes`, divided into bytes inside nodes and bytes between nodes.

        If nodes are not told apart, all bytes count as between nodes.
        """
        return self.count_node_bytes(
            self.cost.shape.moved_query_bytes, self.cost.shape.moved_key_bytes
        )

    def count_node_bytes(self, query_bytes: int, key_bytes: int) -> NodeBytes:
        """Count sent and received bytes, given the bytes per query row and per key."""
        traffic = self.traffic
        per_node = self.ranks.per_node or 1
        amount = traffic.query_tokens * query_bytes + traffic.key_tokens * key_bytes
        is_intra_node = traffic.source // per_node == traffic.server // per_node
        return NodeBytes(
            self._sum_by_role(amount * is_intra_node), self._sum_by_role(amount * ~is_intra_node)
        )

    @cached_property
    def wire_seconds(self) -> FloatArray:
        """Seconds that each rank needs to send and to receive, without the fixed seconds of
        exchanges: shape (2, ranks).
        """
        if not self.plan.moved:
            return np.zeros((2, self.plan.layout.world_size))
        if self.ranks.per_node is not None and self.cost.node_bytes_per_second is not None:
            return self.node_bytes.estimate_seconds(self.cost, self.ranks)
        return np.asarray(self.exchange_bytes / self.cost.exchange_bytes_per_second)

    @cached_property
    def exchange_seconds(self) -> FloatArray:
        """Seconds that each rank needs for exchanges: to send or to receive, whichever is longer,
        plus the fixed seconds of every exchange.
        """
        exchanges = _EXCHANGES_PER_LAYER + _RELAY_EXCHANGES * (self.plan.relays is not None)
        fixed = self.cost.exchange_seconds + self.cost.peer_seconds * self.peer_counts
        return np.asarray(self.wire_seconds.max(axis=0) + exchanges * fixed * self.plan.moved)

    @cached_property
    def peer_counts(self) -> npt.NDArray[Any]:
        """Number of ranks that each rank sends to or receives from, whichever is larger; 0 if peers
        cost nothing.
        """
        ranks = self.plan.layout.world_size
        if not (self.cost.peer_seconds and self.plan.moved):
            return np.zeros(ranks)
        pairs = np.unique(self.traffic.source * ranks + self.traffic.server)
        return np.maximum(
            np.bincount(pairs // ranks, minlength=ranks),
            np.bincount(pairs % ranks, minlength=ranks),
        )

    @cached_property
    def end_seconds(self) -> FloatArray:
        """Seconds after which each rank ends: compute plus exchange, or the longer of both if
        overlapped.
        """
        compute, exchange = self.compute_seconds, self.exchange_seconds
        return np.maximum(compute, exchange) if self.overlapped else compute + exchange

    @cached_property
    def slowest_seconds(self) -> float:
        """Estimated seconds of the slowest rank."""
        return float(self.end_seconds.max(initial=0.0))


def count_transient_bytes(plan: Plan, transient: TransientBytes) -> IntArray:
    """Count the bytes of memory that tasks with an exchange take on each rank during a call: shape
    (ranks,).
    """
    tasks = np.flatnonzero(plan.needs_exchange)
    rows = ((plan.end - plan.start) * plan.heads)[tasks]
    sent_rows = rows * (plan.home != plan.server)[tasks]
    keys = plan.list_key_transfers(tasks)
    count = (keys.end - keys.start) * plan.layout.compute_head_fractions(keys.document)
    sent_keys = count * (keys.source != keys.server)
    held = np.zeros(plan.layout.world_size)
    for rank, amount, size in (
        (plan.server[tasks], rows, transient.query),
        (plan.home[tasks], sent_rows, transient.sent_query),
        (keys.server, count, transient.key),
        (keys.source, sent_keys, transient.sent_key),
    ):
        held += np.bincount(rank, weights=amount * size, minlength=len(held))
    return np.ceil(held).astype(np.int64)


def compute_imbalance(values: FloatArray) -> float:
    """Return the maximum over ranks divided by the mean; 1 if all values are 0."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total > 0 else 1.0


def summarize_plan(
    plan: Plan, cost: CostModel, ranks: Ranks = UNIFORM_RANKS
) -> dict[str, int | float]:
    """Compare a plan ("after") with the plan that moves nothing ("before").

    Imbalance is max/mean over ranks. Bytes are the sum of forward and backward. The `json` module
    can write the result.
    """
    before, after = (
        PlanLoad(weighed_plan, cost, ranks=ranks)
        for weighed_plan in (Plan.make_local(plan.layout, plan.window), plan)
    )
    nodes = after.node_bytes
    return {
        "ranks": plan.layout.world_size,
        "tasks": len(plan.document),
        "moved_tasks": int((plan.home != plan.server).sum()),  # tasks that leave their home
        "pairs_imbalance_before": compute_imbalance(before.pairs),
        "pairs_imbalance_after": compute_imbalance(after.pairs),
        # Imbalance of the estimated compute seconds.
        "seconds_imbalance_before": compute_imbalance(before.compute_seconds),
        "seconds_imbalance_after": compute_imbalance(after.compute_seconds),
        # The slowest rank's estimated compute plus exchange.
        "slowest_seconds_before": before.slowest_seconds,
        "slowest_seconds_after": after.slowest_seconds,
        "query_tokens": int(plan.layout.query_tokens.sum()),  # sum over all ranks
        "query_tokens_moved": int(after.query_tokens[0].sum()),
        # Each key token counts once for every rank that receives it.
        "key_tokens_sent": int(after.key_tokens[0].sum()),
        # Key tokens that are sent even if no query moves, because documents lie on several ranks.
        "key_tokens_sent_unplanned": int(before.key_tokens[0].sum()),
        # The next three figures are those of the busiest rank.
        "max_sent_key_tokens": int(after.key_tokens[0].max()),
        "max_sent_bytes": int(after.exchange_bytes[0].max()),
        "max_received_bytes": int(after.exchange_bytes[1].max()),
        # Sums over all ranks. If nodes are not told apart, all bytes count as between nodes.
        "bytes_inside_nodes": int(nodes.intra_node[0].sum()),
        "bytes_between_nodes": int(nodes.inter_node[0].sum()),
        # Bytes that the busiest rank sends or receives, whichever is more.
        "max_bytes_between_nodes": int(nodes.inter_node.max()),
    }


def format_summary(summary: dict[str, int | float], *, seconds: bool = True) -> str:
    """Format the result of `summarize_plan` as lines of text.

    Pass ``seconds=False`` for a cost model of pairs, whose seconds mean nothing.
    """
    moved = summary["query_tokens_moved"] / max(summary["query_tokens"], 1)
    unplanned = ", {key_tokens_sent_unplanned} for documents that lie on several ranks anyway"
    between = (
        "{bytes_between_nodes:.1f} of {bytes:.1f} MB per layer, {max_bytes_between_nodes:.1f} MB of"
        " the busiest rank"
    )
    lines = {
        "tasks": (
            f"{{tasks}} on {{ranks}} rank{'s' * (summary['ranks'] != 1)}, {{moved_tasks}} moved"
        ),
        "imbalance of causal pairs": (
            "{pairs_imbalance_before:.3f} -> {pairs_imbalance_after:.3f} (max/mean)"
        ),
        "imbalance of seconds": (
            "{seconds_imbalance_before:.3f} -> {seconds_imbalance_after:.3f} (max/mean)" * seconds
        ),
        "slowest rank, estimated": (
            "{slowest_seconds_before:.4g} s -> {slowest_seconds_after:.4g} s" * seconds
        ),
        "query tokens moved": f"{{query_tokens_moved}} of {{query_tokens}} ({moved:.1%})",
        "K/V tokens sent": (
            "{key_tokens_sent}" + unplanned * (summary["key_tokens_sent_unplanned"] > 0)
        ),
        "busiest sender": "{max_sent_bytes:.1f} MB per layer",
        "busiest receiver": "{max_received_bytes:.1f} MB per layer",
        "between nodes": between * (summary["bytes_inside_nodes"] > 0),
    }
    all_bytes = {"bytes": summary["bytes_inside_nodes"] + summary["bytes_between_nodes"]}
    figures = {
        name: value / 1e6 if "bytes" in name else value
        for name, value in (summary | all_bytes).items()
    }
    return "\n".join(
        f"{label:<26} {line.format_map(figures)}" for label, line in lines.items() if line
    )
