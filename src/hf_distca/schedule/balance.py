"""`balance`: assigns query rows to attention servers.

1. Weigh the plan that moves nothing; if no plan can gain enough, that is it.
2. Choose the documents that may be split by heads, and the grid that rows are cut on
   (`schedule.heads`).
3. Set the level at which each rank should end, and move slices until they do (`schedule.greedy`,
   `schedule.moves`): inside each node alone; until nodes are even and then inside each; and in all
   ranks as one group, with servers of the same node preferred and without. Each is done for compute
   alone and, unless exchanges are hidden behind it, for compute and exchange together.
4. Let servers forward keys where that makes the slowest rank end earlier (`schedule.relays`).
5. Weigh the plans (`schedule.load`), and take the one whose slowest rank ends first, if it gains
   enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel, MarginalCost
from hf_distca.schedule.greedy import BalanceStep, GreedyPlanner, PlanRows
from hf_distca.schedule.heads import HeadSplit, choose_grid
from hf_distca.schedule.layout import FloatArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.moves import MarginalCosts
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.relays import add_relays
from hf_distca.schedule.waves import TransientBytes, Waves

# The finest band that is aimed at: below, tiles are too coarse. And the finest for compute and
# exchange together.
_FINEST_TOLERANCE = 0.002
_FINEST_TOLERANCE_WITH_EXCHANGE = 0.02
# Part of the band of ranks that nodes are evened out to: what they differ by adds to what their
# ranks do.
_NODE_TOLERANCE_PART = 0.25
# Of exchanges that hide behind compute, the parts that are tried to count where they take longer.
_HIDDEN_EXCHANGE_PARTS = (0.25, 0.5)
# Part of the tolerance by which a plan has to end before those tried earlier, which exchange less
# between nodes.
_TIE_PART = 0.2
# Times the mean that a rank takes for plans with few servers to be tried.
_EXTREME_RATIO = 12
# Part of its seconds that a plan of nodes may end after the least: nothing else is tried then.
_CLOSE_PART = 0.02


class _PlanStrategy(NamedTuple):
    """A strategy of making plans.

    Attributes:
        lower_bound: seconds before which none of them can end.
        exchange_parts: parts of exchanges that count, one for each plan; or the seconds that ranks
            may take.
        make_steps: its moves, for each of these.
        unmoved_exchange: what ranks exchange if nothing moves, as this strategy sees it.
        picks_per_node: whether nodes are independent, so that each may have the best of several
            plans.
    """

    lower_bound: float
    exchange_parts: Sequence[float]
    make_steps: Callable[[float], list[BalanceStep]]
    unmoved_exchange: npt.ArrayLike
    picks_per_node: bool = False


def balance(
    layout: Layout,
    cost: CostModel,
    config: DistCAConfig,
    ranks: Ranks = UNIFORM_RANKS,
    *,
    allow_relays: bool = True,
) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange;
    see `PlanLoad`); where it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and their ranks; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with
            its window, or for layers without one if no document is longer than the window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `head_groups`, `max_transient_bytes`,
            `ping_pong` and `serve_in_place` are read. A tolerance below 0.002 counts as 0.002. With
            head groups, the layout of the plan is `layout` with some documents split by heads. With
            a bound, only slices are moved of which a tile fits it. With `ping_pong` the layout is
            that of a nano-batch, whose exchange costs only what is longer than the compute beside
            it.
        ranks: properties of the ranks; the same on every rank. A slower one gets less, so that all
            end together.
        allow_relays: whether servers may forward keys.

    Raises:
        ConfigError: if `ranks` and the layout have different numbers of ranks, or if not even a
            tile fits the bound.
    """
    ranks.check_count(layout.world_size)
    # All links are those inside a node.
    if ranks.per_node == layout.world_size and cost.node_bytes_per_second is not None:
        cost = replace(cost, exchange_bytes_per_second=cost.node_bytes_per_second)
        ranks = replace(ranks, per_node=None)
    ranks = ranks.without_irrelevant_nodes(cost)
    cost = cost.without_unused_window(layout.longest)
    trials = PlanTrials(
        layout,
        cost,
        config,
        ranks,
        allow_relays and cost.window is None and config.max_transient_bytes is None,
    )
    unmoved_load = trials.unmoved_load
    if not config.balance or layout.world_size < 2 or trials.cannot_gain:
        return unmoved_load.plan
    best = unmoved_load
    required_seconds = unmoved_load.slowest_seconds * (1 - config.min_gain)
    close_part = max(config.min_gain, _CLOSE_PART) if config.min_gain else 0.0
    for strategy in trials.list_strategies():
        if (
            close_part
            and best is not unmoved_load
            and best.slowest_seconds * (1 - close_part) < trials.lower_bound
        ):
            break
        if best.slowest_seconds * trials.improvement_factor <= strategy.lower_bound:
            continue
        for load in trials.weigh_strategy(strategy):
            if (
                load.slowest_seconds < best.slowest_seconds * trials.improvement_factor
                and load.slowest_seconds <= required_seconds
            ):
                best = load
    return best.plan


