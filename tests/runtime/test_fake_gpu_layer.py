"""Operations that one layer launches on an imitated GPU. tests/models/test_steps_on_a_fake_gpu.py
checks devices, dtypes and waits in whole models.
"""

from __future__ import annotations

from typing import Any

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
from hf_distca.runtime import core_attention as module

pytestmark = needs_cpu_build
HEADS, KEY_HEADS, DIM = 4, 2, 64


class Launches(TorchDispatchMode):
    """Record the names of operations, except queries of a tensor's device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (name := function.overloadpacket.__name__) != "device":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_a_layer_launches_little_more_than_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain varlen attention needs three transposes, four views and the kernel. The layer also
    transposes log-sum-exps.
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
            # Outputs are detached for a possible recompute.
            return [name for name in forward.names if name != "detach"], backward.names

        gpu.launch(1.0)
        handle = make_handle(1, 100)
        first, _ = layer(handle)
        assert first.count("_to_copy") == 1, (
            "rows and keys of whole documents share one tensor of bounds"
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
            "kernels are timed only after a call of metrics()"
        )
        hf_distca.metrics()
        layer(make_handle(1, 100))
        assert gpu.events == 4
    hf_distca.configure()
