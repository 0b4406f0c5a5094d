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
every rank.

The first gradient of a share's logits must not be zero, either. This is checked in loops without a
Trainer, and for losses that a model computes itself. A loss of `labels` gives logits no gradient. A
loss that gives all documents of a share the weight 0 does so, too, but it has read
``shift_labels``, and passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import iterate_models
from hf_distca.integration.callers import find_model_argument, is_compiled
from hf_distca.integration.checks.loss_watch import ITEMS, LABELS, TARGETS, LossWatch, SpyTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

    from hf_distca.agreement.dealt_share import DealtShare

# Trainers whose first loss was looked at, or is.
_watched_trainers: WeakSet[Trainer] = WeakSet()


def is_loss_watched(trainer: object) -> bool:
    """Return whether the loss of a Trainer was found right, or is being checked."""
    return trainer in _watched_trainers


def run_watched_step(
    trainer: Trainer,
    model: torch.nn.Module,
    share: DealtShare | None,
    inputs: Any,
    step: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run a training step of a Trainer, and check its loss if it is the first on a share of several
    ranks.

    Args:
        trainer, model: the Trainer, and its model.
        share, inputs: share of the micro-batch, None for other rows; and all of the micro-batch.
        step: the step, which needs no arguments.

    Raises:
        UnsupportedError: if the loss is not made of the targets of all ranks.
    """
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
            check_head_gradient(outermost, inputs.get(TARGETS))
        return loss
    except BaseException:
        _watched_trainers.discard(trainer)
        raise
    finally:
        watch.forget_batch()


def watch_gradient(model: PreTrainedModel, trainers_watch: LossWatch | None = None) -> None:
    """Raise if a loss gives the logits of a share no gradient, although it has targets that were
    never read outside the model, until one does.

    The logits are the output of the output embedding: gradients come back to these from any copies
    that the model, accelerate or a loss makes. A fused loss has none; it takes ``shift_labels``
    from the model. Of a model without an output embedding, hidden states take the place of logits.

    Args:
        model: the model that trains.
        trainers_watch: the record of its Trainer's own reads; None to record reads here.
    """
    head: torch.nn.Module = model.get_output_embeddings() or model.base_model  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch_logits(_: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        targets = kwargs.get(TARGETS, find_model_argument(TARGETS))
        watch = trainers_watch or LossWatch()
        logits = output if isinstance(output, torch.Tensor) else output[0]
        if (
            isinstance(targets, torch.Tensor)
            and isinstance(logits, torch.Tensor)
            and logits.requires_grad
            and logits.dim() > 1
        ):
            is_plain = type(targets) is torch.Tensor
            if trainers_watch is None and is_plain and not is_compiled():  # else it would be traced
                # Any code outside the model reads this very tensor.
                targets.__class__ = SpyTensor
                targets.report_read = partial(watch.record_read, TARGETS)  # type: ignore[attr-defined]
            logits.register_hook(partial(check_gradient, targets, watch))  # type: ignore[no-untyped-call]

    def check_gradient(
        targets: torch.Tensor, watch: LossWatch, gradient: torch.Tensor | None
    ) -> None:
        if isinstance(targets, SpyTensor):
            targets.__class__ = torch.Tensor  # type: ignore[assignment]
        if TARGETS in watch.names_read or (gradient is not None and gradient.any()):
            hook.remove()
        elif (targets != IGNORED_LABEL).any():
            raise _make_error(model)

    hook = head.register_forward_hook(watch_logits, with_kwargs=True)


def check_head_gradient(model: PreTrainedModel, targets: torch.Tensor | None) -> None:
    """Raise if the first backward left the output embedding of a compiled model a gradient of
    zeros, although its share has targets. A hook, as of `watch_gradient`, would be compiled.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    gradient = getattr(getattr(head, "weight", None), "grad", None)
    if gradient is None or targets is None or gradient.any():
        return
    if (targets != IGNORED_LABEL).any():
        raise _make_error(model)


def _make_error(model: PreTrainedModel) -> UnsupportedError:
    return UnsupportedError(
        f"the loss of {type(model).__name__} gives its logits no gradient, though shift_labels has"
        " targets: it reads `labels`, which are -100 in shares, as they could not be shifted where"
        " documents are cut. Read `shift_labels`, which are shifted already."
    )


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
