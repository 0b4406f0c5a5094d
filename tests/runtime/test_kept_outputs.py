"""Outputs are kept only for a possible recompute: models take no more memory than under sdpa."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

import hf_distca
from live_bytes import LiveBytes
from tiny_runs import tiny_llama
from turns import in_turn

TOKENS, LAYERS = 512, 8
SMALL = 256  # bytes of anchors and losses


class Moved:
    """A saved tensor that was moved away, for example to host memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.values = tensor.dtype, tensor.detach().numpy().copy()

    def back(self) -> torch.Tensor:
        return torch.from_numpy(np.array(self.values))


def offloading() -> AbstractContextManager[None]:
    return saved_tensors_hooks(Moved, Moved.back)


def offloaded_checkpoint(
    function: Callable[..., Any], *args: Any, use_reentrant: bool, **kwargs: Any
) -> Any:
    with offloading():
        return checkpoint(partial(function, **kwargs), *args, use_reentrant=use_reentrant)


def freeze_all_but_the_last_layer(model: LlamaForCausalLM) -> None:
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


def train_all_layers(model: LlamaForCausalLM) -> None:
    """Change nothing."""


def offload(model: LlamaForCausalLM, *, use_reentrant: bool) -> None:
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = partial(
            offloaded_checkpoint, use_reentrant=use_reentrant
        )


def measure_live_bytes(
    implementation: str, switch: Callable[[LlamaForCausalLM], None], moved: bool
) -> tuple[int, int, list[float]]:
    """Return the bytes alive after a forward, their peak and the norms of the gradients."""
    model = tiny_llama(implementation, layers=LAYERS)
    switch(model)
    ids = torch.randint(0, 16, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    live = LiveBytes()
    with live:
        with offloading() if moved else nullcontext():
            loss = model.model(input_ids=ids, use_cache=False).last_hidden_state.square().mean()
        alive, peak = live.alive, live.take_peak()
        loss.backward()
    return alive, peak, [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("switch", "moved"),
    in_turn(
        [
            pytest.param(freeze_all_but_the_last_layer, False, id="frozen"),
            pytest.param(train_all_layers, True, id="offloading hooks"),
            pytest.param(partial(offload, use_reentrant=False), False, id="offloaded checkpoints"),
            pytest.param(
                partial(offload, use_reentrant=True), False, id="offloaded checkpoints, reentrant"
            ),
            pytest.param(train_all_layers, False, id="nothing"),
        ],
        5,
    ),
)
def test_a_forward_keeps_no_more_bytes_than_under_sdpa(
    switch: Callable[[LlamaForCausalLM], None], moved: bool
) -> None:
    hf_distca.configure()
    alive, peak, norms = measure_live_bytes("distca", switch, moved)
    expected_alive, expected_peak, expected_norms = measure_live_bytes("sdpa", switch, moved)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert alive <= 1.02 * expected_alive + SMALL, (alive, expected_alive)
    assert peak <= 1.02 * expected_peak + SMALL, (peak, expected_peak)
