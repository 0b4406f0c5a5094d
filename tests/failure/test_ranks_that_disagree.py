"""Ranks that disagree end in `DistCADesyncError` within the timeout. The error names the place of
each rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_distca
from hf_distca.agreement import planner
from hf_distca.errors import KernelError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks import nano_batch_layers
from hf_distca.kernels.cpu import CpuKernel
from ranks import RankPool, RankPools
from tiny_runs import settings, tiny_llama

# Timeouts of cases that wait for the whole timeout, and of cases whose error must come earlier.
TIMEOUT = 4.0
PATIENCE = 4.0
# Seconds between the end of a wait and its report, on a busy machine.
SLACK = 2.0
Found = tuple[str, str, float]


def batch(rank: int, **more: Any) -> dict[str, Any]:
    lengths = [[96], [16] * 2, [69]][rank]
    return {**hf_distca.PackingCollator()([{"documents": [[7] * n for n in lengths]}]), **more}


def configure(**changes: Any) -> None:
    hf_distca.configure(settings(**{"kernel": "cpu", "timeout_seconds": TIMEOUT, **changes}))
    assert current_session().join_group().size > 1  # made by all ranks before any error


def step(model: LlamaForCausalLM, rank: int, **more: Any) -> None:
    model(**batch(rank, **more), use_cache=False).loss.backward()


def run_until_error(run: Callable[[], object]) -> Found:
    """Run, and return the name and text of the error, and the seconds until then."""
    started = time.monotonic()
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def check_desync(found: Found, *texts: str, within: float = TIMEOUT + SLACK) -> None:
    name, message, seconds = found
    assert name == "DistCADesyncError", found
    assert seconds < within, found
    for text in texts:
        assert text in message


def warm_up(rank: int) -> None:
    configure(timeout_seconds=60.0)
    step(tiny_llama("distca"), rank)


@pytest.fixture(autouse=True, scope="module")
def _warm(rank_pool: RankPools) -> None:
    """Run one step in each process, because the first one takes seconds on a busy machine."""
    rank_pool(2)(warm_up)
    rank_pool(3)(warm_up)


Waiting = Callable[..., list[Any]]


def run_alone(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run two new ranks and return their results."""
    with closing(RankPool(2)) as pool:
        if function is not make_no_group:
            pool(warm_up)
        return pool(function, *args)


@pytest.fixture(scope="module")
def waiting() -> Iterator[Waiting]:
    """Return a function that runs two ranks, of which one waits for its timeout. The first call
    starts all cases at once.
    """
    with ThreadPoolExecutor(len(WAITING)) as threads:
        started = {case: threads.submit(run_alone, *case) for case in WAITING}
        yield lambda *case: started[case].result() if case in started else run_alone(*case)


def skip_a_forward(rank: int) -> Found:
    configure()
    model = tiny_llama("distca")
    step(model, rank)
    return run_until_error(lambda: step(model, rank)) if rank == 0 else ("", "", 0.0)


def test_skipped_forward_raises_an_error_on_the_waiting_rank(waiting: Waiting) -> None:
    waited, _ = waiting(skip_a_forward)
    check_desync(
        waited,
        f"rank 0 waited up to {TIMEOUT:g} s for ranks (0, 1) while planning micro-batch 2",
        "rank 1 is silent",
        "last together when comparing plans of micro-batch 1",
    )


def train_fewer_layers(rank: int, ping_pong: bool, fewer: int) -> Found:
    configure(ping_pong=ping_pong)
    model = tiny_llama("distca", layers=1 if rank == fewer else 2)
    return run_until_error(lambda: (step(model, rank), step(model, rank)))


@pytest.mark.parametrize(
    ("fewer", "ping_pong"),
    [
        (0, False),
        (1, True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, True), (1, False))),
    ],
)
def test_fewer_layers_on_one_rank_raise_an_error_on_both(
    waiting: Waiting, ping_pong: bool, fewer: int
) -> None:
    results = waiting(train_fewer_layers, ping_pong, fewer)
    for rank, found in enumerate(results):
        check_desync(found)
        waited = rf"rank {rank} (waited up to|was waiting for the .* when a connection among ranks)"
        assert re.search(waited, found[1]), found
    more, less = results[1 - fewer], results[fewer]
    assert "in forward of layer 1 of micro-batch" in more[1]
    assert f"rank {fewer} waited in vain while waiting for the" in more[1], more
    assert "in backward of layer 0 of micro-batch" in less[1]
    assert f"rank {1 - fewer} waited in vain while waiting for the" in less[1], less


