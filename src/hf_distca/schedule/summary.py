"""A plan in a dozen figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from hf_distca.schedule.cost import CostModel, FloatArray
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import ALIKE, Ranks

__all__ = ["PlanSummary", "imbalance", "summarize"]


def imbalance(values: FloatArray) -> float:
    """Max over mean of the ranks, 1 where there is nothing to balance."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total > 0 else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in a dozen figures; "before" is the plan that moves nothing.

    Attributes:
        ranks: ranks of the layout.
        tasks, moved_tasks: CA-tasks, and those whose server is not their home.
        pairs_imbalance_before, pairs_imbalance_after: max/mean over ranks of causal pairs.
        seconds_imbalance_before, seconds_imbalance_after: max/mean over ranks of estimated compute seconds.
        slowest_seconds_before, slowest_seconds_after: estimated seconds of the slowest rank, compute plus exchange.
        query_tokens: query tokens, of all ranks together.
        query_tokens_moved: query tokens that another rank than their home computes.
        key_tokens_sent: K/V tokens sent between ranks, each once per destination.
        key_tokens_sent_unplanned: those that documents on several ranks need with no move at all.
        max_sent_query_tokens, max_received_query_tokens: of the busiest rank.
        max_sent_key_tokens, max_received_key_tokens: of the busiest rank.
        max_sent_bytes, max_received_bytes: bytes exchanged, forward and backward, by the busiest home and the busiest server.
        bytes_inside_nodes, bytes_between_nodes: bytes exchanged by all ranks; all are between, if nodes are not told apart.
        max_bytes_between_nodes: exchanged with other nodes by the rank that does most of it, as a home or as a server.
    """

    ranks: int
    tasks: int
    moved_tasks: int
    pairs_imbalance_before: float
    pairs_imbalance_after: float
    seconds_imbalance_before: float
    seconds_imbalance_after: float
    slowest_seconds_before: float
    slowest_seconds_after: float
    query_tokens: int
    query_tokens_moved: int
    key_tokens_sent: int
    key_tokens_sent_unplanned: int
    max_sent_query_tokens: int
    max_received_query_tokens: int
    max_sent_key_tokens: int
    max_received_key_tokens: int
    max_sent_bytes: int
    max_received_bytes: int
    bytes_inside_nodes: int
    bytes_between_nodes: int
    max_bytes_between_nodes: int

    def to_dict(self) -> dict[str, int | float]:
        """The figures as a dictionary that `json` can write."""
        return asdict(self)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, seconds: bool = True) -> str:
        """The figures as lines of text; `seconds` are left out where a cost model of pairs has none."""
        moved = self.query_tokens_moved / max(self.query_tokens, 1)
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        spanning = f", {self.key_tokens_sent_unplanned} for documents that lie on several ranks anyway"
        lines = [
            ("tasks", f"{self.tasks} on {ranks}, {self.moved_tasks} moved"),
            ("imbalance of causal pairs", f"{self.pairs_imbalance_before:.3f} -> {self.pairs_imbalance_after:.3f} (max/mean)"),
        ]
        if seconds:
            lines += [
                ("imbalance of seconds", f"{self.seconds_imbalance_before:.3f} -> {self.seconds_imbalance_after:.3f} (max/mean)"),
                ("slowest rank, estimated", f"{self.slowest_seconds_before:.4g} s -> {self.slowest_seconds_after:.4g} s"),
            ]
        lines += [
            ("query tokens moved", f"{self.query_tokens_moved} of {self.query_tokens} ({moved:.1%})"),
            ("K/V tokens sent", f"{self.key_tokens_sent}{spanning if self.key_tokens_sent_unplanned else ''}"),
            ("busiest sender", f"{self.max_sent_bytes / 1e6:.1f} MB per layer"),
            ("busiest receiver", f"{self.max_received_bytes / 1e6:.1f} MB per layer"),
        ]
        if self.bytes_inside_nodes:
            between, total, most = (
                f"{amount / 1e6:.1f}"
                for amount in (
                    self.bytes_between_nodes,
                    self.bytes_inside_nodes + self.bytes_between_nodes,
                    self.max_bytes_between_nodes,
                )
            )
            lines.append(("between nodes", f"{between} of {total} MB per layer, {most} MB of the busiest rank"))
        return "\n".join(f"{label:<26} {value}" for label, value in lines)


def summarize(plan: Plan, cost: CostModel, ranks: Ranks = ALIKE) -> PlanSummary:
    """Figures of `plan` beside those of the plan that moves nothing, under `cost`."""
    local = Plan.local(plan.layout, plan.window)
    after, before = PlanLoad(plan, cost, ranks=ranks), PlanLoad(local, cost, ranks=ranks)

    def busiest(values: FloatArray) -> int:
        return int(values.max(initial=0))

    return PlanSummary(
        ranks=plan.layout.world_size,
        tasks=len(plan.document),
        moved_tasks=int((plan.home != plan.server).sum()),
        pairs_imbalance_before=imbalance(before.pairs),
        pairs_imbalance_after=imbalance(after.pairs),
        seconds_imbalance_before=imbalance(before.compute_seconds),
        seconds_imbalance_after=imbalance(after.compute_seconds),
        slowest_seconds_before=before.slowest_seconds,
        slowest_seconds_after=after.slowest_seconds,
        query_tokens=int(plan.layout.query_tokens.sum()),
        query_tokens_moved=int(after.query_tokens[0].sum()),
        key_tokens_sent=int(after.key_tokens[0].sum()),
        key_tokens_sent_unplanned=int(before.key_tokens[0].sum()),
        max_sent_query_tokens=busiest(after.query_tokens[0]),
        max_received_query_tokens=busiest(after.query_tokens[1]),
        max_sent_key_tokens=busiest(after.key_tokens[0]),
        max_received_key_tokens=busiest(after.key_tokens[1]),
        max_sent_bytes=busiest(after.exchange_bytes[0]),
        max_received_bytes=busiest(after.exchange_bytes[1]),
        bytes_inside_nodes=int(after.node_bytes.sent_inside.sum()),
        bytes_between_nodes=int(after.node_bytes.sent_between.sum()),
        max_bytes_between_nodes=busiest(np.maximum(after.node_bytes.sent_between, after.node_bytes.received_between)),
    )
