"""Stages that disagree, raise or sleep end in errors that name stage, tick and micro-batch, on every rank and in time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from staged import Case, batch, configure, loss_for, model_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_distca
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.pipeline import Schedule, split
from ranks import RankPool

TIMEOUT = 4.0
SLACK = 4.0  # a busy machine, and the words of others
CASE = Case(micro_batches=3, layers=2, settings=(("timeout_seconds", TIMEOUT),))


def failing(rank: int, culprit: int, what: str) -> tuple[str, str, float]:
    """Name and text of the error of a rank, and after how many seconds."""
    configure(CASE)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stage = split(model_for(CASE, "distca"), mesh)
    schedule = Schedule(stage, CASE.micro_batches, loss_for(CASE), scale_grads=False)
    mine = [batch(CASE, number) for number in range(CASE.micro_batches)]
    ids, positions, targets = (torch.cat(each) for each in zip(*mine, strict=True))
    if rank == culprit and what == "disagrees":
        positions = torch.arange(CASE.tokens).expand(CASE.micro_batches, -1)
    if rank == culprit and what in ("raises", "sleeps"):
        calls = []

        def disturb(*_: Any) -> None:
            calls.append(None)
            if len(calls) == 3:  # the first is that of the stage alone
                if what == "raises":
                    raise ValueError("disturbed")
                time.sleep(TIMEOUT + 2)

        stage.submod.model.model.layers[rank].register_forward_pre_hook(disturb)
    started = time.monotonic()
    try:
        schedule.step(ids, position_ids=positions, target=targets)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


@pytest.mark.slow
def test_stages_with_different_documents(rank_pool: Callable[[int], RankPool]) -> None:
    for name, text, seconds in rank_pool(2)(failing, 1, "disagrees"):
        assert name == "DistCADesyncError"
        assert "ranks 0 and 1 are stages of one copy of the model and have different documents in micro-batch 1" in text
        assert seconds < TIMEOUT + SLACK


@pytest.mark.slow
def test_a_stage_that_raises(rank_pool: Callable[[int], RankPool]) -> None:
    """The third forward of stage 1 is the second one of the step: of micro-batch 1, in the third forward tick."""
    (_, first, _), (name, text, _) = rank_pool(2)(failing, 1, "raises")
    assert (name, "failed to run forward" in text) == ("RuntimeError", True)
    assert "rank 1 raised RuntimeError while running forward tick 3 (micro-batch 2 on stage 0, micro-batch 1 on stage 1)" in first
    assert "of step 1, as stage 1" in first


@pytest.mark.slow
def test_a_stage_that_sleeps(rank_pool: Callable[[int], RankPool]) -> None:
    (name, text, seconds), _ = rank_pool(2)(failing, 1, "sleeps")
    assert name == "DistCADesyncError"
    assert "rank 1 is silent" in text
    assert "attention call 0 of forward tick 3 (micro-batch 2 on stage 0, micro-batch 1 on stage 1) of step 1" in text
    assert seconds < TIMEOUT + SLACK


def test_what_stages_cannot_do_is_refused(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2)(refusals)


def refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    configure(Case(settings=(("ping_pong", True),)))
    stage = split(model_for(Case(layers=2), "distca"), mesh)
    with pytest.raises(UnsupportedError, match="set ping_pong=False"):
        Schedule(stage, 2)
    for setting, why in (("group_size", 1), "leave it out"), (("documents_span_ranks", True), "distca_documents with numbers"):
        configure(Case(settings=(setting,)))
        schedule = Schedule(stage, 2, loss_for(Case()))
        with pytest.raises(UnsupportedError, match=rf"{setting[0]}={setting[1]}.*{why}"):
            schedule.step(torch.zeros(2, 8, dtype=torch.long), target=torch.zeros(2, 8, dtype=torch.long))
    configure(Case())
    sharded = model_for(Case(layers=2), "distca")
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(ConfigError, match=r"DDP or FSDP have wrapped.* split it first, then wrap stage\.submod"):
        split(sharded, mesh)
    with pytest.raises(ConfigError, match=r"give it the stage that hf_distca.pipeline.split made"):
        Schedule(stage.submod, 2)  # type: ignore[arg-type]
    schedule = Schedule(stage, 2, loss_for(Case()))
    hf_distca.configure()
    with pytest.raises(ConfigError, match="make the Schedule again"):
        schedule.step(torch.zeros(2, 8, dtype=torch.long), target=torch.zeros(2, 8, dtype=torch.long))
