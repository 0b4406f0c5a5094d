"""Kernels compute in the dtypes that they are given, whatever the user's autocast says."""

from __future__ import annotations

import pytest
import torch
from layer_exchanges import DIM, parts_of
from test_core_attention import dense, visible

from hf_distca.kernels import KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

TOKENS = 96
CPU = torch.device("cpu")
# Relative, of o, lse, dq, dk and dv. With autocast in the kernels, those of bfloat16 are up to ten
# times as large.
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
def test_kernels_under_autocast_are_as_exact_as_without(
    name: str, scores: ScoreOptions, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    # The scale of scores of trained models: their log-sum-exps are far from 0.
    q, k, v, do = (3 * torch.randn(TOKENS, 2, DIM, generator=generator).to(dtype) for _ in range(4))
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected_o = dense(*exact, None, scores)
    expected = torch.autograd.grad(expected_o, exact, do.double())
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    kernel = select_kernel(name, KernelRequest(CPU, dtype, DIM, DIM, scores))
    plan = Plan.make_local(Layout.from_lengths([[TOKENS]]), scores.window)
    call = LayerExchange(*parts_of(plan, 0, scores, kernel=kernel, group=AttentionGroup()))
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
    lse = logits.masked_fill(~visible(TOKENS, scores.window), float("-inf")).logsumexp(-1).T
    assert float((saved.double() - lse).abs().max() / lse.abs().max()) < LSE_BOUND
