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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel, FloatArray, Price
from hf_distca.schedule.greedy import Bound, Greedy, Levels, Step
from hf_distca.schedule.heads import Heads, cut_grid
from hf_distca.schedule.layout import BoolArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.moves import Prices
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.relays import relieve
from hf_distca.schedule.waves import TransientBytes, Waves

__all__ = ["balance"]

# The finest band that is aimed at: below, tiles are too coarse. And the finest for compute and exchange together.
_FINEST = 0.002
_FINEST_OF_BOTH = 0.02
# Part of the band of ranks that nodes are evened out to: what they differ by adds to what their ranks do.
_OF_NODES = 0.25
# Of exchanges that hide behind compute, the parts that are tried to count where they take longer.
_HIDDEN = (0.25, 0.5)
# Part of its seconds that a plan has to end before those tried earlier, which exchange less between nodes; and where exchanges
# are hidden, the part of the tolerance, for then the estimate knows of no other gain.
_EQUAL = 0.002
_EQUAL_HIDDEN = 0.5
# Part of its seconds that a plan of nodes may end after the least: no more ways are tried then.
_CLOSE = 0.03
# Times the mean that a rank takes for plans with few servers to be tried.
_EXTREME = 12


class _Way(NamedTuple):
    """A way to make plans, with a lower limit of the seconds after which they can end."""

    least: float
    loads: Callable[[], list[PlanLoad]]


