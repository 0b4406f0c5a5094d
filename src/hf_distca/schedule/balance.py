"""`balance`: which attention server computes which query rows.

`Greedy` evens out the estimated compute seconds of the ranks for as few bytes as it can; `balance` decides, by compute and
exchange together, whether and how finely that pays. What is tried is weighed as it is made (`schedule.trial`), and only what is
kept becomes a `Plan`; but in nodes, with a window, or with a bound of transient bytes, the `PlanLoad` of a plan is what counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple, Self

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.greedy import Greedy, Tried
from hf_distca.schedule.heads import Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.levels import INNER_BAND
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.relief import relieve
from hf_distca.schedule.state import Fit
from hf_distca.schedule.waves import TransientBytes, Waves
from hf_distca.schedule.weigh import Scale

__all__ = ["balance"]

# The finest band that is aimed at. Below, tiles are too coarse: the last moves chase each other, and planning 512 ranks takes
# a second instead of 30 ms, for a balance that is no better.
_FINEST = 0.002
# Coarser bands, tried when the exchange eats more than this part of what the wanted one gains in compute.
_COARSER = (0.05, 0.15, 0.4)
_EATEN = 0.5
# The finest band where compute and exchange are evened out together, which takes many small moves; ranks that are so few that it
# is as fine as for compute, that evening out compute alone is tried as well, and that plans which hardly gain enough are.
_SERIAL = 0.02
_FEW = 64
# What the slowest rank may take beyond the mean for plans that do not prefer servers of the same node not to be tried as well.
_SERVED = 0.02
# Times the mean of both that the slowest of many ranks may take for evening out compute alone not to be tried as well.
_EARLY = 1.5
# Times the mean that the slowest rank takes where caps are tried first, and how much lower the next cap is.
_EXTREME = 12
_FINER_CAP = 1.4


def balance(layout: Layout, cost: CostModel, config: DistCAConfig, ranks: Ranks = ALIKE, *, relayed: bool = True) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange; see `PlanLoad`); where
    it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and where they lie; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with its window, or for layers
            without one if no document is longer than the window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `head_groups`, `max_transient_bytes` and `ping_pong` are read. A
            tolerance below 0.002 counts as 0.002. With head groups, the layout of the plan is `layout` with some documents split
            by heads. With a bound, only slices that fit it alone are moved. With `ping_pong` the layout is
            that of a nano-batch, whose exchange costs only what is longer than the compute beside it.
        ranks: what ranks are like; the same on every rank. A slower one gets less, so that all end together.
        relayed: whether servers may pass keys on.

    Raises:
        ConfigError: if `ranks` speaks of another number of ranks than the layout.
    """
    ranks.check(layout.world_size)
    if ranks.per_node == layout.world_size and cost.node_bytes_per_second is not None:
        # One node: all links are those inside. Now and then a plan for slower ones is as good or better.
        slow, ranks = replace(cost, node_bytes_per_second=None), replace(ranks, per_node=None)
        fast = replace(slow, exchange_bytes_per_second=cost.node_bytes_per_second)
        plans = [balance(layout, one, config, ranks, relayed=relayed) for one in (fast, slow)]
        return min(plans, key=lambda plan: _load(plan, fast, config, ranks, False).slowest_seconds)
    # A window that no document is longer than is none.
    if cost.window is not None and cost.window >= layout.longest:
        cost = replace(cost, window=None)
    if not config.balance or layout.world_size < 2:
        return Plan.local(layout, cost.window)
    tries = _Tries.of(layout, cost, config, ranks, relayed)
    unmoved, price = tries.unmoved(), tries.greedy.price
    seconds = unmoved.compute_seconds.tolist()
    # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
    if not price.pair or _within(seconds, ranks.level(seconds), config.tolerance) or _hopeless(tries, unmoved):
        return unmoved.plan
    if cost.window is None and cost.exchange_bytes_per_second < math.inf:
        heads = Heads.of(layout, price, cost, unmoved.compute_seconds, config.head_groups)
        tries = tries._replace(greedy=tries.greedy.splitting(heads))
    best = _fastest(tries, unmoved).plan
    if price.near == 1 or ranks.per_node in (None, 1):
        return best
    slowest = _load(best, cost, config, ranks, False).slowest_seconds
    if slowest <= (1 + _SERVED) * ranks.level(seconds):
        return best
    # Where exchanges decide, few large slices may be better than more that stay in a node.
    other = balance(layout, cost, config, replace(ranks, per_node=None), relayed=relayed)
    return other if _load(other, cost, config, ranks, False).slowest_seconds < slowest else best


