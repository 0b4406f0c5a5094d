"""Losses of evaluations on shares: means over the targets of all ranks, for every Trainer.

Trainers average over batches, and TRL's over ranks, too: a rank with few targets, or a last batch
that is mostly padding, would weigh as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.integration.checks.first_loss import wrapped

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import EvalLoopOutput

__all__ = ["evaluate_by_targets"]


def evaluate_by_targets(
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
    sums = _Sums()
    with (
        wrapped(trainer, "compute_loss", sums.note_items),
        wrapped(trainer, "prediction_step", sums.add),
    ):
        output = loop()
    mean = sums.mean(trainer.accelerator.gather)
    if mean is not None and output.metrics is not None:
        output.metrics[f"{prefix}_loss"] = mean
    return output


class _Sums:
    """Losses of this rank's batches, and their divisors."""

    def __init__(self) -> None:
        # The targets of all ranks, if the Trainer divided by them.
        self._given: list[torch.Tensor | int | None] = []
        self._rows: list[torch.Tensor] = []  # (2,): loss times targets, and targets

    def note_items(
        self, compute_loss: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._given.append(kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None))
        return compute_loss(model, inputs, *args, **kwargs)

    def add(
        self, predict: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._given.clear()
        targets = inputs.get("shift_labels")
        loss, *rest = predict(model, inputs, *args, **kwargs)
        if loss is not None and targets is not None:
            loss = loss.detach().mean().float()
            given = self._given[-1] if self._given else None
            items = torch.as_tensor(
                (targets != IGNORED_LABEL).sum() if given is None else given
            ).to(loss)
            # Without targets, a mean over them is not a number.
            self._rows.append(torch.stack([torch.where(items > 0, loss * items, 0.0), items]))
        return (loss, *rest)

    def mean(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> float | None:
        """Return the mean over the targets of all batches of all ranks, None if there were none."""
        if not self._rows:
            return None
        total, items = gather(torch.stack(self._rows)).double().sum(dim=0).tolist()
        return total / items if items else None
