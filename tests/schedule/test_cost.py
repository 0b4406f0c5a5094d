from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CPU, CUDA, PAIRS, SHAPE, make_local_load

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import (
    AttentionShape,
    CostModel,
    MarginalCost,
    count_causal_pairs,
)
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.slice_cost import estimate_slice_seconds

PASSES = replace(CUDA, name="rows move again", backward=replace(CUDA.backward, row_passes=1.75))
MODELS = [PAIRS, CPU, CUDA, PASSES]


@settings(max_examples=200)
@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 400))
def test_work_with_a_window_equals_work_of_a_banded_mask(
    start: int, rows: int, window: int
) -> None:
    query, key = np.arange(start, start + rows)[:, None], np.arange(start + rows)[None, :]
    assert count_causal_pairs(rows, start + rows) == (key <= query).sum()
    band = (key <= query) & (key > query - window)
    assert count_causal_pairs(rows, start + rows, window) == band.sum()

    cost = replace(CostModel.make_analytic(SHAPE, tile=1), window=window)
    forward, backward = cost.count_work(rows, start + rows)[:, 0]
    assert forward.tolist() == [
        1,
        rows * (SHAPE.query_bytes + SHAPE.output_bytes),
        SHAPE.pair_flops * band.sum(),
    ]
    # q, o and do are read, and dq is written. For every query head, k and v are read; dk and dv are
    # written, and then read for their sum.
    read, width = np.count_nonzero(band.any(axis=0)), 32 * 128 * 2
    assert backward.tolist() == [
        1,
        width * (4 * rows + 6 * read),
        2.5 * SHAPE.pair_flops * band.sum(),
    ]
    alone = replace(cost, shape=replace(SHAPE, key_value_heads=32)).count_work(rows, start + rows)[
        1, 0, 1
    ]
    assert alone == width * 4 * (rows + read), (
        "gradients of keys that no heads share are written once"
    )
    assert replace(PASSES, tile=1, window=window).count_work(rows, start + rows)[
        1, 0, 1
    ] == width * (7 * rows + 6 * read)


