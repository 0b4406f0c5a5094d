"""`DistCACallback`: configures distca for a Trainer and reports the balance with every log."""

from __future__ import annotations

import inspect
import logging
import time
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from hf_distca.config import DistCAConfig
from hf_distca.integration.session import attention_seconds, configure, current_session

__all__ = ["DistCACallback"]

_log = logging.getLogger("hf_distca")


class DistCACallback(TrainerCallback):
    """Adds the balance of core attention to the logs of a Trainer: console, ``state.log_history`` and every reporter.

    Figures, since the last log:

    - ``distca/imbalance_estimated_before``, ``..._after``: slowest rank / mean of all ranks, by the scheduler's estimate, if
      every rank computed its own attention, and as planned.
    - ``distca/imbalance_measured_after``: the same of measured kernel seconds; ``..._measured_before`` gives each server's
      measured seconds back to the home ranks of its tasks, in proportion to their estimates.
    - ``distca/planning_ms``: milliseconds of planning per micro-batch, exchange of the documents included.
    - ``distca/exchanged_mb_per_layer``: megabytes the busiest rank sends per layer and micro-batch, forward and backward.
    - ``distca/server_time_share``: share of this rank's time spent in attention kernels, for itself and for others.

    Args:
        config: settings, used from the start of training; leave it out if you call `hf_distca.configure` yourself.
    """

    def __init__(self, config: DistCAConfig | None = None) -> None:
        self.config = config
        self._clock = time.perf_counter()
        self._seconds = 0.0

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move in front of the reporters: a callback behind them changes the logs too late for them to see."""
        handler = _calling_handler(self)
        if handler is None:
            _log.warning("DistCACallback found no CallbackHandler: balance figures reach log_history, but not the reporters.")
            return
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Apply the settings and start counting."""
        if self.config is not None:
            configure(self.config)
        current_session().history.take()
        self._clock, self._seconds = time.perf_counter(), attention_seconds()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures to the logs of a training step."""
        logs: dict[str, Any] | None = kwargs.get("logs")
        if not logs or "loss" not in logs:
            return
        figures = current_session().history.take().figures()
        now, seconds = time.perf_counter(), attention_seconds()
        if figures:
            figures["distca/server_time_share"] = (seconds - self._seconds) / max(now - self._clock, 1e-9)
        self._clock, self._seconds = now, seconds
        figures = {name: round(value, 4) for name, value in figures.items()}
        logs.update(figures)
        if state.log_history:  # the Trainer has already put a copy of the logs there
            state.log_history[-1].update(figures)


def _calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """The handler that is calling `callback`. Callbacks are handed no reference to it, so look at who called."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler) and callback in caller.callbacks:
            return caller
        frame = frame.f_back
    return None
