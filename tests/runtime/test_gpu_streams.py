"""Work on the streams of an imitated GPU: its order, and that streams never share memory at once.

Each of these changes of the source makes a test fail: `Pending.receive_sections` without its wait;
`side_stream` without `wait_stream`; `forward_keys` without `side_stream`, or without keeping what
the first hop sends; own tasks launched after the dispatch's wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from device_events import Device
from fake_cuda import CUDA, Tape, fake_cuda, needs_cpu_build
from gpu_streams import COMPUTE, Link, Streams
from hf_distca.errors import UnsupportedError
from hf_distca.kernels import ScoreOptions, TaskBatch
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.kernels.flash import CUDA as CUDA_KERNEL
from hf_distca.runtime import core_attention as module
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.messages import Pending
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.pingpong import run_nano_batches
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan, Relays
from turns import in_turn

pytestmark = needs_cpu_build
HEADS, KEY_HEADS, DIM = 4, 2, 64
# Ranks 1 and 2 serve slices of rank 0's document, and rank 0 serves a slice of rank 1's.
LAYOUT = Layout.from_lengths([[600], [200], [100]])
TASKS = [
    (0, 0, 300, 0, 0),
    (0, 300, 450, 0, 1),
    (0, 450, 600, 0, 2),
    (1, 0, 100, 1, 1),
    (1, 100, 200, 1, 0),
    (2, 0, 100, 2, 2),
]
PLAN = Plan.from_tasks(LAYOUT, [CATask(*task) for task in TASKS])
# Rank 2 receives the first keys of document 0 from rank 1.
RELAYED = replace(PLAN, relays=Relays(*np.array([[0, 0, 400, 1]]).T, 3))
SHAPE = AttentionShape(HEADS, KEY_HEADS, DIM, DIM, 2)


@dataclass(eq=False)
class Named:
    """Run torch's flash attention and log whose tasks each call runs."""

    streams: Streams
    route: Route
    nano: str

    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        self._say(tasks)
        return CUDA_KERNEL.forward(pools, tasks, scores)

    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        self._say(tasks)
        return CUDA_KERNEL.backward(pools, tasks, scores)

    def _say(self, tasks: TaskBatch) -> None:
        whose = "own" if tasks is self.route.local_tasks else "arrived"
        self.streams.log.append((self.streams.current, f"{whose} tasks{self.nano}"))


class Tapes(Tape):
    """Stand in for autograd where the functions of several calls take turns."""

    def backward(self, do_THV: dict[LayerExchange, torch.Tensor]) -> None:
        gradients = dict(do_THV)
        while self.calls:
            function, context = self.calls.pop()
            gradients[context.exchange] = function.backward(context, gradients[context.exchange])[1]


class Kept:
    """Keep the outputs of the first forward for a recompute."""

    def __init__(self) -> None:
        self.outputs: Any = None
        self.recomputes = False

    def take_recorded(self) -> Any:
        return self.outputs if self.recomputes else None

    def store_outputs(self, *outputs: torch.Tensor) -> None:
        self.outputs = outputs

    def discard(self) -> None:
        pass


@contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Streams, Tapes]]:
    streams, tapes = Streams(), Tapes()
    monkeypatch.setattr(module, "_apply", tapes.apply)
    with fake_cuda(), Device().installed(), streams.installed():
        yield streams, tapes


def make_layer(
    streams: Streams, link: Link, plan: Plan, rank: int, nano: str = ""
) -> Callable[..., Any]:
    """Make a function that runs a layer on new tensors and returns its exchange and output."""
    route = Route.build(plan, rank)
    group = AttentionGroup((0, 1, 2), rank, data=link)  # type: ignore[arg-type]
    server = AttentionServer(Named(streams, route, nano), ScoreOptions(DIM**-0.5), Meter())  # type: ignore[arg-type]
    tokens = int(plan.layout.query_tokens[rank])
    shapes = ((tokens, heads, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS))

    def run(stored: Any = None) -> tuple[LayerExchange, torch.Tensor]:
        call = LayerExchange(route, group, server, stored)
        return call, compute_core_attention(
            Inputs(*(torch.empty(s, dtype=torch.bfloat16, device=CUDA) for s in tuple(sizes))), call
        )

    sizes = list(shapes)
    return run


def backward(tapes: Tapes, *results: tuple[LayerExchange, torch.Tensor]) -> None:
    tapes.backward({call: torch.empty_like(out) for call, out in results})