def skip_a_backward(rank: int) -> Found:
    configure()
    model = tiny_llama("distca")
    if rank == 1:
        return run_until_error(lambda: [model(**batch(rank), use_cache=False) for _ in range(2)])
    return run_until_error(lambda: step(model, rank))


def test_skipped_backward_raises_an_error_on_both_ranks(waiting: Waiting) -> None:
    results = waiting(skip_a_backward)
    check_desync(
        results[0],
        "of layer 1 of micro-batch 1",
        "rank 1 waited in vain while planning micro-batch 2",
    )
    check_desync(
        results[1],
        "while planning micro-batch 2",
        "rank 0 waited in vain",
        "in backward of layer 1 of micro-batch 1",
    )


def skip_a_backward_without_messages(rank: int) -> tuple[Found, int]:
    configure(tolerance=0.1, timeout_seconds=PATIENCE)
    model = tiny_llama("distca")
    loss = model(**batch(rank), use_cache=False).loss
    if rank != 2:
        loss.backward()
    return run_until_error(lambda: step(model, rank)), current_session().meter.sent_bytes


def test_exchanges_without_messages_are_counted_and_compared(rank_pool: RankPools) -> None:
    results = rank_pool(3)(skip_a_backward_without_messages)
    assert results[2][1] == 0
    for found, _ in results:
        check_desync(
            found,
            "different numbers of exchanges up to here",
            "rank 0: 8, rank 1: 8, rank 2: 4",
            within=PATIENCE,
        )


def differ(rank: int, what: str) -> Found:
    odd = rank == 1
    configure(
        timeout_seconds=PATIENCE,
        tolerance=0.02 if what == "settings" and odd else 0.01,
        documents_span_ranks=what == "kinds of batch",
        ping_pong=what == "nano-batches",
    )
    model = tiny_llama("distca", key_value_heads=4 if what == "shapes" and odd else 2)
    dtypes = {
        "dtypes": (torch.float32, torch.float64),
        "dtypes of one size": (torch.bfloat16, torch.float16),
    }
    model.to(dtypes.get(what, (torch.float32,) * 2)[rank])
    data = batch(rank)
    changed: AbstractContextManager[object] = nullcontext()
    if what == "plans" and odd:
        local = planner.Plan.make_local
        changed = patch.object(planner, "balance", lambda layout, *_: local(layout))
    if what == "kinds of batch" and odd:
        del data["distca_documents"]
    if what == "nano-batches" and odd:
        changed = patch.object(nano_batch_layers, "_choose_nano_batches", lambda *_: None)
    with changed:
        return run_until_error(lambda: model(**data, use_cache=False))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("settings", "widths, version) in {}: tolerance is 0.01 on rank 0, 0.02 on rank 1"),
        ("shapes", "widths, version) in {}: key_value_heads is 2 on rank 0, 4 on rank 1"),
        ("dtypes", "widths, version) in {}: element_bytes is 4 on rank 0, 8 on rank 1"),
        (
            "dtypes of one size",
            "widths, version) in {}: dtype is torch.bfloat16 on rank 0, torch.float16 on rank 1",
        ),
        ("plans", "different plans for the same documents in {}: rank 0: "),
        ("kinds of batch", "different ways of giving documents in {}: rank 0: 0, rank 1: 1"),
        (
            "nano-batches",
            "different nano-batches (0 is a whole batch) in {}: rank 0: 1, rank 1: 0",
        ),
    ],
)
def test_difference_between_ranks_raises_an_error_while_planning(
    rank_pool: RankPools, what: str, text: str
) -> None:
    for found in rank_pool(2)(differ, what):
        check_desync(found, text.format("micro-batch 1"), within=PATIENCE)


