"""Recurrent layers over cut documents: outputs and all gradients are those of whole documents,
token by token in float64.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cut_documents
import numpy as np
import pytest
import torch
from cut_documents import (
    KINDS,
    Placement,
    Ran,
    ThreadWorld,
    cut_row,
    run_rank,
    tokens_of,
    weights_of,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hf_distca.errors import DistCADesyncError, LayoutError
from hf_distca.hybrids import carryover, convolution, delta_rule
from hf_distca.hybrids.segments import Segments
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.schedule.layout import Layout
from ranks import RankPools
from turns import in_turn

# Head and tail of documents on one rank, pieces of one token and shorter than the kernel of the
# convolution, whole documents, neighbours that are one segment, one document back where it came
# from, and a rank without tokens.
ODD = [
    [(0, 0, 20), (2, 0, 1), (4, 20, 1), (0, 40, 15)],
    [(1, 0, 7), (0, 20, 1), (0, 22, 18), (5, 2, 1), (5, 3, 1)],
    [(4, 21, 9), (0, 21, 1), (3, 0, 2), (5, 0, 1), (4, 0, 20), (5, 1, 1), (5, 4, 30)],
    [],
]
EXACT = {torch.float64: 1e-13, torch.float32: 3e-6}


def threads(
    kind: str, placement: Placement, dtype: torch.dtype = torch.float64, **options: Any
) -> list[Ran]:
    return ThreadWorld(len(placement)).run(
        lambda group: run_rank(kind, placement, group, dtype, **options)
    )


def assert_exact(kind: str, placement: Placement, ranks: list[Ran], dtype: torch.dtype) -> None:
    differences = worst(kind, placement, ranks)
    assert max(differences.values()) < EXACT[dtype], differences


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Documents cut anywhere, their segments on any ranks in any order."""
    ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(draw(st.integers(1, 4)))]
    segments = []
    for document, length in enumerate(draw(st.lists(st.integers(1, 24), max_size=4))):
        bounds = [0, *sorted(draw(st.sets(st.integers(1, length), max_size=6)) - {length}), length]
        segments += [(document, a, b - a) for a, b in itertools.pairwise(bounds)]
    for segment in draw(st.permutations(segments)):
        ranks[draw(st.integers(0, len(ranks) - 1))].append(segment)
    return ranks


