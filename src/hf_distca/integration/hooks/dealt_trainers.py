"""Trainers on dealt documents: their first loss is checked, and the losses of their evaluations are
means over targets.

Trainers average losses of evaluations over batches, and TRL's over ranks, too: a rank with few
targets, or a last batch that is mostly padding, would weigh as much as any other.

This applies to every Trainer of the process, because users who make shares themselves need not name
the Trainer. Both wrapped methods are public, and subclasses such as TRL's call the base class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from hf_distca.borrowed import count_shifted_targets
from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.integration.checks.first_loss import run_watched_step, wrap_method
from hf_distca.integration.checks.reading_order import find_shares

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import EvalLoopOutput

__all__ = ["wrap_trainers"]


def wrap_trainers() -> None:
    """Make Trainers treat dealt documents as one process does; do nothing while transformers'
    Trainer is not imported.
    """
    count_shifted_targets()
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
        return run_watched_step(self, partial(step, self, model, inputs, *args, **kwargs), inputs)

    @wraps(loop)
    def evaluation_loop(
        self: Trainer, dataloader: Any, *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        run = partial(loop, self, dataloader, *args, **kwargs)
        if find_shares(dataloader) is None:
            return run()
        given = parameters.bind(self, dataloader, *args, **kwargs)
        given.apply_defaults()
        return _evaluate_shares(self, run, given.arguments["metric_key_prefix"])

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
        loop: the loop, which needs no arguments.
        prefix: prefix of its metrics.
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
    """Losses of this rank's batches, and their divisors."""

    def __init__(self) -> None:
        # The targets of all ranks, if the Trainer divided by them.
        self._divisors: list[torch.Tensor | int | None] = []
        self._loss_rows: list[torch.Tensor] = []  # (2,): loss times targets, and targets

    def record_divisor(
        self, compute_loss: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._divisors.append(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None))
        return compute_loss(model, inputs, *args, **kwargs)

    def add_batch(
        self, predict: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._divisors.clear()
        targets = inputs.get("shift_labels")
        loss, *rest = predict(model, inputs, *args, **kwargs)
        if loss is not None and targets is not None:
            loss = loss.detach().mean().float()
            given = self._divisors[-1] if self._divisors else None
            items = torch.as_tensor(
                (targets != IGNORED_LABEL).sum() if given is None else given
            ).to(loss)
            # Without targets, a mean over them is not a number.
            self._loss_rows.append(torch.stack([torch.where(items > 0, loss * items, 0.0), items]))
        return (loss, *rest)

    def compute_mean(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """Return the mean over the targets of all batches of all ranks, None if there were none."""
        if not self._loss_rows:
            return None
        total, items = gather(torch.stack(self._loss_rows)).double().sum(dim=0).tolist()
        return total / items if items else None
