"""Shares of dealt global batches train exactly, and mismatched shares raise an error."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import hf_distca
import tiny_runs
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing, DealtShare, PlanJob
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.plan import Plan
from ranks import RankPools
from recorded import counted_planning
from tiny_runs import PAIRS, SIZES
from turns import in_turn

WINDOW = 24
# Gemma's norms compute in float32 in a model of any dtype.
CLOSE = {"full": {"rtol": 1e-9, "atol": 1e-12}, "windows": {"rtol": 1e-4, "atol": 1e-8}}
TOKENS = 192  # in a global batch, on any number of ranks
# By batch: a document longer than a rank's tokens, two long documents, both kinds, short ones.
BATCHES = ([180, 1, 11], [96, 95, 1], [7, 9, 150, 26], [12] * 16)


def build_model(kind: str, implementation: str) -> Any:
    torch.manual_seed(0)
    shape = {
        **SIZES,
        "head_dim": 16,
        "attn_implementation": implementation,
        "dtype": torch.float64,
    }
    if kind == "windows":
        windows = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        return Gemma3ForCausalLM._from_config(Gemma3TextConfig(**shape, **windows)).train()
    return LlamaForCausalLM._from_config(LlamaConfig(**shape)).train()


def settings(**changes: Any) -> hf_distca.DistCAConfig:
    return tiny_runs.settings(**{"timeout_seconds": 20.0, **changes})


def deal(ranks: int, kind: str, **changes: Any) -> Dealing:
    windows = (None, WINDOW) if kind == "windows" else (None,)
    costs = {
        PlanKey(PAIRS.shape, "cpu", window): replace(PAIRS, window=window) for window in windows
    }
    return Dealing(ranks, TOKENS // ranks, costs, settings(**changes))


def draw_texts(number: int) -> list[torch.Tensor]:
    return [torch.tensor(ids) for ids in tiny_runs.documents(*BATCHES[number], seed=number)]


def make_share(made: Dealing, number: int, rank: int) -> dict[str, Any]:
    texts = draw_texts(number)
    packed = made.make_share(
        np.array([len(one) for one in texts]), (0, number), rank, document_ids=np.arange(len(texts))
    )
    shifted = [torch.cat([one[1:], torch.tensor([-100])]) for one in texts]
    runs = list(zip(packed.documents or (), packed.starts or (), packed.lengths, strict=True))
    pieces = [[column[d][s : s + n] for d, s, n in runs] for column in (texts, shifted)]
    ids, targets = (torch.cat(piece)[None] for piece in pieces)
    positions = torch.cat([torch.arange(s, s + n) for _, s, n in runs])[None]
    return {
        "input_ids": ids,
        "labels": targets,
        "shift_labels": targets,
        "position_ids": positions,
        "distca_documents": packed,
    }


def get_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def sum_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Add the gradients of all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return get_gradients(model)


def compute_loss(model: Any, targets: torch.Tensor, number: int, **batch: Any) -> torch.Tensor:
    """Compute the loss in float64; the losses of transformers are in float32."""
    logits = model(**batch, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum") / sum(
        n - 1 for n in BATCHES[number]
    )


def compute_share_loss(model: Any, made: dict[str, Any], number: int) -> torch.Tensor:
    """Compute the loss of a batch from `make_share`."""
    inputs = {name: value for name, value in made.items() if "labels" not in name}
    return compute_loss(model, made["shift_labels"], number, **inputs)


@cache
def train_alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on whole documents in one process under sdpa; return losses and summed gradients."""
    model, losses = build_model(kind, "sdpa"), []
    for number in range(len(BATCHES)):
        total = 0.0
        for text in draw_texts(number):
            targets = torch.cat([text[1:], torch.tensor([-100])])[None]
            loss = compute_loss(model, targets, number, input_ids=text[None])
            loss.backward()
            total += loss.item()
        losses.append(total)
    return losses, get_gradients(model)


