"""Tensors of a rank that has no rows in a call of core attention: it runs tasks of others only."""

from __future__ import annotations

import torch

from hf_distca.kernels.base import Operands, Saved
from hf_distca.schedule.cost import AttentionShape


def make_empty_operands(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Make q, k and v of a layer without rows."""
    queries, keys = shape.query_heads, shape.key_value_heads
    widths = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.value_head_dim)
    return Operands(*(torch.empty((0, *width), dtype=dtype, device=device) for width in widths))


def make_empty_saved(operands: Operands) -> Saved:
    """Make what backward reads of a layer without rows, from its `make_empty_operands`."""
    q_THD, k_TKD, v_TKV = operands
    # Kernels put log-sum-exps out in float32 at least.
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    o_THV = q_THD.new_empty((*q_THD.shape[:2], v_TKV.shape[2]))
    return Saved(o_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV)
