"""`balance`: which attention server computes which query rows.

1. Weigh the plan that moves nothing; if no plan can gain enough, that is it.
2. Choose the documents that may be split by heads (`schedule.heads`).
3. Set levels that ranks should end at (`schedule.greedy`).
4. Even out: slices move until ranks are at their levels (`schedule.moves`).
5. Let servers pass keys on where that makes the slowest rank earlier (`schedule.relays`).
6. Do 3 to 5 for compute alone and, unless exchanges are hidden behind it, for compute and exchange together. Weigh the plans
   (`schedule.load`), and take the one whose slowest rank ends first, if it gains enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel, FloatArray, Price
from hf_distca.schedule.greedy import Bound, Greedy, Levels, Step
from hf_distca.schedule.heads import Heads
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
# Of exchanges that hide behind compute, the parts that are tried to count where they take longer.
_HIDDEN = (0.25, 0.5)
# Part of its seconds that a plan has to end before those tried earlier, which exchange less, between nodes above all.
_EQUAL = 0.002
# Times the mean that a rank takes for plans with few servers to be tried.
_EXTREME = 12


def balance(layout: Layout, cost: CostModel, config: DistCAConfig, ranks: Ranks = ALIKE, *, relayed: bool = True) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange; see `PlanLoad`); where
    it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and where they lie; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with its window, or for layers
            without one if no document is longer than the window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `head_groups`, `max_transient_bytes`, `ping_pong` and
            `serve_in_place` are read. A tolerance below 0.002 counts as 0.002. With head groups, the layout of the plan is
            `layout` with some documents split by heads. With a bound, only slices of which a tile fits it are moved. With
            `ping_pong` the layout is that of a nano-batch, whose exchange costs only what is longer than the compute beside it.
        ranks: what ranks are like; the same on every rank. A slower one gets less, so that all end together.
        relayed: whether servers may pass keys on.

    Raises:
        ConfigError: if `ranks` speaks of another number of ranks than the layout, or if not even a tile fits the bound.
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
    for load in tries.loads():
        if load.slowest_seconds < best.slowest_seconds * (1 - _EQUAL) and load.slowest_seconds <= enough:
            best = load
    return best.plan


@dataclass(frozen=True)
class _Tries:
    """Plans for a layout that are made and weighed; for the attributes see `balance`."""

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    relayed: bool

    @cached_property
    def unmoved(self) -> PlanLoad:
        """Nothing moves, but keys are passed on if that alone gains enough."""
        return self.weighed(Plan.local(self.layout, self.cost.window), self.config.min_gain)

    @cached_property
    def serves(self) -> BoolArray:
        """Of each rank whether it may compute slices of others."""
        every = np.ones(self.layout.world_size, dtype=np.bool_)
        return every if self.config.serve_in_place else self.layout.query_tokens == 0

    @property
    def hopeless(self) -> bool:
        """Whether no plan can gain enough: common in narrow bands, and where documents were dealt."""
        cost, seconds = self.cost, self.unmoved.compute_seconds.tolist()
        mean, tolerance = self.ranks.level(seconds), self.config.tolerance
        # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
        if not Price.of(cost, self.config.tile).pair or (
            max(seconds) <= mean * (1 + tolerance) and min(seconds) >= mean * (1 - tolerance)
        ):
            return True
        # The slowest rank cannot end before the mean, and moving work seldom saves exchanges.
        if not self.config.ping_pong:
            mean += math.fsum(self.unmoved.exchange_seconds.tolist()) / self.layout.world_size
        return self.unmoved.slowest_seconds * (1 - self.config.min_gain) < mean

    def loads(self) -> list[PlanLoad]:
        """Plans that even out compute, and compute and exchange together: node by node, then between nodes, and as one group."""
        loads = []
        if self.ranks.per_node is not None:
            loads += self._by_nodes()
        return loads + self._of_all()

    def _by_nodes(self) -> list[PlanLoad]:
        """Plans made node by node, and those with moves between nodes after that."""
        cost, config, unmoved = self.cost, self.config, self.unmoved
        seconds, size, world_size = unmoved.compute_seconds, self.ranks.per_node or 1, self.layout.world_size
        inside = replace(cost, exchange_bytes_per_second=cost.node_bytes_per_second or cost.exchange_bytes_per_second)
        price = Price.of(cost, config.tile)
        heads = Heads.of(self.layout, price, inside, seconds, config.head_groups, size)
        greedy = Greedy(self.layout, heads, replace(self.ranks, per_node=None), self.bound, cost.window, self.serves)
        near, far = (price.with_exchange(one.exchange_bytes_per_second) for one in (inside, cost))
        def steps(near: Price, far: Price, finest: float) -> list[Step]:
            levels = self._levels(finest)
            return [Step(Prices(far, price), levels, world_size, size), Step(Prices(near, price), levels, size)]

        ways = [(steps(price, price, _FINEST), seconds)]
        if not config.ping_pong:
            ways.append((steps(near, far, _FINEST_OF_BOTH), seconds + unmoved.exchange_seconds))
        rows = [greedy.even_out(steps[1:], before) for steps, before in ways]
        several = [self.weighed(greedy.plan(each)) for each in rows]
        if len(rows) > 1:
            ends = np.array([load.ends.reshape(-1, size).max(axis=1) for load in several])
            chosen = np.repeat(ends.argmin(axis=0), size)
            several.append(self.weighed(greedy.plan(greedy.mixed(rows, chosen))))
        return several + [self.weighed(greedy.plan(greedy.even_out(steps, before))) for steps, before in ways]

    @cached_property
    def bound(self) -> Bound:
        return Bound.of(self.config.max_transient_bytes, TransientBytes.of(self.cost.shape))

    def _of_all(self) -> list[PlanLoad]:
        """Plans of one group; where nodes matter, also as if they did not."""
        cost, config, seconds, size = self.cost, self.config, self.unmoved.compute_seconds, self.layout.world_size
        price, free = Price.of(cost, config.tile), math.isinf(cost.exchange_bytes_per_second)
        heads = Heads.of(self.layout, price, cost, seconds, config.head_groups)
        same = Prices(price, price)
        bound = self.bound
        alone = replace(self.ranks, per_node=None)
        loads = []
        for ranks in (alone,):
            greedy = Greedy(self.layout, heads, ranks, bound, cost.window, self.serves)
            load = self.weighed(greedy.plan(greedy.even_out([Step(same, self._levels(_FINEST), size)], seconds)))
            loads.append(load)
            hidden = config.ping_pong and load.exchange_seconds.max() <= load.compute_seconds.max()
            if not free and not hidden:
                unmoved = self.unmoved if ranks == self.ranks else replace(self.unmoved, ranks=ranks)
                for part in _HIDDEN if config.ping_pong else (1.0,):
                    both = seconds + part * unmoved.exchange_seconds
                    exchanged = Prices(price.with_exchange(cost.exchange_bytes_per_second / part), price)
                    step = Step(exchanged, self._levels(_FINEST_OF_BOTH), size)
                    loads.append(self.weighed(greedy.plan(greedy.even_out([step], both))))
            # One document that outweighs all others, and no relays: the fewer servers, the less its home has to send.
            cap, mean = float(seconds.max()) / 2, self.ranks.level(seconds.tolist())
            extreme = not self.relayed and 2 * cap >= _EXTREME * mean
            while extreme and cap > 2 * mean:
                levels = Levels(0.0, 0.95 * cap, cap, 0.97 * cap, cap)
                step = Step(same, lambda *_, levels=levels: levels, size)
                loads.append(self.weighed(greedy.plan(greedy.even_out([step], seconds))))
                cap /= 1.4
        return loads

    def _levels(self, tolerance: float) -> Callable[[FloatArray, slice], Levels]:
        """Levels for ranks that take so long. Who neither serves nor is above the mean stays as it is, and does not count."""

        def levels(seconds: FloatArray, group: slice) -> Levels:
            own, speeds, serves = seconds[group], np.array(self.ranks.each(len(seconds)))[group], self.serves[group]
            evened = np.ones(len(own), dtype=np.bool_)
            while not self.config.serve_in_place:
                mean = (own * speeds)[evened].sum() / speeds[evened].sum()
                below = evened & ~serves & (own < mean)
                if not below.any():
                    break
                evened &= ~below
            ranks = ALIKE if self.ranks.speeds is None else Ranks.of(speeds[evened])
            return Levels.of(own[evened].tolist(), ranks, max(self.config.tolerance, tolerance))

        return levels

    def weighed(self, plan: Plan, least: float = 0.0) -> PlanLoad:
        """The load of a plan, with keys passed on if that gains so much."""
        config, cost = self.config, self.cost
        waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
        load = PlanLoad(plan, cost, waves, overlapped=config.ping_pong, ranks=self.ranks)
        return relieve(load, least) if self.relayed else load
