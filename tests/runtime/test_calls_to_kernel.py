"""How many calls lie between the attention function and the first kernel in a layer whose plan is
there.
"""

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
    """The first kernel runs."""


def nested(frame: FrameType | None) -> list[str]:
    """Functions of the package that are entered one inside the other, the innermost one first."""
    names = []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("hf_distca."):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_the_kernel_is_few_calls_away(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_distca.configure()
    module, handle = (
        torch.nn.Linear(1, 1).train(),
        make_handle(1, 50),
    )
    q, k, v = (torch.randn(1, heads, 50, 16, requires_grad=True) for heads in (4, 2, 2))
    documents = PackedDocuments((30, 20))
    calls: list[str] = []
    stack: list[str] = []

    def attend() -> None:
        distca_attention(module, q, k, v, handle, distca_documents=documents)

    def reached(*_: object) -> None:
        sys.setprofile(None)
        stack.extend(nested(sys._getframe(1)))
        raise ReachedError

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("hf_distca."):
            calls.append(frame.f_code.co_name)

    attend()
    monkeypatch.setattr(CpuKernel, "forward", reached)
    sys.setprofile(count)
    try:
        with pytest.raises(ReachedError):
            attend()
    finally:
        sys.setprofile(None)
    inner = stack[: stack.index("distca_attention") + 1]
    assert inner[-1] == "distca_attention"
    assert len(inner) + 1 <= 12, inner  # with the kernel's own
    functions = [name for name in calls if not name.startswith(("<", "__"))]
    assert len(functions) <= 40, functions
