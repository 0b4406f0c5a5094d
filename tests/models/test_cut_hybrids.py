"""Each type with recurrent layers, packed and cut over up to four ranks in any placement, equals
whole documents.

The figures are those of the table in benchmarks/results/hybrids_2026-11.md, which `python
tests/models/cut_hybrids.py` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from cut_hybrids import (
    CONTROLS,
    FLOAT32,
    LENGTHS,
    PLACEMENTS,
    RANKS,
    TYPES,
    columns_of,
    measure_cut,
    stated,
)

from ranks import RankPool

# One of each rule; the columns have their turns.
FAST = {
    ("qwen3_5", "head and tail"),
    ("nemotron_h", "3, 2 and 1 pieces"),
    ("lfm2", "halos lost"),
}
BOUND = 1e-5
CUT = [column for column, (_, numbered) in PLACEMENTS.items() if numbered]

page = cache(stated)


def cells(columns: list[str]) -> list[object]:
    """Types and those of these columns that they have."""
    pairs = [
        (model_type, column)
        for model_type in TYPES
        for column in columns_of(model_type)
        if column in columns
    ]
    return [
        pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow, id=", ".join(pair))
        for pair in pairs
    ]


def test_the_page_has_every_type_and_column() -> None:
    assert set(page()) == {
        (model_type, column) for model_type in TYPES for column in columns_of(model_type)
    }
    for (model_type, column), figure in page().items():
        if column in PLACEMENTS:
            assert figure <= BOUND, (model_type, column)


def test_placements_are_what_they_say() -> None:
    pieces = {
        column: [sum(document == 0 for document, *_ in held) for held in PLACEMENTS[column][0]]
        for column in CUT
    }
    assert all(
        sum(end - start for held in PLACEMENTS[column][0] for _, start, end in held) == sum(LENGTHS)
        for column in CUT
    )
    assert pieces["in order"] == pieces["over 4 ranks"] == [1] * RANKS
    assert set(pieces["head and tail"][:-1]) <= {1, 2}
    assert max(pieces["head and tail"]) == 2
    assert pieces["3, 2 and 1 pieces"] == [3, 2, 1, 0]
    assert (
        sum(
            end - start == 1 for held in PLACEMENTS["one-token pieces"][0] for _, start, end in held
        )
        > 30
    )


@pytest.mark.parametrize(("model_type", "placement"), cells([*PLACEMENTS]))
def test_packed_and_cut_documents_equal_whole_ones(
    model_type: str, placement: str, rank_pool: Callable[[int], RankPool]
) -> None:
    value, what, shares = measure_cut(rank_pool, model_type, placement)
    assert value <= BOUND, f"{what} differs by {value:.1e}"
    assert value <= 10 * page()[model_type, placement], (
        f"{what} differs by {value:.1e}, and the page says less"
    )
    assert bool(shares[0].state_exchanges) == (placement in CUT)
    assert len({share.state_exchanges for share in shares}) == 1


@pytest.mark.parametrize(("model_type", "control"), cells([*CONTROLS]))
def test_what_is_lost_on_the_way_is_seen(
    model_type: str, control: str, rank_pool: Callable[[int], RankPool]
) -> None:
    value, _, shares = measure_cut(rank_pool, model_type, control)
    assert shares, "all ranks ran"
    assert value > 0.1
    assert value == pytest.approx(page()[model_type, control], rel=0.1)


@pytest.mark.parametrize(("model_type", "column"), cells([FLOAT32[0]]))
def test_float32_rounds_cut_documents_as_it_rounds_whole_ones(
    model_type: str, column: str, rank_pool: Callable[[int], RankPool]
) -> None:
    value, what, _ = measure_cut(rank_pool, model_type, column)
    whole, _, _ = measure_cut(rank_pool, model_type, FLOAT32[1])
    assert value <= max(BOUND, 2 * whole), (
        f"{what} differs by {value:.1e}, of whole documents by {whole:.1e}"
    )
