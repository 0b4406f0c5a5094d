"""Attention kernels: one file a backend, one signature. `select_kernel` picks the one to run and says which."""

from __future__ import annotations

import logging
from functools import cache, lru_cache

import torch

from hf_distca.config import KernelName
from hf_distca.errors import KernelError
from hf_distca.kernels.base import Kernel, Scores, TaskBatch
from hf_distca.kernels.check import wrong
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.cuda import CudaKernel
from hf_distca.kernels.flash_attn import FlashAttnKernel
from hf_distca.kernels.flash_attn_3 import FlashAttn3Kernel, import_error
from hf_distca.kernels.flash_attn_4 import FlashAttn4Kernel
from hf_distca.kernels.reference import ReferenceKernel

__all__ = ["Kernel", "Scores", "TaskBatch", "runnable", "select_kernel", "survey", "why_not"]

_logger = logging.getLogger("hf_distca")

# Every kernel, in the order in which "auto" looks at them, and the type of device that it takes them on, None for all: those made
# for the newest GPUs first. A kernel that joins them needs its name in `KernelName`, too. The order decides, and no clock: ranks
# with the same GPU and packages choose alike, and so does the next run (`hf_distca.runtime.fastest` measures, for all ranks).
_KERNELS: tuple[tuple[type[Kernel], str | None], ...] = (
    (FlashAttn3Kernel, "cuda"),
    (FlashAttn4Kernel, "cuda"),
    (FlashAttnKernel, "cuda"),
    (CudaKernel, "cuda"),
    (CpuKernel, "cpu"),
    (ReferenceKernel, None),
)

# What has been said; a repeated case comes back for every micro-batch and says nothing.
_said: set[tuple[str, str, torch.dtype, str]] = set()
# What the check of a kernel on a GPU found, by case.
_checked: dict[tuple[object, ...], str | None] = {}


def select_kernel(
    name: KernelName,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    scores: Scores,
    *,
    first: str | None = None,
    ratio: int = 2,
) -> Kernel:
    """The kernel to run, the same object for the same kernel each time.

    Args:
        name: a kernel, or "auto" for the first in the order of kernels that supports the case.
        device: where the tensors are.
        dtype: of q, k and v.
        head_dim: of q and k.
        value_head_dim: of v and the output.
        scores: scale, window and softcap.
        first: with "auto", the kernel to look at before all others.
        ratio: query heads for each key/value head.

    Raises:
        KernelError: if the named kernel, or with "auto" every kernel, does not support the case or, on a GPU, computes it
            wrongly; says why and what to use.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()  # another algorithm is another question
    return _selected(name, device, dtype, head_dim, value_head_dim, scores, first, ratio, deterministic)


@lru_cache(maxsize=256)
def _selected(
    name: KernelName,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_head_dim: int,
    scores: Scores,
    first: str | None,
    ratio: int,
    _deterministic: bool,
) -> Kernel:
    """As `select_kernel`, which every layer of every micro-batch calls: four kernels are asked once a case."""
    candidates = [kind for kind, where in _KERNELS if (where in (device.type, None) if name == "auto" else kind.name == name)]
    if not candidates:
        names = ["auto", *(kind.name for kind, _ in _KERNELS)]
        raise KernelError(f"There is no kernel {name!r}; choose one of {', '.join(map(repr, names))}.")
    candidates.sort(key=lambda kind: kind.name != first)
    refused: list[str] = []
    for candidate in candidates:
        kernel = _made(candidate)
        reason = why_not(kernel, device, dtype, head_dim, value_head_dim, scores, ratio)
        if reason is None:
            _announce(kernel.name, device, dtype, scores, refused, automatic=name == "auto")
            return kernel
        refused.append(f"{kernel.name}: {reason}")
    case = f"{dtype} tensors on {device}{_extras(scores)}, with head dim {head_dim} and value head dim {value_head_dim}"
    if name == "auto":
        raise KernelError(f"No kernel runs {case} ({'; '.join(refused)}). Convert q, k and v to a floating dtype.")
    raise KernelError(f'Kernel {name!r} cannot run {case}: {reason}. Set kernel="auto" to use what runs there.')


def runnable(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores, ratio: int = 2
) -> list[Kernel]:
    """The fast kernels of a device that run a case, in the order in which "auto" looks at them."""
    kernels = [_made(kind) for kind, where in _KERNELS if where == device.type]
    return [kernel for kernel in kernels if why_not(kernel, device, dtype, head_dim, value_head_dim, scores, ratio) is None]


def why_not(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores, ratio: int = 2
) -> str | None:
    """Why a kernel cannot run a case, or must not because it computes it wrongly on that GPU; None if it can.

    On a GPU the first question about a case makes the host wait, for what `hf_distca.kernels.check` computes.
    """
    reason = kernel.unsupported(device, dtype, head_dim, value_head_dim, scores)
    if reason is not None or device.type != "cuda" or kernel.name == ReferenceKernel.name:
        return reason
    # Kernels have other code for each of these, for ratios of heads and deterministic algorithms above all in backward.
    shape = (head_dim, value_head_dim, ratio, scores.window is None, scores.softcap is None)
    case = (kernel.name, device, dtype, *shape, torch.are_deterministic_algorithms_enabled())
    if case not in _checked:
        _checked[case] = wrong(kernel, device, dtype, head_dim, value_head_dim, scores, ratio)
    return _checked[case]


def survey(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_head_dim: int, scores: Scores, ratio: int = 2
) -> list[tuple[str, str | None]]:
    """What "auto" looks at for a case, in this order: each kernel's name, and why it cannot run, None for the one it takes."""
    found: list[tuple[str, str | None]] = []
    for kernel in (_made(kind) for kind, where in _KERNELS if where in (device.type, None)):
        found.append((kernel.name, why_not(kernel, device, dtype, head_dim, value_head_dim, scores, ratio)))
        if found[-1][1] is None:
            break
    return found


