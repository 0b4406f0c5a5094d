"""Tasks that are weighed before they are a plan weigh what the plan weighs, and only a plan that is kept is built."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import deal, layouts
from test_scheduler import SHAPE

from hf_distca.config import DistCAConfig
from hf_distca.schedule import greedy as greedy_module
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.greedy import Greedy, Tried
from hf_distca.schedule.heads import WHOLE, Heads
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.prices import Price
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.relief import relieve
from hf_distca.schedule.weigh import Scale

COST = CostModel.analytic(SHAPE, device_type="cuda")
# As many documents as head groups, relays and moves need to turn up, on few ranks.
UNEVEN = Layout.from_lengths([[2**17], [2**15] * 4, *[[4096] * 16] * 6])


def check(tried: Tried, scale: Scale, ranks: Ranks, cost: CostModel, least: float = 0.0) -> None:
    """What was weighed is what `PlanLoad` and `relieve` find, to the last digit."""
    plan = tried.plan
    load = PlanLoad(plan.with_relays(None), cost, overlapped=scale.link.overlapped, ranks=ranks)
    load = relieve(load, least) if scale.relayed else load
    relays, found = load.plan.relays, plan.relays
    assert (relays is None) == (found is None)
    if relays is not None and found is not None:
        for one, other in zip(relays, found, strict=True):
            np.testing.assert_array_equal(one, other)
    assert tried.slowest_seconds == load.slowest_seconds
    assert tried.longest_compute == load.longest_compute
    np.testing.assert_array_equal(tried.compute_seconds, load.compute_seconds)
    np.testing.assert_array_equal(tried.exchange_seconds, load.exchange_seconds)


def heads_of(layout: Layout, groups: int) -> Heads:
    """Every second document may be split, if there is no context."""
    if groups == 1 or layout.context.any():
        return WHOLE
    return Heads(groups, np.arange(len(layout.documents)) % 2 == 0)


@settings(max_examples=200, deadline=None)
@given(layouts(longest=100_000), st.data())
def test_tasks_weigh_what_their_plan_weighs(layout: Layout, data: st.DataObject) -> None:
    world_size, cost = layout.world_size, COST
    cost = replace(cost, exchange_bytes_per_second=data.draw(st.sampled_from([1e9, 4e10, 1e12])))
    speed = st.sampled_from([0.5, 1.0, 1.3])
    speeds = data.draw(st.one_of(st.none(), st.tuples(*[speed] * world_size)), label="speeds")
    ranks, price = Ranks(speeds=speeds), Price.of(cost, data.draw(st.sampled_from([1, 128])))
    scale = Scale.of(layout, cost, overlapped=data.draw(st.booleans()), relayed=data.draw(st.booleans()))
    least = data.draw(st.sampled_from([0.0, 0.02]))
    greedy = Greedy(layout, price, ranks, scale)
    unmoved = greedy.still(least)
    check(unmoved, scale, ranks, cost, least)
    assert unmoved.plan.with_relays(None).digest == Plan.local(layout).digest
    greedy = greedy.splitting(heads_of(layout, data.draw(st.sampled_from([1, 4, 8]), label="groups")))
    seconds = unmoved.compute_seconds.tolist()
    check(greedy.run(seconds, data.draw(st.sampled_from([0.002, 0.05]))), scale, ranks, cost)
    both = (unmoved.compute_seconds + unmoved.exchange_seconds).tolist()
    exchanged = price.with_exchange(cost.exchange_bytes_per_second)
    check(greedy.run(both, 0.002, exchanged=exchanged), scale, ranks, cost)
    check(greedy.run(seconds, 0.0, cap=max(seconds) / 2), scale, ranks, cost)


def test_what_is_weighed_has_head_groups_and_relays() -> None:
    """Random layouts seldom need both."""
    scale = Scale.of(UNEVEN, COST, overlapped=False, relayed=True)
    greedy = Greedy(UNEVEN, Price.of(COST, 128), Ranks(), scale)
    tried = greedy.splitting(Heads(8, UNEVEN.length > 2**16)).run(greedy.still(0.0).compute_seconds.tolist(), 0.01)
    assert tried.plan.relays is not None
    assert tried.plan.layout.groups == 8
    check(tried, scale, Ranks(), COST)


def test_numbers_of_any_kind_are_compiled_for_once() -> None:
    """What is whole in a configuration, a cost model or speeds is a float where it is read; else all would be compiled again."""
    pytest.importorskip("numba")
    balance(UNEVEN, COST, DistCAConfig())
    before = len(greedy_module.try_moves.signatures)  # type: ignore[attr-defined]
    cost = replace(COST, exchange_bytes_per_second=4 * 10**10, exchange_seconds=0)
    balance(UNEVEN, cost, DistCAConfig(min_gain=0, tolerance=0), Ranks(speeds=(1, 2, 1, 1, 1, 1, 1, 1)))
    assert len(greedy_module.try_moves.signatures) == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(("ping_pong", "runs"), [(True, 1), (False, 2)])
def test_one_plan_is_built_for_few_ranks(monkeypatch: pytest.MonkeyPatch, ping_pong: bool, runs: int) -> None:
    """Building a plan, its layout and its load takes longer than finding and weighing the tasks of one."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def counted(*args: Any, **keywords: Any) -> Any:
            calls[name if owner is greedy_module else owner.__name__] += 1
            return whole(*args, **keywords)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((Plan, "__post_init__"), (Layout, "__post_init__"), (PlanLoad, "__post_init__")):
        count(owner, name)
    count(greedy_module, "try_moves")
    plan = balance(UNEVEN, COST, DistCAConfig(ping_pong=ping_pong))
    assert plan.layout.groups > 1
    # What nothing moves weighs, and each run; and of the last one the plan and the layout with documents that are split.
    assert calls == {"try_moves": 1 + runs, "Plan": 1, "Layout": 1}


def test_relays_are_poured_to_an_end() -> None:
    """What sums round to made two numbers of relays take turns for ever."""
    long, short = "head and tail", "in order"
    documents = [(7119, 3, 4, long), (5098, 1, 1, long), (82, 4, 2, short), (16854, 4, 1, short), (17, 1, 1, short)]
    documents += [(294, 3, 3, short), (5431, 3, 4, long), (220, 3, 1, short), (5329, 2, 1, short), (161, 0, 3, long)]
    documents += [(45, 0, 1, long), (68, 0, 1, long), (56, 4, 1, long)]
    plan = balance(deal(5, documents), replace(COST, node_bytes_per_second=None), DistCAConfig(ping_pong=True, tile=16))
    assert (plan.home != plan.server).any()
