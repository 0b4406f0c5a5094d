from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_exchanges import DIM, make_parts

from hf_distca.kernels import ScoreOptions
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan, Relays
from ranks import RankPools

Segments = list[list[tuple[int, int, int]]]
Tasks = list[CATask]
# Largest error, error of the gradient of sinks, and counts of exchanges.
Result = tuple[float, torch.Tensor, list[int]]
HEADS, KEY_HEADS = 4, 2
SCORES = ScoreOptions(DIM**-0.5)


def attend_densely(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    scores: ScoreOptions,
) -> torch.Tensor:
    """Compute attention for one whole document, (T, heads, dim), from the definition."""
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~make_mask(len(q), scores.window), float("-inf"))
    if sink is not None:
        logits = torch.cat([logits, sink.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(k)], v)


def make_mask(tokens: int, window: int | None) -> torch.Tensor:
    """Return the mask of the keys that each row of a document sees."""
    whole = torch.ones(tokens, tokens).tril()
    return (whole if window is None else whole.triu(1 - window)).bool()


def make_tensors(document: int, length: int) -> list[torch.Tensor]:
    """Make q, k, v and dO of a document, equal on all ranks."""
    generator = torch.Generator().manual_seed(document)
    return [
        torch.randn(length, heads, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


def compute_whole(
    documents: dict[int, list[torch.Tensor]],
    scores: ScoreOptions,
    sink: torch.Tensor | None = None,
) -> dict[int, list[torch.Tensor]]:
    """Compute dq, dk, dv and o of whole documents from their q, k, v and dO."""
    found = {}
    for number, (*inputs, do) in documents.items():
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        out = attend_densely(*leaves, sink, scores)
        out.backward(do)
        found[number] = [*(leaf.grad for leaf in leaves), out.detach()]
    return found


def run_plan(
    rank: int,
    ranks: Segments,
    context: list[int],
    tasks: Tasks,
    scores: ScoreOptions = SCORES,
    with_sink: bool = False,
    relays: Relays | None = None,
    split: list[int] | None = None,
) -> Result:
    """Run a plan forward and backward, with the given relays.

    `split` lists documents to split into `KEY_HEADS` head groups; `tasks` then name the documents
    of the split layout.

    Returns the largest error of o, dq, dk and dv over this rank's tokens, the error of the gradient
    of the sinks, and the counts of exchanges.
    """
    layout = Layout.from_segments(ranks, context)
    layout = (
        layout if split is None else layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
    )
    plan = replace(Plan.from_tasks(layout, tasks, scores.window), relays=relays)
    lengths: dict[int, int] = {}
    for row in ranks:
        for document, start, length in row:
            lengths[document] = max(lengths.get(document, 0), start + length)
    inputs = {document: make_tensors(document, length) for document, length in lengths.items()}
    for row, count in zip(ranks, context, strict=True):
        for document, start, length in row[:count]:  # queries of context are not computed
            inputs[document][3][start : start + length] = 0.0
    empty, query_rows = make_tensors(0, 0), ranks[rank][context[rank] :]

    def own(part: int, given: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        """Select this rank's rows of q, k, v or dO, or of dq, dk, dv or o."""
        held = ranks[rank] if part in (1, 2) else query_rows
        return torch.cat([empty[part], *(given[d][part][a : a + n] for d, a, n in held)])

    leaves = [own(part, inputs).requires_grad_() for part in range(3)]
    sink = torch.linspace(-1, 2, HEADS, dtype=torch.float64) if with_sink else None
    own_sink, exact_sink = (
        None if sink is None else sink.clone().requires_grad_() for _ in range(2)
    )
    parts = make_parts(plan, rank, scores)
    out = compute_core_attention(Inputs(*leaves, sink_H=own_sink), LayerExchange(*parts))
    out.backward(own(3, inputs))
    expected = compute_whole(inputs, scores, sink)
    found = (*(leaf.grad for leaf in leaves), out.detach())
    errors = [(tensor - own(part, expected)).abs().flatten() for part, tensor in enumerate(found)]
    d_sink = torch.zeros(HEADS, dtype=torch.float64)
    if sink is not None:
        shares = {d: [*whole[:3], torch.zeros_like(whole[3])] for d, whole in inputs.items()}
        for d, a, n in query_rows:
            shares[d][3][a : a + n] = inputs[d][3][a : a + n]
        compute_whole(shares, scores, exact_sink)
        d_sink = own_sink.grad - (exact_sink.grad if shares else 0)
    meter = parts[-1].meter
    worst = torch.cat([torch.zeros(1), *errors]).max()
    return float(worst), d_sink, [meter.dispatches, meter.returns]


def check_exact(results: list[Result], case: object) -> None:
    """Assert that results of `run_plan` are exact and all ranks made equally many exchanges."""
    assert max(error for error, *_ in results) < 1e-12, case
    assert max(float(d_sink.abs().max()) for _, d_sink, _ in results) < 1e-9, case
    assert len({tuple(counts) for *_, counts in results}) == 1


def draw_case(random_: random.Random, world: int) -> tuple[Segments, list[int], Tasks]:
    """Draw a layout of documents cut and scattered anywhere, partly context, and a plan that sends
    slices anywhere.
    """
    ranks: Segments = [[] for _ in range(world)]
    tasks: Tasks = []
    lonely = random_.randrange(world) if random_.random() < 0.3 and world > 1 else None
    hosts = [r for r in range(world) if r != lonely]
    for document in range(random_.randint(0, 5)):
        length = random_.choice([1, 2, 7, 33, random_.randint(1, 70)])
        cuts = sorted(
            {0, length, *(random_.randint(1, length) for _ in range(random_.choice([0, 0, 1, 3])))}
        )
        for start, end in itertools.pairwise(cuts):
            home = random_.choice(hosts)
            ranks[home].append((document, start, end - start))
            inner = sorted(
                {
                    start,
                    end,
                    *(random_.randint(start, end) for _ in range(random_.choice([0, 0, 1, 2]))),
                }
            )
            for a, b in itertools.pairwise(inner):
                server = random_.choice([home, random_.randrange(world)])
                tasks.append(CATask(document, a, b, home, server))
    for row in ranks:
        random_.shuffle(row)
    context = [random_.choice([0, 0, random_.randint(0, len(row))]) for row in ranks]
    unread = {
        segment[:2] for row, count in zip(ranks, context, strict=True) for segment in row[:count]
    }
    inside = {(d, a + i): (d, a) for row in ranks for d, a, n in row for i in range(n)}
    return (
        ranks,
        context,
        [task for task in tasks if inside[task.document, task.start] not in unread],
    )


def draw_head_groups(random_: random.Random, ranks: Segments) -> tuple[list[int], Tasks]:
    """Draw documents to split by heads, and tasks whose head groups go to random servers."""
    documents = sorted({document for row in ranks for document, *_ in row})
    split = [document for document in documents if random_.random() < 0.6]
    found = []
    for home, row in enumerate(ranks):
        for document, start, length in row:
            number = document * (KEY_HEADS + 1)
            if document not in split:
                found.append(CATask(number, start, start + length, home, home))
                continue
            for group in range(1, KEY_HEADS + 1):
                server = random_.choice([home, random_.randrange(len(ranks))])
                found.append(CATask(number + group, start, start + length, home, server))
    return split, found


def run_untagged(rank: int, *arguments: Any) -> Result:
    """Call `run_plan` over a channel without tags, as over NCCL; gloo supports both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "is_gloo", property(lambda channel: False))
        return run_plan(rank, *arguments)


def test_random_plans_are_exact_without_message_tags(rank_pool: RankPools) -> None:
    pool = rank_pool(2)
    for seed in range(20):
        ranks, context, tasks = draw_case(random.Random(seed), 2)
        scores = ScoreOptions(DIM**-0.5, (None, 9)[seed % 2])
        results = pool(run_untagged, ranks, context, tasks, scores, True)
        check_exact(results, (ranks, context, tasks))


# Only slow tests use three ranks, which take the same paths as two and four.
WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), 4]


@pytest.mark.parametrize("world", [1, *WORLDS])
def test_random_layouts_and_plans_are_exact(rank_pool: RankPools, world: int) -> None:
    pool = rank_pool(world)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.randoms(use_true_random=False),
        st.sampled_from([None, None, 1, 2, 9, 40]),
        st.sampled_from([None, None, 3.0]),
        st.booleans(),
    )
    def check(
        random_: random.Random, window: int | None, softcap: float | None, with_sink: bool
    ) -> None:
        ranks, context, tasks = draw_case(random_, world)
        scores = ScoreOptions(DIM**-0.5, window, softcap)
        results = pool(run_plan, ranks, context, tasks, scores, with_sink)
        check_exact(results, (ranks, context, tasks))

    check()


@pytest.mark.parametrize("world", WORLDS)
def test_documents_split_by_heads_are_exact(rank_pool: RankPools, world: int) -> None:
    pool = rank_pool(world)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False), st.booleans())
    def check(random_: random.Random, with_sink: bool) -> None:
        ranks, _, _ = draw_case(random_, world)
        split, tasks = draw_head_groups(random_, ranks)
        results = pool(run_plan, ranks, [0] * world, tasks, SCORES, with_sink, None, split)
        check_exact(results, (ranks, split, tasks))

    check()
