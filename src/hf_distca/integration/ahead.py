"""Planning a whole optimizer step before its first micro-batch, so that no forward waits for an exchange of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.documents import PackedDocuments, PlansAhead, read_documents
from hf_distca.agreement.planner import Planning
from hf_distca.integration.nano_batches import cut
from hf_distca.integration.session import current_session

__all__ = ["Announced", "announce", "have_documents", "plan_ahead"]


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
    announced = announce(batches, current_session().planner.recent_keys())
    return list(batches) if announced is None else announced.planned()


@dataclass(frozen=True, eq=False)
class Announced:
    """The micro-batches of an optimizer step whose documents all ranks know, and whose plans are being made.

    Attributes:
        batches: as they were announced.
        documents: those of each batch.
        keys: the plans that each batch gets.
        planning: of each batch, those of all keys.
    """

    batches: list[Any]
    documents: list[PackedDocuments]
    keys: list[PlanKey]
    planning: Planning

    def are(self, batches: Sequence[Any]) -> bool:
        """Whether these batches are the announced ones."""
        return len(batches) == len(self.batches) and all(one is other for one, other in zip(batches, self.batches, strict=True))

    def planned(self) -> list[Any]:
        """Copies of the batches, with their plans, once these are made and all ranks have the same."""
        session, planned = current_session(), []
        with session.group.reporting(f"planning {self.planning.place}"):
            plans = iter(session.planner.finish(self.planning, session.group))
        for batch, one in zip(self.batches, self.documents, strict=True):
            planned.append(copy(batch))
            planned[-1]["distca_documents"] = one.planned(PlansAhead({key: next(plans) for key in self.keys}))
        return planned


def announce(batches: Sequence[Any], keys: list[PlanKey], *, after: int = 0, beside: bool = False) -> Announced | None:
    """Announce the documents of micro-batches to the other ranks, which must do so with as many at the same point.

    Args:
        batches: micro-batches in the order in which they will run.
        keys: the plans that each needs, as the planner knows them from the micro-batches before.
        after: micro-batches that will run before these, for errors.
        beside: let plans be made while the caller goes on.

    Returns:
        None if there is nothing to plan, or a batch has no documents that are to be planned.
    """
    documents = _documents(batches)
    if not keys or documents is None:
        return None
    session = current_session()
    first = session.planner.next_number + after
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.group.reporting(f"planning {place}"):
        requests = [_requests(batch, one, keys, session.config.tile) for batch, one in zip(batches, documents, strict=True)]
        planning = session.planner.begin(list(chain.from_iterable(requests)), session.group, place, beside=beside)
    return Announced(list(batches), documents, keys, planning)


def have_documents(batches: Sequence[Any]) -> bool:
    """Whether there are batches, and each says on the host which documents it has, and is to be planned."""
    return bool(_documents(batches))


def _documents(batches: Sequence[Any]) -> list[PackedDocuments] | None:
    """The documents of each batch; None if one has none, or is a share, which has its plans."""
    known = (batch.get("distca_documents") for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch)
    found = [one for one in known if isinstance(one, PackedDocuments) and one.dealt is None]
    return found if len(found) == len(batches) else None


def _requests(batch: Mapping[str, Any], documents: PackedDocuments, keys: Sequence[PlanKey], tile: int) -> list[Request]:
    """The documents of a batch, as the attention of each key will find them."""
    shape: tuple[int, int] = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    padding = mask.bool() if isinstance(mask, torch.Tensor) else None
    whole = read_documents(*shape, packed=documents, padding=padding)
    chunked = {chunk: whole.in_chunks(chunk) for chunk in {key.chunk for key in keys}}
    nano = {chunk: cut(*shape, chunked[chunk], tile)[2] for chunk in {key.chunk for key in keys if key.nano}}
    return [(nano[key.chunk][key.nano - 1] if key.nano else chunked[key.chunk], key) for key in keys]
