"""Models that change the output of attention, under checkpointing that reuses the output of the
first forward.
"""

from __future__ import annotations

import pytest
import torch
from test_parity import build_model, draw_tokens

import hf_distca
from checkpointed import checkpoint_layers


def compute_gradients(reentrant: bool | None, change: str) -> dict[str, torch.Tensor]:
    """Train a model that doubles the output of each layer's attention; return its gradients.

    The change is in place, in a copy, or in place only without gradients.
    """
    hf_distca.configure()
    model = build_model(2, "distca", torch.float64)
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
    model(draw_tokens(0, 40)[None], use_cache=False).logits.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [True, False])
def test_doubling_a_copy_of_the_output_is_exact_under_checkpointing(reentrant: bool) -> None:
    plain = compute_gradients(None, "in a copy")
    for name, grad in compute_gradients(reentrant, "in a copy").items():
        assert torch.allclose(grad, plain[name], rtol=1e-9), name


def test_output_changed_in_place_without_gradients_is_refused() -> None:
    """In reentrant checkpointing, autograd does not watch the output of the first forward."""
    with pytest.raises(
        hf_distca.UnsupportedError,
        match="output of attention in LlamaAttention was changed in place",
    ):
        compute_gradients(True, "in place without gradients")


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_output_changed_in_place_is_refused_by_distca_or_autograd(reentrant: bool | None) -> None:
    with pytest.raises((hf_distca.UnsupportedError, RuntimeError), match=r"in ?place"):
        compute_gradients(reentrant, "in place")


def test_forward_in_inference_mode_runs_without_tensor_versions() -> None:
    hf_distca.configure()
    model = build_model(2, "distca", torch.float64)
    with torch.inference_mode():
        assert model(draw_tokens(0, 10)[None]).logits.isfinite().all()
