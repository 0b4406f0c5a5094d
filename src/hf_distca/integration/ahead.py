"""Planning a whole optimizer step before its first micro-batch, so that no forward waits for an exchange of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from hf_distca.integration.announcing import Kind
from hf_distca.integration.documents import LocalDocuments, PackedDocuments, PlansAhead, read_documents
from hf_distca.integration.halves import cut
from hf_distca.integration.session import current_session

__all__ = ["PlanAheadMixin", "plan_ahead"]


def plan_ahead(batches: Sequence[Any]) -> list[Any]:
    """Plan core attention for the micro-batches of an optimizer step at once: two small collectives for all of them.

    For loops that have their batches before they run them; all ranks must call it at the same point, with as many batches.
    What there is to plan is known from the micro-batches before, so the first step is planned as it runs.

    Args:
        batches: micro-batches as `PackingCollator` makes them, each for one forward, in the order in which they will run.

    Returns:
        The batches, those that have documents (`PackedDocuments`) with their plans.

    Raises:
        DistCADesyncError: if ranks do not agree, or do not all call it.
    """
    session = current_session()
    kinds = [kind for kind in session.planner.recent_kinds() if kind.config == session.config]
    packed = [_packed(batch) for batch in batches]
    if not kinds or not batches or None in packed:
        return list(batches)
    first = session.planner.next_number
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.group.reporting(f"planning {place}"):
        parts = [_parts(batch, one, kinds) for batch, one in zip(batches, packed, strict=True)]
        plans = iter(session.planner.plan([pair for pairs in parts for pair in pairs], session.group, place))
    planned = []
    for batch, one in zip(batches, packed, strict=True):
        ahead = PlansAhead({kind: next(plans) for kind in kinds})
        planned.append(copy(batch))
        planned[-1]["distca_documents"] = replace(one, ahead=ahead)  # type: ignore[type-var]  # not None
    return planned


def _packed(batch: Any) -> PackedDocuments | None:
    packed = batch.get("distca_documents") if isinstance(batch, Mapping) and "input_ids" in batch else None
    return packed if isinstance(packed, PackedDocuments) else None


def _parts(batch: Any, packed: PackedDocuments | None, kinds: Sequence[Kind]) -> list[tuple[LocalDocuments, Kind]]:
    """The documents of a batch, as the attention of each kind will find them."""
    batch_size, length = batch["input_ids"].shape
    whole = read_documents(batch_size, length, packed=packed)
    parts = []
    for kind in kinds:
        local = whole if kind.chunk is None else whole.in_chunks(kind.chunk)
        if kind.half:
            _, _, halves = cut(batch_size, length, local, kind.config.tile)
            local = halves[kind.half - 1]
        parts.append((local, kind))
    return parts


class PlanAheadMixin:
    """Plans every optimizer step ahead in a Trainer: ``class MyTrainer(hf_distca.PlanAheadMixin, Trainer)``.

    It pays with gradient accumulation and many ranks: each micro-batch planned by itself waits for all ranks.
    """

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next optimizer step, planned, and what the Trainer returns beside them."""
        batches, *rest = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        return (plan_ahead(batches), *rest)
