"""`DistCATrainerMixin`: a Trainer that plans whole optimizer steps ahead, so that
no forward waits for an exchange of documents.

`plan_ahead` does so for custom loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from transformers import TrainerCallback, TrainerState

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.agreement.planner import PendingPlans, Planner
from hf_distca.integration.checks.share_readers import check_sharing
from hf_distca.integration.current_session import current_session
from hf_distca.integration.nano_batches import choose_cut
from hf_distca.integration.session import Session
from hf_distca.integration.training.callback import (
    DistCACallback,
    find_callback,
    insert_before_reporters,
)
from hf_distca.integration.training.share_tokens import share_tokens

__all__ = ["AnnouncedStep", "DistCATrainerMixin", "announce_step", "plan_ahead"]


def plan_ahead(batches: Sequence[Any]) -> list[Any]:
    """Plan core attention for the micro-batches of an optimizer step at once: two small collectives
    for all of them.

    For loops that have their batches before they run them; all ranks must call it at the same
    point, with as many batches. The required plans are known from earlier micro-batches, so the
    first step is planned as it runs.

    Args:
        batches: micro-batches made by `PackingCollator`, each for one forward, in the order in
            which they will run.

    Returns:
        The batches with their plans; unchanged if one of them has no documents (`PackedDocuments`).

    Raises:
        DistCADesyncError: if ranks do not agree, or do not all call it.
    """
    session = current_session()
    announced = announce_step(session, batches, session.planner.resume_progress().pop_recent_keys())
    return list(batches) if announced is None else announced.finish_plans()


@dataclass(frozen=True, eq=False)
class AnnouncedStep:
    """Micro-batches of an optimizer step whose documents all ranks know, and whose plans are being
    made.

    Attributes:
        batches: as they were announced.
        keys: the plans that each batch gets.
        planner: makes the plans.
        pending_plans: plans of all keys for each batch.
    """

    batches: list[Any]
    keys: list[PlanKey]
    planner: Planner
    pending_plans: PendingPlans

    def finish_plans(self) -> list[Any]:
        """Return copies of the batches, with their plans, once these are made and all ranks have
        the same.
        """
        batches = [copy(batch) for batch in self.batches]
        with self.pending_plans.group.reporting(f"planning {self.pending_plans.place}"):
            plans = iter(self.planner.finish_plans(self.pending_plans))
        for batch in batches:
            batch["distca_documents"] = packed = copy(batch["distca_documents"])
            packed.prepared_plans = {key: next(plans) for key in self.keys}
        return batches


def announce_step(
    session: Session,
    batches: Sequence[Any],
    keys: list[PlanKey],
    *,
    after: int = 0,
    in_background: bool = False,
) -> AnnouncedStep | None:
    """Announce the documents of micro-batches to the other ranks, which must do so with as many at
    the same point.

    Args:
        session: session of the process.
        batches: micro-batches in the order in which they will run.
        keys: the plans that each needs, known to the planner from earlier micro-batches.
        after: number of micro-batches that will run before these, for errors.
        in_background: make plans in the background.

    Returns:
        None if there is nothing to plan, or if a batch has no documents to plan.
    """
    if not keys or not _can_be_planned(batches):
        return None
    first = session.planner.resume_progress().next_number + after
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.join_group().reporting(f"planning {place}"):
        requests = [_make_requests(batch, keys, session.config.tile) for batch in batches]
        plans = session.planner.begin_plans(
            list(chain.from_iterable(requests)),
            session.join_group(),
            place,
            in_background=in_background,
        )
    return AnnouncedStep(list(batches), keys, session.planner, plans)


def _can_be_planned(batches: Sequence[Any]) -> bool:
    """Return whether all batches have documents, and none is a share, which has its plans."""
    return all(
        isinstance(batch, Mapping)
        and "input_ids" in batch
        and isinstance(packed := batch.get("distca_documents"), PackedDocuments)
        and packed.dealt_share is None
        for batch in batches
    )


def _make_requests(batch: Mapping[str, Any], keys: Sequence[PlanKey], tile: int) -> list[Request]:
    """Return the documents of a batch, in the form that the attention of each key will find."""
    shape: tuple[int, int] = batch["input_ids"].shape
    documents = TokenBatch.of(batch).read_documents()
    chunked = {chunk: documents.cut_into_chunks(chunk) for chunk in {key.chunk for key in keys}}
    nano_parts = {
        chunk: choose_cut(*shape, chunked[chunk], tile)[2]
        for chunk in {key.chunk for key in keys if key.nano}
    }
    return [
        (nano_parts[key.chunk][key.nano - 1] if key.nano else chunked[key.chunk], key)
        for key in keys
    ]


class DistCATrainerMixin:
    """Plans optimizer steps ahead and logs the balance: ``class
    MyTrainer(hf_distca.DistCATrainerMixin, Trainer)``.

    While a step runs, the documents of the next one are known to all ranks already, so no forward
    waits for the others to plan. It pays with gradient accumulation and many ranks, and needs the
    documents of `PackingCollator`. For that, batches are drawn from the loader one optimizer step
    early, never past the end of an epoch or of training. Batches, their order and the number of
    items in each step stay the same; only data generated in the training process itself with the
    global random numbers (no worker processes) differs, because it is generated at another time.

    While it trains, its `DistCACallback` stands in front of the reporters; without one, a callback
    that only logs and checks is added.

    Attributes:
        shares_tokens: deal the micro-batches of every step anew among the ranks, by `share_tokens`,
            instead of planning ahead. Set it in your class where the loader must stay as it is.
            Losses and models for which documents must be whole are refused before the first step.
    """

    shares_tokens: bool = False
    _iterator: Iterator[Any] | None = None  # of this epoch
    _drawn_batches: Iterator[Any] = iter(())  # batches that the next step begins with
    _announced_step: AnnouncedStep | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        callbacks: list[TrainerCallback] = self.callback_handler.callbacks  # type: ignore[attr-defined]
        users = find_callback(callbacks)
        callback = users or DistCACallback(summary=False, record=False)
        place = None if users is None else callbacks.index(users)
        insert_before_reporters(callback, callbacks)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            callbacks.remove(callback)
            if place is not None:
                callbacks.insert(place, callback)
            self._reset_step()  # worker processes end with their iterator

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the micro-batches of the next optimizer step, planned, and the Trainer's other
        results.
        """
        session = current_session()
        if epoch_iterator is not self._iterator:
            self._reset_step()
            self._iterator = epoch_iterator
            if self.shares_tokens:
                trainer: Any = self
                check_sharing(trainer, session.join_trainers().size)
        source = chain(self._drawn_batches, epoch_iterator)
        batches, *rest = super().get_batch_samples(source, num_batches, *args, **kwargs)  # type: ignore[misc]
        if self.shares_tokens:
            return (share_tokens(batches), *rest)
        keys = session.planner.resume_progress().pop_recent_keys()
        announced, self._announced_step = self._announced_step, None
        if announced is None or list(map(id, batches)) != list(map(id, announced.batches)):
            announced = announce_step(session, batches, keys)
        planned = batches if announced is None else announced.finish_plans()
        state: TrainerState = self.state  # type: ignore[attr-defined]
        if (
            keys
            and batches
            and _can_be_planned(batches)
            and state.global_step + 1 < state.max_steps
        ):
            drawn = list(self._drawn_batches)
            drawn += islice(self._read_to_end(epoch_iterator), max(0, num_batches - len(drawn)))
            self._drawn_batches = iter(drawn)
            if drawn:
                self._announced_step = announce_step(
                    session, drawn[:num_batches], keys, after=len(batches), in_background=True
                )
        return (planned, *rest)

    def _read_to_end(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, without asking for one after the last, which
        would tell accelerate that the epoch is over.
        """
        while not self.accelerator.gradient_state.end_of_dataloader:  # type: ignore[attr-defined]
            try:
                yield next(epoch_iterator)
            except StopIteration:
                return

    def _reset_step(self) -> None:
        self._iterator, self._drawn_batches, self._announced_step = None, iter(()), None
