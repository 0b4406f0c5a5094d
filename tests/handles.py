"""Handles of micro-batches, as the mask function makes them if it finds no model."""

from __future__ import annotations

from typing import Any

from hf_distca.agreement.documents import TokenBatch
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import ForwardBatch, LayerPlanner, MaskStandIn


def make_handle(rows: int, length: int, **batch: Any) -> MaskStandIn:
    """Make the handle of a `TokenBatch` for the session of this process."""
    tokens = TokenBatch(rows, length, **batch)
    return MaskStandIn(ForwardBatch(LayerPlanner(current_session()), tokens))
