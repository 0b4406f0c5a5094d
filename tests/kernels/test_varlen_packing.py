from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from dense_attention import (
    CASES,
    PLAIN,
    SHAPES,
    PooledTasks,
    case,
    check_exact,
    draw_pools,
    random_cases,
    run_kernel,
)
from hypothesis import given
from hypothesis import strategies as st
from strict_varlen_op import StrictVarlenOp

from hf_distca.kernels import ScoreOptions, TaskBatch, varlen
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.varlen import VarlenKernel


def record_calls(
    case: PooledTasks,
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    op = StrictVarlenOp()
    pools = draw_pools(case, SHAPES["GQA"], torch.float32)
    run_kernel(VarlenKernel(op), pools, case.tasks, PLAIN)
    return pools, op.calls


def make_pools(rows: int, keys: int) -> Operands:
    return Operands(torch.empty(rows, 2, 8), *(torch.empty(keys, 1, 8) for _ in "kv"))


def test_packed_documents_are_not_copied() -> None:
    pools, (forward, backward) = record_calls(CASES["whole documents"])
    for call in (forward, backward):
        assert all(call[name].data_ptr() == pools[name].data_ptr() for name in "qkv")
        assert call["q"].shape == pools["q"].shape
    assert backward["do"].data_ptr() == pools["do"].data_ptr()


@pytest.mark.parametrize("takes_gaps", [False, True])
def test_packed_documents_are_one_call_of_whole_pools(takes_gaps: bool) -> None:
    """Rows and keys share one tensor of bounds."""
    lengths, starts = (3, 5, 2), (0, 3, 8)
    op = StrictVarlenOp(takes_gaps=takes_gaps)
    (call,) = VarlenKernel(op)._get_calls(
        TaskBatch(starts, lengths, starts, lengths), make_pools(10, 10)
    )
    assert call.rows == call.keys == varlen._PoolRows(0, 10, None)
    assert call.gaps is None
    assert call.sequences.cu_rows.tolist() == [0, 3, 8, 10]
    assert call.sequences.cu_keys is call.sequences.cu_rows
    assert call.sequences[2:] == (5, 5)


@pytest.mark.parametrize("sizes", [(11, 10), (10, 11)], ids=["a row more", "a key more"])
def test_calls_omit_rows_and_keys_beyond_packed_documents(sizes: tuple[int, int]) -> None:
    lengths, starts = (3, 5, 2), (0, 3, 8)
    (call,) = VarlenKernel(StrictVarlenOp())._get_calls(
        TaskBatch(starts, lengths, starts, lengths), make_pools(*sizes)
    )
    assert (call.rows.length, call.keys.length) == (10, 10)


def test_slices_of_one_document_are_not_copied() -> None:
    pools, found = record_calls(CASES["shared keys"])
    assert len(found) == 6
    for call, row in zip(found, (0, 40, 73, 0, 40, 73), strict=True):
        assert call["q"].data_ptr() == pools["q"][row:].data_ptr()
        assert all(call[name].data_ptr() == pools[name].data_ptr() for name in "kv")


def test_tasks_with_gaps_are_gathered() -> None:
    pools, found = record_calls(case((0, 5, 0, 9), (8, 5, 20, 9)))
    assert [call["q"].shape[0] for call in found] == [10, 10]
    assert torch.equal(found[0]["k"], torch.cat([pools["k"][:9], pools["k"][20:29]]))


@pytest.mark.parametrize("scores", [PLAIN, ScoreOptions(0.1, window=7)], ids=["plain", "window"])
def test_an_op_that_takes_gaps_gets_them_as_sequences(scores: ScoreOptions) -> None:
    """One call covers the whole pools despite their gaps, and rows of no task get 0."""
    op = StrictVarlenOp(takes_gaps=True)
    gapped = PooledTasks(TaskBatch((2, 9), (5, 9), (0, 20), (8, 9)), 25, 31)
    pools = draw_pools(gapped, SHAPES["GQA"], torch.float64)
    results = check_exact(VarlenKernel(op), pools, gapped.tasks, scores, 1e-12)
    assert len(op.calls) == 2
    assert all(
        call[name].data_ptr() == pools[name].data_ptr() for call in op.calls for name in "qkv"
    )
    for name in ("o", "lse", "dq"):
        assert not results[name][[0, 1, 7, 8, *range(18, 25)]].any()


@given(case=random_cases())
def test_random_batches_with_gaps_are_exact(case: PooledTasks) -> None:
    pools = draw_pools(case, SHAPES["GQA"], torch.float64)
    check_exact(VarlenKernel(StrictVarlenOp(takes_gaps=True)), pools, case.tasks, PLAIN)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("whole documents", 1),
        ("one token tasks", 3),
        ("shared keys with gaps", 2),
        ("whole documents out of order", 1),
    ],
)
def test_a_batch_takes_as_few_calls_as_possible(name: str, count: int) -> None:
    assert len(record_calls(CASES[name])[1]) == 2 * count


