"""What ranks do under a plan: seconds that they compute and exchange, and tokens and bytes that they send and receive.

Inside a node, every rank has a link to the others; to other nodes, it has one of its own or shares one with ranks of its node
(`CostModel.ranks_per_link`). These are different wires that carry at the same time: what a rank sends takes the longer of both,
and so does what it receives.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, FloatArray, causal_pairs
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import KeyTransfers, Plan, Relays
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.relays import senders
from hf_distca.schedule.waves import Waves

__all__ = ["NodeBytes", "PlanLoad", "PlanSummary", "imbalance", "summarize", "wire_seconds"]

# Dispatch and return, forward and backward: what a rank that exchanges anything waits for at least.
_EXCHANGES_PER_LAYER = 4
# With relays: dispatch a second time, forward and backward, and gradients of keys to relays.
_RELAY_EXCHANGES = 3


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


@dataclass(frozen=True)
class PlanLoad:
    """Work and traffic of every rank under a plan; arrays have shape (ranks,).

    Sums run in task order through `numpy.bincount` and products element by element, so that every machine finds the same
    figures: the scheduler decides by them.

    Attributes:
        plan, cost: what is measured, and the model that it is measured with. The window is the plan's.
        waves: the plan's waves, if it goes in several: each exchanges by itself, and keys may travel in more than one.
        overlapped: whether the plan is for a nano-batch of ping-pong, whose messages travel while the other one, with about as
            much work, computes.
        ranks: what ranks are like.
    """

    plan: Plan
    cost: CostModel
    waves: Waves | None = None
    overlapped: bool = False
    ranks: Ranks = ALIKE

    def __post_init__(self) -> None:
        if self.cost.window != self.plan.window:
            object.__setattr__(self, "cost", replace(self.cost, window=self.plan.window))

    def with_relays(self, relays: Relays) -> PlanLoad:
        """That of the plan with relays, without counting again what these do not change."""
        load = PlanLoad(self.plan.with_relays(relays), self.cost, self.waves, self.overlapped, self.ranks)
        kept = {"compute_seconds", "query_tokens", "needed_keys"}
        vars(load).update({name: value for name, value in vars(self).items() if name in kept})
        return load

    def _sum(self, rank: IntArray, weights: npt.NDArray[Any]) -> FloatArray:
        # bincount of nothing counts in integers, whatever the weights are.
        return np.bincount(rank, weights=weights, minlength=self.plan.layout.world_size).astype(np.float64)

    @cached_property
    def pairs(self) -> FloatArray:
        """Causal query-key pairs that each rank computes; of some of the heads they count in part."""
        plan = self.plan
        return self._sum(plan.server, causal_pairs(plan.end - plan.start, plan.end, plan.window) * plan.heads)

    @cached_property
    def compute_seconds(self) -> FloatArray:
        """Forward plus backward seconds that each rank takes for its tasks."""
        plan = self.plan
        return self.ranks.taken(self._sum(plan.server, self.cost.seconds(plan.end - plan.start, plan.end, plan.heads)))

    @cached_property
    def query_tokens(self) -> FloatArray:
        """Query tokens that each rank sends and receives, shape (2, ranks); of some of the heads they count in part."""
        plan = self.plan
        away = np.flatnonzero(plan.home != plan.server)
        rows = ((plan.end - plan.start) * plan.heads)[away]
        return np.array([self._sum(plan.home[away], rows), self._sum(plan.server[away], rows)])

    @cached_property
    def needed_keys(self) -> KeyTransfers:
        """The keys that each server needs, once in each wave; of documents that nobody exchanges, none."""
        if self.waves is None or self.waves.bytes is None:
            return self.plan.key_transfers(np.flatnonzero(self.plan.exchanged))
        plan, number = self.waves.plan, self.waves.number
        tasks = np.flatnonzero(number >= 0)
        keys = plan.key_transfers(tasks, number[tasks] * plan.layout.world_size + plan.server[tasks])
        return keys._replace(server=keys.server % plan.layout.world_size)

    @cached_property
    def sent_keys(self) -> KeyTransfers:
        """The keys that travel, with the rank that sends them as `source`, in the first hop or in the second."""
        return senders(self.needed_keys, self.plan.relays)

    @cached_property
    def key_messages(self) -> FloatArray:
        """Tokens of each row of `sent_keys`; of some of the heads they count in part."""
        layout = self.plan.layout if self.waves is None else self.waves.plan.layout
        return np.asarray((self.sent_keys.end - self.sent_keys.start) * layout.heads_of(self.sent_keys.document))

    @cached_property
    def key_tokens(self) -> FloatArray:
        """K/V tokens that each rank sends and receives, each token once per destination: shape (2, ranks)."""
        return np.array([self._sum(rank, self.key_messages) for rank in (self.sent_keys.source, self.sent_keys.server)])

    @cached_property
    def exchange_bytes(self) -> FloatArray:
        """Bytes, forward and backward, that each rank exchanges as a home and as a server: shape (2, ranks)."""
        shape = self.cost.shape
        return np.asarray(self.query_tokens * shape.moved_query_bytes + self.key_tokens * shape.moved_key_bytes)

    @cached_property
    def node_bytes(self) -> NodeBytes:
        """The same bytes, inside nodes and between them; all between, if nodes are not told apart."""
        plan, shape, sent = self.plan, self.cost.shape, self.sent_keys
        away = np.flatnonzero(plan.home != plan.server)
        rows = ((plan.end - plan.start) * plan.heads)[away]
        source, server = (np.concatenate(pair) for pair in ((plan.home[away], sent.source), (plan.server[away], sent.server)))
        amount = np.concatenate([rows * shape.moved_query_bytes, self.key_messages * shape.moved_key_bytes])
        return NodeBytes.of((source, server, amount), plan.layout.world_size, self.ranks.per_node or 1)

    @cached_property
    def wire_seconds(self) -> FloatArray:
        """Seconds that each rank sends and receives, without the fixed part of exchanges: shape (2, ranks)."""
        if not self.plan.moved:
            return np.zeros((2, self.plan.layout.world_size))
        if self.ranks.in_nodes(self.cost):
            return np.array(wire_seconds(self.node_bytes, self.cost, self.ranks))
        return np.asarray(self.exchange_bytes / self.cost.exchange_bytes_per_second)

    @cached_property
    def exchange_seconds(self) -> FloatArray:
        """Seconds that each rank exchanges: the busier of its two roles, plus the fixed part of every exchange."""
        exchanges = _EXCHANGES_PER_LAYER * (1 if self.waves is None else self.waves.count)
        exchanges += _RELAY_EXCHANGES if self.plan.relays is not None else 0
        fixed = self.cost.exchange_seconds + self.cost.peer_seconds * self.peers
        return np.asarray(self.wire_seconds.max(axis=0) + exchanges * fixed * self.plan.moved)

    @cached_property
    def peers(self) -> npt.NDArray[Any]:
        """How many ranks each sends to or receives from, whichever are more; not counted where they cost nothing."""
        plan, sent, ranks = self.plan, self.sent_keys, self.plan.layout.world_size
        if not (self.cost.peer_seconds and plan.moved):
            return np.zeros(ranks)
        away = plan.home != plan.server
        source, server = (np.concatenate(pair) for pair in ((plan.home[away], sent.source), (plan.server[away], sent.server)))
        pairs = np.unique(source[source != server] * ranks + server[source != server])
        return np.maximum(np.bincount(pairs // ranks, minlength=ranks), np.bincount(pairs % ranks, minlength=ranks))

    @cached_property
    def slowest_seconds(self) -> float:
        """Estimated seconds of the slowest rank: compute plus exchange, or plus what of the exchange is longer, if overlapped."""
        compute, exchange = self.compute_seconds, self.exchange_seconds
        ends = np.maximum(compute, exchange) if self.overlapped else compute + exchange
        return float(ends.max(initial=0.0))


def imbalance(values: FloatArray) -> float:
    """Max over mean of the ranks, 1 where there is nothing to balance."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total > 0 else 1.0


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in figures; "before" is the plan that moves nothing, and imbalance is max/mean over ranks."""

    ranks: int
    tasks: int
    moved_tasks: int  # whose server is not their home
    pairs_imbalance_before: float  # of causal pairs
    pairs_imbalance_after: float
    seconds_imbalance_before: float  # of estimated compute seconds
    seconds_imbalance_after: float
    slowest_seconds_before: float  # estimated compute plus exchange of the slowest rank
    slowest_seconds_after: float
    query_tokens: int  # of all ranks together
    query_tokens_moved: int
    key_tokens_sent: int  # between ranks, each once per destination
    key_tokens_sent_unplanned: int  # of documents on several ranks, with no move at all
    max_sent_query_tokens: int  # of the busiest rank
    max_received_query_tokens: int
    max_sent_key_tokens: int
    max_received_key_tokens: int
    max_sent_bytes: int  # exchanged forward and backward by the busiest home
    max_received_bytes: int  # by the busiest server
    bytes_inside_nodes: int  # exchanged by all ranks together
    bytes_between_nodes: int  # all bytes, if nodes are not told apart
    max_bytes_between_nodes: int  # of the busiest rank, as a home or as a server

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
