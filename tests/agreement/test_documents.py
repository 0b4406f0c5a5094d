"""The documents that attention reads from a batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.utils import _apply_to_tensors

import hf_distca
from document_keys import say_documents
from handles import make_handle
from hf_distca.agreement import documents as documents_module
from hf_distca.agreement.documents import DOCUMENT_KEYS, PackedDocuments, TokenBatch
from hf_distca.errors import LayoutError
from hf_distca.integration.hooks.attention import distca_attention


@pytest.mark.parametrize("key", DOCUMENT_KEYS)
def test_first_document_key_of_a_batch_decides_the_lengths(key: str) -> None:
    batch = {"input_ids": torch.zeros(1, 9, dtype=torch.int64), **dict.fromkeys(DOCUMENT_KEYS)}
    rest = list(DOCUMENT_KEYS)[list(DOCUMENT_KEYS).index(key) + 1 :]
    later = {other: value for other, value in say_documents((5, 4)).items() if other in rest}
    documents = TokenBatch.from_batch(
        batch | later | {key: say_documents((3, 6))[key]}
    ).read_documents()
    assert documents.runs[:, 2].tolist() == [3, 6]


@pytest.mark.parametrize("key", DOCUMENT_KEYS)
def test_batch_keys_that_give_no_starts_are_ignored_if_documents_span_ranks(key: str) -> None:
    """The positions describe the second part of one document, and a whole document."""
    said = {
        "distca_documents": PackedDocuments((5, 4), starts=(3, 0), documents=(1, 2)),
        "position_ids": torch.tensor([[3, 4, 5, 6, 7, 0, 1, 2, 3]]),
    }
    batch = {"input_ids": torch.zeros(1, 9, dtype=torch.int64), **say_documents((5, 4)), **said}
    given = {name: batch[name] for name in ("input_ids", "position_ids", key)}
    documents = TokenBatch.from_batch(given).read_documents(span_ranks=True)
    assert documents.span_ranks
    assert documents.runs[:, 1:].tolist() == [[3, 5], [0, 4]]


def test_order_of_document_keys_decides_which_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said, other = say_documents((5, 4)), say_documents((3, 6))
    batch = {"input_ids": torch.zeros(1, 9, dtype=torch.int64)}
    batch |= {**other, "position_ids": said["position_ids"]}
    for keys, lengths in ((list(DOCUMENT_KEYS), [3, 6]), (list(reversed(DOCUMENT_KEYS)), [5, 4])):
        order = {key: DOCUMENT_KEYS[key] for key in keys}
        monkeypatch.setattr(documents_module, "DOCUMENT_KEYS", order)
        assert TokenBatch.from_batch(batch).read_documents().runs[:, 2].tolist() == lengths


@pytest.mark.parametrize(
    "given",
    [PackedDocuments((3, 4)), make_handle(1, 7)],
)
def test_engines_that_cast_arguments_keep_documents_and_handles(given: object) -> None:
    casts = _apply_to_tensors(
        lambda tensor: tensor.bfloat16(), {"attention_mask": given, "rest": (given, torch.ones(1))}
    )
    assert casts["attention_mask"] is given
    assert casts["rest"][0] is given


def test_packed_documents_survive_pickle_and_copy() -> None:
    packed = PackedDocuments([3, 4], [0, 2], [7, 8])
    for other in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert other == packed
        assert hash(other) == hash(packed)
    assert packed != PackedDocuments((3, 4))
    assert "lengths=(3, 4)" in repr(packed)


def test_packed_documents_with_missing_starts_are_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"starts=\(\), documents=\(\)\): give starts and documents for each"
    ):
        PackedDocuments([3], [], [])
    assert PackedDocuments([], [], []).lengths == ()


@pytest.mark.parametrize(
    ("starts", "numbers", "whole"),
    [
        (None, None, True),
        ((0, 0, 0), (7, 3, 9), True),
        ((0, 3, 0), (7, 7, 9), False),  # one document in two parts
        ((0, 0, 2), (7, 3, 9), False),  # the first part is on another rank
    ],
)
def test_documents_are_whole_if_each_is_one_run_from_position_0(
    starts: tuple[int, ...] | None, numbers: tuple[int, ...] | None, whole: bool
) -> None:
    documents = TokenBatch(
        1, 9, packed=PackedDocuments((3, 4, 2), starts, numbers)
    ).read_documents()
    assert documents.has_whole_documents == whole


@pytest.mark.parametrize(
    ("positions", "whole"), [([0, 1, 2, 0, 1], True), ([2, 3, 0, 1, 2], False)]
)
def test_runs_of_positions_are_whole_if_all_begin_at_0(positions: list[int], whole: bool) -> None:
    documents = TokenBatch(1, 5, position_ids=torch.tensor([positions])).read_documents(
        span_ranks=True
    )
    assert documents.has_whole_documents == whole


def test_documents_with_context_are_not_whole() -> None:
    first, second = TokenBatch(1, 9, packed=PackedDocuments((3, 6))).read_documents().split_at(5)
    assert first.has_whole_documents
    assert not second.has_whole_documents


def test_a_document_given_twice_is_refused_even_on_one_rank() -> None:
    """The layout checks runs even if both begin at position 0."""
    packed, module = PackedDocuments((3, 4), (0, 0), (7, 7)), torch.nn.Linear(1, 1).train()
    states = (torch.randn(1, heads, 7, 8) for heads in (2, 1, 1))
    hf_distca.configure()
    with pytest.raises(LayoutError, match="must cover it from 0"):
        distca_attention(
            module,
            *states,
            make_handle(1, 7),
            distca_documents=packed,
        )


def test_training_row_that_begins_inside_a_document_is_refused() -> None:
    positions = torch.cat([torch.arange(5, 9), torch.arange(4)])[None]
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"row 0 .* begins at position 5.*documents_span_ranks=True",
    ):
        TokenBatch(1, 8, position_ids=positions).read_documents(training=True)
    assert TokenBatch(1, 8, position_ids=positions).read_documents().runs[:, 2].tolist() == [4, 4]
    assert TokenBatch(1, 8, position_ids=positions).read_documents(
        training=True, span_ranks=True
    ).runs[0].tolist() == [-1, 5, 4]


def test_rows_after_padding_may_begin_at_any_position() -> None:
    padding = torch.tensor([[False, False, True, True], [True, True, True, True]])
    for positions in (None, torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])):
        found = TokenBatch(2, 4, position_ids=positions, padding=padding).read_documents(
            training=True
        )
        assert found.runs[:, 2].tolist() == [2, 4]


PADDING = torch.tensor([[True] * 6 + [False] * 2])


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [((3, 3, 2), [3, 3]), ((3, 5), [3, 3]), ((3, 3), [3, 3])],
    ids=["padding as a document", "padding in a document", "padding left out"],
)
@pytest.mark.parametrize("given", ["packed", "cu_seq_lens"])
def test_given_documents_are_read_without_their_padding(
    given: str, lengths: tuple[int, ...], kept: list[int]
) -> None:
    packed, bounds = PackedDocuments(lengths), torch.tensor([0, *lengths]).cumsum(0)
    found = TokenBatch(
        1, 8, **{given: packed if given == "packed" else bounds}, padding=PADDING
    ).read_documents()
    assert found.runs.tolist() == [[-1, 0, length] for length in kept]
    assert found.token_indices is not None
    assert found.token_indices.tolist() == list(range(6))


def test_padding_may_be_anywhere_in_documents() -> None:
    padding = torch.tensor([[False, True, True, False], [True, False, True, True]])
    found = TokenBatch(2, 4, packed=PackedDocuments((3, 1, 4)), padding=padding).read_documents()
    assert found.runs[:, 2].tolist() == [2, 3]
    assert found.token_indices is not None
    assert found.token_indices.tolist() == [1, 2, 4, 6, 7]


def test_documents_that_do_not_fit_the_padding_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match=r"have 7 tokens and the batch has 1 x 8, of which 6 are not padding: .*cover",
    ):
        TokenBatch(1, 8, packed=PackedDocuments((3, 4)), padding=PADDING).read_documents()


@pytest.mark.parametrize("lengths", [(3, 5), (3, 3)])
def test_padding_in_documents_that_span_ranks_is_refused(lengths: tuple[int, int]) -> None:
    """Other ranks rely on how many tokens of a document this rank holds."""
    packed = PackedDocuments(lengths, (4, 0), (0, 1))
    with pytest.raises(
        LayoutError,
        match=r"2 of the 1 x 8 tokens .* padding in attention_mask.*leave attention_mask",
    ):
        TokenBatch(1, 8, packed=packed, padding=PADDING).read_documents()
    assert (
        TokenBatch(1, 8, packed=PackedDocuments((3, 5), (4, 0), (0, 1)), padding=PADDING | True)
        .read_documents()
        .span_ranks
    )
