"""Checks in the first forward with a share, for users without `DistCACallback`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hf_distca.integration.checks.first_gradient import watch_gradient
from hf_distca.integration.checks.first_loss import is_watched
from hf_distca.integration.checks.reading_order import shares_of
from hf_distca.integration.checks.share_readers import (
    check_evaluation,
    check_loader,
    check_sharing,
)
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks.dealt_trainers import follow_trainers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_distca.agreement.dealt_share import DealtShare
    from hf_distca.integration.callers import MaskCall

__all__ = ["check_step"]

_log = logging.getLogger("hf_distca")

# Trainers and models, by whether they trained then.
_checked: WeakKeyDictionary[object, set[bool]] = WeakKeyDictionary()


def check_step(call: MaskCall, dealt: DealtShare) -> None:
    """Make the checks of `check_loader` in the first forward with a share, for users without
    `DistCACallback`.

    Raises:
        UnsupportedError: see `check_loader`; in backward, if the loss of a loop without a Trainer
            reads `labels`.
    """
    *_, model = call.models()
    trainer = call.trainer
    known = _checked.setdefault(model if trainer is None else trainer, set())
    if model.training in known:
        return
    if trainer is not None:
        handler = trainer.callback_handler
        loader = handler.train_dataloader if model.training else handler.eval_dataloader
        if loader is not None and shares_of(loader) is not None:
            check_loader(
                loader,
                model=trainer.model,
                args=trainer.args,
                trainer=trainer,
                evaluating=not model.training,
            )
            check_evaluation(trainer)
        elif model.training:
            check_sharing(trainer, dealt.ranks)
    if model.training and dealt.ranks > 1:
        follow_trainers()
        if not is_watched(trainer):
            watch_gradient(model)
        _warn_of_routers(model, dealt.ranks)
    known.add(model.training)


def _warn_of_routers(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", False) and current_session().is_first:
        _log.warning(
            "%s models add a loss of their routers (output_router_logits=True), and each of %d"
            " ranks computes it for its own tokens: it is not that of one process with all of them."
            " The Trainer adds up the losses of all ranks, so router_aux_loss_coef=%s counts %d"
            " times. Divide it by %d, or set output_router_logits=False.",
            *(
                config.model_type,
                ranks,
                getattr(config, "router_aux_loss_coef", None),
                ranks,
                ranks,
            ),
        )
