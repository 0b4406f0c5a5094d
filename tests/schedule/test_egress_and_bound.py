"""The busiest sender, and plans under a bound of transient bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, imbalance, summarize
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.waves import TransientBytes, Waves

SHAPE = AttentionShape(query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2)
CUDA = CostModel.analytic(SHAPE, device_type="cuda")
PAIRS = CostModel.pairs(SHAPE)


@pytest.mark.parametrize("ranks", [64, 512])
@pytest.mark.parametrize(("longest", "slowest"), [(2**18, 0.3), (2**20, 0.15)])
def test_one_long_document_is_not_sent_to_everyone(ranks: int, longest: int, slowest: float) -> None:
    layout = Layout.from_lengths([[longest], *([[8192] * (longest // 65536)] * (ranks - 1))])
    # A bound, as large as it may be, rules relays out.
    plan = balance(layout, CUDA, DistCAConfig(max_transient_bytes=2**50, head_groups=1))
    summary = summarize(plan, CUDA)
    # Sent to all ranks, its keys take longer than the attention that is saved; to a few, home and servers end early.
    assert summary.slowest_seconds_after < slowest * summary.slowest_seconds_before
    assert summary.moved_tasks < 32
    # With relays nobody sends its keys much more than once, and they may go to more.
    relayed = summarize(balance(layout, CUDA, DistCAConfig()), CUDA)
    assert relayed.slowest_seconds_after < 0.8 * summary.slowest_seconds_after
    assert relayed.moved_tasks > 64
    assert relayed.max_sent_key_tokens < 2 * longest


@pytest.mark.parametrize("window", [None, 4096])
def test_moved_slices_fit_the_bound(window: int | None) -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16, [1024] * 64, [32768, 16384, 8192, 8192]])
    cost = replace(PAIRS, window=window)
    each = TransientBytes.of(SHAPE)
    bound = 8192 * each.query + 8192 * each.key
    config = DistCAConfig(max_transient_bytes=bound)
    plan = balance(layout, cost, config)
    waves = Waves.of(plan, SHAPE, config.tile, bound)
    assert plan.moved
    assert waves.bytes is not None
    assert waves.bytes.max() <= bound
    assert waves.count == Waves.of(plan, SHAPE, config.tile, bound).count
    before, after = (summarize(p, cost) for p in (balance(layout, cost, DistCAConfig(balance=False)), plan))
    assert after.seconds_imbalance_after < before.seconds_imbalance_after


def test_documents_that_do_not_fit_are_split_by_heads_first() -> None:
    layout = Layout.from_segments([[(0, 0, 32768)], [(0, 32768, 32768)], [(1, 0, 32768)]])
    plan, each = Plan.local(layout), TransientBytes.of(SHAPE)
    bound = (32768 * each.query + 65536 * each.key) // 4
    rows, heads = Waves.of(plan, SHAPE, 128, bound), Waves.of(plan, SHAPE, 128, bound, 8)
    assert heads.plan.layout.groups == 4
    assert heads.bytes is not None
    assert heads.bytes.max() <= bound
    whole, by_rows, by_heads = (PlanLoad(plan, CUDA, waves).exchange_bytes[0].sum() for waves in (None, rows, heads))
    # Rows that travel by themselves get their keys again and again, heads have their own.
    assert by_heads == whole
    assert by_rows > 1.9 * whole
    # Of a plan that has split documents already, the others are split alike.
    again = Waves.of(heads.plan, SHAPE, 128, bound // 4, 8).plan.layout
    assert again.groups == 4
    assert set(again.document.tolist()) == {1, 2, 3, 4, 5}


def test_keys_that_are_more_than_the_bound_do_not_make_each_tile_a_wave() -> None:
    layout = Layout.from_segments([[(0, 0, 32768)], [(0, 32768, 32768)]])
    waves = Waves.of(Plan.local(layout), SHAPE, 128, 1, 1)
    assert waves.count <= 8
    assert waves.bytes is not None
    assert waves.bytes.max() <= 2.01 * 65536 * TransientBytes.of(SHAPE).key + 65536 * TransientBytes.of(SHAPE).sent_key


def test_nothing_moves_where_not_even_a_tile_fits() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    each = TransientBytes.of(SHAPE)
    assert not balance(layout, PAIRS, DistCAConfig(max_transient_bytes=128 * each.query)).moved


def test_a_bound_that_is_large_enough_changes_nothing() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    free = balance(layout, PAIRS, DistCAConfig())
    assert balance(layout, PAIRS, DistCAConfig(max_transient_bytes=2**40)).digest == free.digest
    assert Waves.of(free, SHAPE, 128, 2**40).count == 1
    assert imbalance(Waves.of(free, SHAPE, 128, 2**40).bytes.astype(float)) >= 1


def test_a_bound_is_a_positive_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match="max_transient_bytes=0"):
        DistCAConfig(max_transient_bytes=0)
