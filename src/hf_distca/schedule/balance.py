"""`balance`: which attention server computes which query rows.

`Greedy` evens out the estimated compute seconds of the ranks for as few bytes as it can; `balance` decides, by compute and
exchange together, whether and how finely that pays.
"""

from __future__ import annotations

from dataclasses import replace

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.greedy import Greedy
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import BandPrice, Price
from hf_distca.schedule.ranks import ALIKE, Ranks
from hf_distca.schedule.waves import Fit, TransientBytes, Waves

__all__ = ["balance"]

# The finest band that is aimed at. Below, tiles are too coarse: the last moves chase each other, and planning 512 ranks takes
# a second instead of 30 ms, for a balance that is no better.
_FINEST = 0.002
# Coarser bands, tried when the exchange eats more than this part of what the wanted one gains in compute.
_COARSER = (0.05, 0.15, 0.4)
_EATEN = 0.5
# What the slowest rank may take beyond the mean for plans that do not prefer servers of the same node not to be tried as well.
_SERVED = 0.02
# Times the mean that the slowest rank takes where caps are tried first, and how much lower the next cap is.
_EXTREME = 12
_FINER_CAP = 1.4


def balance(layout: Layout, cost: CostModel, config: DistCAConfig, ranks: Ranks = ALIKE) -> Plan:
    """Assign every query token of `layout` to a server.

    The result never has a slower rank than moving nothing, by the estimate (compute plus exchange; see `PlanLoad`); where
    it gains less than `config.min_gain`, it is `Plan.local`.

    Args:
        layout: documents and where they lie; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with its window, or for layers
            without one if no document is longer than the window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `max_transient_bytes` and `ping_pong` are read. A tolerance below
            0.002 counts as 0.002. With a bound, only slices that fit it alone are moved. With `ping_pong` the layout is that of a
            nano-batch, whose exchange costs only what is longer than the compute beside it.
        ranks: what ranks are like; the same on every rank. A slower one gets less, so that all end together.

    Raises:
        ConfigError: if `ranks` speaks of another number of ranks than the layout.
    """
    ranks.check(layout.world_size)
    # A window that no document is longer than is none.
    if cost.window is not None and cost.window >= layout.longest:
        cost = replace(cost, window=None)
    local = Plan.local(layout, cost.window)
    if not config.balance or layout.world_size < 2:
        return local
    price = (Price if cost.window is None else BandPrice).of(cost, config.tile)
    unmoved = _load(local, cost, config, ranks)
    seconds = unmoved.compute_seconds.tolist()
    # Without a cost per pair, attention is as long as its tokens are many: there is nothing that moving could gain.
    if not price.pair or _within(seconds, ranks.level(seconds), config.tolerance):
        return local
    if cost.window is not None and not config.ping_pong and _hopeless(layout, cost, price, unmoved, config):
        return local
    best = _fastest(layout, cost, price, unmoved, config)
    if price.near == 1 or ranks.per_node in (None, 1, layout.world_size):
        return best
    slowest = _load(best, cost, config, ranks).slowest_seconds
    if slowest <= (1 + _SERVED) * ranks.level(seconds):
        return best
    # Where exchanges decide, few large slices may be better than more that stay in a node.
    other = _fastest(layout, cost, replace(price, near=1.0), unmoved, config)
    return other if _load(other, cost, config, ranks).slowest_seconds < slowest else best


def _fastest(layout: Layout, cost: CostModel, price: Price, unmoved: PlanLoad, config: DistCAConfig) -> Plan:
    """The plan with the earliest last rank that the greedy finds, coarse and fine; that of `unmoved` if none gains enough."""
    bound, ranks = config.max_transient_bytes, unmoved.ranks
    fit = None if bound is None else Fit(TransientBytes.of(cost.shape), bound, cost.window, config.tile)
    seconds = unmoved.compute_seconds.tolist()
    best, fastest, before = unmoved.plan, unmoved.slowest_seconds, unmoved.slowest_seconds
    # One document that outweighs all others: the fewer servers, the less its home has to send. Caps go down until sending eats
    # what they gain; only if they come near the mean, a fine balance may be better.
    mean, cap = ranks.level(seconds), max(seconds) / 2
    while max(seconds) >= _EXTREME * mean and cap > 2 * mean:
        plan = Greedy(layout, price, seconds, config.tolerance, fit, cap, ranks).plan()
        slowest = _load(plan, cost, config, ranks).slowest_seconds
        if slowest >= fastest:
            return best
        if before - slowest >= config.min_gain * before:
            best, fastest = plan, slowest
        cap /= _FINER_CAP
    wanted = max(config.tolerance, _FINEST)
    for tolerance in (wanted, *(t for t in _COARSER if t > wanted)):
        plan = Greedy(layout, price, seconds, tolerance, fit, ranks=ranks).plan()
        load = _load(plan, cost, config, ranks)
        if load.slowest_seconds < fastest and before - load.slowest_seconds >= config.min_gain * before:
            best, fastest = plan, load.slowest_seconds
        elif best is not unmoved.plan:
            break  # Coarser than one that helped, and no better.
        if before - fastest > (1 - _EATEN) * (before - float(load.compute_seconds.max())):
            break
    return best


def _load(plan: Plan, cost: CostModel, config: DistCAConfig, ranks: Ranks) -> PlanLoad:
    waves = Waves.of(plan, cost.shape, config.tile, config.max_transient_bytes)
    return PlanLoad(plan, cost, waves, overlapped=config.ping_pong, ranks=ranks)


def _hopeless(layout: Layout, cost: CostModel, price: Price, unmoved: PlanLoad, config: DistCAConfig) -> bool:
    """Whether no plan can gain enough, as is common in narrow bands: the greedy need not try.

    A row may take longer to send than to compute, so that whoever gives work away ends later for it. And the slowest rank
    cannot end before the mean.
    """
    least_bytes = price.least_bytes * (1.0 if unmoved.ranks.per_node is None else price.near)
    if least_bytes > price.most_seconds(layout.longest) * cost.exchange_bytes_per_second:
        return True
    mean = unmoved.ranks.level(unmoved.compute_seconds.tolist())
    return unmoved.slowest_seconds - mean < config.min_gain * unmoved.slowest_seconds


def _within(seconds: list[float], mean: float, tolerance: float) -> bool:
    return max(seconds) <= mean * (1 + tolerance) and min(seconds) >= mean * (1 - tolerance)