def train_together(
    rank: int, ranks: int, kind: str, changes: dict[str, Any]
) -> tuple[list[float], dict[str, Any], list[str], int]:
    hf_distca.configure(settings(**changes))
    model, losses = build_model(kind, "distca"), []
    made = deal(ranks, kind, **changes)
    hf_distca.prepare(model)
    if changes.get("checkpointing"):
        model.gradient_checkpointing_enable()
    shares = [make_share(made, number, rank) for number in range(len(BATCHES))]
    with counted_planning() as planning:
        for number, batch in enumerate(shares):
            assert batch["input_ids"].shape == (1, TOKENS // ranks)
            loss = compute_share_loss(model, batch, number)
            loss.backward()
            losses.append(loss.detach())
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    grads = sum_gradients(model)
    figures = hf_distca.metrics(gather=True).figures()
    return (
        sums.tolist(),
        grads,
        planning,
        int(figures.get("distca/imbalance_measured_after", 0) > 0),
    )


CHANGES: dict[str, dict[str, Any]] = {
    "whole": {},
    "ping-pong": {"ping_pong": True},
    "unbalanced": {"balance": False},
}
# With and without ping-pong, with both kinds of layers, and with more than two ranks.
ALWAYS = [(2, "full", "whole"), (2, "windows", "ping-pong"), (3, "windows", "ping-pong")]


@pytest.mark.parametrize(
    ("ranks", "kind", "change"),
    in_turn(product((2, 3, 4), ("full", "windows"), CHANGES), 12, ALWAYS),
)
def test_shares_on_several_ranks_train_as_one_process(
    rank_pool: RankPools, ranks: int, kind: str, change: str
) -> None:
    changes = CHANGES[change]
    losses, grads = train_alone(kind)
    for same_losses, same_grads, planning, measured in rank_pool(ranks)(
        train_together, ranks, kind, changes
    ):
        assert same_losses == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(same_grads, grads, **CLOSE[kind])
        kinds = 2 if kind == "windows" else 1
        # In one batch, the halves exchange nothing, so the batch is planned again as a whole.
        again = change == "ping-pong" and kind == "full"
        assert len(planning) in (kinds * len(BATCHES), kinds * len(BATCHES) + again)
        assert measured, "ranks also exchange their measurements"


class OddlyPlanned(DealtShare):
    """A share whose tasks are on other ranks than planned."""

    def plan(self, job: PlanJob) -> Plan:
        right = super().plan(job)
        tasks = [task._replace(server=1 - task.server) for task in right.tasks]
        return Plan.from_tasks(right.layout, tasks)


def make_odd_share(made: Dealing, wrong: str) -> dict[str, Any]:
    """Make the second global batch of rank 1, with a fault."""
    batch = make_share(made, 2 if wrong == "batch" else 1, 0 if wrong == "share" else 1)
    packed = batch["distca_documents"]
    if wrong in ("lengths", "seed"):  # lengths in reverse order, or other document ids
        lengths = BATCHES[1][::-1] if wrong == "lengths" else BATCHES[1]
        other = made.make_share(
            np.array(lengths), (0, 1), 1, document_ids=np.arange(len(lengths)) + (wrong == "seed")
        )
        batch["distca_documents"] = PackedDocuments(
            packed.lengths, packed.starts, packed.documents, dealt_share=other.dealt_share
        )
    if wrong == "plan":
        object.__setattr__(packed.dealt_share, "__class__", OddlyPlanned)
    if wrong == "no share":
        batch["distca_documents"] = PackedDocuments(packed.lengths, packed.starts, packed.documents)
    return batch


def train_apart(rank: int, wrong: str) -> None:
    model, made = build_model("full", "distca"), deal(2, "full")
    for number in range(len(BATCHES)):
        odd = rank == 1 and number == 1
        if odd and wrong == "settings":
            current_session().config = settings(tolerance=0.5)
        batch = make_odd_share(made, wrong) if odd else make_share(made, number, rank)
        compute_share_loss(model, batch, number).backward()


def catch_mismatch(rank: int, wrong: str) -> str:
    """Return the error on this rank if rank 1 deviates in the second global batch."""
    hf_distca.configure(settings())
    with pytest.raises(hf_distca.DistCAError) as caught:
        train_apart(rank, wrong)
    return f"{type(caught.value).__name__}: {caught.value}"


OTHER_DOCUMENTS = (
    "different documents in the same global batch .* in micro-batch 2 .*give .* the same"
    " documents, seed"
)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "batch",
            (
                "different global batches in micro-batch 2 .*rank 0: 1, rank 1: 2; all ranks must"
                " read their shares in order"
            ),
        ),
        (
            "plan",
            (
                "different plans for the same documents of a global batch in micro-batch 2 .*rank"
                " 0: [0-9]+, rank 1: [0-9]+"
            ),
        ),
        ("lengths", OTHER_DOCUMENTS),
        ("seed", OTHER_DOCUMENTS),
        ("share", "rank 1 holds the share of rank 0 of global batch 1 of epoch 0"),
        ("settings", "tolerance is 0.01 on rank 0, 0.5 on rank 1"),
        ("no share", "different ways of loading batches .* in micro-batch 2.*rank 0: 4, rank 1: 0"),
    ],
)
def test_mismatched_shares_of_a_global_batch_are_refused_at_once(
    rank_pool: RankPools, wrong: str, said: str
) -> None:
    began = time.monotonic()
    errors = rank_pool(2)(catch_mismatch, wrong)
    assert time.monotonic() - began < 15, "found at once, not after the timeout of 20 s"
    for error in errors:
        assert re.search(said, error), error


def test_a_share_for_another_number_of_ranks_is_refused(rank_pool: RankPools) -> None:
    for error in rank_pool(2)(refuse_share_for_three_ranks):
        assert (
            "global batch 0 of epoch 0 is dealt to 3 ranks, but the attention group has 2: (0, 1)"
            in error
        )


def refuse_share_for_three_ranks(rank: int) -> str:
    hf_distca.configure(settings())
    model, batch = build_model("full", "distca"), make_share(deal(3, "full"), 0, rank)
    with pytest.raises(LayoutError) as caught:
        compute_share_loss(model, batch, 0)
    return str(caught.value)
