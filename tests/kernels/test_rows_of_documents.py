"""Whole documents at any place of their pools on the CPU, and what a kernel keeps of a batch."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from dense_attention import (
    PLAIN,
    SHAPES,
    PooledTasks,
    case,
    check_exact,
    compute_exact,
    draw_pools,
    relative_error,
    run_kernel,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.kernels import ScoreOptions, TaskBatch
from hf_distca.kernels.base import Operands
from hf_distca.kernels.cpu import CpuKernel


def pack_documents(*lengths: int) -> PooledTasks:
    """Make tasks of whole documents in a row."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return case(
        *((start, length, start, length) for start, length in zip(starts, lengths, strict=True))
    )


@st.composite
def draw_documents(draw: st.DrawFn) -> PooledTasks:
    """Draw whole, mostly short documents, in different orders and with gaps in both pools; two may
    share keys.
    """
    lengths = draw(
        st.lists(st.sampled_from([1, 2, 5, 8, 8, 13, 16, 17, 64, 65, 65, 90]), max_size=9)
    )
    tasks = [[0, length, 0, length] for length in lengths]
    ends = []
    for column in (0, 2):
        end = 0
        for task in draw(st.permutations(tasks)):
            task[column] = end + draw(st.sampled_from([0, 0, 0, 4]))
            end = task[column] + task[1]
        ends.append(end)
    if tasks and draw(st.booleans()):
        tasks[-1][2] = max(0, tasks[0][2] - 1)
        ends[1] = max(task[2] + task[3] for task in tasks)
    return case(
        *map(tuple, tasks),
        rows=ends[0] + draw(st.integers(0, 2)),
        keys=ends[1] + draw(st.integers(0, 2)),
    )


@given(
    case=draw_documents(),
    window=st.sampled_from([None, None, 8, 64]),
    loud=st.sampled_from([1.0, 60.0]),
)
@settings(max_examples=75, deadline=None)
def test_whole_documents_are_exact(case: PooledTasks, window: int | None, loud: float) -> None:
    """With loud scores, exponentials of keys that a row does not see would overflow."""
    scores = ScoreOptions(0.19, window)
    pools = draw_pools(case, SHAPES["narrow values"], torch.float64)
    pools["q"] *= loud
    check_exact(CpuKernel(), pools, case.tasks, scores, 1e-9)


def test_nan_stays_in_its_document() -> None:
    documents = pack_documents(5, 8, 7, 6, 6)
    pools = draw_pools(documents, SHAPES["GQA"], torch.float64)
    expected = compute_exact(pools, documents.tasks, PLAIN)
    broken = slice(5, 13)
    for name in pools:
        pools[name][broken] = float("nan")
    for name, value in run_kernel(CpuKernel(), pools, documents.tasks, PLAIN).items():
        assert value[broken].isnan().any()
        value[broken] = expected[name][broken].to(value.dtype)
        assert relative_error(value, expected[name]) <= 1e-10, name


def test_derived_data_is_reused_and_freed_with_its_batch() -> None:
    documents = pack_documents(5, 8, 7, 40)
    tasks = replace(documents.tasks)
    kernel = CpuKernel()
    pools = draw_pools(documents, SHAPES["GQA"], torch.float32)
    run_kernel(kernel, pools, tasks, PLAIN)
    derived, held = dict(tasks.derived), weakref.ref(tasks)
    assert derived
    run_kernel(kernel, pools, tasks, PLAIN)
    assert all(tasks.derived[key] is one for key, one in derived.items())
    del tasks
    assert held() is None


def test_tasks_of_a_batch_are_checked_once() -> None:
    """Thousands of documents cost later calls nothing, also with other pools."""

    class Counted(tuple[int, ...]):
        read = 0

        def __iter__(self) -> Any:
            type(self).read += 1
            return super().__iter__()

    lengths = Counted([32] * 10)
    starts = tuple(range(0, 320, 32))
    tasks, kernel = TaskBatch(starts, lengths, starts, lengths), CpuKernel()
    q = torch.randn(320, 2, 8)
    wider = torch.cat([q, q])
    kernel.forward(Operands(wider, q, q), tasks, PLAIN)
    before = Counted.read
    assert before > 0
    kernel.forward(Operands(q, q, q), tasks, PLAIN)
    kernel.forward(Operands(wider, q, q), tasks, PLAIN)
    assert Counted.read == before
