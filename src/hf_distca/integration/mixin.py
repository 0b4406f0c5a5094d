"""`DistCATrainerMixin`: a Trainer that plans steps ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_distca.integration.ahead import Announced, announce, have_documents
from hf_distca.integration.figures import Reading
from hf_distca.integration.loaders import check_loader, check_shares, check_sharing
from hf_distca.integration.session import current_session
from hf_distca.integration.share_tokens import share_tokens
from hf_distca.integration.trainer import DistCACallback, before_the_last_row

__all__ = ["DistCATrainerMixin", "PlanAheadMixin"]


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
        ours = [one for one in self.callback_handler.callbacks if isinstance(one, DistCACallback)]  # type: ignore[attr-defined]
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


PlanAheadMixin = DistCATrainerMixin  # its first name
