"""Kernels compute in the dtypes of their inputs, also under autocast."""

from __future__ import annotations

import pytest
import torch
from layer_exchanges import DIM, make_parts
from test_core_attention import attend_densely, make_mask

from hf_distca.kernels import KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

TOKENS = 96
CPU = torch.device("cpu")
# Bounds of relative errors of o, dq, dk and dv. If autocast reached the kernels, errors in bfloat16
# would be up to ten times as large.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LSE_BOUND = 2e-6


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("cpu", ScoreOptions(DIM**-0.5)),
        ("cpu", ScoreOptions(DIM**-0.5, window=9)),
        ("reference", ScoreOptions(DIM**-0.5)),
        ("reference", ScoreOptions(DIM**-0.5, window=9, softcap=3.0)),
    ],
    ids=["cpu", "cpu, window", "reference", "reference, window and softcap"],
)
def test_kernels_are_exact_under_autocast(
    name: str, scores: ScoreOptions, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    # Scores are as large as in trained models, so log-sum-exps are far from 0.
    q, k, v, do = (3 * torch.randn(TOKENS, 2, DIM, generator=generator).to(dtype) for _ in range(4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected_o = attend_densely(*exact, None, scores)
    expected = torch.autograd.grad(expected_o, exact, do.double())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    kernel = select_kernel(name, KernelRequest(CPU, dtype, DIM, DIM, scores))
    plan = Plan.make_local(Layout.from_lengths([[TOKENS]]), scores.window)
    call = LayerExchange(*make_parts(plan, 0, scores, kernel=kernel, group=AttentionGroup()))
    with torch.autocast("cpu", torch.bfloat16):
        o = compute_core_attention(Inputs(*leaves), call)
        saved = next(
            tensor
            for tensor in o.grad_fn.saved_tensors
            if tensor is not None and tensor.shape == o.shape[:2]
        )
        grads = torch.autograd.grad(o, leaves, do)
    assert o.dtype == dtype
    for found, want in zip((o.detach(), *grads), (expected_o.detach(), *expected), strict=True):
        assert float((found.double() - want).norm() / want.norm()) < BOUNDS[dtype]
    q64, k64 = (tensor.detach().transpose(0, 1) for tensor in exact[:2])
    logits = q64 @ k64.mT * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    lse = logits.masked_fill(~make_mask(TOKENS, scores.window), float("-inf")).logsumexp(-1).T
    assert float((saved.double() - lse).abs().max() / lse.abs().max()) < LSE_BOUND
