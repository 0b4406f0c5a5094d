"""`balance` moves query rows between ranks, so that the last rank ends as early as possible.

A **trial** (`schedule.trial`) tries to end at a time T. Every rank that would end after T gives
away query rows until it ends by T. Ranks take rows only as long as they still end by T. The
**plan** has the moves of the trial with the lowest T that was reached. A bisection finds this T
between two bounds: the mean compute seconds of the ranks, and the time at which the last rank ends
if nothing moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import CostModel, MarginalCost, TransientBytes
from hf_distca.schedule.layout import BoolArray, FloatArray, IntArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.parts import Pieces, list_splits
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks
from hf_distca.schedule.relays import add_relays
from hf_distca.schedule.tails import END, LATEST, PIECE, USEFUL
from hf_distca.schedule.trial import make_moves

# A trial stops when a rank cannot end by `_USEFUL` times T. Another trial, with a later T, may give
# a better plan.
_USEFUL = 1.05
# If the last rank ends later than `_LATE` times the mean, further trials try to make the other
# ranks end earlier. For each `part` of `_EVEN_PARTS`, one trial tries to reach
# T = mean + part * (end of the last rank - mean).
_EVEN_PARTS, _LATE = (0.1, 0.2, 0.4, 0.6, 0.8), 1.2
# Smallest tolerance of the search for T, and largest number of its trials.
_FINEST_TOLERANCE, _MOST_TRIALS = 0.002, 16


def balance(
    layout: Layout,
    cost: CostModel,
    config: DistCAConfig,
    ranks: Ranks = UNIFORM_RANKS,
    *,
    allow_relays: bool = True,
) -> Plan:
    """Assign every query token of `layout` to a server.

    The estimated end of the slowest rank (compute plus exchange, see `PlanLoad`) is never later
    than without moves. If the gain is less than `config.min_gain`, nothing moves.

    Args:
        layout: documents and their ranks; the same on every rank.
        cost: seconds of tasks and of exchanges; the same on every rank. The plan is for layers with
            the window of `cost`. If no document is longer than this window, the plan is for layers
            without a window.
        config: `balance`, `tolerance`, `min_gain`, `tile`, `head_groups`, `max_transient_bytes`,
            `ping_pong` and `serve_in_place` are read. A tolerance below 0.002 counts as 0.002. With
            head groups, the plan's layout is `layout` with some documents split by heads. With
            `max_transient_bytes`, only tails that fit this bound are moved. With `ping_pong`,
            `layout` is the layout of a nano-batch, and exchanges cost only the time by which they
            exceed compute.
        ranks: properties of the ranks; the same on every rank. A slower rank gets less work, so
            that all ranks end together.
        allow_relays: whether servers may forward keys.

    Raises:
        ConfigError: if `ranks` and the layout have different numbers of ranks, or if
            `max_transient_bytes` is too small for one row and one key.
    """
    ranks.check_count(layout.world_size)
    # With a single node, all traffic uses links inside the node, so only their rate matters.
    if ranks.per_node == layout.world_size and cost.node_bytes_per_second is not None:
        cost = replace(cost, exchange_bytes_per_second=cost.node_bytes_per_second)
        ranks = replace(ranks, per_node=None)
    ranks = ranks.without_irrelevant_nodes(cost)
    cost = cost.without_unused_window(layout.longest)
    TransientBytes.from_shape(cost.shape).check_bound(config.max_transient_bytes)
    has_relays = allow_relays and cost.window is None and config.max_transient_bytes is None
    return PlanTrials(layout, cost, config, ranks, has_relays).find_plan()


@dataclass(frozen=True)
class PlanTrials:
    """Search the plans of a layout for the plan whose last rank ends earliest. For the attributes
    see `balance`.
    """

    layout: Layout
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks
    has_relays: bool

    @cached_property
    def unmoved_load(self) -> PlanLoad:
        """Load of a plan that moves no queries. The plan has relays if they gain at least
        `min_gain`.
        """
        return self.weigh_plan(Plan.make_local(self.layout, self.cost.window), self.config.min_gain)

    @property
    def node_count(self) -> int:
        """Number of nodes; 1 if `Ranks.per_node` is None."""
        return self.layout.world_size // (self.ranks.per_node or self.layout.world_size)

    @property
    def tolerance(self) -> float:
        """Relative tolerance of the search for T, the time at which the last rank ends."""
        return max(self.config.tolerance, _FINEST_TOLERANCE)

    def weigh_plan(self, plan: Plan, min_gain: float = 0.0) -> PlanLoad:
        """Return the load of a plan. The plan gets relays if they gain at least `min_gain`."""
        load = PlanLoad(plan, self.cost, overlapped=self.config.ping_pong, ranks=self.ranks)
        return add_relays(load, min_gain) if self.has_relays else load

    def find_plan(self) -> Plan:
        """Find the plan whose last rank ends earliest. If no plan gains enough, return the plan
        without moves.
        """
        best, required = self.unmoved_load, self.unmoved_load.slowest_seconds
        required *= 1 - self.config.min_gain
        # If query-key pairs cost nothing, compute depends only on the number of tokens, and there
        # is no attention to balance.
        can_gain = self.layout.world_size > 1 and MarginalCost.from_cost_model(self.cost).pair
        if not (self.config.balance and can_gain):
            return best.plan
        mean, nodes = self.compute_means(1), self.compute_means(self.node_count)
        # Plan inside nodes first, if such a plan can end about as early as a plan across nodes.
        ways = [nodes, mean] if nodes.max() < mean[0] * (1 + self.tolerance) else [mean, nodes]
        splits = list_splits(self.unmoved_load, self.config, mean[0])
        for groups, split_mask in splits:
            pieces, is_first = None, best is self.unmoved_load
            for means in ways[: self.node_count]:
                earliest, limit = min(best.slowest_seconds, required), math.inf
                # Once a plan is found, further plans must end earlier than the best plan by at
                # least the tolerance. A plan inside nodes is exempt if it splits the same documents
                # by heads as the first plan found.
                if best is not self.unmoved_load and not (is_first and len(means) > 1):
                    earliest = limit = earliest * (1 - self.tolerance)
                # No plan can end before the largest of these means.
                if means.max() >= earliest:
                    continue
                pieces = pieces or Pieces.cut(
                    self.unmoved_load, self.config, groups, split_mask, self.has_relays
                )
                load = self.weigh_plan(pieces.make_plan(self._search(pieces, means, limit)))
                if load.slowest_seconds < earliest:
                    best = load
        return best.plan

    def compute_means(self, units: int) -> FloatArray:
        """Return the mean compute seconds of each unit of ranks: the time at which the unit would
        end if its ranks divided their work so that all end together.

        A unit is a run of consecutive ranks. All units have the same number of ranks.
        """
        seconds = self.unmoved_load.compute_seconds.reshape(units, -1)
        speeds = np.array(self.ranks.list_speeds(seconds.size)).reshape(units, -1)
        work = (seconds * speeds).tolist()
        # The result of `fsum` is the same in all Python versions, unlike the result of `sum`.
        return np.array(list(map(math.fsum, work))) / list(map(math.fsum, speeds.tolist()))

    def _search(self, pieces: Pieces, mean: FloatArray, limit: float) -> IntArray:
        """Find the lowest time T that trials reach in each unit of ranks.

        Return the moves of the trials that reach these times.
        """
        tolerance, moves = self.tolerance, np.zeros((0, 4), dtype=np.int64)
        high = np.minimum(pieces.start.ranks[END].reshape(len(mean), -1).max(axis=1), limit)
        low, latest = mean, high
        if math.isinf(limit):
            latest = np.minimum(mean * (1 + tolerance), high)
        for _ in range(_MOST_TRIALS):
            made, end = self._try(pieces, latest, np.minimum(high, _USEFUL * latest))
            moves = self._replace(pieces, moves, made, end <= high)
            high = np.minimum(high, end)
            # Only a trial that misses its T by more than the tolerance shows that this T is too
            # early.
            low = np.where(end > latest * (1 + tolerance), latest, low)
            is_done = (high <= low * (1 + 0.75 * tolerance)) | (low == high)
            if is_done.all():
                break
            # The next T is at most 5 times as far from the mean as the last T that failed.
            most = mean + 5 * np.maximum(low - mean, tolerance * mean)
            latest = np.where(is_done, math.inf, np.minimum((low + high) / 2, most))
        # Some rank may end late whatever it gives away. Further trials then make the other ranks
        # end earlier.
        is_even, most = high <= _LATE * mean, high * (1 + tolerance / 2)
        for part in _EVEN_PARTS:
            if is_even.all():
                break
            latest = np.where(is_even, math.inf, mean + part * (high - mean))
            made, end = self._try(pieces, latest, most)
            fits = ~is_even & (end <= most)
            moves, is_even = self._replace(pieces, moves, made, fits), is_even | fits
        return moves

    def _try(
        self, pieces: Pieces, latest: FloatArray, useful: FloatArray
    ) -> tuple[IntArray, FloatArray]:
        """Make one trial. `latest` has the time T of each unit of ranks.

        Return the moves, and the time at which the last rank of each unit ends (inf if the trial of
        the unit was stopped).
        """
        batch, units = pieces.restore(), len(latest)
        per_unit = self.layout.world_size // units
        batch.ranks[LATEST] = np.repeat(latest, per_unit)
        batch.ranks[USEFUL] = np.repeat(useful, per_unit)
        make_moves(batch, np.argsort(-batch.ranks[END], kind="stable"), units > 1)
        end = batch.ranks[END].reshape(units, -1).max(axis=1)
        is_left = np.isinf(batch.ranks[LATEST, ::per_unit]) & np.isfinite(latest)
        return batch.moves[: batch.counts[1]].copy(), np.where(is_left, math.inf, end)

    def _replace(
        self, pieces: Pieces, moves: IntArray, made: IntArray, units: BoolArray
    ) -> IntArray:
        """Return the moves in `made` for the units that `units` marks, and the moves in `moves` for
        all other units.
        """
        old, new = [
            units[pieces.home[some[:, PIECE]] * len(units) // self.layout.world_size]
            for some in (moves, made)
        ]
        return np.concatenate([moves[~old], made[new]])
