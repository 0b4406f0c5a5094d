"""Ping-pong and relays on one device: the share of an artificial exchange that is hidden behind
compute.

A stack of layers (projections, attention, a feed-forward part) runs a plan of which this is one
rank: all ranks have the same documents, and the others serve the last rows of each. The messages go
nowhere. In their place something of known duration is under way: on a GPU, copies from the host by
a copy engine, on a stream of their own; on a CPU, time. What comes back is what was sent.

Hidden is what a step does not take longer: 1 - (seconds with exchanges - seconds without) / seconds
of all exchanges, for whole layers, for two nano-batches, and for whole layers with relays. Whole
layers hide what their own tasks take. With relays they hide the first hop only if another stream
waits for it. So relays are measured with that stream and without it; a CPU has none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from gpu_setting import Setting, seconds_once, synchronize
from gpu_workloads import fastest, shapes
from hf_distca.kernels import Kernel, Scores
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.pingpong import run_nano_batches
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan, Relays

GOAL = 0.8
# Seconds of all exchanges of a step, in those of its compute, and the ways that are measured with
# it.
LOADS = {
    0.25: ("whole", "ping-pong"),
    0.5: ("whole", "ping-pong", "relays", "relays on one stream"),
}


class Exchange:
    """A channel whose messages take `seconds_per_byte` for each byte sent, one after another.

    Attributes:
        seconds, exchanges: of all messages, and how many there were, since they were set to 0.
    """

    is_gloo = False  # True keeps relays from using another stream, and does nothing else here
    # Between a dispatch and its wait, which is where tasks run, but for the last ones of a layer.
    under_way = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds_per_byte, self.seconds, self.exchanges = device, 0.0, 0.0, 0
        self._free = 0.0  # when the link has done what it was given, by the clock of a CPU
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
            self._target = torch.empty(2**28, dtype=torch.uint8, device=device)
            self._rate = self._host.numel() / min(
                seconds_once(lambda: self._target.copy_(self._host, non_blocking=True), device)
                for _ in range(4)
            )

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        _: Mapping[int, int],
        __: Mapping[int, int],
        *___: str | None,
    ) -> Any:
        """Start a message, which is what is sent."""
        seconds = sent.numel() * self.seconds_per_byte
        self.seconds += seconds
        self.exchanges += 1
        if self.device.type != "cuda":
            received.copy_(sent)
            self._free = max(time.monotonic(), self._free) + seconds
            return _Sleep(self._free)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            left = int(seconds * self._rate)
            while left > 0:
                part = min(left, self._host.numel())
                self._target[:part].copy_(self._host[:part], non_blocking=True)
                left -= part
            received.copy_(sent)
            for message in (received, sent):
                message.record_stream(self._stream)
            arrived = torch.cuda.Event()
            arrived.record()
        return _Arrival(arrived)


class _Sleep:
    def __init__(self, until: float) -> None:
        self.until = until

    def wait(self) -> None:
        time.sleep(max(0.0, self.until - time.monotonic()))


class _Arrival:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class Layer(nn.Module):
    """Projections, attention by a route, and a feed-forward part; each with a residual."""

    def __init__(self, shape: AttentionShape, kernel: Kernel, group: AttentionGroup) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        self.server = AttentionServer(kernel, Scores(shape.head_dim**-0.5), Meter())
        width = shape.query_heads * shape.head_dim
        self.heads = (shape.query_heads, shape.key_value_heads, shape.key_value_heads)
        self.project = nn.Linear(width, sum(self.heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(3 * width, width, bias=False),
        )

    def forward(self, x_TW: torch.Tensor, route: Route) -> torch.Tensor:
        q_THD, k_TKD, v_TKD = (
            self.project(x_TW).unflatten(-1, (-1, self.shape.head_dim)).split(self.heads, dim=1)
        )
        o_THD = compute_core_attention(
            Inputs(q_THD, k_TKD, v_TKD), LayerExchange(route, self.group, self.server)
        )
        x_TW = x_TW + self.out(o_THD.flatten(1))
        return x_TW + self.down(nn.functional.silu(self.up(x_TW)))


def plan_of(documents: int, length: int, tile: int = 128) -> Plan:
    """Each of two ranks has so many documents; the other one serves the last quarter of the rows of
    each.
    """
    layout = Layout.from_lengths([[length] * documents] * 2)
    cut = length * 3 // 4 // tile * tile or length // 2
    tasks = []
    for document in range(2 * documents):
        home = document // documents
        tasks += [
            CATask(document, 0, cut, home, home),
            CATask(document, cut, length, home, 1 - home),
        ]
    return Plan.from_tasks(layout, tasks)


def relayed_plan(documents: int, length: int, tile: int = 128) -> Plan:
    """Each of three ranks has so many documents, of whose last two quarters the next two ranks
    serve one each.

    The one that serves the third quarter gets the first half of the keys from home and passes it
    on. The other one gets as many keys from home, and passes on those of the third quarter. So all
    ranks send alike, and receive as much.
    """
    layout = Layout.from_lengths([[length] * documents] * 3)
    quarter = length // 4 // tile * tile or length // 4
    tasks, relays = [], []
    for document in range(3 * documents):
        home = document // documents
        near, far = (home + 1) % 3, (home + 2) % 3
        for begin, end, server in ((0, 2, home), (2, 3, near), (3, 4, far)):
            tasks.append(
                CATask(
                    document, begin * quarter, length if end == 4 else end * quarter, home, server
                )
            )
        relays += [(document, 0, 2 * quarter, near), (document, 2 * quarter, 3 * quarter, far)]
    return replace(
        Plan.from_tasks(layout, tasks), relays=Relays(*np.array(relays).T, layout.world_size)
    )


class Stack:
    """Layers on a batch of two halves, which run together or as nano-batches."""

    def __init__(self, setting: Setting, layers: int, length: int) -> None:
        self.setting, self.exchange = setting, Exchange(setting.device)
        _, shape = next(iter(shapes(setting).items()))
        group = AttentionGroup((0, 1, 2), 0, data=self.exchange)  # type: ignore[arg-type]
        made: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
        self.layers = [
            Layer(shape, fastest(setting).kernel, group).to(**made) for _ in range(layers)
        ]
        self.halves = [
            torch.randn(length, shape.query_heads * shape.head_dim, **made) for _ in range(2)
        ]
        self.whole_route, self.half_route = (
            Route.build(plan_of(documents, length), 0) for documents in (2, 1)
        )
        self.relayed_route = Route.build(relayed_plan(2, length), 0)

    def step(self, way: str) -> torch.Tensor:
        """Forward and backward. Returns the output."""
        self.exchange.is_gloo = way == "relays on one stream"
        if way == "ping-pong":
            one, two = (half.clone().requires_grad_() for half in self.halves)
            for layer in self.layers:
                one, two = run_nano_batches(
                    lambda x=one, layer=layer: layer(x, self.half_route),
                    lambda x=two, layer=layer: layer(x, self.half_route),
                    self.setting.device.type,
                )
            out = torch.cat([one, two])
        else:
            out = torch.cat(self.halves).requires_grad_()
            for layer in self.layers:
                out = layer(out, self.whole_route if way == "whole" else self.relayed_route)
        out.square().mean().backward()
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        return out.detach()

    def seconds(self, way: str, seconds_per_byte: float) -> tuple[float, float]:
        """Of a step, and of its exchanges."""
        self.exchange.seconds_per_byte, self.exchange.seconds, self.exchange.exchanges = (
            seconds_per_byte,
            0.0,
            0,
        )
        synchronize(self.setting.device)
        started = time.perf_counter()
        self.step(way)
        synchronize(self.setting.device)
        return time.perf_counter() - started, self.exchange.seconds


def measured(stack: Stack, load: float, rounds: int) -> dict[str, Any]:
    """Medians over rounds in which all ways take turns, with exchanges and without."""
    bytes_of_step = {way: stack.seconds(way, 1.0 / 1e12)[1] * 1e12 for way in LOADS[load]}
    compute = statistics.median(stack.seconds("whole", 0.0)[0] for _ in range(3))
    rates = [
        (way, per_byte)
        for way in LOADS[load]
        for per_byte in (0.0, load * compute / bytes_of_step[way])
    ]
    taken: dict[tuple[str, float], list[float]] = {rate: [] for rate in rates}
    for round_ in range(rounds):
        for rate in rates[:: 1 if round_ % 2 else -1]:
            taken[rate].append(stack.seconds(*rate)[0])
    result: dict[str, Any] = {"load": load, "exchange_seconds": load * compute}
    for (way, free), (_, busy) in zip(rates[::2], rates[1::2], strict=True):
        without, with_exchanges = (
            statistics.median(taken[way, per_byte]) for per_byte in (free, busy)
        )
        hidden = 1 - (with_exchanges - without) / (load * compute)
        stack.seconds(way, 0.0)
        counts = {"bytes": bytes_of_step[way], "exchanges": stack.exchange.exchanges}
        result[way] = {**counts, "without": without, "with": with_exchanges, "hidden": hidden}
    return result


def run(setting: Setting) -> None:
    """Put the shares that are hidden, by load, and how far the outputs of both ways differ."""
    torch.manual_seed(0)
    stack = Stack(
        setting, setting.size(quick=2, cpu=3, gpu=3), setting.size(quick=256, cpu=2048, gpu=16384)
    )
    outs = [stack.step(way).float() for way in ("whole", "ping-pong")]
    setting.put(difference=float((outs[0] - outs[1]).norm() / outs[0].norm()), goal=GOAL)
    rows: list[dict[str, Any]] = []
    for load, ways in LOADS.items():
        expected = setting.size(quick=0.0, cpu=10.0, gpu=4.5) * len(ways)
        if setting.time_for(f"exchanges of {load} of compute", expected):
            rows.append(measured(stack, load, setting.size(quick=3, cpu=5, gpu=5)))
            setting.put(rows=rows)