@dataclass(frozen=True)
class PlanTrials:
    """Plans for a layout, made and weighed; for the attributes see `balance`."""

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    allow_relays: bool

    @cached_property
    def unmoved_load(self) -> PlanLoad:
        """Load of the plan that moves nothing, except that keys are forwarded if that alone gains
        enough.
        """
        return self.weigh_plan(Plan.make_local(self.layout, self.cost.window), self.config.min_gain)

    @cached_property
    def mean_seconds(self) -> float:
        """Seconds of compute of each rank, if nothing moves and all end together."""
        return self.ranks.compute_even_seconds(self.unmoved_load.compute_seconds)

    @cached_property
    def lower_bound(self) -> float:
        """Seconds before which the slowest rank seldom ends: it cannot end before
        the mean, and moves seldom save exchanges.
        """
        exchange = (
            0.0 if self.config.ping_pong else math.fsum(self.unmoved_load.exchange_seconds.tolist())
        )
        return self.mean_seconds + exchange / self.layout.world_size

    @property
    def improvement_factor(self) -> float:
        """Times the seconds of the best plan so far that another one has to end before."""
        return 1 - self.config.tolerance * _TIE_PART

    @property
    def cannot_gain(self) -> bool:
        """True if no plan can gain enough: common in narrow bands, and for dealt documents."""
        differences = np.abs(self.unmoved_load.compute_seconds - self.mean_seconds)
        return (
            differences.max() <= self.mean_seconds * self.config.tolerance
            or self.unmoved_load.slowest_seconds * (1 - self.config.min_gain) < self.lower_bound
            # Without a cost per pair, attention is as long as its tokens are many: there is nothing
            # that moving could gain.
            or not MarginalCost.from_cost_model(self.cost, self.config.tile).pair
        )

    @cached_property
    def planner(self) -> GreedyPlanner:
        """The greedy planner of the layout."""
        config = self.config
        cost = self.cost
        layout = self.layout
        marginal = MarginalCost.from_cost_model(self.cost, self.config.tile)
        heads = HeadSplit.find(
            layout, marginal, cost, self.unmoved_load.compute_seconds, config.head_groups
        )
        transient = TransientBytes.from_shape(cost.shape)
        return GreedyPlanner(
            layout,
            heads,
            np.array(self.ranks.list_speeds(layout.world_size)),
            [
                transient.find_last_row(config.max_transient_bytes, marginal, groups)
                for groups in (heads.groups, 1)
            ],
            cost.window,
            (layout.query_tokens == 0) | config.serve_in_place,
        )

    @property
    def exchange_parts(self) -> tuple[float, ...]:
        """Parts of exchanges that count in one plan after another: none, and all if they take
        time.
        """
        is_free = self.config.ping_pong or math.isinf(self.cost.exchange_bytes_per_second)
        return (0.0,) if is_free else (0.0, 1.0)

    def list_strategies(self) -> list[_PlanStrategy]:
        """List strategies, those that exchange the least between nodes first."""
        world_size = self.layout.world_size
        node_size = self.ranks.per_node
        unmoved_load = self.unmoved_load
        rate = self.cost.exchange_bytes_per_second
        longest = float(unmoved_load.compute_seconds.max())
        one_group = [
            _PlanStrategy(
                self.mean_seconds,
                self.exchange_parts,
                lambda part: [self.make_step(rate, part, world_size)],
                replace(unmoved_load, ranks=replace(self.ranks, per_node=None)).exchange_seconds,
            )
        ]
        if not self.allow_relays and longest >= _EXTREME_RATIO * self.mean_seconds:
            # One document outweighs all others: the fewer servers, the less its home has to send.
            caps = [
                longest / 2 / 1.4**n
                for n in range(math.ceil(math.log(longest / (4 * self.mean_seconds), 1.4)))
            ]
            one_group.append(
                _PlanStrategy(
                    self.mean_seconds,
                    caps,
                    lambda cap: [self.make_step(rate, 0.0, world_size)._replace(cap=cap)],
                    0.0,
                )
            )
        if node_size is None:
            return one_group

        def make_inner_steps(part: float) -> list[BalanceStep]:
            return [self.make_step(self.cost.node_bytes_per_second or rate, part, node_size)]

        def make_outer_steps(part: float) -> list[BalanceStep]:
            step = self.make_step(rate, part, world_size)
            return [
                step._replace(tolerance=_NODE_TOLERANCE_PART * step.tolerance, per_node=node_size),
                *make_inner_steps(part),
            ]

        speeds = self.planner.speeds.reshape(-1, node_size)
        node_work = (unmoved_load.compute_seconds.reshape(-1, node_size) * speeds).sum(axis=1)
        slowest_node_seconds = float((node_work / speeds.sum(axis=1)).max())
        exchange = unmoved_load.exchange_seconds
        node_by_node = _PlanStrategy(
            slowest_node_seconds,
            self.exchange_parts,
            make_inner_steps,
            exchange,
            picks_per_node=True,
        )
        nodes_first = _PlanStrategy(
            self.mean_seconds, self.exchange_parts[-1:], make_outer_steps, exchange
        )
        if slowest_node_seconds <= self.mean_seconds * (1 + self.config.tolerance):
            return [node_by_node, nodes_first, *one_group]
        prefers_node = nodes_first._replace(
            make_steps=lambda part: [
                self.make_step(rate, part, world_size)._replace(preferred_node_size=node_size)
            ]
        )
        return [nodes_first, prefers_node, *one_group, node_by_node]

    def make_step(self, bytes_per_second: float, part: float, size: int) -> BalanceStep:
        """Make the step of moves in groups of so many ranks, where so much of an exchange
        counts.
        """
        config = self.config
        marginal = MarginalCost.from_cost_model(self.cost, self.config.tile)
        tolerance = max(
            config.tolerance, _FINEST_TOLERANCE_WITH_EXCHANGE if part else _FINEST_TOLERANCE
        )
        if config.max_transient_bytes is None:  # which may allow no more than a tile of rows
            # Where nodes are evened out before ranks are and nothing else counts, both share the
            # tolerance. At a tolerance of 0, slices are as short as they have to be.
            marginal = marginal._replace(
                grid=choose_grid(
                    marginal,
                    self.planner.heads,
                    self.layout.longest,
                    (0.5 if config.ping_pong and self.ranks.per_node else 1.0)
                    * (tolerance if config.tolerance else 0.0)
                    * self.mean_seconds,
                )
            )
        server_cost = marginal.with_exchange(bytes_per_second / part) if part else marginal
        return BalanceStep(MarginalCosts(server_cost, marginal), tolerance, size)

    def weigh_strategy(self, strategy: _PlanStrategy) -> list[PlanLoad]:
        """Make and weigh the plans of a strategy: for compute alone, and with exchanges as far as
        these count.
        """
        planner, compute = self.planner, self.unmoved_load.compute_seconds
        group = (self.ranks.per_node if strategy.picks_per_node else None) or len(compute)
        parts = list(strategy.exchange_parts)
        rows = list[PlanRows]()
        loads = list[PlanLoad]()

        def find_latest(seconds: FloatArray) -> FloatArray:
            return np.asarray(seconds.reshape(-1, group).max(axis=1))

        for part in parts:
            seconds = compute + np.multiply(part, strategy.unmoved_exchange)
            rows.append(planner.even_out(strategy.make_steps(part), seconds))
            load = self.weigh_plan(planner.make_plan(rows[-1]))
            loads.append(load)
            if not part and self.config.ping_pong:
                exceeds = find_latest(load.exchange_seconds) > find_latest(load.compute_seconds)
                parts += _HIDDEN_EXCHANGE_PARTS if exceeds.any() else ()
        if strategy.picks_per_node:
            ends = np.array([find_latest(load.end_seconds) for load in [*loads, self.unmoved_load]])
            # The best plan of each node, if they end before the best plan of all.
            if ends.min(axis=0).max() < ends[:-1].max(axis=1).min() * self.improvement_factor:
                rows.append(planner.even_out([], compute))
                best = planner.combine_rows(rows, np.repeat(ends.argmin(axis=0), group))
                loads.append(self.weigh_plan(planner.make_plan(best)))
        return loads

    def weigh_plan(self, plan: Plan, min_gain: float = 0.0) -> PlanLoad:
        """Weigh a plan, with forwarded keys if they gain at least so much."""
        config = self.config
        waves = Waves.split_plan(
            plan, self.cost.shape, config.tile, config.max_transient_bytes, config.head_groups
        )
        load = PlanLoad(plan, self.cost, waves, overlapped=config.ping_pong, ranks=self.ranks)
        return add_relays(load, min_gain) if self.allow_relays else load
