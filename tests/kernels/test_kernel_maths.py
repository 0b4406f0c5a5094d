from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from dense_attention import (
    CASES,
    KERNELS,
    PLAIN,
    SCORES,
    SHAPES,
    PooledTasks,
    Tensors,
    check_exact,
    compute_exact,
    compute_plain,
    draw_pools,
    keep_supported_scores,
    make_untouched_masks,
    random_cases,
    relative_error,
    run_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.errors import KernelError
from hf_distca.kernels import Kernel, ScoreOptions, TaskBatch, plain_torch
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.plain_torch import ReferenceKernel
from turns import in_turn

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
GRID = [
    (kernel, scores)
    for kernel in KERNELS
    for scores in SCORES
    if keep_supported_scores(KERNELS[kernel](), SCORES[scores]) == SCORES[scores]
]


Answer = tuple[Tensors, Tensors, Tensors]


def compute_answer(
    case: PooledTasks, shape: tuple[int, int, int, int], dtype: torch.dtype, scores: ScoreOptions
) -> Answer:
    """Draw pools; return them, their exact results, and torch's results in half precision."""
    pools = draw_pools(case, shape, dtype)
    return (
        pools,
        compute_exact(pools, case.tasks, scores),
        {} if dtype in TOLERANCE else compute_plain(pools, case.tasks, scores),
    )


@lru_cache(maxsize=32)  # kernels alternate, each with all scores
def get_answer(case: str, shape: str, dtype: torch.dtype, scores: str) -> Answer:
    return compute_answer(CASES[case], SHAPES[shape], dtype, SCORES[scores])


def check(
    kernel: Kernel, case: PooledTasks, dtype: torch.dtype, scores: ScoreOptions, right: Answer
) -> None:
    pools, expected, baseline = right
    found = run_kernel(kernel, pools, case.tasks, scores)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found["o"].dtype == found["dq"].dtype == dtype
    assert found["lse"].dtype == wide
    assert found["dk"].dtype == found["dv"].dtype == (wide if case.tasks.shares_keys else dtype)
    assert found["o"].is_contiguous()
    for name, like in {"o": "do", "dq": "q", "dk": "k", "dv": "v"}.items():
        assert found[name].shape == pools[like].shape, name
    rows, keys = make_untouched_masks(case)
    for name, mask in {"o": rows, "lse": rows, "dq": rows, "dk": keys, "dv": keys}.items():
        assert not found[name][mask].any(), name
    errors = {name: relative_error(found[name], expected[name]) for name in found}
    if dtype in TOLERANCE:
        assert max(errors.values()) <= TOLERANCE[dtype], errors
        return
    # In half precision, exponentials of torch's CPU kernel have 20 correct bits. With a window of 1
    # there is no other error.
    assert errors.pop("lse") <= 5e-5
    for name, error in errors.items():
        assert error <= 2 * relative_error(baseline[name], expected[name]) + 1e-6, name


def check_case(kernel: Kernel, case: str, shape: str, dtype: torch.dtype, scores: str) -> None:
    """Check a kernel in one of `CASES`."""
    check(kernel, CASES[case], dtype, SCORES[scores], get_answer(case, shape, dtype, scores))


@pytest.mark.parametrize(("kernel", "scores"), GRID)
@pytest.mark.parametrize("case", in_turn(CASES, 3))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_exact_in_every_batch(
    kernel: str, scores: str, case: str, dtype: torch.dtype
) -> None:
    check_case(KERNELS[kernel](), case, "GQA", dtype, scores)


@pytest.mark.parametrize(
    ("kernel", "scores"), [pair for pair in GRID if pair[1] in ("plain", "window of 17", "softcap")]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_kernels_are_exact_for_every_shape(
    kernel: str, scores: str, shape: str, dtype: torch.dtype
) -> None:
    check_case(KERNELS[kernel](), "shared keys with gaps", shape, dtype, scores)


@pytest.mark.parametrize("kernel", KERNELS)
@given(
    case=random_cases(),
    window=st.none() | st.integers(1, 100),
    softcap=st.none() | st.floats(0.5, 5),
)
@settings(max_examples=30, deadline=None)
def test_kernels_are_exact_in_random_batches(
    kernel: str, case: PooledTasks, window: int | None, softcap: float | None
) -> None:
    scores = keep_supported_scores(KERNELS[kernel](), ScoreOptions(0.19, window, softcap))
    check(
        KERNELS[kernel](),
        case,
        torch.float32,
        scores,
        compute_answer(case, SHAPES["MQA"], torch.float32, scores),
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_exact_for_strided_inputs(kernel: str) -> None:
    """q, k and v are views of one fused projection, and the gradient is expanded."""
    case, (heads, width) = CASES["shared keys"], (2, 16)
    fused = torch.randn(case.rows, 3 * heads * width, dtype=torch.float64)
    q, k, v = (x.view(case.rows, heads, width) for x in fused.split(heads * width, -1))
    for pools in (
        {"q": q, "k": k, "v": v, "do": torch.ones((), dtype=torch.float64).expand(q.shape)},
        {name: x.mT.contiguous().mT for name, x in {"q": q, "k": k, "v": v, "do": v}.items()},
    ):
        check_exact(KERNELS[kernel](), pools, case.tasks, PLAIN)


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores_do_not_overflow(kernel: str) -> None:
    case = CASES["shared keys"]
    pools = draw_pools(case, SHAPES["GQA"], torch.float64)
    pools["q"] *= 100
    check_exact(KERNELS[kernel](), pools, case.tasks, PLAIN, 1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_record_no_autograd_graph(kernel: str) -> None:
    case = CASES["shared keys"]
    pools = {
        name: x.requires_grad_()
        for name, x in draw_pools(case, SHAPES["GQA"], torch.float32).items()
    }
    assert not any(
        x.requires_grad for x in run_kernel(KERNELS[kernel](), pools, case.tasks, PLAIN).values()
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("tasks", "heads", "message"),
    [
        (TaskBatch([8], [4], [0], [4]), 4, r"query rows \[8, 12\) of a pool of 10"),
        (TaskBatch([0], [4], [8], [4]), 4, r"keys \[8, 12\) of a pool of 10"),
        (TaskBatch([-1], [4], [0], [4]), 4, r"query rows \[-1, 3\)"),
        (TaskBatch([0], [4], [0], [3]), 4, "4 query rows and 3 keys"),
        (TaskBatch([0], [0], [0], [3]), 4, "0 query rows and 3 keys"),
        (TaskBatch([0], [4], [0], [4]), 3, "multiple of key/value heads"),
    ],
)
def test_tasks_outside_their_pools_are_refused(
    kernel: str, tasks: TaskBatch, heads: int, message: str
) -> None:
    q, k = torch.zeros(10, heads, 8), torch.zeros(10, 2, 8)
    with pytest.raises(KernelError, match=message):
        KERNELS[kernel]().forward(Operands(q, k, k), tasks, PLAIN)
    with pytest.raises(KernelError, match=message):
        KERNELS[kernel]().backward(BackwardInputs(q, q, q, q[..., 0], k, k), tasks, PLAIN)


@pytest.mark.parametrize(
    ("k", "v"), [((10, 2, 16), (10, 2, 8)), ((10, 2, 8), (9, 2, 8)), ((10, 16), (10, 16))]
)
def test_pools_of_mismatched_shapes_are_refused(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(KernelError, match=r"got q \(10, 4, 8\), k \(10, "):
        CpuKernel().forward(
            Operands(torch.zeros(10, 4, 8), torch.zeros(k), torch.zeros(v)),
            TaskBatch([0], [4], [0], [4]),
            PLAIN,
        )


@pytest.mark.parametrize("scores", SCORES)
def test_the_reference_is_exact_in_small_chunks(
    scores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_torch, "_SCORES_PER_CHUNK", 1000)
    check_case(ReferenceKernel(), "shared keys with gaps", "GQA", torch.float64, scores)


def test_bfloat16_slices_round_as_little_as_one_call() -> None:
    """Merging rounds once more than a single call; both round probabilities, which matters more."""
    length, cut = 2048, 1024
    sliced = PooledTasks(
        TaskBatch([0, cut], [cut, length - cut], [0, 0], [cut, length]), length, length
    )
    whole = TaskBatch([0], [length], [0], [length])
    pools = draw_pools(sliced, (2, 1, 64, 64), torch.bfloat16)
    expected = compute_exact(pools, whole, PLAIN)
    merged = run_kernel(CpuKernel(), pools, sliced.tasks, PLAIN)
    single = run_kernel(CpuKernel(), pools, whole, PLAIN)
    for name in merged:
        assert relative_error(merged[name], expected[name]) <= 1.5 * relative_error(
            single[name], expected[name]
        ), name
