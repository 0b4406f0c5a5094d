"""Shares of all ranks together are the global batch, and a share reads only its documents."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from some_documents import check_shares, draw_lengths, expect, make_dealing, make_rows

from hf_distca import PackingCollator
from hf_distca.data.columns import InputNames
from hf_distca.data.global_batches import GlobalBatches
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.shares import Shares
from hf_distca.errors import LayoutError

FORMS: dict[str, Any] = {
    "rows": lambda rows: rows,
    "arrow": datasets.Dataset.from_list,
    "arrow, as tensors": lambda rows: datasets.Dataset.from_list(rows).with_format("torch"),
    "arrow, another order": lambda rows: datasets.Dataset.from_list(rows[::-1]).select(
        range(len(rows) - 1, -1, -1)
    ),
    "arrow, with a transform": lambda rows: datasets.Dataset.from_list(rows).with_transform(
        lambda batch: batch
    ),
    "arrays": lambda rows: [
        {name: np.array(row, dtype=np.int32) for name, row in one.items()} for one in rows
    ],
    "tensors": lambda rows: [
        {name: torch.tensor(row) for name, row in one.items()} for one in rows
    ],
}


def deal(
    documents: Any,
    ranks: int,
    tokens: int,
    *,
    ping_pong: bool = False,
    column: str = "input_ids",
    inputs: InputNames = None,
    **how: Any,
) -> Shares:
    batches = GlobalBatches(
        read_document_lengths(documents, column), ranks * tokens, quiet=True, **how
    )
    dealing = make_dealing(ranks, tokens, ping_pong=ping_pong)
    return Shares(documents, batches, dealing, column=column, pad_token_id=77, inputs=inputs)


def check_epoch(shares: Shares, rows: list[dict[str, list[int]]], epoch: int = 0) -> None:
    ranks = shares.deal_settings.ranks
    for number in range(len(shares.batches)):
        items = [shares[number * ranks + rank] for rank in range(ranks)]
        check_shares(
            items,
            expect(shares.batches.get_pieces(epoch, number), rows, 77),
            shares.deal_settings.tokens_per_rank,
        )


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_all_shares_together_hold_the_global_batch(form: str, labels: bool) -> None:
    rows = make_rows(draw_lengths(), labels=labels)
    check_epoch(deal(FORMS[form](rows), 3, 200), rows)


def test_tokens_come_from_the_named_column_instead_of_input_ids() -> None:
    rows = [{"input_ids": [1] * 8, "tokens": list(range(8))}] * 4
    for documents in (rows, datasets.Dataset.from_list(rows)):
        share = deal(documents, 1, 16, seed=None, column="tokens")[0]
        assert share["input_ids"].tolist() == list(range(8)) * 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("how", [{}, {"fill": "whole"}, {"fill": "whole", "seed": None}])
@pytest.mark.parametrize("ping_pong", [False, True])
def test_any_number_of_ranks_holds_the_same_global_batches(
    ranks: int, how: dict[str, Any], ping_pong: bool
) -> None:
    rows = make_rows(draw_lengths(40), labels=True)
    shares = deal(datasets.Dataset.from_list(rows), ranks, 600 // ranks, ping_pong=ping_pong, **how)
    assert len(shares) == ranks * len(deal(rows, 1, 600, **how))
    for epoch in (0, 2):
        shares.set_epoch(epoch)
        check_epoch(shares, rows, epoch)


def test_targets_of_all_ranks_equal_the_targets_of_documents() -> None:
    """One process that shifts labels of whole documents counts the same number."""
    rows = make_rows(draw_lengths(), labels=True)
    for ranks in (1, 2, 4):
        shares = deal(rows, ranks, 400 // ranks)
        counted = sum(
            int((shares[item]["shift_labels"] != -100).sum()) for item in range(len(shares))
        )
        assert counted == sum(
            label != -100
            for number in range(len(shares.batches))
            for _, _, label in expect(shares.batches.get_pieces(0, number), rows).values()
        )


def test_last_token_before_a_cut_is_trained_on_the_next_token() -> None:
    (one, two) = (deal([list(range(100, 116))], 2, 8, seed=None)[rank] for rank in (0, 1))
    rows = {
        int(token): (share, at)
        for share in (one, two)
        for at, token in enumerate(share["input_ids"])
    }
    for token in range(100, 116):
        share, at = rows[token]
        assert share["shift_labels"][at] == (token + 1 if token < 115 else -100)
        assert share["labels"][at] == -100
    assert len({id(share) for share, _ in rows.values()}) == 2


@pytest.mark.parametrize("form", FORMS)
def test_masked_tokens_are_no_targets(form: str) -> None:
    rows = make_rows(draw_lengths())
    masks = [[int(place % 5 > 1) for place in range(len(row["input_ids"]))] for row in rows]
    masked = [
        {**row, "completion_mask": mask, "assistant_masks": mask[::-1]}
        for row, mask in zip(rows, masks, strict=True)
    ]
    expected = [
        {
            **row,
            "labels": [
                t if a and b else -100
                for t, a, b in zip(row["input_ids"], mask, mask[::-1], strict=True)
            ],
        }
        for row, mask in zip(rows, masks, strict=True)
    ]
    check_epoch(deal(FORMS[form](masked), 3, 200), expected)
    labelled = [{**row, "labels": row["input_ids"]} for row in masked]
    check_epoch(deal(FORMS[form](labelled), 3, 200), rows)


PACKED: dict[str, tuple[dict[str, list[int]], str]] = {
    "seq_lengths": ({"seq_lengths": [7, 13]}, "'seq_lengths'.*packed already"),
    "position_ids": (
        {"position_ids": [*range(7), *range(13)]},
        r"position_ids of a document .*packed already",
    ),
    "positions that skip": (
        {"position_ids": [*range(10), *range(50, 60)]},
        "is 50 at token 10.*without gaps",
    ),
    "mask of numbers": (
        {"attention_mask": [1] * 7 + [2] * 13},
        "attention_mask of a document is 2 at token 7.*packed already",
    ),
    "token_type_ids": (
        {"token_type_ids": [0] * 20},
        "'token_type_ids' of numbers, which may be an input of the model",
    ),
    "images": (
        {"image_grid_thw": [[1, 4, 4]]},
        "'image_grid_thw' of numbers, which may be an input",
    ),
    "shift_labels": ({"shift_labels": [0] * 20}, "'shift_labels', which tells what"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PACKED)
def test_columns_that_would_change_training_are_refused(form: str, name: str) -> None:
    columns, named = PACKED[name]
    documents = FORMS[form]([{"input_ids": list(range(20)), **columns}])
    with pytest.raises(LayoutError, match=named):
        deal(documents, 1, 20)[0]
    harmless = {
        "input_ids": list(range(20)),
        "position_ids": list(range(20)),
        "attention_mask": [1] * 20,
    }
    check_epoch(deal(FORMS[form]([harmless]), 2, 10), [harmless])


@pytest.mark.parametrize("form", FORMS)
def test_columns_that_are_no_model_inputs_are_ignored(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = ("input_ids", "pixel_values")
    others = {
        "special_tokens_mask": [0] * 20,
        "image_grid_thw": [[1, 4, 4]],
        "url": "x",
        "length": 20,
    }
    row = {"input_ids": list(range(20))}
    made = FORMS[form] if form not in ("arrays", "tensors") else list
    check_epoch(deal(made([{**row, **others}]), 2, 10, inputs=inputs), [row])
    with pytest.raises(LayoutError, match="'pixel_values', an input of the model"):
        deal(made([{**row, "pixel_values": [[1.0]]}]), 2, 10, inputs=inputs)[0]


def test_model_inputs_that_begin_in_a_later_row_are_refused() -> None:
    """A data set may mix texts and images."""
    rows = [
        {"input_ids": [1] * 20, "pixel_values": None},
        {"input_ids": [2] * 20, "pixel_values": [[1.0]]},
    ]
    for documents in (rows, datasets.Dataset.from_list(rows)):
        for inputs in (None, ("input_ids", "pixel_values")):
            with pytest.raises(LayoutError, match="'pixel_values'"):
                deal(documents, 2, 10, inputs=inputs)
    texts = datasets.Dataset.from_list([{"input_ids": [1] * 20, "pixel_values": None}] * 2)
    check_epoch(deal(texts, 2, 10), [{"input_ids": [1] * 20}] * 2)


def test_tokens_may_be_in_a_column_of_any_name() -> None:
    rows = [{"text": "x", "tokens": row["input_ids"]} for row in make_rows(draw_lengths(20))]
    for documents in (rows, datasets.Dataset.from_list(rows)):
        check_epoch(
            deal(documents, 2, 100, column="tokens"), [{"input_ids": row["tokens"]} for row in rows]
        )


def chunk(values: list[Any], kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values[:7], kind), pa.array(values[7:], kind)])


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 40)]
)
def test_arrow_lists_of_any_type_are_read_from_any_chunk(kind: pa.DataType) -> None:
    rows = make_rows([40] * 20, labels=True)
    tokens = chunk([[token % 2**15 for token in row["input_ids"]] for row in rows], kind)
    labels = chunk(
        [row["labels"] if number % 3 else None for number, row in enumerate(rows)],
        pa.list_(pa.int64()),
    )
    documents = datasets.Dataset(pa.table({"labels": labels, "input_ids": tokens})).select(
        [*range(3, 20), 0, 1, 2]
    )
    expected = [{name: row for name, row in one.items() if row is not None} for one in documents]
    check_epoch(deal(documents, 2, 100), expected)
    nothing = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 2, "labels": [None] * 2})
    check_epoch(deal(nothing, 2, 3), [{"input_ids": [1, 2, 3]}] * 2)


def test_pickled_shares_of_a_saved_data_set_hold_no_tokens(tmp_path: Path) -> None:
    rows = make_rows(draw_lengths())
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    shares = deal(datasets.load_from_disk(str(tmp_path)).shuffle(seed=0), 2, 100)
    assert len(pickle.dumps(shares)) < 20_000  # a worker gets no tokens
    in_order = [row["input_ids"] for row in datasets.load_from_disk(str(tmp_path)).shuffle(seed=0)]
    check_epoch(shares, [{"input_ids": row} for row in in_order])


def test_share_reads_only_its_own_documents() -> None:
    read = set()

    class Watched(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            read.add(number)
            return super().__getitem__(number)

    rows = make_rows([50] * 40)
    documents = Watched(rows)
    batches = GlobalBatches([50] * 40, 400, quiet=True)
    shares = Shares(documents, batches, make_dealing(4, 100))
    read.clear()  # forget the documents that ranks compare
    share = shares[5]
    here = {
        int(batches.get_pieces(0, 1).documents[document])
        for document in share["distca_documents"].documents
    }
    assert read == here
    assert len(here) < 8


def test_share_converts_only_its_slice_of_arrow_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = datasets.Dataset.from_list(make_rows([4000, 96]))
    shares = deal(documents, 8, 512, seed=None)
    seen = []
    import hf_distca.data.reading as pieces

    convert = pieces.convert_integers
    monkeypatch.setattr(
        pieces,
        "convert_integers",
        lambda values, *rest: seen.append(len(values)) or convert(values, *rest),
    )
    shares[3]
    assert sum(seen) <= 2 * 512 + 8  # tokens, labels, and the labels that follow


def test_copies_share_the_epoch_and_pickles_keep_their_own() -> None:
    rows = make_rows(draw_lengths())
    shares = deal(rows, 2, 100)
    held = copy.deepcopy({"transform": shares})["transform"]
    shares.set_epoch(3)
    assert held.epoch == 3
    there = pickle.loads(pickle.dumps(shares))
    assert there.epoch == 3
    check_epoch(there, rows, 3)
    there.set_epoch(4)
    assert shares.epoch == 3


def test_shares_depend_only_on_index_and_epoch() -> None:
    """A resumed run reads only the later shares, in a new process."""
    rows = make_rows(draw_lengths())
    first, later = deal(rows, 3, 100), deal(rows, 3, 100)
    first.set_epoch(1)
    trained = [first[item] for item in range(len(first))]
    later.set_epoch(1)
    for item in reversed(range(len(later))):
        share = later[item]
        assert all(
            torch.equal(share[name], trained[item][name])
            for name in ("input_ids", "shift_labels", "position_ids")
        )
        assert share["distca_documents"] == trained[item]["distca_documents"]


def test_collator_adds_a_batch_axis_to_one_share() -> None:
    shares = deal(make_rows(draw_lengths()), 2, 100)
    share = shares[1]
    batch = PackingCollator()([share])
    assert batch.keys() == share.keys()
    assert all(
        torch.equal(batch[name], share[name][None]) for name in share if name != "distca_documents"
    )
    assert batch["distca_documents"] is share["distca_documents"]
    with pytest.raises(
        LayoutError, match=r"batch of 2 shares.*tokens_per_rank.*per_device_train_batch_size=1"
    ):
        PackingCollator()([share, shares[3]])
    with pytest.raises(LayoutError, match="batch of 2 shares"):
        PackingCollator()([{"input_ids": [1]}, share])


def test_invalid_shares_are_refused() -> None:
    rows = make_rows([20, 30])
    batches = GlobalBatches([20, 30], 40, None, quiet=True)
    with pytest.raises(LayoutError, match="Both numbers must be equal"):
        Shares(rows, batches, make_dealing(2, 10))[0]
    padded = [
        {**row, "attention_mask": [1] * 15 + [0] * (len(row["input_ids"]) - 15)} for row in rows
    ]
    for documents in (padded, datasets.Dataset.from_list(padded)):
        with pytest.raises(LayoutError, match="attention_mask of a document is 0 at token 15"):
            Shares(documents, batches, make_dealing(1, 40))[0]
    with pytest.raises(LayoutError, match="but its length or other columns"):
        Shares([row["input_ids"][:15] for row in rows], batches, make_dealing(1, 40))[0]
    with pytest.raises(LayoutError, match="labels of a document end before token 20"):
        Shares([{**row, "labels": [1]} for row in rows], batches, make_dealing(1, 40))[0]
    with pytest.raises(
        LayoutError, match=r"document 0 has no column 'input_ids'\. Its columns: 'ids'"
    ):
        Shares([{"ids": [1] * 20}] * 2, batches, make_dealing(1, 40))[0]
    with pytest.raises(IndexError):
        Shares(rows, batches, make_dealing(1, 40))[1]
