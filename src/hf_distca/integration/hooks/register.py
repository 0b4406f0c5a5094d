"""Registration of "distca" with transformers, above all that it registers."""

from __future__ import annotations

from hf_distca.integration import attention_names
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.integration.hooks.mask import distca_mask, find_planner, find_session
from hf_distca.integration.hooks.other_models import ask_for_session
from hf_distca.integration.hooks.positions import accept_document_positions
from hf_distca.integration.hooks.recurrent_layers import reset_states_at_documents


def register_distca() -> None:
    """Give transformers the attention function and the mask function named "distca"."""
    attention_names.register_attention("distca", distca_attention, distca_mask)
    reset_states_at_documents(find_planner)
    accept_document_positions()
    ask_for_session(find_session)
