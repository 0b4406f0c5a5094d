"""Gradients of all stages together: their norm, and those of a weight of which two stages have a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hf_distca.pipeline.split import Stage, stage_model
from hf_distca.pipeline.step import Mail
from hf_distca.runtime.group import AttentionGroup

__all__ = ["clip_grad_norm_", "tied_gradients"]


@torch.no_grad()
def clip_grad_norm_(stage: Stage, max_norm: float) -> torch.Tensor:
    """Scale the gradients of all stages so that their norm together is at most `max_norm`.

    It does for all stages what `torch.nn.utils.clip_grad_norm_` does for a model in one process.

    All ranks must call it, after `Schedule.step` and before the optimizer's. A tied weight, of which two stages have a copy,
    counts once. Gradients may be sharded (FSDP2, tensor parallelism).

    Args:
        stage: of this rank.
        max_norm: the largest norm.

    Returns:
        The norm before scaling, of all gradients of one copy of the model: a float32 or float64 scalar, equal on all ranks.
    """
    weights = [weight for weight in stage.submod.parameters() if weight.grad is not None]
    repeated = None if stage.is_first else stage_model(stage).tied_weight
    by_mesh: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for weight in weights:
        if weight is not repeated and weight.grad is not None:
            by_mesh.setdefault(weight.grad.device_mesh if isinstance(weight.grad, DTensor) else None, []).append(weight.grad)
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
def tied_gradients(stage: Stage, group: AttentionGroup, name: str) -> Iterator[None]:
    """Give both copies of a tied weight the sum of the gradients that they get inside; before, they have the same ones.

    Args:
        stage: of this rank.
        group: the ranks of all stages, which hear of errors.
        name: of the step, for errors.
    """
    weight = stage_model(stage).tied_weight
    if weight is None:
        yield
        return
    before = _take_gradient(weight)
    yield
    gradient = _take_gradient(weight)
    if gradient is None:
        weight.grad = before
        return
    with group.reporting(doing := f"adding the gradients of the tied embedding in {name}"):
        mail, other = _traded(gradient, 0 if stage.is_last else stage.num_stages - 1, stage.group)
        mail.wait(group, doing)
    _local(gradient).add_(other)
    weight.grad = gradient if before is None else gradient.add_(before)


def _take_gradient(weight: torch.nn.Parameter) -> torch.Tensor | None:
    gradient, weight.grad = weight.grad, None
    return gradient


def _traded(gradient: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> tuple[Mail, torch.Tensor]:
    """Messages that exchange the gradient with that of another stage's copy, and the tensor in which the latter arrives."""
    local = _local(gradient)
    arriving = torch.empty_like(local)
    ops = [
        dist.P2POp(dist.isend, local, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=peer),
    ]
    return Mail(ops), arriving


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
