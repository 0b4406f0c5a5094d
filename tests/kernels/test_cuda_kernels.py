from __future__ import annotations

from functools import partial

import pytest
import torch
from dense_attention import (
    CASES,
    PLAIN,
    SCORES,
    SHAPES,
    compute_exact,
    compute_plain,
    draw_pools,
    relative_error,
    run_kernel,
)

from hf_distca.kernels import Kernel, ScoreOptions
from hf_distca.kernels.base import KernelRequest
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.flash import CUDA as CUDA_KERNEL
from hf_distca.kernels.flash import FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda", 0)


@pytest.fixture(
    params=[CUDA_KERNEL, EFFICIENT, FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4],
    ids=lambda kernel: kernel.name,
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    kernel: Kernel = request.param
    reason = kernel.unsupported_reason(KernelRequest(CUDA, torch.bfloat16, 64, 64, PLAIN))
    if reason is not None:
        pytest.skip(reason)
    return kernel


def check(kernel: Kernel, case: str, shape: str, dtype: torch.dtype, scores: ScoreOptions) -> None:
    reason = kernel.unsupported_reason(KernelRequest(CUDA, dtype, *SHAPES[shape][2:], scores))
    if reason is not None:
        pytest.skip(reason)
    pools, tasks = draw_pools(CASES[case], SHAPES[shape], dtype, "cuda"), CASES[case].tasks
    found, expected, baseline = (
        run(pools, tasks, scores)
        for run in (partial(run_kernel, kernel), compute_exact, compute_plain)
    )
    assert found["o"].dtype == dtype
    assert found["lse"].dtype == torch.float32
    assert relative_error(found.pop("lse"), expected["lse"]) <= 1e-5
    for name, value in found.items():
        assert (
            relative_error(value, expected[name])
            <= 2 * relative_error(baseline[name], expected[name]) + 1e-6
        ), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_exact_in_every_batch(
    kernel: Kernel, case: str, scores: str, dtype: torch.dtype
) -> None:
    check(kernel, case, "GQA", dtype, SCORES[scores])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scores", ["plain", "window of 17", "softcap"])
def test_kernels_are_exact_for_every_shape(kernel: Kernel, shape: str, scores: str) -> None:
    check(kernel, "shared keys with gaps", shape, torch.bfloat16, SCORES[scores])


@pytest.mark.parametrize("scores", ["plain", "window of 17"])
def test_kernels_do_not_make_the_host_wait(kernel: Kernel, scores: str) -> None:
    """This includes the first call for a batch, which makes its index tensors."""
    case = CASES["shared keys with gaps"]
    pools = draw_pools(case, SHAPES["GQA"], torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_kernel(kernel, pools, case.tasks, SCORES[scores])
    finally:
        torch.cuda.set_sync_debug_mode("default")