class _Tries(NamedTuple):
    """Plans for one layout that are made, and weighed, to see which has the earliest last rank.

    Attributes:
        layout, cost, config, ranks: as for `balance`.
        relayed: whether servers may pass keys on.
        greedy: makes the tasks. It weighs them, too, unless that takes a plan.
    """

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    relayed: bool
    greedy: Greedy

    @classmethod
    def of(cls, layout: Layout, cost: CostModel, config: DistCAConfig, ranks: Ranks, relayed: bool) -> Self:
        """Those that `balance` asks for. A bound of transient bytes is kept by waves, which relays do not know."""
        bound, fit = config.max_transient_bytes, None
        relayed = relayed and cost.window is None and bound is None
        if bound is not None:
            each = TransientBytes.of(cost.shape)
            fit = Fit(bound, each.query, each.key)
        weighs = not ranks.in_nodes(cost) and cost.window is None and bound is None
        scale = Scale.of(layout, cost, overlapped=config.ping_pong, relayed=relayed, weighs=weighs)
        greedy = Greedy(layout, Price.of(cost, config.tile), ranks, scale, fit)
        return cls(layout, cost, config, ranks, relayed, greedy)

    def unmoved(self) -> Tried | PlanLoad:
        """Nothing moves, but keys are passed on if that alone gains enough."""
        least = self.config.min_gain
        if self.greedy.scale.weighs:
            return self.greedy.still(least)
        load = _load(Plan.local(self.layout, self.cost.window), self.cost, self.config, self.ranks, False)
        return relieve(load, least) if self.relayed else load

    def evened(
        self, seconds: list[float], tolerance: float, cap: float | None = None, exchanged: Price | None = None
    ) -> Tried | PlanLoad:
        """What `Greedy.run` makes."""
        tried = self.greedy.run(seconds, tolerance, cap, exchanged)
        return tried if self.greedy.scale.weighs else _load(tried.plan, self.cost, self.config, self.ranks, self.relayed)


def _fastest(tries: _Tries, unmoved: Tried | PlanLoad) -> Tried | PlanLoad:
    """The try with the earliest last rank that the greedy finds, coarse and fine; `unmoved` if none gains enough."""
    layout, cost, config, ranks, relayed, greedy = tries
    seconds, before = unmoved.compute_seconds.tolist(), unmoved.slowest_seconds
    best, fastest, enough = unmoved, before, config.min_gain * before
    mean, cap = ranks.level(seconds), max(seconds) / 2
    extreme = max(seconds) >= _EXTREME * mean
    wanted = max(config.tolerance, _FINEST)
    # One document that outweighs all others, and no relays: the fewer servers, the less its home has to send. Caps go down until
    # sending eats what they gain; only if they come near the mean, a fine balance may be better.
    while extreme and not relayed and cap > 2 * mean:
        tried = tries.evened(seconds, config.tolerance, cap)
        slowest = tried.slowest_seconds
        if slowest >= fastest:
            return best
        if before - slowest >= enough:
            best, fastest = tried, slowest
        cap /= _FINER_CAP
    few = layout.world_size <= _FEW
    serial = not config.ping_pong and not ranks.in_nodes(cost) and cost.exchange_bytes_per_second < math.inf
    if relayed and serial and not extreme:
        both = (unmoved.compute_seconds + unmoved.exchange_seconds).tolist()
        exchanged = greedy.price.with_exchange(cost.exchange_bytes_per_second)
        tried = tries.evened(both, wanted if few else max(wanted, _SERIAL), exchanged=exchanged)
        slowest = tried.slowest_seconds
        if slowest < fastest and before - slowest >= enough:
            best, fastest = tried, slowest
            if not few and fastest <= _EARLY * ranks.level(both):
                return best
    # Among many ranks, coarser plans for compute alone hardly ever gain what one for both did not.
    coarser = () if serial and relayed and not few else tuple(t for t in _COARSER if t > wanted)
    for tolerance in (wanted, *coarser):
        tried = tries.evened(seconds, tolerance)
        slowest, compute = tried.slowest_seconds, tried.longest_compute
        if slowest < fastest and before - slowest >= enough:
            best, fastest = tried, slowest
        elif best is not unmoved:
            break  # Coarser than one that helped, and no better.
        # Moving less costs less exchange, but only where one that helped has something to save.
        if best is not unmoved and (before - fastest > (1 - _EATEN) * (before - compute) or slowest == compute):
            break
    return best


def _load(plan: Plan, cost: CostModel, config: DistCAConfig, ranks: Ranks, relayed: bool) -> PlanLoad:
    waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes, config.head_groups)
    load = PlanLoad(plan, cost, waves, overlapped=config.ping_pong, ranks=ranks)
    return relieve(load) if relayed else load


def _hopeless(tries: _Tries, unmoved: Tried | PlanLoad) -> bool:
    """Whether no plan can gain enough: the greedy need not try. Common in narrow bands, and where documents were dealt."""
    layout, cost, config, ranks, _, greedy = tries
    price = greedy.price
    # A row may take longer to send than to compute, so that whoever gives work away ends later for it.
    least_bytes = price.least_bytes * (1.0 if ranks.per_node is None else price.near)
    most = price.most_seconds(layout.longest) * cost.exchange_bytes_per_second
    if cost.window is not None and not config.ping_pong and least_bytes > most:
        return True
    # The slowest rank cannot end before the mean, and moving work seldom saves exchanges. Among many ranks, one ends where the
    # greedy stops.
    mean = ranks.level(unmoved.compute_seconds.tolist())
    if layout.world_size > _FEW:
        mean *= 1 + INNER_BAND * config.tolerance
    if not config.ping_pong:
        mean += math.fsum(unmoved.exchange_seconds.tolist()) / layout.world_size
    return unmoved.slowest_seconds * (1 - config.min_gain) < mean


def _within(seconds: list[float], mean: float, tolerance: float) -> bool:
    return max(seconds) <= mean * (1 + tolerance) and min(seconds) >= mean * (1 - tolerance)
