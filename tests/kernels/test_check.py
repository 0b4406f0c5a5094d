"""The check before the first use of a kernel finds wrong kernels; here it runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from strict_varlen_op import StrictVarlenOp
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.kernels import KernelRequest, ScoreOptions
from hf_distca.kernels.base import Operands
from hf_distca.kernels.check import mismatch_reason
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.plain_torch import ReferenceKernel
from hf_distca.kernels.varlen import Sequences, VarlenKernel

CPU = torch.device("cpu")
PLAIN = ScoreOptions(0.1)
WINDOW = ScoreOptions(0.1, window=7)
SOFTCAP = ScoreOptions(0.1, softcap=30.0)
CASE = KernelRequest(CPU, torch.bfloat16, 64, 64, PLAIN)
EVERYTHING = {"o", "lse", "dq", "dk", "dv"}


class Changed(StrictVarlenOp):
    """An op with changed scores or changed results."""

    def __init__(
        self,
        scores: Callable[[ScoreOptions], ScoreOptions] = lambda scores: scores,
        results: Callable[..., Any] = lambda *results: results,
    ) -> None:
        super().__init__()
        self.changed, self.results = scores, results

    def forward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        return self.results(*super().forward(pools, sequences, self.changed(scores)))

    def backward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        return self.results(*super().backward(pools, sequences, self.changed(scores)))


class Dense(StrictVarlenOp):
    """Ignore strides, as if rows were contiguous."""

    def forward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        q, k, v = pools
        q = q.as_strided(q.shape, (q[0].numel(), q.shape[2], 1), q.storage_offset())
        return super().forward(Operands(q, k, v), sequences, scores)


class WrongRatio(StrictVarlenOp):
    """Return wrong outputs if 8 query heads share a key head."""

    def forward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        o, lse = super().forward(pools, sequences, scores)
        return o * (2 if pools.q_THD.shape[1] == 8 * pools.k_TKD.shape[1] else 1), lse


class TopLeft(StrictVarlenOp):
    """Align causal masks with the first key, as some libraries do."""

    def forward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        q, k, v = pools
        o, lse = super().forward(pools, sequences, scores)
        rows, keys = sequences.cu_rows.tolist(), sequences.cu_keys.tolist()
        for a, b, c in zip(rows, rows[1:], keys, strict=False):
            cu = torch.tensor([0, b - a], dtype=torch.int32)
            here, there = slice(a, b), slice(c, c + b - a)
            o[here], lse[here] = super().forward(
                Operands(q[here], k[there], v[there]), Sequences(cu, cu, b - a, b - a), scores
            )
        return o, lse


class LeftGaps(StrictVarlenOp):
    """Leave gradients unwritten where a sequence has no rows or no keys."""

    def backward(self, pools: Any, sequences: Sequences, scores: ScoreOptions) -> Any:
        grads = super().backward(pools, sequences, scores)
        rows, keys = sequences.cu_rows.diff(), sequences.cu_keys.diff()
        for grad, lengths, empty in zip(
            grads, (rows, keys, keys), (keys == 0, rows == 0, rows == 0), strict=True
        ):
            grad[empty.repeat_interleave(lengths)] = 1.0
        return grads


class Tf32(TorchDispatchMode):
    """Round factors of float32 matrix products to 10 bits, as tensor cores do with TF32."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        products = (
            torch.ops.aten.mm,
            torch.ops.aten.bmm,
            torch.ops.aten.addmm,
            torch.ops.aten.baddbmm,
        )
        if function.overloadpacket in products:
            args = [
                self._rounded(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x
                for x in args
            ]
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _rounded(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def halve_scale(scores: ScoreOptions) -> ScoreOptions:
    return replace(scores, scale=scores.scale / 2)


def widen_window(scores: ScoreOptions) -> ScoreOptions:
    return replace(scores, window=None if scores.window is None else scores.window + 1)


def zero_last_row(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for result in results:
        result[-1] = 0
    return results


def insert_nan(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    results[-1][0, 0] = float("nan")
    return results


@pytest.mark.parametrize(
    ("dtype", "widths"), [(torch.bfloat16, (128, 64)), (torch.float16, (40, 40))], ids=str
)
@pytest.mark.parametrize("scores", [PLAIN, WINDOW, SOFTCAP, ScoreOptions(0.1, 7, 30.0)])
def test_correct_kernels_pass(
    dtype: torch.dtype, widths: tuple[int, int], scores: ScoreOptions
) -> None:
    case = KernelRequest(CPU, dtype, *widths, scores)
    assert mismatch_reason(VarlenKernel(StrictVarlenOp()), case) is None
    if scores.softcap is None:
        assert mismatch_reason(CpuKernel(), case) is None


@pytest.mark.parametrize("scores", [PLAIN, WINDOW])
def test_an_exact_float32_kernel_passes_under_tf32(scores: ScoreOptions) -> None:
    case = KernelRequest(CPU, torch.float32, 64, 64, scores)
    with Tf32():
        assert mismatch_reason(CpuKernel(), case) is None
        reason = mismatch_reason(ReferenceKernel(), case)  # its own products are in TF32
    assert reason is not None
    assert reason.startswith("its results on cpu are wrong: o by 0.000")


@pytest.mark.parametrize(
    ("op", "scores", "named"),
    [
        (TopLeft(), PLAIN, EVERYTHING),
        (Changed(halve_scale), PLAIN, EVERYTHING),
        (Changed(lambda scores: replace(scores, window=None)), WINDOW, EVERYTHING),
        (Changed(widen_window), WINDOW, {"o", "dq", "dk", "dv"}),
        (Changed(lambda scores: replace(scores, softcap=None)), SOFTCAP, {"o", "dq"}),
        (Dense(), PLAIN, {"o", "dq", "dk", "dv"}),
        (Changed(results=zero_last_row), PLAIN, {"o", "dq", "dk", "dv"}),
        (Changed(results=insert_nan), PLAIN, {"lse", "dv"}),
    ],
)
def test_wrong_kernels_are_found(op: StrictVarlenOp, scores: ScoreOptions, named: set[str]) -> None:
    reason = mismatch_reason(VarlenKernel(op), CASE._replace(scores=scores))
    assert reason is not None
    assert reason.startswith("its results on cpu are wrong: ")
    found = {
        phrase.split(" by ")[0] for phrase in reason.split(": ", 1)[1].split(" (")[0].split(", ")
    }
    assert named <= found


def test_a_kernel_that_is_wrong_for_one_head_ratio_is_found() -> None:
    kernel = VarlenKernel(WrongRatio())
    found = {
        ratio: mismatch_reason(kernel, CASE._replace(gqa_ratio=ratio)) for ratio in (1, 2, 5, 8)
    }
    assert [ratio for ratio, reason in found.items() if reason is not None] == [8]


def test_the_error_of_a_kernel_is_the_mismatch_reason() -> None:
    class Other(StrictVarlenOp):
        def backward(self, *args: Any) -> Any:
            raise TypeError("got an unexpected keyword argument")

    reason = mismatch_reason(VarlenKernel(Other()), CASE)
    assert reason == "its check on cpu raised TypeError: got an unexpected keyword argument"


def test_out_of_memory_is_raised_and_is_no_mismatch_reason() -> None:
    class Full(StrictVarlenOp):
        def forward(self, *args: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        mismatch_reason(VarlenKernel(Full()), CASE)


def test_check_ignores_torch_defaults_and_keeps_the_random_state() -> None:
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            reason = mismatch_reason(ReferenceKernel(), CASE._replace(dtype=torch.float16))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert reason is None
    assert torch.equal(torch.get_rng_state(), before)


def test_an_op_that_wrongly_claims_to_take_gaps_is_found() -> None:
    case = KernelRequest(CPU, torch.float32, 32, 32, PLAIN)
    assert mismatch_reason(VarlenKernel(StrictVarlenOp(takes_gaps=True)), case) is None
    assert mismatch_reason(VarlenKernel(LeftGaps()), case) is None, "tasks are gathered"
    reason = mismatch_reason(VarlenKernel(LeftGaps(takes_gaps=True)), case)
    assert all(f"{name} with gaps by" in str(reason) for name in ("dq", "dk", "dv"))
