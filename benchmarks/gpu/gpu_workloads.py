"""The measured cases: attention shapes, placements of documents, the batches that servers run for
them, and kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import attention

from gpu_setting import Setting
from hf_distca.config import DistCAConfig
from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, TaskBatch, select_kernel
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.flash import CUDA, FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, count_causal_pairs
from hf_distca.schedule.deal import deal
from hf_distca.schedule.gpus import make_gpu_cost
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan

# Backward's floating-point operations relative to forward (FlashAttention-2, arXiv 2307.08691,
# section 4.1).
BACKWARD_FLOPS = 2.5


LLAMA = {
    "Llama-8B": AttentionShape(32, 8, 128, 128, 2),
    "Llama-34B": AttentionShape(64, 8, 128, 128, 2),
}


def list_shapes(setting: Setting) -> dict[str, AttentionShape]:
    """Return the attention shape of one layer by model; on a CPU that of one small model."""
    if setting.device.type != "cuda":
        return {"4/2 heads of 64": AttentionShape(4, 2, 64, 64, 4)}
    return LLAMA


Placement = tuple[str, Layout]


def place_skewed(tokens: int) -> Placement:
    """Place one document on one rank and eight on another, with equally many tokens."""
    return f"1 of {tokens}, 8 of {tokens // 8}", Layout.from_lengths([[tokens], [tokens // 8] * 8])


def make_placement(ranks: int, tokens: int) -> Placement:
    """Make documents of long-tailed lengths, cut where a rank has `tokens` tokens, so that no
    document is on two ranks.
    """
    draw = random.Random(0)
    lengths: list[list[int]] = []
    for _ in range(ranks):
        row: list[int] = []
        while sum(row) < tokens:
            row.append(
                min(
                    max(16, int(draw.lognormvariate(math.log(tokens / 16), 1.6))), tokens - sum(row)
                )
            )
        lengths.append(row)
    return f"made up, {ranks} ranks of {tokens}", Layout.from_lengths(lengths)


def iterate_placements(
    setting: Setting, names: Sequence[str], others: Sequence[Placement]
) -> Iterator[Placement]:
    """Yield the named placements that exist in the folder, then the others."""
    for name in names:
        if (
            setting.placements is not None
            and (path := setting.placements / f"{name}.json").exists()
        ):
            yield name, read_placement(path)
    yield from others


def iterate_plans(layout: Layout, cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Yield the plans of a placement: for its documents as given, and for dealt ones."""
    config = DistCAConfig()
    yield "as given", balance(layout, cost, config)
    documents, place = np.unique(layout.document, return_inverse=True)
    lengths = np.bincount(place, weights=layout.length, minlength=len(documents)).astype(np.int64)
    dealt = deal(lengths, layout.world_size, layout.query_tokens.tolist(), cost)
    yield "dealt", balance(dealt, cost, config)


class Batch(NamedTuple):
    """The tasks of one kernel call, and the rows of its pools, for one of `groups` head groups."""

    tasks: TaskBatch
    rows: int
    keys: int
    groups: int = 1

    @property
    def pairs(self) -> float:
        return (
            float(count_causal_pairs(self.tasks.query_length, self.tasks.key_length).sum())
            / self.groups
        )


def make_batch(sizes: Sequence[tuple[int, int]]) -> Batch:
    """Make successive tasks of (query rows, keys) with separate pools."""
    rows, keys = (list(column) for column in zip(*sizes, strict=True))
    starts = [[sum(column[:i]) for i in range(len(column))] for column in (rows, keys)]
    return Batch(
        TaskBatch(tuple(starts[0]), tuple(rows), tuple(starts[1]), tuple(keys)),
        sum(rows),
        sum(keys),
    )


def list_server_batches(plan: Plan, rank: int, device: torch.device) -> list[Batch]:
    """List the batches of a rank's server in one layer: its own tasks, then arriving ones."""
    route, layout = Route.build(plan, rank), plan.layout
    tokens = int(layout.query_tokens[rank] + layout.context_tokens[rank])
    batches = [Batch(route.local_tasks, int(layout.query_tokens[rank]), tokens)]
    for pooled in (*([] if route.local_pooled is None else [route.local_pooled]), route.pooled):
        rows = pooled.own_rows + sum(pooled.queries.receive.values())
        batches.append(Batch(pooled.tasks, rows, pooled.key_pool.rows, route.groups))
    return [batch for batch in batches if len(batch.tasks)]


