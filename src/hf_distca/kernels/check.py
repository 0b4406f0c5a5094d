"""Compile each kernel and check it against plain torch on this device, before its first use.

GPU kernels depend on the installed packages and on the GPU. If a kernel computed a wrong mask,
training would continue without an error. `select_kernel` therefore runs each kernel once, forward
and backward, on a few slices of documents, and rejects a kernel whose results are wrong.

FlashAttention 4 compiles each variant of its kernels at the first call that needs it, which takes
10 seconds or more. A rank that compiles during training would keep all other ranks waiting. So each
rank compiles all variants for one kind of layer when it selects the kernel. All ranks select at the
same point, and therefore compile at the same time.

For one kind of layer, the package (4.0.0b36) distinguishes these variants in its compile caches:

- Whether a window hides keys. Layers with a window need both variants, because in a call with short
  documents the window hides nothing.
- Whether a call has more than 256 sequences. Such calls look sequences up in a table, which a
  separate kernel makes.

A call whose longest sequence fits in one block would need another variant. To avoid this variant,
`hf_distca.kernels.flash` always passes a longest length above one block. This is safe, because the
package uses this length only to bound its loops. All other properties by which the caches
distinguish variants are fixed for one kind of layer: device, dtype, widths, query heads for each
key/value head, softcap, deterministic algorithms. The caches do not distinguish numbers of heads.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate

import torch

from hf_distca.kernels.base import (
    BackwardInputs,
    Kernel,
    KernelRequest,
    Operands,
    ScoreOptions,
    TaskBatch,
)
from hf_distca.kernels.flash import FLASH_ATTN_4, INTERFACE_4
from hf_distca.kernels.plain_torch import ReferenceKernel

# The tasks are slices that share keys, a slice with a long context, and whole documents. Some rows
# have no task. Some tasks are longer than a tile, and some are shorter. In some calls the tasks are
# contiguous, so the call reads views; other calls read gathered copies.
_TASKS = TaskBatch(
    (0, 131, 331, 130, 401),
    (130, 200, 60, 1, 150),
    (0, 0, 330, 330, 620),
    (130, 330, 290, 290, 150),
)
# The tasks are documents in order, with rows and keys between them that no task covers. They run as
# one call on the whole pools.
_GAPS = TaskBatch((0, 150, 420), (90, 200, 1), (20, 110, 500), (90, 320, 170))
_ROWS, _KEYS = 560, 770
# The scale is `_SCALE` times 1 / sqrt(head dim), the default of kernels. The window hides some keys
# of the tasks above, and many scores exceed the softcap.
_SCALE = 0.7
_WINDOW = 100
_SOFTCAP = 1.0
_KEY_HEADS = 2
# Bounds of the relative error of a result (by norms), in units in the last place of its dtype. A
# correct kernel rounds each result once in half precision. In float32 it also rounds its sums, so
# it is off by up to 4 units, and by more on a GPU that computes a float32 product from several
# products of fewer bits. The expected results are computed in float64, because with TF32 even plain
# torch would multiply numbers of only 10 bits.
_UNITS, _UNITS_OF_FLOAT32 = 2.0, 16.0


def mismatch_reason(kernel: Kernel, case: KernelRequest) -> str | None:
    """Check a kernel on a few small tasks. Return which results are wrong; None if all are right.

    The host waits for the device.

    Args:
        kernel: a kernel that claims to support the case.
        case: the case to check. Only the presence of a window and of a softcap matters, not their
            values.

    Returns:
        Names of the results that differ from `ReferenceKernel` in float64 by more than rounding
        explains, or the exception that the check raised.

    Raises:
        torch.OutOfMemoryError: if there was no memory for the check.
    """
    device, dtype, head_dim, value_head_dim, scores, ratio = case
    seen = ScoreOptions(
        _SCALE * head_dim**-0.5,
        None if scores.window is None else _WINDOW,
        None if scores.softcap is None else _SOFTCAP,
    )
    try:
        # A separate generator does not change the random numbers of training.
        generator = torch.Generator().manual_seed(0)
        heads = ratio * _KEY_HEADS
        sizes = (
            (heads, _ROWS, head_dim),
            (_KEY_HEADS, _KEYS, head_dim),
            (_KEY_HEADS, _KEYS, value_head_dim),
        )
        random = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        # In models, heads come before rows in memory, and kernels get transposed views.
        pools = [
            random(size).to(device, dtype).transpose(0, 1)
            for size in (*sizes, (heads, _ROWS, value_head_dim))
        ]
        with torch.autocast(device.type, enabled=False):
            results = _compute_results(kernel, pools, seen)
            expected = _compute_results(ReferenceKernel(), [pool.double() for pool in pools], seen)
        errors = {name: _compute_relative_error(results[name], expected[name]) for name in expected}
    except torch.OutOfMemoryError:
        # This says nothing about the kernel, and a later check may fit into memory.
        raise
    except Exception as error:  # packages may raise anything
        return f"its check on {device} raised {type(error).__name__}: {error}"
    bound = (_UNITS_OF_FLOAT32 if dtype == torch.float32 else _UNITS) * torch.finfo(dtype).eps
    off = [f"{name} by {error:.1g}" for name, error in errors.items() if not error <= bound]
    return (
        f"its results on {device} are wrong: {', '.join(off)} (relative error to plain torch; at"
        f" most {bound:.1g} is allowed)"
        if off
        else None
    )


def _compute_results(
    kernel: Kernel, pools: list[torch.Tensor], scores: ScoreOptions
) -> dict[str, torch.Tensor]:
    q_THD, k_TKD, v_TKV, do_THV = pools
    results: list[torch.Tensor] = []
    for tasks in (_TASKS, _GAPS):
        outputs = kernel.forward(Operands(q_THD, k_TKD, v_TKV), tasks, scores)
        results += (
            *outputs,
            *kernel.backward(BackwardInputs(do_THV, q_THD, *outputs, k_TKD, v_TKV), tasks, scores),
        )
    names = ("o", "lse", "dq", "dk", "dv")
    return dict(zip((*names, *(f"{name} with gaps" for name in names)), results, strict=True))


def _compute_relative_error(results: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the error divided by the norm of `expected`; NaN if any result is NaN."""
    return float((results.double() - expected).norm() / expected.norm())


