"""Position ids of documents in parts, of models that count from 2, and with gaps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_masks import build_model
from test_prepare import opt
from transformers import AutoConfig, DataCollatorWithFlattening, PreTrainedModel

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.hooks.positions import check_positions, mark_document_starts
from tiny_runs import SIZES, documents, settings, tiny_llama

# One rank has tokens 0 to 4 of a document, then a document of 3, and then tokens 5 to 8 of the
# first.
PACKED = PackedDocuments((5, 3, 4), (0, 0, 5), (0, 1, 0))
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]])
IDS = torch.full((1, 12), 7)


@pytest.mark.parametrize(
    "make", [lambda: tiny_llama("distca"), lambda: opt().train()], ids=["llama", "opt"]
)
def test_documents_in_parts_without_position_ids_are_refused(make: Any) -> None:
    hf_distca.configure(settings())
    model = make()
    with pytest.raises(
        LayoutError, match=r"has position 5 for token 5 .* position 0\. Give the model position_ids"
    ):
        model(input_ids=IDS, distca_documents=PACKED, use_cache=False)
    model = make()
    model(input_ids=IDS, position_ids=POSITIONS, distca_documents=PACKED, use_cache=False)


def test_middle_of_a_document_is_not_taken_for_its_start() -> None:
    middle = PackedDocuments((4,), (7,), (0,))
    with pytest.raises(LayoutError, match=r"has position 0 for token 0 .* position 7"):
        check_positions(tiny_llama("distca"), middle, torch.arange(4)[None])
    check_positions(tiny_llama("distca"), middle, torch.arange(7, 11)[None])


def test_position_ids_may_start_at_another_number() -> None:
    check_positions(tiny_llama("distca"), PACKED, POSITIONS + 2)


def test_position_ids_are_checked_until_one_batch_is_right() -> None:
    model = tiny_llama("distca")
    for _ in range(2):
        with pytest.raises(LayoutError):
            check_positions(model, PACKED, 0 * POSITIONS)
    check_positions(model, PACKED, POSITIONS)
    check_positions(model, PACKED, 0 * POSITIONS)


def test_position_ids_of_whole_documents_are_not_checked() -> None:
    """A whole document starts at position 0 by definition."""
    check_positions(tiny_llama("distca"), PackedDocuments((5, 7)), 0 * POSITIONS)


def build(implementation: str) -> PreTrainedModel:
    off = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 130,
    }
    config = AutoConfig.for_model("roberta", is_decoder=True, pad_token_id=1, **SIZES, **off)
    return build_model(config, implementation)


TEXTS = [torch.tensor(text) for text in documents(40, 7, 1, 1, 23)]


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Compute the logits of each document alone, with positions from the model."""
    return torch.cat(
        [build("sdpa")(input_ids=text[None], use_cache=False).logits[0].detach() for text in TEXTS]
    )


@pytest.mark.parametrize("kind", ["collator", "from 2", "from 5", "without"])
def test_roberta_on_packed_documents_equals_documents_alone(kind: str, alone: torch.Tensor) -> None:
    batch = hf_distca.PackingCollator()([{"input_ids": text} for text in TEXTS])
    if kind == "without":
        del batch["position_ids"]
    elif kind.startswith("from"):
        batch["position_ids"] = batch["position_ids"] + int(kind[-1])
    torch.testing.assert_close(build("distca")(**batch, use_cache=False).logits[0], alone)


@pytest.mark.skipif(
    "position_ids_start" not in inspect.signature(DataCollatorWithFlattening).parameters,
    reason="this release of transformers counts only from 0",
)
def test_position_ids_from_2_are_accepted_by_models_that_count_from_2(alone: torch.Tensor) -> None:
    flattened = DataCollatorWithFlattening(position_ids_start=2)(
        [{"input_ids": text.tolist()} for text in TEXTS]
    )
    torch.testing.assert_close(build("distca")(**flattened, use_cache=False).logits[0], alone)


def test_position_ids_from_0_are_refused_by_a_model_that_counts_from_2() -> None:
    flattened = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in TEXTS])
    with pytest.raises(
        LayoutError,
        match=r"position_ids\[0, 0\] is 0: this model counts from 2, .*position_ids_start=2",
    ):
        build("distca")(**flattened, use_cache=False)


def test_model_without_a_hook_for_positions_needs_position_ids_from_2() -> None:
    """A model that was made before the import of distca has no hook for its first position."""
    batch = hf_distca.PackingCollator()([{"input_ids": text} for text in TEXTS])
    model = build("distca")
    model.roberta._forward_pre_hooks.clear()
    for _ in range(2):
        with pytest.raises(
            LayoutError,
            match=r"has position 0 for token 0 .* position 2 \(this model counts from 2\)",
        ):
            model(**batch, use_cache=False)
    batch["position_ids"] = batch["position_ids"] + 2
    model(**batch, use_cache=False)


def test_shares_for_a_model_that_counts_from_2_equal_documents_alone(alone: torch.Tensor) -> None:
    model = build("distca")
    (share,) = hf_distca.document_shares(TEXTS, sum(map(len, TEXTS)), model=model, seed=None)
    batch = hf_distca.PackingCollator()([share])
    logits = model(**batch, use_cache=False).logits[0]
    packed = batch["distca_documents"]
    starts = torch.tensor([0, *map(len, TEXTS)]).cumsum(0)
    order = torch.cat(
        [torch.arange(starts[number], starts[number + 1]) for number in packed.documents]
    )
    torch.testing.assert_close(logits, alone[order])


SKIPPED: dict[str, torch.Tensor] = {
    "jump": torch.cat([torch.arange(20), torch.arange(300, 320)])[None],
    "image": torch.tensor([[0, 1, 2, *[3] * 30, *range(20, 27)]]),
}


def run_one_document(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    model = tiny_llama("eager").double()
    mask = torch.full((40, 40), -1e300, dtype=torch.float64).triu(1)[None, None]
    return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.parametrize("given", ["alone", "mask of ones", "collator"])
def test_position_ids_with_gaps_are_one_document(kind: str, given: str) -> None:
    ids, positions = torch.tensor([documents(40)[0]]), SKIPPED[kind]
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if given == "mask of ones":
        batch["attention_mask"] = torch.ones_like(ids)
    if given == "collator":
        batch = hf_distca.PackingCollator()([{name: row[0] for name, row in batch.items()}])
    logits = tiny_llama("distca").double()(**batch, use_cache=False).logits
    torch.testing.assert_close(logits, run_one_document(positions, ids))


def test_position_ids_with_gaps_are_refused_for_documents_in_parts() -> None:
    documents_ = PackedDocuments((20, 20), (0, 20), (0, 0))
    with pytest.raises(LayoutError, match=r"has position 300 for token 20 .* position 20"):
        tiny_llama("distca")(
            input_ids=torch.full((1, 40), 7),
            position_ids=SKIPPED["jump"],
            distca_documents=documents_,
            use_cache=False,
        )


def test_position_ids_with_several_axes_mark_document_starts() -> None:
    image = torch.tensor(
        [[0, 0, 0, 0, 4, 0, 1, 2], [0, 0, 1, 1, 4, 0, 1, 2], [0, 1, 0, 1, 4, 0, 1, 2]]
    )[:, None]
    assert mark_document_starts(image).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]
    assert mark_document_starts(image[1:]).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]  # NeoMME has two
    assert mark_document_starts(image[:1]) is None
    assert mark_document_starts(image[0]) is None
    assert mark_document_starts(None) is None
