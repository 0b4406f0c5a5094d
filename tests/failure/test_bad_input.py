"""Batches that describe no documents raise an error that names the place. Unusual but valid batches
keep their meaning.
"""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

import hf_distca
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import settings, tiny_llama


def read_lengths(positions: list[list[int]]) -> list[int]:
    return (
        TokenBatch(len(positions), len(positions[0]), position_ids=torch.tensor(positions))
        .read_documents()
        .runs[:, 2]
        .tolist()
    )


def test_jump_or_repeat_in_position_ids_begins_no_document() -> None:
    assert read_lengths([[0, 1, 2, 7, 8]]) == [5]
    assert read_lengths([[0, 1, 1, 1, 2]]) == [5]
    assert read_lengths([[0, 0, 0, 1, 0]]) == [1, 1, 2, 1]
    assert read_lengths([[0, 1, 7, 0, 3], [0, 4, 5, 6, 9]]) == [3, 2, 5]


def test_documents_begin_where_position_ids_restart() -> None:
    """transformers reads documents in the same way for flash attention. Its masks for other
    attention also begin a document at each jump.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rows, length = (int(torch.randint(1, n, (), generator=generator)) for n in (4, 12))
        steps = torch.randint(0, 4, (rows, length), generator=generator)
        restart = torch.rand(rows, length, generator=generator) < 0.3
        restart[:, 0] = True
        positions = steps.clone()
        for at in range(length):
            positions[:, at] = torch.where(
                restart[:, at], 0, positions[:, max(at - 1, 0)] + steps[:, at]
            )
        (bounds, _), _ = prepare_fa_kwargs_from_position_ids(positions)
        assert read_lengths(positions.tolist()) == bounds.diff().tolist()


def test_position_ids_that_fall_without_a_restart_are_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"position_ids\[1, 3\] falls from 2 to 1: .*cu_seq_lens_q"
    ):
        read_lengths([[0, 1, 2, 0, 1], [0, 1, 2, 1, 2]])
    assert read_lengths([[7, 8, 9, 7, 8]]) == [3, 2], "an evaluation row may begin at any position"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"position_ids": torch.tensor([[0, 1, 2], [0, -3, 1]])}, r"position_ids\[1, 1\] is -3"),
        ({"position_ids": torch.tensor([[0.0, 1.0, 2.0]])}, "position_ids are torch.float32"),
        (
            {"position_ids": torch.tensor([[0.0, 1.0, float("nan")]])},
            "position_ids are torch.float32",
        ),
        ({"position_ids": torch.tensor([[False, True, True]])}, "position_ids are torch.bool"),
        ({"cu_seq_lens": torch.tensor([0, 5])}, "documents have 5 tokens and the batch has 2 x 3"),
        ({"cu_seq_lens": torch.tensor([1, 6])}, "must start at 0"),
        ({"cu_seq_lens": torch.tensor([0, 4, 2, 6])}, "never fall"),
        (
            {"cu_seq_lens": torch.tensor([0.0, 6.0])},
            "cu_seq_lens_q has shape .2,. and torch.float32",
        ),
        ({"cu_seq_lens": torch.tensor([[0, 6]])}, "must be a flat tensor"),
        ({"packed": PackedDocuments((4, 1))}, "documents have 5 tokens and the batch has 2 x 3"),
        ({"padding": torch.ones(3, 2, dtype=torch.bool)}, r"a padding mask of shape \(3, 2\)"),
        ({"padding": torch.zeros(2, 3)}, "and torch.float32 for a"),
    ],
)
def test_layout_error_names_the_input_that_is_wrong(given: dict[str, Any], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        TokenBatch(2, 3, **given).read_documents()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((3, -1),), r"lengths\[1\] of PackedDocuments is -1"),
        (((3, 1.0),), "lengths of PackedDocuments must be whole numbers"),
        (((3, float("nan")),), "lengths of PackedDocuments must be whole numbers"),
        (((3, "4"),), "lengths of PackedDocuments must be whole numbers"),
        (((3, 2**62),), "must be in 0..281474976710656"),
        (((3, 4), (0, -2), (0, 1)), r"starts\[1\] of PackedDocuments is -2"),
        (((3, 4), (0, 0), (0,)), "for each of the lengths"),
        (((3, 4), (0, 0)), "or give neither"),
    ],
)
def test_invalid_arguments_of_packed_documents_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        PackedDocuments(*arguments)


def jump_where_documents_span(rank: int) -> str:
    hf_distca.configure(hf_distca.DistCAConfig(documents_span_ranks=True, timeout_seconds=30))
    positions = [[0, 1, 2, 7, 8], [3, 4, 5, 0, 1]][rank]
    with pytest.raises(LayoutError) as caught:
        tiny_llama("distca")(
            input_ids=torch.ones(1, 5, dtype=torch.long),
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
    return str(caught.value)


def test_jump_in_positions_is_an_error_on_all_ranks_that_share_documents(
    rank_pool: RankPools,
) -> None:
    for message in rank_pool(2)(jump_where_documents_span):
        assert "1 run(s) start at position 7 (on ranks [0]) and 0 end there (on" in message


def make_model_and_batch(rank: int) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Make a model and a batch; rank 0 has a long document, whose work another rank shares."""
    hf_distca.configure(settings())
    documents = [[7] * length for length in ([96], [16, 16])[rank]]
    return tiny_llama("distca"), hf_distca.PackingCollator()([{"documents": documents}])


def find_nan_rows(rank: int) -> tuple[int, list[bool]]:
    model, batch = make_model_and_batch(rank)
    poisoned = {0: 95, 1: 20}[rank]

    def poison(_module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(1, torch.tensor([poisoned]), float("nan"))

    model.model.layers[1].self_attn.v_proj.register_forward_hook(poison)
    logits = model(**batch, use_cache=False).logits[0]
    logits.sum().backward()
    return current_session().meter.sent_bytes, logits.isnan().any(1).tolist()


def test_nan_of_a_document_reaches_no_other_document(rank_pool: RankPools) -> None:
    (sent, first), (_, second) = rank_pool(2)(find_nan_rows)
    assert sent, "another rank computes the last rows of the long document"
    # Earlier rows of the same document may be NaN, too: kernels multiply masked values by 0.
    assert first[95]
    assert second == [False] * 16 + second[16:20] + [True] * 12


def train_without_pickle(rank: int) -> int:
    model, batch = make_model_and_batch(rank)

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("data from another rank was unpickled")

    modules = [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (torch, "load")]
    modules.append((torch.distributed.distributed_c10d, "_unpickler"))
    with ExitStack() as patches:
        for module, name in modules:
            patches.enter_context(patch.object(module, name, forbidden))
        model(**batch, use_cache=False).loss.backward()
    return current_session().meter.sent_bytes


def test_data_from_other_ranks_is_never_unpickled(rank_pool: RankPools) -> None:
    assert sum(rank_pool(2)(train_without_pickle)) > 0