_logger = logging.getLogger("hf_distca")
_LONG_SECONDS = 5.0
# Rows of the longest sequence. They fill several blocks, so that the window hides keys.
_COMPILED_ROWS = 600
# Number of functions that were compiled before a step needed them.
_ahead = 0


def count_late_compiles() -> int:
    """Count the functions that this process compiled during steps. Each compilation kept all ranks
    waiting.
    """
    return _count_compiled_functions() - _ahead


def _count_compiled_functions() -> int:
    """Count the functions that flash-attn-4 has compiled or loaded from disk in this process."""
    package = sys.modules.get(INTERFACE_4)
    caches = (
        [getattr(value, "compile_cache", None) for value in vars(package).values()]
        if package is not None
        else []
    )
    return sum(len(compiled.cache) for compiled in caches if compiled is not None)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Return a context manager for compiling kernels before training. `count_late_compiles` leaves
    out the functions that its block compiles. Warnings of compilers are silenced.
    """
    global _ahead
    before = _count_compiled_functions()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        _ahead += _count_compiled_functions() - before


def compile_failure_reason(kernel: Kernel, case: KernelRequest) -> str | None:
    """Compile a kernel's variants for a case. Return why that failed, or None if it worked."""
    if kernel is not FLASH_ATTN_4:
        return None
    scores = replace(case.scores, scale=1.0, window=None if case.scores.window is None else _WINDOW)
    return _compile_once(
        kernel, case._replace(scores=scores), torch.are_deterministic_algorithms_enabled()
    )


@lru_cache(maxsize=256)
def _compile_once(kernel: Kernel, case: KernelRequest, _deterministic: bool) -> str | None:
    started = time.perf_counter()
    before = _count_compiled_functions()
    _logger.info(
        "kernel %r compiles its variants for %s, on all ranks at once", kernel.name, _describe(case)
    )
    try:
        compile_variants(kernel, case)
    except torch.OutOfMemoryError:
        # This says nothing about the kernel, and a later call may fit into memory.
        raise
    except Exception as error:  # compilers may raise anything
        return f"it cannot be compiled on {case.device} ({type(error).__name__}: {error})"
    seconds = time.perf_counter() - started
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    _logger.log(
        # A long wait is logged as a warning, which users see with default logging settings.
        logging.WARNING if first and seconds > _LONG_SECONDS else logging.INFO,
        "kernel %r compiled or loaded %d functions for %s before the first step, in %.1f s; steps"
        " compile none",
        kernel.name,
        _count_compiled_functions() - before,
        _describe(case),
        seconds,
    )
    return None


def compile_variants(kernel: Kernel, case: KernelRequest) -> None:
    """Run a small call of each variant that plans may need, forward and backward.

    Args:
        kernel: a kernel that compiles.
        case: the case. Only the presence of a window matters, not its size.
    """
    device, dtype, head_dim, value_head_dim, scores, ratio = case
    windows = (None,) if scores.window is None else (None, _WINDOW)
    with compile_ahead(), torch.autocast(device.type, enabled=False):
        for documents in _list_sequence_counts():
            lengths = (_COMPILED_ROWS, *(1,) * (documents - 1))
            starts = tuple(accumulate(lengths[:-1], initial=0))
            tasks = TaskBatch(starts, lengths, starts, lengths)
            q, do, k, v = (
                torch.zeros(sum(lengths), heads, width, dtype=dtype, device=device)
                for heads in (ratio * _KEY_HEADS, _KEY_HEADS)
                for width in (head_dim, value_head_dim)
            )
            for window in windows:
                seen = ScoreOptions(scores.scale, window, scores.softcap)
                outputs = kernel.forward(Operands(q, k, v), tasks, seen)
                kernel.backward(BackwardInputs(do, q, *outputs, k, v), tasks, seen)


def _list_sequence_counts() -> tuple[int, int]:
    """Return the number of sequences for each of two calls. The first call needs no lookup table of
    sequences, and the second call needs one.
    """
    return 2, getattr(sys.modules.get(INTERFACE_4), "BIN_BATCH_SEARCH_THRESH", 256) + 1


def _describe(case: KernelRequest) -> str:
    """Return a short description of a case for logs."""
    extras = [name for name in ("window", "softcap") if getattr(case.scores, name) is not None]
    width = f"heads of {case.head_dim}" + (
        f" and {case.value_head_dim}" if case.value_head_dim != case.head_dim else ""
    )
    return f"{width}, {case.gqa_ratio} query heads a key head" + (
        f", with {' and '.join(extras)}" if extras else ""
    )
