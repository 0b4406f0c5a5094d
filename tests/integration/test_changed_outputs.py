"""Models that change what attention returned, under activation checkpointing that takes it from the
first forward.
"""

from __future__ import annotations

import pytest
import torch
from test_parity import model_for, tokens_of

import hf_distca
from checkpointed import checkpoint_layers


def gradients(reentrant: bool | None, change: str) -> dict[str, torch.Tensor]:
    """Of a model that doubles the output of each layer's attention: in place, in a copy, or the
    first time only in place.
    """
    hf_distca.configure()
    model = model_for(2, "distca", torch.float64)
    if reentrant is not None:
        checkpoint_layers(model, use_reentrant=reentrant)
        model.enable_input_require_grads()

    def double(_: torch.nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        if change == "in place" or (
            change == "in place without gradients" and not torch.is_grad_enabled()
        ):
            return args[0].mul_(2)
        return args[0] * 2

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(double)
    model(tokens_of(0, 40)[None], use_cache=False).logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_changed_copies_are_exact(reentrant: bool) -> None:
    plain = gradients(None, "in a copy")
    for name, grad in gradients(reentrant, "in a copy").items():
        assert torch.allclose(grad, plain[name], rtol=1e-9), name


def test_a_change_in_place_that_nobody_else_would_see_is_refused() -> None:
    """In the forward without gradients of reentrant checkpointing autograd keeps no watch over
    o.
    """
    with pytest.raises(
        hf_distca.UnsupportedError,
        match="output of attention in LlamaAttention was changed in place",
    ):
        gradients(True, "in place without gradients")


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_other_changes_in_place_are_refused_by_someone(reentrant: bool | None) -> None:
    with pytest.raises((hf_distca.UnsupportedError, RuntimeError), match=r"in ?place"):
        gradients(reentrant, "in place")


def test_inference_mode_has_no_versions() -> None:
    hf_distca.configure()
    model = model_for(2, "distca", torch.float64)
    with torch.inference_mode():
        assert model(tokens_of(0, 10)[None]).logits.isfinite().all()
