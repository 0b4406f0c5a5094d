"""Planning a whole optimizer step before its first micro-batch, so that no forward waits for an exchange of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hf_distca.agreement.announce import Kind
from hf_distca.agreement.documents import LocalDocuments, PackedDocuments, PlansAhead, read_documents
from hf_distca.agreement.planner import Planned
from hf_distca.integration.halves import cut
from hf_distca.integration.session import current_session

__all__ = ["Announced", "announce", "have_documents", "known_kinds", "plan_ahead"]


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
    announced = announce(batches, known_kinds())
    return list(batches) if announced is None else announced.planned()


def known_kinds() -> list[Kind]:
    """What there is to plan for a micro-batch, from those since the last call; none before the first, or for a rank alone."""
    session = current_session()
    return [kind for kind in session.planner.recent_kinds() if kind.config == session.config]


@dataclass(frozen=True, eq=False)
class Announced:
    """The micro-batches of an optimizer step whose documents all ranks know.

    Attributes:
        batches: as they were announced.
        documents: those of each batch.
        kinds: the plans that each batch gets.
        plans: of each batch, those of all kinds.
    """

    batches: list[Any]
    documents: list[PackedDocuments]
    kinds: list[Kind]
    plans: list[Planned]

    def are(self, batches: Sequence[Any]) -> bool:
        """Whether these batches are the announced ones."""
        return len(batches) == len(self.batches) and all(one is other for one, other in zip(batches, self.batches, strict=True))

    def planned(self) -> list[Any]:
        """Copies of the batches, with their plans."""
        plans, planned = iter(self.plans), []
        for batch, one in zip(self.batches, self.documents, strict=True):
            planned.append(copy(batch))
            planned[-1]["distca_documents"] = replace(one, ahead=PlansAhead({kind: next(plans) for kind in self.kinds}))
        return planned


def announce(batches: Sequence[Any], kinds: list[Kind], *, after: int = 0) -> Announced | None:
    """Announce the documents of micro-batches to the other ranks, which must do so with as many at the same point.

    Args:
        batches: micro-batches in the order in which they will run.
        kinds: the plans that each needs, as `known_kinds` gives them.
        after: micro-batches that will run before these, for errors.

    Returns:
        None if there is nothing to plan, or a batch has no documents.
    """
    documents = _documents(batches)
    if not kinds or not documents or len(documents) < len(batches):
        return None
    session = current_session()
    first = session.planner.next_number + after
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.group.reporting(f"planning {place}"):
        shapes = [batch["input_ids"].shape for batch in batches]
        requests = [_requests(shape, one, kinds, session.config.tile) for shape, one in zip(shapes, documents, strict=True)]
        plans = session.planner.plan(list(chain.from_iterable(requests)), session.group, place)
    return Announced(list(batches), documents, kinds, plans)


def have_documents(batches: Sequence[Any]) -> bool:
    """Whether each of these batches says on the host which documents it has."""
    return bool(batches) and len(_documents(batches)) == len(batches)


def _documents(batches: Sequence[Any]) -> list[PackedDocuments]:
    """The documents of the batches that have some."""
    known = (batch.get("distca_documents") for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch)
    return [one for one in known if isinstance(one, PackedDocuments)]


def _requests(
    shape: tuple[int, int], documents: PackedDocuments, kinds: Sequence[Kind], tile: int
) -> list[tuple[LocalDocuments, Kind]]:
    """The documents of a batch of (batch, length) tokens, as the attention of each kind will find them."""
    whole = read_documents(*shape, packed=documents)
    chunked = {chunk: whole.in_chunks(chunk) for chunk in {kind.chunk for kind in kinds}}
    halves = {chunk: cut(*shape, chunked[chunk], tile)[2] for chunk in {kind.chunk for kind in kinds if kind.half}}
    return [(halves[kind.chunk][kind.half - 1] if kind.half else chunked[kind.chunk], kind) for kind in kinds]
