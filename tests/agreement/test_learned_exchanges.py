"""The cost of exchanges that ranks learn from measured plans, whatever the ranks wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import MicroBatchPlan, RateSample, observe_plans
from hf_distca.agreement.rates import LearnedCosts
from hf_distca.config import DistCAConfig
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import FloatArray, Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS

MADE_UP = Path(__file__).parents[2] / "benchmarks" / "placements"
SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
COST = CostModel.make_analytic(SHAPE)
TRUE_FACTOR = 3.0  # seconds of an exchange / seconds in the cost model
WORLDS = ["waiting elsewhere", "waiting for each other", "all but one late"]


@dataclass(frozen=True, eq=False)
class Truth:
    """True seconds of a layer on each rank, as arrays (ranks,).

    Attributes:
        kernel, exchange: of the plan; ranks that send and receive nothing take no exchange seconds.
        unmoved: kernel and exchange with nothing moved; with ping-pong, the longer of both.
        ping_pong: whether a rank computes while it exchanges.
    """

    kernel: FloatArray
    exchange: FloatArray
    unmoved: FloatArray
    ping_pong: bool

    @classmethod
    def from_plan(cls, plan: Plan, config: DistCAConfig) -> Truth:
        load, local = PlanLoad(plan, COST), PlanLoad(Plan.make_local(plan.layout), COST)
        kernel, exchange = (
            load.compute_seconds,
            TRUE_FACTOR * load.exchange_seconds * load.wire_seconds.any(axis=0),
        )
        unmoved = cls._combine(
            local.compute_seconds, TRUE_FACTOR * local.exchange_seconds, config.ping_pong
        )
        return cls(kernel, exchange, unmoved, config.ping_pong)

    @staticmethod
    def _combine(kernel: FloatArray, exchange: FloatArray, ping_pong: bool) -> FloatArray:
        return np.maximum(kernel, exchange) if ping_pong else kernel + exchange

    @property
    def attention(self) -> FloatArray:
        """The seconds of attention on each rank if it waits for no other rank."""
        return self._combine(self.kernel, self.exchange, self.ping_pong)

    @property
    def loss(self) -> float:
        """The relative slowdown by moving work; negative if moving pays."""
        return float(self.attention.max() / self.unmoved.max()) - 1

    def count_waiting(self, world: str) -> FloatArray:
        """Count the seconds that each rank measures outside its kernels."""
        exchanges = self.exchange > 0
        begin = np.zeros_like(self.kernel)
        if world == "all but one late":
            begin[np.flatnonzero(exchanges)[1:]] = self.attention.max() / 2
        end = begin + self.attention
        if world != "waiting elsewhere":
            end[exchanges] = end[exchanges].max()
        return end - begin - self.kernel


def make_sample(plan: Plan, config: DistCAConfig, truth: Truth, world: str) -> RateSample:
    """Make the sample of one layer that ranks would gather."""
    keys = [PlanKey(SHAPE, "cuda", nano=nano) for nano in ((1, 2) if config.ping_pong else (0,))]
    none, calls = np.zeros_like(truth.kernel), np.ones_like(truth.kernel)
    figures = np.stack(
        [truth.kernel * 1e9, none, truth.count_waiting(world) * 1e9, calls, none], axis=1
    ).astype(np.int64)
    seconds = COST.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
    plans = [
        MicroBatchPlan(key, plan, 1, seconds, UNIFORM_RANKS, Meter(), figures=figures)
        for key in keys
    ]
    found = observe_plans(plans, COST)
    assert found is not None
    return found


def find_errors(name: str, layout: Layout, ping_pong: bool) -> Iterator[str]:
    """Yield a text for each learned value that is wrong."""
    config = DistCAConfig(ping_pong=ping_pong)
    plan = balance(layout, COST, config)
    if not plan.moved:
        return
    truth = Truth.from_plan(plan, config)
    for world in WORLDS:
        seen, said = make_sample(plan, config, truth, world), f"{name}, {world}"
        factor, loss = seen.compute_exchange_factor(), seen.slowdown
        hidden = ping_pong and truth.exchange.max() <= truth.kernel.max()
        if factor is None and not (ping_pong and truth.exchange.max() < 1.1 * truth.kernel.max()):
            yield f"{said}: exchanges count as hidden"
        if factor is not None and (hidden or abs(factor / TRUE_FACTOR - 1) > 0.01):
            yield f"{said}: the learned factor of exchanges is {factor:.3g}"
        if (loss > 0) != (truth.loss > 0) and abs(truth.loss) > 1e-3:
            yield f"{said}: the slowdown is {truth.loss:.3f}, but {loss:.3f} was learned"


@pytest.mark.parametrize("ping_pong", [False, True], ids=["serial", "ping-pong"])
@pytest.mark.parametrize("folder", [MADE_UP, MADE_UP / "public"], ids=["made up", "real"])
def test_exchange_factor_is_learned_whatever_ranks_wait_for(folder: Path, ping_pong: bool) -> None:
    assert (known := {path.stem: read_placement(path) for path in sorted(folder.glob("*.json"))})
    assert not [
        line for name, layout in known.items() for line in find_errors(name, layout, ping_pong)
    ]


def test_slow_exchanges_are_learned_if_one_rank_exchanges_nothing() -> None:
    """Two ranks exchange five times as long as estimated; the third rank computes a bit less."""
    kernel, wire = np.array([1.0, 1.0, 0.95]), np.array([0.1, 0.1, 0.0])
    waited, none = np.array([0.5, 0.5, 0.0]), np.zeros(3)
    seen = RateSample(kernel, kernel, waited, wire, np.array([1.2, 0.8, 0.95]), none)
    assert seen.compute_exchange_factor() == pytest.approx(5, rel=0.02)
    assert seen.slowdown == pytest.approx(1.5 / 1.2 - 1, rel=0.02)
    costs, key = LearnedCosts(), PlanKey(SHAPE, "cuda")
    costs[SHAPE, "cuda"] = COST
    for _ in range(6):
        costs.learn_from_sample((SHAPE, "cuda"), seen)
    assert costs.exchange_slowdown is not None
    assert costs.get_cost(key).exchange_seconds == pytest.approx(
        5 * COST.exchange_seconds, rel=0.02
    )
