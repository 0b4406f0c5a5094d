"""Hooks for Trainers on dealt documents. They check the first share and the first loss, and replace
an evaluation loss by the mean over targets.

Without the hooks, Trainers average evaluation losses over batches, and TRL's Trainers also over
ranks. A rank with few targets, or a last batch that is mostly padding, would count as much as any
other rank or batch.

The hooks wrap methods of `Trainer` for the whole process, because users who make shares themselves
do not pass their Trainer to distca. Both wrapped methods are public, and subclasses such as TRL's
call the base class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hf_distca.borrowed import count_shifted_targets
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.integration.checks.first_loss import (
    is_loss_watched,
    run_watched_step,
    watch_gradient,
    wrap_method,
)
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.checks.share_readers import (
    check_evaluation,
    check_loader,
    check_step,
    check_trainer,
    warn_of_rows_not_dealt,
)
from hf_distca.integration.hooks.other_models import check_calls
from hf_distca.integration.processes import LOG

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer
    from transformers.trainer_utils import EvalLoopOutput

    from hf_distca.agreement.dealt_share import DealtShare
    from hf_distca.integration.callers import MaskCall
    from hf_distca.integration.session import Session

# The modes (True for training, False for evaluation) in which each Trainer, or model without a
# Trainer, was checked.
_checked_modes: WeakKeyDictionary[object, set[bool]] = WeakKeyDictionary()


def check_first_share(call: MaskCall, share: DealtShare, session: Session) -> None:
    """Run the checks of `check_loader` in the first forward with a share, for users without
    `DistCACallback`.

    Raises:
        UnsupportedError: see `check_loader`. In a loop without a Trainer, the backward raises the
            error if the loss reads `labels`.
    """
    model = call.outermost_model
    trainer = call.trainer
    checked_modes = _checked_modes.setdefault(model if trainer is None else trainer, set())
    if model.training in checked_modes:
        return
    if trainer is not None:
        handler = trainer.callback_handler
        loader = handler.train_dataloader if model.training else handler.eval_dataloader
        if loader is not None and find_shares(loader) is not None:
            check_loader(
                loader,
                model=trainer.model,
                args=trainer.args,
                trainer=trainer,
                evaluation=None if model.training else session.config,
            )
            check_evaluation(trainer, session.config)
        elif model.training:
            check_trainer(trainer, share.ranks, f"batches are shares for {share.ranks} ranks")
    if model.training and share.ranks > 1:
        wrap_trainers()
        if not is_loss_watched(trainer):
            watch_gradient(model)
        if session.is_first_rank:
            _warn_of_routers(model, share.ranks)
    checked_modes.add(model.training)


def _warn_of_routers(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", False):
        LOG.warning(
            "%s models add a loss of their routers (output_router_logits=True). Each of %d ranks"
            " computes this loss for its own tokens, so it differs from the loss of one process"
            " with all tokens. The Trainer adds up the losses of all ranks, so"
            " router_aux_loss_coef=%s counts %d times. Divide it by %d, or set"
            " output_router_logits=False.",
            *(config.model_type, ranks),
            *(getattr(config, "router_aux_loss_coef", None), ranks, ranks),
        )


def wrap_trainers() -> None:
    """Check all calls of models, because any model may get a share. If transformers' Trainer is
    imported, also make Trainers on dealt documents give the same result as in one process.
    """
    count_shifted_targets()
    check_calls()
    if "transformers.trainer" in sys.modules:
        _wrap_trainer_methods()


@cache
def _wrap_trainer_methods() -> None:
    from transformers import Trainer

    step, loop = Trainer.training_step, Trainer.evaluation_loop
    parameters = inspect.signature(loop)

    @wraps(step)
    def training_step(
        self: Trainer, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        packed = inputs.get("distca_documents") if isinstance(inputs, Mapping) else None
        share = getattr(packed, "dealt_share", None)
        check_step(self, model, share)
        run = partial(step, self, model, inputs, *args, **kwargs)
        return run_watched_step(self, model, share, inputs, run)

    @wraps(loop)
    def evaluation_loop(
        self: Trainer, dataloader: Any, *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        run = partial(loop, self, dataloader, *args, **kwargs)
        if find_shares(dataloader) is None:
            warn_of_rows_not_dealt(self)
            return run()
        bound = parameters.bind(self, dataloader, *args, **kwargs)
        bound.apply_defaults()
        return _evaluate_shares(self, run, bound.arguments["metric_key_prefix"])

    Trainer.training_step = training_step  # type: ignore[method-assign]
    Trainer.evaluation_loop = evaluation_loop  # type: ignore[method-assign]


def _evaluate_shares(
    trainer: Trainer, loop: Callable[[], EvalLoopOutput], prefix: str
) -> EvalLoopOutput:
    """Run an evaluation loop of a Trainer over shares, and replace its loss by the mean over
    targets.

    Every rank must call it. It adds one small collective at the end of the loop.

    Args:
        trainer: the Trainer of the loop.
        loop: the loop, called without arguments.
        prefix: prefix of the names of metrics.
    """
    sums = _LossSums()
    with (
        wrap_method(trainer, "compute_loss", sums.record_divisor),
        wrap_method(trainer, "prediction_step", sums.add_batch),
    ):
        output = loop()
    mean = sums.compute_mean(trainer.accelerator.gather)
    if mean is not None and output.metrics is not None:
        output.metrics[f"{prefix}_loss"] = mean
    return output


class _LossSums:
    """The loss and the number of targets of each batch of this rank."""

    def __init__(self) -> None:
        # Number by which the Trainer divided the loss of the last batch: the targets of all ranks.
        # None if it did not divide.
        self._divisor: torch.Tensor | int | None = None
        self._loss_rows: list[torch.Tensor] = []  # each [loss * target count, target count]

    def record_divisor(
        self, compute_loss: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._divisor = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        return compute_loss(model, inputs, *args, **kwargs)

    def add_batch(
        self, predict: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        targets = inputs.get("shift_labels")
        loss, *rest = predict(model, inputs, *args, **kwargs)
        if loss is not None and targets is not None:
            loss = loss.detach().mean().float()
            divisor = (targets != IGNORED_LABEL).sum() if self._divisor is None else self._divisor
            items = torch.as_tensor(divisor).to(loss)
            # A loss is a mean over targets, so it is NaN without targets.
            self._loss_rows.append(torch.stack([torch.where(items > 0, loss * items, 0.0), items]))
        self._divisor = None
        return (loss, *rest)

    def compute_mean(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """Return the mean loss over the targets of all ranks and batches; None without targets."""
        if not self._loss_rows:
            return None
        total, items = gather(torch.stack(self._loss_rows)).double().sum(dim=0).tolist()
        return total / items if items else None
