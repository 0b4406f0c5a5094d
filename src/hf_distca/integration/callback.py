"""`DistCACallback`: configures distca for a Trainer and reports the balance with every log."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from hf_distca.config import DistCAConfig
from hf_distca.errors import UnsupportedError
from hf_distca.integration.data import check_loader
from hf_distca.integration.families import check_family
from hf_distca.integration.figures import balance_figures
from hf_distca.integration.profile import write_trace
from hf_distca.integration.session import configure, current_session
from hf_distca.runtime.trace import Trace

__all__ = ["DistCACallback"]

_log = logging.getLogger("hf_distca")
_TRACED_STEP = 3  # the first ones make buffers and caches


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

    TensorBoard, W&B and trackio show them with the ``train/`` that transformers puts before the names of all training logs:
    ``train/distca/imbalance_measured_after``. They hold the figures of rank 0.

    Args:
        config: settings, used from the start of training; leave it out if you call `hf_distca.configure` yourself.
        trace_path: folder into which each rank writes a timeline of the third optimizer step, as `hf_distca.profile` does.
    """

    def __init__(self, config: DistCAConfig | None = None, trace_path: str | Path | None = None) -> None:
        self.config, self.trace_path = config, trace_path
        self._steps = 0
        self._model: PreTrainedModel | None = None
        self._calls = 0

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move in front of the reporters: a callback behind them changes the logs too late for them to see."""
        handler = _calling_handler(self)
        if handler is None:
            _log.warning("DistCACallback found no CallbackHandler: balance figures reach log_history, but not the reporters.")
            return
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Apply the settings, refuse a model or a loader that distca is not for, and start counting.

        Raises:
            UnsupportedError: if the model is of a family that is refused, or rank 0 reads packed documents for all ranks.
        """
        check_loader(kwargs.get("train_dataloader"))
        if self.config is not None:
            configure(self.config)
        self._model, self._steps = kwargs.get("model"), 0
        for config in _distca_configs(self._model):
            check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
        self._calls = current_session().meter.calls
        balance_figures()  # what came before is not of this training

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start recording the step that is traced."""
        self._steps += 1
        if self.trace_path is not None and self._steps == _TRACED_STEP:
            current_session().trace = Trace()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the first step, make sure that attention was called; after the traced one, write the trace.

        Raises:
            UnsupportedError: if the model took the name "distca" and computes its attention without calling it.
        """
        session = current_session()
        if self.trace_path is not None and self._steps == _TRACED_STEP and session.trace is not None:
            write_trace(session.trace, self.trace_path)
            session.trace = None
        model, self._model = self._model, None
        if _distca_configs(model) and current_session().meter.calls == self._calls:
            raise UnsupportedError(
                f'{type(model).__name__} was loaded with attn_implementation="distca" and never called it in a training step: it '
                'does not use the attention interface of transformers. Load it with attn_implementation="eager".'
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures to the logs of a training step."""
        logs: dict[str, Any] | None = kwargs.get("logs")
        if not logs or "loss" not in logs:
            return
        figures = {name: round(value, 4) for name, value in balance_figures().items()}
        logs.update(figures)
        if state.log_history:  # the Trainer has already put a copy of the logs there
            state.log_history[-1].update(figures)


def _distca_configs(model: PreTrainedModel | None) -> list[PreTrainedConfig]:
    """The configurations of the model and its parts, like a language tower, that ask for distca."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return []
    parts: list[Any] = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return [part for part in parts if getattr(part, "_attn_implementation", None) == "distca"]


def _calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """The handler that is calling `callback`. Callbacks are handed no reference to it, so look at who called."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackHandler) and callback in caller.callbacks:
            return caller
        frame = frame.f_back
    return None
