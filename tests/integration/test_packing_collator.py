"""`PackingCollator`: accepted features, refused features, and no Python work for each token."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.data import collator
from hf_distca.errors import LayoutError

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "numpy": np.array,
    "numpy, small": lambda numbers: np.array(numbers, dtype=np.int16),
    "torch": torch.tensor,
    "torch, small": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
}


@pytest.mark.parametrize("form", FORMS)
def test_collator_packs_lists_iterators_arrays_and_tensors(form: str) -> None:
    made = FORMS[form]
    features = [
        {
            "input_ids": made([5, 6, 7]),
            "labels": made([5, -100, 7]),
            "attention_mask": made([1, 1, 1]),
        },
        {"input_ids": []},
        {"documents": [made([8]), made([9, 4])]},
        {"input_ids": made([3, 2])},
    ]
    batch = hf_distca.PackingCollator()(features)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 3, 2]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100, -100, 4, -100, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch["distca_documents"] == PackedDocuments((3, 1, 2, 2))
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}


def test_changing_a_batch_does_not_change_the_given_tensor() -> None:
    tokens = torch.tensor([5, 6, 7])
    batch = hf_distca.PackingCollator()([{"input_ids": tokens}])
    batch["input_ids"].add_(1)
    assert tokens.tolist() == [5, 6, 7]
    assert batch["labels"].tolist() == [[-100, 6, 7]]


@pytest.mark.parametrize("made", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_padding_is_cut_off_at_both_ends(made: Callable[[list[int]], Any]) -> None:
    ids, masks = (
        [0, 0, 5, 6, 7, 0],
        [[0, 0, 1, 1, 1, 0], [False, False, True, True, True, False], [0] * 6, [1] * 6],
    )
    features = [{"input_ids": made(ids), "attention_mask": made(mask)} for mask in masks]
    batch = hf_distca.PackingCollator()(features)
    assert batch["distca_documents"].lengths == (3, 3, 6)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 5, 6, 7, *ids]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 6, 7, -100, *ids[1:]]]


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        (
            {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 0, 0, 1]},
            r"attention_mask\[1\] .* is 0, between tokens 0 and 3",
        ),
        (
            {"input_ids": [5, 6], "attention_mask": [1]},
            "2 input_ids and 1 numbers in its attention_mask",
        ),
        (
            {"input_ids": [5, 6], "attention_mask": [[1, 1]]},
            "the attention_mask of a document must be a flat list",
        ),
        (
            {"input_ids": torch.ones(1, 2, dtype=torch.long)},
            r"flat list of integers; here they are int64 of shape \(1, 2\)",
        ),
        ({"input_ids": torch.ones(2)}, "here they are float32"),
        ({"input_ids": np.array([True, False])}, "here they are bool"),
        ({"input_ids": [True, False]}, "they are bool"),
        ({"input_ids": [1.5, 2.0]}, "flat list of integers"),
        ({"input_ids": ["a"]}, "flat list of integers"),
        ({"input_ids": [2**63]}, "flat list of integers"),
        ({"input_ids": np.array([2**63], dtype=np.uint64)}, "here they are uint64"),
        ({"input_ids": 7}, "flat list of integers"),
        ({"text": "x"}, "'text'"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 numbers in its labels"),
    ],
)
def test_malformed_documents_are_refused(feature: dict[str, Any], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        hf_distca.PackingCollator()([feature])


def pack_row(feature: dict[str, Any]) -> tuple[tuple[int, ...], list[int]]:
    batch = hf_distca.PackingCollator()([feature])
    return batch["distca_documents"].lengths, batch["labels"][0].tolist()


IDS = list(range(11, 19))


@pytest.mark.parametrize("made", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize(
    "columns", [{"seq_lengths": [3, 5]}, {"position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}, "both"]
)
def test_packed_rows_are_split_by_seq_lengths_and_position_ids(
    columns: Any, made: Callable[[list[int]], Any]
) -> None:
    if columns == "both":
        columns = {"seq_lengths": [3, 5], "position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}
    row = {
        name: made(column)
        for name, column in {"input_ids": IDS, "labels": [-7] * 8, **columns}.items()
    }
    assert pack_row(row) == ((3, 5), [-100, -7, -7, -100, -7, -7, -7, -7])


def test_padding_of_packed_rows_is_cut_off() -> None:
    row = {"input_ids": [0, *IDS, 0], "attention_mask": [0, *[1] * 8, 0]}
    expected = (3, 5), [-100, 12, 13, -100, 15, 16, 17, 18]
    assert pack_row({**row, "seq_lengths": [3, 5]}) == expected
    assert pack_row({**row, "position_ids": [0, 0, 1, 2, 0, 1, 2, 3, 4, 0]}) == expected


@pytest.mark.parametrize(
    "names", [("completion_mask",), ("assistant_masks",), ("completion_mask", "assistant_masks")]
)
def test_tokens_that_a_mask_leaves_out_are_no_targets(names: tuple[str, ...]) -> None:
    masks = {
        "completion_mask": [0, 0, 1, 1, 1, 1, 1, 1],
        "assistant_masks": [1, 1, 1, 1, 1, 1, 0, 0],
    }
    kept = [all(masks[name][place] for name in names) for place in range(8)]
    labels = [token if keep else -100 for token, keep in zip(IDS, kept, strict=True)]
    chosen = {name: masks[name] for name in names}
    assert pack_row({"input_ids": IDS, **chosen}) == ((8,), [-100, *labels[1:]])
    assert pack_row({"input_ids": IDS, **chosen, "labels": IDS}) == ((8,), [-100, *IDS[1:]]), (
        "labels are masked already"
    )
    padded = {name: torch.tensor([0, *mask]) for name, mask in chosen.items()}
    assert pack_row({"input_ids": [0, *IDS], "attention_mask": [0, *[1] * 8], **padded}) == (
        (8,),
        [-100, *labels[1:]],
    )


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"seq_lengths": [3, 4]}, "seq_lengths of a row add up to 7 tokens, but the row has 8"),
        ({"seq_lengths": [9, -1]}, "seq_lengths of a row .*at least 0"),
        ({"position_ids": [2, 3, 4, 0, 1, 2, 3, 4]}, r"position_ids\[0\] of a row is 2"),
        ({"position_ids": [0, 1, 2, 3, 4, 2, 3, 4]}, r"position_ids\[0, 5\] falls from 4 to 2"),
        ({"position_ids": [0, 1]}, "8 input_ids and 2 numbers in its position_ids"),
        (
            {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3], "seq_lengths": [3, 5]},
            "its position_ids .*have the lengths",
        ),
        ({"completion_mask": [1]}, "8 input_ids and 1 numbers in its completion_mask"),
        (
            {"attention_mask": [1, 1, 2, 2, 1, 1, 3, 3]},
            "row 0, but 1 comes again after another number",
        ),
        ({"attention_mask": [1, 1, 1, 2, 0, 2, 2, 2]}, r"attention_mask\[4\] of a document is 0"),
        (
            {"attention_mask": [1, 1, 1, 1, 1, 2, 2, 2], "seq_lengths": [3, 5]},
            "seq_lengths .*have the lengths",
        ),
        ({"attention_mask": [1, 1, 1, -1, -1, -1, -1, -1]}, r"attention_mask\[0, 3\] is -1"),
        ({"shift_labels": IDS}, "'shift_labels', which tells what the documents or targets are"),
        ({"seq_idx": [0] * 8}, "'seq_idx', which tells what the documents or targets are"),
        ({"distca_documents": PackedDocuments((3, 5))}, "'distca_documents', which tells"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_columns_that_contradict_a_row_or_cannot_be_read_are_refused(
    columns: dict[str, Any], named: str
) -> None:
    with pytest.raises(LayoutError, match=named):
        pack_row({"input_ids": IDS, **columns})


# Numeric columns that models take or may take.
NUMBERS: dict[str, Any] = {
    "token_type_ids": [0] * 8,
    "pixel_values": torch.ones(3, 2, 2),
    "pixel_values_videos": np.ones((2, 3, 2, 2), dtype=np.float32),
    "image_grid_thw": [[1, 4, 4]],
    "image_sizes": [(28, 28)],
    "input_features": [[0.5] * 9] * 4,
    "input_values": np.zeros(100, dtype=np.float16),
    "cross_attention_mask": [[[True]]],
    "encoder_hidden_states": [torch.ones(4)],
    "of_tomorrow": [1.0] * 8,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numeric_columns_that_a_model_may_take_are_refused(name: str) -> None:
    row = {"input_ids": IDS, name: NUMBERS[name]}
    for feature in (row, {"documents": [IDS], name: NUMBERS[name]}):
        with pytest.raises(
            LayoutError,
            match=rf"'{name}' of numbers, which may be an input .* as in PackingCollator\(model\)",
        ):
            hf_distca.PackingCollator()([feature])


class Takes(torch.nn.Module):
    """A model whose forward has these arguments."""

    def forward(
        self, input_ids: Any, pixel_values: Any = None, task_ids: Any = None, **kwargs: Any
    ) -> None: ...


class Around(torch.nn.Module):
    """A wrapper, as engines put it around a model."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize("wrap", [lambda model: model, Around], ids=["bare", "wrapped"])
