"""Check each kernel against plain torch on this device, before its first use.

The kernels for GPUs depend on what is installed there, and on the GPU. With a wrong mask, training
would go on in silence. So `select_kernel` runs each of them once, forward and backward, on a few
slices of documents, and takes none whose results are off.
"""

from __future__ import annotations

from functools import partial

import torch

from hf_distca.kernels.base import Case, Kernel, Operands, Saved, Scores, TaskBatch
from hf_distca.kernels.plain_torch import ReferenceKernel

# Slices that share keys, a slice with a long context, whole documents, rows that no task covers;
# longer and shorter than a tile. Tasks of a call lie one after another, which makes it one of
# views, or do not, which makes it one of gathered copies.
_TASKS = TaskBatch(
    (0, 131, 331, 130, 401),
    (130, 200, 60, 1, 150),
    (0, 0, 330, 330, 620),
    (130, 330, 290, 290, 150),
)
# Documents in order with rows and keys between them that belong to no task: a call of the whole
# pools.
_GAPS = TaskBatch((0, 150, 420), (90, 200, 1), (20, 110, 500), (90, 320, 170))
_ROWS, _KEYS = 560, 770
_SCALE = 0.7  # times 1 / sqrt(head dim), so that it is no kernel's default
_WINDOW = 100  # keys: it hides some of those tasks' keys
_SOFTCAP = 1.0  # below many of the scores
_KEY_HEADS = 2
# Bound of the relative error of a result (norms), in units in the last place of its dtype. In half
# precision an exact kernel is off by one rounding of each result. In float32 its sums are rounded,
# too: it is off by up to 4 units, and by more where a GPU puts a product together from products of
# fewer bits. Truth is float64: where TF32 is on, float32 products have 10 bits.
_UNITS, _UNITS_OF_FLOAT32 = 2.0, 16.0


def mismatch_reason(kernel: Kernel, case: Case) -> str | None:
    """Run a small check of a kernel and describe what it computes wrongly; None if nothing.

    The host waits for the device.

    Args:
        kernel: a kernel that claims to support the case.
        case: the case to check; of its scores only the presence of a window and of a softcap
            counts.

    Returns:
        Names of the results that differ from `ReferenceKernel` in float64 by more than the dtype's
        rounding explains, or the exception that the check raised.

    Raises:
        torch.OutOfMemoryError: if there was no memory for the check.
    """
    device, dtype, head_dim, value_head_dim, scores, ratio = case
    seen = Scores(
        _SCALE * head_dim**-0.5,
        None if scores.window is None else _WINDOW,
        None if scores.softcap is None else _SOFTCAP,
    )
    try:
        # A separate generator leaves the random numbers of training as they are.
        generator = torch.Generator().manual_seed(0)
        heads = ratio * _KEY_HEADS
        sizes = (
            (heads, _ROWS, head_dim),
            (_KEY_HEADS, _KEYS, head_dim),
            (_KEY_HEADS, _KEYS, value_head_dim),
        )
        random = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
        # As models lay out q, k and v: heads before rows, of which kernels get views.
        pools = [
            random(size).to(device, dtype).transpose(0, 1)
            for size in (*sizes, (heads, _ROWS, value_head_dim))
        ]
        with torch.autocast(device.type, enabled=False):
            results = _compute_results(kernel, pools, seen)
            expected = _compute_results(ReferenceKernel(), [pool.double() for pool in pools], seen)
        errors = {name: _compute_relative_error(results[name], expected[name]) for name in expected}
    except torch.OutOfMemoryError:
        raise  # it may fit the next time, and says nothing about the kernel
    except Exception as error:  # whatever the packages raise where they do not fit
        return f"its check on {device} raised {type(error).__name__}: {error}"
    bound = (_UNITS_OF_FLOAT32 if dtype == torch.float32 else _UNITS) * torch.finfo(dtype).eps
    off = [f"{name} by {error:.1g}" for name, error in errors.items() if not error <= bound]
    return (
        f"its results on {device} are wrong: {', '.join(off)} (relative, to plain torch; at most"
        f" {bound:.1g})"
        if off
        else None
    )


def _compute_results(
    kernel: Kernel, pools: list[torch.Tensor], scores: Scores
) -> dict[str, torch.Tensor]:
    q_THD, k_TKD, v_TKV, do_THV = pools
    results: list[torch.Tensor] = []
    for tasks in (_TASKS, _GAPS):
        outputs = kernel.forward(Operands(q_THD, k_TKD, v_TKV), tasks, scores)
        results += (
            *outputs,
            *kernel.backward(Saved(do_THV, q_THD, *outputs, k_TKD, v_TKV), tasks, scores),
        )
    names = ("o", "lse", "dq", "dk", "dv")
    return dict(zip((*names, *(f"{name} with gaps" for name in names)), results, strict=True))


def _compute_relative_error(results: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, divided by the norm; NaN if any result is NaN."""
    return float((results.double() - expected).norm() / expected.norm())
