"""Every causal-LM type of transformers: proven equal, or refused by name.

A run takes one of each variant, and one in forty of the others in turn; with `-m "slow or not
slow"` all run, also on two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from compare import documents, forward, quiet
from cut import CUT, WHOLE, Case, Share, over_ranks, share, whole_documents
from generate import page, table_of
from measure import LEAKS, Result, measure, numbers_in_masks
from mutations import MUTATIONS, mutated
from tiny import MODEL_TYPES, build
from two_ranks import check_two_ranks

import hf_distca
from hf_distca.integration import families
from hf_distca.integration.families import (
    CUT_DOCUMENT_FAMILIES,
    FAMILIES,
    PING_PONG_FAMILIES,
    PROVEN_GROUPS,
    REFUSAL_REASONS,
    check_family,
)
from ranks import RankPool
from turns import in_turn

WORKING = [name for name in MODEL_TYPES if FAMILIES.get(name) in PROVEN_GROUPS]
# One of each variant: GQA, windows, softcap, sinks, chunks, unequal widths, no RoPE, hybrids,
# experts, positions from 2.
FAST = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
    "smollm3",
)
FAST += ("qwen3_next", "nemotron_h", "lfm2", "jamba", "qwen3_moe", "mixtral", "gpt2", "roberta")
# Of these, on two ranks: how a layer is cut differs.
PAIRED = ("llama", "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2")
ONE_IN = 80
NUMBERED = {
    "llama": "exact",
    "gemma2": "exact",
    "roberta": "exact",
    "opt": "refused",
    "qwen3_next": "refused",
}
# What attention is called with differs: none of the keyword arguments, and the labels, too.
CALLED_OTHERWISE = ("nemotron", "gemma3n")


def test_the_table_names_every_type_and_no_other() -> None:
    assert sorted(FAMILIES) == MODEL_TYPES
    assert len(WORKING) >= 120


@pytest.mark.parametrize("model_type", in_turn(MODEL_TYPES, ONE_IN, FAST))
def test_the_table_says_what_running_shows(model_type: str, census: dict[str, Result]) -> None:
    result = census[model_type] = measure(model_type)
    assert result.status != "wrong", result
    assert table_of([result]) == {model_type: FAMILIES[model_type]}, result
    assert result.halves == (model_type in PING_PONG_FAMILIES), result
    if FAMILIES[model_type] in PROVEN_GROUPS:
        assert result.calls
        check_family(model_type)
    else:
        with pytest.raises(hf_distca.UnsupportedError, match=model_type):
            check_family(model_type)


@pytest.mark.parametrize(
    "model_type",
    in_turn([n for n in WORKING if FAMILIES[n] in ("PROVEN", "PACKED")], ONE_IN, tuple(NUMBERED)),
)
def test_a_mask_that_numbers_documents_is_exact_or_refused(model_type: str) -> None:
    """Refused where more than attention may read it, as in recurrent layers, and for types that the
    table does not have.
    """
    found = numbers_in_masks(model_type)
    assert (
        found == NUMBERED[model_type] if model_type in NUMBERED else found in ("exact", "refused")
    )


def test_the_page_is_that_of_the_table(
    census: dict[str, Result], request: pytest.FixtureRequest
) -> None:
    if len(census) < len(MODEL_TYPES):
        pytest.skip("needs all types, in one run")
    page_file = request.config.rootpath / "docs" / "models.md"
    # Each is compared below.
    cuts = {name: families.WHOLE_DOCUMENT_FAMILIES.get(name, "OVER_RANKS") for name in WORKING}
    assert page_file.read_text() == page([census[name] for name in MODEL_TYPES], cuts)


def test_documents_over_ranks_are_proven_or_refused() -> None:
    assert CUT_DOCUMENT_FAMILIES | set(families.WHOLE_DOCUMENT_FAMILIES) == set(WORKING)
    assert not CUT_DOCUMENT_FAMILIES & set(families.WHOLE_DOCUMENT_FAMILIES)


@pytest.mark.parametrize(
    "model_type", in_turn(WORKING, ONE_IN, ("llama", "lfm2", *CALLED_OTHERWISE))
)
def test_the_table_says_what_documents_over_two_ranks_show(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    found = over_ranks(rank_pool(2), measure(model_type))
    assert found == families.WHOLE_DOCUMENT_FAMILIES.get(model_type, "OVER_RANKS")


# One for each reason why documents must be whole, and all whose recurrent layers are not proven.
@pytest.mark.parametrize(
    "model_type",
    ["jamba", "minimax", "recurrent_gemma", "zamba", "zaya", "bart", "whisper", "llama4_text"],
)
def test_a_document_in_several_parts_is_refused_on_all_ranks(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    for error in rank_pool(2)(share, Case(model_type, torch.float64, CUT, table=True)):
        assert isinstance(error, str)
        assert re.match(
            r"UnsupportedError: rank \d: .*(models need whole ones|documents that span ranks)",
            error,
        ), error


@pytest.mark.parametrize("model_type", ["jamba", "bart", "whisper"])
def test_whole_documents_that_could_be_cut_are_not_refused(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """Whole documents are not refused because they could have been cut."""
    measured = measure(model_type)
    case = Case(model_type, torch.float64, WHOLE, table=True)
    want = whole_documents(model_type, measured.oracle, torch.float64, case.lengths)
    for rank, parts in zip(rank_pool(2)(share, case), WHOLE, strict=True):
        assert isinstance(rank, Share), rank
        for logits, (document, *_) in zip(rank.outcome.logits, parts, strict=True):
            torch.testing.assert_close(logits, want.logits[document])


@pytest.mark.parametrize(
    "model_type",
    [
        name
        for name in MODEL_TYPES
        if FAMILIES[name] in REFUSAL_REASONS and FAMILIES[name] != "UNBUILT"
    ],
)
def test_refused_types_refuse_before_a_step_or_cannot_start(model_type: str) -> None:
    """A refused type that can be loaded refuses before a step or cannot start."""
    with (
        quiet(),
        pytest.raises((hf_distca.UnsupportedError, KeyError), match=r"distca|bidirectional"),
    ):
        start(model_type)


def start(model_type: str) -> None:
    """What a user does: load the model (some look the name up themselves), and train a step."""
    model = build(model_type, "distca", torch.float32)
    forward(model, documents((8,))[0][None], torch.arange(8)[None])
    check_family(model_type)  # asked by the Trainer's callback, for those that call nothing of ours


@pytest.mark.parametrize("model_type", in_turn(WORKING, ONE_IN, PAIRED))
def test_two_ranks_equal_each_document_alone(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    check_two_ranks(rank_pool(2), model_type)


@pytest.mark.parametrize("model_type", in_turn(sorted(PING_PONG_FAMILIES), ONE_IN, PAIRED[-2:]))
def test_halves_on_two_ranks_equal_each_document_alone(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    check_two_ranks(rank_pool(2), model_type, ping_pong=True)


# The proof notices faults: each of them, put into the library, makes the comparison fail that
# passes without it.
FAULTS_ON_ONE_RANK = {
    "window one key too wide": "mistral",
    "window one key too narrow": "mistral",
    "chunk one token too long": "llama4_text",
    "scale wrong by 1 %": "llama",
    "softcap dropped": "gemma2",
    "sink dropped": "gpt_oss",
    "gradient of the sink dropped": "gpt_oss",
    "documents of a row leak": "llama",
}
FAULTS_ON_TWO_RANKS = {
    "documents leak over ranks": "llama",
    "dk of one copy lost": "llama",
    "dv of one copy lost": "llama",
    "scale wrong by 1 %": "deepseek_v3",
    "window one key too wide": "mistral",
    "gradient of the sink dropped": "gpt_oss",
}
FAULTS_BETWEEN_HALVES = {
    "second half without the keys of the first": "llama",
    "gradient of the keys handed over lost": "llama",
}
FAULTS_IN_CUT_DOCUMENTS = {
    "states of other ranks lost": ("qwen3_next", "kimi_linear", "nemotron_h"),
    "rows of convolutions of other ranks lost": ("lfm2",),
    "gradients of states and rows of other ranks lost": ("olmo_hybrid", "bamba", "lfm2"),
}


def test_every_fault_is_tried() -> None:
    tried = {
        *FAULTS_ON_ONE_RANK,
        *FAULTS_ON_TWO_RANKS,
        *FAULTS_BETWEEN_HALVES,
        *FAULTS_IN_CUT_DOCUMENTS,
    }
    # Those are tried with each type that they could be in.
    assert tried | {*LEAKS} == set(MUTATIONS)


@pytest.mark.parametrize("mutation", FAULTS_ON_ONE_RANK)
def test_a_fault_on_one_rank_is_noticed(mutation: str) -> None:
    model_type = FAULTS_ON_ONE_RANK[mutation]
    assert measure(model_type).status == "proven"
    with mutated(mutation):
        result = measure.__wrapped__(model_type)
    assert result.status == "wrong", result


@pytest.mark.parametrize("mutation", FAULTS_ON_TWO_RANKS)
def test_a_fault_on_two_ranks_is_noticed(
    mutation: str, rank_pool: Callable[[int], RankPool]
) -> None:
    check_two_ranks(rank_pool(2), FAULTS_ON_TWO_RANKS[mutation])
    with pytest.raises(AssertionError, match="differs by"):
        check_two_ranks(rank_pool(2), FAULTS_ON_TWO_RANKS[mutation], mutation)


@pytest.mark.parametrize(
    ("mutation", "model_type"),
    in_turn([(name, one) for name, types in FAULTS_IN_CUT_DOCUMENTS.items() for one in types], 4),
)
def test_a_fault_in_cut_documents_is_noticed(
    mutation: str, model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    measured = measure(model_type)
    assert over_ranks(rank_pool(2), measured) == "OVER_RANKS"
    with pytest.raises(AssertionError, match=r"differs by (\d\.\de\+|\d\.\de-0[123])"):
        over_ranks(rank_pool(2), measured, mutation)


@pytest.mark.parametrize("mutation", FAULTS_BETWEEN_HALVES)
def test_a_fault_between_halves_is_noticed(mutation: str) -> None:
    model_type = FAULTS_BETWEEN_HALVES[mutation]
    assert measure(model_type).halves
    with mutated(mutation):
        result = measure.__wrapped__(model_type)
    assert result.status == "proven"
    assert not result.halves
    assert max(result.differences.values()) > 1e-4
