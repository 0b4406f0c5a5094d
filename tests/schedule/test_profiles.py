"""Profiles: what was measured, kept as JSON, and the cost models made of it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost
from hf_distca.schedule.profiles import ExchangeRates, KernelRates, Profile

NARROW, WIDE, HALF = (
    KernelRates(
        "cpu",
        size,
        width,
        width,
        KernelCost(1e-6 * width, 1e9, np.inf),
        KernelCost(0.0, 1e9, 1e10 * size),
    )
    for size, width in ((4, 64), (4, 128), (2, 64))
)
PROFILE = Profile(
    "made up",
    "cpu",
    "a machine",
    "2026-11-22",
    {"torch": "2.13.0"},
    "hf-distca profile",
    (NARROW, WIDE, HALF),
    inside=ExchangeRates(3e10, 1e-5, 8, {"median": 0.02}),
)


def shape(head_dim: int, element_bytes: int = 4, heads: int = 8) -> AttentionShape:
    return AttentionShape(heads, 2, head_dim, head_dim, element_bytes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(shape(64), NARROW), (shape(80), NARROW), (shape(256), WIDE), (shape(256, 2), HALF)],
)
def test_a_shape_gets_the_nearest_rates_of_its_element_size(
    asked: AttentionShape, expected: KernelRates
) -> None:
    cost = PROFILE.make_cost_model(asked, window=512)
    assert (cost.shape, cost.forward, cost.backward, cost.window) == (
        asked,
        expected.forward,
        expected.backward,
        512,
    )
    assert (cost.exchange_bytes_per_second, cost.exchange_seconds, cost.tile) == (3e10, 1e-5, 128)
    assert cost.name == "profile made up"


def test_unmeasured_links_are_those_of_the_device_type() -> None:
    """Links that were not measured are those of the device type."""
    cost = replace(PROFILE, inside=None).make_cost_model(shape(64))
    assert (
        cost.exchange_bytes_per_second
        == CostModel.make_analytic(shape(64), device_type="cpu").exchange_bytes_per_second
    )
    between = replace(PROFILE, between=ExchangeRates(1e9, 1e-4)).make_cost_model(shape(64))
    assert (between.exchange_bytes_per_second, between.node_bytes_per_second) == (1e9, 3e10)
    assert (
        PROFILE.make_cost_model(shape(64)).node_bytes_per_second
        is cost.node_bytes_per_second
        is None
    )


def test_a_profile_comes_back_from_json_and_a_pickle(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(PROFILE.to_json())
    for back in (
        Profile.from_json(PROFILE.to_json()),
        Profile.load(path),
        pickle.loads(pickle.dumps(PROFILE)),
    ):
        assert back == PROFILE
        assert hash(back) == hash(PROFILE)
    assert json.loads(PROFILE.to_json())["kernels"][0]["forward"]["flops_per_second"] is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"kernels": []},
        {"kernels": [{"kernel": "cpu"}]},
        {"surprise": 1},
        {"inside": {"bytes_per_second": 0.0, "seconds": 0.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_profile_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"profile"):
        Profile.from_json(json.dumps({**json.loads(PROFILE.to_json()), **change}))


@pytest.mark.parametrize(
    "name", ["name", "device", "processor", "date", "made_by", "versions", "kernel", "errors"]
)
@pytest.mark.parametrize("value", [None, 5, [1], True, {"a": []}], ids=repr)
def test_a_field_of_another_type_is_refused(name: str, value: object) -> None:
    data = json.loads(PROFILE.to_json())
    (data if name in data else data["kernels"][0])[name] = value
    with pytest.raises(ConfigError, match="is no profile"):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "rates", [{"task_seconds": -1.0}, {"bytes_per_second": 0.0}, {"flops_per_second": -2.0}]
)
def test_rates_that_no_kernel_has_are_refused(rates: dict[str, float]) -> None:
    data = json.loads(PROFILE.to_json())
    data["kernels"][0]["forward"].update(rates)
    with pytest.raises(ConfigError, match="passes positive and finite"):
        Profile.from_json(json.dumps(data))


def test_neither_a_name_nor_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: neither a profile in a file"):
        Profile.load(tmp_path / "nowhere.json")
