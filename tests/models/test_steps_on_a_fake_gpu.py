"""Training steps of whole models on a fake GPU, in a separate process: see `fake_gpu_steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import fake_gpu_steps
import pytest
from fake_gpu_steps import Step, Way

import cuda_autograd
from fake_cuda import needs_cpu_build
from turns import in_turn

pytestmark = needs_cpu_build
HARDEST = Way(ping_pong=True, reentrant=False)
WAYS = {
    "one rank": Way(ranks=1),
    "one rank, checkpointing": Way(ranks=1, reentrant=False),
    "dealt": Way(),
    "dealt, checkpointing": Way(reentrant=False),
    "dealt, reentrant checkpointing": Way(reentrant=True),
    "ping-pong": Way(ping_pong=True),
    "ping-pong, checkpointing": HARDEST,
    "ping-pong, reentrant checkpointing": Way(ping_pong=True, reentrant=True),
    "ping-pong, checkpointing, autocast": HARDEST._replace(autocast=True),
}
# These families have a softcap, sinks and experts, global layers of width 512, and two kinds of
# rotary embeddings.
FAMILIES = ["gemma2", "gpt_oss", "gemma4_text", "gemma3_text"]
OTHERS = [
    "cohere2",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
]
KERNELS = {"gemma2": ["reference"], "gemma4_text": ["cuda", "efficient"]}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Callable[..., Any]]:
    """Give a function that runs others in a process with autograd on a fake GPU."""
    with cuda_autograd.process() as executor:
        yield lambda function, *args: executor.submit(function, *args).result(timeout=300)


def check(done: Step, way: Way) -> None:
    layers, halves = 2 * fake_gpu_steps.LAYERS, 1 + way.ping_pong
    assert done.wrong == []
    assert done.races == []
    assert done.waits == 0, "the meter must not wait"
    assert min(done.forward_operations, done.backward_operations) > 100 * fake_gpu_steps.LAYERS
    assert done.separate, "backward must run in a separate thread"
    # Checkpointing repeats neither attention nor exchanges.
    assert done.calls == layers * halves
    assert done.recomputed_calls == (0 if way.reentrant is None else done.calls)
    assert done.exchanges == (4 * done.calls if way.ranks > 1 else 0)
    assert done.kernel_calls == 2 * done.calls * way.ranks


@pytest.mark.parametrize("way", in_turn(WAYS, 16, ["ping-pong, checkpointing"]))
def test_step_stays_on_the_gpu_and_never_makes_the_host_wait(
    gpu: Callable[..., Any], way: str
) -> None:
    done = gpu(fake_gpu_steps.step, "llama", WAYS[way])
    check(done, WAYS[way])
    assert done.kernels == ["cuda"]


@pytest.mark.parametrize("family", in_turn([*FAMILIES, *OTHERS], 26))
def test_step_of_every_family_never_makes_the_host_wait(
    gpu: Callable[..., Any], family: str
) -> None:
    done = gpu(fake_gpu_steps.step, family, HARDEST)
    check(done, HARDEST)
    assert done.kernels == KERNELS.get(family, ["cuda"])
