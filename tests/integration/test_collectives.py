"""The collectives of a training step; an attention call reads nothing on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_parity import build_model

import hf_distca
from checkpointed import checkpoint_layers
from handles import make_handle
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import LayerPlanner
from hf_distca.kernels import ScoreOptions
from hf_distca.runtime.call import AttentionServer, Inputs
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPools
from recorded import Operations, recorded
from tiny_runs import pack, settings

LAYERS = 2
# Ranks first gather their documents, and then compare their plans.
PLANNING = Counter(all_to_all_single=2)


def make_batch(rank: int, scale: int = 1) -> dict[str, Any]:
    lengths = [[96 * scale], [16 * scale] * 3, [16 * scale]][rank]
    return pack(*lengths)


def run_step(
    rank: int, balance: bool, even: bool, reentrant: bool | None
) -> tuple[list[str], list[int]]:
    """Run a training step; return its collectives and counts.

    No layer is checkpointed if `reentrant` is None.
    """
    hf_distca.configure(settings(balance=balance))
    model = build_model(2, "distca", torch.float32)
    if reentrant is not None:
        checkpoint_layers(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
    # The group is made before recording starts.
    assert current_session().join_group().size == dist.get_world_size()
    with recorded() as names:
        model(**make_batch(1 if even else rank), use_cache=False).loss.backward()
    meter = current_session().meter
    return names, [meter.dispatches, meter.returns, meter.sent_bytes, meter.kernel_calls]


@pytest.mark.parametrize("world", [2, 3])
def test_one_dispatch_and_one_return_per_layer_and_direction(
    rank_pool: RankPools, world: int
) -> None:
    results = rank_pool(world)(run_step, True, False, None)
    names = results[0][0]
    assert all(result[0] == names for result in results), (
        "ranks call collectives in different orders"
    )
    assert Counter(names) == {**PLANNING, "exchange": 2 * 2 * LAYERS}
    assert Counter(names[:2]) == PLANNING, "planning comes first, and only once"
    assert all(result[1][:2] == [2 * LAYERS, 2 * LAYERS] for result in results)
    assert sum(result[1][2] for result in results) > 0


@pytest.mark.parametrize(("balance", "even"), [(False, False), (True, True)])
def test_nothing_is_exchanged_if_balance_is_off_or_ranks_are_even(
    rank_pool: RankPools, balance: bool, even: bool
) -> None:
    for names, counts in rank_pool(2)(run_step, balance, even, None):
        assert Counter(names) == PLANNING
        assert counts == [0, 0, 0, 2 * LAYERS]


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_no_collective_and_no_kernel(
    rank_pool: RankPools, reentrant: bool, balance: bool
) -> None:
    plain = rank_pool(2)(run_step, balance, False, None)
    assert rank_pool(2)(run_step, balance, False, reentrant) == plain


def count_operations(rank: int, scale: int) -> Counter[str]:
    """Count tensor operations of one planned attention call, forward and backward; forbid reads."""
    hf_distca.configure(settings(tile=8 * scale, kernel="cpu"))
    session = current_session()
    packed = make_batch(rank, scale)["distca_documents"]
    length = sum(packed.lengths)
    q, k, v = (torch.randn(1, heads, length, 16) for heads in (4, 2, 2))
    handle = make_handle(1, length)
    key = handle.batch.make_key(AttentionShape(4, 2, 16, 16, 4), "cpu", None)
    plan = LayerPlanner(session).plan_layers(
        handle.batch, {"distca_documents": packed}, q, key, training=True
    )
    scores = ScoreOptions(0.25)
    kernel = session.choose_kernel(q, key.shape, scores)
    plan = replace(plan, server=AttentionServer(kernel, scores, plan.meter))
    leaves = [t[0].transpose(0, 1).contiguous().requires_grad_() for t in (q, k, v)]

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("an attention call read a tensor on the host")

    readers = ("item", "tolist", "cpu", "numpy", "__bool__", "nonzero")
    with (
        patch.multiple(torch.Tensor, **dict.fromkeys(readers, forbidden)),
        Operations() as operations,
    ):
        plan.compute_attention(torch.nn.Module(), Inputs(*leaves)).sum().backward()
    assert session.meter.dispatches == 2
    return operations.seen


def test_planned_call_reads_no_tensor_and_has_constant_operations(rank_pool: RankPools) -> None:
    small, large = (rank_pool(2)(count_operations, scale) for scale in (1, 8))
    assert small == large
    assert not any(
        "_local_scalar_dense" in name or "nonzero" in name for seen in small for name in seen
    )
