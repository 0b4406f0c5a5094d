"""Timelines, and what they show of ping-pong: messages travel while the other half computes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_parity import model_for
from test_pingpong import PLACEMENTS, batch_of, configure

import hf_distca
from hf_distca.agreement import planner
from hf_distca.integration.current_session import current_session
from hf_distca.kernels.base import Grads, Operands, Outputs, Saved, TaskBatch
from hf_distca.measure.timeline import Span
from hf_distca.runtime.call import AttentionServer
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.meter import mark_now
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
        self: AttentionServer, pools: Operands | Saved, tasks: TaskBatch, **options: bool
    ) -> Outputs | Grads:
        if tasks.query_length:
            begin = mark_now(pools.q_THD.device)
            time.sleep(PHASE)
            self.meter.span(
                "server", begin, mark_now(pools.q_THD.device), backward=isinstance(pools, Saved)
            )
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


def slow_step(rank: int, ping_pong: bool) -> list[Span]:
    configure(ping_pong=ping_pong)
    model = model_for(2, "distca", torch.float32)
    for layer in model.model.layers:
        for module in (layer.self_attn.q_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda _, args, out: Slow.apply(out))
    batch = batch_of(PLACEMENTS["skewed"][rank])
    with deliberate_times():
        dist.barrier()
        with hf_distca.trace() as trace:
            model(**batch, use_cache=False).logits.sum().backward()
    return trace.spans


def total(spans: list[Span], name: str) -> float:
    return sum(span.seconds for span in spans if span.name == name)


@pytest.mark.slow
def test_ping_pong_hides_slow_exchanges_one_stream_does_not(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """Ping-pong hides a slow exchange and a single stream does not."""

    def exposed(ping_pong: bool) -> float:
        results = rank_pool(2)(slow_step, ping_pong)
        exchanges = sum(span.name in ("dispatch", "return") for span in results[0])
        assert exchanges == LAYERS * 4 * (2 if ping_pong else 1)
        return max(total(spans, "wait") for spans in results) / (exchanges * DELAY)

    assert exposed(False) >= 0.95  # all of it is waited for
    # A busy machine makes ranks wait for each other on top, so the best of a few counts.
    assert min(exposed(True) for _ in range(4)) <= 0.2


def test_spans_are_the_phases_of_both_halves_in_both_directions(
    rank_pool: Callable[[int], RankPool],
) -> None:
    for spans in rank_pool(2)(slow_step, True):
        count = Counter((span.name, span.nano, span.backward) for span in spans)
        for half in (1, 2):
            for backward in (False, True):
                for name in ("dispatch", "return", "server", "linear"):
                    assert count[name, half, backward] >= LAYERS, (name, half, backward)
        # One thread: what is computed or waited for never overlaps.
        busy = [span for span in spans if span.name not in ("dispatch", "return", "server")]
        assert all(
            after.start >= before.end - 1e-6
            for before, after in pairwise(sorted(busy, key=lambda span: span.start))
        )
        linear = [
            span.seconds for span in spans if span.name == "linear" and span.seconds > PHASE / 2
        ]
        assert len(linear) >= 2 * 2 * LAYERS


def written(rank: int, folder: str) -> float | None:
    configure()
    model = model_for(2, "distca", torch.float32)
    with hf_distca.trace(folder) as trace:
        model(**batch_of(PLACEMENTS["skewed"][rank])).logits.sum().backward()
    model(**batch_of(PLACEMENTS["skewed"][rank])).logits.sum().backward()  # not recorded
    return trace.hidden


def test_each_rank_writes_a_trace(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    hidden = rank_pool(3)(written, str(tmp_path))
    assert all(share is not None and 0 <= share <= 1 for share in hidden)
    for rank in range(3):
        events = json.loads((tmp_path / f"rank_{rank}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {rank}
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
        lanes = {
            event["tid"]: event["args"]["name"]
            for event in events
            if event["name"] == "thread_name"
        }
        assert sorted(lanes.values()) == [
            "nano-batch 1",
            "nano-batch 1, messages",
            "nano-batch 2",
            "nano-batch 2, messages",
        ]
        dispatches = [event for event in spans if event["name"] == "dispatch"]
        assert len(dispatches) == 2 * 2 * LAYERS
        assert {lanes[event["tid"]] for event in dispatches} == {
            "nano-batch 1, messages",
            "nano-batch 2, messages",
        }
        assert {event["args"]["direction"] for event in dispatches} == {"forward", "backward"}


def test_without_exchanges_nothing_travelled() -> None:
    model = model_for(2, "distca", torch.float32)
    hf_distca.configure()
    with hf_distca.trace() as trace:
        model(**batch_of([[3]])).logits.sum().backward()
    assert trace.hidden is None
    assert total(trace.spans, "server") > 0
    with pytest.raises(ZeroDivisionError), hf_distca.trace():
        _ = 1 / 0
    assert current_session().trace is None
