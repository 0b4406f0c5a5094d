"""Paths of messages that CPU tensors do not take by default.

Messages over NCCL have no tags, and messages of GPU tensors over gloo are copied to the host. Both
paths also run with CPU tensors over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_distca
from checkpointed import checkpoint_layers
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.group import AttentionGroup
from ranks import RankPools
from tiny_runs import settings, tiny_llama

LENGTHS = ([96], [24, 1, 23, 24, 24])
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ping-pong": {"ping_pong": True},
}


class Works:
    """Count exchanges that are started and waited for."""

    def __init__(self) -> None:
        self.exchanges: list[tuple[list[int], list[int]]] = []
        self.tagged = self.waits = self.under_way = self.most_under_way = 0

    def start(
        self, received: Any, sent: Any, arriving: Any = None, leaving: Any = None, **options: Any
    ) -> Any:
        if received.dtype == torch.int64:  # numbers for the plan, not rows
            return ALL_TO_ALL(received, sent, arriving, leaving, **options)
        assert options.pop("async_op") is True
        assert (received.dtype, sent.dtype) == (torch.uint8, torch.uint8)
        assert (sum(arriving), sum(leaving)) == (len(received), len(sent))
        self.exchanges.append((arriving, leaving))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        works, work = self, ALL_TO_ALL(received, sent, arriving, leaving, async_op=True, **options)

        class Work:
            def wait(self) -> None:
                work.wait()
                works.waits += 1
                works.under_way -= 1

        return Work()

    def count_tagged(self, *_: Any, **__: Any) -> None:
        self.tagged += 1


ALL_TO_ALL = dist.all_to_all_single


@contextmanager
def untagged() -> Iterator[Works]:
    works = Works()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "is_gloo", property(lambda channel: False))
        patch.setattr(dist, "all_to_all_single", works.start)
        for name in ("isend", "irecv"):
            patch.setattr(dist, name, works.count_tagged)
        yield works


@contextmanager
def staged() -> Iterator[Works]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "_is_staged", lambda channel, message: True)
        yield Works()


@contextmanager
def as_it_is() -> Iterator[Works]:
    yield Works()


BRANCHES = {"as it is": as_it_is, "untagged": untagged, "staged": staged}


def run_model(rank: int, way: dict[str, Any], checkpointing: bool) -> list[torch.Tensor]:
    """Return the output of a model with two layers, and its gradients."""
    hf_distca.configure(settings(**way))
    model = tiny_llama("distca")
    if checkpointing:
        checkpoint_layers(model, use_reentrant=False)
        model.enable_input_require_grads()
    positions = torch.cat([torch.arange(length) for length in LENGTHS[rank]])[None]
    ids = torch.randint(2, 61, positions.shape, generator=torch.Generator().manual_seed(rank))
    out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    out.logsumexp(-1).sum().backward()
    return [
        out.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def compare_branches(rank: int, name: str, checkpointing: bool) -> dict[str, Any]:
    results, counts = {}, {}
    for branch, change in BRANCHES.items():
        with change() as works:
            results[branch] = run_model(rank, WAYS[name], checkpointing)
        meter = current_session().meter
        counts[branch] = meter.dispatches + meter.returns
        if branch == "untagged":
            found = vars(works)
    equal = [
        all(map(torch.equal, results["as it is"], results[branch]))
        for branch in ("untagged", "staged")
    ]
    return {**found, "equal": equal, "counts": counts}


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [("plain", False), ("ping-pong", True)],
)
def test_message_paths_give_bitwise_equal_results(
    rank_pool: RankPools, name: str, checkpointing: bool
) -> None:
    found = rank_pool(2)(compare_branches, name, checkpointing)
    for one in found:
        assert one["equal"] == [True, True]
        assert len(set(one["counts"].values())) == 1
        assert len(one["exchanges"]) == one["counts"]["untagged"] == one["waits"] > 0
        assert (one["tagged"], one["under_way"]) == (0, 0)
        if name == "ping-pong":
            assert one["most_under_way"] > 1, "messages of both nano-batches are under way at once"
    # In every exchange, each rank receives as many bytes as the other sends.
    for (arriving, leaving), (other_arriving, other_leaving) in zip(
        *(one["exchanges"] for one in found), strict=True
    ):
        assert (arriving[1], leaving[1]) == (other_leaving[0], other_arriving[0])
        assert (arriving[0], leaving[0]) == (0, 0)


def run_staged_exchange(rank: int) -> list[list[int]]:
    """Return the values received before and after the wait; senders change theirs in between."""
    with staged():
        group = AttentionGroup.find_or_create(timeout_seconds=30)
        assert group.data is not None
        sent = torch.full((64,), 10 + rank, dtype=torch.uint8)
        received = torch.full((64,), 99, dtype=torch.uint8)
        transfer = group.data.start(received, sent, {1 - rank: 64}, {1 - rank: 64})
        sent.fill_(77)  # a GPU's next kernel
        group.gather(torch.zeros(1, dtype=torch.int64).numpy(), activity="testing")
        before = received.unique().tolist()
        assert transfer.works
        transfer.wait()
        assert not transfer.works
        return [before, received.unique().tolist()]


def test_staged_messages_are_copied_at_the_start_and_arrive_at_the_wait(
    rank_pool: RankPools,
) -> None:
    assert rank_pool(2)(run_staged_exchange) == [[[99], [11]], [[99], [10]]]
