"""`DistCATrainerMixin`: a Trainer that plans whole optimizer steps ahead, so that
no forward waits for an exchange of documents.

`plan_ahead` does so for custom loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.integration.checks.share_readers import check_sharing
from hf_distca.integration.nano_batches import choose_cut
from hf_distca.integration.session import Session
from hf_distca.integration.training.callback import (
    find_or_add_callback,
    find_session,
    move_before_reporters,
)
from hf_distca.integration.training.share_tokens import deal_drawn_batches


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
    session = find_session()
    finish_plans = announce_step(
        session, batches, session.planner.resume_progress().pop_recent_keys()
    )
    return list(batches) if finish_plans is None else finish_plans()


def announce_step(
    session: Session,
    batches: Sequence[Any],
    keys: list[PlanKey],
    *,
    after: int = 0,
    in_background: bool = False,
) -> Callable[[], list[Any]] | None:
    """Announce the documents of micro-batches to the other ranks, which must do so with as many at
    the same point.

    Args:
        session: session of the process.
        batches: micro-batches in the order in which they will run.
        keys: the plans that each needs, known to the planner from earlier micro-batches.
        after: number of micro-batches that will run before these, for errors.
        in_background: make plans in the background.

    Returns:
        A function that waits until the plans are made and all ranks have the same, and returns
        copies of the batches with them; None if there is nothing to plan, or if a batch has no
        documents to plan.
    """
    can_be_planned = all(
        isinstance(batch, Mapping)
        and "input_ids" in batch
        and isinstance(packed := batch.get("distca_documents"), PackedDocuments)
        and packed.dealt_share is None  # a share has its plans
        for batch in batches
    )
    if not keys or not can_be_planned:
        return None
    first = session.planner.resume_progress().next_number + after
    place = f"micro-batches {first} to {first + len(batches) - 1}, ahead"
    with session.join_group().report_errors(f"planning {place}"):
        pending = session.planner.begin_plans(
            [
                request
                for batch in batches
                for request in _make_requests(batch, keys, session.config.tile)
            ],
            session.join_group(),
            place,
            in_background=in_background,
        )

    def finish_plans() -> list[Any]:
        with pending.group.report_errors(f"planning {pending.place}"):
            plans = iter(session.planner.finish_plans(pending))
        planned = [copy(batch) for batch in batches]
        for batch in planned:
            batch["distca_documents"] = packed = copy(batch["distca_documents"])
            packed.prepared_plans = {key: next(plans) for key in keys}
        return planned

    return finish_plans


def _make_requests(batch: Mapping[str, Any], keys: Sequence[PlanKey], tile: int) -> list[Request]:
    """Return the documents of a batch, in the form that the attention of each key will find."""
    shape: tuple[int, int] = batch["input_ids"].shape
    documents = TokenBatch.from_batch(batch).read_documents()
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

    When it trains, its `DistCACallback` comes in front of the reporters; without one, a callback
    that only logs and checks is added.

    Attributes:
        shares_tokens: deal the micro-batches of every step anew among the ranks, by `share_tokens`,
            instead of planning ahead. Set it in your class where the loader must stay as it is.
            Losses and models for which documents must be whole are refused before the first step.
    """

    shares_tokens: bool = False
    _iterator: Iterator[Any] | None = None  # of this epoch
    _drawn_batches: Iterator[Any] = iter(())  # batches that the next step begins with
    _announced_batches: Sequence[Any] = ()
    _finish_plans: Callable[[], list[Any]] | None = None  # of these

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        trainer: Any = self
        callback = find_or_add_callback(trainer, summary=False, record=False)
        move_before_reporters(callback, trainer.callback_handler.callbacks)
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._reset_step()  # worker processes end with their iterator

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the micro-batches of the next optimizer step, planned, and the Trainer's other
        results.
        """
        trainer: Any = self
        session = find_session(trainer)
        if epoch_iterator is not self._iterator:
            self._reset_step()
            self._iterator = epoch_iterator
            if self.shares_tokens:
                check_sharing(trainer, session.join_trainers().size)
        source = chain(self._drawn_batches, epoch_iterator)
        batches, *rest = super().get_batch_samples(source, num_batches, *args, **kwargs)  # type: ignore[misc]
        if self.shares_tokens:
            return (deal_drawn_batches(session, batches), *rest)
        keys = session.planner.resume_progress().pop_recent_keys()
        finish_plans, self._finish_plans = self._finish_plans, None
        if finish_plans is None or [*map(id, batches)] != [*map(id, self._announced_batches)]:
            finish_plans = announce_step(session, batches, keys)
        if finish_plans is None:
            return (batches, *rest)
        planned = finish_plans()
        if planned and trainer.state.global_step + 1 < trainer.state.max_steps:
            ahead = chain(self._drawn_batches, self._read_to_end(epoch_iterator))
            drawn = self._announced_batches = list(islice(ahead, num_batches))
            self._drawn_batches = chain(drawn, self._drawn_batches)
            if drawn:
                self._finish_plans = announce_step(
                    session, drawn, keys, after=len(batches), in_background=True
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
        self._iterator = None
        self._drawn_batches = iter(())
        self._finish_plans = None
        self._announced_batches = ()
