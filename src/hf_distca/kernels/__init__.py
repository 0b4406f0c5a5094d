"""Attention kernels behind one signature. `select_kernel` picks and logs the one to run."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from hf_distca.config import KernelName
from hf_distca.errors import KernelError
from hf_distca.kernels.base import Kernel, KernelRequest, ScoreOptions, TaskBatch
from hf_distca.kernels.check import compile_ahead, compile_failure_reason, mismatch_reason
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.flash import (
    CUDA,
    FLASH_ATTN,
    FLASH_ATTN_3,
    FLASH_ATTN_3_HUB,
    FLASH_ATTN_4,
    INTERFACE_4,
    import_error,
)
from hf_distca.kernels.plain_torch import ReferenceKernel

__all__ = [
    "KernelRequest",
    "Kernel",
    "ScoreOptions",
    "TaskBatch",
    "suggest_faster_kernel",
    "is_slow",
    "select_kernel",
    "list_candidates",
    "unusable_reason",
]

_logger = logging.getLogger("hf_distca")

# Every kernel, in the order in which "auto" looks at them, and the type of device on which it takes
# them: None for all, "" for kernels that run only if they are named, such as one to download.
# CONTRIBUTING.md lists what else a new kernel needs. The order decides, and no clock: ranks with
# the same GPU and packages make the same choice, and so does the next run. FlashAttention 4 stands
# before 3: forward and backward together it is faster on Hopper, where its backward reaches 557 to
# 605 TFLOP/s from 8K tokens on (an H100, 2026-11-26) and that of 3 530 to 586 (published).
_KERNELS: tuple[tuple[Kernel, str | None], ...] = (
    (FLASH_ATTN_4, "cuda"),
    (FLASH_ATTN_3, "cuda"),
    (FLASH_ATTN_3_HUB, ""),
    (FLASH_ATTN, "cuda"),
    (CUDA, "cuda"),
    (EFFICIENT, "cuda"),
    (CpuKernel(), "cpu"),
    (ReferenceKernel(), None),
)
# Major compute capabilities for which FlashAttention 4 is made, by what such GPUs are called.
_MADE_FOR = {9: "Hopper", 10: "Blackwell"}

# Messages that have been logged: a case comes back in every micro-batch, and is logged once.
_logged: set[str] = set()


def select_kernel(name: KernelName, case: KernelRequest) -> Kernel:
    """Return the kernel to run: the same object for the same kernel each time.

    Args:
        name: a kernel, or "auto" for the first in the order of kernels that supports the case.
        case: what it is to run.

    Raises:
        KernelError: if the named kernel, or with "auto" every kernel, does not support the case or,
            on a GPU, computes it wrongly; with the reason and what to use.
    """
    # Deterministic algorithms change the answer.
    return _select_once(name, case, torch.are_deterministic_algorithms_enabled())


@lru_cache(maxsize=256)
def _select_once(name: KernelName, case: KernelRequest, _deterministic: bool) -> Kernel:
    """Select like `select_kernel`, once per case: every layer of every micro-batch calls this."""
    automatic = name == "auto"
    candidates = list_candidates(case, name)
    if not candidates:
        names = ["auto", *(kernel.name for kernel, _ in _KERNELS)]
        raise KernelError(
            f"There is no kernel {name!r}; choose one of {', '.join(map(repr, names))}."
        )
    refused = [f"{kernel.name}: {reason}" for kernel, reason in candidates if reason is not None]
    kernel, reason = candidates[-1]
    if reason is None:
        _announce(kernel.name, case, refused, automatic=automatic)
        return kernel
    words = (
        f"{case.dtype} tensors on {case.device}{_describe_features(case.scores)}, with head dim"
        f" {case.head_dim} and value head dim {case.value_head_dim}"
    )
    if automatic:
        raise KernelError(
            f"No kernel runs {words} ({'; '.join(refused)}). Convert q, k and v to a floating"
            " dtype."
        )
    raise KernelError(
        f'Kernel {name!r} cannot run {words}: {reason}. Set kernel="auto" to use what runs there.'
    )


def unusable_reason(kernel: Kernel, case: KernelRequest) -> str | None:
    """Return why a kernel cannot run a case, does not compile or computes it wrongly on that GPU;
    None if it can.

    On a GPU the first question about a case makes the host wait, for what `hf_distca.kernels.check`
    computes, and for compilers.
    """
    reason = kernel.unsupported_reason(case)
    if reason is not None or case.device.type != "cuda" or kernel.name == ReferenceKernel.name:
        return reason
    # Kernels have other code for windows and softcaps, whatever their sizes, and for deterministic
    # algorithms.
    kind = ScoreOptions(
        1.0, *(None if value is None else 1 for value in (case.scores.window, case.scores.softcap))
    )
    return _check_once(
        kernel, case._replace(scores=kind), torch.are_deterministic_algorithms_enabled()
    ) or compile_failure_reason(kernel, case)


@lru_cache(maxsize=256)
def _check_once(kernel: Kernel, case: KernelRequest, _deterministic: bool) -> str | None:
    """Check a kernel on a GPU. Exceptions, such as a lack of memory, are not cached."""
    with compile_ahead():
        return mismatch_reason(kernel, case)


def list_candidates(case: KernelRequest, name: str = "auto") -> list[tuple[Kernel, str | None]]:
    """List the kernels to look at for a case, in this order, each with the reason why it cannot
    run; None for the one that is taken, which is the last.

    Args:
        case: what it is to run.
        name: a kernel, or "auto" for all that are taken on the device without being named.
    """
    looked_at: list[tuple[Kernel, str | None]] = []
    for kernel, where in _KERNELS:
        if where in (case.device.type, None) if name == "auto" else kernel.name == name:
            looked_at.append((kernel, unusable_reason(kernel, case)))
            if looked_at[-1][1] is None:
                break
    return looked_at


def _announce(name: str, case: KernelRequest, refused: list[str], *, automatic: bool) -> None:
    """Log once which kernel runs; as a warning where "auto" found none of the fast ones of a
    GPU.
    """
    message = (
        f"core attention in {case.dtype} on {case.device.type}{_describe_features(case.scores)}"
        f" runs in kernel {name!r}"
    )
    if message in _logged:
        return
    _logged.add(message)
    why = f" ({'; '.join(refused)})" if refused else ""
    if refused and case.device.type == "cuda" and is_slow(name, case.dtype):
        _logger.warning(
            "%s, far slower than flash attention%s.%s", message, why, _suggest_speedup(case)
        )
    else:
        _logger.info("%s%s%s", message, why, _note_on_kernel(name, case.device, automatic))


def is_slow(name: str, dtype: torch.dtype) -> bool:
    """Return whether a kernel is far slower than flash attention, which most cases could use with
    another dtype or package.
    """
    return name == ReferenceKernel.name or (name == EFFICIENT.name and dtype == torch.float32)


def _describe_features(scores: ScoreOptions) -> str:
    """Name the features of the scores besides their scale, as the end of a phrase."""
    present = [name for name in ("window", "softcap") if getattr(scores, name) is not None]
    return f" with {' and '.join(present)}" if present else ""


def _suggest_speedup(case: KernelRequest) -> str:
    """Describe how to get flash attention for a case on a GPU; "" where the head dimensions or the
    GPU rule it out.
    """
    ways = []
    if case.dtype not in (torch.bfloat16, torch.float16):
        ways.append("train in bfloat16 or float16 (bf16=True or fp16=True)")
    package = "flash-attn-4" if _name_gpu_kind(case.device) else "flash-attn"
    if case.scores.softcap is not None and (
        package == "flash-attn" or import_error(INTERFACE_4) is not None
    ):
        ways.append(f"install {package}, a fast kernel with softcap (pip install {package})")
    return f" To speed it up, {' and '.join(ways)}." if ways else ""


def _note_on_kernel(name: str, device: torch.device, automatic: bool) -> str:
    """Note for the log that torch runs another flash kernel, or that a faster one could be
    installed; "" otherwise.
    """
    if (
        name == "cuda"
        and torch.version.hip is None
        and (active := torch.nn.attention.current_flash_attention_impl()) is not None
    ):
        return (
            f", which is {active} since torch.nn.attention.activate_flash_attention_impl was called"
        )
    advice = suggest_faster_kernel(name, device) if automatic else None
    return f"; {advice}" if advice else ""


def _name_gpu_kind(device: torch.device) -> str | None:
    """Name the kind of GPUs that FlashAttention 4 is made for, if this is one."""
    return (
        None
        if torch.version.hip is not None
        else _MADE_FOR.get(torch.cuda.get_device_capability(device)[0])
    )


def suggest_faster_kernel(name: str, device: torch.device) -> str | None:
    """Describe how to get a kernel that is faster than the one that runs on a GPU; None if there is
    none to install.
    """
    kind = (
        _name_gpu_kind(device) if name in ("cuda", "flash_attn") and device.type == "cuda" else None
    )
    if kind is None or import_error(INTERFACE_4) is None:
        return None
    return (
        f"FlashAttention 4 is made for {kind} GPUs (on an H100, 1.9 times as fast as torch's"
        " kernel) and is taken where it is installed: pip install flash-attn-4"
    )
