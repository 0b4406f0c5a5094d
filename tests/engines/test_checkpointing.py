"""Activation checkpointing of every kind gives the same loss and gradients, and repeats no kernel
call and no exchange.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from checkpointing import SWITCHES
from tiny_llama import LAYERS, micro_batch, settings, tiny_llama
from transformers import LlamaForCausalLM

import hf_distca
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from recorded import recorded
from turns import in_turn


def make_model(switch: str | None, **changes: Any) -> LlamaForCausalLM:
    hf_distca.configure(settings(**changes))
    model = tiny_llama()
    if switch is not None:
        SWITCHES[switch](model)
    return model


def get_grads(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in parameters}


Result = tuple[float, dict[str, torch.Tensor], list[str], list[int], int]


def step(rank: int, switch: str | None, kernel: str, ping_pong: bool) -> Result:
    """Run a training step. Return loss, gradients, collectives, counts, and the number of layers
    that ran a second time.
    """
    model = make_model(switch, kernel=kernel, ping_pong=ping_pong)
    session = current_session()
    assert session.join_group().size >= 1  # makes the group before recording starts
    with recorded() as names:
        loss = model(**micro_batch(rank), use_cache=False).loss
        forwards = session.meter.calls
        loss.backward()
    meter = session.meter
    counts = [meter.kernel_calls, meter.dispatches, meter.returns, meter.sent_bytes]
    again = meter.calls - forwards + meter.recomputed_calls
    return float(loss.detach()), get_grads(model), names, counts, again


def count_recomputed_layers(switch: str) -> int:
    if switch.startswith("every"):
        return len(range(0, LAYERS, int(switch.split()[1])))
    return LAYERS


Plain = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def plain(rank_pool: RankPools) -> Plain:
    """Return a function that runs ranks without checkpointing, once for all tests."""
    return cache(lambda world, function, *args: rank_pool(world)(function, None, *args))


ONE_OF_EACH_KIND = [
    "non-reentrant",
    "reentrant",
    "policy: arithmetic",
    "checkpoint_wrapper",
    "DeepSpeed",
]
# Policies also run with the reference kernel, whose operations they could save one by one. The CPU
# kernel is a single operation.
CASES = [(name, "cpu") for name in SWITCHES] + [
    (name, "reference") for name in SWITCHES if name.startswith("policy")
]


WAYS = [(1, False), (2, False), (2, True)]  # ranks, and whether in ping-pong
# Ping-pong over ranks has the most work that could be repeated.
ALWAYS = [*product(ONE_OF_EACH_KIND, [(2, True)]), *product(["non-reentrant"], WAYS)]


@pytest.mark.parametrize(
    ("switch", "kernel", "world", "ping_pong"),
    in_turn(
        [(*case, *way) for case, way in product(CASES, WAYS)],
        12,
        [(name, "cpu", *way) for name, way in ALWAYS],
    ),
)
def test_checkpointing_repeats_no_kernel_call_and_no_exchange(
    rank_pool: RankPools,
    plain: Plain,
    switch: str,
    world: int,
    kernel: str,
    ping_pong: bool,
) -> None:
    halves = 2 if ping_pong else 1
    wanted = plain(world, step, kernel, ping_pong)
    for got, want in zip(rank_pool(world)(step, switch, kernel, ping_pong), wanted, strict=True):
        loss, grads, names, counts, again = got
        assert again == halves * count_recomputed_layers(switch), (
            "layers were not recomputed, so nothing was tested"
        )
        assert loss == pytest.approx(want[0], rel=1e-6)
        torch.testing.assert_close(grads, want[1], rtol=1e-5, atol=1e-7)
        assert names == want[2]
        assert counts == want[3]
    if world > 1:
        assert all(row[3][1] == 2 * halves * LAYERS for row in wanted), (
            "nothing was exchanged, so nothing was tested"
        )


def interleave(
    rank: int, switch: str | None, micro_batches: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Compute gradients of micro-batches whose forwards all run before the first backward."""
    model = make_model(switch)
    batches = [micro_batch(rank + 2 * n) for n in range(micro_batches)]
    losses = [model(**batch, use_cache=False).loss for batch in batches]
    for loss in losses:
        loss.backward()
    meter = current_session().meter
    return get_grads(model), [meter.kernel_calls, meter.dispatches, meter.returns, meter.sent_bytes]


@pytest.mark.parametrize("switch", ONE_OF_EACH_KIND)
def test_recompute_after_other_forwards_repeats_nothing(
    rank_pool: RankPools, plain: Plain, switch: str
) -> None:
    for (grads, counts), (want, wanted) in zip(
        rank_pool(2)(interleave, switch, 3), plain(2, interleave, 3), strict=True
    ):
        torch.testing.assert_close(grads, want, rtol=1e-5, atol=1e-7)
        assert counts == wanted


def skip_backwards(rank: int, switch: str | None, skip: bool) -> dict[str, torch.Tensor]:
    """Compute gradients of the last of three steps. With `skip`, the two forwards before it get no
    backward.
    """
    model = make_model(switch)
    if skip:
        for n in (1, 2):
            forgotten = model(**micro_batch(rank + 2 * n), use_cache=False).loss
    loss = model(**micro_batch(rank), use_cache=False).loss
    if skip:
        del forgotten
    loss.backward()
    return get_grads(model)


@pytest.mark.parametrize("switch", [None, *ONE_OF_EACH_KIND])
def test_forwards_without_backward_change_no_later_gradient(
    rank_pool: RankPools, plain: Plain, switch: str | None
) -> None:
    for got, want in zip(
        rank_pool(2)(skip_backwards, switch, True), plain(2, skip_backwards, False), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def count_live_bytes(no_more_than: int = 0) -> int:
    """Count the bytes of live tensors. Try again for 2 s while there are more than asked for.

    Threads of gloo release a finished exchange, and the checkpoint in which it started, a moment
    late.
    """
    deadline = time.monotonic() + 2.0
    while True:
        storages = [o.untyped_storage() for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        del storages
        if size <= no_more_than or time.monotonic() > deadline:
            return size
        time.sleep(0.02)


def measure_live_tensors(rank: int, switch: str | None) -> tuple[int, list[int]]:
    """Count the bytes of live tensors before and after each of 10 steps, of which every fifth has
    no backward.

    The cycle collector is off, because it would hide tensors that are held too long.
    """
    model = make_model(switch)
    after: list[int] = []
    gc.collect()
    gc.disable()
    try:
        model(**micro_batch(rank), use_cache=False).loss.backward()  # fills caches
        model.zero_grad()
        before = count_live_bytes()
        for n in range(10):
            loss = model(**micro_batch(rank + 2 * n), use_cache=False).loss
            if n % 5 != 4:
                loss.backward()
            del loss
            model.zero_grad()
            after.append(count_live_bytes(no_more_than=before))
    finally:
        gc.enable()
    return before, after


@pytest.mark.parametrize("switch", in_turn([None, "reentrant", "non-reentrant"], 6))
def test_live_bytes_do_not_grow(rank_pool: RankPools, switch: str | None) -> None:
    for before, after in rank_pool(2)(measure_live_tensors, switch):
        assert max(after) <= before, (before, after)
