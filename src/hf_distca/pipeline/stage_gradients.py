"""Gradients of all stages: clipped by their norm together, and summed over both copies of a tied
weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hf_distca.pipeline.stage_step import Messages
from hf_distca.pipeline.stages import Stage
from hf_distca.runtime.group import AttentionGroup

__all__ = ["clip_grad_norm_", "sum_tied_gradients"]


@torch.no_grad()
def clip_grad_norm_(stage: Stage, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that their norm together is at most `max_norm`.

    This is `torch.nn.utils.clip_grad_norm_` over all stages.

    All ranks must call it, after `Schedule.step` and before the optimizer's. A tied weight, of
    which two stages have a copy, counts once. Gradients may be sharded (FSDP2, tensor parallelism).

    Args:
        stage: stage of this rank.
        max_norm: the largest norm.

    Returns:
        The norm before scaling, of all gradients of one copy of the model: a float32 or float64
            scalar, equal on all ranks.
    """
    weights = [weight for weight in stage.submod.parameters() if weight.grad is not None]
    repeated = None if stage.is_first else stage.unwrapped.tied_weight
    by_mesh: dict[object, list[Any]] = defaultdict(list)
    for weight in weights:
        if weight is not repeated:
            by_mesh[getattr(weight.grad, "device_mesh", None)].append(weight.grad)
    squares = torch.zeros((), dtype=torch.float64, device=stage.device)
    for grads in by_mesh.values():
        norm = get_total_norm(grads)
        squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
    dist.all_reduce(squares, group=stage.group)
    in_float64 = any(weight.dtype == torch.float64 for weight in weights)
    total = squares.sqrt().to(torch.float64 if in_float64 else torch.float32)
    clip_grads_with_norm_(weights, max_norm, total)
    return total


@contextmanager
def sum_tied_gradients(
    stage: Stage, group: AttentionGroup, name: str, *, backward: bool
) -> Iterator[None]:
    """Sum the gradients that both copies of a tied weight get inside, and add the sum to both."""
    weight = stage.unwrapped.tied_weight if backward else None
    if weight is None or not weight.requires_grad:
        yield
        return
    before = weight.grad
    weight.grad = None
    yield
    gradient: Any = weight.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    arriving, peer = torch.empty_like(local), 0 if stage.is_last else stage.num_stages - 1
    with group.reporting(doing := f"adding the gradients of the tied embedding in {name}"):
        tensors = ((dist.isend, local), (dist.irecv, arriving))
        Messages(
            [dist.P2POp(way, tensor, group=stage.group, group_peer=peer) for way, tensor in tensors]
        ).wait(group, doing)
    local.add_(arriving)
    if before is not None:
        gradient.add_(before)
