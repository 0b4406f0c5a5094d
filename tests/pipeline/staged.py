"""A tiny model of any family in stages, on the ranks of a pool, and the same model in one
process.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny import class_of, tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, split
from hf_distca.schedule.cost import AttentionShape, CostModel

# With real costs nothing this small is worth moving: here only causal pairs count, and moving is
# free.
PAIRS = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))


class Case(NamedTuple):
    """What is trained, and how.

    `layers` is how many layers the model has, None for as many as its family has kinds of them at
    least.
    """

    family: str = "llama"
    stages: int = 2
    copies: int = 1
    micro_batches: int = 4
    tokens: int = 96
    dtype: torch.dtype = torch.float64
    layers: int | None = 4
    checkpointing: bool | None = None  # whether reentrant, None for none
    per_stage: tuple[int, ...] | None = None
    steps: int = 1
    tied: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def lengths(self) -> list[list[int]]:
        """Of the documents of each micro-batch of all copies: one over all of it, many of one
        token, and what lies between.
        """
        chance, found = random.Random(self.micro_batches), []
        for number in range(self.micro_batches * self.copies):
            left, lengths = self.tokens, []
            while left:
                most = (
                    left
                    if number % 3 == 0
                    else max(1, self.tokens // (4 if number % 3 == 1 else 16))
                )
                lengths.append(min(left, most if number % 3 == 0 else chance.randint(1, most)))
                left -= lengths[-1]
            found.append(lengths)
        return found


def model_for(case: Case, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(case.family)
    if case.layers is not None and not getattr(config, "layer_types", None):
        config.num_hidden_layers = case.layers
    if case.tied:
        config.tie_word_embeddings = True
    config._attn_implementation = implementation
    model_class = class_of(case.family)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "eager"  # the grouped products know no float64
    model = model_class(config).to(case.dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            )
    return model


def batch(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, position ids and targets of a micro-batch, (1, tokens) each."""
    ids = torch.randint(40, 90, (1, case.tokens), generator=torch.Generator().manual_seed(number))
    positions = torch.cat([torch.arange(length) for length in case.lengths[number]])[None]
    last = torch.cat([positions[:, 1:], torch.zeros(1, 1, dtype=torch.long)], 1) == 0
    return ids, positions, torch.where(last, -100, torch.cat([ids[:, 1:], ids[:, :1]], 1))


def stacked(
    case: Case, copy: int = 0, *, count: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, position ids and targets of the micro-batches of a copy of the model,
    (micro-batches, tokens) each.
    """
    numbers = range(
        copy * case.micro_batches, copy * case.micro_batches + (count or case.micro_batches)
    )
    ids, positions, targets = (
        torch.cat(tensors)
        for tensors in zip(*(batch(case, number) for number in numbers), strict=True)
    )
    return ids, positions, targets


def loss_for(case: Case) -> Any:
    """Of a micro-batch: the sum over its targets, over all targets of the step."""
    total = sum(
        int((batch(case, number)[2] >= 0).sum())
        for number in range(case.micro_batches * case.copies)
    )

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (
            cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
            / total
        )

    return loss


def in_one_process(case: Case, implementation: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step, each document alone."""
    model, loss = model_for(case, implementation), loss_for(case)
    total = 0.0
    for number, lengths in enumerate(case.lengths):
        ids, _, targets = batch(case, number)
        parts = [model(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)]
        found = loss(torch.cat(parts, 1), targets)
        found.backward()
        total += found.item()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:  # of which the last stage has a copy
        name = next(name for name, module in model.named_modules() if module is head)
        gradients[f"{name}.weight"] = head.weight.grad
    return total, gradients


class Found(NamedTuple):
    """What a rank found. Gradients are of all copies."""

    stage: int
    loss: float
    gradients: dict[str, torch.Tensor]
    calls: int
    recomputed_calls: int
    kernel_calls: int
    served: int
    sent_bytes: int
    dispatches: int
    returns: int


def configure(case: Case) -> None:
    settings = {
        "tile": 8,
        "min_gain": 0.0,
        "cost_model": PAIRS,
        "timeout_seconds": 20.0,
        **dict(case.settings),
    }
    hf_distca.configure(hf_distca.DistCAConfig(**settings))


def in_stages(rank: int, case: Case) -> Found:
    """A step on one rank of a pool."""
    configure(case)
    mesh = init_device_mesh(
        "cpu", (case.copies, case.stages), mesh_dim_names=("dp_replicate", "pp")
    )
    model = model_for(case, "distca")
    if case.checkpointing is not None:
        model._set_gradient_checkpointing(
            enable=True, gradient_checkpointing_func=checkpoint(case.checkpointing)
        )
    stage = split(model, mesh["pp"], layers=case.per_stage)
    schedule = Schedule(stage, case.micro_batches, loss_for(case), scale_grads=False)
    copy, losses = mesh.get_local_rank("dp_replicate"), list[torch.Tensor]()
    ids, positions, targets = stacked(case, copy)
    meter = current_session().meter
    for _ in range(case.steps):
        stage.submod.zero_grad()
        schedule.step(ids, position_ids=positions, target=targets, losses=losses)
    gradients = {
        name: weight.grad
        for name, weight in stage.submod.model.named_parameters()
        if weight.grad is not None
    }
    for gradient in gradients.values():
        if case.copies > 1:
            dist.all_reduce(gradient, group=mesh["dp_replicate"].get_group())
    loss = torch.tensor(sum(one.item() for one in losses), dtype=torch.float64)
    dist.all_reduce(loss)
    idle = [one for one in schedule.figures if one.tick.micro_batches[stage.stage_index] is None]
    served = sum(one.attention_seconds > 0 for one in idle)
    counts = (
        meter.calls,
        meter.recomputed_calls,
        meter.kernel_calls,
        served,
        meter.sent_bytes,
        meter.dispatches,
        meter.returns,
    )
    return Found(stage.stage_index, loss.item(), gradients, *counts)


def checkpoint(reentrant: bool) -> Any:
    from functools import partial

    from torch.utils.checkpoint import checkpoint as run

    return partial(run, use_reentrant=reentrant)


def check_equal(
    found: list[Found], loss: float, gradients: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Every rank has the gradients of one process, and together they have all."""
    for one in found:
        assert abs(one.loss - loss) <= tolerance * abs(loss)
        for name, gradient in one.gradients.items():
            wanted = gradients[name]
            assert (gradient - wanted).norm() <= tolerance * wanted.norm() + tolerance * 1e-3, name
    assert {name for one in found for name in one.gradients} == set(gradients)
