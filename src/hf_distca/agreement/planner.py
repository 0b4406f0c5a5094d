"""`Planner`: the plans that all ranks make of what they announced, and what became of them.

Several plans can be asked for at once, those of two nano-batches or of the micro-batches of an optimizer step: they take the
same two small collectives as one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.agreement.announce import Announcement, Kind, Slot, agree, check_equal, layout_of
from hf_distca.agreement.documents import LocalDocuments
from hf_distca.agreement.history import History, Micro
from hf_distca.errors import LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan

__all__ = ["Planned", "Planner"]


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and what it was made of.

    Attributes:
        kind: what it is for.
        plan: the same on all ranks.
        rows: the documents that this rank announced for it, as in `LocalDocuments`.
        milliseconds: what planning took, exchange of documents included.
    """

    kind: Kind
    plan: Plan
    rows: IntArray
    milliseconds: float


class Planner:
    """Plans micro-batches together with the other ranks, and collects what was planned and measured.

    Attributes:
        history: planned and measured figures.
        number: of the micro-batch that was planned last, from 1.
    """

    def __init__(self, meter: Meter) -> None:
        self.history = History()
        self.number = 0
        self._meter = meter
        self._asked = 0
        self._used: set[Slot] = set()  # in this micro-batch
        self._recent: dict[Kind, None] = {}  # since `recent_kinds` was asked
        # What ranks measured is announced with the next plan of the same slot: until then all of it has run.
        self._measured: dict[Slot, list[tuple[Micro, Meter]]] = {}

    @property
    def next_number(self) -> int:
        """Number of a micro-batch that has not begun."""
        return self.number + 1

    def recent_kinds(self) -> list[Kind]:
        """The kinds of plan that were used since the last call, in order of first use; the same on all ranks."""
        recent, self._recent = list(self._recent), {}
        return recent

    def plan(
        self, requests: Sequence[tuple[LocalDocuments, Kind]], group: AttentionGroup, place: str | None = None
    ) -> list[Planned]:
        """Plan this rank's documents together with those of the other ranks, which must ask for the same kinds of plans.

        Args:
            requests: documents, and what the plan is for; plans that were made ahead and travel with them are taken.
            group: the ranks.
            place: what is planned, for errors; the micro-batch at hand if None.

        Raises:
            DistCADesyncError: if the ranks do not agree, or do not all come.
        """
        ahead = [planned for local, kind in requests if (planned := local.ahead.take(kind)) is not None]
        if len(ahead) == len(requests):
            return ahead
        started = time.perf_counter()
        place = place or f"micro-batch {self._number_of(kind for _, kind in requests)}"
        layouts = self._announce(requests, group, place)
        # Layers that are left whole hide nothing, whatever the settings are.
        plans = [
            balance(layout, kind.cost, replace(kind.config, ping_pong=kind.half > 0))
            for layout, (_, kind) in zip(layouts, requests, strict=True)
        ]
        # Plans come from equal inputs, but an exchange with unequal plans would hang: compare before using them.
        digests = np.array([int(plan.digest[:15], 16) for plan in plans], dtype=np.int64)
        gathered = np.stack(group.gather(digests, doing=f"comparing plans of {place}"))
        for column in gathered.T.tolist():
            check_equal(group, column, "plans for the same documents", place, "use one version of hf_distca and numpy")
        milliseconds = (time.perf_counter() - started) * 1e3 / len(requests)
        return [Planned(kind, plan, local.rows, milliseconds) for (local, kind), plan in zip(requests, plans, strict=True)]

    def use(self, planned: Planned, local: LocalDocuments) -> Meter:
        """Count a plan as one of the micro-batch at hand.

        Returns:
            The meter for what is done by it.

        Raises:
            LayoutError: if it was made for other documents than `local`.
        """
        if not np.array_equal(planned.rows, local.rows):
            raise LayoutError(
                f"a micro-batch has documents of {local.rows[:, 2].tolist()} tokens, and was announced with documents of "
                f"{planned.rows[:, 2].tolist()}: leave batches as they are after plan_ahead."
            )
        kind = planned.kind
        self.number = self._number_of([kind])
        if kind.slot in self._used:
            self._used.clear()
        self._used.add(kind.slot)
        self._recent[kind] = None
        micro, meter = Micro.of(planned.plan, kind.cost, planned.milliseconds), Meter(self._meter)
        self.history.planned(micro, self.number)
        self._measured.setdefault(kind.slot, []).append((micro, meter))
        return meter

    def _number_of(self, kinds: Iterable[Kind]) -> int:
        """Number of the micro-batch that these plans are for: a new one if such a plan was used in the last one."""
        return self.number + (self.number == 0 or any(kind.slot in self._used for kind in kinds))

    def _announce(self, requests: Sequence[tuple[LocalDocuments, Kind]], group: AttentionGroup, place: str) -> list[Layout]:
        """Exchange documents; on the way, compare settings and collect what each rank measured."""
        self._asked += 1
        slots = dict.fromkeys(kind.slot for _, kind in requests)
        measured = [(slot, *pair) for slot in slots for pair in self._measured.pop(slot, [])]
        figures = [(int(meter.seconds * 1e9), meter.sent_bytes) for *_, meter in measured]
        own = Announcement.of(requests, figures, self._asked, self._meter.dispatches + self._meter.returns)
        announced = [Announcement.read(row) for row in group.gather(own.row(), doing=f"planning {place}")]
        agree(announced, (kind for _, kind in requests), group, place)
        for at, ((_, _, half), micro, meter) in enumerate(measured):
            seconds, sent = np.stack([one.figures[at] for one in announced]).T
            # Both nano-batches go through each layer: one of them counts it.
            self.history.measured(micro, seconds / 1e9, sent, 0 if half == 2 else meter.calls)
        return [layout_of(asked) for asked in zip(*(one.requests for one in announced), strict=True)]