@given(st.integers(0, 20), st.integers(1, 300))
def test_work_is_counted_in_whole_tiles(tiles_before: int, rows: int) -> None:
    tile, start = 16, 16 * tiles_before
    query, key = np.arange(start, start + rows)[:, None], np.arange(start + rows + tile)[None, :]
    computed = int((key // tile <= query // tile).sum())
    flops = (
        CostModel.make_analytic(SHAPE, tile=tile).count_work(rows, start + rows)[0, 0, 2]
        / SHAPE.pair_flops
    )
    if rows % tile == 0:
        assert flops == computed
    else:
        assert flops >= count_causal_pairs(rows, start + rows) * (-(-rows // tile) * tile / rows)


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_window_as_long_as_the_document_changes_no_pair_count(start: int, rows: int) -> None:
    assert count_causal_pairs(rows, start + rows, start + rows) == count_causal_pairs(
        rows, start + rows
    )


@pytest.mark.parametrize("window", [0, -1])
def test_cost_model_with_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match=f"window={window}"):
        replace(PAIRS, window=window)


def test_pairs_model_takes_one_second_for_two_to_the_30_pairs() -> None:
    rows, keys = np.array([7, 4096, 2**15]), np.array([7, 9000, 2**17])
    assert MODELS[0].estimate_seconds(rows, keys) == pytest.approx(
        count_causal_pairs(rows, keys) / 2**30
    )
    assert MODELS[0].key_seconds == 0


def test_attention_shape_counts_the_bytes_of_a_moved_token() -> None:
    assert (SHAPE.query_bytes, SHAPE.output_bytes, SHAPE.key_value_bytes, SHAPE.lse_bytes) == (
        8192,
        8192,
        4096,
        128,
    )
    assert SHAPE.moved_query_bytes == 3 * 8192 + 3 * 8192 + 2 * 128
    assert SHAPE.moved_key_bytes == 3 * 4096


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@given(start=st.integers(0, 10**5), rows=st.integers(1, 10**4), more=st.integers(1, 10**4))
def test_more_rows_and_more_keys_never_cost_less(
    model: CostModel, start: int, rows: int, more: int
) -> None:
    for window in (None, 1, 3000):
        cost = replace(model, window=window)
        base = cost.estimate_seconds(rows, start + rows) * (1 - 1e-12)
        assert cost.estimate_seconds(rows + more, start + rows + more) >= base
        assert cost.estimate_seconds(rows, start + rows + more) >= base


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=200)
@given(
    start=st.integers(0, 10**6),
    rows=st.integers(1, 10**5),
    window=st.none() | st.integers(1, 10**5),
)
def test_estimate_of_a_slice_equals_that_of_the_cost_model(
    model: CostModel, start: int, rows: int, window: int | None
) -> None:
    cost = replace(model, window=window)
    seconds = estimate_slice_seconds(MarginalCost.from_cost_model(cost), 1.0, start, start + rows)
    assert seconds == pytest.approx(cost.estimate_seconds(rows, start + rows)[0], rel=1e-12)


def test_one_row_takes_about_as_long_as_a_tile_of_rows() -> None:
    model = CostModel.make_analytic(SHAPE, tile=128)
    assert model.estimate_seconds(1, 10**5) > 0.9 * model.estimate_seconds(128, 10**5)


def test_one_long_document_costs_more_than_short_ones_of_equal_tokens() -> None:
    seconds = make_local_load(
        Layout.from_lengths([[65536], [4096] * 16, []]), PAIRS
    ).compute_seconds
    assert seconds[0] / seconds[1] == pytest.approx(16, rel=1e-3)
    assert seconds[2] == 0


def test_ranks_without_tokens_take_no_seconds() -> None:
    seconds = make_local_load(Layout.from_lengths([[], []]), CUDA).compute_seconds
    assert seconds.tolist() == [0.0, 0.0]
    assert seconds.dtype == np.float64


@pytest.mark.parametrize("values", [(0, 1, 1, 1, 1), (3, 2, 1, 1, 1), (4, 2, -1, 1, 1)])
def test_invalid_attention_shapes_are_refused(values: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=f"query_heads={values[0]}"):
        AttentionShape(*values)


@pytest.mark.parametrize(
    "model",
    [*MODELS, replace(MODELS[1], window=300)],
    ids=lambda model: f"{model.name}, {model.window}",
)
def test_cost_model_survives_a_json_round_trip(model: CostModel) -> None:
    read = CostModel.from_json(model.to_json())
    assert read == model
    assert read.name == model.name
    assert (
        read.estimate_seconds([1, 500], [1, 900]) == model.estimate_seconds([1, 500], [1, 900])
    ).all()


def test_scaled_model_multiplies_kernel_and_exchange_seconds() -> None:
    cost = replace(CUDA, exchange_seconds=1e-4, peer_seconds=1e-6)
    plan = balance(Layout.from_lengths([[65536], [1024], [1024], [1024]]), cost, DistCAConfig())
    assert plan.moved
    load, scaled = PlanLoad(plan, cost), cost.scale(kernel=2.0, exchange=3.0)
    assert PlanLoad(plan, scaled).compute_seconds == pytest.approx(2 * load.compute_seconds)
    for nodes in (Ranks(), Ranks(per_node=2)):
        assert PlanLoad(plan, scaled, ranks=nodes).exchange_seconds == pytest.approx(
            3 * PlanLoad(plan, cost, ranks=nodes).exchange_seconds
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("forward"),
        lambda data: data["forward"].update(flops_per_second=-1.0),
        lambda data: data["backward"].update(task_seconds=None),
        lambda data: data["backward"].update(row_passes=0.0),
        lambda data: data["forward"].update(row_passes=None),
        lambda data: data["shape"].update(query_heads=0),
        lambda data: data.update(exchange_bytes_per_second="fast"),
        lambda data: data.update(tile=0),
        lambda data: data.update(speed=3),
        lambda data: data["forward"].update(flops_per_second=10**400),
        lambda data: data["forward"].update(flops_per_second=math.nan),
        lambda data: data["backward"].update(call_seconds=0.0),
        lambda data: data.update(peer_seconds=math.nan),
        lambda data: data.update(exchange_seconds=-1.0),
    ],
)
def test_json_that_is_no_cost_model_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(MODELS[0].to_json())
    change(data)
    with pytest.raises(ConfigError, match="no cost model"):
        CostModel.from_json(json.dumps(data))
    with pytest.raises(ConfigError, match="no cost model"):
        CostModel.from_json("[1]")
    for text in ("[" * 10**5, None):
        with pytest.raises(ConfigError, match="no cost model"):
            CostModel.from_json(text)