def balance(layout: Layout, cost: CostModel, config: DistCAConfig, ranks: Ranks = ALIKE, *, relayed: bool = True) -> Plan:
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
        relayed: whether servers may forward keys.

    Raises:
        ConfigError: if `ranks` and the layout have different numbers of ranks, or if not even a
            tile fits the bound.
    """
    ranks.check(layout.world_size)
    if ranks.per_node == layout.world_size and cost.node_bytes_per_second is not None:  # all links are those inside a node
        cost, ranks = replace(cost, exchange_bytes_per_second=cost.node_bytes_per_second), replace(ranks, per_node=None)
    ranks = ranks.seen_by(cost)
    if cost.window is not None and cost.window >= layout.longest:
        cost = replace(cost, window=None)
    tries = _Tries(layout, cost, config, ranks, relayed and cost.window is None and config.max_transient_bytes is None)
    unmoved = tries.unmoved
    if not config.balance or layout.world_size < 2 or tries.hopeless:
        return unmoved.plan
    best, enough = unmoved, unmoved.slowest_seconds * (1 - config.min_gain)
    close = max(config.min_gain, _CLOSE if config.min_gain else 0.0)
    equal = max(_EQUAL, _EQUAL_HIDDEN * config.tolerance) if config.ping_pong else _EQUAL
    for way in tries.ways():
        if close and best is not unmoved and best.slowest_seconds * (1 - close) < tries.least:
            break
        if best.slowest_seconds * (1 - equal) <= way.least:
            continue
        for load in way.loads():
            if load.slowest_seconds < best.slowest_seconds * (1 - equal) and load.slowest_seconds <= enough:
                best = load
    return best.plan


@dataclass(frozen=True)
class _Tries:
    """Plans for a layout, made and weighed; for the attributes see `balance`."""

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    relayed: bool

    @cached_property
    def unmoved(self) -> PlanLoad:
        """Load of the plan that moves nothing, except that keys are
        forwarded if that alone gains enough.
        """
        return self.weighed(Plan.local(self.layout, self.cost.window), self.config.min_gain)

    @cached_property
    def serves(self) -> BoolArray:
        """True for each rank that may compute slices of others, (ranks,)."""
        every = np.ones(self.layout.world_size, dtype=np.bool_)
        return every if self.config.serve_in_place else self.layout.query_tokens == 0

    @cached_property
    def mean(self) -> float:
        """Seconds of compute of each rank, if nothing moves and all end together."""
        return self.ranks.level(self.unmoved.compute_seconds.tolist())

    @cached_property
    def least(self) -> float:
        """Seconds before which the slowest rank seldom ends: it cannot end before
        the mean, and moves seldom save exchanges.
        """
        exchange = 0.0 if self.config.ping_pong else math.fsum(self.unmoved.exchange_seconds.tolist())
        return self.mean + exchange / self.layout.world_size

    @property
    def hopeless(self) -> bool:
        """True if no plan can gain enough: common in narrow bands, and for dealt documents."""
        seconds, tolerance = self.unmoved.compute_seconds, self.config.tolerance
        # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
        if not Price.of(self.cost, self.config.tile).pair or (
            seconds.max() <= self.mean * (1 + tolerance) and seconds.min() >= self.mean * (1 - tolerance)
        ):
            return True
        return self.unmoved.slowest_seconds * (1 - self.config.min_gain) < self.least

    def ways(self) -> list[_Way]:
        """List the ways to make plans, those with the least exchange between nodes first."""
        every = _Way(self.mean, self._of_all)
        if (size := self.ranks.per_node) is None:
            return [every]
        speeds = np.array(self.ranks.each(self.layout.world_size)).reshape(-1, size)
        nodes = (self.unmoved.compute_seconds.reshape(-1, size) * speeds).sum(axis=1) / speeds.sum(axis=1)
        longest = float(nodes.max())
        inside, between = _Way(longest, self._inside), _Way(self.mean, self._by_nodes)
        if longest <= self.mean * (1 + self.config.tolerance):
            return [inside, between, every]
        return [between, _Way(self.mean, partial(self._of_all, size)), every, inside]

    @cached_property
    def price(self) -> Price:
        """Prices of tasks, for documents cut on the grid that keeps slices long."""
        config, price = self.config, Price.of(self.cost, self.config.tile)
        if config.max_transient_bytes is not None:  # which may allow no more than a tile of rows
            return price
        heads = Heads.of(self.layout, price, self.cost, self.unmoved.compute_seconds, config.head_groups)
        # Where nodes are evened out before ranks are and nothing else counts, both share the tolerance.
        shared = 0.5 if config.ping_pong and self.ranks.per_node is not None else 1.0
        tolerated = shared * config.tolerance * self.mean
        return price._replace(grid=cut_grid(price, heads, self.layout.longest, tolerated))

    def _greedy(self, size: int | None) -> Greedy:
        """Make the greedy planner for groups of so many ranks, or for all."""
        cost, config = self.cost if size is None else self.near, self.config
        heads = Heads.of(self.layout, self.price, cost, self.unmoved.compute_seconds, config.head_groups, size)
        bound = Bound.of(config.max_transient_bytes, TransientBytes.of(cost.shape))
        return Greedy(self.layout, heads, replace(self.ranks, per_node=None), bound, cost.window, self.serves)

    @cached_property
    def near(self) -> CostModel:
        """Cost model of exchanges inside a node."""
        return replace(
            self.cost, exchange_bytes_per_second=self.cost.node_bytes_per_second or self.cost.exchange_bytes_per_second
        )

    @cached_property
    def by_nodes(self) -> Greedy:
        return self._greedy(self.ranks.per_node)

    def _steps(self, part: float) -> tuple[FloatArray, list[Step]]:
        """Return the seconds of ranks, and the moves between nodes and then inside
        each, where `part` of an exchange counts.
        """
        unmoved, price, size, every = self.unmoved, self.price, self.ranks.per_node or 1, self.layout.world_size
        if not part or math.isinf(self.cost.exchange_bytes_per_second):
            far = near = price
        else:
            far, near = (price.with_exchange(cost.exchange_bytes_per_second / part) for cost in (self.cost, self.near))
        band = max(self.config.tolerance, _FINEST_OF_BOTH if part else _FINEST)
        steps = [Step(Prices(far, price), _OF_NODES * band, every, size), Step(Prices(near, price), band, size)]
        return unmoved.compute_seconds + part * unmoved.exchange_seconds, steps

    def _inside(self) -> list[PlanLoad]:
        """Make plans that move slices inside nodes, and one that
        combines the best of them for each node.
        """
        greedy, size, rows, loads = self.by_nodes, self.ranks.per_node or 1, [], []

        def add(part: float) -> PlanLoad:
            seconds, steps = self._steps(part)
            rows.append(greedy.even_out(steps[1:], seconds))
            loads.append(self.weighed(greedy.plan(rows[-1])))
            return loads[-1]

        first = add(0.0)
        late = first.exchange_seconds.reshape(-1, size).max(axis=1) > first.compute_seconds.reshape(-1, size).max(axis=1)
        for part in (_HIDDEN if late.any() else ()) if self.config.ping_pong else (1.0,):
            add(part)
        ends = np.array([load.ends.reshape(-1, size).max(axis=1) for load in [*loads, self.unmoved]])
        best = float(min(load.slowest_seconds for load in loads))
        if float(ends.min(axis=0).max()) < best * (1 - _EQUAL):
            rows.append(greedy.even_out([], self.unmoved.compute_seconds))
            loads.append(self.weighed(greedy.plan(greedy.mixed(rows, np.repeat(ends.argmin(axis=0), size)))))
        return loads

    def _by_nodes(self) -> list[PlanLoad]:
        """Make plans that move slices between nodes until these are even, and then inside each."""
        greedy = self.by_nodes
        # Where exchanges take their time, evening out compute alone between nodes gains nothing.
        seconds, steps = self._steps(0.0 if self.config.ping_pong else 1.0)
        return [self.weighed(greedy.plan(greedy.even_out(steps, seconds)))]

    def _of_all(self, near: int = 0) -> list[PlanLoad]:
        """Make plans that move slices in all ranks as one group, with a
        preference for servers in nodes of so many ranks.
        """
        config, cost, size, greedy = self.config, self.cost, self.layout.world_size, self.of_all
        seconds, same, loads = self.unmoved.compute_seconds, Prices(self.price, self.price), []

        def add(prices: Prices, seconds: FloatArray, levels: Levels | float) -> PlanLoad:
            rows = greedy.even_out([Step(prices, levels, size, near=near)], seconds)
            loads.append(self.weighed(greedy.plan(rows)))
            return loads[-1]

        parts: tuple[float, ...] = () if math.isinf(cost.exchange_bytes_per_second) else (1.0,)
        if config.ping_pong or not near:
            load = add(same, seconds, max(config.tolerance, _FINEST))
            if config.ping_pong and parts:
                parts = _HIDDEN if load.exchange_seconds.max() > load.compute_seconds.max() else ()
        exchange = (self.unmoved if near else replace(self.unmoved, ranks=greedy.ranks)).exchange_seconds
        for part in parts:
            both = seconds + part * exchange
            prices = Prices(self.price.with_exchange(cost.exchange_bytes_per_second / part), self.price)
            add(prices, both, max(config.tolerance, _FINEST_OF_BOTH))
        # One document that outweighs all others, and no relays: the fewer servers, the less its home has to send.
        cap = float(seconds.max()) / 2
        extreme = not self.relayed and not near and 2 * cap >= _EXTREME * self.mean
        while extreme and cap > 2 * self.mean:
            add(same, seconds, Levels(0.0, 0.95 * cap, cap, 0.97 * cap, cap))
            cap /= 1.4
        return loads

    @cached_property
    def of_all(self) -> Greedy:
        return self._greedy(None)

    def weighed(self, plan: Plan, least: float = 0.0) -> PlanLoad:
        """Weigh a plan, with forwarded keys if they gain at least so much."""
        config, cost = self.config, self.cost
        waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
        load = PlanLoad(plan, cost, waves, overlapped=config.ping_pong, ranks=self.ranks)
        return relieve(load, least) if self.relayed else load
