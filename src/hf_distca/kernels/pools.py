"""Shared functions on pools of rows: accumulation dtypes, checks of shapes, padding of the last
dimension.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hf_distca.errors import KernelError
from hf_distca.kernels.base import Operands, Saved, TaskBatch

__all__ = ["accumulation_dtype", "check_pools", "key_gradient_dtype", "pad_last"]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exps and of sums of gradients: float64 for float64, float32 for
    everything else.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def key_gradient_dtype(tasks: TaskBatch, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of dk and dv: wide where several tasks add to the same key,
    `dtype` where each key belongs to one task.
    """
    return accumulation_dtype(dtype) if tasks.shares_keys else dtype


def check_pools(pools: Operands | Saved, tasks: TaskBatch) -> None:
    """Raise if pools do not fit together or are shorter than the tasks need.

    Without this check on the host, a kernel that takes raw offsets would read foreign memory where
    a task ends outside its pool.
    """
    # Layers of a kind have the same shapes: those that fit were seen to fit.
    shapes = q, k, v = pools.q_THD.shape, pools.k_TKD.shape, pools.v_TKV.shape
    if tasks.derived.get(check_pools) == shapes:
        return
    said = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if not len(q) == len(k) == len(v) == 3:
        raise KernelError(f"Pools must have the dimensions (tokens, heads, head dim), got {said}.")
    if q[2] != k[2] or k[:2] != v[:2]:
        raise KernelError(
            f"q and k must agree in head dim, k and v in tokens and heads, got {said}."
        )
    if q[1] % max(k[1], 1):
        raise KernelError(f"Query heads must be a multiple of key/value heads, got {said}.")
    rows, keys = tasks.required_sizes
    if rows > q[0] or keys > k[0]:
        raise KernelError(_describe_misfit(q[0], k[0], tasks))
    tasks.derived[check_pools] = shapes


def _describe_misfit(rows: int, keys: int, tasks: TaskBatch) -> str:
    """Describe the first task that does not fit pools of so many query rows and keys."""
    runs = zip(
        tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length, strict=True
    )
    for query_start, query_length, key_start, key_length in runs:
        if not 1 <= query_length <= key_length:
            return (
                f"A task has {query_length} query rows and {key_length} keys; it needs at least one"
                " row and a key for each."
            )
        if (
            query_start < 0
            or key_start < 0
            or query_start + query_length > rows
            or key_start + key_length > keys
        ):
            break
    return (
        f"A task has query rows [{query_start}, {query_start + query_length}) of a pool of {rows}"
        f" and keys [{key_start}, {key_start + key_length}) of a pool of {keys}; the pools and the"
        " tasks belong to different plans."
    )


def pad_last(x: torch.Tensor, size: int) -> torch.Tensor:
    """Pad the last dimension of `x` with zeros to `size`, densely laid out; return `x` itself if it
    is so already.

    Zeros are exact here: they add nothing to a dot product, and value columns of zeros give output
    columns of zeros.
    """
    if x.shape[-1] < size:
        return pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
