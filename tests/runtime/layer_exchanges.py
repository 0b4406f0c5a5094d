"""Parts of `LayerExchange` for tests of layers without a model."""

from __future__ import annotations

import torch

from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.plan import Plan

DIM = 16


def make_parts(
    plan: Plan,
    rank: int,
    scores: ScoreOptions,
    *,
    dtype: torch.dtype = torch.float64,
    kernel: Kernel | None = None,
    group: AttentionGroup | None = None,
) -> tuple[Route, AttentionGroup, AttentionServer]:
    """Make the route, the group and the server of a rank's `LayerExchange`. By default, the kernel
    is the CPU's for heads of `DIM`, and the group holds all ranks.
    """
    request = KernelRequest(torch.device("cpu"), dtype, DIM, DIM, scores)
    return (
        Route.build(plan, rank),
        group or AttentionGroup.find_or_create(timeout_seconds=60),
        AttentionServer(kernel or select_kernel("auto", request), scores, Meter()),
    )
