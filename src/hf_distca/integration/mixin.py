"""`DistCATrainerMixin`: a Trainer that plans whole optimizer steps ahead, so that no forward waits for an exchange of documents.

`plan_ahead` does so for loops of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.documents import PackedDocuments, PlansAhead, read_documents
from hf_distca.agreement.planner import Planning
from hf_distca.integration.callback import DistCACallback, before_the_last_row
from hf_distca.integration.checks import check_loader, check_shares, check_sharing
from hf_distca.integration.nano_batches import cut
from hf_distca.integration.reports import Reading
from hf_distca.integration.session import current_session
from hf_distca.integration.share_tokens import share_tokens

__all__ = ["Announced", "DistCATrainerMixin", "announce", "have_documents", "plan_ahead"]


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
        return len(batches) == len(self.batches) and all(
            batch is announced for batch, announced in zip(batches, self.batches, strict=True)
        )

    def planned(self) -> list[Any]:
        """Copies of the batches, with their plans, once these are made and all ranks have the same."""
        session, planned = current_session(), []
        with session.group.reporting(f"planning {self.planning.place}"):
            plans = iter(session.planner.finish(self.planning, session.group))
        for batch, documents in zip(self.batches, self.documents, strict=True):
            planned.append(copy(batch))
            planned[-1]["distca_documents"] = documents.planned(PlansAhead({key: next(plans) for key in self.keys}))
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
        requests = [_requests(batch, packed, keys, session.config.tile) for batch, packed in zip(batches, documents, strict=True)]
        planning = session.planner.begin(list(chain.from_iterable(requests)), session.group, place, beside=beside)
    return Announced(list(batches), documents, keys, planning)


def have_documents(batches: Sequence[Any]) -> bool:
    """Whether there are batches, and each says on the host which documents it has, and is to be planned."""
    return bool(_documents(batches))


def _documents(batches: Sequence[Any]) -> list[PackedDocuments] | None:
    """The documents of each batch; None if one has none, or is a share, which has its plans."""
    known = (batch.get("distca_documents") for batch in batches if isinstance(batch, Mapping) and "input_ids" in batch)
    documents = [packed for packed in known if isinstance(packed, PackedDocuments) and packed.dealt is None]
    return documents if len(documents) == len(batches) else None


def _requests(batch: Mapping[str, Any], documents: PackedDocuments, keys: Sequence[PlanKey], tile: int) -> list[Request]:
    """The documents of a batch, as the attention of each key will find them."""
    shape: tuple[int, int] = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    padding = mask.bool() if isinstance(mask, torch.Tensor) else None
    whole = read_documents(*shape, packed=documents, padding=padding)
    chunked = {chunk: whole.in_chunks(chunk) for chunk in {key.chunk for key in keys}}
    nano = {chunk: cut(*shape, chunked[chunk], tile)[2] for chunk in {key.chunk for key in keys if key.nano}}
    return [(nano[key.chunk][key.nano - 1] if key.nano else chunked[key.chunk], key) for key in keys]


class DistCATrainerMixin:
    """Plans optimizer steps ahead and logs the balance: ``class MyTrainer(hf_distca.DistCATrainerMixin, Trainer)``.

    While a step runs, the documents of the next one are known to all ranks already, so no forward waits for the others to plan.
    It pays with gradient accumulation and many ranks, and needs the documents of `PackingCollator`. For that, batches are drawn
    from the loader one optimizer step early, never past the end of an epoch or of training. Batches, their order and the number
    of items in each step stay what they were; only data that is made up in the training process itself with the global random
    numbers (no worker processes) comes out differently, as it is made at another time.

    Figures go into the logs before the Trainer hands these to ``state.log_history`` and to reporters; `DistCACallback` says what
    they mean, and beside this class is still what gives settings and checks the model.

    Attributes:
        shares_tokens: deal the micro-batches of every step anew among the ranks, by `share_tokens`, instead of planning ahead.
            Set it in your class where the loader must stay as it is. Losses and models for which documents must be whole are
            refused before the first step.
    """

    shares_tokens: bool = False
    _figures: Reading | None = None
    _iterator: Iterator[Any] | None = None  # of this epoch
    _drawn: Iterator[Any] = iter(())  # batches that the next step begins with
    _announced: Announced | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does."""
        ours = [callback for callback in self.callback_handler.callbacks if isinstance(callback, DistCACallback)]  # type: ignore[attr-defined]
        for callback in ours:
            callback.reports = False
        self._figures = None
        callbacks, last = self.callback_handler.callbacks, _LastRow(self)  # type: ignore[attr-defined]
        callbacks.insert(0, last)  # reporters close their files at the end
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            callbacks.remove(last)
            for callback in ours:  # it may be given to another Trainer
                callback.reports = True
            self._forget()  # worker processes end with their iterator

    def get_train_dataloader(self) -> Any:
        """The loader of the Trainer, refused if it is not one for distca."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        self._check_loader(loader, evaluating=False)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader of the Trainer, refused if it is not one for distca."""
        loader = super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]
        self._check_loader(loader, evaluating=True)
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of the next optimizer step, planned, and what the Trainer returns beside them."""
        if self._figures is None:  # the first of this training: settings are known, and nothing has been drawn
            if self.shares_tokens:
                trainer: Any = self
                check_sharing(trainer, current_session().group.size)
            self._figures = Reading.from_now()
        if epoch_iterator is not self._iterator:
            self._forget()
        source = chain(self._drawn, epoch_iterator)
        batches, *rest = super().get_batch_samples(source, num_batches, *args, **kwargs)  # type: ignore[misc]
        if self.shares_tokens:
            return (share_tokens(batches), *rest)
        keys, announced, self._announced = current_session().planner.recent_keys(), self._announced, None
        if announced is None or not announced.are(batches):
            announced = announce(batches, keys)
        planned = batches if announced is None else announced.planned()
        if keys and have_documents(batches) and not self._is_last_step():
            self._iterator = epoch_iterator
            drawn = list(self._drawn)
            drawn += islice(self._up_to_the_end(epoch_iterator), max(0, num_batches - len(drawn)))
            self._drawn = iter(drawn)
            if drawn:
                self._announced = announce(drawn[:num_batches], keys, after=len(batches), beside=True)
        return (planned, *rest)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with the figures of the balance in the logs of training steps."""
        if "loss" in logs and self._figures is not None:
            logs.update(self._figures.rounded())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def log_what_is_left(self) -> None:
        """Log what the last steps measured, which no further plan tells, in a row before the one that the Trainer ends with."""
        if self._figures is None:
            return
        current_session().collect()
        if figures := self._figures.rounded():
            self.log(figures)
            before_the_last_row(self.state)  # type: ignore[attr-defined]

    def _check_loader(self, loader: Any, *, evaluating: bool) -> None:
        trainer: Any = self
        check_loader(loader)
        check_shares(loader, model=trainer.model, args=trainer.args, trainer=trainer, evaluating=evaluating)

    def _is_last_step(self) -> bool:
        state: TrainerState = self.state  # type: ignore[attr-defined]
        return state.global_step + 1 >= state.max_steps

    def _up_to_the_end(self, epoch_iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch, without asking for one after the last: that would tell accelerate that the epoch is over."""
        gradient_state = self.accelerator.gradient_state  # type: ignore[attr-defined]
        while not gradient_state.end_of_dataloader:
            try:
                yield next(epoch_iterator)
            except StopIteration:
                return

    def _forget(self) -> None:
        self._iterator, self._drawn, self._announced = None, iter(()), None


class _LastRow(TrainerCallback):
    """Tells a Trainer that training ends, before its reporters hear of it."""

    def __init__(self, trainer: DistCATrainerMixin) -> None:
        self._trainer = trainer

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer.log_what_is_left()
