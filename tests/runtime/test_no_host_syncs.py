"""No layer makes the host wait: core attention and its backward read no tensor.

`NoHostSyncs` watches `compute_core_attention` and its backward: packing, both exchanges, the server
with its pools, the kernel's host code and sums of gradients. Plans and routes are made before. The
operation inside a kernel runs on the device and is not watched; tests/kernels/test_cuda_kernels.py
tests kernels on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_exchanges import DIM, make_parts
from torch.utils.checkpoint import checkpoint

from hf_distca.kernels import KernelRequest, ScoreOptions, select_kernel
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.kernels.varlen import Sequences, VarlenKernel
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.outputs import OutputStore
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan
from host_syncs import NoHostSyncs
from ranks import RankPools

HEADS, KEY_HEADS = 4, 2


class Op:
    """Return zeros: values do not matter here."""

    takes_gaps, width_multiple = True, 8  # as in the ops for GPUs

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        q_THD = pools.q_THD
        return Outputs(
            torch.zeros_like(q_THD), q_THD.new_zeros(q_THD.shape[:2], dtype=torch.float32)
        )

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        return Grads(*map(torch.zeros_like, pools.operands))


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


def run_layer(
    rank: int, layout: str, name: str, scores: ScoreOptions, reentrant: bool | None
) -> tuple[int, int]:
    """Run a layer where reading a tensor raises; return counts of operations and exchanges."""
    rows, context, tasks = LAYOUTS[layout]
    plan = Plan.from_tasks(
        Layout.from_segments(rows, context), [CATask(*task) for task in tasks], scores.window
    )
    # The code around every kernel for GPUs, or a CPU kernel.
    kernel = (
        VarlenKernel(Op())
        if name == "varlen"
        else select_kernel(
            name, KernelRequest(torch.device("cpu"), torch.float32, DIM, DIM, scores)
        )
    )
    parts = make_parts(plan, rank, scores, kernel=kernel)
    module, store = torch.nn.Identity(), OutputStore()
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
        outputs = None if reentrant is None else store.find_outputs(module, inputs)
        return compute_core_attention(inputs, LayerExchange(*parts, outputs))

    with NoHostSyncs() as mode:
        out = (
            attend(q, k, v)
            if reentrant is None
            else checkpoint(attend, q, k, v, use_reentrant=reentrant)
        )
        out.backward(torch.ones_like(out))
    meter = parts[-1].meter
    return mode.operations, meter.dispatches + meter.returns


CASES = [
    *[(layout, "varlen", ScoreOptions(0.25), None) for layout in LAYOUTS],
    ("slices moved", "varlen", ScoreOptions(0.25, window=9), None),
    ("slices moved", "cpu", ScoreOptions(0.25), None),
    ("slices moved", "reference", ScoreOptions(0.25, 9, 3.0), None),
    ("slices moved", "varlen", ScoreOptions(0.25), True),
    ("slices moved", "varlen", ScoreOptions(0.25), False),
]


@pytest.mark.parametrize(("layout", "name", "scores", "reentrant"), CASES, ids=str)
def test_no_layer_reads_a_tensor(
    rank_pool: RankPools,
    layout: str,
    name: str,
    scores: ScoreOptions,
    reentrant: bool | None,
) -> None:
    (operations, exchanges), (_, others) = rank_pool(2)(run_layer, layout, name, scores, reentrant)
    assert operations > 20, "the mode saw no operations"
    assert exchanges == others == (0 if layout == "nothing moved" else 4)
