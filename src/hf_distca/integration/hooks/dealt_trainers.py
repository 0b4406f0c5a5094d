"""Trainers on dealt documents: their first loss is checked, and the losses of their evaluations are
means over targets.

This applies to every Trainer of the process, because users who make shares themselves need not name
the Trainer. Both wrapped methods are public, and subclasses such as TRL's call the base class.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import torch

from hf_distca.borrowed import count_shifted_targets
from hf_distca.integration.checks.first_loss import train_watched
from hf_distca.integration.checks.reading_order import shares_of
from hf_distca.integration.hooks.dealt_evaluation import evaluate_by_targets

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import EvalLoopOutput

__all__ = ["follow_trainers"]


def follow_trainers() -> None:
    """Make Trainers treat dealt documents as one process does; do nothing while transformers'
    Trainer is not imported.
    """
    count_shifted_targets()
    if "transformers.trainer" in sys.modules:
        _follow()


@cache
def _follow() -> None:
    from transformers import Trainer

    step, loop = Trainer.training_step, Trainer.evaluation_loop
    parameters = inspect.signature(loop)

    @wraps(step)
    def training_step(
        self: Trainer, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return train_watched(self, partial(step, self, model, inputs, *args, **kwargs), inputs)

    @wraps(loop)
    def evaluation_loop(
        self: Trainer, dataloader: Any, *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        run = partial(loop, self, dataloader, *args, **kwargs)
        if shares_of(dataloader) is None:
            return run()
        given = parameters.bind(self, dataloader, *args, **kwargs)
        given.apply_defaults()
        return evaluate_by_targets(self, run, given.arguments["metric_key_prefix"])

    Trainer.training_step = training_step  # type: ignore[method-assign]
    Trainer.evaluation_loop = evaluation_loop  # type: ignore[method-assign]
