"""Attention kernels: one file a backend, one signature. `select_kernel` picks the one to run and says which."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import get_args

import torch

from hf_distca.config import KernelName
from hf_distca.errors import KernelError
from hf_distca.kernels.base import Kernel, TaskBatch
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.cuda import CudaKernel
from hf_distca.kernels.flash_attn import FlashAttnKernel
from hf_distca.kernels.reference import ReferenceKernel

__all__ = ["Kernel", "TaskBatch", "select_kernel"]

_logger = logging.getLogger("hf_distca")

_KERNELS: dict[str, Callable[[], Kernel]] = {
    "reference": ReferenceKernel,
    "cpu": CpuKernel,
    "cuda": CudaKernel,
    "flash_attn": FlashAttnKernel,
}

# Fastest first. Every other kind of device has the reference alone.
_PREFERENCE: dict[str, tuple[str, ...]] = {"cuda": ("flash_attn", "cuda", "reference"), "cpu": ("cpu", "reference")}


def select_kernel(name: KernelName, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int) -> Kernel:
    """The kernel to run, the same object for the same kernel each time.

    Args:
        name: a kernel, or "auto" for the fastest that supports the case.
        device: where the tensors are.
        dtype: of q, k and v.
        head_dim: of q and k.
        value_head_dim: of v and the output.

    Raises:
        KernelError: if the named kernel, or with "auto" every kernel, does not support the case; says why and what to use.
    """
    if name != "auto" and name not in _KERNELS:
        raise KernelError(f"There is no kernel {name!r}; choose one of {', '.join(map(repr, get_args(KernelName)))}.")
    candidates = _PREFERENCE.get(device.type, ("reference",)) if name == "auto" else (name,)
    refused: list[str] = []
    for candidate in candidates:
        kernel = _kernel(candidate)
        reason = kernel.unsupported(device, dtype, head_dim, value_head_dim)
        if reason is None:
            _announce(candidate, device.type, dtype, "; ".join(refused))
            return kernel
        refused.append(f"{candidate}: {reason}")
    case = f"{dtype} tensors on {device} with head dim {head_dim} and value head dim {value_head_dim}"
    if name == "auto":
        raise KernelError(f"No kernel runs {case} ({'; '.join(refused)}). Convert q, k and v to a floating dtype.")
    raise KernelError(f'Kernel {name!r} cannot run {case}: {reason}. Set kernel="auto" to use what runs there.')


@cache
def _kernel(name: str) -> Kernel:
    return _KERNELS[name]()


@cache
def _announce(name: str, device_type: str, dtype: torch.dtype, refused: str) -> None:
    """Say once which kernel runs. Cached: a repeated case comes here for every micro-batch and logs nothing."""
    _logger.info("core attention in %s on %s runs in kernel %r%s", dtype, device_type, name, f" ({refused})" if refused else "")
