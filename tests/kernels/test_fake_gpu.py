"""Devices, dtypes and shapes of all GPU kernels, in every batch on an imitated GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_attention import CASES

from fake_cuda import CUDA, fake_cuda, needs_cpu_build
from hf_distca.kernels import KernelRequest, ScoreOptions, flash
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.varlen import VarlenKernel

pytestmark = needs_cpu_build
KERNELS = {
    kernel.name: kernel
    for kernel in (flash.CUDA, EFFICIENT, flash.FLASH_ATTN, flash.FLASH_ATTN_3, flash.FLASH_ATTN_4)
}


class Interface:
    """Imitate the functions of all packages; only the shapes of results are right."""

    @staticmethod
    def _outputs(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        **_: Any,
    ) -> Any:
        for x in (q, k, v, cu_seqlens_q, cu_seqlens_k):
            assert x.device == CUDA
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        return (
            torch.empty_like(q),
            q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32),
            None,
            None,
        )

    @staticmethod
    def _grads(
        dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, **options: Any
    ) -> Any:
        lse = options.get("softmax_lse", options.get("lse"))
        assert dout.dtype == q.dtype == k.dtype == v.dtype == out.dtype
        assert lse.dtype == torch.float32
        assert lse.shape == (q.shape[1], q.shape[0])
        assert all(x.is_contiguous() for x in (dout, out, lse))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    _flash_attn_forward = _flash_attn_fwd = _flash_attn_varlen_forward = _outputs
    _flash_attn_backward = _flash_attn_bwd = _flash_attn_varlen_backward = _grads


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> VarlenKernel:
    monkeypatch.setattr(flash, "_find_version", lambda: (2, 8, 3))
    monkeypatch.setattr(flash, "_import_once", lambda name: Interface)
    return KERNELS[request.param]


@pytest.mark.parametrize(
    ("dtype", "widths", "cases"),
    [
        (torch.bfloat16, (64, 48), tuple(CASES)),
        (torch.float16, (20, 40), ("shared keys with gaps", "whole documents")),
    ],
    ids=str,
)
def test_results_have_the_right_device_dtype_and_shape(
    kernel: VarlenKernel, dtype: torch.dtype, widths: tuple[int, int], cases: tuple[str, ...]
) -> None:
    width, value_width = widths
    with fake_cuda() as pinned:
        assert (
            kernel.unsupported_reason(KernelRequest(CUDA, dtype, *widths, ScoreOptions(0.1)))
            is None
        )
        for case in map(CASES.__getitem__, cases):
            tasks = replace(case.tasks)  # without index tensors of an earlier imitated GPU
            made = {"dtype": dtype, "device": CUDA}
            q = torch.empty(case.rows, 4, width, **made)
            k = torch.empty(case.keys, 2, width, **made)
            v = torch.empty(case.keys, 2, value_width, **made)
            for scores in (ScoreOptions(0.1), ScoreOptions(0.1, window=7)):
                pinned.clear()
                o, lse = kernel.forward(Operands(q, k, v), tasks, scores)
                assert (o.shape, o.dtype, o.device) == ((case.rows, 4, value_width), dtype, CUDA)
                assert (lse.shape, lse.dtype, lse.device) == ((case.rows, 4), torch.float32, CUDA)
                made_once = list(pinned)
                dq, dk, dv = kernel.backward(
                    BackwardInputs(torch.empty_like(o), q, o, lse, k, v), tasks, scores
                )
                wide = torch.float32 if tasks.shares_keys else dtype
                for found, like, expected in ((dq, q, dtype), (dk, k, wide), (dv, v, wide)):
                    assert (found.shape, found.dtype, found.device) == (like.shape, expected, CUDA)
                assert pinned == made_once, (
                    "index tensors go to the GPU only in the first call for a batch"
                )
                assert not (made_once and scores.window), "not again with other scores"
