"""The tokens that PlanLoad counts equal the tokens of the key transfers between ranks."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import CUDA, PAIRS, layouts
from test_balance import CONFIGS, MODELS

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import CATask, Plan
from hf_distca.schedule.relays import add_relays


def check_tokens(plan: Plan) -> None:
    runs = plan.list_key_transfers()
    away = runs.source != runs.server
    tokens = ((runs.end - runs.start) * plan.layout.compute_head_fractions(runs.document))[away]
    ranks = plan.layout.world_size
    expected = [
        np.bincount(rank[away], weights=tokens, minlength=ranks)
        for rank in (runs.source, runs.server)
    ]
    np.testing.assert_array_equal(PlanLoad(plan, PAIRS).key_tokens, expected)


@settings(max_examples=50, deadline=None)
@given(layouts(longest=200_000), CONFIGS, st.sampled_from(MODELS))
def test_key_tokens_of_any_plan_equal_its_key_transfers(
    layout: Layout, config: DistCAConfig, cost: CostModel
) -> None:
    plan = balance(layout, cost, config, allow_relays=False)
    check_tokens(plan)
    relieved = add_relays(PlanLoad(plan, cost))
    counted = PlanLoad(relieved.plan, cost)
    np.testing.assert_array_equal(relieved.key_tokens, counted.key_tokens)


@settings(max_examples=50, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_key_tokens_of_random_servers_equal_the_key_transfers(
    layout: Layout, random_: random.Random
) -> None:
    local = Plan.make_local(layout)
    tasks = [CATask(*task[:4], random_.randrange(layout.world_size)) for task in local.tasks]
    check_tokens(Plan.from_tasks(layout, tasks))


def test_key_tokens_of_relays_count_head_groups() -> None:
    layout = Layout.from_lengths([[2**18], *[[4096] * 8] * 15])
    relieved = add_relays(PlanLoad(balance(layout, CUDA, DistCAConfig(), allow_relays=False), CUDA))
    assert relieved.plan.relays is not None
    assert relieved.plan.layout.groups > 1
    np.testing.assert_array_equal(relieved.key_tokens, PlanLoad(relieved.plan, CUDA).key_tokens)


def test_context_alone_sends_no_keys() -> None:
    layout = Layout.from_segments([[(0, 0, 1), (1, 0, 1)], [(1, 1, 1)], []], [0, 1, 0])
    load = PlanLoad(Plan.make_local(layout), PAIRS)
    assert load.key_tokens[0].tolist() == [0, 0, 0]
    add_relays(load)
