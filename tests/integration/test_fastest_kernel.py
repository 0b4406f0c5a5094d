"""What a session does with the kernel that was the fastest on rank 0: tests/calibration/test_fastest.py has how it is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.integration import session as module
from hf_distca.integration.session import current_session
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
    monkeypatch.setattr(module, "fastest", lambda *_: "reference")
    hf_distca.configure(hf_distca.DistCAConfig(cost_model=cost_model, kernel=kernel))
    session = current_session()
    session.learn_cost(PlanKey(SHAPE, device, None), QUERY, AttentionGroup())
    assert session.kernel(QUERY, (16, 16), Scores(1.0), 2).name == expected
    assert session.kernel(QUERY, (16, 24), Scores(1.0), 2).name == ("cpu" if kernel == "auto" else kernel), "of this shape alone"
    assert calibrated == ([expected] if cost_model == "calibrated" else [])
    hf_distca.configure()
