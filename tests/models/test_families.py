"""Every causal-LM type of transformers: proven equal, or refused by name.

A run takes one of each variant, and one in forty of the others in turn; with `-m "slow or not
slow"` all run, also on two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from compare import difference, documents, forward, quiet
from cut import (
    CUT,
    OVER_FOUR,
    WHOLE,
    Case,
    Share,
    check_two_ranks,
    compare,
    over_ranks,
    share,
    whole_documents,
)
from generate import page, table_of
from measure import Result, measure, numbers_in_masks
from tiny import MODEL_TYPES, build

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


@pytest.fixture(scope="module")
def census() -> dict[str, Result]:
    """What the types of this run showed, by type."""
    return {}


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


@pytest.mark.parametrize("placement", OVER_FOUR)
@pytest.mark.parametrize(
    "model_type",
    in_turn([name for name in WORKING if FAMILIES[name] == "PACKED"], ONE_IN, ("nemotron_h",)),
)
def test_recurrent_layers_of_documents_over_four_ranks(
    model_type: str, placement: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """In float64 exact; in float32 as near as whole documents are."""
    errors = {}
    for dtype in (torch.float64, torch.float32):
        case = Case(model_type, dtype, OVER_FOUR[placement])
        whole = whole_documents(model_type, "sdpa", torch.float64, case.lengths)
        errors[dtype], what, shares = compare(rank_pool(4), case, whole)
        assert shares[0].state_exchanges, what
        assert len({one.state_exchanges for one in shares}) == 1
    rounded = whole_documents(model_type, "sdpa", torch.float32, case.lengths)
    assert errors[torch.float64] <= 1e-5
    assert errors[torch.float32] <= max(1e-5, 2 * difference(rounded, whole)[0])


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
            r"UnsupportedError: rank \d: .*(models need whole documents|documents span ranks)",
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
    check_two_ranks(rank_pool(2), measure(model_type))


@pytest.mark.parametrize("model_type", in_turn(sorted(PING_PONG_FAMILIES), ONE_IN, PAIRED[-2:]))
def test_halves_on_two_ranks_equal_each_document_alone(
    model_type: str, rank_pool: Callable[[int], RankPool]
) -> None:
    check_two_ranks(rank_pool(2), measure(model_type), ping_pong=True)
