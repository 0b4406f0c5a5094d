"""Every causal-LM type of transformers: proven equal, or refused by name.

By default, one type of each variant and a few other types run, in turn; `-m "slow or not slow"`
runs all types.
"""

from __future__ import annotations

import re

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
    run_whole,
    share,
)
from generate import make_page, make_table
from measure import Result, judge_numbered_masks, measure
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
from ranks import RankPools
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
FAST += ("bart", "bloom")  # a mask of cross attention as well; a mask that is added to scores
# The types that also run on two ranks; each cuts its layers in another way.
PAIRED = ("llama", "gpt_oss", "deepseek_v3", "roberta", "qwen3_next", "lfm2", "bart")
ONE_IN = 80
NUMBERED = {
    "llama": "exact",
    "gemma2": "exact",
    "roberta": "exact",
    "opt": "refused",
    "qwen3_next": "refused",
}
# Types whose layers call attention without keyword arguments, or with labels as well.
CALLED_OTHERWISE = ("nemotron", "gemma3n")


@pytest.fixture(scope="module")
def census() -> dict[str, Result]:
    """Give the results of this run, by type."""
    return {}


def test_table_lists_exactly_the_causal_lm_types() -> None:
    assert sorted(FAMILIES) == MODEL_TYPES
    assert len(WORKING) >= 120


@pytest.mark.parametrize("model_type", in_turn(MODEL_TYPES, ONE_IN, FAST))
def test_table_has_the_status_that_a_run_shows(model_type: str, census: dict[str, Result]) -> None:
    result = census[model_type] = measure(model_type)
    assert result.status != "wrong", result
    assert make_table([result]) == {model_type: FAMILIES[model_type]}, result
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
    """Types whose other layers may read the mask refuse it."""
    found = judge_numbered_masks(model_type)
    assert (
        found == NUMBERED[model_type] if model_type in NUMBERED else found in ("exact", "refused")
    )


def test_models_page_equals_the_generated_page(
    census: dict[str, Result], request: pytest.FixtureRequest
) -> None:
    if len(census) < len(MODEL_TYPES):
        pytest.skip("needs all types, in one run")
    page_file = request.config.rootpath / "docs" / "models.md"
    # Another test compares each type.
    cuts = {name: families.WHOLE_DOCUMENT_FAMILIES.get(name, "OVER_RANKS") for name in WORKING}
    assert page_file.read_text() == make_page([census[name] for name in MODEL_TYPES], cuts)


def test_table_proves_or_refuses_cut_documents_of_every_type() -> None:
    assert CUT_DOCUMENT_FAMILIES | set(families.WHOLE_DOCUMENT_FAMILIES) == set(WORKING)
    assert not CUT_DOCUMENT_FAMILIES & set(families.WHOLE_DOCUMENT_FAMILIES)


@pytest.mark.parametrize(
    "model_type", in_turn(WORKING, ONE_IN, ("llama", "lfm2", *CALLED_OTHERWISE))
)
def test_table_has_the_status_of_documents_over_two_ranks(
    model_type: str, rank_pool: RankPools
) -> None:
    found = over_ranks(rank_pool(2), measure(model_type))
    assert found == families.WHOLE_DOCUMENT_FAMILIES.get(model_type, "OVER_RANKS")


@pytest.mark.parametrize("placement", OVER_FOUR)
@pytest.mark.parametrize(
    "model_type",
    in_turn([name for name in WORKING if FAMILIES[name] == "PACKED"], ONE_IN, ("nemotron_h",)),
)
def test_recurrent_layers_are_exact_over_four_ranks(
    model_type: str, placement: str, rank_pool: RankPools
) -> None:
    """In float32, results are as close as those of whole documents."""
    errors = {}
    for dtype in (torch.float64, torch.float32):
        case = Case(model_type, dtype, OVER_FOUR[placement])
        whole = run_whole(model_type, "sdpa", torch.float64, case.lengths)
        errors[dtype], what, shares = compare(rank_pool(4), case, whole)
        assert shares[0].state_exchanges, what
        assert len({one.state_exchanges for one in shares}) == 1
    rounded = run_whole(model_type, "sdpa", torch.float32, case.lengths)
    assert errors[torch.float64] <= 1e-5
    assert errors[torch.float32] <= max(1e-5, 2 * difference(rounded, whole)[0])


# One type for each reason, and all types whose recurrent layers are not proven.
@pytest.mark.parametrize(
    "model_type",
    ["jamba", "minimax", "recurrent_gemma", "zamba", "zaya", "bart", "whisper", "llama4_text"],
)
def test_cut_documents_of_unproven_types_are_refused_on_all_ranks(
    model_type: str, rank_pool: RankPools
) -> None:
    for error in rank_pool(2)(share, Case(model_type, torch.float64, CUT, table=True)):
        assert isinstance(error, str)
        assert re.match(
            r"UnsupportedError: rank \d: .*(models need whole documents|documents span ranks)",
            error,
        ), error


@pytest.mark.parametrize("model_type", ["jamba", "bart", "whisper"])
def test_types_that_refuse_cut_documents_compute_whole_documents(
    model_type: str, rank_pool: RankPools
) -> None:
    measured = measure(model_type)
    case = Case(model_type, torch.float64, WHOLE, table=True)
    want = run_whole(model_type, measured.oracle, torch.float64, case.lengths)
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
def test_refused_types_raise_before_a_training_step(model_type: str) -> None:
    with (
        quiet(),
        pytest.raises((hf_distca.UnsupportedError, KeyError), match=r"distca|bidirectional"),
    ):
        start(model_type)


def start(model_type: str) -> None:
    """Load the model (some look up the name of attention), and run a step, like a user."""
    model = build(model_type, "distca", torch.float32)
    forward(model, documents((8,))[0][None], torch.arange(8)[None])
    check_family(model_type)  # the Trainer's callback checks types that do not call distca


@pytest.mark.parametrize("model_type", in_turn(WORKING, ONE_IN, PAIRED))
def test_two_ranks_equal_each_document_alone(model_type: str, rank_pool: RankPools) -> None:
    check_two_ranks(rank_pool(2), measure(model_type))


@pytest.mark.parametrize("model_type", in_turn(sorted(PING_PONG_FAMILIES), ONE_IN, PAIRED[-3:]))
def test_halves_on_two_ranks_equal_each_document_alone(
    model_type: str, rank_pool: RankPools
) -> None:
    check_two_ranks(rank_pool(2), measure(model_type), ping_pong=True)
