"""Attention kernels with one signature. `select_kernel` chooses the kernel to run and logs it."""

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

# All kernels in the order in which "auto" tries them, each with the type of device on which "auto"
# may take it: None for all devices, "" for kernels that run only if the user names them.
# CONTRIBUTING.md lists what else a new kernel needs. Nothing is timed, so all ranks and runs with
# the same GPU and packages make the same choice. FlashAttention 4 comes before FlashAttention 3
# because its forward and backward together are faster on Hopper. From 8K tokens on, the backward of
# FlashAttention 4 reached 557 to 605 TFLOP/s (an H100, 2026-11-26), and the published figures of
# FlashAttention 3 are 530 to 586.
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
# Names of the GPUs that FlashAttention 4 is made for, by major compute capability.
_MADE_FOR = {9: "Hopper", 10: "Blackwell"}

# Messages that have been logged. The same cases come in every micro-batch, and each message is
# logged only once.
_logged: set[str] = set()


def select_kernel(name: KernelName, case: KernelRequest) -> Kernel:
    """Return the kernel that runs a case. Cases with the same kernel get the same object.

    Args:
        name: name of a kernel, or "auto" for the first kernel that supports the case.
        case: the problem to run.

    Raises:
        KernelError: if the named kernel, or with "auto" every kernel, does not support the case or
            computes it wrongly on this GPU. The error gives the reason and a remedy.
    """
    # Kernels have separate code for deterministic algorithms, so the choice may depend on this
    # flag.
    return _select_once(name, case, torch.are_deterministic_algorithms_enabled())


@lru_cache(maxsize=256)
def _select_once(name: KernelName, case: KernelRequest, _deterministic: bool) -> Kernel:
    """Do the work of `select_kernel`. The result is cached, because every layer asks for its
    kernel.
    """
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
        f'Kernel {name!r} cannot run {words}: {reason}. Set kernel="auto" to use a kernel that can.'
    )


def unusable_reason(kernel: Kernel, case: KernelRequest) -> str | None:
    """Return why a kernel cannot run a case, or None if it can.

    A kernel cannot run a case if it does not support the case, does not compile, or gives wrong
    results on this GPU.

    On a GPU, the first call for a case makes the host wait for compilers and for the computations
    of `hf_distca.kernels.check`.
    """
    reason = kernel.unsupported_reason(case)
    if reason is not None or case.device.type != "cuda" or kernel.name == ReferenceKernel.name:
        return reason
    # Kernels have separate code for windows, for softcaps and for deterministic algorithms. The
    # values of windows and softcaps do not matter.
    kind = ScoreOptions(
        1.0, *(None if value is None else 1 for value in (case.scores.window, case.scores.softcap))
    )
    return _check_once(
        kernel, case._replace(scores=kind), torch.are_deterministic_algorithms_enabled()
    ) or compile_failure_reason(kernel, case)


@lru_cache(maxsize=256)
def _check_once(kernel: Kernel, case: KernelRequest, _deterministic: bool) -> str | None:
    """Check a kernel on a GPU. Exceptions, such as running out of memory, are not cached."""
    with compile_ahead():
        return mismatch_reason(kernel, case)


def list_candidates(case: KernelRequest, name: str = "auto") -> list[tuple[Kernel, str | None]]:
    """List the kernels to try for a case, in order, each with the reason why it cannot run.

    The list ends with the first kernel that can run, whose reason is None.

    Args:
        case: the problem to run.
        name: name of a kernel, or "auto" for all kernels that "auto" may take on the device.
    """
    looked_at: list[tuple[Kernel, str | None]] = []
    for kernel, where in _KERNELS:
        if where in (case.device.type, None) if name == "auto" else kernel.name == name:
            looked_at.append((kernel, unusable_reason(kernel, case)))
            if looked_at[-1][1] is None:
                break
    return looked_at


def _announce(name: str, case: KernelRequest, refused: list[str], *, automatic: bool) -> None:
    """Log once which kernel runs.

    The message is a warning if "auto" found no fast kernel on a GPU.
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
    """Return whether a kernel is far slower than flash attention.

    Most cases that run in a slow kernel can use flash attention in another dtype, or after the user
    installs a package.
    """
    return name == ReferenceKernel.name or (name == EFFICIENT.name and dtype == torch.float32)


def _describe_features(scores: ScoreOptions) -> str:
    """Return a phrase such as " with window and softcap"; "" if a case has neither."""
    present = [name for name in ("window", "softcap") if getattr(scores, name) is not None]
    return f" with {' and '.join(present)}" if present else ""


def _suggest_speedup(case: KernelRequest) -> str:
    """Describe how to get flash attention for a case on a GPU; "" if the user can do nothing."""
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
    """Return a note for the log if torch runs a flash kernel other than its own, or if the user
    could install a faster kernel; else "".
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
    """Return the name of this kind of GPU if FlashAttention 4 is made for it, else None."""
    return (
        None
        if torch.version.hip is not None
        else _MADE_FOR.get(torch.cuda.get_device_capability(device)[0])
    )


def suggest_faster_kernel(name: str, device: torch.device) -> str | None:
    """Describe how to get a faster kernel than the running one on a GPU; None if there is no faster
    kernel to install.
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
