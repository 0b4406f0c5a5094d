"""`Costs`: the cost models that plans are made with, as they were given and corrected by what ranks measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.measured import Lessons, Measured
from hf_distca.agreement.rates import Rates
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.ranks import Ranks

__all__ = ["Costs"]


class Costs(dict[tuple[AttentionShape, str], CostModel]):
    """The cost models that were given, by shape and device type, without a window.

    Attributes:
        rates: what the measurements make of them.
        dtypes: of q, k and v that attention computes with now, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()
        self.dtypes: dict[tuple[AttentionShape, str], str] = {}
        self._lessons = Lessons(self.rates)

    def of(self, key: PlanKey, *, trial: bool = False) -> CostModel:
        """The cost model that a plan is made with: as it was given, corrected by what was measured.

        Args:
            key: which plan.
            trial: as for `Rates.cost`.
        """
        kind = key.shape, key.device
        return replace(self.rates.cost(kind, self[kind], trial=trial), window=key.window)

    def of_plans(self, keys: Sequence[PlanKey]) -> list[CostModel]:
        """Those that plans of these keys are made with now; those of a trial for the first micro-batch among them."""
        trials = {kind for kind in dict.fromkeys((key.shape, key.device) for key in keys) if self.rates.begin_trial(kind)}
        costs, seen = [], set[PlanKey]()
        for key in keys:
            costs.append(self.of(key, trial=(key.shape, key.device) in trials and key not in seen))
            seen.add(key)
        return costs

    def ranks(self, count: int, per_node: int | None = None) -> Ranks:
        """What the ranks of a group of so many are like, as far as it was measured."""
        speeds = self.rates.ranks.speeds
        return Ranks(speeds if speeds is not None and len(speeds) == count else None, per_node)

    def hear(self, number: int, measured: Sequence[Measured], figures: IntArray) -> None:
        """Take in what the meeting of this number told, as `Lessons.add`."""
        self._lessons.add(number, measured, figures)

    def learn(self, before: int, config: DistCAConfig) -> list[str]:
        """Correct rates by what meetings told before this one; what has changed, in words."""
        self._lessons.learn(before, self, config)
        return self.rates.take_changes()
