"""Profiles: what was fitted, kept as JSON, and the cost models made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from simulator.fits import FittedCost
from simulator.profiles import ExchangeRates, KernelRates, Profile

NARROW, WIDE, HALF = (
    KernelRates(
        "cpu",
        size,
        width,
        width,
        FittedCost(1e-6 * width, 1e9, np.inf, 1.75, 1e-5, 2e-5),
        FittedCost(0.0, 1e9, 1e10 * size),
    )
    for size, width in ((4, 64), (4, 128), (2, 64))
)
LINK = ExchangeRates(3e10, 1e-5, 8, {"median": 0.02})
PROFILE = Profile(
    "made up", "cpu", "a machine", "2026-11-22", {}, "a test", (NARROW, WIDE, HALF), LINK
)


def shape(head_dim: int, element_bytes: int = 4) -> AttentionShape:
    return AttentionShape(8, 2, head_dim, head_dim, element_bytes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(shape(64), NARROW), (shape(80), NARROW), (shape(256), WIDE), (shape(256, 2), HALF)],
)
def test_a_shape_gets_the_nearest_rates_of_its_element_size(
    asked: AttentionShape, expected: KernelRates
) -> None:
    cost = PROFILE.make_cost_model(asked, window=512)
    rates = cost.shape, cost.forward, cost.backward, cost.window
    assert rates == (asked, expected.forward, expected.backward, 512)
    assert (cost.exchange_bytes_per_second, cost.exchange_seconds, cost.tile) == (3e10, 1e-5, 128)
    assert cost.name == "profile made up"


def test_unmeasured_links_are_those_of_the_device_type() -> None:
    cost = replace(PROFILE, inside=None).make_cost_model(shape(64))
    built_in = CostModel.make_analytic(shape(64), device_type="cpu")
    assert cost.exchange_bytes_per_second == built_in.exchange_bytes_per_second
    between = replace(PROFILE, between=ExchangeRates(1e9, 1e-4)).make_cost_model(shape(64))
    assert (between.exchange_bytes_per_second, between.node_bytes_per_second) == (1e9, 3e10)


def test_a_profile_comes_back_from_json(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(PROFILE.to_json())
    assert Profile.from_json(PROFILE.to_json()) == Profile.load(path) == PROFILE
    data = json.loads(PROFILE.to_json())
    assert data["kernels"][0]["forward"]["flops_per_second"] is None
    for change in ({"format": 1}, {"kernels": []}, {"kernels": [{"kernel": "cpu"}]}, {"more": 1}):
        with pytest.raises(ConfigError, match="no profile in JSON"):
            Profile.from_json(json.dumps({**data, **change}))
    with pytest.raises(ConfigError, match=r"nowhere\.json: neither a profile in a file"):
        Profile.load(tmp_path / "nowhere.json")