@given(case=random_cases(), kernel=st.sampled_from([VarlenKernel(StrictVarlenOp()), EFFICIENT]))
def test_calls_hold_every_task_once_and_no_key_twice(
    case: PooledTasks, kernel: VarlenKernel
) -> None:
    tasks = case.tasks
    found = kernel.split(tasks)
    assert sorted(task for call in found for task in call) == list(range(len(tasks)))
    for call in found:
        ends = [0, *(tasks.key_start[i] + tasks.key_length[i] for i in call)]
        assert all(tasks.key_start[i] >= end for i, end in zip(call, ends, strict=False))
    if kernel is EFFICIENT:  # its log-sum-exps are padded to the longest task of a call
        rows = [[tasks.query_length[i] for i in call] for call in found]
        assert all(max(call) < 2 * min(call) for call in rows)
        return
    readers = torch.zeros(case.keys, dtype=torch.int64)
    for start, length in zip(tasks.key_start, tasks.key_length, strict=True):
        readers[start : start + length] += 1
    assert len(found) == (int(readers.max()) if len(tasks) else 0)


def test_key_gradients_are_summed_in_float32() -> None:
    """400 rows add 1 to one key; a sum in bfloat16 would stop growing at 256."""
    tasks = TaskBatch(list(range(400)), [1] * 400, [0] * 400, [1] * 400)
    ones = torch.ones(400, 1, 8, dtype=torch.bfloat16)
    kernel = VarlenKernel(StrictVarlenOp())
    o, lse = kernel.forward(Operands(ones, ones, ones), tasks, PLAIN)
    _, _, dv = kernel.backward(BackwardInputs(ones, ones, o, lse, ones, ones), tasks, PLAIN)
    assert dv.dtype == torch.float32
    assert dv[0, 0].tolist() == [400.0] * 8


def test_index_tensors_are_built_once_and_freed_with_their_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[torch.Tensor] = []
    to_device = varlen.to_device
    monkeypatch.setattr(
        varlen, "to_device", lambda x, device: built.append(x) or to_device(x, device)
    )
    shared = CASES["shared keys with gaps"]
    tasks = replace(shared.tasks)
    pools = draw_pools(shared, SHAPES["GQA"], torch.float32)
    kernel = VarlenKernel(StrictVarlenOp())
    run_kernel(kernel, pools, tasks, PLAIN)
    first = len(built)
    assert first > 0
    run_kernel(kernel, pools, tasks, PLAIN)
    assert len(built) == first
    held = weakref.ref(built[-1])
    built.clear()
    assert held() is not None
    del tasks
    assert held() is None


@pytest.mark.parametrize(
    ("window", "seen"), [(None, None), (1, 1), (149, 149), (150, None), (2**40, None)]
)
def test_a_window_that_hides_nothing_is_dropped(window: int | None, seen: int | None) -> None:
    """The longest task has 150 keys."""
    op, tasks = StrictVarlenOp(), TaskBatch((0, 20), (20, 30), (0, 20), (20, 150))
    run_kernel(
        VarlenKernel(op),
        draw_pools(PooledTasks(tasks, 50, 170), SHAPES["MQA"], torch.float32),
        tasks,
        ScoreOptions(0.1, window),
    )
    assert op.windows == [seen, seen]


def test_index_tensors_are_copied_to_a_gpu_asynchronously() -> None:
    class Index:
        """Support only a copy that does not stop the host."""

        def __init__(self, pinned: bool = False) -> None:
            self.pinned = pinned

        def pin_memory(self) -> Index:
            return Index(pinned=True)

        def to(
            self, device: torch.device, *, non_blocking: bool = False
        ) -> tuple[bool, torch.device, bool]:
            return self.pinned, device, non_blocking

    assert varlen.to_device(Index(), torch.device("cuda")) == (True, torch.device("cuda"), True)
