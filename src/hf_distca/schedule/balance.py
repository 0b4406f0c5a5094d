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
from hf_distca.schedule.cost import CostModel, FloatArray, Price
from hf_distca.schedule.greedy import Greedy, Step
from hf_distca.schedule.heads import Heads, cut_grid
from hf_distca.schedule.layout import Layout
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
# Part of the tolerance by which a plan has to end before those tried earlier, which exchange less between nodes; and the same
# where exchanges are hidden, for then the estimate knows of no other gain.
_EQUAL = 0.2
_EQUAL_HIDDEN = 0.5
# Times the mean that a rank takes for plans with few servers to be tried.
_EXTREME = 12
# Part of its seconds that a plan of nodes may end after the least: no more ways are tried then. Less where exchanges are hidden.
_CLOSE = 0.03
_CLOSE_HIDDEN = 0.02


class _Way(NamedTuple):
    """A way to make plans.

    Attributes:
        least: seconds before which none of them can end.
        parts: parts of exchanges that count, one for each plan; or the seconds that ranks may take.
        steps: its moves, for each of these.
        exchange: what ranks exchange if nothing moves, as this way sees it.
        mixes: whether nodes are independent, so that each may have the best of several plans.
    """

    least: float
    parts: Sequence[float]
    steps: Callable[[float], list[Step]]
    exchange: npt.ArrayLike
    mixes: bool = False


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
    cost = cost.within(layout.longest)
    tries = _Tries(layout, cost, config, ranks, relayed and cost.window is None and config.max_transient_bytes is None)
    unmoved = tries.unmoved
    if not config.balance or layout.world_size < 2 or tries.hopeless:
        return unmoved.plan
    best, enough = unmoved, unmoved.slowest_seconds * (1 - config.min_gain)
    close = max(config.min_gain, _CLOSE_HIDDEN if config.ping_pong else _CLOSE) if config.min_gain else 0.0
    for way in tries.ways():
        if close and best is not unmoved and best.slowest_seconds * (1 - close) < tries.least:
            break
        if best.slowest_seconds * tries.earlier <= way.least:
            continue
        for load in tries.of(way):
            if load.slowest_seconds < best.slowest_seconds * tries.earlier and load.slowest_seconds <= enough:
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
    def mean(self) -> float:
        """Seconds of compute of each rank, if nothing moves and all end together."""
        return self.ranks.level(self.unmoved.compute_seconds)

    @cached_property
    def least(self) -> float:
        """Seconds before which the slowest rank seldom ends: it cannot end before
        the mean, and moves seldom save exchanges.
        """
        exchange = 0.0 if self.config.ping_pong else math.fsum(self.unmoved.exchange_seconds.tolist())
        return self.mean + exchange / self.layout.world_size

    @property
    def earlier(self) -> float:
        """Times the seconds of the best plan so far that another one has to end before."""
        return 1 - self.config.tolerance * (_EQUAL_HIDDEN if self.config.ping_pong else _EQUAL)

    @property
    def hopeless(self) -> bool:
        """True if no plan can gain enough: common in narrow bands, and for dealt documents."""
        seconds, tolerance = self.unmoved.compute_seconds, self.config.tolerance
        even = seconds.max() <= self.mean * (1 + tolerance) and seconds.min() >= self.mean * (1 - tolerance)
        return (
            even
            or self.unmoved.slowest_seconds * (1 - self.config.min_gain) < self.least
            # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
            or not Price.of(self.cost, self.config.tile).pair
        )

    @cached_property
    def greedy(self) -> Greedy:
        """The greedy planner, for documents cut on the grid that keeps slices long."""
        config, cost, layout, price = self.config, self.cost, self.layout, Price.of(self.cost, self.config.tile)
        heads = Heads.of(layout, price, cost, self.unmoved.compute_seconds, config.head_groups)
        if config.max_transient_bytes is None:  # which may allow no more than a tile of rows
            # Where nodes are evened out before ranks are and nothing else counts, both share the tolerance.
            shared = 0.5 if config.ping_pong and self.ranks.per_node is not None else 1.0
            price = price._replace(grid=cut_grid(price, heads, layout.longest, shared * config.tolerance * self.mean))
        transient = TransientBytes.of(cost.shape)
        ends = [transient.last_row(config.max_transient_bytes, price, groups) for groups in (heads.groups, 1)]
        serves = np.ones(layout.world_size, dtype=np.bool_) if config.serve_in_place else layout.query_tokens == 0
        return Greedy(layout, heads, price, np.array(self.ranks.each(layout.world_size)), ends, cost.window, serves)

    def ways(self) -> list[_Way]:
        """Ways to make plans, those that exchange the least between nodes first."""
        every, size, unmoved = self.layout.world_size, self.ranks.per_node, self.unmoved
        far, longest = self.cost.exchange_bytes_per_second, float(unmoved.compute_seconds.max())
        parts = (0.0,) if self.config.ping_pong or math.isinf(far) else (0.0, 1.0)
        blind = replace(unmoved, ranks=replace(self.ranks, per_node=None)).exchange_seconds
        one_group = [_Way(self.mean, parts, lambda part: [self._step(far, part, every)], blind)]
        if not self.relayed and longest >= _EXTREME * self.mean:
            # One document outweighs all others: the fewer servers, the less its home has to send.
            caps = [longest / 2 / 1.4**n for n in range(math.ceil(math.log(longest / (4 * self.mean), 1.4)))]
            one_group.append(_Way(self.mean, caps, lambda cap: [self._step(far, 0.0, every)._replace(cap=cap)], 0.0))
        if size is None:
            return one_group

        def inside(part: float) -> list[Step]:
            return [self._step(self.cost.node_bytes_per_second or far, part, size)]

        def between(part: float) -> list[Step]:
            step = self._step(far, part, every)
            return [step._replace(tolerance=_OF_NODES * step.tolerance, per_node=size), *inside(part)]

        speeds = self.greedy.speeds.reshape(-1, size)
        longest = float(((unmoved.compute_seconds.reshape(-1, size) * speeds).sum(axis=1) / speeds.sum(axis=1)).max())
        by_node = _Way(longest, parts, inside, unmoved.exchange_seconds, mixes=True)
        by_nodes = _Way(self.mean, parts[-1:], between, unmoved.exchange_seconds)
        if longest <= self.mean * (1 + self.config.tolerance):
            return [by_node, by_nodes, *one_group]
        near = by_nodes._replace(steps=lambda part: [self._step(far, part, every)._replace(near=size)])
        return [by_nodes, near, *one_group, by_node]

    def _step(self, bytes_per_second: float, part: float, size: int) -> Step:
        """Moves in groups of so many ranks, where so much of an exchange counts."""
        price = self.greedy.price
        served = price.with_exchange(bytes_per_second / part) if part else price
        return Step(Prices(served, price), max(self.config.tolerance, _FINEST_OF_BOTH if part else _FINEST), size)

    def of(self, way: _Way) -> list[PlanLoad]:
        """Plans of a way: for compute alone, and with exchanges as far as these count."""
        greedy, compute, parts = self.greedy, self.unmoved.compute_seconds, list(way.parts)
        group = (self.ranks.per_node if way.mixes else None) or len(compute)
        rows, loads = [], list[PlanLoad]()

        def latest(seconds: FloatArray) -> FloatArray:
            return np.asarray(seconds.reshape(-1, group).max(axis=1))

        for part in parts:
            rows.append(greedy.even_out(way.steps(part), compute + np.multiply(part, way.exchange)))
            loads.append(self.weighed(greedy.plan(rows[-1])))
            if not part and self.config.ping_pong:
                late = latest(loads[0].exchange_seconds) > latest(loads[0].compute_seconds)
                parts += _HIDDEN if late.any() else ()
        ends = np.array([latest(load.ends) for load in [*loads, self.unmoved]])
        if way.mixes and ends.min(axis=0).max() < ends[:-1].max(axis=1).min() * self.earlier:
            rows.append(greedy.even_out([], compute))
            loads.append(self.weighed(greedy.plan(greedy.mixed(rows, np.repeat(ends.argmin(axis=0), group)))))
        return loads

    def weighed(self, plan: Plan, least: float = 0.0) -> PlanLoad:
        """Weigh a plan, with forwarded keys if they gain at least so much."""
        config, cost = self.config, self.cost
        waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
        load = PlanLoad(plan, cost, waves, overlapped=config.ping_pong, ranks=self.ranks)
        return relieve(load, least) if self.relayed else load
