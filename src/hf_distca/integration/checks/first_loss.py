"""Check of the first loss of a Trainer on dealt documents: it must be made of the same targets as
the loss of one process.

`labels` of shares are -100, as they could not be shifted where documents are cut, and ranks have
different numbers of targets. So a loss must come from ``shift_labels`` and be divided by
``num_items_in_batch``. Its value cannot show this: other terms and weights change it as well. Its
origin does: reads of the values of these tensors, and paths in the graph from the loss to a model's
result from ``shift_labels``. No copy of the logits is used, so precision and wrappers do not
matter. A loss without targets, as of a teacher's logits, is accepted: ranks have equally many
tokens, so the mean of their means is that of all.

The check runs once, in the first micro-batch that a Trainer trains on, before its backward, on
every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import iterate_models
from hf_distca.integration.checks.first_gradient import check_head_gradient, watch_gradient
from hf_distca.integration.checks.loss_watch import ITEMS, LABELS, TARGETS, LossWatch

if TYPE_CHECKING:
    from transformers import Trainer

# Trainers whose first loss was looked at, or is.
_watched_trainers: WeakSet[Trainer] = WeakSet()


def is_loss_watched(trainer: object) -> bool:
    """Return whether the loss of a Trainer was found right, or is being checked."""
    return trainer in _watched_trainers


def run_watched_step(
    trainer: Trainer, model: torch.nn.Module, step: Callable[..., torch.Tensor], inputs: Any
) -> torch.Tensor:
    """Run a training step of a Trainer, and check its loss if it is the first on a share of several
    ranks.

    Args:
        trainer, model, inputs: the Trainer, its model, and its micro-batch.
        step: the step, which needs no arguments.

    Raises:
        UnsupportedError: if the loss is not made of the targets of all ranks.
    """
    batch = inputs if isinstance(inputs, Mapping) else {}
    share = getattr(batch.get("distca_documents"), "dealt_share", None)
    if share is None or share.ranks == 1 or trainer in _watched_trainers:
        return step()
    from accelerate.utils import is_compiled_module

    watch, is_compiled = LossWatch(), is_compiled_module(model)
    outermost = next(iterate_models(model), None)
    if outermost is not None and not is_compiled:
        watch_gradient(outermost, watch)

    def check_loss(
        compute_loss: Callable[..., Any],
        model: torch.nn.Module,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        watch.ids = inputs.get("input_ids")
        for name in {TARGETS, LABELS} & inputs.keys():
            inputs[name] = watch.watch_value(inputs[name], name)
        kwargs[ITEMS] = watch.watch_value(kwargs.get(ITEMS), ITEMS)
        models = {model}
        if not is_compiled:  # accelerate would take DDP out of the compiled module
            models.add(trainer.accelerator.unwrap_model(model))
        with watch.record_calls(models):
            result = compute_loss(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        if (
            isinstance(loss, torch.Tensor)
            and loss.grad_fn is not None
            and (reason := watch.find_loss_reason(loss)) is not None
        ):
            owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind))
            raise UnsupportedError(f"the loss of {owner.__name__}.compute_loss {reason}")
        return result

    _watched_trainers.add(trainer)
    try:
        with wrap_method(trainer, "compute_loss", check_loss):
            loss = step()
        if outermost is not None and is_compiled and TARGETS not in watch.names_read:
            check_head_gradient(outermost, batch.get(TARGETS))
        return loss
    except BaseException:
        _watched_trainers.discard(trainer)
        raise
    finally:
        watch.forget_batch()


@contextmanager
def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Wrap a function around a method of one object: the function gets the method before its
    arguments.
    """
    method = getattr(owner, name)
    before = vars(owner).get(name)
    setattr(owner, name, wraps(method)(partial(around, method)))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:  # it was set on this object rather than written in its class
            setattr(owner, name, before)