def sleep(rank: int) -> Found:
    configure()
    model = tiny_llama("distca")
    if rank == 1:
        model.model.layers[0].mlp.register_forward_hook(lambda *_: time.sleep(TIMEOUT + 1))
    return run_until_error(lambda: step(model, rank))


def test_sleep_past_the_timeout_raises_an_error_on_both_ranks(waiting: Waiting) -> None:
    awake, asleep = waiting(sleep)
    check_desync(awake, "rank 0 waited", "of layer 1 of micro-batch 1", "rank 1 is silent")
    check_desync(
        asleep, "of layer 1 of micro-batch 1", "rank 0 waited in vain", within=TIMEOUT + 1 + SLACK
    )


def raise_in_a_kernel(rank: int, direction: str, culprit: int) -> Found:
    configure(timeout_seconds=PATIENCE)
    model = tiny_llama("distca")

    def fail(*_: object, **__: object) -> None:
        raise KernelError("out of luck")

    broken = patch.object(CpuKernel, direction, fail) if rank == culprit else nullcontext()
    with broken:
        return run_until_error(lambda: step(model, rank))


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_error_in_a_kernel_is_named_on_the_other_rank(
    rank_pool: RankPools, direction: str, culprit: int
) -> None:
    results = rank_pool(2)(raise_in_a_kernel, direction, culprit)
    layer = 0 if direction == "forward" else 1
    assert results[culprit][:2] == ("KernelError", "out of luck")
    check_desync(
        results[1 - culprit],
        f"in {direction} of layer {layer} of micro-batch 1",
        f"rank {culprit} raised KernelError while computing layer {layer} of micro-batch 1: out of"
        " luck",
        within=PATIENCE / 2,
    )


def evaluate(rank: int) -> list[Found]:
    configure()
    model = tiny_llama("distca")
    if rank == 0:
        return [run_until_error(lambda: step(model, rank))]
    model.eval()
    alone = run_until_error(lambda: model(**batch(rank), use_cache=False))
    time.sleep(TIMEOUT + 1)
    model.train()
    return [alone, run_until_error(lambda: step(model, rank))]


def test_training_rank_raises_an_error_while_another_evaluates(waiting: Waiting) -> None:
    (trains,), (alone, late) = waiting(evaluate)
    check_desync(trains, "while planning micro-batch 1", "rank 1 is silent")
    assert alone[0] == "", "evaluation needs no other rank"
    check_desync(late, "rank 0 waited in vain while planning micro-batch 1", within=SLACK)


def give_bad_positions(rank: int, ping_pong: bool) -> Found:
    configure(ping_pong=ping_pong, timeout_seconds=PATIENCE)
    model = tiny_llama("distca")
    data = batch(rank)
    del data["distca_documents"]
    if rank == 1:
        data["position_ids"][0, 17] = -5
    return run_until_error(lambda: model(**data, use_cache=False))


@pytest.mark.parametrize("ping_pong", [False, True])
def test_bad_batch_on_one_rank_raises_an_error_on_both(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    waits, bad = rank_pool(2)(give_bad_positions, ping_pong)
    assert bad[0] == "LayoutError"
    assert bad[1].startswith("rank 1: position_ids[0, 17] is -5")
    check_desync(
        waits,
        "was planning micro-batch 1 when a connection among ranks (0, 1) was closed",
        "rank 1 raised LayoutError while reading documents for micro-batch 1: position_ids[0, 17]"
        " is -5",
        within=PATIENCE / 2,
    )


def make_no_group(rank: int) -> Found:
    hf_distca.configure(hf_distca.DistCAConfig(timeout_seconds=TIMEOUT))
    return run_until_error(current_session().join_group) if rank == 0 else ("", "", 0.0)


def test_missing_rank_raises_an_error_while_the_group_is_made(waiting: Waiting) -> None:
    error = f"rank 0 waited up to {TIMEOUT:g} s for ranks (0, 1) while making their attention group"
    check_desync(waiting(make_no_group)[0], error)


# Cases of the default run that end only with a timeout. While they wait, they use no processor.
WAITING = [
    (skip_a_forward,),
    (train_fewer_layers, False, 0),
    (train_fewer_layers, True, 1),
    (skip_a_backward,),
    (sleep,),
    (evaluate,),
    (make_no_group,),
]
