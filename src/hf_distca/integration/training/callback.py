"""`DistCACallback`, which sets distca up in a Trainer and logs the balance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    DefaultFlowCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_distca.config import DistCAConfig, check_settings, show_value
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.callers import find_trainer
from hf_distca.integration.checks.share_readers import (
    check_evaluation,
    check_loader,
    warn_of_other_epochs,
)
from hf_distca.integration.current_session import current_session, use_session
from hf_distca.integration.hooks.dealt_trainers import wrap_trainers
from hf_distca.integration.hooks.mask import prepare
from hf_distca.integration.processes import LOG
from hf_distca.integration.reports import (
    Metrics,
    fewer_moves_reason,
    nothing_moved_reason,
    print_summary,
    read_metrics,
)
from hf_distca.integration.session import Session
from hf_distca.integration.training.record import Recorder

_MIN_MICRO_BATCHES = 20  # micro-batches after which a warning tells that nothing was moved


class DistCACallback(TrainerCallback):
    """Adds the balance of core attention to the logs of a Trainer: on the console, in
    ``state.log_history`` and in every reporter.

    The page "Figures" explains each figure. transformers puts ``train/`` before the names of all
    training logs, so TensorBoard, W&B and trackio show ``train/distca/imbalance_measured_after``.
    Logs hold the figures of rank 0. Each log covers the micro-batches since the previous log, and
    gives their number as ``distca/micro_batches``. The last micro-batches are in the log that the
    Trainer writes at the end. Ranks gather their measurements at the end of steps that log, just as
    the Trainer gathers the loss.

    Either all ranks or no rank must have the callback, because ranks agree on their group before
    the first step. Pass the callback in ``Trainer(callbacks=[...])``. If it is added later, its
    settings apply from the first event that it sees. The callback moves in front of the reporters,
    which would not see its figures otherwise.

    Args:
        config: settings, used as soon as the Trainer is made. By default they are the settings
            given to `hf_distca.configure`, or else the default settings. Settings of another
            callback are never used.
        group: the ranks that share core attention, as for `hf_distca.configure`; by default the
            group given there.
        summary: whether rank 0 prints the balance of the whole run after training.
        record: whether rank 0 writes ``_distca_run.jsonl`` into ``args.output_dir``. The command
            ``hf-distca report`` makes a page from this file. The file has the logged figures of
            each rank, the plans of the first micro-batch, and, for each log, the plans of its worst
            micro-batch: about a megabyte in all. With "all", the file has every plan. Writing it
            takes no collective, and reads nothing from the device.

    Raises:
        ConfigError: if `config` is not a `DistCAConfig`, or another value has a wrong type.
    """

    def __init__(
        self,
        config: DistCAConfig | None = None,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        summary: bool = True,
        record: bool | Literal["all"] = True,
    ) -> None:
        check_settings(config, "DistCACallback()")
        if not isinstance(summary, bool):
            raise ConfigError(f"summary={show_value(summary)} must be True or False.")
        if not isinstance(record, bool) and record != "all":
            raise ConfigError(f'record={show_value(record)} must be True, False or "all".')
        self.config, self.group, self.summary = config, group, summary
        self.record: bool | Literal["all"] = record
        # Estimated imbalance of the batches that `deal` replaced; None if it replaced no batches.
        self.replaced_imbalance: float | None = None
        self._recorder: Recorder | None = None
        self._session: Session | None = None  # the session with the settings of this callback
        # Metrics at the last log, and metrics at the beginning of this training.
        self._logged_metrics = self._first_metrics = Metrics()
        self._steps = 0
        self._checked_loader: object = None  # the loader that was checked last
        self._calls_before = 0  # calls of attention before the first step
        self._is_gain_checked = False
        self._has_warned_of_cost = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings here, so that evaluation before training also uses them.

        Raises:
            UnsupportedError: if evaluation on sets of shares would differ from evaluation in one
                process.
        """
        check_evaluation(find_trainer(self), self.apply_settings().config)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings, check model and loader, and start counting.

        Raises:
            UnsupportedError: if `hf_distca.prepare` refuses the model, if rank 0 reads packed
                documents for all ranks, if ranks would not get their shares, or if shares would not
                give the loss of whole documents.
        """
        model = kwargs.get("model")
        trainer = find_trainer(self)
        wrap_trainers()
        check_loader(kwargs.get("train_dataloader"), model=model, args=args, trainer=trainer)
        warn_of_other_epochs(kwargs.get("train_dataloader"), args, state)
        session = self.apply_settings()
        check_evaluation(trainer, session.config)
        if model is not None:
            prepare(model)
            if not find_distca_configs(model):
                LOG.warning(
                    "DistCACallback has nothing to balance: this %s has attn_implementation=%r,"
                    " which is right only for a baseline. Load it with"
                    ' attn_implementation="distca" (hf-distca run --attn-implementation distca) to'
                    " share attention.",
                    type(model).__name__,
                    getattr(getattr(model, "config", None), "_attn_implementation", None),
                )
            elif session.join_group().size == 1:
                LOG.warning(
                    "DistCACallback has nothing to balance: the attention group is this process"
                    " alone."
                )
        self._steps = 0
        self._logged_metrics = self._first_metrics = read_metrics(session)
        self._is_gain_checked = False

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the settings if the callback was added after `on_init_end`, and check the loader as
        in training.

        Raises:
            UnsupportedError: see `on_train_begin`.
        """
        session = self._apply_late_settings()
        loader = kwargs.get("eval_dataloader")
        if loader is not self._checked_loader:
            self._checked_loader = loader
            check_loader(
                loader,
                model=kwargs.get("model"),
                args=args,
                trainer=find_trainer(self),
                evaluation=session.config,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """At the first step, start recording on rank 0 if there are several ranks."""
        if not self._steps:
            session = self._apply_late_settings()
            model = kwargs.get("model")
            self._calls_before = session.meter.calls
            self._move_before_reporters(find_trainer(self))
            if self._recorder is not None:  # left by an earlier training that failed
                self._recorder.stop()
            if (
                self.record
                and args.output_dir
                and session.rank_count > 1
                and session.is_first_rank
                and find_distca_configs(model)
            ):
                self._recorder = Recorder(
                    Path(args.output_dir), session, every_plan=self.record == "all"
                )
                self._recorder.start(args, state.global_step, model, self.replaced_imbalance)
        self._steps += 1
        current_session().planner.history.step = state.global_step + 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check after the first step that distca's attention was called, and gather measurements
        before a log.

        Raises:
            UnsupportedError: if the model accepted the name "distca", but computes its attention
                without distca.
        """
        model = kwargs.get("model")
        if (
            self._steps == 1
            and current_session().meter.calls == self._calls_before
            and find_distca_configs(model)
        ):
            raise UnsupportedError(
                f'{type(model).__name__} was loaded with attn_implementation="distca" but never'
                " called distca in a training step: the model does not use the attention interface"
                ' of transformers. Load it with attn_implementation="eager".'
            )
        self.on_epoch_end(args, state, control)
        self._warn_if_no_gain(after=_MIN_MICRO_BATCHES)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gather the measurements of all ranks if a log is due, or if training stops, because the
        Trainer then writes the final log.

        All ranks call this method, even if only rank 0 logs.
        """
        if control.should_log or control.should_training_stop:
            current_session().gather_measurements()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the record, and print the summary on rank 0."""
        session = current_session()
        session.gather_measurements()
        self._warn_if_no_gain(after=1)
        if self._recorder is not None:
            self._recorder.write_steps(state.global_step)
            self._recorder.stop()
        if self.summary:
            print_summary(
                (read_metrics(session) - self._first_metrics).balance,
                session,
                self.replaced_imbalance,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the figures to the logs of training steps and to the final log."""
        logs: dict[str, Any] | None = kwargs.get("logs")
        if not logs or not logs.keys() & {"loss", "train_loss"}:
            return
        if self._recorder is not None:
            self._recorder.write_steps(state.global_step, logs.get("loss"))
        metrics = read_metrics(current_session())
        figures = {
            name: round(value, 4)
            for name, value in (metrics - self._logged_metrics).figures().items()
        }
        self._logged_metrics = metrics
        logs.update(figures)
        if state.log_history:  # the Trainer has already stored a copy of the logs
            state.log_history[-1].update(figures)

    def _warn_if_no_gain(self, after: int) -> None:
        """When `after` micro-batches have run, warn if no work was moved in them. Also warn if
        plans avoid exchanges. Each warning tells the reason, and is given only once.
        """
        session = current_session()
        totals = (read_metrics(session) - self._first_metrics).balance
        reasons = [None if self._has_warned_of_cost else fewer_moves_reason(session)]
        self._has_warned_of_cost |= reasons[0] is not None
        if not self._is_gain_checked and totals.micro_batches >= after:
            self._is_gain_checked = True
            reasons.append(nothing_moved_reason(totals, session))
        for reason in reasons:
            if reason is not None and session.is_first_rank:
                LOG.warning(reason)

    def apply_settings(self, *, balance_evaluation: bool = False) -> Session:
        """Apply the settings of this callback to the process, if they are not in use yet. A
        callback without settings applies those of `configure`.

        Args:
            balance_evaluation: whether to switch on this setting first.

        Returns:
            The session that has the settings.
        """
        if balance_evaluation:
            self.config = replace(
                self.config or self.apply_settings().config, balance_evaluation=True
            )
            self._session = None
        if self._session is None or not (self._has_settings and current_session() is self._session):
            self._session = use_session(self.config, self.group)
        return self._session

    @property
    def _has_settings(self) -> bool:
        return self.config is not None or self.group is not None

    def _apply_late_settings(self) -> Session:
        if self._session is None and self._has_settings:
            LOG.warning(
                "DistCACallback was added while its Trainer was running: its settings apply only"
                " from now on. Pass the callback to the Trainer in `callbacks`, or call"
                " hf_distca.configure first."
            )
        return self.apply_settings()

    def _move_before_reporters(self, trainer: transformers.Trainer | None) -> None:
        if trainer is None:
            LOG.warning(
                "DistCACallback does not find its Trainer: balance figures reach log_history, but"
                " not the reporters. Put the callback in front of the reporters in"
                " trainer.callback_handler.callbacks."
            )
        else:
            move_before_reporters(self, trainer.callback_handler.callbacks)


def find_callback(callbacks: Iterable[TrainerCallback]) -> DistCACallback | None:
    """Find the `DistCACallback` among the callbacks of a Trainer."""
    return next((callback for callback in callbacks if isinstance(callback, DistCACallback)), None)


def find_or_add_callback(trainer: transformers.Trainer, **options: Any) -> DistCACallback:
    """Find the `DistCACallback` of a Trainer. If the Trainer has none, add a `DistCACallback` with
    these options.
    """
    callback = find_callback(trainer.callback_handler.callbacks)
    if callback is None:
        callback = DistCACallback(**options)
        trainer.add_callback(callback)
    return callback


def find_session(trainer: transformers.Trainer | None = None) -> Session:
    """Find the session of a Trainer's callback, or else the session of the process."""
    callback = None if trainer is None else find_callback(trainer.callback_handler.callbacks)
    return current_session() if callback is None else callback.apply_settings()


def add_callbacks(summary: bool) -> None:
    """When a Trainer of this process begins training, add a `DistCACallback` if its model runs
    distca and the Trainer has no such callback yet.

    Args:
        summary: see `DistCACallback`.
    """

    def add_callback(trainer: transformers.Trainer) -> None:
        if find_distca_configs(trainer.model):
            find_or_add_callback(trainer, summary=summary)

    call_before_training(add_callback)


def call_before_training(act: Callable[[transformers.Trainer], None]) -> None:
    """Make every Trainer of this process call a function when its training begins. The argument of
    the function is the Trainer.
    """
    train = transformers.Trainer.train

    @wraps(train)
    def act_and_train(trainer: transformers.Trainer, *args: Any, **kwargs: Any) -> Any:
        act(trainer)
        return train(trainer, *args, **kwargs)

    transformers.Trainer.train = act_and_train  # type: ignore[method-assign, assignment]


def move_before_reporters(callback: TrainerCallback, callbacks: list[TrainerCallback]) -> None:
    """Move a callback to the place right after the callback that decides which steps log. If it ran
    after the reporters, it would change logs too late.
    """
    callbacks.sort(
        key=lambda other: (not isinstance(other, DefaultFlowCallback), other is not callback)
    )
