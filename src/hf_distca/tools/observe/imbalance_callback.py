"""`ImbalanceCallback`: adds the imbalance of attention to the logs of a Trainer.
`hf-distca run --observe` also uses it.
"""

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
    """Adds the imbalance of attention over ranks to the logs of a Trainer. It works under any
    attention, and does not change the training.

    The logs of rank 0 get figures ``distca/observed_...`` of the micro-batches since the last log:
    slowest rank / mean (estimated from documents, measured, and estimated under hf-distca), and the
    rank that was slowest most often. At the end of the training, rank 0 prints these figures for
    the whole training, and the reason why a rank was slow. All ranks need the callback, because
    they gather their measurements over a separate communicator at each log.
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
        """Gather the facts of all ranks if the Trainer logs after this step."""
        if control.should_log or control.should_training_stop:
            self._observer.gather()

    on_epoch_end = on_step_end

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures since the last log to the logged figures."""
        if "loss" in (logs := kwargs.get("logs") or {}):
            figures = self._observer.take_figures()
            # Change the history, too, because the Trainer has already copied the logs into it.
            for row in (logs, *state.log_history[-1:]):
                row.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop watching, and print the summary."""
        self._observer.end()


def observe_trainers() -> None:
    """Add the callback to every Trainer of this process that begins to train without it."""

    def observe(trainer: Trainer) -> None:
        callbacks = trainer.callback_handler.callbacks
        if not any(isinstance(callback, ImbalanceCallback) for callback in callbacks):
            trainer.add_callback(ImbalanceCallback())

    call_before_training(observe)
