"""Check of the first gradient of a share's logits, which must not be zero: in a loop of one's own,
and under a Trainer, which cannot tell what the loss of a model itself is made of.

A loss of `labels`, which are -100 in shares, gives logits no gradient. So does one that gives all
documents of a share the weight 0, and that is right: it has read ``shift_labels``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.errors import UnsupportedError
from hf_distca.integration.callers import find_model_argument, is_compiled
from hf_distca.integration.checks.loss_watch import TARGETS, LossWatch, SpyTensor


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
