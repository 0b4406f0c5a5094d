"""TFLOP/s of whole documents, of rebatched CA-tasks beside whole documents of as many pairs, and of
slices of every length.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

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
) -> None:
    """Put some servers of each plan beside whole documents, which have as many keys as a task,
    weighed by pairs, has on average.
    """
    cost = CostModel.make_analytic(shape, device_type=setting.device.type)
    for way, plan in plans(layout, cost):
        time_servers(setting, variant, label, shape, f"{name}, {way}", plan)


def time_servers(
    setting: Setting, variant: Variant, label: str, shape: AttentionShape, name: str, plan: Plan
) -> None:
    batches = [server_batches(plan, rank, setting.device) for rank in range(plan.layout.world_size)]
    keys = mean_keys([batch for rank in batches for batch in rank])
    for rank in servers_to_time(batches, setting.size(quick=1, cpu=2, gpu=3)):
        pairs = sum(batch.pairs for batch in batches[rank])
        length = min(keys, int(math.sqrt(2 * pairs)))
        flops = 12 * pairs * shape.pair_flops * (1 + BACKWARD_FLOPS)
        doing = f"{variant.label}, {label}, {name}, rank {rank}"
        if not setting.time_for(doing, cpu=flops / 4e10, gpu=flops / 3e14):
            continue
        ours = rates(setting, variant, shape, batches[rank])
        theirs = rates(setting, variant, shape, [whole_documents(pairs, length)])
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


def whole(setting: Setting, variant: Variant, label: str, shape: AttentionShape) -> None:
    """Put rates of documents by length, at least 16K tokens of them in a call."""
    for length in setting.size(quick=(128,), cpu=(2048,), gpu=(2048, 8192, 32768, 65536)):
        if setting.time_for(f"{variant.label}, documents of {length}", cpu=5.0, gpu=2.0):
            least = setting.size(quick=256, cpu=4096, gpu=16384)
            batch = batch_of([(length, length)] * max(1, least // length))
            row = {"kernel": variant.label, "model": label, "length": length}
            setting.add("whole", row | rates(setting, variant, shape, [batch]))


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
        if not setting.time_for(f"{variant.label}, {label}, slices of {n}", cpu=20.0, gpu=4.0):
            break
        if n <= rows:
            found = rates(setting, variant, shape, [batch_of([(n, n + context)] * (rows // n))])
            many.append({"rows": n, "context": context, "tasks": rows // n, **found})
        keys = max(long, n)
        found = rates(setting, variant, shape, [batch_of([(n, keys)])])
        alone.append({"rows": n, "keys": keys, **found})
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


def run(setting: Setting) -> None:
    """Put rates of documents, then rebatched tasks beside documents, and curves."""
    others = setting.size(quick=[skewed(1024)], cpu=[made_up(4, 8192)], gpu=[made_up(8, 65536)])
    label, shape = next(iter(shapes(setting).items()))
    known = list(placements(setting, PLACEMENTS if setting.device.type == "cuda" else (), others))
    chosen = list(variants(setting, (FLASH_ATTN_4, CUDA)))
    for variant in chosen:
        whole(setting, variant, label, shape)
    for (name, layout), variant in itertools.product(known, chosen):
        rebatched(setting, variant, label, shape, name, layout)
    for variant in chosen:
        setting.add("curves", curve(setting, variant, label, shape))