class Calls:
    """Forward and backward of batches on random pools, made once for the largest batch."""

    def __init__(self, shape: AttentionShape, setting: Setting, batches: Sequence[Batch]) -> None:
        rows, keys = (
            max(-(-getattr(batch, side) // batch.groups) for batch in batches)
            for side in ("rows", "keys")
        )
        heads = (shape.query_heads, shape.key_value_heads)
        made = {"dtype": setting.dtype, "device": setting.device}
        self.q_THD, self.do_THV = (
            torch.randn(rows, heads[0], shape.head_dim, **made) for _ in range(2)
        )
        self.k_TKD, self.v_TKV = (
            torch.randn(keys, heads[1], shape.head_dim, **made) for _ in range(2)
        )
        self.scores = ScoreOptions(shape.head_dim**-0.5)

    def pools(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_THD = self._of(self.q_THD, batch.rows, batch)
        return (
            q_THD,
            self._of(self.k_TKD, batch.keys, batch),
            self._of(self.v_TKV, batch.keys, batch),
        )

    def gradient(self, batch: Batch) -> torch.Tensor:
        return self._of(self.do_THV, batch.rows, batch)

    def _of(self, tensor: torch.Tensor, rows: int, batch: Batch) -> torch.Tensor:
        heads, width = tensor.shape[1] // batch.groups, tensor.shape[2]
        return tensor.view(-1, heads, width)[:rows]

    def forward(self, kernel: Kernel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.forward(Operands(*self.pools(batch)), batch.tasks, self.scores)

    def backward(
        self, kernel: Kernel, batch: Batch, outputs: tuple[torch.Tensor, torch.Tensor]
    ) -> object:
        q_THD, k_TKD, v_TKV = self.pools(batch)
        saved = BackwardInputs(self.gradient(batch), q_THD, *outputs, k_TKD, v_TKV)
        return kernel.backward(saved, batch.tasks, self.scores)


class Variant(NamedTuple):
    """A kernel, and the implementation of torch's flash attention in which it runs; None for
    torch's default.
    """

    kernel: Kernel
    implementation: str | None = None

    @property
    def label(self) -> str:
        return (
            self.kernel.name
            if self.implementation is None
            else f"{self.kernel.name} as {self.implementation}"
        )

    @contextmanager
    def active(self) -> Iterator[Kernel]:
        """Activate this implementation of torch's flash attention inside the block."""
        if self.implementation is None:
            yield self.kernel
            return
        attention.activate_flash_attention_impl(self.implementation)
        try:
            yield self.kernel
        finally:
            attention.restore_flash_attention_impl()


def find_fastest(setting: Setting) -> Variant:
    """Return the kernel that `kernel="auto"` selects here, in torch's default implementation."""
    return Variant(
        select_kernel(
            "auto", KernelRequest(setting.device, setting.dtype, 128, 128, ScoreOptions(1.0))
        )
    )


def iterate_variants(setting: Setting, only: Sequence[Kernel] | None = None) -> Iterator[Variant]:
    """Yield every fast kernel that runs on the device, or those of `only`; record why the others do
    not run.

    Other implementations of torch's flash attention come last, so that none is active while torch's
    default is timed.
    """
    if setting.device.type != "cuda":
        yield Variant(CpuKernel())
        return
    refused: dict[str, str] = {}
    kernels = only or (CUDA, EFFICIENT, FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4)
    others = () if only else (Variant(CUDA, "FA3"), Variant(CUDA, "FA4"))
    for variant in (*map(Variant, kernels), *others):
        reason = variant.kernel.unsupported_reason(
            KernelRequest(setting.device, setting.dtype, 128, 128, ScoreOptions(1.0))
        )
        if reason is not None:
            refused[variant.label] = reason
            continue
        try:
            with variant.active() as kernel:
                calls = Calls(
                    AttentionShape(2, 1, 128, 128, 2),
                    setting,
                    [batch := make_batch([(128, 256), (128, 128)])],
                )
                calls.backward(kernel, batch, calls.forward(kernel, batch))
                torch.cuda.synchronize()
        except Exception as error:  # missing or unsuitable packages raise anything
            refused[variant.label] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            yield variant
    setting.put(not_run=refused)


def make_cost_model(setting: Setting, shape: AttentionShape, kernel: Kernel) -> CostModel:
    """Make the cost model with which training would start."""
    type_ = setting.device.type
    return make_gpu_cost(
        shape, torch.cuda.get_device_name() if type_ == "cuda" else type_, kernel.name
    )
