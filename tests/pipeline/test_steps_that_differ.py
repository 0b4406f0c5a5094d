"""Steps of other shapes, evaluations and other schedules between the steps of a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from staged import (
    Case,
    check_near,
    configure,
    gradients_of,
    in_one_process,
    loss_for,
    model_for,
    prepare,
    schedule_of,
    stacked,
    stage_of,
    with_tied_head,
)

from hf_distca.pipeline import Schedule
from ranks import RankPool

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
    return with_tied_head(model, gradients_of(model))


def accumulated(rank: int, case: Case, sharded: bool, evaluated: str) -> dict[str, torch.Tensor]:
    """Gradients of steps that differ in shape, with evaluations in between, by a schedule of their
    own or not.
    """
    configure(case)
    stage, _, held = stage_of(case, "fsdp" if sharded else "none")
    schedule = schedule_of(stage, case)
    other = Schedule(stage, 1)
    for number, tokens in enumerate(TOKENS):
        ids, positions, targets = (tensor[:, :tokens] for tensor in stacked(case))
        with torch.no_grad():
            if number and evaluated == "another schedule":
                other.step(ids[:1], position_ids=positions[:1])
            elif number:
                schedule.eval(ids, position_ids=positions, target=targets)
        schedule.step(ids, position_ids=positions, target=targets)
    return gradients_of(held)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", ["the schedule", "another schedule"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_gradients_outlast_other_shapes_and_evaluations(
    rank_pool: Callable[[int], RankPool], sharded: bool, evaluated: str
) -> None:
    case = Case(tied=True)
    wanted = gradients_in_one_process(case)
    for own in rank_pool(2)(accumulated, case, sharded, evaluated):
        check_near(own, wanted)


def messages(rank: int, case: Case) -> list[list[str]]:
    """What was begun in the group of the stages in each of two steps: collectives, and messages
    between some.
    """
    stage, _, step = prepare(case)
    reduce, trade, found = dist.all_reduce, dist.batch_isend_irecv, list[list[str]]()

    def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is stage.mesh.get_group():
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
            step()
    return found


@pytest.mark.slow
def test_all_stages_take_part_in_the_first_message(rank_pool: Callable[[int], RankPool]) -> None:
    for first, second in rank_pool(3)(messages, Case(stages=3, layers=3, micro_batches=2)):
        assert first == ["all", *second]
        assert set(second) == {"some"}


def moved(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """Gradients of a stage that was split on one device and then moved to another."""
    model = model_for(case, "distca")
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stage, held, step = prepare(case, model=model_for(case, "distca").to("meta"))
    assert stage.device.type == "meta"
    stage.submod.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*held.named_parameters(), *held.named_buffers()):
            tensor.copy_(values[name])
    step()
    return gradients_of(held)


def test_a_stage_is_where_its_weights_are(rank_pool: Callable[[int], RankPool]) -> None:
    case = Case(layers=2, micro_batches=2)
    _, gradients = in_one_process(case, "sdpa")
    for own in rank_pool(2)(moved, case):
        check_near(own, gradients)
