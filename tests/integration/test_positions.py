"""Position ids that are not those of documents in several parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.positions import check_positions
from tiny_runs import settings, tiny_llama

# On one rank, in two parts with a gap: tokens 0 to 4, a document of 3, and tokens 5 to 8.
PACKED = PackedDocuments((5, 3, 4), (0, 0, 5), (0, 1, 0))
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8]])
IDS = torch.full((1, 12), 7)


def opt() -> OPTForCausalLM:
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "word_embed_proj_dim": 32}
    return OPTForCausalLM(OPTConfig(vocab_size=61, attention_dropout=0.0, **sizes, attn_implementation="distca")).train()


@pytest.mark.parametrize("make", [lambda: tiny_llama("distca"), opt], ids=["llama", "opt"])
def test_a_loop_that_leaves_position_ids_out_is_told(make: Any) -> None:
    hf_distca.configure(settings())
    model = make()
    with pytest.raises(LayoutError, match=r"token 5 .* at position 0 .* has 5 for it: give the model position_ids"):
        model(input_ids=IDS, distca_documents=PACKED, use_cache=False)
    model = make()
    model(input_ids=IDS, position_ids=POSITIONS, distca_documents=PACKED, use_cache=False)


def test_the_middle_of_one_document_is_not_taken_for_its_beginning() -> None:
    middle = PackedDocuments((4,), (7,), (0,))
    with pytest.raises(LayoutError, match=r"token 0 .* at position 7 .* has 0"):
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
