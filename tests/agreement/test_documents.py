"""Documents as they reach attention."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

import hf_distca
from hf_distca.agreement.documents import PackedDocuments, PlansAhead, read_documents
from hf_distca.integration.handle import AttentionHandle


@pytest.mark.parametrize("given", [PackedDocuments((3, 4)), AttentionHandle(1, 7)])
def test_engines_that_cast_the_arguments_of_layers_hand_on_the_same_object(given: object) -> None:
    casts = _apply_to_tensors(lambda tensor: tensor.bfloat16(), {"attention_mask": given, "rest": (given, torch.ones(1))})
    assert casts["attention_mask"] is given
    assert casts["rest"][0] is given


def test_packed_documents_are_values_that_travel_to_workers_and_back() -> None:
    packed = PackedDocuments([3, 4], [0, 2], [7, 8])
    for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert other == packed
        assert hash(other) == hash(packed)
    assert packed != PackedDocuments((3, 4))
    assert "lengths=(3, 4)" in repr(packed)
    assert packed.planned(PlansAhead()) == packed


def test_packed_documents_without_a_number_of_each_are_refused() -> None:
    with pytest.raises(hf_distca.LayoutError, match=r"starts=\(\), documents=\(\)\): give starts and documents for each"):
        PackedDocuments([3], [], [])
    assert PackedDocuments([], [], []).lengths == ()


def test_a_training_row_that_another_tool_has_cut_is_refused() -> None:
    positions = torch.cat([torch.arange(5, 9), torch.arange(4)])[None]
    with pytest.raises(hf_distca.UnsupportedError, match=r"row 0 .* begins at position 5.*documents_span_ranks=True"):
        read_documents(1, 8, position_ids=positions, training=True)
    assert read_documents(1, 8, position_ids=positions).rows[:, 2].tolist() == [4, 4]
    assert read_documents(1, 8, position_ids=positions, training=True, span_ranks=True).rows[0].tolist() == [-1, 5, 4]


def test_rows_behind_padding_may_begin_anywhere() -> None:
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    for positions in (None, torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])):
        found = read_documents(2, 4, position_ids=positions, padding=padding, training=True)
        assert found.rows[:, 2].tolist() == [2, 4]
