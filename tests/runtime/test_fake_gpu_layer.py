"""Operations that one layer launches on an imitated GPU. tests/models/test_steps_on_a_fake_gpu.py
checks devices, dtypes and waits in whole models.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

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
from recorded import Operations

pytestmark = needs_cpu_build
HEADS, KEY_HEADS, DIM = 4, 2, 64


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

        def layer(handle: MaskStandIn) -> tuple[Counter[str], Counter[str]]:
            with Operations() as forward:
                distca_attention(
                    layer_of_model,
                    *states,
                    handle,
                    distca_documents=PackedDocuments((60, 40)),
                    scaling=0.1,
                )
            with Operations() as backward:
                tape.backward(gradient)
            del forward.seen["aten.detach.default"]  # of outputs, for a possible recompute
            for operations in (forward, backward):
                del operations.seen["prim.device.default"]  # launches nothing
            return forward.seen, backward.seen

        gpu.launch(1.0)
        handle = make_handle(1, 100)
        first, _ = layer(handle)
        assert first["aten._to_copy.default"] == 1, (
            "rows and keys of whole documents share one tensor of bounds"
        )
        forward, backward = layer(handle)
        kernel = "aten._flash_attention_{}.default"
        moves = {"aten.permute.default": 1, "aten.transpose.int": 3, "aten.view.default": 4}
        assert forward == {kernel.format("forward"): 1, **moves}
        assert backward == {kernel.format("backward"): 1, "aten.permute.default": 1}
        assert (gpu.events, current_session().meter.kernel_calls) == (0, 4), (
            "kernels are timed only after a call of metrics()"
        )
        hf_distca.metrics()
        layer(make_handle(1, 100))
        assert gpu.events == 4
    hf_distca.configure()
