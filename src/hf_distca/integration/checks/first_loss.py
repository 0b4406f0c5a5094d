"""Check the first loss of a Trainer on dealt documents: it must use the same targets as the loss of
one process.

Each rank trains on a share, its part of a dealt batch. The `labels` of a share are -100, because
labels cannot be shifted where documents are cut. Ranks have different numbers of targets. So a loss
must use ``shift_labels``, and divide by ``num_items_in_batch``. The value of a loss does not show
whether the loss uses these two tensors, because other terms and weights change the value as well.
So the check records which code reads the tensors, and follows the graph from the loss to the
outputs that a model made from ``shift_labels``. The check uses no copy of the logits, so precision
and wrappers do not matter. A loss without targets, such as the distance to a teacher's logits, is
accepted: ranks have equal numbers of tokens, so the mean over ranks is the mean over tokens.

This first check runs once for each Trainer, on every rank, in the first micro-batch of training and
before its backward.

A second check covers loops without a Trainer, and losses that a model computes itself. It refuses a
loss that gives the logits of a share a zero gradient, like a loss that reads `labels`. A loss that
has read ``shift_labels`` passes even with a zero gradient, because it may give all documents of the
share the weight 0.
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

# Trainers whose first loss was checked, or is being checked.
_watched_trainers: WeakSet[Trainer] = WeakSet()


def is_loss_watched(trainer: object) -> bool:
    """Return whether the loss of a Trainer has passed the check, or is being checked."""
    return trainer in _watched_trainers


def run_watched_step(
    trainer: Trainer,
    model: torch.nn.Module,
    share: DealtShare | None,
    inputs: Any,
    step: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Run a training step of a Trainer. If this is the Trainer's first step on documents dealt to
    several ranks, check the loss.

    Args:
        trainer: the Trainer.
        model: the model that the Trainer passes to the step.
        share: share of the micro-batch; None if its documents are not dealt.
        inputs: the micro-batch.
        step: the step, called without arguments.

    Raises:
        UnsupportedError: if the loss does not use the targets of all ranks.
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
        if not is_compiled:  # `unwrap_model` would remove DDP from a compiled module
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
    """Watch the gradient of the logits until a gradient is not zero, or code outside the model has
    read the targets. Either event proves that the loss uses the targets.

    The backward raises an error if the gradient is zero, the share has targets, and no code outside
    the model has read them.

    The logits are the output of the output embedding. Their gradient includes the gradients of all
    copies of the logits that the model, accelerate or a loss makes. A fused loss makes no logits to
    watch, but the model passes ``shift_labels`` to it. Without an output embedding, hidden states
    are watched instead.

    Args:
        model: the model that trains.
        trainers_watch: the reads that were recorded for the Trainer; None to record reads here.
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
            # Not in compiled code, which would trace the change of class.
            if trainers_watch is None and is_plain and not is_compiled():
                # Change the tensor itself, because code outside the model holds this tensor.
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
    """Check the gradient after the first backward of a compiled model. If the share has targets,
    the gradient of the output embedding must not be zero.

    For compiled models this replaces `watch_gradient`, whose hook would be compiled.
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
        " targets: it reads `labels`, which are -100 in shares, because labels cannot be shifted"
        " where documents are cut. Read `shift_labels`, which are shifted already."
    )


@contextmanager
def wrap_method(owner: object, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """In a ``with`` block, replace a method of one object by `around`. The arguments of `around`
    are the original method, followed by the method's own arguments.
    """
    method = getattr(owner, name)
    before = vars(owner).get(name)
    setattr(owner, name, wraps(method)(partial(around, method)))
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:  # the method had been set on this object, not in its class
            setattr(owner, name, before)
