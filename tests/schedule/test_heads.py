"""Documents split by heads: the same tokens and load, with fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from layouts import CUDA, PING_PONG, layouts, make_load

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError, PlanError
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad, compute_imbalance
from hf_distca.schedule.plan import Plan

FAST = replace(CUDA, exchange_bytes_per_second=3e11)  # exchanges are hidden behind compute

WHOLE = DistCAConfig(ping_pong=True, head_groups=1)
SPLIT = PING_PONG


def mix_lengths(ranks: int) -> Layout:
    """Build a layout: one document on every eighth rank, short documents on the other ranks."""
    return Layout.from_lengths([[65536] if rank % 8 == 0 else [2048] * 32 for rank in range(ranks)])


@settings(max_examples=50)
@given(layouts(longest=200))
def test_layout_split_by_heads_keeps_tokens_and_load(layout: Layout) -> None:
    layout = replace(layout, context=np.zeros(layout.world_size, dtype=np.int64))
    documents = np.unique(layout.document)[::2]
    split = layout.split_heads(np.isin(layout.documents, documents), 3)
    assert split.query_tokens.tolist() == layout.query_tokens.tolist()
    assert split.longest == layout.longest
    where = dict(
        zip(zip(layout.document, layout.start, layout.rank, strict=True), layout.token, strict=True)
    )
    numbers = split.restore_numbers(split.document)
    for document, start, rank, token in zip(
        numbers, split.start, split.rank, split.token, strict=True
    ):
        assert where[document, start, rank] == token
    count = np.where(np.isin(layout.document, documents), 3, 1)
    assert len(split.document) == count.sum()
    weight = split.compute_head_fractions(split.document)
    assert np.bincount(split.rank, split.length * weight, split.world_size) == pytest.approx(
        layout.query_tokens
    )
    # Without seconds per task, a local plan computes and exchanges the same before and after.
    free = replace(
        CUDA,
        forward=replace(CUDA.forward, task_seconds=0.0),
        backward=replace(CUDA.backward, task_seconds=0.0),
    )
    one, other = (PlanLoad(Plan.make_local(each), free) for each in (layout, split))
    for name in ("compute_seconds", "exchange_seconds", "pairs"):
        assert getattr(one, name) == pytest.approx(getattr(other, name))


def test_plan_in_json_keeps_its_head_groups() -> None:
    plan = balance(mix_lengths(8), FAST, SPLIT)
    assert plan.layout.groups == 4
    again = Plan.from_json(plan.to_json())
    assert again.layout.groups == 4
    assert again.digest == plan.digest
    assert again.digest != replace(plan, layout=replace(plan.layout, groups=2)).digest
    with pytest.raises(PlanError, match="head groups of a plan in JSON must be a whole number"):
        Plan.from_json(plan.to_json().replace('"groups":4', '"groups":"4"'))


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_split_by_heads_sends_fewer_bytes_for_the_same_balance(ranks: int) -> None:
    layout = mix_lengths(ranks)
    whole, split = (make_load(layout, FAST, config) for config in (WHOLE, SPLIT))
    assert split.exchange_bytes[0].sum() <= 0.65 * whole.exchange_bytes[0].sum()
    assert split.slowest_seconds <= 1.01 * whole.slowest_seconds
    assert compute_imbalance(split.compute_seconds) <= 1.01
    assert split.pairs.sum() == pytest.approx(whole.pairs.sum())


def test_only_moved_documents_are_split_by_heads() -> None:
    plan = balance(mix_lengths(16), FAST, SPLIT)
    assert plan.layout.groups == 4
    moved = set(plan.document[plan.home != plan.server].tolist())
    for document in np.unique(plan.document).tolist():
        same = {document // 5 * 5 + group for group in range(5)}
        assert (document % 5 == 0) == (not any(one % 5 and one in moved for one in same))


def test_documents_with_windows_or_context_are_not_split_by_heads() -> None:
    windowed = balance(
        mix_lengths(8), replace(CUDA, window=4096), DistCAConfig(ping_pong=True, min_gain=0.0)
    )
    assert windowed.layout.groups == 1
    context = Layout.from_segments(
        [[(0, 0, 32768)], [(0, 0 + 32768, 32768)], [(1, 0, 512)], [(2, 0, 512)]], [0, 0, 1, 0]
    )
    assert balance(context, CUDA, SPLIT).layout.groups == 1
    with pytest.raises(LayoutError, match="cannot be split"):
        context.split_heads(np.array([True, False, False]), 2)
    split = Layout.from_lengths([[8], [8]]).split_heads(np.array([True, False]), 2)
    assert split.split_heads(np.array([False, False, True]), 2).document.tolist() == [1, 2, 4, 5]
    with pytest.raises(LayoutError, match="2 head groups"):
        split.split_heads(np.array([False, False, True]), 4)
    with pytest.raises(PlanError, match="only documents of layers without a window"):
        Plan.make_local(split, window=4)
    with pytest.raises(ConfigError, match="head_groups=0"):
        DistCAConfig(head_groups=0)


@pytest.mark.parametrize("ping_pong", [False, True])
def test_routes_send_the_tokens_that_the_load_counts(ping_pong: bool) -> None:
    lengths = [65536, 30000, 20000, *[512] * 29]
    layout = deal([*lengths, 8 * 16384 - sum(lengths)], 8, 16384, CUDA)
    plan = balance(layout, CUDA, DistCAConfig(ping_pong=ping_pong, min_gain=0.0))
    assert plan.layout.groups > 1
    load, groups = PlanLoad(plan, CUDA), plan.layout.groups
    routes = [Route.build(plan, rank) for rank in range(8)]
    for rank, route in enumerate(routes):
        pooled = route.pooled
        assert sum(pooled.queries.send.values()) / groups == load.query_tokens[0][rank]
        assert sum(pooled.queries.receive.values()) / groups == load.query_tokens[1][rank]
        passed = sum(pooled.relay.keys.send.values()) if pooled.relay else 0
        assert (sum(pooled.keys.send.values()) + passed) / groups == load.key_tokens[0][rank]
        here = (
            sum(route.local_tasks.query_length) * groups
            + sum(pooled.tasks.query_length)
            + sum(route.local_pooled.tasks.query_length if route.local_pooled else ())
        )
        rows = plan.end - plan.start
        mine = plan.server == rank
        assert here == (rows * plan.heads * groups)[mine].sum()


def test_split_by_heads_speeds_up_a_dominant_document() -> None:
    """The keys of the document travel longer than ranks compute."""
    ranks, tokens = 128, 65536
    for others in (1792, 1800, 2000):
        lengths = [300_000, *[others] * ((ranks * tokens - 300_000) // others)]
        lengths.append(ranks * tokens - sum(lengths))
        layout = deal(lengths, ranks, tokens, CUDA)
        load, alone = (make_load(layout, CUDA, config) for config in (SPLIT, WHOLE))
        assert alone.slowest_seconds > 1.05 * load.slowest_seconds
