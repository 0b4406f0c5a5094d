"""Compile all variants of a kernel that compiles on first call, before the first step.

FlashAttention 4 compiles a variant of its kernels when it first meets it, for 10 seconds and more,
and a rank that compiles in the middle of training keeps all others waiting. So every rank compiles
all variants of a kind of layers where it selects the kernel: ranks do so at the same point, and
therefore at the same time.

Variants of a kind of layers are what its calls differ in, by the keys of the package's compile
caches (4.0.0b36):

- A window that hides keys, or none. Layers with a window have both, for calls hide nothing whose
  documents are short.
- A call of more than 256 sequences, or of fewer: the former look sequences up in a table, which
  another kernel makes.

One block of rows or of keys would be more of them. The package bounds grids by the longest
sequences of a call and computes by their true lengths, so `hf_distca.kernels.flash` never says that
these are as short as a block. All else in the keys is fixed for a kind of layers: device, dtype,
widths, query heads for each key/value head, softcap, deterministic algorithms. The number of heads
is in none.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import torch

from hf_distca.kernels.base import Case, Kernel, Operands, Saved, Scores, TaskBatch
from hf_distca.kernels.flash import FLASH_ATTN_4, INTERFACE_4

_logger = logging.getLogger("hf_distca")
_LONG_SECONDS = 5.0
_ROWS, _WINDOW = 600, 100  # several blocks, and a window that hides some of their keys
_KEY_HEADS = 2
_ahead = 0  # functions that were compiled before a step asked for them


def count_late_compiles() -> int:
    """Count functions that this process compiled when a step needed them; each kept all ranks
    waiting.
    """
    return _count_compiled_functions() - _ahead


def _count_compiled_functions() -> int:
    """Count functions that the package has compiled, or loaded from disk, in this process so
    far.
    """
    package = sys.modules.get(INTERFACE_4)
    caches = (
        [getattr(value, "compile_cache", None) for value in vars(package).values()]
        if package is not None
        else []
    )
    return sum(len(compiled.cache) for compiled in caches if compiled is not None)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Count functions compiled inside as foreseen, and silence warnings of compilers."""
    global _ahead
    before = _count_compiled_functions()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        _ahead += _count_compiled_functions() - before


def compile_failure_reason(kernel: Kernel, case: Case) -> str | None:
    """Compile a kernel's variants for a case and return why it failed; None if it did not, or if
    the kernel compiles none.
    """
    if kernel is not FLASH_ATTN_4:
        return None
    scores = replace(case.scores, scale=1.0, window=None if case.scores.window is None else _WINDOW)
    return _compile_once(
        kernel, case._replace(scores=scores), torch.are_deterministic_algorithms_enabled()
    )


@lru_cache(maxsize=256)
def _compile_once(kernel: Kernel, case: Case, _deterministic: bool) -> str | None:
    started = time.perf_counter()
    before = _count_compiled_functions()
    _logger.info(
        "kernel %r compiles its variants for %s, on all ranks at once", kernel.name, _describe(case)
    )
    try:
        compile_variants(kernel, case)
    except torch.OutOfMemoryError:
        raise  # it may fit the next time, and says nothing about the kernel
    except Exception as error:  # whatever compilers raise
        return f"it cannot be compiled on {case.device} ({type(error).__name__}: {error})"
    seconds = time.perf_counter() - started
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    _logger.log(
        # Seen without any setting.
        logging.WARNING if first and seconds > _LONG_SECONDS else logging.INFO,
        "kernel %r compiled or loaded %d functions for %s before the first step, in %.1f s; steps"
        " compile none",
        kernel.name,
        _count_compiled_functions() - before,
        _describe(case),
        seconds,
    )
    return None


def compile_variants(kernel: Kernel, case: Case) -> None:
    """Run a small call of each variant that plans may ask for, forward and backward.

    Args:
        kernel: a kernel that compiles.
        case: the case; of its window only its presence counts.
    """
    device, dtype, head_dim, value_head_dim, scores, ratio = case
    windows = (None,) if scores.window is None else (None, _WINDOW)
    with compile_ahead(), torch.autocast(device.type, enabled=False):
        for documents in _list_sequence_counts():
            lengths = (_ROWS, *(1,) * (documents - 1))
            starts = tuple(accumulate(lengths[:-1], initial=0))
            tasks = TaskBatch(starts, lengths, starts, lengths)
            q, do, k, v = (
                torch.zeros(sum(lengths), heads, width, dtype=dtype, device=device)
                for heads in (ratio * _KEY_HEADS, _KEY_HEADS)
                for width in (head_dim, value_head_dim)
            )
            for window in windows:
                seen = Scores(scores.scale, window, scores.softcap)
                outputs = kernel.forward(Operands(q, k, v), tasks, seen)
                kernel.backward(Saved(do, q, *outputs, k, v), tasks, seen)


def _list_sequence_counts() -> tuple[int, int]:
    """Return the numbers of sequences of two calls: one without a lookup table of sequences, and
    one with it.
    """
    return 2, getattr(sys.modules.get(INTERFACE_4), "BIN_BATCH_SEARCH_THRESH", 256) + 1


def _describe(case: Case) -> str:
    """Describe the case for a log."""
    extras = [name for name in ("window", "softcap") if getattr(case.scores, name) is not None]
    width = f"heads of {case.head_dim}" + (
        f" and {case.value_head_dim}" if case.value_head_dim != case.head_dim else ""
    )
    return f"{width}, {case.gqa_ratio} query heads a key head" + (
        f", with {' and '.join(extras)}" if extras else ""
    )
