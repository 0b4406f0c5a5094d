"""Dynamo leaves alone what a half of a layer does inside attention, also after the halves have taken turns."""

from __future__ import annotations

import pytest
import torch

from hf_distca.runtime.pingpong import run_nano_batches, take_turns


def inner(x: torch.Tensor, traced: list[bool]) -> torch.Tensor:
    """Stands for what attention calls, like the wait for an exchange."""
    traced.append(torch.compiler.is_dynamo_compiling())
    return x + 1


@torch.compiler.disable
def attention(x: torch.Tensor, traced: list[bool]) -> torch.Tensor:
    take_turns()
    return inner(x, traced)


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def test_attention_is_not_compiled_after_a_turn() -> None:
    traced: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        first, second = run_nano_batches(lambda: attention(x, traced) * 2, lambda: attention(x, traced) * 3, "cpu")
        return first + second

    x = torch.ones(4)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    assert traced == [False] * 4
