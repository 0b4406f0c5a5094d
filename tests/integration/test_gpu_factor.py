"""The first cost model of a GPU: built-in rates times the factor of its kernel, on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import LayerPlanner
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPools

SHAPE = AttentionShape(32, 8, 128, 128, 2)
H100, A100, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"
OWN = CostModel.make_analytic(SHAPE, device_type="cpu")


def make_first_cost(
    rank: int,
    devices: list[str],
    kernels: list[str],
    flash: str | None = None,
    own: CostModel | None = None,
) -> CostModel:
    """Return the first cost model of a rank with this GPU, kernel and flash attention of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda _: devices[rank])
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: flash)
        kernel = SimpleNamespace(name=kernels[rank])
        patch.setattr(Session, "choose_kernel", lambda *_: kernel)
        hf_distca.configure(hf_distca.DistCAConfig(cost_model=own or "analytic", tile=256))
        query = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
        session = current_session()
        LayerPlanner(session).make_cost(
            PlanKey(SHAPE, "cuda", 4096),
            cast("torch.Tensor", query),
            AttentionGroup.find_or_create(timeout_seconds=30),
        )
        costs = session.planner.costs
        hf_distca.configure()
    return costs[SHAPE, "cuda"]


@pytest.mark.parametrize(
    ("devices", "kernels", "flash", "name"),
    [
        (
            [H100, "NVIDIA H200"],
            ["flash_attn_3", "kernels-community/flash-attn3"],
            None,
            "analytic H100, ",
        ),
        ([A100, A100], ["cuda", "flash_attn"], None, "analytic A100, "),
        ([A100, A100], ["cuda", "cuda"], "FA4", "analytic cuda"),
        ([H100, A100], ["flash_attn", "flash_attn"], None, "analytic cuda"),
        ([H100, H100], ["flash_attn_3", "flash_attn"], None, "analytic cuda"),
        ([L40S, L40S], ["flash_attn", "flash_attn"], None, "analytic cuda"),
    ],
)
def test_ranks_with_different_gpus_begin_with_the_same_cost_model(
    rank_pool: RankPools,
    devices: list[str],
    kernels: list[str],
    flash: str | None,
    name: str,
) -> None:
    first, second = rank_pool(2)(make_first_cost, devices, kernels, flash)
    assert first == second
    assert (first.tile, first.window) == (256, None)
    assert first.name.startswith(name)


def test_cost_model_from_the_settings_gets_no_factor() -> None:
    assert make_first_cost(0, [H100], ["flash_attn_3"], own=OWN) == OWN
