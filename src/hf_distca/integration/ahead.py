"""Planning a whole optimizer step before its first micro-batch, so that no forward waits for an exchange of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import PackedDocuments, PlansAhead, read_documents
from hf_distca.agreement.planner import Request
from hf_distca.integration.nano_batches import cut
from hf_distca.integration.session import current_session

__all__ = ["PlanAheadMixin", "plan_ahead"]


def plan_ahead(batches: Sequence[Any]) -> list[Any]:
    """Plan core attention for the micro-batches of an optimizer step at once: two small collectives for all of them.

    For loops that have their batches before they run them; all ranks must call it at the same point, with as many batches.
    What there is to plan is known from the micro-batches before, so the first step is planned as it runs.

    Args:
        batches: micro-batches as `PackingCollator` makes them, each for one forward, in the order in which they will run.

    Returns:
        The batches with their plans; as they are if one of them has no documents (`PackedDocuments`).

    Raises:
        DistCADesyncError: if ranks do not agree, or do not all call it.
    """
    session = current_session()
    keys = session.planner.recent_keys()
    documents = _documents(batches)
    if not keys or not documents or len(documents) < len(batches):
        return list(batches)
    first = session.planner.next_number
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.group.reporting(f"planning {place}"):
        shapes = [batch["input_ids"].shape for batch in batches]
        requests = [_requests(shape, one, keys, session.config.tile) for shape, one in zip(shapes, documents, strict=True)]
        plans = iter(session.planner.plan(list(chain.from_iterable(requests)), session.group, place))
    planned = []
    for batch, one in zip(batches, documents, strict=True):
        planned.append(copy(batch))
        planned[-1]["distca_documents"] = one.planned(PlansAhead({key: next(plans) for key in keys}))
    return planned


def _documents(batches: Sequence[Any]) -> list[PackedDocuments]:
    """The documents of the batches that have some."""
    known = (batch.get("distca_documents") for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch)
    return [one for one in known if isinstance(one, PackedDocuments)]


def _requests(shape: tuple[int, int], documents: PackedDocuments, keys: Sequence[PlanKey], tile: int) -> list[Request]:
    """The documents of a batch of (batch, length) tokens, as the attention of each kind will find them."""
    whole = read_documents(*shape, packed=documents)
    chunked = {chunk: whole.in_chunks(chunk) for chunk in {key.chunk for key in keys}}
    nano = {chunk: cut(*shape, chunked[chunk], tile)[2] for chunk in {key.chunk for key in keys if key.nano}}
    return [(nano[key.chunk][key.nano - 1] if key.nano else chunked[key.chunk], key) for key in keys]


class PlanAheadMixin:
    """Plans every optimizer step ahead in a Trainer: ``class MyTrainer(hf_distca.PlanAheadMixin, Trainer)``.

    It pays with gradient accumulation and many ranks: each micro-batch planned by itself waits for all ranks.
    """

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next optimizer step, planned, and what the Trainer returns beside them."""
        batches, *rest = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        return (plan_ahead(batches), *rest)
