"""That no layer makes the host wait: nothing between q, k, v and their gradients reads a tensor, on
any way that rows can take.

The mode is around `compute_core_attention` and its backward: packing, both exchanges, the server
with its pools, the kernel's own host code, sums of gradients. Plans and routes were made before,
once for all layers. What is inside the operation of a kernel is the device's, and so is not looked
at; tests of kernels on a GPU are in tests/kernels/test_cuda_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from hf_distca.borrowed import without_dispatch_modes
from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, select_kernel
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.kernels.varlen import Sequences, VarlenKernel
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan
from host_syncs import HostSyncError, NoHostSyncs
from ranks import RankPool

HEADS, KEY_HEADS, DIM = 4, 2, 16
SHAPE = AttentionShape(HEADS, KEY_HEADS, DIM, DIM, 4)


class Op:
    """A varlen op of zeros: what it would compute is not the matter."""

    takes_gaps, width_multiple = True, 8  # as those for GPUs

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        q_THD = pools.q_THD
        return Outputs(
            torch.zeros_like(q_THD), q_THD.new_zeros(q_THD.shape[:2], dtype=torch.float32)
        )

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        return Grads(*map(torch.zeros_like, pools.operands))


class Reading(Op):
    """One that reads the lengths of its sequences, as a careless one would."""

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        assert int(sequences.cu_rows[-1]) == len(pools.q_THD)
        return super().forward(pools, sequences, scores)


def kernel_of(name: str, scores: ScoreOptions) -> Kernel:
    if name == "varlen":  # what runs around every kernel for GPUs
        return VarlenKernel(Op())
    return (
        VarlenKernel(Reading())
        if name == "reading"
        else select_kernel(
            name, KernelRequest(torch.device("cpu"), torch.float32, DIM, DIM, scores)
        )
    )


# Rows of (document, start, length) by rank; tokens of context; tasks of (document, start, end,
# home, server).
WHOLE = [[(0, 0, 64)], [(1, 0, 20), (2, 0, 12)]]
MOVED = [(0, 0, 32, 0, 0), (0, 32, 48, 0, 1), (0, 48, 64, 0, 1), (1, 0, 20, 1, 1), (2, 0, 12, 1, 0)]
LAYOUTS: dict[str, tuple[Any, list[int], Any]] = {
    "nothing moved": (WHOLE, [0, 0], [(0, 0, 64, 0, 0), (1, 0, 20, 1, 1), (2, 0, 12, 1, 1)]),
    "slices moved": (WHOLE, [0, 0], MOVED),
    "a document over ranks": (
        [[(0, 0, 16), (0, 48, 16)], [(0, 16, 32), (1, 0, 9)]],
        [0, 0],
        [(0, 0, 16, 0, 0), (0, 48, 64, 0, 1), (0, 16, 48, 1, 1), (1, 0, 9, 1, 1)],
    ),
    "a rank without tokens": ([[(0, 0, 64)], []], [0, 0], [(0, 0, 40, 0, 0), (0, 40, 64, 0, 1)]),
    "keys of another nano-batch in front": (
        [[(0, 0, 32), (0, 32, 32)], [(1, 0, 20)]],
        [1, 0],
        [(0, 32, 48, 0, 0), (0, 48, 64, 0, 1), (1, 0, 20, 1, 1)],
    ),
}


def layer(
    rank: int,
    layout: str,
    name: str,
    scores: ScoreOptions,
    *,
    reentrant: bool | None,
) -> tuple[int, int]:
    """A layer forward and backward with everything that reads forbidden. Returns operations and
    exchanges.
    """
    rows, context, tasks = LAYOUTS[layout]
    plan = Plan.from_tasks(
        Layout.from_segments(rows, context), [CATask(*task) for task in tasks], scores.window
    )
    route = Route.build(plan, rank)
    group, meter, module, store = (
        AttentionGroup.find_or_create(timeout_seconds=60),
        Meter(),
        torch.nn.Identity(),
        OutputStore(),
    )
    server = AttentionServer(kernel_of(name, scores), scores, meter)
    keys = sum(length for *_, length in rows[rank])
    before = sum(length for *_, length in rows[rank][: context[rank]])
    q = torch.randn(keys - before, HEADS, DIM, requires_grad=True)
    k, v = (torch.randn(keys - before, KEY_HEADS, DIM, requires_grad=True) for _ in range(2))
    sink = torch.zeros(HEADS, requires_grad=True)
    given = (
        tuple(torch.randn(before, KEY_HEADS, DIM, requires_grad=True) for _ in range(2))
        if before
        else ()
    )

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        inputs = Inputs(*leaves, sink, *given)
        return compute_core_attention(
            inputs,
            LayerExchange(
                route,
                group,
                server,
                None if reentrant is None else store.find_outputs(module, inputs),
            ),
        )

    with NoHostSyncs() as mode:
        out = (
            attend(q, k, v)
            if reentrant is None
            else checkpoint(attend, q, k, v, use_reentrant=reentrant)
        )
        out.backward(torch.ones_like(out))
    return mode.operations, meter.dispatches + meter.returns


CASES = [
    *[(layout, "varlen", ScoreOptions(0.25), None) for layout in LAYOUTS],
    ("slices moved", "varlen", ScoreOptions(0.25, window=9), None),
    ("slices moved", "cpu", ScoreOptions(0.25), None),
    ("slices moved", "reference", ScoreOptions(0.25, 9, 3.0), None),
    ("slices moved", "varlen", ScoreOptions(0.25), True),
    ("slices moved", "varlen", ScoreOptions(0.25), False),
]


def every_case(rank: int) -> list[tuple[int, int]]:
    results = []
    for layout, name, scores, reentrant in CASES:
        try:
            results.append(
                layer(
                    rank,
                    layout,
                    name,
                    scores,
                    reentrant=reentrant,
                )
            )
        except Exception as error:
            raise AssertionError(f"{layout}, {name}, {scores}, {reentrant}: {error}") from error
    return results


def test_no_layer_reads_a_tensor(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2)(every_case)
    assert [exchanges for _, exchanges in first] == [exchanges for _, exchanges in second]
    for (layout, _, _, reentrant), (operations, exchanges) in zip(CASES, first, strict=True):
        assert operations > 20, "the mode saw nothing of it"
        expected = 0 if layout == "nothing moved" else 4
        assert exchanges == expected, (layout, reentrant)


def caught(rank: int) -> str:
    try:
        layer(rank, "nothing moved", "reading", ScoreOptions(0.25), reentrant=None)
    except HostSyncError as error:
        return str(error)
    return ""


def test_a_kernel_that_reads_is_found(rank_pool: Callable[[int], RankPool]) -> None:
    assert (
        rank_pool(2)(caught) == ["aten._local_scalar_dense.default reads a tensor on the host"] * 2
    )


def x() -> torch.Tensor:
    return torch.arange(6.0)


def mask() -> torch.Tensor:
    return torch.tensor([True, False, True, True, False, False])


def assigned() -> None:
    x()[mask()] = torch.ones(3)


READING: dict[str, Callable[[], object]] = {
    "item": lambda: x()[2].item(),
    "float": lambda: float(x().sum()),
    "int": lambda: int(x()[1]),
    "bool": lambda: bool(x().any()),
    "slice": lambda: x()[: torch.tensor(3)],
    "contains": lambda: 3.0 in x(),
    "tolist": lambda: x().tolist(),
    "numpy": lambda: x().numpy(),
    "array": lambda: __import__("numpy").asarray(x()),
    "dlpack": lambda: torch.from_dlpack(x()),
    "print": lambda: str(x()),
    "equal": lambda: torch.equal(x(), x()),
    "allclose": lambda: torch.allclose(x(), x()),
    "nonzero": lambda: x().nonzero(),
    "where": lambda: torch.where(mask()),
    "mask": lambda: x()[mask()],
    "mask of bytes": lambda: torch.ops.aten.index(x(), [mask().to(torch.uint8)]),
    "assignment": assigned,
    "masked_select": lambda: x().masked_select(mask()),
    "unique": lambda: x().unique(),
    "unique of rows": lambda: x().view(3, 2).unique(dim=0),
    "unique_consecutive": lambda: x().unique_consecutive(),
    "bincount": lambda: x().long().bincount(),
    "histogram": lambda: x().histc(3),
    "repeat_interleave": lambda: x().repeat_interleave(torch.ones(6, dtype=torch.long)),
    "tensor_split": lambda: torch.ops.aten.tensor_split(x(), torch.tensor([2, 4])),
}


@pytest.mark.parametrize("read", READING)
def test_every_kind_of_read_is_found(read: str) -> None:
    with NoHostSyncs(), pytest.raises(HostSyncError):
        READING[read]()
    READING[read]()  # and nothing of the mode is left


COPYING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "cpu": lambda host, device: device.cpu(),
    "to": lambda host, device: device.to("cpu", torch.float64),
    "without waiting": lambda host, device: device.to("cpu", non_blocking=True),
    "to the device": lambda host, device: torch.ops.aten._to_copy(host, device=device.device),
    "copy_": lambda host, device: host.copy_(device),
    "many": lambda host, device: torch._foreach_copy_([host], [device]),
}


@pytest.mark.parametrize("copy", COPYING)
def test_every_copy_between_devices_is_found(copy: str) -> None:
    with FakeTensorMode():
        host, device = torch.zeros(3), torch.zeros(3, device="cuda")
        with NoHostSyncs():
            with pytest.raises(HostSyncError, match="copies between cpu and cuda"):
                COPYING[copy](host, device)
            device.to(torch.float64)
            torch.ops.aten.add(device, device)


@contextmanager
def allowed() -> Iterator[None]:
    with without_dispatch_modes():
        yield


def test_what_reads_nothing_is_let_through() -> None:
    table = torch.tensor([1, 0])
    with NoHostSyncs() as mode:
        y = x().index_select(0, table)[table] + x().masked_fill(mask(), 0.0)[:2]
        y.index_copy_(0, table, y.clone())
        torch.where(mask(), x(), 0.0)
        x()[1:3] = x()[table]
        x().repeat_interleave(2)
        x().histc(3, min=0, max=5)
        with allowed():
            assert y[0].item() >= 0
    assert mode.operations > 5


def test_host_tensors_may_be_read_where_device_tensors_are_named() -> None:
    """Tensors of the host may be read where those of the device are named."""
    device, host = x(), x()
    with NoHostSyncs(of=[device]):
        assert host.sum().item() == 15
        assert host.tolist() == list(range(6))
        views = (
            device.view(2, 3)[1],
            (device + host).exp(),
            torch.cat([host, device]),
            host.clone().copy_(device),
        )
        for computed in views:
            with pytest.raises(HostSyncError):
                computed.sum().item()
            with pytest.raises(HostSyncError):
                computed.tolist()
