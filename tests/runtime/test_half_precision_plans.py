"""Plans in half precision: errors against float64 are at most one and a half times those of torch's
attention in that dtype.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_core_attention import (
    DIM,
    KEY_HEADS,
    WORLDS,
    Segments,
    Tasks,
    dense,
    document_tensors,
    random_case,
    split_case,
    whole_tasks,
)
from torch.nn.functional import scaled_dot_product_attention

from hf_distca.kernels import KernelRequest, ScoreOptions, select_kernel
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from ranks import RankPool

Errors = list[tuple[float, float]]  # of o, dq, dk and dv: sums of squares, of a plan and of torch


def errors(
    rank: int,
    ranks: Segments,
    tasks: Tasks,
    split: list[int] | None,
    dtype: torch.dtype,
    window: int | None,
) -> Errors:
    """Errors over this rank's tokens, if a plan runs forward and backward."""
    scores = ScoreOptions(DIM**-0.5, window)
    layout = Layout.from_segments(ranks, [0] * len(ranks))
    layout = (
        layout if split is None else layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
    )
    plan = Plan.from_tasks(layout, tasks, window)
    ends = sorted((document, start + length) for row in ranks for document, start, length in row)
    inputs = {
        document: document_tensors(document, end, dtype) for document, end in dict(ends).items()
    }
    empty = document_tensors(0, 0, dtype)
    rows = [
        torch.cat([empty[i], *(inputs[d][i][a : a + n] for d, a, n in ranks[rank])])
        for i in range(4)
    ]
    leaves = [tensor.requires_grad_() for tensor in rows[:3]]
    server = AttentionServer(
        select_kernel("auto", KernelRequest(leaves[0].device, dtype, DIM, DIM, scores)),
        scores,
        Meter(),
    )
    route = Route.build(plan, rank)
    out = compute_core_attention(
        Inputs(*leaves),
        LayerExchange(route, AttentionGroup.find_or_create(timeout_seconds=60), server),
    )
    out.backward(rows[3])
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    squares, at = np.zeros((4, 2)), 0
    for document, start, length in ranks[rank]:
        exact, theirs = exactly(inputs[document], scores), plainly(inputs[document], scores)
        for place, (want, other) in enumerate(zip(exact, theirs, strict=True)):
            here = slice(start, start + length)
            for column, got in enumerate((found[place][at : at + length], other[here])):
                squares[place, column] += float((got.double() - want[here]).square().sum())
        at += length
    return [tuple(row) for row in squares.tolist()]


def slices(random_: random.Random, world: int, ranks: Segments) -> Tasks:
    """Tasks of every document, cut and sent at will."""
    found = []
    for task in whole_tasks(ranks):
        cuts = sorted(
            {*task[1:3], *(random_.randint(*task[1:3]) for _ in range(random_.choice([0, 1, 2])))}
        )
        for start, end in itertools.pairwise(cuts):
            server = random_.choice([task.home, random_.randrange(world)])
            found.append(task._replace(start=start, end=end, server=server))
    return found


def exactly(inputs: list[torch.Tensor], scores: ScoreOptions) -> list[torch.Tensor]:
    """Output and gradients of a document by definition, in float64."""
    q, k, v, do = (tensor.double().requires_grad_() for tensor in inputs)
    out = dense(q, k, v, None, scores)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def plainly(inputs: list[torch.Tensor], scores: ScoreOptions) -> list[torch.Tensor]:
    """The same by torch, in the dtype of the inputs."""
    q, k, v, do = (tensor.detach().clone().requires_grad_() for tensor in inputs)
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    visible = torch.ones(len(q), len(q)).tril().bool()
    visible &= torch.ones(len(q), len(q)).triu(1 - (scores.window or len(q))).bool()
    out = scaled_dot_product_attention(
        *heads_first, attn_mask=visible, scale=scores.scale, enable_gqa=True
    )[0].transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_random_plans_round_as_torch_does(rank_pool: Callable[[int], RankPool], world: int) -> None:
    pool = rank_pool(world)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.randoms(use_true_random=False),
        st.sampled_from([torch.bfloat16, torch.float16]),
        st.sampled_from([None, None, 9, 40]),
        st.booleans(),
    )
    def check(
        random_: random.Random,
        dtype: torch.dtype,
        window: int | None,
        by_heads: bool,
    ) -> None:
        ranks, _, _ = random_case(random_, world)
        ranks[0].append((99, 0, 96))  # errors of a token or two may be none at all
        split, tasks = None, slices(random_, world, ranks)
        if by_heads and window is None:
            split, tasks = split_case(random_, world, tasks)
        results = pool(errors, ranks, tasks, split, dtype, window)
        for name, squares in zip(("o", "dq", "dk", "dv"), np.sum(results, axis=0), strict=True):
            ours, theirs = np.sqrt(squares)
            assert ours <= 1.5 * theirs, (name, ours / theirs, ranks, tasks)

    check()
