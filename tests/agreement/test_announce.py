"""Announcements are compact, are read as written, and differences raise errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import MadeUpGroup, pack

from hf_distca.agreement.announce import (
    FIGURE_COUNT,
    HEADER_SIZE,
    Announcement,
    Announcements,
    PlanKey,
    check_agreement,
    collect_shared_settings,
    hash_settings,
)
from hf_distca.agreement.batch_plan import Measurement
from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError
from hf_distca.integration.nano_batches import choose_cut
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout

SHAPE = AttentionShape(4, 2, 16, 16, 2)
KEY = PlanKey(SHAPE, "cpu")
SETTINGS = DistCAConfig(), (CostModel.make_of_pairs(SHAPE),), ("torch.bfloat16",)
FACTS = collect_shared_settings(*SETTINGS)
LENGTHS = st.lists(st.lists(st.integers(1, 50), max_size=6), min_size=1, max_size=6)


def announce(*documents: Documents, key: PlanKey = KEY, **changes: int) -> Announcement:
    numbers = {"count": 1, "settings": 7, "exchanges": 4, "checksum": 9, **changes}
    return Announcement(
        **numbers,
        figures=[Measurement(5, 6, 7, 8, 9)],
        documents=[(one, key.nano) for one in documents],
    )


@given(LENGTHS, LENGTHS)
def test_documents_of_all_ranks_are_read_as_they_were_announced(
    first: list[list[int]], second: list[list[int]]
) -> None:
    ranks = min(len(first), len(second))
    rows = [
        announce(pack(*a), pack(*b)).to_row()
        for a, b in zip(first[:ranks], second[:ranks], strict=True)
    ]
    read = Announcements.from_rows(rows)
    assert read.figures.tolist() == [[[5, 6, 7, 8, 9]]] * ranks
    for stated, lengths in zip(read.read_documents(), (first, second), strict=True):
        layout, wanted = stated.build_layout(), Layout.from_lengths(lengths[:ranks])
        for column in ("document", "start", "length", "offsets", "context"):
            assert getattr(layout, column).tolist() == getattr(wanted, column).tolist()


@given(LENGTHS)
def test_a_document_on_one_rank_is_announced_as_one_number(ranks: list[list[int]]) -> None:
    sizes = {len(announce(pack(*lengths)).to_row()) - len(lengths) for lengths in ranks}
    assert sizes == {HEADER_SIZE + FIGURE_COUNT + 5}


def test_documents_over_ranks_are_read_with_their_ids_and_starts() -> None:
    parts = [PackedDocuments((10, 4), (0, 0), (7, 8)), PackedDocuments((6, 5), (10, 4), (7, 8))]
    rows = [
        announce(TokenBatch(1, sum(one.lengths), packed=one).read_documents()).to_row()
        for one in parts
    ]
    (stated,) = Announcements.from_rows(rows).read_documents()
    assert [list(map(tuple, stated.build_layout().list_segments(rank))) for rank in (0, 1)] == [
        [(7, 0, 10), (8, 0, 4)],
        [(7, 10, 6), (8, 4, 5)],
    ]


@given(LENGTHS)
def test_second_nano_batch_has_the_cut_document_as_context(ranks: list[list[int]]) -> None:
    ranks = [lengths or [1] for lengths in ranks]
    second = [choose_cut(1, sum(lengths), pack(*lengths), 1)[2][1] for lengths in ranks]
    (stated,) = Announcements.from_rows(
        [announce(one, key=KEY._replace(nano=2)).to_row() for one in second]
    ).read_documents()
    layout = stated.build_layout()
    assert layout.context_tokens.tolist() == [one.context_tokens for one in second]
    assert layout.query_tokens.tolist() == [
        int(one.runs[:, 2].sum()) - one.context_tokens for one in second
    ]
    for rank, one in enumerate(second):
        if one.context_tokens:
            before, rest = layout.list_segments(rank)[:2]
            assert (before.document, before.end) == (rest.document, rest.start)


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"count": 2}, "different numbers of requested plans in here: rank 0: 1, rank 1: 2"),
        (
            {"exchanges": 6},
            "different numbers of exchanges up to here in here: rank 0: 4, rank 1: 6",
        ),
        (
            {"checksum": 8},
            (
                "different layers in their exchanges up to here (as checksums) in here: rank 0: 9,"
                " rank 1: 8"
            ),
        ),
    ],
)
def test_differences_between_ranks_are_named(odd: dict[str, int], text: str) -> None:
    rows = [announce(pack(3)).to_row(), announce(pack(3), **odd).to_row()]
    with pytest.raises(DistCADesyncError) as caught:
        check_agreement(Announcements.from_rows(rows), FACTS, MadeUpGroup(2), "here")
    assert text in str(caught.value)


def test_a_rank_that_asks_for_more_plans_is_named() -> None:
    rows = [announce(pack(3)).to_row(), announce(pack(3), pack(4)).to_row()]
    with pytest.raises(
        DistCADesyncError, match="different numbers of plans at once in here: rank 0: 1, rank 1: 2"
    ):
        check_agreement(Announcements.from_rows(rows), FACTS, MadeUpGroup(2), "here")


def test_hash_of_settings_covers_config_costs_and_dtypes() -> None:
    others = {
        hash_settings(collect_shared_settings(*changed))
        for changed in (
            (DistCAConfig(tolerance=0.5), *SETTINGS[1:]),
            (SETTINGS[0], (CostModel.make_analytic(SHAPE),), SETTINGS[2]),
            (*SETTINGS[:2], ("torch.float16",)),
            SETTINGS,
        )
    }
    assert len(others) == 4
    assert all(0 <= one < 2**63 for one in others)


def test_many_documents_on_one_rank_lengthen_only_its_own_row() -> None:
    many, few = announce(pack(*[1] * 1024)).to_row(), announce(pack(1024)).to_row()
    assert (len(many), len(few)) == (HEADER_SIZE + 10 + 1024, HEADER_SIZE + 10 + 1)
    (stated,) = Announcements.from_rows([many, few]).read_documents()
    assert stated.header[:, 3].tolist() == [1024, 1]
    assert np.array_equal(stated.build_layout().offsets, [0, 1024, 1025])
