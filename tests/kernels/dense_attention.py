"""Kernels that run on a CPU, and the cases that compare them with dense softmax in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from strict_varlen_op import StrictVarlenOp
from torch.nn.functional import pad, scaled_dot_product_attention

from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, TaskBatch
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.plain_torch import ReferenceKernel
from hf_distca.kernels.varlen import VarlenKernel

Tensors = dict[str, torch.Tensor]

# Tests compare all of these kernels, each with the scores that it supports.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "reference": ReferenceKernel,
    "cpu": CpuKernel,
    "varlen": lambda: VarlenKernel(StrictVarlenOp()),
}


def keep_supported_scores(kernel: Kernel, scores: ScoreOptions) -> ScoreOptions:
    """Remove from the scores a window or softcap that the kernel does not support."""
    for name in ("window", "softcap"):
        alone = ScoreOptions(scores.scale, **{name: getattr(scores, name)})
        case = KernelRequest(torch.device("cpu"), torch.float64, 64, 64, alone)
        if kernel.unsupported_reason(case) is not None:
            scores = replace(scores, **{name: None})
    return scores


@dataclass(frozen=True)
class PooledTasks:
    """Tasks and the sizes of their pools."""

    tasks: TaskBatch
    rows: int
    keys: int


def case(
    *tasks: tuple[int, int, int, int], rows: int | None = None, keys: int | None = None
) -> PooledTasks:
    """Make a case from (query start, query length, key start, key length) tuples. By default, pools
    end with the last task.
    """
    columns = tuple(zip(*tasks, strict=True)) or ((), (), (), ())
    return PooledTasks(
        TaskBatch(*columns),
        max((a + n for a, n, _, _ in tasks), default=0) if rows is None else rows,
        max((b + m for _, _, b, m in tasks), default=0) if keys is None else keys,
    )


CASES = {
    "whole documents": case((0, 37, 0, 37), (37, 1, 37, 1), (38, 90, 38, 90), (128, 16, 128, 16)),
    "equal documents": case((0, 32, 0, 32), (32, 32, 32, 32), (64, 32, 64, 32)),
    "one slice": case((0, 48, 0, 150)),
    "one slice amid its pools": case((5, 20, 7, 61), rows=30, keys=80),
    "shared keys": case((0, 40, 0, 40), (40, 33, 0, 73), (73, 50, 0, 123)),
    "shared keys with gaps": case(
        (0, 20, 3, 40), (25, 30, 3, 100), (60, 8, 110, 30), (55, 5, 110, 70), rows=70, keys=190
    ),
    "shared keys out of order": case(
        (40, 30, 60, 30), (0, 25, 0, 60), (25, 15, 0, 20), (70, 12, 60, 80)
    ),
    "whole documents out of order": case((50, 30, 0, 30), (0, 50, 30, 50), (80, 4, 80, 4)),
    "one token tasks": case((0, 1, 0, 1), (1, 1, 0, 2), (2, 1, 0, 70), (3, 1, 70, 1)),
    "uncovered rows": case((4, 10, 2, 10), (20, 6, 12, 9), rows=40, keys=30),
    "more rows than a kernel tile": case((0, 300, 0, 300), (300, 150, 0, 650)),
    "no tasks": case(rows=5, keys=3),
    "empty pools": case(rows=0, keys=0),
    "rows but no keys": case(rows=4, keys=0),
}

# The scale belongs to no head dim in SHAPES, so a kernel that takes its own scale fails. The
# softcap is below about half of the pools' scores.
PLAIN = ScoreOptions(0.19)
SCORES = {
    "plain": PLAIN,
    "window of 1": ScoreOptions(0.19, window=1),
    "window of 3": ScoreOptions(0.19, window=3),
    "window of 17": ScoreOptions(0.19, window=17),
    "window of 300": ScoreOptions(0.19, window=300),
    "window of all": ScoreOptions(0.19, window=1000),
    "softcap": ScoreOptions(0.19, softcap=1.5),
    "window of 17, softcap": ScoreOptions(0.19, window=17, softcap=1.5),
}

# query heads, key/value heads, head dim, value head dim
SHAPES = {
    "MHA": (3, 3, 16, 16),
    "GQA": (4, 2, 64, 64),
    "MQA": (4, 1, 16, 16),
    "wide heads": (2, 1, 128, 128),
    "head dim 80": (2, 2, 80, 80),
    "odd head dim": (2, 1, 20, 20),
    "narrow values": (6, 2, 24, 16),
    "wide values": (4, 2, 16, 40),
}


@st.composite
def random_cases(draw: st.DrawFn) -> PooledTasks:
    """Draw slices of documents in the key pool, with rows in any order and gaps."""
    lengths = draw(st.lists(st.integers(1, 90), max_size=4))
    tasks: list[list[int]] = []
    keys = 0
    for length in lengths:
        keys += draw(st.integers(0, 9))
        position = draw(st.integers(0, length - 1))
        while position < length:
            end = draw(st.integers(position + 1, length))
            tasks.append([0, end - position, keys, end])
            position = end + draw(st.integers(0, 20))
        keys += length
    rows = 0
    for task in draw(st.permutations(tasks)):
        task[0] = rows = rows + draw(st.sampled_from([0, 0, 0, 3]))
        rows += task[1]
    return case(
        *map(tuple, tasks), rows=rows + draw(st.integers(0, 3)), keys=keys + draw(st.integers(0, 3))
    )


def draw_pools(
    case: PooledTasks, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> Tensors:
    """Draw q, k, v and the gradient of the output. Keys grow along the pool, so wrong masks and
    wrong merges stand out.
    """
    heads, key_heads, head_dim, value_head_dim = shape
    generator = torch.Generator().manual_seed(7)
    sizes = {
        "q": (case.rows, heads, head_dim),
        "k": (case.keys, key_heads, head_dim),
        "v": (case.keys, key_heads, value_head_dim),
        "do": (case.rows, heads, value_head_dim),
    }
    pools = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in sizes.items()
    }
    pools["k"] *= torch.linspace(0.5, 2.0, case.keys, dtype=torch.float64)[:, None, None]
    return {name: x.to(dtype).to(device) for name, x in pools.items()}


def run_kernel(kernel: Kernel, pools: Tensors, tasks: TaskBatch, scores: ScoreOptions) -> Tensors:
    """Return all results of a kernel: outputs, log-sum-exps and gradients."""
    q, k, v = pools["q"], pools["k"], pools["v"]
    o, lse = kernel.forward(Operands(q, k, v), tasks, scores)
    dq, dk, dv = kernel.backward(BackwardInputs(pools["do"], q, o, lse, k, v), tasks, scores)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def list_runs(tasks: TaskBatch) -> Iterable[tuple[int, int, int, int]]:
    """List the first row, the rows, the first key and the keys of each task."""
    return zip(
        tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length, strict=True
    )


def make_mask(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Make the mask of the keys that each query row sees: (rows, keys)."""
    rows, keys = q.shape[0], k.shape[0]
    position = torch.arange(keys - rows, keys, device=q.device)[:, None]
    key = torch.arange(keys, device=q.device)
    return (key <= position) & (key > position - (keys if window is None else window))


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~make_mask(q, k, scores.window), float("-inf"))
    return torch.einsum("hqk,khv->qhv", logits.softmax(-1), v), logits.logsumexp(-1).T


