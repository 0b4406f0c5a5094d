"""Gradients of stages over several steps, clipped by the norm over all stages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from staged import (
    Case,
    add_tied_head,
    check_near,
    collect_gradients,
    gather_whole,
    make_model,
    prepare,
    run_alone,
)
from torch.nn.functional import cross_entropy

from hf_distca.pipeline import clip_grad_norm_
from hf_distca.runtime.group import AttentionGroup
from ranks import RankPools

gather = AttentionGroup.gather
EXACT = 1e-9
STEPS = 3
MAX_NORM, RATE = 0.05, 0.5
CASE = Case(micro_batches=2, layers=2, tied=True)
TIED = {"lm_head.weight", "model.embed_tokens.weight"}


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over a micro-batch; by default (`scale_grads`), steps average such means."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def accumulate(rank: int, case: Case) -> tuple[dict[str, torch.Tensor], int]:
    """Run steps of a default schedule; return gradients and collectives of the last step."""
    _, held, step = prepare(case, loss=mean_loss)
    for _ in range(STEPS):
        with patch.object(AttentionGroup, "gather", autospec=True, side_effect=gather) as gathered:
            step()
    return collect_gradients(held), gathered.call_count


def backward_in_one_process(model: Any, case: Case) -> None:
    """Run backward of the mean over all micro-batches of all copies, one document at a time."""
    count = case.micro_batches * case.copies
    run_alone(model, case, lambda logits, targets: mean_loss(logits, targets) / count)


def test_gradients_of_several_steps_add_up(rank_pool: RankPools) -> None:
    model = make_model(CASE, "sdpa")
    backward_in_one_process(model, CASE)
    wanted = {name: STEPS * grad for name, grad in collect_gradients(model).items()}
    wanted = add_tied_head(model, wanted)
    for gradients, collectives in rank_pool(2)(accumulate, CASE):
        assert collectives == 2  # one for documents, one for all that ranks compare
        check_near(gradients, wanted)


def train_clipped(
    rank: int, case: Case, engine: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with SGD and clipped gradients; return norms and weights."""
    stage, held, step = prepare(case, engine, loss=mean_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=RATE)
    norms = []
    for _ in range(STEPS):
        step()
        norms.append(clip_grad_norm_(stage, MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: gather_whole(weight).detach() for name, weight in held.named_parameters()}


@pytest.mark.parametrize(
    ("engine", "copies"),
    [
        ("none", 1),
        *(pytest.param(engine, 2, marks=pytest.mark.slow) for engine in ("ddp", "fsdp")),
    ],
)
def test_gradients_are_clipped_by_the_norm_over_all_stages(
    rank_pool: RankPools, engine: str, copies: int
) -> None:
    """Norms and weights are those of one process, and tied weights are bitwise equal."""
    case = CASE._replace(copies=copies)
    model, norms = make_model(case, "sdpa"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        backward_in_one_process(model, case)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    assert all(norm > 2 * MAX_NORM for norm in norms)
    wanted = add_tied_head(model, dict(model.named_parameters()))
    found = rank_pool(2 * copies)(train_clipped, case, engine)
    for own_norms, weights in found:
        assert own_norms == pytest.approx(norms, rel=EXACT)
        check_near(weights, wanted)
    copies = [weights[name] for _, weights in found for name in TIED & weights.keys()]
    assert all(torch.equal(copies[0], copy) for copy in copies)


def clip_by_stage(rank: int, case: Case) -> str:
    """Return the error of the step after each stage clipped gradients by its own norm."""
    stage, _, step = prepare(case, loss=mean_loss)
    step()
    torch.nn.utils.clip_grad_norm_(stage.submod.parameters(), MAX_NORM)
    torch.optim.SGD(stage.submod.parameters(), lr=RATE).step()
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_tied_weights_that_drifted_apart_are_refused(rank_pool: RankPools) -> None:
    pool = rank_pool(2)
    texts = pool(clip_by_stage, CASE)
    pool.close()  # its ranks have left their group
    for text in texts:
        assert text.startswith(
            "DistCADesyncError: model.embed_tokens.weight and lm_head.weight are one weight."
            " Ranks 0 and 1"
        )
        assert "differ in step 2" in text
