"""TFLOP/s of whole documents, of rebatched CA-tasks beside whole documents of as many pairs, and of
slices of every length.

Tasks of a call are also timed in other orders: longest first, shortest first. A GPU's blocks take
work in the order of the tasks, so the last ones decide how long it stays half empty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from gpu_setting import Setting, free, seconds_of
from gpu_workloads import (
    BACKWARD_FLOPS,
    Batch,
    Calls,
    Variant,
    batch_of,
    made_up,
    placements,
    plans,
    server_batches,
    shapes,
    skewed,
    variants,
)
from hf_distca.kernels import TaskBatch
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4
from hf_distca.schedule.cost import AttentionShape, CostModel, count_causal_pairs
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

PLACEMENTS = (
    "wlbllm_raw_r8_t128k_s0",
    "long_tail_8_ranks",
    "wlbllm_raw_r64_t64k_s0",
    "long_tail_64_ranks",
    "prolong_e8_lcr03_shuf_r64_t64k_s0",
    "wlbllm_raw_r512_t64k_s0",
    "long_tail_512_ranks",
)
GOAL = 0.95


def rates(
    setting: Setting, variant: Variant, shape: AttentionShape, batches: list[Batch]
) -> dict[str, float]:
    """Operations a second over several calls, one after another, forward and backward."""
    calls = Calls(shape, setting, batches)
    flops = shape.pair_flops * sum(batch.pairs for batch in batches)
    with variant.active() as kernel:
        outputs = [calls.forward(kernel, batch) for batch in batches]
        forward = sum(
            seconds_of(lambda b=batch: calls.forward(kernel, b), setting.device)
            for batch in batches
        )
        backward = sum(
            seconds_of(lambda b=batch, o=o: calls.backward(kernel, b, o), setting.device)
            for batch, o in zip(batches, outputs, strict=True)
        )
    return {"forward": flops / forward, "backward": BACKWARD_FLOPS * flops / backward}


def whole_documents(pairs: float, length: int) -> Batch:
    """Documents of this length, and a last one, of so many pairs together."""
    count = int(pairs // (length * (length + 1) / 2))
    rest = int(math.sqrt(2 * max(pairs - count * length * (length + 1) / 2, 0.5)))
    return batch_of([(length, length)] * count + [(rest, rest)] * (rest > 0))


def mean_keys(batches: list[Batch]) -> int:
    """Keys of a task, weighed by its pairs."""
    keys = np.concatenate([batch.tasks.key_length for batch in batches])
    pairs = count_causal_pairs(
        np.concatenate([batch.tasks.query_length for batch in batches]), keys
    )
    return int((keys * pairs).sum() / pairs.sum())


def servers_to_time(batches: list[list[Batch]], most: int) -> list[int]:
    """The servers with the most and with the fewest tasks, and some between."""
    order = sorted(
        range(len(batches)), key=lambda rank: sum(len(batch.tasks) for batch in batches[rank])
    )
    places = {round(i * (len(order) - 1) / max(most - 1, 1)) for i in range(most)}
    return [order[place] for place in sorted(places)]


def rebatched(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, layout: Layout
) -> list[Any]:
    """Some servers of each plan beside whole documents, which have as many keys as a task, weighed
    by pairs, has on average.
    """
    cost = CostModel.make_analytic(shape, device_type=setting.device.type)
    found = []
    for way, plan in plans(layout, cost):
        found += servers(setting, variant, label, shape, f"{name}, {way}", plan)
    return found


def servers(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, plan: Plan
) -> list[Any]:
    batches = [server_batches(plan, rank, setting.device) for rank in range(plan.layout.world_size)]
    keys = mean_keys([batch for rank in batches for batch in rank])
    found = []
    for rank in servers_to_time(batches, setting.size(quick=1, cpu=2, gpu=3)):
        pairs = sum(batch.pairs for batch in batches[rank])
        length = min(keys, int(math.sqrt(2 * pairs)))
        seconds = (
            12
            * pairs
            * shape.pair_flops
            * (1 + BACKWARD_FLOPS)
            / (3e14 if setting.device.type == "cuda" else 4e10)
        )
        if not setting.time_for(f"{variant.label}, {label}, {name}, rank {rank}", seconds):
            continue
        ours = rates(setting, variant, shape, batches[rank])
        theirs = rates(setting, variant, shape, [whole_documents(pairs, length)])
        tasks = [len(batch.tasks) for batch in batches[rank]]
        row = {
            "kernel": variant.label,
            "model": label,
            "placement": name,
            "rank": rank,
            "tasks": tasks,
            "pairs": pairs,
        }
        row |= {"document_length": length, "rebatched": ours, "whole": theirs}
        row["ratio"] = {direction: ours[direction] / theirs[direction] for direction in ours}
        found.append(row)
        free(setting.device)
    return found


def whole(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape
) -> list[dict[str, Any]]:
    """Rates of documents by length, at least 16K tokens of them in a call."""
    found = []
    for length in setting.size(quick=(128,), cpu=(2048,), gpu=(2048, 8192, 32768, 65536)):
        if setting.time_for(
            f"{variant.label}, documents of {length}", setting.size(quick=0.0, cpu=5.0, gpu=2.0)
        ):
            least = setting.size(quick=256, cpu=4096, gpu=16384)
            batch = batch_of([(length, length)] * max(1, least // length))
            found.append(
                {
                    "kernel": variant.label,
                    "model": label,
                    "length": length,
                    **rates(setting, variant, shape, [batch]),
                }
            )
    return found


ORDERS = {
    "as planned": lambda sizes: list(range(len(sizes))),
    "longest first": lambda sizes: sorted(range(len(sizes)), key=lambda i: -sizes[i]),
    "shortest first": lambda sizes: sorted(range(len(sizes)), key=lambda i: sizes[i]),
}


def ordered(batch: Batch, order: str) -> Batch:
    """The same tasks in another order; rows and keys stay where they are."""
    tasks = batch.tasks
    places = ORDERS[order](count_causal_pairs(tasks.query_length, tasks.key_length).tolist())
    columns = (tasks.query_start, tasks.query_length, tasks.key_start, tasks.key_length)
    return batch._replace(
        tasks=TaskBatch(*(tuple(int(column[i]) for i in places) for column in columns))
    )


def orders(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, layout: Layout
) -> list[Any]:
    """The server with the most tasks of each plan, its tasks in three orders."""
    cost = CostModel.make_analytic(shape, device_type=setting.device.type)
    found = []
    for way, plan in plans(layout, cost):
        if not setting.time_for(
            f"{variant.label}, orders, {name}", setting.size(quick=0.0, cpu=20.0, gpu=5.0)
        ):
            break
        servers = [
            server_batches(plan, rank, setting.device) for rank in range(plan.layout.world_size)
        ]
        most = max(servers, key=lambda batches: sum(len(batch.tasks) for batch in batches))
        row = {
            "kernel": variant.label,
            "model": label,
            "placement": f"{name}, {way}",
            "tasks": [len(b.tasks) for b in most],
        }
        found.append(
            {
                **row,
                "rates": {
                    order: rates(setting, variant, shape, [ordered(b, order) for b in most])
                    for order in ORDERS
                },
            }
        )
    return found


def curve(setting: Setting, variant: Variant, label: str, shape: AttentionShape) -> dict[str, Any]:
    """Rates by query rows of a slice: many slices in one call, each with keys of its own, and one
    slice alone.
    """
    rows, context = setting.size(quick=(512, 256), cpu=(4096, 4096), gpu=(16384, 8192))
    long = setting.size(quick=512, cpu=8192, gpu=65536)
    longest = setting.size(quick=512, cpu=4096, gpu=65536)
    lengths = [2**i for i in range(6, 17) if 2**i <= longest]
    whole = rates(setting, variant, shape, [batch_of([(long, long)])])
    many, alone = [], []
    for n in lengths:
        if not setting.time_for(
            f"{variant.label}, {label}, slices of {n}", setting.size(quick=0.0, cpu=20.0, gpu=4.0)
        ):
            break
        if n <= rows:
            found = rates(setting, variant, shape, [batch_of([(n, n + context)] * (rows // n))])
            many.append({"rows": n, "context": context, "tasks": rows // n, **found})
        alone.append(
            {
                "rows": n,
                "keys": max(long, n),
                **rates(setting, variant, shape, [batch_of([(n, max(long, n))])]),
            }
        )
        free(setting.device)
    return {
        "kernel": variant.label,
        "model": label,
        "whole": whole,
        "many": many,
        "alone": alone,
        "tile": smallest(many, whole),
    }


def smallest(many: list[dict[str, Any]], whole: dict[str, float]) -> dict[str, int | None]:
    """The shortest slice from which on all reach the goal beside a whole document, in each
    direction.
    """
    found: dict[str, int | None] = {}
    for direction, rate in whole.items():
        short = [row["rows"] for row in many if row[direction] < GOAL * rate]
        found[direction] = next(
            (row["rows"] for row in many if row["rows"] > max(short, default=0)), None
        )
    return found


def cudnn(setting: Setting, shape: AttentionShape) -> dict[str, Any]:
    """Rates of one whole document in cuDNN, which has no varlen call with grouped heads in torch: a
    mark to compare with.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length = setting.size(quick=256, cpu=1024, gpu=32768)
    heads = (shape.query_heads, shape.key_value_heads, shape.key_value_heads)
    leaves = [
        torch.randn(1, n, length, shape.head_dim, dtype=setting.dtype, device=setting.device)
        for n in heads
    ]
    q, k, v = (x.requires_grad_() for x in leaves)
    flops = shape.pair_flops * length * (length + 1) / 2
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=True, enable_gqa=True)
        gradient = torch.randn_like(out)
        with torch.no_grad():
            forward = seconds_of(
                lambda: attend(q, k, v, is_causal=True, enable_gqa=True), setting.device
            )
        backward = seconds_of(
            lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), setting.device
        )
    return {
        "length": length,
        "forward": flops / forward,
        "backward": BACKWARD_FLOPS * flops / backward,
    }