def test_collator_with_a_model_refuses_only_inputs_of_the_model(wrap: Callable[[Any], Any]) -> None:
    collate = pickle.loads(pickle.dumps(hf_distca.PackingCollator(wrap(Takes()))))
    for name, value in {"pixel_values": torch.ones(3, 2, 2), "task_ids": 3}.items():
        with pytest.raises(LayoutError, match=f"'{name}', an input of the model"):
            collate([{"input_ids": IDS, name: value}])
    others = {
        name: value
        for name, value in NUMBERS.items()
        if name not in ("pixel_values", "of_tomorrow")
    }
    assert collate([{"input_ids": IDS, **others, "pixel_values": None}])["input_ids"].tolist() == [
        IDS
    ]
    with pytest.raises(LayoutError, match="'shift_labels', which tells"):
        collate([{"input_ids": IDS, "shift_labels": IDS}])
    unknown = hf_distca.PackingCollator(Around(torch.nn.Linear(1, 1)).forward)
    with pytest.raises(LayoutError, match="'image_sizes' of numbers"):
        unknown([{"input_ids": IDS, "image_sizes": [(28, 28)]}])


METADATA: dict[str, Any] = {
    "text": "eight ...",
    "length": 8,
    "url": None,
    "words": ["a"] * 8,
    "score": np.float32(0.5),
    "messages": [{"role": "user"}],
    "empty": [],
    "names": np.array(["a", "b"]),
    "scalar": torch.tensor(3.0),
}


