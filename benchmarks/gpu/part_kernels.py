"""TFLOP/s of whole documents, of rebatched CA-tasks compared with whole documents of equally many
pairs, and of slices of every length.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from gpu_setting import Setting, free, time_call
from gpu_workloads import (
    BACKWARD_FLOPS,
    Batch,
    Calls,
    Variant,
    iterate_placements,
    iterate_plans,
    iterate_variants,
    list_server_batches,
    list_shapes,
    make_batch,
    make_placement,
    place_skewed,
)
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


def measure_rates(
    setting: Setting, variant: Variant, shape: AttentionShape, batches: list[Batch]
) -> dict[str, float]:
    """Compute the operations per second of several calls in sequence, forward and backward."""
    calls = Calls(shape, setting, batches)
    flops = shape.pair_flops * sum(batch.pairs for batch in batches)
    with variant.active() as kernel:
        outputs = [calls.forward(kernel, batch) for batch in batches]
        forward = sum(
            time_call(lambda b=batch: calls.forward(kernel, b), setting.device) for batch in batches
        )
        backward = sum(
            time_call(lambda b=batch, o=o: calls.backward(kernel, b, o), setting.device)
            for batch, o in zip(batches, outputs, strict=True)
        )
    return {"forward": flops / forward, "backward": BACKWARD_FLOPS * flops / backward}


def make_whole_documents(pairs: float, length: int) -> Batch:
    """Make documents of `length` tokens, and a last one, with `pairs` pairs in all."""
    count = int(pairs // (length * (length + 1) / 2))
    rest = int(math.sqrt(2 * max(pairs - count * length * (length + 1) / 2, 0.5)))
    return make_batch([(length, length)] * count + [(rest, rest)] * (rest > 0))


def compute_mean_keys(batches: list[Batch]) -> int:
    """Compute the mean keys per task, weighted by pairs."""
    keys = np.concatenate([batch.tasks.key_length for batch in batches])
    pairs = count_causal_pairs(
        np.concatenate([batch.tasks.query_length for batch in batches]), keys
    )
    return int((keys * pairs).sum() / pairs.sum())


def select_servers(batches: list[list[Batch]], most: int) -> list[int]:
    """Select the servers with the most and the fewest tasks, and some between."""
    order = sorted(
        range(len(batches)), key=lambda rank: sum(len(batch.tasks) for batch in batches[rank])
    )
    places = {round(i * (len(order) - 1) / max(most - 1, 1)) for i in range(most)}
    return [order[place] for place in sorted(places)]


def measure_rebatched(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, layout: Layout
) -> None:
    """Record the rates of some servers of each plan, next to those of whole documents whose length
    is the pair-weighted mean keys of a task.
    """
    cost = CostModel.make_analytic(shape, device_type=setting.device.type)
    for way, plan in iterate_plans(layout, cost):
        time_servers(setting, variant, label, shape, f"{name}, {way}", plan)


def time_servers(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, plan: Plan
) -> None:
    batches = [
        list_server_batches(plan, rank, setting.device) for rank in range(plan.layout.world_size)
    ]
    keys = compute_mean_keys([batch for rank in batches for batch in rank])
    for rank in select_servers(batches, setting.size(quick=1, cpu=2, gpu=3)):
        pairs = sum(batch.pairs for batch in batches[rank])
        length = min(keys, int(math.sqrt(2 * pairs)))
        flops = 12 * pairs * shape.pair_flops * (1 + BACKWARD_FLOPS)
        doing = f"{variant.label}, {label}, {name}, rank {rank}"
        if not setting.has_time_for(doing, cpu=flops / 4e10, gpu=flops / 3e14):
            continue
        ours = measure_rates(setting, variant, shape, batches[rank])
        theirs = measure_rates(setting, variant, shape, [make_whole_documents(pairs, length)])
        row = {
            "kernel": variant.label,
            "model": label,
            "placement": name,
            "rank": rank,
            "tasks": [len(batch.tasks) for batch in batches[rank]],
            "pairs": pairs,
            "document_length": length,
            "rebatched": ours,
            "whole": theirs,
            "ratio": {direction: ours[direction] / theirs[direction] for direction in ours},
        }
        setting.add("rebatched", row)
        free(setting.device)


def measure_whole(setting: Setting, variant: Variant, label: str, shape: AttentionShape) -> None:
    """Record the rates of documents by length, with at least 16K tokens in a call."""
    for length in setting.size(quick=(128,), cpu=(2048,), gpu=(2048, 8192, 32768, 65536)):
        if setting.has_time_for(f"{variant.label}, documents of {length}", cpu=5.0, gpu=2.0):
            least = setting.size(quick=256, cpu=4096, gpu=16384)
            batch = make_batch([(length, length)] * max(1, least // length))
            row = {"kernel": variant.label, "model": label, "length": length}
            setting.add("whole", row | measure_rates(setting, variant, shape, [batch]))


def measure_curve(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape
) -> dict[str, Any]:
    """Measure rates by query rows of a slice: many slices with separate keys in one call, and one
    slice alone.
    """
    rows, context = setting.size(quick=(512, 256), cpu=(4096, 4096), gpu=(16384, 8192))
    long = setting.size(quick=512, cpu=8192, gpu=65536)
    longest = setting.size(quick=512, cpu=4096, gpu=65536)
    lengths = [2**i for i in range(6, 17) if 2**i <= longest]
    whole = measure_rates(setting, variant, shape, [make_batch([(long, long)])])
    many, alone = [], []
    for n in lengths:
        if not setting.has_time_for(f"{variant.label}, {label}, slices of {n}", cpu=20.0, gpu=4.0):
            break
        if n <= rows:
            found = measure_rates(
                setting, variant, shape, [make_batch([(n, n + context)] * (rows // n))]
            )
            many.append({"rows": n, "context": context, "tasks": rows // n, **found})
        keys = max(long, n)
        found = measure_rates(setting, variant, shape, [make_batch([(n, keys)])])
        alone.append({"rows": n, "keys": keys, **found})
        free(setting.device)
    return {
        "kernel": variant.label,
        "model": label,
        "whole": whole,
        "many": many,
        "alone": alone,
        "tile": find_smallest(many, whole),
    }


def find_smallest(many: list[dict[str, Any]], whole: dict[str, float]) -> dict[str, int | None]:
    """Find the shortest slice from which all longer ones reach the goal relative to a whole
    document, in each direction.
    """
    found: dict[str, int | None] = {}
    for direction, rate in whole.items():
        short = [row["rows"] for row in many if row[direction] < GOAL * rate]
        found[direction] = next(
            (row["rows"] for row in many if row["rows"] > max(short, default=0)), None
        )
    return found


def run(setting: Setting) -> None:
    """Record rates of documents, then of rebatched tasks and equal documents, then curves."""
    others = setting.size(
        quick=[place_skewed(1024)], cpu=[make_placement(4, 8192)], gpu=[make_placement(8, 65536)]
    )
    label, shape = next(iter(list_shapes(setting).items()))
    known = list(
        iterate_placements(setting, PLACEMENTS if setting.device.type == "cuda" else (), others)
    )
    chosen = list(iterate_variants(setting, (FLASH_ATTN_4, CUDA)))
    for variant in chosen:
        measure_whole(setting, variant, label, shape)
    for (name, layout), variant in itertools.product(known, chosen):
        measure_rebatched(setting, variant, label, shape, name, layout)
    for variant in chosen:
        setting.add("curves", measure_curve(setting, variant, label, shape))