@settings(max_examples=12, deadline=None)
@given(placements(), st.sampled_from(KINDS))
def test_documents_may_be_cut_anywhere(placement: Placement, kind: str) -> None:
    if any(placement):
        assert_exact(kind, placement, threads(kind, placement), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_gradients_and_sums_are_the_same_again(kind: str) -> None:
    ranks, again = threads(kind, ODD, torch.float32), threads(kind, ODD, torch.float32)
    assert_exact(kind, ODD, ranks, torch.float32)
    for one, other in zip(ranks, again, strict=True):
        arrays, others = one.by_token | one.by_weight, other.by_token | other.by_weight
        assert set(arrays) == {"output", *tokens_of(kind, 0, 1), *weights_of(kind)} - {
            "gradient"
        }, "as on a rank with tokens"
        assert all(np.array_equal(arrays[name], others[name]) for name in arrays)


def of_rank(
    rank: int, kind: str, placement: Placement, dtype: torch.dtype, kernel: str | None = None
) -> Ran:
    if rank >= len(placement):
        return Ran({}, {}, Meter())
    group = (
        AttentionGroup.find_or_create(timeout_seconds=60)
        if len(placement) > 1
        else AttentionGroup()
    )
    options = {} if kernel is None else {"kernel": transformers_kernel(kernel)}
    return run_rank(kind, placement, group, dtype, **options)


def transformers_kernel(kind: str) -> Callable[..., Any]:
    """What models run without packages of kernels; chunks are short, so that segments have
    several.
    """
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    kernel: Callable[..., Any] = {
        "delta rule": torch_chunk_gated_delta_rule,
        "delta rule by channel": chunk_kimi_delta_attention,
        "mamba2": mamba2_chunk_scan,
    }[kind]
    return lambda *inputs, **options: kernel(*inputs, chunk_size=8, **options)


def cut_over(ranks: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Documents of some hundred tokens, cut head and tail or in order, over some of the ranks."""
    chance = random.Random(seed)
    placement: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for document in range(3):
        parts = chance.randint(1, ranks)
        order = [*range(parts), *reversed(range(parts))] if document % 2 else list(range(parts))
        start = 0
        for rank in order:
            length = chance.choice([1, 2, 30, 70])
            placement[rank].append((document, start, length))
            start += length
    return placement


@pytest.mark.parametrize(("kind", "ranks"), in_turn(itertools.product(KINDS, (1, 2, 3)), 4))
def test_processes_with_the_kernels_of_transformers(
    rank_pool: RankPools, kind: str, ranks: int
) -> None:
    """In float32, as transformers computes states: to its rounding, which the same kernels have on
    whole documents.
    """
    kernel = None if kind == "convolution" else kind
    for seed in range(2):
        placement = cut_over(ranks, seed)
        found = rank_pool(ranks)(of_rank, kind, placement, torch.float32, kernel)
        assert_exact(kind, placement, found, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_differs_as_it_does_on_whole_documents(kind: str) -> None:
    placement = cut_over(3, 5)
    lengths = np.bincount(
        [row[0] for rank in placement for row in rank],
        [row[2] for rank in placement for row in rank],
    )
    whole = [[(document, 0, int(length)) for document, length in enumerate(lengths)]]
    options = {} if kind == "convolution" else {"kernel": transformers_kernel(kind)}
    cut = worst(kind, placement, threads(kind, placement, torch.bfloat16, **options))
    alone = worst(kind, whole, threads(kind, whole, torch.bfloat16, **options))
    assert all(cut[name] < 1.5 * alone[name] + 1e-3 for name in cut), (cut, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_on_one_rank_each_exchange_nothing(kind: str) -> None:
    """Nothing is exchanged where no document lies on several ranks."""
    placement = [[(0, 0, 9), (1, 0, 5)], [(2, 0, 4), (3, 0, 9), (2, 4, 7)], []]
    ranks = threads(kind, placement)
    assert_exact(kind, placement, ranks, torch.float64)
    assert [(ran.meter.state_exchanges, ran.meter.state_bytes) for ran in ranks] == [(0, 0)] * 3


def bytes_sent(kind: str, placement: Placement) -> list[int]:
    ranks = threads(kind, placement, torch.float32)
    assert {ran.meter.state_exchanges for ran in ranks} == {2}, (
        "forward and backward, on every rank"
    )
    return [ran.meter.state_bytes // 2 for ran in ranks if ran.meter.state_bytes % 2 == 0]


def test_bytes_are_those_of_the_summaries_that_a_rank_needs() -> None:
    """A first segment has no transition, a last one no summary. Backward sends as much as forward,
    the other way.
    """
    in_order = [[(0, 0, 30)], [(0, 30, 30)], [(0, 60, 30)]]
    heads, key, value = 4, 6, 5
    bias, transition, decay = 4 * heads * key * value, 4 * heads * key * key, 4 * heads
    both_ways = [2 * bias, bias + transition, 0]  # sent in forward
    back = [0, bias, bias + bias + transition]
    assert bytes_sent("delta rule", in_order) == [
        (a + b) // 2 for a, b in zip(both_ways, back, strict=True)
    ]
    both_ways = [2 * bias, bias + decay, 0]
    back = [0, bias, bias + bias + decay]
    assert bytes_sent("mamba2", in_order) == [
        (a + b) // 2 for a, b in zip(both_ways, back, strict=True)
    ]
    rows = 4 * heads * 3
    assert bytes_sent("convolution", in_order) == [rows // 2, rows, rows // 2]


@pytest.mark.parametrize(
    ("kind", "room", "name"),
    [
        ("delta rule", carryover, "compute_starting_states"),
        ("delta rule by channel", carryover, "compute_starting_states"),
        ("mamba2", carryover, "compute_starting_states"),
        ("convolution", convolution, "_gather_halo"),
    ],
)
def test_a_state_that_is_lost_is_seen(
    kind: str, room: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the tests above: without what comes before a segment they fail by far."""
    real = getattr(room, name)

    def forgetful(*args: Any) -> Any:
        found = real(*args)
        return (
            {index: 0 * state for index, state in found.items()}
            if isinstance(found, dict)
            else 0 * found
        )

    monkeypatch.setattr(room, name, forgetful)
    differences = worst(kind, ODD, threads(kind, ODD))
    assert differences["output"] > 0.05, differences


def test_a_transition_that_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = carryover.compute_starting_states
    monkeypatch.setattr(
        carryover,
        "compute_starting_states",
        lambda segments, carried, _: real(segments, carried, lambda _, state: state),
    )
    for kind in KINDS[:3]:
        assert max(worst(kind, ODD, threads(kind, ODD)).values()) > 0.01


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_exchanges_nothing_if_what_came_was_kept(
    kind: str, use_reentrant: bool
) -> None:
    def work(group: AttentionGroup, kept: bool) -> tuple[int, dict[str, torch.Tensor]]:
        meter, module, store = Meter(), torch.nn.Identity(), OutputStore()
        segments = Segments.from_layout(Layout.from_segments(ODD), group, meter)
        count = segments.offsets[-1]
        leaves = {
            name: tensor.requires_grad_()
            for name, tensor in tokens_of(kind, group.rank, count).items()
        } | weights_of(kind)

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            stored = store.find_outputs(module, tensors) if kept else None
            return cut_row(kind, dict(zip(leaves, tensors, strict=True)), segments, stored=stored)

        output = checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant)
        output.sum().backward()
        assert not store.by_layer, "backward has dropped it"
        return meter.state_exchanges, {
            name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None
        }

    for kept, exchanges in ((True, 2), (False, 3)):
        ranks = ThreadWorld(4).run(lambda group, kept=kept: work(group, kept))
        assert [count for count, _ in ranks] == [exchanges] * 4
        gradients = [found for _, found in ranks]
        if kept:
            expected = gradients
    for found, others in zip(gradients, expected, strict=True):
        assert found
        assert all(torch.equal(found[name], others[name]) for name in found)


@pytest.mark.parametrize("kind", ["delta rule", "mamba2"])
def test_autocast_is_not_for_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast products would be in bfloat16, those of states among them."""
    real = cut_documents.cut_row

    def under_autocast(*args: Any, **options: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return real(*args, **options)

    monkeypatch.setattr(cut_documents, "cut_row", under_autocast)
    assert_exact(kind, ODD, threads(kind, ODD, torch.float32), torch.float32)


def test_whole_documents_are_one_call_of_the_rule() -> None:
    calls = []

    def rule(
        inputs: delta_rule.DeltaInputs, lengths: Any, states: Any, *, final_states: bool
    ) -> delta_rule.RuleOutputs:
        calls.append((list(lengths), states, final_states))
        return delta_rule.RuleOutputs(inputs.value, None)

    inputs = delta_rule.DeltaInputs(
        *(torch.ones(1, 9, *shape) for shape in ((2, 3), (2, 3), (4, 5), (4,), (4,)))
    )
    assert torch.equal(
        delta_rule.compute_gated_delta_rule(inputs, Segments.from_lengths([4, 1, 4]), rule),
        inputs.value,
    )
    assert calls == [([4, 1, 4], None, False)]


def test_segments_are_those_of_a_layout_that_is_split_by_heads() -> None:
    layout = Layout.from_segments(ODD)
    split = layout.split_heads(np.isin(layout.documents, [0, 4]), 2)
    for rank in range(4):
        group = AttentionGroup((0, 1, 2, 3), rank)
        whole, parts = Segments.from_layout(layout, group), Segments.from_layout(split, group)
        assert (whole.here, whole.cut, whole.exchanges) == (parts.here, parts.cut, parts.exchanges)
    assert len(Segments.from_layout(layout, AttentionGroup((0, 1, 2, 3), 1)).here) == 4, (
        "neighbours are one segment"
    )


def test_wrong_inputs_are_named() -> None:
    layout = Layout.from_segments([[(0, 0, 4)], [(0, 4, 4)]])
    with pytest.raises(LayoutError, match="layout has 2 ranks, and the group has 1"):
        Segments.from_layout(layout, AttentionGroup())
    with pytest.raises(LayoutError, match=r"\[0, 1\] context segments .* of a nano-batch"):
        Segments.from_layout(replace(layout, context=np.array([0, 1])), AttentionGroup((0, 1), 0))
    for shape in ((1, 3, 9), (2, 3, 8)):
        with pytest.raises(
            LayoutError,
            match=(
                rf"shape \({shape[0]}, 3, {shape[2]}\), and the segments of this rank have 8 tokens"
            ),
        ):
            convolution.compute_causal_convolution(
                torch.ones(shape), torch.relu, 4, Segments.from_lengths([8])
            )


def one_stays_away(rank: int) -> str:
    group = AttentionGroup.create(timeout_seconds=2)
    if rank:
        return ""
    with pytest.raises(DistCADesyncError) as caught:
        run_rank("mamba2", [[(0, 4, 4)], [(0, 0, 4)]], group, torch.float32)
    return str(caught.value)


def test_a_rank_that_does_not_come_ends_the_wait(rank_pool: RankPools) -> None:
    pool = rank_pool(2)
    try:
        message = pool(one_stays_away, timeout=60)[0]
        assert (
            "waiting for the states in forward of exchange 0 of recurrent layers in a micro-batch"
            in message
        )
    finally:
        pool.close()