def test_columns_with_a_number_per_token_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    others = METADATA | {"image": torch.ones(3, 2, 2)}
    collate = hf_distca.PackingCollator(Takes())
    for _ in range(2):
        collate([{"input_ids": IDS, **others, "loss_weights": [1.0] * 8}])
        collate([{"input_ids": IDS, **others, "weights": torch.ones(8)}])
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        "loss_weights",
        "weights",
    ]


def test_batch_without_targets_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collator, "_warnings_given", set())
    pack_row({"input_ids": IDS})
    assert not caplog.records
    for _ in range(2):
        pack_row({"input_ids": IDS, "assistant_masks": [0] * 8})
    assert [record.getMessage()[:43] for record in caplog.records] == [
        "none of the 8 tokens of a batch is a target"
    ]


def test_columns_of_text_and_single_numbers_are_dropped() -> None:
    assert pack_row({"input_ids": IDS, **METADATA})[0] == (8,)


@pytest.mark.parametrize("made", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_mask_that_numbers_documents_splits_a_row(made: Callable[[list[int]], Any]) -> None:
    row = {"input_ids": made([*IDS, 0, 0]), "attention_mask": made([1, 1, 1, 2, 2, 3, 3, 3, 0, 0])}
    assert pack_row(row) == ((3, 2, 3), [-100, 12, 13, -100, 15, -100, 17, 18])
    apart = {
        "input_ids": made([*IDS[:3], 0, *IDS[3:]]),
        "attention_mask": made([7, 7, 7, 0, 5, 5, 5, 5, 5]),
    }
    assert pack_row(apart)[0] == (3, 5)
    with_positions = {**row, "position_ids": made([0, 1, 2, 0, 1, 0, 1, 0, 0, 0])}
    assert pack_row(with_positions)[0] == (3, 2, 2, 1), (
        "a document begins where the mask or the positions begin one"
    )


def test_position_ids_with_gaps_are_kept_and_split_no_document() -> None:
    rows = {
        "jumps": [0, 1, 2, 30, 31, 32, 90, 91],
        "repeats": [0, 1, 1, 1, 1, 5, 6, 7],
        "two": [0, 1, 5, 6, 0, 0, 7, 8],
    }
    lengths = dict.fromkeys(rows, (8,)) | {"two": (4, 1, 3)}
    for name, positions in rows.items():
        batch = hf_distca.PackingCollator()([{"input_ids": IDS, "position_ids": positions}])
        assert batch["distca_documents"].lengths == lengths[name]
        assert batch["position_ids"].tolist() == [positions]
    counted = collator.read_feature_documents(
        {"input_ids": IDS, "position_ids": [0, 1, 2, 0, 1, 2, 3, 4]}
    )
    assert [document.check_positions() for document in counted] == [None, None]
    with pytest.raises(LayoutError, match=r"go from 2 to 30, but dealing makes positions"):
        collator.read_feature_documents({"input_ids": IDS, "position_ids": rows["jumps"]})[
            0
        ].check_positions()


@pytest.mark.parametrize(
    "name", ["labels", "completion_mask", "position_ids", "seq_lengths", "input_ids"]
)
def test_documents_column_with_columns_of_tokens_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=f"'documents' and '{name}'"):
        pack_row({"documents": [[1, 2]], name: [1, 2]})


def count_lines(features: list[dict[str, Any]]) -> int:
    """Count the lines of Python that run while a batch is packed."""
    count = 0

    def trace(*_: object) -> Any:
        nonlocal count
        count += 1
        return trace

    gc.disable()  # garbage collection would run other lines
    sys.settrace(trace)
    try:
        hf_distca.PackingCollator()(features)
    finally:
        sys.settrace(None)
        gc.enable()
    return count


@pytest.mark.parametrize("form", ["list", "numpy", "torch"])
def test_collator_runs_no_python_for_each_token(form: str) -> None:
    def features(length: int) -> list[dict[str, Any]]:
        return [
            {"input_ids": FORMS[form]([7] * length), "attention_mask": FORMS[form]([1] * length)}
            for _ in range(4)
        ]

    assert count_lines(features(20_000)) == count_lines(features(20))
