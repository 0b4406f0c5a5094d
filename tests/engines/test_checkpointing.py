"""Every way of activation checkpointing gives the same loss and gradients and repeats no kernel
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
from ranks import RankPool
from recorded import recorded
from turns import in_turn


def model_with(switch: str | None, **changes: Any) -> LlamaForCausalLM:
    hf_distca.configure(settings(**changes))
    model = tiny_llama()
    if switch is not None:
        SWITCHES[switch](model)
    return model


def gradients(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in parameters}


Result = tuple[float, dict[str, torch.Tensor], list[str], list[int], int]


def step(rank: int, switch: str | None, kernel: str, ping_pong: bool) -> Result:
    """Loss, gradients, collectives and counts of a training step, and how many layers ran a second
    time.
    """
    model = model_with(switch, kernel=kernel, ping_pong=ping_pong)
    session = current_session()
    assert session.join_group().size >= 1  # made before recording starts
    with recorded() as names:
        loss = model(**micro_batch(rank), use_cache=False).loss
        forwards = session.meter.calls
        loss.backward()
    meter = session.meter
    counts = [meter.kernel_calls, meter.dispatches, meter.returns, meter.sent_bytes]
    again = meter.calls - forwards + meter.recomputed_calls
    return float(loss.detach()), gradients(model), names, counts, again


def recomputed_layers(switch: str) -> int:
    if switch.startswith("every"):
        return len(range(0, LAYERS, int(switch.split()[1])))
    return LAYERS


Plain = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def plain(rank_pool: Callable[[int], RankPool]) -> Plain:
    """What ranks give without any switch: the same for all of them, so it is run once."""
    return cache(lambda world, function, *args: rank_pool(world)(function, None, *args))


ONE_OF_EACH_KIND = [
    "non-reentrant",
    "reentrant",
    "policy: arithmetic",
    "checkpoint_wrapper",
    "DeepSpeed",
]
# What the reference kernel runs, policies could save, too; the CPU kernel is one operation of its
# own.
CASES = [(name, "cpu") for name in SWITCHES] + [
    (name, "reference") for name in SWITCHES if name.startswith("policy")
]


WAYS = [(1, False), (2, False), (2, True)]  # ranks, and whether in halves
# In halves and over ranks is where most could be repeated.
ALWAYS = [*product(ONE_OF_EACH_KIND, [(2, True)]), *product(["non-reentrant"], WAYS)]


@pytest.mark.parametrize(
    ("switch", "kernel", "world", "ping_pong"),
    in_turn(
        [(*case, *way) for case, way in product(CASES, WAYS)],
        12,
        [(name, "cpu", *way) for name, way in ALWAYS],
    ),
)
def test_nothing_is_repeated(
    rank_pool: Callable[[int], RankPool],
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
        assert again == halves * recomputed_layers(switch), (
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


def interleaved(
    rank: int, switch: str | None, micro_batches: int
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Gradients of several micro-batches whose forwards all run before the first backward."""
    model = model_with(switch)
    batches = [micro_batch(rank + 2 * n) for n in range(micro_batches)]
    losses = [model(**batch, use_cache=False).loss for batch in batches]
    for loss in losses:
        loss.backward()
    meter = current_session().meter
    return gradients(model), [meter.kernel_calls, meter.dispatches, meter.returns, meter.sent_bytes]


@pytest.mark.parametrize("switch", ONE_OF_EACH_KIND)
def test_recompute_after_other_forwards(
    rank_pool: Callable[[int], RankPool], plain: Plain, switch: str
) -> None:
    for (grads, counts), (want, wanted) in zip(
        rank_pool(2)(interleaved, switch, 3), plain(2, interleaved, 3), strict=True
    ):
        torch.testing.assert_close(grads, want, rtol=1e-5, atol=1e-7)
        assert counts == wanted


def skipping(rank: int, switch: str | None, skip: bool) -> dict[str, torch.Tensor]:
    """Gradients of the last of three steps; with `skip`, the forwards before it never see a
    backward.
    """
    model = model_with(switch)
    if skip:
        for n in (1, 2):
            forgotten = model(**micro_batch(rank + 2 * n), use_cache=False).loss
    loss = model(**micro_batch(rank), use_cache=False).loss
    if skip:
        del forgotten
    loss.backward()
    return gradients(model)


@pytest.mark.parametrize("switch", [None, *ONE_OF_EACH_KIND])
def test_forwards_without_backward_leave_nothing_behind(
    rank_pool: Callable[[int], RankPool], plain: Plain, switch: str | None
) -> None:
    for got, want in zip(
        rank_pool(2)(skipping, switch, True), plain(2, skipping, False), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def alive(no_more_than: int = 0) -> int:
    """Bytes of all tensors alive; looks again for 2 s while there are more than asked for.

    The threads of gloo let go of a finished exchange, and of the checkpoint in which it was
    started, a moment late.
    """
    deadline = time.monotonic() + 2.0
    while True:
        storages = [o.untyped_storage() for o in gc.get_objects() if isinstance(o, torch.Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        del storages
        if size <= no_more_than or time.monotonic() > deadline:
            return size
        time.sleep(0.02)


def live_tensors(rank: int, switch: str | None) -> tuple[int, list[int]]:
    """Bytes of tensors alive before, and after each of 10 steps, of which every fifth has no
    backward.

    Without the cycle collector, which would hide for a while that something is held for too long.
    """
    model = model_with(switch)
    after: list[int] = []
    gc.collect()
    gc.disable()
    try:
        model(**micro_batch(rank), use_cache=False).loss.backward()  # fills caches
        model.zero_grad()
        before = alive()
        for n in range(10):
            loss = model(**micro_batch(rank + 2 * n), use_cache=False).loss
            if n % 5 != 4:
                loss.backward()
            del loss
            model.zero_grad()
            after.append(alive(no_more_than=before))
    finally:
        gc.enable()
    return before, after


@pytest.mark.parametrize("switch", in_turn([None, "reentrant", "non-reentrant"], 6))
def test_live_tensors_do_not_grow(rank_pool: Callable[[int], RankPool], switch: str | None) -> None:
    for before, after in rank_pool(2)(live_tensors, switch):
        assert max(after) <= before, (before, after)
