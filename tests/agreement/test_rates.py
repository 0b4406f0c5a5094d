"""Rates fitted to simulated measurements of ranks: kernels, speeds, exchanges."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from stand_ins import MadeUpGroup, Rows, pack

from hf_distca.agreement import dealt_share as dealt_module
from hf_distca.agreement import rates as rates_module
from hf_distca.agreement.announce import FIGURE_COUNT, HEADER_SIZE, PlanKey
from hf_distca.agreement.batch_plan import RateSample
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import TokenBatch
from hf_distca.agreement.planner import Planner
from hf_distca.agreement.rates import LearnedCosts
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

SHAPE = AttentionShape(4, 2, 64, 64, 4)
KEY = PlanKey(SHAPE, "cpu")
KIND = SHAPE, "cpu"
TRUE = CostModel.make_analytic(SHAPE, device_type="cpu")
RANKS = 4


def distort(task: float, flop: float, exchange: float = 1.0) -> CostModel:
    """Multiply the seconds of the true model by these factors."""

    def kernel(cost: KernelCost) -> KernelCost:
        return KernelCost(
            cost.task_seconds * task, cost.bytes_per_second, cost.flops_per_second / flop
        )

    return replace(
        TRUE,
        forward=kernel(TRUE.forward),
        backward=kernel(TRUE.backward),
        exchange_bytes_per_second=TRUE.exchange_bytes_per_second / exchange,
        exchange_seconds=TRUE.exchange_seconds * exchange,
    )


def sum_by_rank(cost: CostModel, plan: Plan, ranks: np.ndarray) -> np.ndarray:
    """Sum the estimated kernel seconds of the tasks of each rank."""
    tasks = cost.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
    return np.bincount(ranks, weights=tasks, minlength=RANKS)


def make_planner(given: CostModel = TRUE, **settings: object) -> Planner:
    planner = Planner(DistCAConfig(**settings), Meter())
    planner.costs[KIND] = given
    return planner


class World:
    """Simulated ranks with the true rates, and a planner that begins with other rates."""

    def __init__(
        self,
        given: CostModel,
        speeds: tuple[float, ...] = (1.0,) * RANKS,
        exchange: float = 1.0,
        *,
        waits: bool = True,
        gathers: bool = False,
        **settings: object,
    ) -> None:
        """Make ranks that wait for each other in attention, or between layers without `waits`."""
        self.speeds, self.exchange = np.array(speeds), exchange
        self.noise = np.random.default_rng(0)
        self.waits, self.gathers = waits, gathers
        self.planner = make_planner(given, **settings)
        self.group = MadeUpGroup(RANKS, self._rows)
        self.rows: list[np.ndarray] = []
        self.lengths: list[list[int]] = []
        self.measured: np.ndarray | None = None
        self.plans: list[Plan] = []
        # Seconds of attention / seconds with nothing moved.
        self.slowdown: list[float] = []

    def _rows(self, row: np.ndarray) -> list[np.ndarray]:
        if len(row) == FIGURE_COUNT:
            return list(self.measured) if self.measured is not None else []
        if len(row) < HEADER_SIZE:
            return [row] * RANKS
        made = []
        for rank in range(RANKS):
            header, lengths = row[:HEADER_SIZE].copy(), self.lengths[rank]
            figures = self.measured[rank] if row[5] and self.measured is not None else []
            made.append(
                np.concatenate([header, figures, [0, 0, 0, len(lengths), 0], lengths]).astype(
                    np.int64
                )
            )
        return made

    def step(self, number: int) -> float:
        """Plan and simulate a step; return estimate / measurement of the slowest rank."""
        random = np.random.default_rng(number)
        self.lengths = [
            [8192] if rank == number % RANKS else [8192 // int(random.integers(4, 32))] * 4
            for rank in range(RANKS)
        ]
        (planned,) = self.planner.plan([(pack(*self.lengths[0]), KEY)], self.group)
        estimate = self.planner.costs.get_cost(KEY)
        planned.meter.count(calls=1, kernel_calls=2, backward_calls=1)
        plan = planned.plan
        self.plans.append(plan)
        kernel = sum_by_rank(TRUE, plan, plan.server) / self.speeds
        kernel *= self.noise.normal(1.0, 0.01, RANKS)
        none = np.zeros(RANKS)
        moving = self.exchange * PlanLoad(plan, TRUE).exchange_seconds if plan.moved else none
        waiting = (kernel + moving).max() - kernel if plan.moved and self.waits else moving
        unmoved = sum_by_rank(TRUE, plan, plan.home) / self.speeds
        self.slowdown.append(float((kernel + moving).max() / unmoved.max()))
        self.measured = np.stack(
            [kernel * 1e9, none, waiting * 1e9, none + 1, none], axis=1
        ).astype(np.int64)
        if self.gathers:
            self.planner.gather_measurements(self.group)
        mine = sum_by_rank(estimate, plan, plan.server)
        return float(self.planner.costs.make_ranks(RANKS).scale_by_speed(mine).max() / kernel.max())

    def train(self, *steps: int) -> list[float]:
        """Run a range of steps, and list the results of `step`."""
        return [self.step(number) for number in range(*steps)]

    @property
    def moved(self) -> list[bool]:
        return [plan.moved for plan in self.plans]


@pytest.mark.parametrize("gathers", [False, True], ids=["announced", "gathered"])
@pytest.mark.parametrize(("task", "flop"), [(3, 3), (1 / 3, 1 / 3), (3, 1 / 3), (1 / 3, 3), (1, 1)])
def test_estimates_come_within_ten_percent_from_any_rates(
    task: float, flop: float, gathers: bool
) -> None:
    ratios = World(distort(task, flop), gathers=gathers).train(24)
    if flop != 1:
        assert max(ratios[0], 1 / ratios[0]) > 2
    assert all(abs(ratio - 1) < 0.1 for ratio in ratios[12:])


def test_rates_stay_if_measurements_equal_estimates() -> None:
    world = World(TRUE)
    world.train(24)
    assert world.planner.costs.get_cost(KEY).forward == TRUE.forward
    assert world.planner.costs.make_ranks(RANKS).speeds is None


def test_slow_rank_gets_less_work_until_it_recovers() -> None:
    world = World(TRUE, (1.0, 1 / 1.5, 1.0, 1.0))
    world.train(16)
    speeds = np.array(world.planner.costs.make_ranks(RANKS).speeds)
    assert speeds / speeds.max() == pytest.approx([1, 1 / 1.5, 1, 1], rel=0.05)
    plan = world.plans[-1]
    work = sum_by_rank(TRUE, plan, plan.server)
    assert (work / world.speeds).max() <= 1.1 * work.sum() / world.speeds.sum()
    assert world.planner.costs.make_ranks(RANKS + 1).speeds is None
    world.speeds[1] = 1.0
    world.train(16, 40)
    assert world.planner.costs.make_ranks(RANKS).speeds is None


def test_exchanges_that_do_not_pay_stop_and_are_rarely_retried() -> None:
    world = World(TRUE, exchange=40.0)
    world.train(200)
    first = world.moved.index(False)
    assert first <= 6
    tried = [number for number, moved in enumerate(world.moved) if moved and number > first]
    assert len(tried) <= 200 // 64
    assert world.planner.costs.exchange_slowdown is not None
    assert world.planner.costs.exchange_slowdown > 0.05


def test_exchanges_resume_when_they_pay_again() -> None:
    world = World(TRUE, exchange=40.0)
    world.train(100)
    world.exchange = 1.0
    for number in range(100, 6000):
        world.step(number)
        if world.planner.costs.exchange_slowdown is None:
            break
    assert world.planner.costs.exchange_slowdown is None
    world.train(6000, 6008)
    assert all(world.moved[-4:])


@pytest.mark.parametrize(
    "waits", [True, False], ids=["waiting for each other", "waiting elsewhere"]
)
@pytest.mark.parametrize("exchange", [3.0, 10.0, 40.0])
def test_attention_on_a_slow_network_is_no_slower_than_moving_nothing(
    waits: bool, exchange: float
) -> None:
    world = World(TRUE, exchange=exchange, waits=waits)
    world.train(36)
    assert np.mean(world.slowdown[12:]) <= 1.02


@pytest.mark.parametrize("mib", [4, 64])
def test_plans_with_a_bound_of_transient_bytes_never_lose_to_moving_nothing(mib: int) -> None:
    world = World(TRUE, max_transient_bytes=mib * 2**20)
    world.train(48)
    assert np.mean(world.slowdown[16:]) <= 1.002
    if mib == 64:
        assert np.mean(world.slowdown[16:]) <= 0.6


def test_exchange_rate_is_fitted_if_exchanges_pay() -> None:
    world = World(distort(1, 1, exchange=1 / 20), exchange=1.0)
    world.train(24)
    assert all(world.moved)
    found = world.planner.costs.get_cost(KEY)
    assert found.exchange_bytes_per_second == pytest.approx(TRUE.exchange_bytes_per_second, rel=0.5)


def test_without_measured_rates_plans_depend_on_documents_alone() -> None:
    world = World(distort(3, 3), (1.0, 0.5, 1.0, 1.0), exchange=40.0, measured_rates=False)
    world.train(16)
    assert world.planner.costs.get_cost(KEY) == distort(3, 3)
    assert world.planner.costs.make_ranks(RANKS).speeds is None


def test_given_cost_model_is_not_changed_by_measurements() -> None:
    world = World(distort(3, 3), (1.0, 0.5, 1.0, 1.0), cost_model=distort(3, 3))
    world.train(16)
    assert world.planner.costs.get_cost(KEY) == distort(3, 3)


def test_changes_of_rates_are_logged_only_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hf_distca"):
        world = World(distort(3, 3), (1.0, 1 / 1.5, 1.0, 1.0))
        world.train(30)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "rank 1 takes 1." in line]) <= 2
    assert any("attention takes" in line for line in said)
    assert len(said) <= 6


def make_sample(change: Callable[[np.ndarray], np.ndarray] = lambda kernel: kernel) -> RateSample:
    estimated = np.full(RANKS, 3.0)
    kernel = change(np.full(RANKS, 3.0))
    none = np.zeros(RANKS)
    return RateSample(estimated, kernel, none, none, kernel, none)


def make_costs(cost: CostModel = TRUE) -> LearnedCosts:
    costs = LearnedCosts()
    costs[KIND] = cost
    return costs


def test_equal_samples_give_equal_rates() -> None:
    made = []
    for _ in range(2):
        costs = make_costs()
        for number in range(12):
            costs.learn_from_sample(
                KIND, make_sample(lambda kernel, n=number: kernel * (2 + 0.001 * n))
            )
        made.append((costs.get_cost(KEY), costs.measured_ranks))
    assert made[0] == made[1]
    assert made[0][0].forward.flops_per_second == pytest.approx(
        TRUE.forward.flops_per_second / 2, rel=0.02
    )


def test_rates_are_learned_separately_for_each_group_size() -> None:
    costs = make_costs()
    for ranks in [RANKS] * 5 + [RANKS // 2] * 5:
        one, none = np.full(ranks, 6.0), np.zeros(ranks)
        costs.learn_from_sample(
            KIND,
            RateSample(
                np.full(ranks, 3.0), one if ranks < RANKS else one / 2, none, none, one, none
            ),
        )
    assert costs.get_cost(KEY).forward.flops_per_second == pytest.approx(
        TRUE.forward.flops_per_second / 2, rel=0.02
    )


def test_one_stall_changes_no_rate() -> None:
    costs = make_costs()
    for number in range(16):
        costs.learn_from_sample(
            KIND, make_sample(lambda kernel, n=number: kernel * (50 if n == 9 else 1))
        )
    assert costs.get_cost(KEY) == TRUE


def test_idle_ranks_do_not_affect_measured_speeds() -> None:
    costs = make_costs()
    idle = np.ones(RANKS)
    idle[2] = 0.0
    for _ in range(12):
        one = make_sample(lambda kernel: kernel * idle)
        costs.learn_from_sample(KIND, replace(one, estimated=one.estimated * idle))
    assert costs.measured_ranks.speeds is None


def announce_slower(row: np.ndarray) -> list[np.ndarray]:
    """Announce that kernels of the other rank take twice as long."""
    theirs = row.copy()
    if row[5]:
        theirs[HEADER_SIZE] = row[HEADER_SIZE] * 2
    return [row, theirs]


def announce_later(row: np.ndarray) -> list[np.ndarray]:
    """Announce like `announce_slower`, while the newest kernels of the other rank still run."""
    _, theirs = announce_slower(row)
    if row[5] > 1:
        theirs[HEADER_SIZE + FIGURE_COUNT * (row[5] - 1)] = -1
    return [row, theirs]


def train_on_shares(
    planner: Planner, steps: int, others: Rows
) -> tuple[list[int], list[tuple[CostModel, Ranks]]]:
    """Train on shares that a worker of a loader made and planned.

    Returns:
        The steps that made a plan, and the rates at the beginning of each step.
    """
    group, dealing = MadeUpGroup(2, others), Dealing(2, 4096, {KEY: TRUE}, planner.config)
    planned: list[int] = []
    rates: list[tuple[CostModel, Ranks]] = []
    costs = planner.costs

    def counted(layout: Layout, *args: Any) -> Plan:
        planned.append(len(rates) - 1)
        return balance(layout, *args)

    with patch.object(dealt_module, "get_worker_info", return_value="a worker"):
        shares = [
            pickle.dumps(dealing.make_share(np.array([5120, 1024, 2048]), (0, number), 0))
            for number in range(steps)
        ]
    with patch.object(dealt_module, "balance", counted):
        for share in shares:
            rates.append((costs.get_cost(KEY), costs.make_ranks(2)))
            documents = TokenBatch(1, 4096, packed=pickle.loads(share)).read_documents()
            (plan,) = planner.plan([(documents, KEY)], group)
            plan.meter.count(calls=1, kernel_calls=2, backward_calls=1)
            plan.meter.span("server", 0.0, 0.1)
    assert group.gathered == [
        f"planning micro-batch {number + 1} (global batch {number} of epoch 0)"
        for number in range(steps)
    ]
    return planned, rates


@pytest.mark.parametrize("others", [announce_slower, announce_later])
def test_shares_are_planned_again_after_rates_change(others: Rows) -> None:
    """A share takes one collective, plans after a change are counted, and late kernels are
    announced again.
    """
    planner = make_planner()
    planned, rates = train_on_shares(planner, 40, others)
    changed = [number for number in range(1, 40) if rates[number] != rates[number - 1]]
    assert 1 <= len(changed) <= 8
    # The step before the first change learned the new rates after its plan was made.
    assert planned == list(range(changed[0], 40))
    speeds = rates[-1][1].speeds
    assert speeds is not None
    assert speeds[0] > 1.5 * speeds[1]
    planner.gather_measurements(MadeUpGroup(2, lambda row: [row, row]))
    total = planner.history.total
    assert total.planned_here == 40 - changed[0]
    assert total.micro_batches == 40


def test_ranks_with_different_global_batches_are_refused() -> None:
    def others(row: np.ndarray) -> list[np.ndarray]:
        theirs = row.copy()
        theirs[-3] += 1  # index of the global batch
        return [row, theirs]

    planner = make_planner()
    with pytest.raises(DistCADesyncError, match="different global batches in micro-batch 1"):
        train_on_shares(planner, 4, others)
    assert not planner.history.unmeasured_plans


@pytest.mark.parametrize(
    ("late", "windows", "factor"), [(0, 1, 3.0), (9, 1, 3.0), (9, 1, 12.0), (9, 3, 3.0)]
)
def test_trials_of_exchanges_cost_at_most_one_percent(
    late: int, windows: int, factor: float
) -> None:
    """Shares are planned ahead, and layers that differ only in windows learn together."""
    kernel, wire, none = np.full(RANKS, 3.0), np.full(RANKS, 1.0), np.zeros(RANKS)
    moved = RateSample(kernel, kernel, factor * wire, wire, kernel * 1.5, none)
    still = replace(moved, estimated_exchange=none)
    costs = make_costs(replace(TRUE, exchange_seconds=1.0))
    seen = [SimpleNamespace(number=1, key=KEY._replace(window=n)) for n in range(windows)]
    moves = [True] * (late + 1)  # of each planned micro-batch
    for step in range(640):
        observed = moved if moves[step] else still
        with patch.object(rates_module, "observe_plans", lambda *_, observed=observed: observed):
            costs.learn_from_plans(seen, DistCAConfig())
        moves.append(costs.get_cost(KEY).exchange_seconds == 1)
    trials = sum(moves[moves.index(False) :])
    assert 0 < trials * moved.slowdown <= 0.01 * windows * 640


def test_exchange_scale_applies_inside_and_between_nodes() -> None:
    cost = replace(TRUE, node_bytes_per_second=8 * TRUE.exchange_bytes_per_second)
    corrected = cost.scale(exchange=2.0)
    assert corrected.node_bytes_per_second == cost.node_bytes_per_second / 2
    assert TRUE.scale(exchange=2.0).node_bytes_per_second is None


def test_only_one_in_eight_micro_batches_is_sampled_after_32() -> None:
    """A sample of hundreds of ranks takes milliseconds."""
    costs = make_costs()
    wanted = [costs.accept_sample(KIND) for _ in range(320)]
    assert all(wanted[:32])
    assert sum(wanted[32:]) == 288 // 8
