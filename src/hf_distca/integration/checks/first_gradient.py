"""Check of the first gradient of a share's logits, which must not be zero, for loops
without a Trainer whose loss could be checked.

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
from hf_distca.integration.checks.first_loss import TARGETS, LossWatch, SpyTensor


def watch_gradient(model: PreTrainedModel) -> None:
    """Raise if a loss gives the logits of a share no gradient, although it has targets that were
    never read, until one does.

    The logits are the output of the output embedding: gradients come back to these from any copies
    that the model, accelerate or a loss makes. A fused loss has none; it takes ``shift_labels``
    from the model.
    """
    head: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch_logits(_: torch.nn.Module, args: Any, logits: Any) -> None:
        targets = find_model_argument(TARGETS)
        watch = LossWatch()
        if (
            isinstance(targets, torch.Tensor)
            and isinstance(logits, torch.Tensor)
            and logits.requires_grad
        ):
            if type(targets) is torch.Tensor and not is_compiled():  # else it would be traced
                # Any code outside the model reads this very tensor.
                targets.__class__ = SpyTensor
                targets.report_read = partial(watch.record_read, TARGETS)  # type: ignore[attr-defined]
            logits.register_hook(partial(check_gradient, targets, watch))  # type: ignore[no-untyped-call]

    def check_gradient(
        targets: torch.Tensor, watch: LossWatch, gradient: torch.Tensor | None
    ) -> None:
        if isinstance(targets, SpyTensor):
            targets.__class__ = torch.Tensor  # type: ignore[assignment]
        if watch.names_read or (gradient is not None and gradient.any()):
            hook.remove()
        elif (targets != IGNORED_LABEL).any():
            raise UnsupportedError(
                f"the loss of {type(model).__name__} gives its logits no gradient, though"
                " shift_labels has targets: it reads `labels`, which are -100 in shares, as they"
                " could not be shifted where documents are cut. Read `shift_labels`, which are"
                " shifted already."
            )

    if head is not None:
        hook = head.register_forward_hook(watch_logits)
