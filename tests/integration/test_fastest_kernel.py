"""What a session does with the kernel that was the fastest on rank 0:
tests/calibration/test_fastest.py has how it is found.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.integration import layer_planner as module
from hf_distca.integration.current_session import current_session
from hf_distca.integration.layer_planner import LayerPlanner
from hf_distca.integration.session import Session
from hf_distca.kernels import Scores
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape

SHAPE = AttentionShape(4, 2, 16, 16, 4)
QUERY = torch.zeros(1, 4, 3, 16)


@pytest.mark.parametrize(
    ("cost_model", "kernel", "device", "expected"),
    [
        ("calibrated", "auto", "cuda", "reference"),
        ("calibrated", "cpu", "cuda", "cpu"),  # named by the user
        ("calibrated", "auto", "cpu", "cpu"),  # where there is one kernel only
        ("analytic", "auto", "cuda", "cpu"),
    ],
)
def test_it_is_taken_and_calibrated(
    monkeypatch: pytest.MonkeyPatch, cost_model: Any, kernel: Any, device: str, expected: str
) -> None:
    calibrated: list[str] = []

    def calibrate(cost: Any, kernel: Any, *_: Any) -> Any:
        calibrated.append(kernel.name)
        return replace(cost, name="measured")

    monkeypatch.setattr(module, "calibrate", calibrate)
    monkeypatch.setattr(module, "find_fastest_kernel", lambda *_: "reference")
    hf_distca.configure(hf_distca.DistCAConfig(cost_model=cost_model, kernel=kernel))
    session = current_session()
    LayerPlanner(session).make_cost(PlanKey(SHAPE, device, None), QUERY, AttentionGroup())
    assert (
        session.choose_kernel(QUERY, AttentionShape(2, 1, 16, 16, 4), Scores(1.0)).name == expected
    )
    assert session.choose_kernel(QUERY, AttentionShape(2, 1, 16, 24, 4), Scores(1.0)).name == (
        "cpu" if kernel == "auto" else kernel
    ), "of this shape alone"
    assert calibrated == ([expected] if cost_model == "calibrated" else [])
    hf_distca.configure()


@pytest.mark.parametrize(
    ("cost_model", "device", "name"),
    [
        ("analytic", "NVIDIA H100 80GB HBM3", "profile h100_flash_attn_3"),
        ("analytic", "NVIDIA L40S", "analytic cuda"),
        ("a100_flash_attn_2", "NVIDIA H100 80GB HBM3", "profile a100_flash_attn_2"),
    ],
)
def test_a_gpu_begins_with_the_shipped_profile_of_its_kernel(
    monkeypatch: pytest.MonkeyPatch, cost_model: str, device: str, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    monkeypatch.setattr(Session, "choose_kernel", lambda *_: SimpleNamespace(name="flash_attn_3"))
    hf_distca.configure(hf_distca.DistCAConfig(cost_model=cost_model, tile=256))
    session, query = (
        current_session(),
        SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16),
    )
    shape = AttentionShape(32, 8, 128, 128, 2)
    LayerPlanner(session).make_cost(
        PlanKey(shape, "cuda", 4096), cast("torch.Tensor", query), AttentionGroup()
    )
    cost = session.planner.costs[shape, "cuda"]
    assert (cost.name, cost.tile, cost.window) == (name, 256, None)
