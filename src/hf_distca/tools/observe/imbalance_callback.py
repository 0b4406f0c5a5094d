"""`ImbalanceCallback`: the meter in a Trainer; and that of `hf-distca run --observe`."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_distca.integration.callers import find_trainer
from hf_distca.integration.training.callback import (
    call_before_training,
    move_before_reporters,
)
from hf_distca.tools.observe.run_observer import Observer


class ImbalanceCallback(TrainerCallback):
    """Adds the imbalance of attention over ranks to the logs of a Trainer, under whatever attention
    its model has, and changes nothing.

    Logs of rank 0 get ``distca/observed_...``, over the micro-batches since the last log: the
    slowest rank by the mean, by documents and by measured seconds, the rank that was most often the
    slowest, and the estimate of what hf-distca would make of it. Rank 0 prints them for the whole
    training at its end, and why a rank was slow. Every rank has the callback, or none: at a log,
    ranks gather what they saw, over a separate communicator.
    """

    def __init__(self) -> None:
        self._observer = Observer()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        trainer = find_trainer(self)
        if trainer is not None:
            move_before_reporters(self, trainer.callback_handler.callbacks)
        self._observer = Observer()
        self._observer.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gather the facts of ranks, if there will be a log."""
        if control.should_log or control.should_training_stop:
            self._observer.gather()

    on_epoch_end = on_step_end

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures since the last log to those of training."""
        if "loss" in (logs := kwargs.get("logs") or {}):
            figures = self._observer.take_figures()
            # The Trainer has already put a copy of the logs into the history.
            for row in (logs, *state.log_history[-1:]):
                row.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sum up, and watch no more."""
        self._observer.end()


def observe_trainers() -> None:
    """Give every Trainer of this process the callback when its training begins, if it has none."""

    def observe(trainer: Trainer) -> None:
        callbacks = trainer.callback_handler.callbacks
        if not any(isinstance(callback, ImbalanceCallback) for callback in callbacks):
            trainer.add_callback(ImbalanceCallback())

    call_before_training(observe)
