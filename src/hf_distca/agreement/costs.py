"""`Costs`: the cost models that plans are made with, as they were given and corrected by what ranks measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.planned import Planned, observed
from hf_distca.agreement.rates import Rates
from hf_distca.config import DistCAConfig
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.ranks import Ranks

__all__ = ["Costs"]

# Layers of one kind have one cost model, whatever their windows are.
Kind = tuple[AttentionShape, str]


class Costs(dict[Kind, CostModel]):
    """The cost models that were given, by shape and device type, without a window.

    Attributes:
        rates: what the measurements make of them.
        dtypes: of q, k and v that attention computes with now, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()
        self.dtypes: dict[Kind, str] = {}
        self._queue: deque[tuple[int, Sequence[Planned]]] = deque()

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

    def queue(self, number: int, plans: Sequence[Planned]) -> None:
        """Take in plans whose figures the announcement of this number told, until `apply` learns from them."""
        self._queue.append((number, plans))

    def apply(self, before: int, config: DistCAConfig) -> list[str]:
        """Correct rates by what announcements told before this one: at one micro-batch on all ranks.

        Args:
            before: number of an announcement; a rank may know of later ones that others do not know of yet.
            config: settings.

        Returns:
            What has changed, in words.
        """
        changes: list[str] = []
        while self._queue and self._queue[0][0] < before:
            _, plans = self._queue.popleft()
            # What a user's own model says is meant as it is.
            if config.measured_rates and not isinstance(config.cost_model, CostModel):
                changes += self._learn(plans, config)
        return changes

    def _learn(self, plans: Sequence[Planned], config: DistCAConfig) -> list[str]:
        """Learn from each micro-batch and kind of layer, in order of first use."""
        changes: list[str] = []
        together: dict[tuple[int, PlanKey], list[Planned]] = {}
        for plan in plans:
            together.setdefault((plan.number, plan.key._replace(nano=0)), []).append(plan)
        for (_, key), parts in together.items():
            kind = key.shape, key.device
            observation = observed(parts, self[kind], config) if self.rates.wants(kind) else None
            if observation is not None:
                changes += self.rates.learn(kind, observation)
        return changes
