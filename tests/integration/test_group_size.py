"""Attention groups of a part of the ranks: exact, balanced inside, and nothing travels between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_dealt import BATCHES, CLOSE, TOKENS, alone, dealing, gradients, loss_of, model_for, settings, share

import hf_distca
from hf_distca.integration.session import current_session
from ranks import RankPool

LENGTHS = ([96, 1], [16] * 6, [64, 33], [24, 25, 48])  # of the documents of each rank, drawn by its own loader


def drawn(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    texts = [torch.randint(1, 61, (length,), generator=generator).tolist() for length in LENGTHS[rank]]
    return hf_distca.PackingCollator()([{"documents": texts}])


def loss_and_gradients(rank: int, group_size: int | None, ping_pong: bool) -> tuple[float, dict[str, torch.Tensor], Any]:
    hf_distca.configure(settings(group_size=group_size, ping_pong=ping_pong, balance=group_size is not None))
    model = model_for("full", "distca")
    hf_distca.prepare(model)
    worlds = set()

    def recorded(*args: Any, original: Callable[..., Any] = dist.all_to_all_single, **options: Any) -> Any:
        worlds.add(tuple(dist.get_process_group_ranks(options["group"])))
        return original(*args, **options)

    with patch.object(dist, "all_to_all_single", recorded):
        loss = model(**drawn(rank), use_cache=False).loss
        loss.backward()
    current_session().collect()
    return loss.item(), gradients(model), (worlds, current_session().group.ranks, hf_distca.metrics().figures())


@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "ping-pong"])
def test_two_groups_of_two_are_exact_and_balanced_inside(rank_pool: Callable[[int], RankPool], ping_pong: bool) -> None:
    expected = rank_pool(4)(loss_and_gradients, None, False)
    for rank, (loss, grads, (worlds, ranks, figures)) in enumerate(rank_pool(4)(loss_and_gradients, 2, ping_pong)):
        assert loss == pytest.approx(expected[rank][0], rel=1e-12)
        for name, grad in expected[rank][1].items():
            torch.testing.assert_close(grads[name], grad, **CLOSE["full"])
        assert ranks == ((0, 1), (2, 3))[rank // 2]
        assert worlds == {ranks}, "nothing is exchanged with another group"
        before, after = (figures[f"distca/imbalance_estimated_{when}"] for when in ("before", "after"))
        assert after < min(before, 1.15)


def dealt_in_groups(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    hf_distca.configure(settings(group_size=2))
    model, made, total = model_for("full", "distca"), dealing(2, "full", group_size=2), torch.zeros((), dtype=torch.float64)
    hf_distca.prepare(model)
    for step in range(len(BATCHES) // 2):
        number = 2 * step + rank // 2
        batch = share(made, number, rank % 2)
        assert batch["input_ids"].shape == (1, TOKENS // 2)
        targets = batch.pop("shift_labels")
        loss = loss_of(model, targets, number, **{name: value for name, value in batch.items() if name != "labels"})
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return total.item(), gradients(model)


def test_global_batches_are_dealt_per_group(rank_pool: Callable[[int], RankPool]) -> None:
    losses, grads = alone("full")
    for total, same_grads in rank_pool(4)(dealt_in_groups):
        assert total == pytest.approx(sum(losses), rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(same_grads[name], grad, **CLOSE["full"])
