"""Tensors of a rank that has no rows in a call of core attention: it runs tasks of others only."""

from __future__ import annotations

import torch

from hf_distca.kernels.base import Grads, Operands, Outputs, Saved
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
    outputs = _make_empty_outputs(operands)
    return Saved(torch.empty_like(outputs.o_THV), q_THD, *outputs, k_TKD, v_TKV)


def make_empty_results(home: Operands | Saved) -> Outputs | Grads:
    """Make the results of a rank without query rows, for all of its `home` tokens."""
    if isinstance(home, Saved):
        return Grads(*(torch.zeros_like(t) for t in (home.q_THD, home.k_TKD, home.v_TKV)))
    return _make_empty_outputs(home)


def _make_empty_outputs(operands: Operands) -> Outputs:
    q_THD, _, v_TKV = operands
    # Kernels put log-sum-exps out in float32 at least.
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    return Outputs(q_THD.new_empty((*q_THD.shape[:2], v_TKV.shape[2])), lse_TH)
