"""What a layer without a model computes attention with."""

from __future__ import annotations

import torch

from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.plan import Plan

DIM = 16


def parts_of(
    plan: Plan,
    rank: int,
    scores: ScoreOptions,
    *,
    dtype: torch.dtype = torch.float64,
    kernel: Kernel | None = None,
    group: AttentionGroup | None = None,
) -> tuple[Route, AttentionGroup, AttentionServer]:
    """What each `LayerExchange` of a rank in a plan is made of: with the CPU's kernel for heads of
    `DIM`, and in the group of all ranks, unless others are given.
    """
    request = KernelRequest(torch.device("cpu"), dtype, DIM, DIM, scores)
    return (
        Route.build(plan, rank),
        group or AttentionGroup.find_or_create(timeout_seconds=60),
        AttentionServer(kernel or select_kernel("auto", request), scores, Meter()),
    )
