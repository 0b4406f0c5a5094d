"""Check of what acts once a row, in a forward on a row that holds more than one document, or a part
of one.

Heads of rows pool their last token. NEFTune divides its noise by the root of a row's tokens.
Adapters that begin at a mark, as PEFT's aLoRA does, look for the last one of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data.columns import check_head, find_other_head
from hf_distca.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_distca.integration.callers import MaskCall


def check_packed_row(call: MaskCall, part: PreTrainedModel, packed: PackedDocuments) -> None:
    """Raise if the model of a forward, of which a part makes the mask, would compute the documents
    of a row differently from documents in separate rows.

    Raises:
        UnsupportedError: names what acts once a row, and a remedy.
    """
    model = call.outermost_model
    model_class: Any = type(model)
    if find_other_head(model_class) and call.find_argument("labels") is not None:
        check_head(model)
    if packed.dealt_share is None and len(packed.lengths) == 1:
        return
    remedy = "or train on padded batches, one document a row."
    alpha = _find_noise(part) if model.training else None
    if alpha is not None:
        raise UnsupportedError(
            f"neftune_noise_alpha={alpha}: NEFTune's noise depends on the length of a row, and rows"
            " hold packed or dealt documents, so it would be another one with every"
            f" tokens_per_rank. Leave neftune_noise_alpha out, {remedy}"
        )
    for adapter in vars(model).get("peft_config", {}).values():
        tokens = getattr(adapter, "alora_invocation_tokens", None)
        if tokens is not None:
            raise UnsupportedError(
                f"alora_invocation_tokens={list(tokens)}: the adapter looks for them once in a row,"
                " and rows hold packed or dealt documents, most of which it would leave as they"
                f" are. Use LoRA without them, {remedy}"
            )


def _find_noise(model: PreTrainedModel) -> float | None:
    """Find the noise that NEFTune adds to the embeddings of a model; None if there is none."""
    try:
        embedding: object = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return getattr(embedding, "neftune_noise_alpha", None)
