"""The busiest sender, and plans under a bound of transient bytes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, compute_imbalance, summarize_plan
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.waves import TransientBytes, Waves

SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
CUDA = CostModel.make_analytic(SHAPE, device_type="cuda")
PAIRS = CostModel.make_of_pairs(SHAPE)
EACH = TransientBytes.from_shape(SHAPE)
# What one row takes with one key.
LEAST = EACH.query + EACH.key


def interleaved(documents: int, length: int, ranks: int) -> Layout:
    """Documents that lie head and tail over all ranks."""
    part = length // (2 * ranks)
    places = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    return Layout.from_segments(
        [[(d, p * part, part) for d in range(documents) for p in pair] for pair in places]
    )


# Layouts, windows and bounds: keys of a window that nearly fill the bound, and rows of a long
# document.
MANY_WAVES = [
    (interleaved(2, 2**21, 2), 4096, 2**26),
    (interleaved(1, 2**22, 4), None, LEAST),
]


@pytest.mark.parametrize("ranks", [64, 512])
@pytest.mark.parametrize(("longest", "slowest"), [(2**18, 0.3), (2**20, 0.15)])
def test_one_long_document_is_not_sent_to_everyone(
    ranks: int, longest: int, slowest: float
) -> None:
    layout = Layout.from_lengths([[longest], *([[8192] * (longest // 65536)] * (ranks - 1))])
    # A bound, as large as it may be, rules relays out.
    plan = balance(layout, CUDA, DistCAConfig(max_transient_bytes=2**50, head_groups=1))
    summary = summarize_plan(plan, CUDA)
    # Sent to all ranks, its keys take longer than the attention that is saved; to a few, home and
    # servers end early.
    assert summary["slowest_seconds_after"] < slowest * summary["slowest_seconds_before"]
    assert summary["moved_tasks"] < 32
    # With relays nobody sends its keys much more than once, and they may go to more.
    relayed = summarize_plan(balance(layout, CUDA, DistCAConfig()), CUDA)
    assert relayed["slowest_seconds_after"] < 0.8 * summary["slowest_seconds_after"]
    assert relayed["moved_tasks"] >= 2 * summary["moved_tasks"]
    assert relayed["max_sent_key_tokens"] < 2 * longest


@pytest.mark.parametrize("window", [None, 4096])
def test_moved_slices_fit_the_bound(window: int | None) -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16, [1024] * 64, [32768, 16384, 8192, 8192]])
    cost = replace(PAIRS, window=window)
    each = TransientBytes.from_shape(SHAPE)
    bound = 8192 * each.query + 8192 * each.key
    config = DistCAConfig(max_transient_bytes=bound)
    plan = balance(layout, cost, config)
    waves = Waves.split_plan(plan, SHAPE, config.tile, bound)
    assert plan.moved
    assert waves.bytes is not None
    assert waves.bytes.max() <= bound
    assert waves.count == Waves.split_plan(plan, SHAPE, config.tile, bound).count
    before, after = (
        summarize_plan(p, cost) for p in (balance(layout, cost, DistCAConfig(balance=False)), plan)
    )
    assert after["seconds_imbalance_after"] < before["seconds_imbalance_after"]


def test_documents_that_do_not_fit_are_split_by_heads_first() -> None:
    layout = Layout.from_segments([[(0, 0, 32768)], [(0, 32768, 32768)], [(1, 0, 32768)]])
    plan, each = Plan.make_local(layout), TransientBytes.from_shape(SHAPE)
    bound = (32768 * each.query + 65536 * each.key) // 4
    rows, heads = (
        Waves.split_plan(plan, SHAPE, 128, bound),
        Waves.split_plan(plan, SHAPE, 128, bound, 8),
    )
    assert heads.plan.layout.groups == 4
    assert heads.bytes is not None
    assert heads.bytes.max() <= bound
    whole, by_rows, by_heads = (
        PlanLoad(plan, CUDA, waves).exchange_bytes[0].sum() for waves in (None, rows, heads)
    )
    # Rows that travel by themselves get their keys again and again, heads have their own.
    assert by_heads == whole
    assert by_rows > 1.9 * whole
    # Of a plan that has split documents already, the others are split alike.
    again = Waves.split_plan(heads.plan, SHAPE, 128, bound // 4, 8).plan.layout
    assert again.groups == 4
    assert set(again.document.tolist()) == {1, 2, 3, 4, 5}


def test_keys_beyond_the_bound_do_not_make_tiles_waves() -> None:
    """Keys that are more than the bound do not make each tile a wave."""
    layout = Layout.from_segments([[(0, 0, 32768)], [(0, 32768, 32768)]])
    waves = Waves.split_plan(Plan.make_local(layout), SHAPE, 128, LEAST, 1)
    assert waves.count <= 8
    assert waves.bytes is not None
    assert (
        waves.bytes.max()
        <= 2.01 * 65536 * TransientBytes.from_shape(SHAPE).key
        + 65536 * TransientBytes.from_shape(SHAPE).sent_key
    )


@pytest.mark.parametrize("lengths", [[[65536], [4096] * 16], [[4096], [4096]]])
def test_a_bound_that_no_row_fits_is_refused(lengths: list[list[int]]) -> None:
    layout = Layout.from_lengths(lengths)
    assert balance(layout, PAIRS, DistCAConfig(max_transient_bytes=LEAST)).window is None
    with pytest.raises(
        ConfigError,
        match=rf"max_transient_bytes={LEAST - 1} .* {LEAST} bytes .*query_heads=32.* or None",
    ):
        balance(layout, PAIRS, DistCAConfig(max_transient_bytes=LEAST - 1))


@pytest.mark.parametrize(("layout", "window", "bound"), MANY_WAVES)
def test_many_waves_take_little_time_and_are_well_filled(
    layout: Layout, window: int | None, bound: int
) -> None:
    plan = Plan.make_local(layout, window)
    begin = time.process_time()
    waves = Waves.split_plan(plan, SHAPE, 128, bound, 8)
    assert time.process_time() - begin < 1.5
    assert waves.bytes is not None
    # Bytes of the busiest rank if all travelled at once: no more waves than if each were half full.
    alone = Waves.split_plan(plan, SHAPE, 128, 2**62, 8)
    assert alone.bytes is not None
    again = 1 if window is None else 1 + window / 128
    assert waves.count <= 1 + 4 * again * int(alone.bytes.max()) / bound


def test_a_bounded_plan_of_many_ranks_takes_little_time() -> None:
    layout = Layout.from_lengths(
        [[2**17, 2**16] if rank % 8 == 0 else [4096] * 32 for rank in range(64)]
    )
    plan = balance(layout, CUDA, DistCAConfig(ping_pong=True))
    begin = time.process_time()
    waves = Waves.split_plan(plan, SHAPE, 128, 2**26, 8)
    assert time.process_time() - begin < 0.5
    assert waves.count > 10


def test_a_bound_that_is_large_enough_changes_nothing() -> None:
    layout = Layout.from_lengths([[65536], [4096] * 16])
    free = balance(layout, PAIRS, DistCAConfig())
    assert balance(layout, PAIRS, DistCAConfig(max_transient_bytes=2**40)).digest == free.digest
    assert Waves.split_plan(free, SHAPE, 128, 2**40).count == 1
    assert compute_imbalance(Waves.split_plan(free, SHAPE, 128, 2**40).bytes.astype(float)) >= 1


def test_a_bound_is_a_positive_number_of_bytes() -> None:
    with pytest.raises(ConfigError, match="max_transient_bytes=0"):
        DistCAConfig(max_transient_bytes=0)


def test_documents_on_all_ranks_get_few_waves_fast() -> None:
    """Servers take turns, and not all waves are looked at for each unit."""
    ranks = 64
    layout = Layout.from_segments(
        [[(document, rank * 512, 512) for document in range(ranks)] for rank in range(ranks)]
    )
    started = time.process_time()
    waves = Waves.split_plan(Plan.make_local(layout), CUDA.shape, 128, 2**26, 8)
    seconds = time.process_time() - started
    assert waves.count <= 600, "1,527 when all units of a server went before those of the next"
    assert seconds < 6, "1.5 s on a free core; going through all waves takes three times as long"
    assert waves.bytes is not None
    assert waves.bytes.max() <= 2**26
