"""distca as the attention of models that are loaded without naming one, for scripts that have no option for it."""

from __future__ import annotations

import logging
from functools import cache, wraps

from transformers import PreTrainedModel

from hf_distca.integration.families import EQUAL, FAMILIES

__all__ = ["make_default"]

_log = logging.getLogger("hf_distca")


def make_default() -> None:
    """Give distca to causal language models, and their parts, that name no attention and are of a proven family."""
    choose = PreTrainedModel.get_correct_attn_implementation

    @wraps(choose)
    def chosen(self: PreTrainedModel, requested_attention: str | None, *args: bool, **kwargs: bool) -> str:
        if requested_attention is None and _suits(self):
            requested_attention = "distca"
        return choose(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = chosen  # type: ignore[method-assign]


def _suits(model: PreTrainedModel) -> bool:
    """Whether a model is causal and of a proven family. BERT and its like are not, unless they are decoders."""
    config = model.config
    encodes = getattr(config, "is_decoder", None) is False and not model.can_generate()
    if encodes or getattr(config, "is_encoder_decoder", False):
        return False
    if FAMILIES.get(config.model_type) in EQUAL:
        return True
    _leave(config.model_type)
    return False


@cache
def _leave(model_type: str) -> None:
    _log.warning("hf-distca leaves %s models with the attention of transformers: they are not proven.", model_type)