SERIAL = [
    "launch dispatch",
    "own tasks",
    "wait dispatch",
    "arrived tasks",
    "launch return",
    "wait return",
]
WAYS: dict[str, tuple[Plan, list[str]]] = {
    "serial": (PLAN, SERIAL),
    "relays": (
        RELAYED,
        # Another stream waits for the dispatch and launches the relays' dispatch.
        [
            "launch dispatch",
            "own tasks",
            "wait relays' dispatch",
            "arrived tasks",
            "launch return",
            "wait return",
        ],
    ),
}


@pytest.mark.parametrize("rank", in_turn([0, 1, 2], 3))
@pytest.mark.parametrize("way", WAYS)
def test_own_tasks_are_launched_before_the_first_wait(
    monkeypatch: pytest.MonkeyPatch, way: str, rank: int
) -> None:
    plan, expected = WAYS[way]
    with gpu(monkeypatch) as (streams, tapes):
        run = make_layer(streams, Link(streams), plan, rank)
        for _ in range(3):  # each layer reuses the memory of the one before
            streams.log.clear()
            result = run()
            forward = [what for stream, what in streams.log if stream == COMPUTE]
            streams.log.clear()
            backward(tapes, result)
            assert forward == expected
            back = [what for stream, what in streams.log if stream == COMPUTE]
            if way == "relays":  # relays sum gradients on their way home
                assert back == [
                    *expected[:4],
                    "launch return to relays",
                    "wait return to relays",
                    *SERIAL[4:],
                ]
            else:
                assert back == expected
            del result
        if way == "relays":
            on_side_stream = [what for stream, what in streams.log if stream != COMPUTE]
            assert on_side_stream == ["wait dispatch", "launch relays' dispatch"]
    assert streams.races == []


def test_a_recompute_with_kept_outputs_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    with gpu(monkeypatch) as (streams, tapes):
        run = make_layer(streams, Link(streams), PLAN, 0)
        run(kept)
        tapes.calls.clear()  # a checkpoint drops what forward saved
        streams.log.clear()
        kept.recomputes = True
        result = run(kept)
        assert streams.log == []
        backward(tapes, result)
        assert [what for _, what in streams.log] == SERIAL
    assert streams.races == []


@pytest.mark.parametrize("rank", in_turn([0, 1, 2], 3))
@pytest.mark.parametrize("plan", [PLAN, RELAYED], ids=["plain", "relays"])
def test_both_nano_batches_are_dispatched_before_either_waits(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, rank: int
) -> None:
    with gpu(monkeypatch) as (streams, tapes):
        link = Link(streams)
        first, second = (make_layer(streams, link, plan, rank, f" of {nano}") for nano in "AB")
        for _ in range(3):
            streams.log.clear()
            results = run_nano_batches(first, second, "cuda")
            given = [what for stream, what in streams.log if stream == COMPUTE]
            streams.log.clear()
            backward(tapes, *results)
            back = [what for stream, what in streams.log if stream == COMPUTE]
            for order, (early, late) in ((given, "AB"), (back, "BA")):
                assert order[:3] == ["launch dispatch", "launch dispatch", f"own tasks of {early}"]
                # The first nano-batch's return travels while the second one computes.
                assert order.index(f"arrived tasks of {early}") < order.index(
                    f"own tasks of {late}"
                )
                assert (
                    "wait return" not in order[: order.index(f"own tasks of {late}")]
                    or plan is RELAYED
                )
            del results
    assert streams.races == []


def test_a_layer_is_refused_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would silently replay one batch's plan for all other batches."""
    with gpu(monkeypatch) as (streams, _):
        run = make_layer(streams, Link(streams), Plan.make_local(LAYOUT), 0)
        run()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match="while a CUDA graph is captured"):
            run()


def test_missing_waits_and_early_frees_are_found_as_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imitated streams must report the races that these changes of the source cause."""

    def raced(change: Callable[[pytest.MonkeyPatch], None], plan: Plan) -> list[str]:
        with pytest.MonkeyPatch.context() as patch, gpu(patch) as (streams, tapes):
            change(patch)
            run = make_layer(streams, Link(streams), plan, 1)
            for _ in range(2):
                backward(tapes, *run_nano_batches(run, run, "cuda"))
        return streams.races

    def without_waits(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("gpu_streams.Flight.wait", lambda flight: None)

    def not_kept(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            Pending,
            "earlier_transfer",
            property(lambda pending: None, lambda pending, value: None),
            raising=False,
        )

    def without_order(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)

    assert any("reads what link may be using" in race for race in raced(without_waits, PLAN))
    assert any(
        "memory that was freed what link may be using" in race for race in raced(not_kept, RELAYED)
    )
    assert any("may be using" in race for race in raced(without_order, RELAYED))
