"""Training continues in a process in which torch.distributed has ended and started again, as it
does after a failure.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPool, join_world
from tiny_runs import PAIRS, dispatches, settings, tiny_llama

LENGTHS = ([96], [24, 1, 23, 24, 24])
DEALT = np.array([150, 1, 41])
TOKENS = 96
FAILURES = ["a batch without its documents", "a share of another rank", "a share of another batch"]


def batch(rank: int, number: int, failure: str, fails: bool) -> dict[str, Any]:
    """Make a micro-batch of a rank: packed documents or a share, or a wrong one if it `fails`."""
    if "share" not in failure:
        lengths = LENGTHS[rank]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = PackedDocuments(lengths[1:] if fails else lengths)
    else:
        costs = {PlanKey(AttentionShape(4, 2, 16, 16, 4), "cpu"): PAIRS}
        dealing = Dealing(2, TOKENS, costs, current_session().config)
        whose = 1 - rank if fails and "rank" in failure else rank
        packed = dealing.make_share(DEALT, (0, number + (fails and "batch" in failure)), whose)
        positions = torch.from_numpy(packed.positions)[None]
    ids = torch.randint(
        2, 61, positions.shape, generator=torch.Generator().manual_seed(10 * number + rank)
    )
    return {"input_ids": ids, "position_ids": positions, "distca_documents": packed}


def losses(rank: int, failure: str, numbers: range, fails: bool) -> list[float]:
    """Train and return the loss of each step. If `fails`, rank 1 gets wrong batches from the third
    step on.
    """
    model, seen = tiny_llama("distca"), []
    for number in numbers:
        loss = (
            model(
                **batch(rank, number, failure, fails and rank == 1 and number >= 2), use_cache=False
            )
            .logits.logsumexp(-1)
            .sum()
        )
        loss.backward()
        seen.append(loss.item())
    return seen


def fail_and_begin_again(
    rank: int, folder: str
) -> dict[str, tuple[str, list[float], list[float], bool]]:
    """For each failure, return the error, the losses in the new world, the losses with fresh
    settings, and whether work moved in the new world.
    """
    found = {}
    for failure in FAILURES:
        hf_distca.configure(settings(measured_rates=True, timeout_seconds=20.0))
        try:
            losses(rank, failure, range(8), fails=True)
            error = "none"
        except (hf_distca.DistCADesyncError, LayoutError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        dist.destroy_process_group()
        join_world(rank, 2, Path(folder, f"{failure}, again"))
        before = dispatches()
        again = losses(rank, failure, range(4), fails=False)
        hf_distca.metrics(gather=True)
        moved = dispatches() > before
        hf_distca.configure(settings())
        found[failure] = error, again, losses(rank, failure, range(4), fails=False), moved
    return found


def test_new_world_keeps_no_state_of_an_earlier_failure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(2)  # a pool for this test alone, because its world ends
        try:
            ranks = pool(fail_and_begin_again, folder, timeout=100.0)
        finally:
            pool.close()
    for failure in FAILURES:
        for error, again, fresh, moved in (rank[failure] for rank in ranks):
            assert error.startswith(("DistCADesyncError", "LayoutError")), failure
            torch.testing.assert_close(
                torch.tensor(again), torch.tensor(fresh), rtol=1e-5, atol=0.0, msg=failure
            )
            assert moved, failure