def run(setting: Setting) -> None:
    """Put rates of documents, then rebatched tasks beside documents, orders of tasks, and
    curves.
    """
    rows: dict[str, list[Any]] = {"whole": [], "rebatched": [], "orders": [], "curves": []}
    others = setting.size(quick=[skewed(1024)], cpu=[made_up(4, 8192)], gpu=[made_up(8, 65536)])
    label, shape = next(iter(shapes(setting).items()))
    known = list(placements(setting, PLACEMENTS if setting.device.type == "cuda" else (), others))
    chosen = list(variants(setting, (FLASH_ATTN_4, CUDA)))
    for variant in chosen:
        rows["whole"] += whole(setting, variant, label, shape)
        setting.put(**rows)
    for name, layout in known:
        for variant in chosen:
            rows["rebatched"] += rebatched(setting, variant, label, shape, name, layout)
            setting.put(**rows)
    for name, layout in known[: setting.size(quick=1, cpu=1, gpu=2)]:
        for variant in chosen:
            rows["orders"] += orders(setting, variant, label, shape, name, layout)
            setting.put(**rows)
    for variant in chosen:
        rows["curves"].append(curve(setting, variant, label, shape))
        setting.put(**rows)
    if setting.device.type == "cuda" and setting.time_for("cudnn", 3):
        try:
            setting.put(cudnn={label: cudnn(setting, shape)})
        except RuntimeError as error:
            setting.put(cudnn=f"{type(error).__name__}: {str(error)[:300]}")
