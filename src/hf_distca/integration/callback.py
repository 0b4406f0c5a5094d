"""`DistCACallback`: sets distca up in a Trainer and logs the balance."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_distca.config import DistCAConfig
from hf_distca.errors import UnsupportedError
from hf_distca.integration.callers import calling_trainer
from hf_distca.integration.checks import check_evaluation, check_loader
from hf_distca.integration.current_session import current_session, use_session
from hf_distca.integration.dealt_trainers import follow_trainers
from hf_distca.integration.loading import distca_configs, prepare
from hf_distca.integration.record import Recorder
from hf_distca.integration.reports import (
    Metrics,
    metrics_of,
    sum_up,
    why_given_up,
    why_nothing_moved,
)
from hf_distca.integration.session import Session

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["DistCACallback", "put_before_reporters"]

_log = logging.getLogger("hf_distca")
_ENOUGH = 20  # micro-batches in which nothing was moved, to say so


class DistCACallback(TrainerCallback):
    """Adds the balance of core attention to the logs of a Trainer: console, ``state.log_history``
    and every reporter.

    The page "Figures" explains each of them. TensorBoard, W&B and trackio show them with the
    ``train/`` that transformers puts before the names of all training logs:
    ``train/distca/imbalance_measured_after``. They hold the figures of rank 0. A row covers the
    micro-batches since the previous row, ``distca/micro_batches`` of them; micro-batches after the
    last log are in the row that the Trainer ends with. Ranks gather their measurements at the end
    of steps that log, as the Trainer does with the loss.

    All ranks have it or none: before the first step it meets the others, to agree on the group. It
    works best in ``Trainer(callbacks=[...])``. Added later, its settings hold from the first event
    that it sees. It moves in front of the reporters, which would not see its figures otherwise;
    `DistCATrainerMixin` puts it there, and back after training.

    Args:
        config: settings, used from when the Trainer is made. Left out, they are those of
            `hf_distca.configure`, or the defaults; never those of another callback.
        group: the ranks that share core attention, as for `hf_distca.configure`; by default the
            group given there.
        summary: whether rank 0 prints the balance of the whole run after training.
        record: whether rank 0 writes ``_distca_run.jsonl`` into ``args.output_dir``, from which
            ``hf-distca report`` makes a page: the logged figures, by rank, and the plans of the
            first micro-batch and of the worst one between two logs, about a megabyte in all; "all"
            for every plan. This takes no collective, and reads nothing from the device.
    """

    def __init__(
        self,
        config: DistCAConfig | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        summary: bool = True,
        record: bool | Literal["all"] = True,
    ) -> None:
        self.config, self.group, self.summary = config, group, summary
        self.record: bool | Literal["all"] = record
        self._recorder: Recorder | None = None
        self._session: Session | None = None  # the one with these settings
        self._logged = self._began = Metrics()  # at the last log, and when this training began
        self._steps = 0
        self._evaluated: object = None  # the loader that was checked last
        self._calls: int | None = None  # of attention before the first step, until that has run
        self._judged = False  # whether it was looked at if anything moves
        self._given_up = False  # whether it was said that exchanges were

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings, also for evaluation before training.

        Raises:
            UnsupportedError: if sets of shares would not be evaluated as one process evaluates
                them.
        """
        self._apply_settings()
        trainer = calling_trainer(self)
        if trainer is not None:
            check_evaluation(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings, raise for a model or a loader that distca does not support, and start
        counting.

        Raises:
            UnsupportedError: if the model is refused by `hf_distca.prepare`, rank 0 reads packed
                documents for all ranks, or shares would not come to every rank, or not give the
                loss of whole documents.
        """
        model, trainer = kwargs.get("model"), calling_trainer(self)
        follow_trainers()
        check_loader(kwargs.get("train_dataloader"), model=model, args=args, trainer=trainer)
        self._apply_settings()
        if trainer is not None:
            check_evaluation(trainer)
        self._take_place(trainer)
        if model is not None:
            prepare(model)
            _say_what_is_missing(model)
        self._calls, self._steps = current_session().meter.calls, 0
        self._logged = self._began = metrics_of(current_session())
        self._judged = False

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings if the callback was added too late for an earlier event; check loaders
        as in training.

        Raises:
            UnsupportedError: see `on_train_begin`.
        """
        self._catch_up()
        loader = kwargs.get("eval_dataloader")
        if loader is not None and loader is not self._evaluated:
            self._evaluated = loader
            check_loader(
                loader,
                model=kwargs.get("model"),
                args=args,
                trainer=calling_trainer(self),
                evaluating=True,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start recording, at the first step."""
        if not self._steps:
            self._catch_up()
            self._take_place(calling_trainer(self))
            self._start_recording(args, state.global_step, kwargs.get("model"))
        self._steps += 1
        current_session().planner.history.step = state.global_step + 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check after the first step that attention was called; gather for a log.

        Raises:
            UnsupportedError: if the model took the name "distca" and computes its attention without
                calling it.
        """
        session, model = current_session(), kwargs.get("model")
        calls, self._calls = self._calls, None
        if session.meter.calls == calls and distca_configs(model):
            raise UnsupportedError(
                f'{type(model).__name__} was loaded with attn_implementation="distca" and never'
                " called it in a training step: it does not use the attention interface of"
                ' transformers. Load it with attn_implementation="eager".'
            )
        _gather_for_a_log(control)
        self._judge(after=_ENOUGH)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gather the measurements of ranks, if there will be a log."""
        _gather_for_a_log(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the record, and print a summary on rank 0."""
        session = current_session()
        session.gather()
        self._judge(after=1)
        if self._recorder is not None:
            self._recorder.write(state.global_step)
            self._recorder.stop()
            self._recorder = None
        if self.summary:
            sum_up((metrics_of(current_session()) - self._began).balance, session)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures to the logs of training steps, and to the final ones."""
        logs: dict[str, Any] | None = kwargs.get("logs")
        if not logs or not logs.keys() & {"loss", "train_loss"}:
            return
        if self._recorder is not None:
            self._recorder.write(state.global_step, logs.get("loss"))
        before, self._logged = self._logged, metrics_of(current_session())
        figures = {
            name: round(value, 4) for name, value in (self._logged - before).figures().items()
        }
        logs.update(figures)
        if state.log_history:  # the Trainer has already put a copy of the logs there
            state.log_history[-1].update(figures)

    def _start_recording(
        self, args: TrainingArguments, step: int, model: torch.nn.Module | None
    ) -> None:
        """Record on rank 0, if there are ranks to share with; a training that failed may have left
        its own recorder.
        """
        session = current_session()
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        if (
            self.record
            and args.output_dir
            and session.ranks > 1
            and session.is_first
            and distca_configs(model)
        ):
            self._recorder = Recorder(
                Path(args.output_dir), session, every_plan=self.record == "all"
            )
            self._recorder.begin(args, step, model)

    def _judge(self, after: int) -> None:
        """Warn once that nothing was moved, after so many micro-batches, and once that exchanges
        were given up; say why.
        """
        session = current_session()
        done = (metrics_of(session) - self._began).balance
        reasons = [None if self._given_up else why_given_up(session)]
        self._given_up |= reasons[0] is not None
        if not self._judged and done.micro_batches >= after:
            self._judged = True
            reasons.append(why_nothing_moved(done, session))
        for why in reasons:
            if why is not None and session.is_first:
                _log.warning(why)

    @property
    def _has_settings(self) -> bool:
        return self.config is not None or self.group is not None

    def _apply_settings(self) -> None:
        """Apply the settings to the process, unless they are in force; without any, use those of
        `configure`.
        """
        if not self._has_settings or current_session() is not self._session:
            self._session = use_session(self.config, self.group)

    def _catch_up(self) -> None:
        if self._session is None and self._has_settings:
            _log.warning(
                "DistCACallback was added while its Trainer was at work: its settings hold from now"
                " on, not for what has run. Give it to the Trainer's `callbacks`, or call"
                " hf_distca.configure before."
            )
        self._apply_settings()

    def _take_place(self, trainer: Trainer | None) -> None:
        if trainer is None:
            _log.warning(
                "DistCACallback does not find who calls it: balance figures reach log_history, but"
                " not the reporters. With hf_distca.DistCATrainerMixin they reach all of them."
            )
        else:
            put_before_reporters(self, trainer.callback_handler.callbacks)


def put_before_reporters(callback: DistCACallback, callbacks: list[TrainerCallback]) -> None:
    """Put a callback right behind the one that decides which steps log: behind reporters it would
    change logs too late.
    """
    deciding = (
        place for place, other in enumerate(callbacks) if isinstance(other, DefaultFlowCallback)
    )
    place = next(deciding, -1) + 1
    if callback in callbacks[place:]:
        callbacks.remove(callback)
    if callback not in callbacks:
        callbacks.insert(place, callback)


def _gather_for_a_log(control: TrainerControl) -> None:
    """Gather the measurements of ranks where the Trainer is about to gather the loss, because all
    ranks come there.

    Only rank 0 may log. The last step is followed by the log that training ends with.
    """
    if control.should_log or control.should_training_stop:
        current_session().gather()


def _say_what_is_missing(model: torch.nn.Module) -> None:
    """Warn if distca has nothing to do."""
    if not distca_configs(model):
        _log.warning(
            "DistCACallback has nothing to do now: no part of this %s has"
            ' attn_implementation="distca". Load the model with it.',
            type(model).__name__,
        )
    elif current_session().join_group().size == 1:
        _log.warning(
            "DistCACallback has nothing to balance: the attention group is this process alone."
        )
