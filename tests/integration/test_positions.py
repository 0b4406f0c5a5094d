"""Position ids: those of documents in several parts, those that a model counts in its own way, and
those that skip some.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_prepare import opt
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
)

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.hooks.positions import check_positions, mark_document_starts
from tiny_runs import SIZES, documents, settings, tiny_llama

# On one rank, in two parts with a gap: tokens 0 to 4, a document of 3, and tokens 5 to 8.
PACKED = PackedDocuments((5, 3, 4), (0, 0, 5), (0, 1, 0))
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]])
IDS = torch.full((1, 12), 7)


@pytest.mark.parametrize(
    "make", [lambda: tiny_llama("distca"), lambda: opt().train()], ids=["llama", "opt"]
)
def test_a_loop_that_leaves_position_ids_out_is_told(make: Any) -> None:
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


def test_positions_may_be_counted_from_another_number() -> None:
    check_positions(tiny_llama("distca"), PACKED, POSITIONS + 2)


def test_it_is_asked_until_it_was_right_once() -> None:
    model = tiny_llama("distca")
    for _ in range(2):
        with pytest.raises(LayoutError):
            check_positions(model, PACKED, 0 * POSITIONS)
    check_positions(model, PACKED, POSITIONS)
    check_positions(model, PACKED, 0 * POSITIONS)


def test_documents_that_may_not_be_cut_are_not_compared() -> None:
    """Their first token is at 0 by definition, whatever a model makes of positions."""
    check_positions(tiny_llama("distca"), PackedDocuments((5, 7)), 0 * POSITIONS)


def roberta(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    off = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 130,
    }
    config = AutoConfig.for_model("roberta", is_decoder=True, pad_token_id=1, **SIZES, **off)
    return (
        AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        .double()
        .train()
    )


TEXTS = [torch.tensor(text) for text in documents(40, 7, 1, 1, 23)]


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Logits of each document, with the positions that the model makes of it."""
    return torch.cat(
        [
            roberta("sdpa")(input_ids=text[None], use_cache=False).logits[0].detach()
            for text in TEXTS
        ]
    )


@pytest.mark.parametrize("kind", ["collator", "from 2", "from 5", "without"])
def test_learned_positions_are_those_of_the_model(kind: str, alone: torch.Tensor) -> None:
    batch = hf_distca.PackingCollator()([{"input_ids": text} for text in TEXTS])
    if kind == "without":
        del batch["position_ids"]
    elif kind.startswith("from"):
        batch["position_ids"] = batch["position_ids"] + int(kind[-1])
    torch.testing.assert_close(roberta("distca")(**batch, use_cache=False).logits[0], alone)


@pytest.mark.skipif(
    "position_ids_start" not in inspect.signature(DataCollatorWithFlattening).parameters,
    reason="this release of transformers counts from 0 alone",
)
def test_positions_from_where_the_model_counts_are_read(alone: torch.Tensor) -> None:
    flattened = DataCollatorWithFlattening(position_ids_start=2)(
        [{"input_ids": text.tolist()} for text in TEXTS]
    )
    torch.testing.assert_close(roberta("distca")(**flattened, use_cache=False).logits[0], alone)


def test_positions_from_0_are_refused_by_models_from_2() -> None:
    flattened = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in TEXTS])
    with pytest.raises(
        LayoutError,
        match=r"position_ids\[0, 0\] is 0: this model counts from 2, .*position_ids_start=2",
    ):
        roberta("distca")(**flattened, use_cache=False)


def test_a_model_that_takes_no_documents_positions_is_told() -> None:
    """As one that was made before distca was imported: nothing adds where it counts from."""
    batch = hf_distca.PackingCollator()([{"input_ids": text} for text in TEXTS])
    model = roberta("distca")
    model.roberta._forward_pre_hooks.clear()
    for _ in range(2):
        with pytest.raises(
            LayoutError,
            match=r"has position 0 for token 0 .* position 2 \(this model counts from 2\)",
        ):
            model(**batch, use_cache=False)
    batch["position_ids"] = batch["position_ids"] + 2
    model(**batch, use_cache=False)


def test_shares_of_a_model_that_counts_from_2_are_right(alone: torch.Tensor) -> None:
    model = roberta("distca")
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


def one_document(positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    model = tiny_llama("eager").double()
    mask = torch.full((40, 40), -1e300, dtype=torch.float64).triu(1)[None, None]
    return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("kind", SKIPPED)
@pytest.mark.parametrize("given", ["alone", "mask of ones", "collator"])
def test_positions_that_skip_some_are_one_document(kind: str, given: str) -> None:
    ids, positions = torch.tensor([documents(40)[0]]), SKIPPED[kind]
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if given == "mask of ones":
        batch["attention_mask"] = torch.ones_like(ids)
    if given == "collator":
        batch = hf_distca.PackingCollator()([{name: row[0] for name, row in batch.items()}])
    logits = tiny_llama("distca").double()(**batch, use_cache=False).logits
    torch.testing.assert_close(logits, one_document(positions, ids))


def test_positions_that_skip_some_are_refused_in_parts() -> None:
    documents_ = PackedDocuments((20, 20), (0, 20), (0, 0))
    with pytest.raises(LayoutError, match=r"has position 300 for token 20 .* position 20"):
        tiny_llama("distca")(
            input_ids=torch.full((1, 40), 7),
            position_ids=SKIPPED["jump"],
            distca_documents=documents_,
            use_cache=False,
        )


def test_three_axes_begin_anew_with_a_document() -> None:
    image = torch.tensor(
        [[0, 0, 0, 0, 4, 0, 1, 2], [0, 0, 1, 1, 4, 0, 1, 2], [0, 1, 0, 1, 4, 0, 1, 2]]
    )[:, None]
    assert mark_document_starts(image).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]
    assert mark_document_starts(image[1:]).tolist() == [[0, 1, 1, 1, 1, 0, 1, 1]]  # NeoMME has two
    assert mark_document_starts(image[:1]) is None
    assert mark_document_starts(image[0]) is None
    assert mark_document_starts(None) is None
