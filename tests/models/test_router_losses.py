"""Mixtures of experts: losses and gradients of routers are those without distca."""

from __future__ import annotations

import pytest
import torch
from compare import documents, quiet
from tiny import build

import hf_distca
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import settings

# The implementation to compare with. gpt-oss has no sdpa, and with eager its packed documents leak,
# so it gets one document a row.
TYPES = {"mixtral": "sdpa", "qwen3_moe": "sdpa", "gpt_oss": "eager", "deepseek_v3": "sdpa"}
PACKED = {0: (70,), 1: (9, 1, 7)}
WHOLE = {0: (70,), 1: (17,)}


def step(model_type: str, implementation: str, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Compute the loss, the auxiliary loss (if any), and the gradients of routers."""
    with quiet():
        model = build(model_type, implementation, torch.float32)
    has_loss = hasattr(model, "router_aux_loss_coef")
    if has_loss:
        model.router_aux_loss_coef = 10.0  # the auxiliary loss dominates the gradient
    ids = torch.cat(documents(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    extra = {"output_router_logits": True} if has_loss else {}
    out = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False, **extra)
    out.loss.backward()
    routers = {
        name: p.grad
        for name, p in model.named_parameters()
        if name.endswith(("gate.weight", "router.weight"))
    }
    return {
        "loss": out.loss.detach(),
        **({"aux": out.aux_loss.detach()} if has_loss else {}),
        **routers,
    }


def compare(rank: int, model_type: str) -> tuple[dict[str, float], int]:
    """Return relative differences on this rank, and the bytes that it sent."""
    hf_distca.configure(settings())
    other = TYPES[model_type]
    lengths = (PACKED if other == "sdpa" else WHOLE)[rank]
    got, want = (step(model_type, implementation, lengths) for implementation in ("distca", other))
    differences = {
        name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want
    }
    return differences, current_session().meter.sent_bytes


@pytest.mark.parametrize("model_type", TYPES)
def test_router_losses_and_gradients_are_unchanged_on_two_ranks(
    model_type: str, rank_pool: RankPools
) -> None:
    for differences, sent in rank_pool(2)(compare, model_type):
        assert sent, "nothing was exchanged, so nothing was tested"
        assert ("aux" in differences) == (model_type != "deepseek_v3")
        assert any(name.endswith("weight") for name in differences)
        assert max(differences.values()) <= 1e-5, differences
