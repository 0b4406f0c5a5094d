"""Registration of "distca" with transformers, above all that it registers."""

from __future__ import annotations

from hf_distca.integration import attention_names
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.integration.hooks.mask import distca_mask
from hf_distca.integration.hooks.positions import count_from_first
from hf_distca.integration.hooks.recurrent_layers import begin_documents_anew

__all__ = ["register_distca"]


def register_distca() -> None:
    """Give transformers the attention function and the mask function named "distca"."""
    attention_names.register("distca", distca_attention, distca_mask)
    begin_documents_anew(attention_names.is_ours)
    count_from_first()
