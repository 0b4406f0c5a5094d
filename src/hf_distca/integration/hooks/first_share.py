"""Checks in the first forward with a share, for users without `DistCACallback`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hf_distca.integration.checks.first_gradient import watch_gradient
from hf_distca.integration.checks.first_loss import is_loss_watched
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.checks.share_readers import (
    check_evaluation,
    check_loader,
    check_sharing,
)
from hf_distca.integration.hooks.dealt_trainers import wrap_trainers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_distca.agreement.dealt_share import DealtShare
    from hf_distca.integration.callers import MaskCall
    from hf_distca.integration.session import Session

__all__ = ["check_first_share"]

_log = logging.getLogger("hf_distca")

# Trainers and models, by whether they trained then.
_checked_modes: WeakKeyDictionary[object, set[bool]] = WeakKeyDictionary()


def check_first_share(call: MaskCall, share: DealtShare, session: Session) -> None:
    """Make the checks of `check_loader` in the first forward with a share, for users without
    `DistCACallback`.

    Raises:
        UnsupportedError: see `check_loader`; in backward, if the loss of a loop without a Trainer
            reads `labels`.
    """
    *_, model = call.iterate_models()
    trainer = call.trainer
    known = _checked_modes.setdefault(model if trainer is None else trainer, set())
    if model.training in known:
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
            check_sharing(trainer, share.ranks)
    if model.training and share.ranks > 1:
        wrap_trainers()
        if not is_loss_watched(trainer):
            watch_gradient(model)
        if session.is_first_rank:
            _warn_of_routers(model, share.ranks)
    known.add(model.training)


def _warn_of_routers(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", False):
        _log.warning(
            "%s models add a loss of their routers (output_router_logits=True), and each of %d"
            " ranks computes it for its own tokens: it is not that of one process with all of them."
            " The Trainer adds up the losses of all ranks, so router_aux_loss_coef=%s counts %d"
            " times. Divide it by %d, or set output_router_logits=False.",
            *(config.model_type, ranks),
            *(getattr(config, "router_aux_loss_coef", None), ranks, ranks),
        )
