"""Several attention groups: each is exact and balanced, and groups exchange nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from test_dealt import (
    BATCHES,
    CLOSE,
    TOKENS,
    build_model,
    compute_share_loss,
    deal,
    get_gradients,
    make_share,
    settings,
    sum_gradients,
    train_alone,
)
from torch.utils.data import DataLoader, DistributedSampler

import hf_distca
from hf_distca import config as config_module
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.checks.share_readers import check_loader
from hf_distca.integration.current_session import current_session
from hf_distca.integration.training import document_shares as shares_module
from ranks import RankPools
from tiny_runs import documents, logged, make_trainer, share_documents

# Lengths of the documents of each rank.
LENGTHS = ([96, 1], [16] * 6, [64, 33], [24, 25, 48])


def draw_batch(rank: int) -> dict[str, Any]:
    return hf_distca.PackingCollator()([{"documents": documents(*LENGTHS[rank], seed=rank)}])


def train_one_step(
    rank: int, group_size: int | None, ping_pong: bool
) -> tuple[float, dict[str, torch.Tensor], Any]:
    hf_distca.configure(
        settings(group_size=group_size, ping_pong=ping_pong, balance=group_size is not None)
    )
    model, worlds = build_model("full", "distca"), set()
    hf_distca.prepare(model)

    def recorded(
        *args: Any, original: Callable[..., Any] = dist.all_to_all_single, **options: Any
    ) -> Any:
        worlds.add(tuple(dist.get_process_group_ranks(options["group"])))
        return original(*args, **options)

    with patch.object(dist, "all_to_all_single", recorded):
        loss = model(**draw_batch(rank), use_cache=False).loss
        loss.backward()
    return (
        loss.item(),
        get_gradients(model),
        (
            worlds,
            current_session().join_group().ranks,
            hf_distca.metrics(gather=True).figures(),
        ),
    )


@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "ping-pong"])
def test_two_groups_of_two_ranks_are_exact_and_balanced(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    expected = rank_pool(4)(train_one_step, None, False)
    for rank, (loss, grads, (worlds, ranks, figures)) in enumerate(
        rank_pool(4)(train_one_step, 2, ping_pong)
    ):
        assert loss == pytest.approx(expected[rank][0], rel=1e-12)
        torch.testing.assert_close(grads, expected[rank][1], **CLOSE["full"])
        assert ranks == ((0, 1), (2, 3))[rank // 2]
        assert worlds == {ranks}, "nothing is exchanged with another group"
        before, after = (
            figures[f"distca/imbalance_estimated_{when}"] for when in ("before", "after")
        )
        assert after < min(before, 1.15)


def test_default_groups_split_only_above_512_ranks_and_at_nodes() -> None:
    whole, cut = (1, 8, 512, 520, 521, 1000), {576: 288, 1024: 512, 1536: 512, 4096: 512}
    for ranks, size in [*((ranks, ranks) for ranks in whole), *cut.items()]:
        assert hf_distca.DistCAConfig().group_ranks(ranks) == size
    assert hf_distca.DistCAConfig(group_size=64).group_ranks(4096) == 64
    assert hf_distca.DistCAConfig(documents_span_ranks=True).group_ranks(4096) == 4096


def limit_default_groups(rank: int) -> tuple[tuple[int, ...], int, list[str]]:
    """Limit default groups to two of four ranks; return the group, the ranks of a dealing, and the
    log.
    """
    hf_distca.configure(settings())
    launched = SimpleNamespace(num_processes=4, device="cpu")
    with (
        logged(logging.INFO) as said,
        patch.object(shares_module, "PartialState", lambda: launched),
        patch.multiple(config_module, _MOST_RANKS=2, _FEWEST_RANKS=2, _WHOLE_NODES=2),
    ):
        ranks = current_session().join_group().ranks
        dealt = share_documents([3] * 64, 8, None, config=None, fill="cut")
        shares = find_shares(dealt)
        sampler = DistributedSampler(shares, shuffle=False)
        check_loader(DataLoader(shares, sampler=sampler, collate_fn=list))
    return ranks, shares.deal_settings.ranks, said


def test_default_groups_apply_to_dealing_and_are_logged_once(rank_pool: RankPools) -> None:
    found = rank_pool(4)(limit_default_groups)
    assert [ranks for ranks, _, _ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [dealt for _, dealt, _ in found] == [2] * 4
    assert found[0][2] == [
        "4 ranks share attention in groups of 2; DistCAConfig(group_size=4) would make them one"
        " group"
    ]
    assert not any(said for _, _, said in found[1:])


def train_in_groups(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    hf_distca.configure(settings(group_size=2))
    model, made = build_model("full", "distca"), deal(2, "full", group_size=2)
    total = torch.zeros((), dtype=torch.float64)
    hf_distca.prepare(model)
    for step in range(len(BATCHES) // 2):
        number = 2 * step + rank // 2
        batch = make_share(made, number, rank % 2)
        assert batch["input_ids"].shape == (1, TOKENS // 2)
        loss = compute_share_loss(model, batch, number)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item(), sum_gradients(model)


def test_global_batches_are_dealt_per_group(rank_pool: RankPools) -> None:
    losses, grads = train_alone("full")
    for total, same_grads in rank_pool(4)(train_in_groups):
        assert total == pytest.approx(sum(losses), rel=1e-12)
        torch.testing.assert_close(same_grads, grads, **CLOSE["full"])


def catch_desync(rank: int, sizes: tuple[int | None, ...], prepared: bool) -> tuple[str, float]:
    """Return the error of a first step with different group sizes, and its seconds."""
    began = time.monotonic()
    hf_distca.configure(settings(group_size=sizes[rank]))
    model = build_model("full", "distca")
    with pytest.raises(hf_distca.DistCADesyncError) as caught:
        (hf_distca.prepare(model) if prepared else model(**draw_batch(rank), use_cache=False))
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("sizes", "prepared"), [((None, 1), False), ((1, None), True), ((2, 1, 1, 4), False)]
)
def test_different_group_sizes_are_refused_on_all_ranks(
    rank_pool: RankPools, sizes: tuple[int | None, ...], prepared: bool
) -> None:
    """The error comes before a rank computes alone."""
    by_rank = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
    for said, seconds in rank_pool(len(sizes))(catch_desync, sizes, prepared):
        assert f"different group_size: {by_rank}" in said
        assert seconds < 10


def resume(rank: int, folder: str) -> list[str]:
    """Resume a training in groups of two ranks from its checkpoint; return its warnings."""
    rows = Dataset.from_dict({"input_ids": documents(*[40] * 32)})
    for steps, checkpoint in ((1, None), (2, f"{folder}/checkpoint-1")):
        with logged() as said:
            config = settings(cost_model="analytic", group_size=2)
            trainer = make_trainer(
                "distca", rows, folder=folder, config=config, max_steps=steps, save_strategy="steps"
            )
            trainer.args.save_steps = 1
            hf_distca.deal(trainer, 32)
            trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == 2
    return [text for text in said if "resumes after step" in text]


@pytest.mark.slow
def test_unchanged_training_in_groups_resumes_without_a_warning(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    """Each group counts its own global batches, not those of all ranks."""
    assert rank_pool(4)(resume, str(tmp_path)) == [[]] * 4
