"""What a plan does, in figures: work and traffic of every rank, and a short summary of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.cost import CostModel, FloatArray, causal_pairs
from hf_distca.schedule.ends import EXCHANGES_PER_LAYER, RELAY_EXCHANGES, Ends, Link
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.nodes import NodeBytes, wire_seconds
from hf_distca.schedule.plan import KeyTransfers, Plan, Relays
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.relays import senders, sent_key_tokens
from hf_distca.schedule.tally import Tally
from hf_distca.schedule.waves import Waves

__all__ = ["PlanLoad", "PlanSummary", "imbalance", "summarize"]

# What a `PlanLoad` keeps and relays do not change.
_UNRELATED = {"pairs", "compute_seconds", "tally", "wave_transfers"}


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

    def with_relays(self, relays: Relays, sent: FloatArray) -> PlanLoad:
        """That of the plan with relays, without counting again what these do not change.

        Args:
            relays: keys that are passed on.
            sent: K/V tokens that each rank sends then.
        """
        load = PlanLoad(self.plan.with_relays(relays), self.cost, self.waves, self.overlapped, self.ranks)
        vars(load).update({name: vars(self)[name] for name in _UNRELATED & vars(self).keys()})
        vars(load)["key_tokens"] = np.array((sent, self.key_tokens[1]))
        return load

    @property
    def in_nodes(self) -> bool:
        """Whether exchanges inside nodes take another time than those between them."""
        return self.ranks.in_nodes(self.cost)

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
        return self.ranks.taken(self.tally.seconds)

    @property
    def longest_compute(self) -> float:
        """Seconds of the rank that computes longest."""
        return float(self.compute_seconds.max(initial=0.0))

    @property
    def query_tokens(self) -> FloatArray:
        """Query tokens that each rank sends and receives, shape (2, ranks); of some of the heads they count in part."""
        return self.tally.queries

    @cached_property
    def tally(self) -> Tally:
        """What ranks that are all alike compute, and what they exchange without waves, relays and a window."""
        return Tally.of(self.plan, self.cost)

    @cached_property
    def key_tokens(self) -> FloatArray:
        """K/V tokens that each rank sends and receives, each token once per destination: shape (2, ranks)."""
        relays = self.plan.relays
        if relays is None and self.plan.window is None and not self._in_waves:
            return self.tally.keys
        layout, sides = self._key_layout, []
        for keys in self.wave_transfers:
            came = keys.source != keys.server
            received = self._sum(keys.server[came], ((keys.end - keys.start) * layout.heads_of(keys.document))[came])
            sides.append(np.array((sent_key_tokens(keys, relays, layout), received)))
        return np.asarray(np.sum(sides, axis=0))

    @property
    def _key_layout(self) -> Layout:
        """The layout in which the documents of `wave_transfers` are numbered."""
        return self.plan.layout if self.waves is None else self.waves.plan.layout

    @property
    def _in_waves(self) -> bool:
        return self.waves is not None and self.waves.bytes is not None

    @cached_property
    def wave_transfers(self) -> list[KeyTransfers]:
        """What keys servers need, wave by wave; of documents that nobody exchanges, none."""
        if self.waves is None or not self._in_waves:
            return [self.plan.key_transfers(among=self.plan.exchanged)]
        return [self.waves.plan.key_transfers(among=self.waves.number == wave) for wave in range(self.waves.count)]

    @cached_property
    def exchange_bytes(self) -> FloatArray:
        """Bytes, forward and backward, that each rank exchanges as a home and as a server: shape (2, ranks)."""
        shape = self.cost.shape
        return np.asarray(self.query_tokens * shape.moved_query_bytes + self.key_tokens * shape.moved_key_bytes)

    @cached_property
    def node_bytes(self) -> NodeBytes:
        """The same bytes, inside nodes and between them; all between, if nodes are not told apart."""
        plan, shape = self.plan, self.cost.shape
        away = np.flatnonzero(plan.home != plan.server)
        rows = ((plan.end - plan.start) * plan.heads)[away]
        runs = [(plan.home[away], plan.server[away], rows * shape.moved_query_bytes)]
        for keys in self.wave_transfers:
            sent = senders(keys, plan.relays)
            tokens = (sent.end - sent.start) * self._key_layout.heads_of(sent.document)
            runs.append((sent.source, sent.server, tokens * shape.moved_key_bytes))
        source, server, amount = (np.concatenate(columns) for columns in zip(*runs, strict=True))
        return NodeBytes.of((source, server, amount), plan.layout.world_size, self.ranks.per_node or 1)

    @cached_property
    def _ends(self) -> Ends:
        """When ranks end."""
        if not self.plan.moved:
            nothing, compute = np.zeros((3, self.plan.layout.world_size)), self.compute_seconds
            return Ends(nothing[:2], nothing[2], float(compute.max(initial=0.0)))
        exchanges = EXCHANGES_PER_LAYER * (1 if self.waves is None else self.waves.count)
        exchanges += RELAY_EXCHANGES if self.plan.relays is not None else 0
        if not self.in_nodes:
            link = Link.of(self.cost, exchanges, self.overlapped)
            return Ends.of(self.compute_seconds, self.query_tokens, self.key_tokens, link)
        wire = np.array(wire_seconds(self.node_bytes, self.cost, self.ranks))
        compute, exchange = self.compute_seconds, wire.max(axis=0) + exchanges * self.cost.exchange_seconds
        ends = np.maximum(compute, exchange) if self.overlapped else compute + exchange
        return Ends(wire, exchange, float(ends.max(initial=0.0)))

    @property
    def wire_seconds(self) -> FloatArray:
        """Seconds that each rank sends and receives, without the fixed part of exchanges: shape (2, ranks)."""
        return self._ends.wire

    @property
    def exchange_seconds(self) -> FloatArray:
        """Seconds that each rank exchanges: the busier of its two roles, plus the fixed part of every exchange."""
        return self._ends.exchange

    @property
    def slowest_seconds(self) -> float:
        """Estimated seconds of the slowest rank: compute plus exchange, or plus what of the exchange is longer, if overlapped."""
        return self._ends.slowest


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
