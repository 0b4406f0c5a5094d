from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from dense_attention import (
    CASES,
    KERNELS,
    SHAPES,
    PooledTasks,
    Tensors,
    check_close,
    check_exact,
    compute_exact,
    draw_pools,
    keep_supported_scores,
    run_kernel,
)

from hf_distca.errors import KernelError
from hf_distca.kernels import Kernel, ScoreOptions, TaskBatch, cpu
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.varlen import VarlenKernel
from turns import in_turn

WITH_WINDOWS = [
    pytest.param(kernel, id=name)
    for name, kernel in ((name, make()) for name, make in KERNELS.items())
    if keep_supported_scores(kernel, ScoreOptions(0.19, 17)).window
]
LENGTH = 500


def cut_document(window: int) -> TaskBatch:
    """Cut a document of `LENGTH` tokens into slices, each with only the keys that its rows see."""
    cuts = (0, 1, 40, 200, 207, 460, LENGTH)
    first_keys = [max(0, start - window + 1) for start in cuts[:-1]]
    lengths = [end - start for start, end in pairwise(cuts)]
    return TaskBatch(
        cuts[:-1],
        lengths,
        first_keys,
        [end - key for end, key in zip(cuts[1:], first_keys, strict=True)],
    )


def copy_keys(tasks: TaskBatch) -> tuple[TaskBatch, torch.Tensor]:
    """Give each task a copy of its keys; return the tasks and the keys' places in the document."""
    runs = list(zip(tasks.key_start, tasks.key_length, strict=True))
    starts = [sum(length for _, length in runs[:i]) for i in range(len(runs))]
    return (
        TaskBatch(tasks.query_start, tasks.query_length, starts, tasks.key_length),
        torch.cat([torch.arange(start, start + length) for start, length in runs]),
    )


def run_whole(kernel: Kernel, scores: ScoreOptions) -> tuple[Tensors, Tensors]:
    tasks = TaskBatch([0], [LENGTH], [0], [LENGTH])
    pools = draw_pools(PooledTasks(tasks, LENGTH, LENGTH), SHAPES["GQA"], torch.float64)
    return pools, run_kernel(kernel, pools, tasks, scores)


@pytest.mark.parametrize("kernel", WITH_WINDOWS)
@pytest.mark.parametrize("window", in_turn([1, 2, 3, 17, 64, 250, LENGTH, 2 * LENGTH], 3, [17]))
def test_slices_need_only_the_keys_in_their_windows(kernel: Kernel, window: int) -> None:
    scores, tasks = ScoreOptions(0.19, window), cut_document(window)
    pools, expected = run_whole(kernel, scores)
    check_close(run_kernel(kernel, pools, tasks, scores), expected, 1e-12)

    tasks, positions = copy_keys(tasks)
    found = run_kernel(
        kernel, pools | {"k": pools["k"][positions], "v": pools["v"][positions]}, tasks, scores
    )
    for name in ("dk", "dv"):
        found[name] = torch.zeros_like(expected[name]).index_add_(0, positions, found[name])
    check_close(found, expected, 1e-12)


@pytest.mark.parametrize("kernel", WITH_WINDOWS)
def test_keys_before_the_window_are_not_read(kernel: Kernel) -> None:
    """Keys before the window hold NaN, which a weight of 0 would not hide."""
    tasks, window = TaskBatch([0], [30], [0], [400]), 20
    pools = draw_pools(PooledTasks(tasks, 30, 400), SHAPES["GQA"], torch.float64)
    expected = compute_exact(pools, tasks, ScoreOptions(0.19, window))
    unseen = slice(0, 400 - 30 - window + 1)
    if not isinstance(kernel, VarlenKernel):  # its imitated op masks keys
        pools["k"][unseen] = pools["v"][unseen] = float("nan")
    found = run_kernel(kernel, pools, tasks, ScoreOptions(0.19, window))
    assert not found["dk"][unseen].any()
    assert not found["dv"][unseen].any()
    check_close(found, expected, 1e-12)


@pytest.mark.parametrize("block", [1, 2, 5, 64, 1000])
@pytest.mark.parametrize("window", [1, 3, 17, 300])
def test_the_cpu_kernel_is_exact_for_any_block_size(
    block: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_BLOCK_ROWS", block)
    cpu._make_block_mask.cache_clear()
    case, scores = CASES["shared keys with gaps"], ScoreOptions(0.19, window)
    check_exact(CpuKernel(), draw_pools(case, SHAPES["GQA"], torch.float64), case.tasks, scores)
    cpu._make_block_mask.cache_clear()


@pytest.mark.parametrize("window", [512, 1024, 4096])
def test_the_cpu_kernel_computes_little_more_than_the_window(window: int) -> None:
    length = 16384
    tasks = TaskBatch([0], [length], [0], [length])
    blocks = list(cpu._cut_tasks(tasks, ScoreOptions(0.19, window)))
    assert sum(block.rows for block in blocks) == length
    computed = sum(
        block.rows * block.keys if block.keys > window else block.rows * (block.rows + 1) / 2
        for block in blocks
    )
    assert computed <= (1 + 192 / window) * (length * window - window * (window - 1) / 2)


def test_one_mask_serves_all_blocks_of_a_window() -> None:
    cpu._make_block_mask.cache_clear()
    scores = ScoreOptions(0.19, 17)
    for name in ("shared keys with gaps", "more rows than a kernel tile", "shared keys"):
        case = CASES[name]
        run_kernel(CpuKernel(), draw_pools(case, SHAPES["GQA"], torch.bfloat16), case.tasks, scores)
    assert cpu._make_block_mask.cache_info().misses == 1


def test_key_gradients_of_blocks_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 512 blocks adds 1/512 to a key; a sum in bfloat16 would stop growing at 1/2."""
    monkeypatch.setattr(cpu, "_BLOCK_ROWS", 2)
    cpu._make_block_mask.cache_clear()
    tasks, scores = TaskBatch([0], [2200], [0], [2200]), ScoreOptions(0.1, 1024)
    zeros = torch.zeros(2200, 1, 8, dtype=torch.bfloat16)
    ones = torch.ones(2200, 1, 8, dtype=torch.bfloat16)
    o, lse = CpuKernel().forward(Operands(zeros, zeros, ones), tasks, scores)
    _, _, dv = CpuKernel().backward(BackwardInputs(ones, zeros, o, lse, zeros, ones), tasks, scores)
    assert dv.dtype == torch.bfloat16
    assert dv[1100, 0].tolist() == [1.0] * 8
    cpu._make_block_mask.cache_clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window of 0 keys"), ({"softcap": 0.0}, "positive, got 0.0")],
)
def test_windows_and_softcaps_of_zero_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        ScoreOptions(0.1, **options)
