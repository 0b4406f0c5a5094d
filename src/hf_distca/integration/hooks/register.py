"""Registration of "distca" with transformers.

This is a separate file, because it imports all functions that are registered.
"""

from __future__ import annotations

from hf_distca.integration import attention_names
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.integration.hooks.mask import distca_mask
from hf_distca.integration.hooks.positions import accept_document_positions


def register() -> None:
    """Give transformers the attention function and the mask function named "distca"."""
    attention_names.register_attention("distca", distca_attention, distca_mask)
    accept_document_positions()
