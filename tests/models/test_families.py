"""Every causal-LM type of transformers: proven equal, or refused by name. With `-m "slow or not slow"` all also on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from compare import TOLERANCE, Outcome, alone, difference, documents, forward, packed, quiet, run
from generate import page, table_of
from measure import Result, measure
from tiny import MODEL_TYPES, build

import hf_distca
from hf_distca.integration.families import EQUAL, FAMILIES, REASONS, check_family
from hf_distca.integration.session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPool

WORKING = [name for name in MODEL_TYPES if FAMILIES.get(name) in EQUAL]
# One of each variant: GQA, windows, softcap, sinks, chunks, unequal widths, no RoPE, hybrids, experts.
FAST = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "smollm3")
FAST += ("qwen3_next", "jamba", "qwen3_moe", "mixtral", "gpt2")


def test_the_table_names_every_type_and_no_other() -> None:
    assert sorted(FAMILIES) == MODEL_TYPES
    assert len(WORKING) >= 120


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_table_says_what_running_shows(model_type: str, census: dict[str, Result]) -> None:
    result = census[model_type] = measure(model_type)
    assert result.status != "wrong", result
    assert table_of([result]) == {model_type: FAMILIES[model_type]}, result
    if FAMILIES[model_type] in EQUAL:
        assert result.calls
        check_family(model_type)
    else:
        with pytest.raises(hf_distca.UnsupportedError, match=model_type):
            check_family(model_type)


def test_the_page_is_that_of_the_table(census: dict[str, Result], request: pytest.FixtureRequest) -> None:
    if len(census) < len(MODEL_TYPES):
        pytest.skip("needs all types, in one run")
    page_file = request.config.rootpath / "docs" / "models.md"
    assert page_file.read_text() == page([census[name] for name in MODEL_TYPES])


@pytest.mark.parametrize(
    "model_type", [name for name in MODEL_TYPES if FAMILIES[name] in REASONS and FAMILIES[name] != "UNBUILT"]
)
def test_a_refused_type_that_can_be_loaded_refuses_before_a_step_or_cannot_start(model_type: str) -> None:
    with quiet(), pytest.raises((hf_distca.UnsupportedError, KeyError), match=r"distca|bidirectional"):
        start(model_type)


def start(model_type: str) -> None:
    """What a user does: load the model (some look the name up themselves), and train a step."""
    model = build(model_type, "distca", torch.float32)
    forward(model, documents((8,))[0][None], torch.arange(8)[None])
    check_family(model_type)  # asked by the Trainer's callback, for those that call nothing of ours


def share(rank: int, model_type: str, dtype: torch.dtype) -> tuple[Outcome, int]:
    """This rank's documents under distca with gradients summed over ranks, and bytes sent."""
    pairs = CostModel.pairs(AttentionShape(4, 2, 16, 16, 8))
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=pairs))
    with quiet():
        model = build(model_type, "distca", dtype)
        outcome = packed(model, documents(lengths_of(model_type))[:1] if rank == 0 else documents(lengths_of(model_type))[1:])
    for grad in outcome.grads.values():
        if grad is not None:
            dist.all_reduce(grad)
    return outcome, current_session().meter.sent_bytes


def lengths_of(model_type: str) -> tuple[int, ...]:
    """One long document for rank 0; for rank 1 short ones, or a single one where packed documents leak."""
    return (70, 9, 1, 7) if FAMILIES[model_type] == "PROVEN" else (70, 9)


@pytest.mark.parametrize("model_type", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in WORKING])
def test_two_ranks_equal_each_document_alone(model_type: str, rank_pool: Callable[[int], RankPool]) -> None:
    measured = measure(model_type)
    dtype = torch.float64 if measured.dtype == "float64" else torch.float32
    with quiet():
        want, _ = run(model_type, measured.oracle, dtype, alone, lengths_of(model_type))
    (first, sent), (second, _) = rank_pool(2)(share, model_type, dtype)
    got = Outcome(first.loss + second.loss, first.logits + second.logits, first.grads)
    value, what = difference(got, want)
    assert value <= TOLERANCE[dtype], what
    assert sent, "nothing was exchanged, so nothing was tested"
