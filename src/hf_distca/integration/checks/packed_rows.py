"""Check for parts of a model that act once on each row. Their results are wrong for a row that
holds several documents, or a part of a document.

Classification heads pool the last token of a row. NEFTune divides its noise by the root of a row's
number of tokens. Adapters that begin at certain tokens, such as PEFT's aLoRA, look for the last
occurrence of these tokens in a row.
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
    """Check that a model computes the documents of a row as if they were in separate rows.

    Args:
        call: the call that makes the mask; its outermost model is checked.
        part: the part of this model that makes the mask.
        packed: documents of the row.

    Raises:
        UnsupportedError: if the model learns labels of rows or of tokens, or if NEFTune or an
            adapter treats a row as one document. The error gives a remedy.
    """
    model = call.outermost_model
    model_class: Any = type(model)
    if find_other_head(model_class) and call.find_argument("labels") is not None:
        check_head(model)
    if packed.dealt_share is None and len(packed.lengths) == 1:
        return
    remedy = "or train on padded batches with one document in each row."
    alpha = _find_noise(part) if model.training else None
    if alpha is not None:
        raise UnsupportedError(
            f"neftune_noise_alpha={alpha}: NEFTune's noise depends on the length of a row, and rows"
            " hold packed or dealt documents, so the noise would change with tokens_per_rank. Leave"
            f" neftune_noise_alpha out, {remedy}"
        )
    for adapter in vars(model).get("peft_config", {}).values():
        tokens = getattr(adapter, "alora_invocation_tokens", None)
        if tokens is not None:
            raise UnsupportedError(
                f"alora_invocation_tokens={list(tokens)}: the adapter looks for these tokens only"
                " once per row. Rows hold packed or dealt documents, so the adapter would leave"
                f" most documents unchanged. Use LoRA without alora_invocation_tokens, {remedy}"
            )


def _find_noise(model: PreTrainedModel) -> float | None:
    """Find the alpha of the noise that NEFTune adds to the embeddings of a model; None without
    NEFTune.
    """
    try:
        embedding: object = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return getattr(embedding, "neftune_noise_alpha", None)
