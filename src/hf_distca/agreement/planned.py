"""Plans that are asked for, are being made, and are made."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.config import DistCAConfig
from hf_distca.schedule.layout import IntArray
from hf_distca.schedule.plan import Plan

__all__ = ["Planned", "Planning", "Request"]

Request = tuple[Documents, PlanKey]


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and what it was made of.

    Attributes:
        key: what it is for.
        plan: the same on all ranks.
        config: the settings that it was made under.
        rows: the documents that this rank announced for it, as in `Documents`.
        milliseconds: what planning took, exchange of documents included.
        source: of a share, which global batch, and which plan; the same on all ranks that hold the same.
        per_node: ranks of a node, as the plan counts on; None if nodes were not told apart.
        planned_here: plans of its share that this process made since the last one, instead of the loader.
    """

    key: PlanKey
    plan: Plan
    config: DistCAConfig
    rows: IntArray
    milliseconds: float
    source: str = ""
    per_node: int | None = None
    planned_here: int = 0


@dataclass(frozen=True, eq=False)
class Planning:
    """Plans that are being made.

    Attributes:
        requests: what they are for, in the order of the plans.
        config: the settings.
        place: what is planned, for errors.
        milliseconds: what announcing took.
        plans: the plans and the milliseconds of making them.
    """

    requests: Sequence[Request]
    config: DistCAConfig
    place: str
    milliseconds: float
    plans: Future[tuple[list[Plan], float]]
