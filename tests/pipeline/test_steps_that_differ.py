"""Steps of other shapes, evaluations and other schedules between the steps of a stage."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from staged import (
    Case,
    add_tied_head,
    check_near,
    collect_gradients,
    configure,
    make_batches,
    make_loss,
    make_model,
    make_schedule,
    make_stage,
    prepare,
    run_in_one_process,
)

from hf_distca.pipeline import Schedule
from ranks import RankPools

TOKENS = (96, 96, 48, 96)  # of each micro-batch, by step


def sum_gradients(case: Case) -> dict[str, torch.Tensor]:
    """Sum the gradients of all steps, one document at a time."""
    model, loss = make_model(case, "sdpa"), make_loss(case)
    for tokens in TOKENS:
        for ids, positions, targets in zip(
            *(tensor[:, :tokens].split(1) for tensor in make_batches(case)), strict=True
        ):
            lengths = (
                (positions[0] == 0).nonzero()[:, 0].diff(append=torch.tensor([tokens])).tolist()
            )
            logits = [model(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)]
            loss(torch.cat(logits, 1), targets).backward()
    return add_tied_head(model, collect_gradients(model))


def accumulate(rank: int, case: Case, sharded: bool, evaluated: str) -> dict[str, torch.Tensor]:
    """Accumulate gradients of steps of different shapes, with evaluations between them."""
    configure(case)
    stage, _, held = make_stage(case, "fsdp" if sharded else "none")
    schedule = make_schedule(stage, case)
    other = Schedule(stage, 1)
    for number, tokens in enumerate(TOKENS):
        ids, positions, targets = (tensor[:, :tokens] for tensor in make_batches(case))
        with torch.no_grad():
            if number and evaluated == "another schedule":
                other.step(ids[:1], position_ids=positions[:1])
            elif number:
                schedule.eval(ids, position_ids=positions, target=targets)
        schedule.step(ids, position_ids=positions, target=targets)
    return collect_gradients(held)


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", ["the schedule", "another schedule"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp"])
def test_gradients_survive_other_shapes_and_evaluations(
    rank_pool: RankPools, sharded: bool, evaluated: str
) -> None:
    case = Case(tied=True)
    wanted = sum_gradients(case)
    for own in rank_pool(2)(accumulate, case, sharded, evaluated):
        check_near(own, wanted)


def list_messages(rank: int, case: Case) -> list[list[str]]:
    """List for two steps whether each message is between all stages or only some."""
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
def test_all_stages_take_part_in_the_first_message(rank_pool: RankPools) -> None:
    for first, second in rank_pool(3)(list_messages, Case(stages=3, layers=3, micro_batches=2)):
        assert first == ["all", *second]
        assert set(second) == {"some"}


def run_moved_stage(rank: int, case: Case) -> dict[str, torch.Tensor]:
    """Return the gradients of a stage that was split on one device and moved to another."""
    model = make_model(case, "distca")
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stage, held, step = prepare(case, model=make_model(case, "distca").to("meta"))
    assert stage.device.type == "meta"
    stage.submod.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*held.named_parameters(), *held.named_buffers()):
            tensor.copy_(values[name])
    step()
    return collect_gradients(held)


def test_a_stage_runs_on_the_device_of_its_weights(rank_pool: RankPools) -> None:
    case = Case(layers=2, micro_batches=2)
    _, gradients = run_in_one_process(case, "sdpa")
    for own in rank_pool(2)(run_moved_stage, case):
        check_near(own, gradients)
