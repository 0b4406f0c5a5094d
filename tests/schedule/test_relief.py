"""Relays: add_relays adds valid relays where they pay, and nowhere else."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CUDA, SHAPE, plans

from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import CATask, Plan
from hf_distca.schedule.relays import add_relays

SLOW = replace(CUDA, exchange_bytes_per_second=1e6)


def spread_over(servers: int, length: int = 65536) -> Plan:
    """Plan one document with its last rows spread over this many servers."""
    rows = length // (2 * servers)
    cuts = [length - rows * (servers - i) for i in range(servers + 1)]
    tasks = [CATask(0, 0, cuts[0], 0, 0)]
    tasks += [CATask(0, a, b, 0, 1 + i) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
    return Plan.from_tasks(
        Layout.from_lengths([[length], *[[128]] * servers]),
        [*tasks, *[(1 + i, 0, 128, 1 + i, 1 + i) for i in range(servers)]],
    )


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("servers", [3, 16, 200])
def test_relays_limit_the_keys_that_the_home_sends(servers: int, overlapped: bool) -> None:
    load = PlanLoad(spread_over(servers), SLOW, overlapped=overlapped)
    relieved = add_relays(load)
    before, after = load.key_tokens, relieved.key_tokens
    assert before[0][0] > 0.7 * servers * 65536
    # A home that has sent its keys once also relays keys, like its servers.
    assert after[0][0] <= 65536 * 2.1
    assert after[0].max() <= 65536 * 2.1
    assert after[1].tolist() == before[1].tolist(), "no rank receives more"
    assert after[0].sum() == before[0].sum(), "all ranks together send as much as before"
    assert (
        load.slowest_seconds - relieved.slowest_seconds
        > 0.8 * (servers - 3) * 65536 * SHAPE.moved_key_bytes * 0.7 / 1e6
    )


def test_relays_are_added_only_if_their_exchange_pays() -> None:
    load = PlanLoad(spread_over(16), SLOW)
    gain = load.slowest_seconds - add_relays(load).slowest_seconds
    for fixed, passed_on in ((gain / 3.2, True), (gain / 2.8, False)):
        dear = PlanLoad(load.plan, replace(SLOW, exchange_seconds=fixed))
        assert (add_relays(dear).plan.relays is not None) == passed_on


@pytest.mark.parametrize(
    "load",
    [
        PlanLoad(spread_over(1), SLOW),
        PlanLoad(replace(spread_over(8), window=4096), SLOW),
        PlanLoad(spread_over(16), replace(CUDA, exchange_bytes_per_second=float("inf"))),
        PlanLoad(Plan.make_local(Layout.from_lengths([[4096]] * 4)), SLOW),
    ],
    ids=["one server", "window", "free network", "nothing moved"],
)
def test_load_is_unchanged_if_relays_do_not_pay(load: PlanLoad) -> None:
    assert add_relays(load) is load
    assert load.plan.digest == replace(load.plan).digest


@settings(max_examples=50, deadline=None)
@given(plans(), st.booleans(), st.sampled_from([1e4, 1e7, 4e10]))
def test_relays_of_any_plan_are_valid_and_never_slower(
    plan: Plan, overlapped: bool, rate: float
) -> None:
    load = PlanLoad(
        plan,
        replace(CUDA, exchange_bytes_per_second=rate, exchange_seconds=0.0),
        overlapped=overlapped,
    )
    relieved = add_relays(load)
    relays = relieved.plan.relays
    assert relieved.slowest_seconds <= load.slowest_seconds
    if relays is None:
        return
    needs: dict[tuple[int, int], int] = {}
    for document, _, end, source, server in zip(
        *(column.tolist() for column in plan.list_key_transfers()), strict=True
    ):
        needs[document, server] = max(needs.get((document, server), 0), end)
        if len(set(plan.layout.rank[plan.layout.document == document].tolist())) == 1:
            needs[document, source] = plan.layout.longest
    last: dict[int, int] = {}
    for document, start, end, rank in zip(*(column.tolist() for column in relays[:4]), strict=True):
        assert last.get(document, 0) == start < end <= needs[document, rank]
        last[document] = end
    assert len({*zip(relays.document.tolist(), relays.relay.tolist(), strict=True)}) == len(
        relays.relay
    )
    assert relieved.plan.digest != plan.digest
    assert np.array_equal(relieved.key_tokens[1], load.key_tokens[1])
