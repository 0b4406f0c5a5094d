"""Handles of micro-batches, as the mask function makes them for a model that it does not find."""

from __future__ import annotations

from typing import Any

from hf_distca.agreement.documents import TokenBatch
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import AttentionHandle
from hf_distca.integration.layer_planner import LayerPlanner


def make_handle(rows: int, length: int, **batch: Any) -> AttentionHandle:
    """Make the handle of a `TokenBatch` for the session of this process."""
    return AttentionHandle(LayerPlanner(current_session()), TokenBatch(rows, length, **batch))
