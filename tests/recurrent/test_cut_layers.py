"""Recurrent layers over cut documents have the outputs and gradients of whole documents."""

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
    Results,
    ThreadWorld,
    cut_row,
    draw_tokens,
    make_weights,
    measure_errors,
    run_rank,
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

# Both ends of a document on one rank, pieces of one token or shorter than the convolution's kernel,
# whole documents, neighbours that form one segment, a document that returns to its rank, and a rank
# without tokens.
ODD = [
    [(0, 0, 20), (2, 0, 1), (4, 20, 1), (0, 40, 15)],
    [(1, 0, 7), (0, 20, 1), (0, 22, 18), (5, 2, 1), (5, 3, 1)],
    [(4, 21, 9), (0, 21, 1), (3, 0, 2), (5, 0, 1), (4, 0, 20), (5, 1, 1), (5, 4, 30)],
    [],
]
EXACT = {torch.float64: 1e-13, torch.float32: 3e-6}


def run_threads(
    kind: str, placement: Placement, dtype: torch.dtype = torch.float64, **options: Any
) -> list[Results]:
    return ThreadWorld(len(placement)).run(
        lambda group: run_rank(kind, placement, group, dtype, **options)
    )


def assert_exact(kind: str, placement: Placement, ranks: list[Results], dtype: torch.dtype) -> None:
    differences = measure_errors(kind, placement, ranks)
    assert max(differences.values()) < EXACT[dtype], differences


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw documents cut anywhere, with segments on any ranks in any order."""
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
def test_documents_cut_anywhere_are_exact(placement: Placement, kind: str) -> None:
    if any(placement):
        assert_exact(kind, placement, run_threads(kind, placement), torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_bitwise_reproducible_gradients(kind: str) -> None:
    ranks, again = run_threads(kind, ODD, torch.float32), run_threads(kind, ODD, torch.float32)
    assert_exact(kind, ODD, ranks, torch.float32)
    for one, other in zip(ranks, again, strict=True):
        arrays, others = one.by_token | one.by_weight, other.by_token | other.by_weight
        assert set(arrays) == {"output", *draw_tokens(kind, 0, 1), *make_weights(kind)} - {
            "gradient"
        }, "also on a rank without tokens"
        assert all(np.array_equal(arrays[name], others[name]) for name in arrays)


def run_process(
    rank: int, kind: str, placement: Placement, dtype: torch.dtype, kernel: str | None = None
) -> Results:
    if rank >= len(placement):
        return Results({}, {}, Meter())
    group = (
        AttentionGroup.find_or_create(timeout_seconds=60)
        if len(placement) > 1
        else AttentionGroup()
    )
    options = {} if kernel is None else {"kernel": get_kernel(kernel)}
    return run_rank(kind, placement, group, dtype, **options)


def get_kernel(kind: str) -> Callable[..., Any]:
    """Return the kernel that models use without kernel packages, with short chunks."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    kernel: Callable[..., Any] = {
        "delta rule": torch_chunk_gated_delta_rule,
        "delta rule by channel": chunk_kimi_delta_attention,
        "mamba2": mamba2_chunk_scan,
    }[kind]
    return lambda *inputs, **options: kernel(*inputs, chunk_size=8, **options)


