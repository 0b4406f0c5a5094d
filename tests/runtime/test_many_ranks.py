"""The scheduler's plans for 64 and 512 ranks give the same attention as whole documents.

Each rank is a thread of one process, and messages go through memory. In every exchange, a rank must
send as many bytes as the receiver expects, and all ranks must launch the same exchanges in the same
order. Threads cannot show how processes start, die or wait for each other; tests with gloo do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layer_exchanges import DIM, make_parts
from test_core_attention import HEADS, KEY_HEADS, SCORES, compute_whole, make_tensors

from hf_distca.config import DistCAConfig
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from turns import in_turn

SHAPE = AttentionShape(HEADS, KEY_HEADS, DIM, DIM, 8)
TILE, LONG, SECONDS = 16, 1024, 120.0


@dataclass
class Post:
    """Messages by exchange and sender: the bytes, and how many of them go to each rank."""

    sent: dict[int, dict[int, tuple[torch.Tensor, Mapping[int, int]]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    names: dict[int, set[str | None]] = field(default_factory=lambda: defaultdict(set))
    arrival: Condition = field(default_factory=Condition)


@dataclass
class Mailbox:
    """Stand in for a rank's `Channel`."""

    post: Post
    rank: int
    launched: int = 0
    is_gloo = False

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
        purpose: str,
    ) -> SimpleNamespace:
        assert (len(received), len(sent)) == (sum(receive_bytes.values()), sum(send_bytes.values()))
        number, self.launched = self.launched, self.launched + 1
        with self.post.arrival:
            self.post.sent[number][self.rank] = sent, send_bytes
            self.post.names[number].add(purpose)
            self.post.arrival.notify_all()
        return SimpleNamespace(wait=partial(self.take, number, received, receive_bytes))

    def take(self, number: int, received: torch.Tensor, receive_bytes: Mapping[int, int]) -> None:
        """Wait for all senders, then copy this rank's parts of their messages in rank order."""
        post, place = self.post, 0
        senders = [rank for rank, size in receive_bytes.items() if size]
        with post.arrival:
            assert post.arrival.wait_for(
                lambda: all(rank in post.sent[number] for rank in senders), SECONDS
            )
        for rank in senders:
            message, send_bytes = post.sent[number][rank]
            first = sum(size for to, size in send_bytes.items() if to < self.rank)
            size = receive_bytes[rank]
            assert send_bytes[self.rank] == size
            received[place : place + size] = message[first : first + size]
            place += size


@dataclass
class World:
    """A layout, a plan for it, and the tensors of its documents."""

    layout: Layout
    plan: Plan
    documents: dict[int, list[torch.Tensor]]
    post: Post = field(default_factory=Post)

    def pick_rows(self, rank: int, part: int, given: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        """Select a rank's rows of q, k, v or dO, or of one of the results."""
        segments = slice(self.layout.offsets[rank], self.layout.offsets[rank + 1])
        columns = (
            column[segments].tolist()
            for column in (self.layout.document, self.layout.start, self.layout.end)
        )
        pieces = [
            given[number][part][start:end] for number, start, end in zip(*columns, strict=True)
        ]
        return torch.cat([make_tensors(0, 0)[part], *pieces])

    def compute(self, rank: int) -> list[torch.Tensor]:
        """Compute o, dq, dk and dv of a rank's tokens."""
        leaves = [self.pick_rows(rank, part, self.documents).requires_grad_() for part in range(3)]
        group = AttentionGroup(
            tuple(range(self.layout.world_size)), rank, data=Mailbox(self.post, rank)
        )  # type: ignore[arg-type]
        parts = make_parts(self.plan, rank, SCORES, group=group)
        out = compute_core_attention(Inputs(*leaves), LayerExchange(*parts))
        out.backward(self.pick_rows(rank, 3, self.documents))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def make_world(ranks: int, way: str) -> World:
    """Give every 32nd rank a long document, others short ones; "dealt" deals them over ranks."""
    lengths = [[LONG] if rank % 32 == 0 else [40, 17, 7] for rank in range(ranks)]
    layout = Layout.from_lengths(lengths)
    cost = replace(CostModel.make_of_pairs(SHAPE), tile=TILE, exchange_bytes_per_second=1e11)
    if way == "dealt":
        flat = np.array([length for row in lengths for length in row])
        layout = deal(flat, ranks, layout.query_tokens.tolist(), cost)
    plan = balance(
        layout, cost, DistCAConfig(tile=TILE, head_groups=KEY_HEADS if way == "head groups" else 1)
    )
    assert way == "dealt" or (plan.relays is not None) == (way in ("relays", "head groups"))
    assert (plan.layout.groups > 1) == (way == "head groups")
    sizes = np.zeros(int(layout.documents.max()) + 1, dtype=np.int64)
    np.maximum.at(sizes, layout.document, layout.end)
    documents = {
        int(number): make_tensors(int(number), int(sizes[number])) for number in layout.documents
    }
    return World(layout, plan, documents)


@pytest.mark.parametrize(
    ("ranks", "way"),
    in_turn(
        [
            (64, "head groups"),
            (64, "relays"),
            (64, "dealt"),
            pytest.param(512, "relays", marks=pytest.mark.slow),
            pytest.param(512, "dealt", marks=pytest.mark.slow),
        ],
        5,
    ),
)
def test_plans_of_many_ranks_are_exact(ranks: int, way: str) -> None:
    world = make_world(ranks, way)
    assert world.plan.moved
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(world.compute, range(ranks)))
    whole = compute_whole(world.documents, SCORES)
    for rank, (o_THV, *grads) in enumerate(found):
        for part, x in enumerate((*grads, o_THV)):
            assert float((x - world.pick_rows(rank, part, whole)).abs().sum()) < 1e-9, (rank, part)
    assert {len(names) for names in world.post.names.values()} == {1}, (
        "every rank launches the same exchanges"
    )
