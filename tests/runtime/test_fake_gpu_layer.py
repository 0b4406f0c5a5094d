"""A layer on a GPU that is not there: devices and dtypes of what travels, is pooled, served and
summed; no copy to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_distca
from device_events import Device
from fake_cuda import CUDA, Tape, fake_cuda, needs_cpu_build
from handles import make_handle
from hf_distca import kernels
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.kernels import ScoreOptions
from hf_distca.kernels.flash import CUDA as CUDA_KERNEL
from hf_distca.runtime import core_attention as module
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan
from host_syncs import NoHostSyncs

pytestmark = needs_cpu_build
HEADS, KEY_HEADS, DIM = 4, 2, 64


@dataclass
class Peers:
    """A channel to ranks whose messages are there at once, of the sizes that are awaited."""

    messages: list[tuple[int, int]] = field(default_factory=list)
    is_gloo: ClassVar[bool] = False

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
        name: str | None = None,
        expected: None = None,
    ) -> Peers:
        for message, sizes in ((received, receive_bytes), (sent, send_bytes)):
            assert (message.device, message.dtype) == (CUDA, torch.uint8)
            assert message.shape == (sum(sizes.values()),)
            assert all(size % 16 == 0 for size in sizes.values()), (
                "what follows would not be aligned"
            )
        self.messages.append((sum(receive_bytes.values()), sum(send_bytes.values())))
        return self

    def wait(self) -> None:
        pass

    def begin_backward(self) -> None:
        pass


def leaves(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((tokens, HEADS, DIM), (tokens, KEY_HEADS, DIM), (tokens, KEY_HEADS, DIM))
    return [torch.empty(shape, dtype=dtype, device=CUDA) for shape in shapes]


TASKS = [
    CATask(*one)
    for one in ((0, 0, 300, 0, 0), (0, 300, 500, 0, 1), (1, 0, 77, 1, 0), (2, 0, 123, 1, 1))
]
SPANNING = [CATask(*one) for one in ((0, 0, 100, 0, 0), (0, 400, 500, 0, 1), (0, 100, 400, 1, 1))]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "spans"),
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
def test_a_layer_stays_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rank: int, spans: bool
) -> None:
    layout = (
        Layout.from_segments([[(0, 0, 100), (0, 400, 100)], [(0, 100, 300)]])
        if spans
        else Layout.from_lengths([[500], [77, 123]])
    )
    plan = Plan.from_tasks(layout, SPANNING if spans else TASKS)
    route = Route.build(plan, rank)
    tokens = int(layout.query_tokens[rank])
    gpu, meter, peers, tape = Device(), Meter(), Peers(), Tape()
    monkeypatch.setattr(module, "_apply", tape.apply)
    with fake_cuda(), gpu.installed():
        group = AttentionGroup((0, 1), rank, data=peers)  # type: ignore[arg-type]
        server = AttentionServer(CUDA_KERNEL, ScoreOptions(DIM**-0.5), meter)
        q, k, v = leaves(tokens, dtype)
        sink = torch.empty(HEADS, dtype=torch.float32, device=CUDA)

        def layer() -> list[torch.Tensor | None]:
            out = compute_core_attention(
                Inputs(q, k, v, sink_H=sink), LayerExchange(route, group, server)
            )
            after, _, before = tape.backward(torch.empty_like(out))
            return [out, *before[1:4], after[5]]

        gpu.launch(1.0)
        # The first call for a plan makes the index tensors.
        for tensor, like in zip(layer(), (q, q, k, v, sink), strict=True):
            assert tensor is not None
            assert (tensor.device, tensor.dtype, tensor.shape) == (CUDA, like.dtype, like.shape)
        with NoHostSyncs() as mode:
            layer()
        assert mode.operations > 20
        assert meter.dispatches == meter.returns == 2 * 2
        assert len(peers.messages) == meter.dispatches + meter.returns
        assert not meter.is_finished, (
            "its kernels are timed by events of the device, which has not worked yet"
        )
        assert gpu.waits == [], "the meter does not wait"
        gpu.finish()
        assert meter.is_finished


def test_the_attention_function_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a model's layout of q, k and v to its layout of outputs, with padding: two layers of one
    micro-batch.
    """
    monkeypatch.setattr(kernels, "mismatch_reason", lambda *case: None)
    hf_distca.configure(hf_distca.DistCAConfig(kernel="cuda"))
    layer_of_model, gpu, tape = torch.nn.Linear(1, 1).train(), Device(), Tape()
    monkeypatch.setattr(module, "_apply", tape.apply)
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    with fake_cuda() as pinned, gpu.installed():
        q, k, v = (
            torch.empty(2, heads, 50, DIM, **made) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        )
        handle = make_handle(2, 50)
        arguments = {
            "distca_documents": PackedDocuments((60, 40)),
            "scaling": 0.1,
            "sliding_window": 13,
        }

        def layer() -> None:
            out, _ = distca_attention(layer_of_model, q, k, v, handle, **arguments)  # type: ignore[arg-type]
            assert (tuple(out.shape), out.dtype, out.device) == (
                (2, 50, HEADS, DIM),
                torch.bfloat16,
                CUDA,
            )
            ((_, _, *grads, _, _, _),) = tape.backward(out.flatten(0, 1))
            for x, grad in zip((q, k, v), grads, strict=True):
                assert grad is not None
                assert (grad.shape, grad.dtype, grad.device) == (
                    (100, x.shape[1], DIM),
                    torch.bfloat16,
                    CUDA,
                )

        layer()
        first = len(pinned)
        with NoHostSyncs():
            layer()
        assert len(pinned) == first > 0
    assert current_session().meter.kernel_calls == 4
    assert gpu.waits == []
    hf_distca.configure()


