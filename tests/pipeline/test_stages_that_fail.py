"""If stages disagree, raise or sleep, all ranks soon raise errors with tick and micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged import (
    Case,
    configure,
    make_batches,
    make_loss,
    make_model,
    make_schedule,
    make_stage,
    prepare,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forks
from hf_distca import PackingCollator, document_shares
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.pipeline import Schedule, split
from hf_distca.pipeline.stage_step import Messages
from hf_distca.runtime.group import AttentionGroup
from ranks import RankPools


@pytest.fixture(autouse=True)
def _close_ranks(rank_pool: RankPools) -> Iterator[None]:
    """Close the ranks after each test: a wait that times out closes connections of the world."""
    yield
    rank_pool(2).close()


TIMEOUT = 4.0
SLACK = 4.0  # a busy machine, and reports of other ranks
CASE = Case(micro_batches=3, layers=2, settings=(("timeout_seconds", TIMEOUT),))


def run_to_error(step: Callable[..., object], *args: Any, **options: Any) -> tuple[str, float]:
    """Run a step; return its error, and the seconds until then."""
    started = time.monotonic()
    try:
        step(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "", time.monotonic() - started


def fail_in_step(rank: int, what: str) -> tuple[str, float]:
    """Run a step in which rank 1 fails; the world is the group of the stages."""
    configure(CASE)
    stage = split(make_model(CASE, "distca"), init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)))
    ids, positions, targets = make_batches(CASE)
    if rank == 1 and what == "disagrees":
        positions = torch.arange(CASE.tokens).expand(CASE.micro_batches, -1)
    if rank == 1 and what in ("raises", "sleeps"):
        calls = []

        def disturb(*_: Any) -> None:
            calls.append(None)
            if len(calls) == 3:  # the first call is not one of the step
                if what == "raises":
                    raise ValueError("disturbed")
                time.sleep(TIMEOUT + 2)

        stage.submod.model.model.layers[rank].register_forward_pre_hook(disturb)
    return run_to_error(
        make_schedule(stage, CASE).step, ids, position_ids=positions, target=targets
    )


def differ_in_step(rank: int, what: str) -> tuple[str, float]:
    """Run a second step in which stage 1 has micro-batches of another shape, or evaluates."""
    configure(CASE)
    schedule = make_schedule(make_stage(CASE)[0], CASE)
    ids, positions, targets = make_batches(CASE)
    if what == "batch":  # documents of as many tokens in either shape
        positions = (torch.arange(CASE.tokens) % (CASE.tokens // 2)).repeat(CASE.micro_batches, 1)
    schedule.step(ids, position_ids=positions, target=targets)
    run = schedule.eval if rank == 1 and what == "evaluates" else schedule.step
    if rank == 1 and what == "tokens":
        ids, positions, targets = (one[:, : CASE.tokens // 2] for one in (ids, positions, targets))
    if rank == 1 and what == "batch":
        ids, positions, targets = (
            one.view(2 * CASE.micro_batches, -1) for one in (ids, positions, targets)
        )
    return run_to_error(run, ids, position_ids=positions, target=targets)


@pytest.mark.slow
def test_a_stage_that_raises_is_named_with_its_tick(rank_pool: RankPools) -> None:
    """The third forward of stage 1 is that of micro-batch 1, the second one of the step."""
    (first, _), (second, _) = rank_pool(2)(fail_in_step, "raises")
    assert second == "ValueError: disturbed"
    assert (
        "rank 1 raised ValueError while running forward tick 3 (micro-batch 2 on stage 0,"
        " micro-batch 1 on stage 1)" in first
    )
    assert "of step 1, as stage 1" in first


@pytest.mark.slow
def test_a_stage_that_sleeps_is_reported_as_silent(rank_pool: RankPools) -> None:
    (error, seconds), _ = rank_pool(2)(fail_in_step, "sleeps")
    assert error.startswith("DistCADesyncError: ")
    assert "rank 1 is silent" in error
    assert (
        "attention call 0 of forward tick 3 (micro-batch 2 on stage 0, micro-batch 1 on stage 1) of"
        " step 1" in error
    )
    assert seconds < TIMEOUT + SLACK


def differ_on_rank_1(rank: int, what: str) -> tuple[str, float]:
    """Run steps in which something differs on rank 1, at first or in the second step."""
    settings = {"ping_pong": True} if rank == 1 and what == "ping_pong" else {}
    case = CASE._replace(
        layers=3 if rank == 1 and what == "layers" else 2,
        settings=(*CASE.settings, *settings.items()),
    )
    configure(case)
    model = make_model(case._replace(tied=what == "copies"), "distca")
    if rank == 1 and what == "copies":
        model.get_input_embeddings().weight.data.mul_(1.5)
    if what == "float16":
        model = model.half()
    stage, _, _ = make_stage(case, model=model)
    count = case.micro_batches - (rank == 1 and what == "micro-batches")
    ids, positions, targets = make_batches(case, count=count)
    schedule = Schedule(stage, count, make_loss(case), scale_grads=False)
    more: dict[str, Any] = {}
    if what == "shares":
        documents = [{"input_ids": torch.arange(case.tokens)}] * count
        shares = document_shares(
            documents, case.tokens, model=model, ranks=1, seed=None, device="cpu"
        )
        items = [PackingCollator()([shares[number]]) for number in range(count)]
        positions = torch.cat([item["position_ids"] for item in items])
        more = (
            {"distca_documents": [item["distca_documents"] for item in items]} if rank == 1 else {}
        )
    if what in ("eval", "configure"):
        schedule.step(ids, position_ids=positions, target=targets)
    if what == "eval":
        stage.submod.train(rank == 0)
    if rank == 1 and what == "configure":
        configure(case)
    return run_to_error(schedule.step, ids, position_ids=positions, target=targets, **more)


DIFFERENT = "ranks do not agree in the first step: "
DOCUMENTS = "ranks 0 and 1 are stages of one copy of the model and have different documents in"


@pytest.mark.parametrize(
    ("function", "what", "said"),
    [
        (differ_on_rank_1, "layers", "config.num_hidden_layers is 2 on rank 0, 3 on rank 1"),
        (
            differ_on_rank_1,
            "micro-batches",
            DIFFERENT + "n_microbatches is 3 on rank 0, 2 on rank 1.",
        ),
        (
            differ_on_rank_1,
            "ping_pong",
            DIFFERENT + "ping_pong is False on rank 0, True on rank 1.",
        ),
        (
            differ_on_rank_1,
            "eval",
            "in step 2, 3 micro-batches in 2 stages: the mode of the model is train on rank 0,"
            " eval on rank 1.",
        ),
        (
            differ_on_rank_1,
            "copies",
            "model.embed_tokens.weight and lm_head.weight are one weight. Ranks 0 and 1 have copies"
            " of it",
        ),
        (
            differ_on_rank_1,
            "shares",
            "ranks have different ways of giving documents in step 1, 3 micro-batches",
        ),
        pytest.param(
            fail_in_step, "disagrees", f"{DOCUMENTS} micro-batch 1", marks=pytest.mark.slow
        ),
        pytest.param(
            differ_in_step, "tokens", f"{DOCUMENTS} micro-batch 0", marks=pytest.mark.slow
        ),
        pytest.param(
            differ_in_step,
            "batch",
            "ranks 0 and 1 are stages of one copy of the model and have micro-batches of shapes"
            " (1, 96) and (2, 48)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            differ_in_step,
            "evaluates",
            "in step 2, 3 micro-batches in 2 stages: the run is step on rank 0, eval on rank 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_errors_name_the_difference_between_ranks(
    rank_pool: RankPools,
    function: Callable[..., tuple[str, float]],
    what: str,
    said: str,
) -> None:
    for error, seconds in rank_pool(2)(function, what):
        assert error.startswith("DistCADesyncError: ")
        assert said in error
        assert seconds < TIMEOUT


def test_configure_between_steps_on_one_rank_fails_on_all_at_once(rank_pool: RankPools) -> None:
    (first, seconds), (second, _) = rank_pool(2)(differ_on_rank_1, "configure")
    assert second.startswith("ConfigError: ")
    assert "make the Schedule again" in second
    assert "rank 1 raised ConfigError while reading the documents of step 2" in first
    assert seconds < TIMEOUT


def test_float16_is_refused(rank_pool: RankPools) -> None:
    for error, _ in rank_pool(2)(differ_on_rank_1, "float16"):
        assert error.startswith("UnsupportedError: ")
        assert "float16 needs a GradScaler" in error


def freeze_embedding(rank: int, when: str) -> tuple[str, float]:
    """Run a step with an embedding that is tied to the head and frozen only on the first stage."""
    _, held, step = prepare(CASE._replace(tied=True))
    if when == "later":
        step()
    for weight in held.get_input_embeddings().parameters():
        weight.requires_grad_(False)
    return run_to_error(step)


@pytest.mark.slow
def test_an_embedding_frozen_on_one_stage_is_refused(rank_pool: RankPools) -> None:
    for error, seconds in rank_pool(2)(freeze_embedding, "first"):
        assert error.startswith("ConfigError: ")
        assert (
            "only one of them is trained: rank 0 (stage 0): frozen, rank 1 (stage 1): trained"
            in error
        )
        assert seconds < TIMEOUT
    _, (error, seconds) = rank_pool(2)(freeze_embedding, "later")
    assert error.startswith("DistCADesyncError: ")
    assert "while adding the gradients of the tied embedding in step 2" in error
    assert seconds < TIMEOUT + SLACK


def wait_in_vain(rank: int, store: Path, pipe: Connection) -> None:
    """Wait for a message that is not sent, in a world of `init_device_mesh` without a backend."""
    dist.init_process_group(store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    if rank == 0:
        started = time.monotonic()
        messages = Messages(
            [dist.P2POp(dist.irecv, torch.empty(1), group=dist.group.WORLD, group_peer=1)]
        )
        with pytest.raises(RuntimeError):
            messages.wait(AttentionGroup(timeout_seconds=1.0), "waiting")
        pipe.send((dist.get_backend(), time.monotonic() - started))
    time.sleep(60)  # until it is killed


def test_waits_are_bounded_in_a_world_without_a_backend(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    ranks = [forks.start(wait_in_vain, rank, tmp_path / "store", theirs) for rank in range(2)]
    arrived = ours.poll(60)
    backend, seconds = ours.recv() if arrived else ("", 0.0)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert arrived
    assert backend == "undefined"
    assert seconds < SLACK


def test_unsupported_settings_and_models_are_refused(rank_pool: RankPools) -> None:
    rank_pool(2)(check_refusals)


def check_refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    stage = split(make_model(Case(layers=2), "distca"), mesh)
    for setting, why in (
        (("group_size", 1), "group_size=1.*Leave group_size out"),
        (
            ("documents_span_ranks", True),
            "documents_span_ranks=True.*distca_documents of shares",
        ),
    ):
        configure(Case(settings=(setting,)))
        schedule = Schedule(stage, 2, make_loss(Case()))
        with pytest.raises(UnsupportedError, match=why):
            schedule.step(
                torch.zeros(2, 8, dtype=torch.long), target=torch.zeros(2, 8, dtype=torch.long)
            )
    configure(Case())
    sharded = make_model(Case(layers=2), "distca")
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(
        ConfigError,
        match=r"wrapped with DDP or FSDP: split the model first, then wrap stage\.submod",
    ):
        split(sharded, mesh)
    with pytest.raises(ConfigError, match=r"give it the stage that hf_distca.pipeline.split made"):
        Schedule(stage.submod, 2)  # type: ignore[arg-type]
