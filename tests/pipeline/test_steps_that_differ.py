"""Steps of other shapes, evaluations and other schedules between the steps of a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from staged import Case, configure, in_one_process, loss_for, model_for, stacked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_distca.pipeline import Schedule, Stage, split
from ranks import RankPool

EXACT = 1e-9
TOKENS = (96, 96, 48, 96)  # of the micro-batches of each step


def gradients_in_one_process(case: Case) -> dict[str, torch.Tensor]:
    """Of all steps together, each document alone."""
    model, loss = model_for(case, "sdpa"), loss_for(case)
    for tokens in TOKENS:
        for ids, positions, targets in zip(
            *(tensor[:, :tokens].split(1) for tensor in stacked(case)), strict=True
        ):
            lengths = (
                (positions[0] == 0).nonzero()[:, 0].diff(append=torch.tensor([tokens])).tolist()
            )
            logits = [model(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)]
            loss(torch.cat(logits, 1), targets).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def stage_of(case: Case, *, sharded: bool) -> Stage:
    mesh = init_device_mesh("cpu", (1, case.stages), mesh_dim_names=("dp_shard", "pp"))
    stage = split(model_for(case, "distca"), mesh["pp"])
    if sharded:
        for layer in stage.submod.model.model.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(stage.submod, mesh=mesh["dp_shard"])
    return stage


def gradients_of(stage: Stage) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in stage.submod.model.named_parameters():
        found[name] = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
    return found


def accumulated(rank: int, case: Case, sharded: bool, evaluated: str) -> dict[str, torch.Tensor]:
    """Gradients of steps that differ in shape, with evaluations in between, by a schedule of their
    own or not.
    """
    configure(case)
    stage = stage_of(case, sharded=sharded)
    schedule = Schedule(stage, case.micro_batches, loss_for(case), scale_grads=False)
    other = Schedule(stage, 1)
    for number, tokens in enumerate(TOKENS):
        ids, positions, targets = (tensor[:, :tokens] for tensor in stacked(case))
        with torch.no_grad():
            if number and evaluated == "another schedule":
                other.step(ids[:1], position_ids=positions[:1])
            elif number:
                schedule.eval(ids, position_ids=positions, target=targets)
        schedule.step(ids, position_ids=positions, target=targets)
    return gradients_of(stage)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", ["the schedule", "another schedule"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_gradients_outlast_other_shapes_and_evaluations(
    rank_pool: Callable[[int], RankPool], sharded: bool, evaluated: str
) -> None:
    case = Case(tied=True)
    wanted = gradients_in_one_process(case)
    wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    for own in rank_pool(2)(accumulated, case, sharded, evaluated):
        for name, gradient in own.items():
            assert (gradient - wanted[name]).norm() <= EXACT * wanted[name].norm(), name


def messages(rank: int, case: Case) -> list[list[str]]:
    """What was begun in the group of the stages in each of two steps: collectives, and messages
    between some.
    """
    configure(case)
    mesh = init_device_mesh("cpu", (1, case.stages), mesh_dim_names=("dp_replicate", "pp"))["pp"]
    stage = split(model_for(case, "distca"), mesh)
    schedule = Schedule(stage, case.micro_batches, loss_for(case), scale_grads=False)
    ids, positions, targets = stacked(case)
    reduce, trade, found = dist.all_reduce, dist.batch_isend_irecv, list[list[str]]()

    def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is mesh.get_group():
            found[-1].append("all")
        return reduce(tensor, *args, **kwargs)

    def trading(ops: list[dist.P2POp]) -> Any:
        found[-1].append("some")
        return trade(ops)

    with (
        patch.object(dist, "all_reduce", reducing),
        patch.object(dist, "batch_isend_irecv", trading),
    ):
        for _ in range(2):
            found.append([])
            schedule.step(ids, position_ids=positions, target=targets)
    return found


@pytest.mark.slow
def test_all_stages_take_part_in_the_first_message(rank_pool: Callable[[int], RankPool]) -> None:
    for first, second in rank_pool(3)(messages, Case(stages=3, layers=3, micro_batches=2)):
        assert first == ["all", *second]
        assert set(second) == {"some"}


def moved(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """Gradients of a stage that was split on one device and then moved to another."""
    configure(case)
    mesh = init_device_mesh("cpu", (case.stages,), mesh_dim_names=("pp",))
    model = model_for(case, "distca")
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stage = split(model_for(case, "distca").to("meta"), mesh)
    assert stage.device.type == "meta"
    stage.submod.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (
            *stage.submod.model.named_parameters(),
            *stage.submod.model.named_buffers(),
        ):
            tensor.copy_(values[name])
    schedule = Schedule(stage, case.micro_batches, loss_for(case), scale_grads=False)
    ids, positions, targets = stacked(case)
    schedule.step(ids, position_ids=positions, target=targets)
    return gradients_of(stage)


def test_a_stage_is_where_its_weights_are(rank_pool: Callable[[int], RankPool]) -> None:
    case = Case(layers=2, micro_batches=2)
    _, gradients = in_one_process(case, "sdpa")
    for own in rank_pool(2)(moved, case):
        for name, gradient in own.items():
            assert (gradient - gradients[name]).norm() <= EXACT * gradients[name].norm(), name
