"""What torch's profiler shows of core attention, and what ping-pong hides: messages travel while
the other half computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_parity import model_for
from test_pingpong import PLACEMENTS, batch_of, configure
from torch.profiler import ProfilerActivity, profile

import hf_distca
from hf_distca.agreement import planner
from hf_distca.integration.current_session import current_session
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs, TaskBatch
from hf_distca.runtime import meter
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.meter import get_clock
from hf_distca.schedule.plan import Plan
from ranks import RankPool

PHASE, DELAY = 0.06, 0.03  # seconds of each compute phase, and of each exchange: at most half of it
LAYERS = 2


class Slow(torch.autograd.Function):
    """Takes a phase, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(PHASE)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(PHASE)
        return grad


@contextmanager
def deliberate_times() -> Iterator[None]:
    """Exchanges take `DELAY`, tasks `PHASE`, whatever the machine does. Each rank's tasks all go to
    its neighbour.
    """
    start = Channel.start

    class Late:
        def __init__(self, transfer: Transfer) -> None:
            self.transfer, self.earliest = transfer, time.perf_counter() + DELAY

        def wait(self) -> None:
            self.transfer.wait()
            time.sleep(max(0.0, self.earliest - time.perf_counter()))

    run = AttentionServer.run

    def slow(
        self: AttentionServer, pools: Operands | BackwardInputs, tasks: TaskBatch, **options: bool
    ) -> Outputs | Grads:
        if tasks.query_length:
            begin = get_clock(pools.q_THD.device)()
            time.sleep(PHASE)
            self.meter.span("server", begin, get_clock(pools.q_THD.device)())
        return run(self, pools, tasks, **options)

    def swapped(layout: Any, *_: Any) -> Plan:
        local = Plan.make_local(layout)
        server = (local.server + 1) % layout.world_size
        return Plan(layout, local.document, local.start, local.end, local.home, server)

    with (
        patch.object(Channel, "start", lambda *args: Late(start(*args))),
        patch.object(AttentionServer, "run", slow),
        patch.object(planner, "balance", swapped),
    ):
        yield


def slow_step(rank: int, ping_pong: bool) -> tuple[int, float]:
    """Exchanges of a step, and seconds in which this rank packed, waited and unpacked."""
    configure(ping_pong=ping_pong)
    model = model_for(2, "distca", torch.float32)
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda _, args, out: Slow.apply(out))
    batch = batch_of(PLACEMENTS["skewed"][rank])
    with deliberate_times():
        dist.barrier()
        model(**batch, use_cache=False).logits.sum().backward()
    counted = current_session().meter
    return counted.dispatches + counted.returns, counted.exchange_seconds


@pytest.mark.slow
def test_ping_pong_hides_slow_exchanges_one_stream_does_not(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """Ping-pong hides a slow exchange and a single stream does not."""

    def exposed(ping_pong: bool) -> float:
        results = rank_pool(2)(slow_step, ping_pong)
        exchanges = LAYERS * 4 * (2 if ping_pong else 1)
        assert [count for count, _ in results] == [exchanges] * 2
        return max(seconds for _, seconds in results) / (exchanges * DELAY)

    assert exposed(False) >= 0.95  # all of it is waited for
    # A busy machine makes ranks wait for each other on top, so the best of a few counts.
    assert min(exposed(True) for _ in range(4)) <= 0.3


def profiled(rank: int, ping_pong: bool) -> dict[str, int]:
    configure(ping_pong=ping_pong)
    model = model_for(2, "distca", torch.float32)
    batch = batch_of(PLACEMENTS["skewed"][rank])
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(**batch, use_cache=False).logits.sum().backward()
    return {
        event.key.removeprefix("hf_distca: "): event.count
        for event in recorded.key_averages()
        if event.key.startswith("hf_distca: ")
    }


@pytest.mark.parametrize("ping_pong", [False, True])
def test_the_profiler_shows_dispatch_server_and_return(
    rank_pool: Callable[[int], RankPool], ping_pong: bool
) -> None:
    """Of each layer, forward and backward, by half."""
    each = LAYERS * 2 * (2 if ping_pong else 1)
    for marks in rank_pool(2)(profiled, ping_pong):
        server = marks.pop("server")
        assert server >= each
        names = ("dispatch", "return", "wait for dispatch", "wait for return")
        assert marks == dict.fromkeys(names, each)


def test_without_a_profiler_there_are_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for(2, "distca", torch.float32)
    hf_distca.configure()
    monkeypatch.setattr(meter, "record_function", pytest.fail)
    model(**batch_of([[3]])).logits.sum().backward()
