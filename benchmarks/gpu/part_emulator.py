"""Measured imbalance before and after: kernel seconds of every rank of a plan, one rank after
another on one device.

The tasks of each rank go to an `AttentionServer` in the calls and pools of its route. Messages are
not emulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_setting import Setting, free, synchronize
from gpu_workloads import (
    Batch,
    Calls,
    find_fastest,
    iterate_placements,
    iterate_plans,
    list_server_batches,
    list_shapes,
    make_cost_model,
    make_placement,
    place_skewed,
)
from hf_distca.kernels import Kernel
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import compute_imbalance
from hf_distca.schedule.plan import Plan

# The first two take about 5 and 15 s on an H200 for Llama-8B, before and after; the others run if
# there is time.
PLACEMENTS = (
    "wlbllm_raw_r8_t128k_s0",
    "wlbllm_raw_r64_t64k_s0",
    "long_tail_8_ranks",
    "long_tail_64_ranks",
    "wlbllm_raw_r512_t64k_s0",
    "long_tail_512_ranks",
    "prolong_e8_lcr03_shuf_r64_t64k_s0",
    "prolong_e8_lcr03_shuf_r8_t128k_s0",
)


GOAL = 1.05  # largest measured slowest / mean


def time_rank(calls: Calls, kernel: Kernel, batches: list[Batch]) -> tuple[float, float]:
    """Return the kernel seconds of a server that runs these batches, forward and backward."""
    device = calls.q_THD.device
    outputs = []
    meters = Meter(), Meter()
    for meter in meters:
        server = AttentionServer(kernel, calls.scores, meter)
        for place, batch in enumerate(batches):
            q_THD, k_TKD, v_TKV = calls.pools(batch)
            if meter is meters[0]:
                outputs.append(server.run(Operands(q_THD, k_TKD, v_TKV), batch.tasks))
            else:
                server.run(
                    BackwardInputs(calls.gradient(batch), q_THD, *outputs[place], k_TKD, v_TKV),
                    batch.tasks,
                )
        synchronize(device)
    return meters[0].seconds, meters[1].seconds


def emulate(
    setting: Setting, kernel: Kernel, cost: CostModel, plan: Plan, repeats: int
) -> dict[str, Any]:
    """Measure and estimate the seconds of every rank under a plan. Figures are medians over rounds,
    each of which runs all ranks.
    """
    ranks = range(plan.layout.world_size)
    batches = [list_server_batches(plan, rank, setting.device) for rank in ranks]
    calls = Calls(cost.shape, setting, [batch for rank in batches for batch in rank])
    everything = sorted((batch for rank in batches for batch in rank), key=lambda b: -b.pairs)
    if setting.device.type == "cuda":  # the first call of a batch makes the kernel's index tensors
        for batch in everything:
            calls.forward(kernel, batch)
    # First calls compile for each number of heads, including backward.
    time_rank(calls, kernel, list({batch.groups: batch for batch in everything}.values()))
    rounds = [[time_rank(calls, kernel, batches[rank]) for rank in ranks] for _ in range(repeats)]
    free(setting.device)
    result: dict[str, Any] = {"calls": [len(rank) for rank in batches]}
    estimates = cost.estimate_directions(plan.end - plan.start, plan.end, plan.heads)
    taken = np.median(rounds, axis=0).T  # by direction and rank
    for place, direction in enumerate(("forward", "backward")):
        guess = np.bincount(plan.server, weights=estimates[place], minlength=len(ranks))
        result[direction] = describe(taken[place]) | {
            "estimated": guess.tolist(),
            "estimated_imbalance": compute_imbalance(guess),
        }
    result["both"] = describe(taken.sum(axis=0)) | {"total": float(taken.sum())}
    return result


def describe(seconds: np.ndarray) -> dict[str, Any]:
    slowest, uneven = float(seconds.max()), compute_imbalance(seconds)
    return {"seconds": seconds.tolist(), "imbalance": uneven, "slowest": slowest}


def measure_placement(
    setting: Setting,
    kernel: Kernel,
    cost: CostModel,
    name: str,
    layout: Layout,
    plan: Plan,
    before: dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Measure a plan and, once for each placement, its documents as given."""
    local = Plan.make_local(layout)
    repeats = setting.size(quick=1, cpu=3, gpu=1)
    work = (
        float(cost.estimate_seconds(local.end - local.start, local.end).sum()) * 2 * (repeats + 0.4)
    )
    if not setting.has_time_for(f"{name}, about {work:.0f} s", cpu=work, gpu=work):
        return None
    before = before or emulate(setting, kernel, cost, local, repeats)
    after = emulate(setting, kernel, cost, plan, repeats)
    moved = int(((plan.end - plan.start) * plan.heads)[plan.home != plan.server].sum())
    return {
        "placement": name,
        "ranks": layout.world_size,
        "tokens_a_rank": int(layout.query_tokens.max()),
        "query_tokens_moved": moved,
        "before": before,
        "after": after,
        "slowest_after_to_before": after["both"]["slowest"] / before["both"]["slowest"],
        "total_after_to_before": after["both"]["total"] / before["both"]["total"],
    }


def run(setting: Setting) -> None:
    """Record one row per placement and model."""
    torch.manual_seed(0)
    variant = find_fastest(setting)
    others = setting.size(
        quick=[place_skewed(2048)],
        cpu=[place_skewed(16384), make_placement(4, 16384)],
        gpu=[make_placement(8, 65536)],
    )
    known = list(
        iterate_placements(setting, PLACEMENTS if setting.device.type == "cuda" else (), others)
    )
    for label, shape in list_shapes(setting).items():
        cost = make_cost_model(setting, shape, variant.kernel)
        for name, layout in known:
            before = None
            for way, plan in iterate_plans(layout, cost):
                with variant.active() as kernel:
                    row = measure_placement(
                        setting, kernel, cost, f"{name}, {way}", layout, plan, before
                    )
                if row is not None:
                    before = row["before"]
                    about = {"model": label, "kernel": variant.label, "cost_model": cost.name}
                    setting.add("placements", {**about, "goal": GOAL, **row})