def place_documents(ranks: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Place documents of some hundred tokens, cut in order or with both ends on one rank."""
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
def test_cut_documents_are_exact_with_kernels_of_transformers(
    rank_pool: RankPools, kind: str, ranks: int
) -> None:
    """Transformers computes states in float32, so results are exact to its rounding."""
    kernel = None if kind == "convolution" else kind
    for seed in range(2):
        placement = place_documents(ranks, seed)
        found = rank_pool(ranks)(run_process, kind, placement, torch.float32, kernel)
        assert_exact(kind, placement, found, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_errors_are_about_those_of_whole_documents(kind: str) -> None:
    placement = place_documents(3, 5)
    lengths = np.bincount(
        [row[0] for rank in placement for row in rank],
        [row[2] for rank in placement for row in rank],
    )
    whole = [[(document, 0, int(length)) for document, length in enumerate(lengths)]]
    options = {} if kind == "convolution" else {"kernel": get_kernel(kind)}
    cut = measure_errors(kind, placement, run_threads(kind, placement, torch.bfloat16, **options))
    alone = measure_errors(kind, whole, run_threads(kind, whole, torch.bfloat16, **options))
    assert all(cut[name] < 1.5 * alone[name] + 1e-3 for name in cut), (cut, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_exchanged_if_each_document_is_on_one_rank(kind: str) -> None:
    placement = [[(0, 0, 9), (1, 0, 5)], [(2, 0, 4), (3, 0, 9), (2, 4, 7)], []]
    ranks = run_threads(kind, placement)
    assert_exact(kind, placement, ranks, torch.float64)
    assert [(ran.meter.state_exchanges, ran.meter.state_bytes) for ran in ranks] == [(0, 0)] * 3


def count_sent_bytes(kind: str, placement: Placement) -> list[int]:
    ranks = run_threads(kind, placement, torch.float32)
    assert {ran.meter.state_exchanges for ran in ranks} == {2}, (
        "forward and backward, on every rank"
    )
    return [ran.meter.state_bytes // 2 for ran in ranks if ran.meter.state_bytes % 2 == 0]


def test_ranks_send_only_the_summaries_that_others_need() -> None:
    """First segments send no transition, last ones no summary; backward sends as much in return."""
    in_order = [[(0, 0, 30)], [(0, 30, 30)], [(0, 60, 30)]]
    heads, key, value = 4, 6, 5
    bias, transition, decay = 4 * heads * key * value, 4 * heads * key * key, 4 * heads
    both_ways = [2 * bias, bias + transition, 0]  # sent in forward
    back = [0, bias, bias + bias + transition]
    assert count_sent_bytes("delta rule", in_order) == [
        (a + b) // 2 for a, b in zip(both_ways, back, strict=True)
    ]
    both_ways = [2 * bias, bias + decay, 0]
    back = [0, bias, bias + bias + decay]
    assert count_sent_bytes("mamba2", in_order) == [
        (a + b) // 2 for a, b in zip(both_ways, back, strict=True)
    ]
    rows = 4 * heads * 3
    assert count_sent_bytes("convolution", in_order) == [rows // 2, rows, rows // 2]


@pytest.mark.parametrize(
    ("kind", "room", "name"),
    [
        ("delta rule", carryover, "compute_starting_states"),
        ("delta rule by channel", carryover, "compute_starting_states"),
        ("mamba2", carryover, "compute_starting_states"),
        ("convolution", convolution, "_gather_halo"),
    ],
)
def test_a_lost_state_causes_a_large_error(
    kind: str, room: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the tests above: without the states before segments, they fail by far."""
    real = getattr(room, name)

    def forgetful(*args: Any) -> Any:
        found = real(*args)
        return (
            {index: 0 * state for index, state in found.items()}
            if isinstance(found, dict)
            else 0 * found
        )

    monkeypatch.setattr(room, name, forgetful)
    differences = measure_errors(kind, ODD, run_threads(kind, ODD))
    assert differences["output"] > 0.05, differences


def test_a_lost_transition_causes_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = carryover.compute_starting_states
    monkeypatch.setattr(
        carryover,
        "compute_starting_states",
        lambda segments, carried, _: real(segments, carried, lambda _, state: state),
    )
    for kind in KINDS[:3]:
        assert max(measure_errors(kind, ODD, run_threads(kind, ODD)).values()) > 0.01


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recompute_exchanges_nothing_if_received_states_are_kept(
    kind: str, use_reentrant: bool
) -> None:
    def work(group: AttentionGroup, kept: bool) -> tuple[int, dict[str, torch.Tensor]]:
        meter, module, store = Meter(), torch.nn.Identity(), OutputStore()
        segments = Segments.from_layout(Layout.from_segments(ODD), group, meter)
        count = segments.offsets[-1]
        leaves = {
            name: tensor.requires_grad_()
            for name, tensor in draw_tokens(kind, group.rank, count).items()
        } | make_weights(kind)

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            stored = store.find_outputs(module, tensors) if kept else None
            return cut_row(kind, dict(zip(leaves, tensors, strict=True)), segments, stored=stored)

        output = checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant)
        output.sum().backward()
        assert not store.by_layer, "backward has dropped the kept outputs"
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
def test_autocast_does_not_round_states(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast would compute products of states in bfloat16."""
    real = cut_documents.cut_row

    def under_autocast(*args: Any, **options: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return real(*args, **options)

    monkeypatch.setattr(cut_documents, "cut_row", under_autocast)
    assert_exact(kind, ODD, run_threads(kind, ODD, torch.float32), torch.float32)


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


def test_splitting_a_layout_by_heads_keeps_its_segments() -> None:
    layout = Layout.from_segments(ODD)
    split = layout.split_heads(np.isin(layout.documents, [0, 4]), 2)
    for rank in range(4):
        group = AttentionGroup((0, 1, 2, 3), rank)
        whole, parts = Segments.from_layout(layout, group), Segments.from_layout(split, group)
        assert (whole.here, whole.cut, whole.exchanges) == (parts.here, parts.cut, parts.exchanges)
    assert len(Segments.from_layout(layout, AttentionGroup((0, 1, 2, 3), 1)).here) == 4, (
        "neighbours form one segment"
    )


def test_layouts_and_inputs_of_wrong_sizes_are_refused() -> None:
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


def wait_alone(rank: int) -> str:
    group = AttentionGroup.create(timeout_seconds=2)
    if rank:
        return ""
    with pytest.raises(DistCADesyncError) as caught:
        run_rank("mamba2", [[(0, 4, 4)], [(0, 0, 4)]], group, torch.float32)
    return str(caught.value)


def test_a_missing_rank_causes_an_error_that_names_the_wait(rank_pool: RankPools) -> None:
    pool = rank_pool(2)
    try:
        message = pool(wait_alone, timeout=60)[0]
        assert (
            "waiting for the states in forward of exchange 0 of recurrent layers in a micro-batch"
            in message
        )
    finally:
        pool.close()
