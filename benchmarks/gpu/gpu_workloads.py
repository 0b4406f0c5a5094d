"""What is measured: attention shapes, placements of documents, the batches that servers run for
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

# Backward in forward's floating-point operations (FlashAttention-2, arXiv 2307.08691, section 4.1).
BACKWARD_FLOPS = 2.5


LLAMA = {
    "Llama-8B": AttentionShape(32, 8, 128, 128, 2),
    "Llama-34B": AttentionShape(64, 8, 128, 128, 2),
}


def shapes(setting: Setting) -> dict[str, AttentionShape]:
    """Attention of one layer, by model; on a CPU of one small model."""
    if setting.device.type != "cuda":
        return {"4/2 heads of 64": AttentionShape(4, 2, 64, 64, 4)}
    return LLAMA


Placement = tuple[str, Layout]


def skewed(tokens: int) -> Placement:
    """One document on one rank, eight on another, as many tokens."""
    return f"1 of {tokens}, 8 of {tokens // 8}", Layout.from_lengths([[tokens], [tokens // 8] * 8])


def made_up(ranks: int, tokens: int) -> Placement:
    """Documents of long-tailed lengths, cut where a rank has `tokens` of them: no document is on
    two ranks.
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


def placements(
    setting: Setting, names: Sequence[str], others: Sequence[Placement]
) -> Iterator[Placement]:
    """The named placements that the folder has, then the others."""
    for name in names:
        if (
            setting.placements is not None
            and (path := setting.placements / f"{name}.json").exists()
        ):
            yield name, read_placement(path)
    yield from others


def plans(layout: Layout, cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Plans of a placement: of its documents where they lie, and of the same documents dealt to as
    many ranks.
    """
    config = DistCAConfig()
    yield "as given", balance(layout, cost, config)
    documents, place = np.unique(layout.document, return_inverse=True)
    lengths = np.bincount(place, weights=layout.length, minlength=len(documents)).astype(np.int64)
    dealt = deal(lengths, layout.world_size, layout.query_tokens.tolist(), cost)
    yield "dealt", balance(dealt, cost, config)


class Batch(NamedTuple):
    """Tasks that one kernel call runs, and the sizes of their pools, whose rows are of one of so
    many head groups.
    """

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


def batch_of(sizes: Sequence[tuple[int, int]]) -> Batch:
    """Tasks of (query rows, keys) with pools of their own, one after another."""
    rows, keys = (list(column) for column in zip(*sizes, strict=True))
    starts = [[sum(column[:i]) for i in range(len(column))] for column in (rows, keys)]
    return Batch(
        TaskBatch(tuple(starts[0]), tuple(rows), tuple(starts[1]), tuple(keys)),
        sum(rows),
        sum(keys),
    )


def server_batches(plan: Plan, rank: int, device: torch.device) -> list[Batch]:
    """What the attention server of a rank runs in one layer: its own tasks, then those that
    arrive.
    """
    route, layout = Route.build(plan, rank), plan.layout
    tokens = int(layout.query_tokens[rank] + layout.context_tokens[rank])
    batches = [Batch(route.local_tasks, int(layout.query_tokens[rank]), tokens)]
    for pooled in (*([] if route.local_pooled is None else [route.local_pooled]), route.pooled):
        rows = pooled.own_rows + sum(pooled.queries.receive.values())
        batches.append(Batch(pooled.tasks, rows, pooled.key_pool.rows, route.groups))
    return [batch for batch in batches if len(batch.tasks)]


class Calls:
    """Forward and backward of batches on pools of random numbers, which are made once for the
    largest of them.
    """

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
    """A kernel, and the implementation of torch's flash attention that it runs in; None for torch's
    own.
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
        """Inside, torch's flash attention is that implementation."""
        if self.implementation is None:
            yield self.kernel
            return
        attention.activate_flash_attention_impl(self.implementation)
        try:
            yield self.kernel
        finally:
            attention.restore_flash_attention_impl()


def fastest(setting: Setting) -> Variant:
    """The kernel that `kernel="auto"` takes there, in torch's own implementation."""
    return Variant(
        select_kernel(
            "auto", KernelRequest(setting.device, setting.dtype, 128, 128, ScoreOptions(1.0))
        )
    )


def variants(setting: Setting, only: Sequence[Kernel] | None = None) -> Iterator[Variant]:
    """Every fast kernel of the device that runs, or those of `only`; why the others do not is put
    among the figures.

    Other implementations of torch's flash attention are tried last, so that nothing of them is left
    when torch's own is timed.
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
                    [batch := batch_of([(128, 256), (128, 128)])],
                )
                calls.backward(kernel, batch, calls.forward(kernel, batch))
                torch.cuda.synchronize()
        except Exception as error:  # whatever packages raise that are not there or do not fit
            refused[variant.label] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            yield variant
    setting.put(not_run=refused)


def cost_model(setting: Setting, shape: AttentionShape, kernel: Kernel) -> CostModel:
    """The cost model that training would begin with."""
    type_ = setting.device.type
    return make_gpu_cost(
        shape, torch.cuda.get_device_name() if type_ == "cuda" else type_, kernel.name
    )
