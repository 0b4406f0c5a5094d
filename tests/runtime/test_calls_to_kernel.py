"""The number of calls between the attention function and the first kernel, with a finished plan."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

import hf_distca
from handles import make_handle
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.kernels.cpu import CpuKernel


class ReachedError(Exception):
    """Raised by the first kernel."""


def list_package_calls(frame: FrameType | None) -> list[str]:
    """List the package's functions on the stack, innermost first."""
    names = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("hf_distca."):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_attention_reaches_the_kernel_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_distca.configure()
    module = torch.nn.Linear(1, 1).train()
    handle = make_handle(1, 50)
    q, k, v = (torch.randn(1, heads, 50, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = PackedDocuments((30, 20))
    calls: list[str] = []
    stack: list[str] = []

    def attend() -> None:
        distca_attention(module, q, k, v, handle, distca_documents=documents)

    def stop_at_kernel(*_: object) -> None:
        sys.setprofile(None)
        stack.extend(list_package_calls(sys._getframe(1)))
        raise ReachedError

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("hf_distca."):
            calls.append(frame.f_code.co_name)

    attend()
    monkeypatch.setattr(CpuKernel, "forward", stop_at_kernel)
    sys.setprofile(count)
    try:
        with pytest.raises(ReachedError):
            attend()
    finally:
        sys.setprofile(None)
    inner = stack[: stack.index("distca_attention") + 1]
    assert inner[-1] == "distca_attention"
    assert len(inner) + 1 <= 12, inner  # one more for the kernel
    functions = [name for name in calls if not name.startswith(("<", "__"))]
    assert len(functions) <= 40, functions