@cache
def _made(kind: type[Kernel]) -> Kernel:
    return kind()


def _announce(
    name: str, device: torch.device, dtype: torch.dtype, scores: Scores, refused: list[str], *, automatic: bool
) -> None:
    """Say once which kernel runs; as a warning where "auto" found none of the fast ones of a GPU."""
    case = (name, device.type, dtype, _extras(scores))
    if case in _said:
        return
    _said.add(case)
    message = f"core attention in {dtype} on {device.type}{_extras(scores)} runs in kernel {name!r}"
    why = f" ({'; '.join(refused)})" if refused else ""
    if name == "reference" and refused and device.type == "cuda":
        _logger.warning("%s, far slower than flash attention%s.%s", message, why, _way_out(dtype, scores))
    else:
        _logger.info("%s%s%s", message, why, _faster(name, device, automatic))


def _extras(scores: Scores) -> str:
    """What besides the scale the scores have, as the end of a phrase."""
    present = [word for word, value in (("window", scores.window), ("softcap", scores.softcap)) if value is not None]
    return f" with {' and '.join(present)}" if present else ""


def _way_out(dtype: torch.dtype, scores: Scores) -> str:
    """What brings flash attention to a case on a GPU, "" where the head dimensions or the GPU itself stand in the way."""
    ways = []
    if dtype not in (torch.bfloat16, torch.float16):
        ways.append("train in bfloat16 or float16 (bf16=True or fp16=True)")
    if scores.softcap is not None:
        ways.append("install flash-attn, a fast kernel with softcap (pip install flash-attn)")
    return f" To speed it up, {' and '.join(ways)}." if ways else ""


def _faster(name: str, device: torch.device, automatic: bool) -> str:
    """What torch's own kernel runs in place of flash-attention 2, or what is made for the GPU; "" for all others."""
    if name != "cuda" or torch.version.hip is not None:
        return ""
    if (active := torch.nn.attention.current_flash_attention_impl()) is not None:
        return f", which is {active} since torch.nn.attention.activate_flash_attention_impl was called"
    if not automatic or torch.cuda.get_device_capability(device)[0] != 9 or import_error() is None:
        return ""
    return "; FlashAttention 3 (flash_attn_interface) is made for this GPU, and is taken where it is installed"
