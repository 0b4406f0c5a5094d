from __future__ import annotations

import pytest
import torch
from dense_attention import CASES, SHAPES, exact, plain, random_pools, relative_error, run_kernel

from hf_distca.kernels import Kernel
from hf_distca.kernels.cuda import CudaKernel
from hf_distca.kernels.flash_attn import FlashAttnKernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SCALE = 0.19


@pytest.fixture(params=[CudaKernel, FlashAttnKernel])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    made: Kernel = request.param()
    reason = made.unsupported(torch.device("cuda", 0), torch.bfloat16, 64, 64)
    if reason is not None:
        pytest.skip(reason)
    return made


def check(kernel: Kernel, case: str, shape: str, dtype: torch.dtype) -> None:
    pools, tasks = random_pools(CASES[case], SHAPES[shape], dtype, "cuda"), CASES[case].tasks
    found, expected, baseline = run_kernel(kernel, pools, tasks, SCALE), exact(pools, tasks, SCALE), plain(pools, tasks, SCALE)
    assert found["o"].dtype == dtype
    assert found["lse"].dtype == torch.float32
    assert relative_error(found.pop("lse"), expected["lse"]) <= 1e-5
    for name, value in found.items():
        assert relative_error(value, expected[name]) <= 2 * relative_error(baseline[name], expected[name]), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_batch(kernel: Kernel, case: str, dtype: torch.dtype) -> None:
    check(kernel, case, "GQA", dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(kernel: Kernel, shape: str) -> None:
    check(kernel, "shared keys with gaps", shape, torch.bfloat16)


def test_the_host_does_not_wait(kernel: Kernel) -> None:
    """From the first call for a batch on, when its index tensors are made."""
    case = CASES["shared keys with gaps"]
    pools = random_pools(case, SHAPES["GQA"], torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_kernel(kernel, pools, case.tasks, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