class Launches(TorchDispatchMode):
    """Counts operations, without those that only ask a tensor for its device.

    Attributes:
        names: of the operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := function.overloadpacket.__name__) != "device":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_a_layer_alone_launches_what_plain_attention_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain varlen attention has three transposes, four views and the kernel; log-sum-exps are
    transposed besides.
    """
    monkeypatch.setattr(kernels, "mismatch_reason", lambda *case: None)
    hf_distca.configure(hf_distca.DistCAConfig(kernel="cuda"))
    layer_of_model, gpu, tape = torch.nn.Linear(1, 1).train(), Device(), Tape()
    monkeypatch.setattr(module, "_apply", tape.apply)
    shape = {"dtype": torch.bfloat16, "device": CUDA}
    with fake_cuda(), gpu.installed():
        states = [
            torch.empty(1, 100, heads, DIM, **shape).transpose(1, 2)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)
        ]  # type: ignore[call-overload]
        gradient = torch.empty(100, HEADS, DIM, **shape)  # type: ignore[call-overload]

        def layer(handle: MaskStandIn) -> tuple[list[str], list[str]]:
            with Launches() as forward:
                distca_attention(
                    layer_of_model,
                    *states,
                    handle,
                    distca_documents=PackedDocuments((60, 40)),
                    scaling=0.1,
                )
            with Launches() as backward:
                tape.backward(gradient)
            # Of outputs that a recompute may need.
            return [name for name in forward.names if name != "detach"], backward.names

        gpu.launch(1.0)
        handle = make_handle(1, 100)
        first, _ = layer(handle)
        assert first.count("_to_copy") == 1, (
            "rows and keys of whole documents end at the same places"
        )
        forward, backward = layer(handle)
        assert sorted(forward) == [
            "_flash_attention_forward",
            "permute",
            *["transpose"] * 3,
            *["view"] * 4,
        ]
        assert sorted(backward) == ["_flash_attention_backward", "permute"]
        assert (gpu.events, current_session().meter.kernel_calls) == (0, 4), (
            "nobody has asked for times"
        )
        hf_distca.metrics()
        layer(make_handle(1, 100))
        assert gpu.events == 4
    hf_distca.configure()
