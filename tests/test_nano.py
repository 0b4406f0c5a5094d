"""The single-file example gives the results of the library, and its page quotes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from hf_distca.config import DistCAConfig
from hf_distca.kernels import KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from pages import ROOT
from ranks import RankPools

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "examples")
    import nano_distca as nano

RANKS, HEADS, WIDTH = 4, 4, 16
SHAPE = AttentionShape(HEADS, HEADS, WIDTH, WIDTH, 8)


def make_plans() -> tuple[list[nano.Task], list[Plan]]:
    """Make the plan of the example, the same plan for the library, and the scheduler's plan."""
    documents = [
        nano.Task(home, sum(lengths[:number]), 0, length, home)
        for home, lengths in enumerate(nano.DOCUMENTS)
        for number, length in enumerate(lengths)
    ]
    layout = Layout.from_lengths(nano.DOCUMENTS)
    number_at = {task[:2]: number for number, task in enumerate(documents)}
    tasks = nano.make_plan(documents, RANKS)
    same = [(number_at[t[:2]], t.start, t.end, t.home, t.server) for t in tasks]
    config = DistCAConfig(tile=nano.TILE, min_gain=0.0)
    own = balance(layout, CostModel.make_of_pairs(SHAPE), config)
    return tasks, [Plan.from_tasks(layout, same), own]


def attend_by_library(
    rank: int, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    scores = ScoreOptions(scale=WIDTH**-0.5)
    kernel = select_kernel("auto", KernelRequest(q.device, q.dtype, WIDTH, WIDTH, scores))
    route = Route.build(plan, rank)
    group = AttentionGroup.find_or_create(timeout_seconds=60)
    call = LayerExchange(route, group, AttentionServer(kernel, scores, Meter()))
    return compute_core_attention(Inputs(q, k, v), call)


def find_errors(rank: int) -> list[float]:
    """Return the largest differences of outputs and gradients between library and example."""
    generator = torch.Generator().manual_seed(rank)
    shape = 4, sum(nano.DOCUMENTS[rank]), HEADS, WIDTH
    *inputs, gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
    tasks, plans = make_plans()

    def run(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        output = attend(*leaves)
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    expected = run(partial(nano.attend_by_plan, plan=tasks, rank=rank))
    return [
        (found - wanted).abs().max().item()
        for plan in plans
        for found, wanted in zip(run(partial(attend_by_library, rank, plan)), expected, strict=True)
    ]


def test_library_gives_results_of_the_nano_example(rank_pool: RankPools) -> None:
    _, (same, own) = make_plans()
    for plan in (same, own):
        assert (plan.server != plan.home).sum() >= 3
    assert np.max(rank_pool(RANKS)(find_errors)) < 1e-12


def test_page_quotes_the_nano_example() -> None:
    source = (ROOT / "examples" / "nano_distca.py").read_text()
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    quoted = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert quoted
    assert [text for text in quoted if text not in source] == []
    assert source.count("\n") <= 150
