"""Dynamo does not compile the inside of attention in a half of a layer, even after the halves have
taken turns.
"""

from __future__ import annotations

import pytest
import torch

import hf_distca
from hf_distca.runtime.pingpong import run_nano_batches, yield_to_other_nano_batch
from ranks import RankPools
from tiny_runs import rows, settings, tiny_llama


def inner(x: torch.Tensor, traced: list[bool]) -> torch.Tensor:
    """Stand for the calls inside attention, such as the wait for an exchange."""
    traced.append(torch.compiler.is_dynamo_compiling())
    return x + 1


@torch.compiler.disable
def attention(x: torch.Tensor, traced: list[bool]) -> torch.Tensor:
    yield_to_other_nano_batch()
    return inner(x, traced)


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def test_attention_stays_uncompiled_after_the_halves_take_turns() -> None:
    traced: list[bool] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        first, second = run_nano_batches(
            lambda: attention(x, traced) * 2, lambda: attention(x, traced) * 3, "cpu"
        )
        return first + second

    x = torch.ones(4)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
    assert traced == [False] * 4


def run_two_forwards(rank: int) -> list[float]:
    """Return the loss of a compiled model and of the same model uncompiled. The timeout is that of
    the world.
    """
    hf_distca.configure(settings(ping_pong=True, timeout_seconds=None))
    model = tiny_llama("distca")
    torch._dynamo.reset()
    batch = hf_distca.PackingCollator()(rows(2)[rank : rank + 1])
    compiled = torch.compile(model, backend="eager")(**batch, use_cache=False)  # makes the group
    return [compiled.loss.item(), model(**batch, use_cache=False).loss.item()]


@pytest.mark.slow
def test_compiled_layer_makes_the_attention_group(rank_pool: RankPools) -> None:
    for compiled, plain in rank_pool(2)(run_two_forwards):
        assert compiled == pytest.approx(plain, rel=1e-6)