def _plain_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    # Heads are padded to one multiple of 8. Otherwise torch computes in float32, which is too exact
    # to be compared with a half-precision kernel.
    width = -(-max(q.shape[2], v.shape[2]) // 8) * 8
    heads_first = (pad(x, (0, width - x.shape[2])).transpose(0, 1)[None] for x in (q, k, v))
    mask = make_mask(q, k, scores.window)
    o = scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scores.scale)[0].transpose(
        0, 1
    )
    return o[..., : v.shape[2]], q.new_zeros(q.shape[:2], dtype=torch.float32)


def _by_task(
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    pools: Tensors,
    tasks: TaskBatch,
    scores: ScoreOptions,
) -> Tensors:
    q, k, v = (pools[name].clone().requires_grad_() for name in "qkv")
    o = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_zeros(
        q.shape[:2], dtype=torch.float32 if q.dtype != torch.float64 else torch.float64
    )
    for row, rows, key, keys in list_runs(tasks):
        group = q.shape[1] // k.shape[1]
        k_task, v_task = (x[key : key + keys].repeat_interleave(group, 1) for x in (k, v))
        o_task, lse_task = attention(q[row : row + rows], k_task, v_task, scores)
        o[row : row + rows], lse[row : row + rows] = o_task, lse_task
    o.backward(pools["do"]) if len(tasks) else None
    grads = {
        f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in zip("qkv", (q, k, v), strict=True)
    }
    return {"o": o.detach(), "lse": lse.detach(), **grads}


def compute_exact(pools: Tensors, tasks: TaskBatch, scores: ScoreOptions) -> Tensors:
    """Compute the results in float64."""
    return _by_task(_softmax, {name: x.double() for name, x in pools.items()}, tasks, scores)


def compute_plain(pools: Tensors, tasks: TaskBatch, scores: ScoreOptions) -> Tensors:
    """Compute each task with torch in the dtype of the pools.

    This is scaled_dot_product_attention with a mask, which gives no lse. With a softcap, it is
    separate operations, as in models without a kernel.
    """
    return _by_task(_plain_sdpa if scores.softcap is None else _softmax, pools, tasks, scores)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the expected norm. The latter counts as at least 0.1
    per element, because some gradients are 0.
    """
    return (found.double() - expected).norm().item() / max(
        expected.norm().item(), 0.1 * expected.numel() ** 0.5, 1e-300
    )


def check_close(found: Tensors, expected: Tensors, bound: float = 1e-10) -> None:
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        assert relative_error(value, expected[name]) <= bound, name


def check_exact(
    kernel: Kernel, pools: Tensors, tasks: TaskBatch, scores: ScoreOptions, bound: float = 1e-10
) -> Tensors:
    """Run a kernel, assert that its results are exact, and return them."""
    found = run_kernel(kernel, pools, tasks, scores)
    check_close(found, compute_exact(pools, tasks, scores), bound)
    return found


def make_untouched_masks(case: PooledTasks) -> tuple[torch.Tensor, torch.Tensor]:
    """Make masks of the rows and the keys that no task reaches."""
    rows, keys = torch.ones(case.rows, dtype=torch.bool), torch.ones(case.keys, dtype=torch.bool)
    for row, row_count, key, key_count in list_runs(case.tasks):
        rows[row : row + row_count] = False
        keys[key : key + key_count] = False
    return rows, keys
