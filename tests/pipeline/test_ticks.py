"""The order of ticks, merged calls, and the layers of stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hf_distca.agreement.announce import AnnouncedDocuments
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.pipeline.model_parts import divide_layers
from hf_distca.pipeline.step_checks import build_layout_of_copies
from hf_distca.pipeline.ticks import merge_calls, order_ticks

SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 8), (4, 3), (4, 8), (8, 32)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_a_step_has_as_many_ticks_as_1f1b(stages: int, micro_batches: int) -> None:
    order = order_ticks(stages, micro_batches)
    assert len(order) == 2 * (micro_batches + stages - 1)
    assert [tick.number for tick in order] == list(range(len(order)))
    when = {
        (tick.backward, at, stage): tick.number
        for tick in order
        for stage, at in enumerate(tick.micro_batches)
        if at is not None
    }
    assert len(when) == 2 * stages * micro_batches
    for at, stage in itertools.product(range(micro_batches), range(stages)):
        assert when[False, at, stage] < when[True, at, stage]
        if stage:  # forward follows the stage before, backward the one behind
            assert when[False, at, stage - 1] < when[False, at, stage]
            assert when[True, at, stage] < when[True, at, stage - 1]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_later_stages_hold_fewer_micro_batches_at_once(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        held = most = 0
        for tick in order_ticks(stages, micro_batches):
            if tick.micro_batches[stage] is not None:
                most = max(most, held + (not tick.backward))
                held += -1 if tick.backward else 1
        assert most == min(micro_batches, 2 * (stages - stage) - 1)


def test_evaluation_has_only_forward_ticks() -> None:
    order = order_ticks(3, 4, backward=False)
    assert len(order) == 4 + 3 - 1
    assert not any(tick.backward for tick in order)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (["aaa", "aaa"], ["a00", "a11", "a22"]),
        (["aaa", "a"], ["a00", "a1-", "a2-"]),
        (["ab", "ab"], ["a00", "b11"]),
        (["aba", "bab"], ["a0-", "b10", "a21", "b-2"]),
        (["a", "", "ab"], ["a0-0", "b--1"]),
        (["a", "b"], ["a0-", "b-0"]),
    ],
)
def test_calls_of_one_kind_are_made_together(stages: list[str], expected: list[str]) -> None:
    calls = [
        "".join([call.kind, *("-" if own is None else str(own) for own in call.calls)])
        for call in merge_calls(stages)
    ]
    assert calls == expected


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([1, 1, 1, 3], 2, [3, 1]),  # the head counts
        ([1, 1, 1, 1, 1, 1, 1, 4], 4, [2, 3, 2, 1]),
        ([5], 1, [1]),
    ],
)
def test_the_most_expensive_stage_is_as_cheap_as_possible(
    costs: list[float], stages: int, expected: list[int]
) -> None:
    found = divide_layers(costs, stages)
    assert (len(found), sum(found), min(found) >= 1) == (stages, len(costs), True)

    def worst(layers: list[int]) -> float:
        cuts = [0, *itertools.accumulate(layers)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(cuts))

    assert worst(found) == worst(expected)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 layers cannot be split into 3 stages"):
        divide_layers([1.0, 1.0], 3)


def test_a_document_with_missing_tokens_is_refused() -> None:
    """Two copies in two stages share a document; without its middle, the layout is refused."""
    copies, header = (0, 0, 1, 1), np.array([[1, 0, 0, 1, 0]] * 4)
    for second in (10, 20):
        runs = np.array([[7, 0, 10], [7, 0, 10], [7, second, 10], [7, second, 10]])
        documents = AnnouncedDocuments(header, runs)
        if second == 10:
            layout = build_layout_of_copies(documents, copies, (0, 1, 2, 3), 5)
            assert layout.list_segments(1)[0][1:] == (10, 10)
        else:
            with pytest.raises(LayoutError, match=r"micro-batch 5 .* shares of one data set"):
                build_layout_of_copies(documents, copies, (0, 1, 2, 3), 5)
