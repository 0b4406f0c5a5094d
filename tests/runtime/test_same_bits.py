"""Gradients are the same to the last bit, whenever messages come, whatever fresh memory holds and
however inputs lie.

Two layers on random plans, and upstream gradients that are random: the gradient of a sum is one
number everywhere, and rows that change places are not seen. What each condition finds was tried by
changes of the source, each of which makes a test here fail:

- late: a wait that is left out (`Transfer.wait` returns at once; `Call.collect` uses what has not
  come), a buffer that is used again while its message may still travel (`launch` packs into memory
  of the exchange before).
- jitter: sums in the order of arrival (`add_rows` takes sections in any order), which three ranks
  show and two cannot.
- poisoned: a buffer of which not all is written, or that is summed into without zeros
  (`KeyRelay.add_copies` with `new_empty`).
- strided: rows that are taken to lie one after another (`compute_core_attention`, or backward of
  `_Return`, without `contiguous`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layer_exchanges import DIM, parts_of
from some_relays import some_relays
from test_core_attention import (
    HEADS,
    KEY_HEADS,
    SCORES,
    random_case,
    split_case,
    whole_tasks,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.pingpong import run_nano_batches
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from ranks import RankPool
from turns import in_turn

WAYS = ("plain", "relays", "head groups", "ping-pong", "ping-pong with relays")
REPEATS = 4


def some_plan(random_: random.Random, way: str, world: int) -> Plan:
    """A plan that moves something, without context: with relays or head groups, as the way says."""
    while True:
        ranks, context, tasks = random_case(random_, world)
        if any(context):
            continue
        layout = Layout.from_segments(ranks)
        if way == "head groups":
            split, tasks = split_case(random_, world, whole_tasks(ranks))
            layout = layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
        plan = Plan.from_tasks(layout, tasks)
        if "relays" in way:
            plan = replace(plan, relays=some_relays(random_, plan))
        if (
            plan.moved
            and ("relays" not in way or plan.relays is not None)
            and (way != "head groups" or plan.layout.groups > 1)
        ):
            return plan


class Poisoned(TorchDispatchMode):
    """Fresh memory holds NaN, in whatever dtype it is read: all of its bits are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "empty_strided",
            "new_empty",
            "new_empty_strided",
        ):
            if result.numel():
                result.untyped_storage().fill_(255)
            self.filled += 1
        return result


@contextmanager
def poisoned() -> Iterator[None]:
    with Poisoned() as mode:
        yield
    assert mode.filled, "nothing was filled"


@contextmanager
def jitter(rank: int, repeat: int) -> Iterator[None]:
    """Each rank comes to each launch and each wait at a time of its own."""
    random_, start, wait = random.Random(1000 * rank + repeat), Channel.start, Transfer.wait

    def late_start(*args: Any, **options: Any) -> Transfer:
        time.sleep(random_.choice((0.0, 0.002, 0.005)))
        return start(*args, **options)

    def late_wait(transfer: Transfer) -> None:
        time.sleep(random_.choice((0.0, 0.002, 0.005)))
        wait(transfer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "start", late_start)
        patch.setattr(Transfer, "wait", late_wait)
        yield


class LateWork:
    """Messages that are read from the sender, and written at the receiver, as late as can be: when
    they are waited for.

    Ranks launch and wait in the same order, so each wait finds the other ranks' messages of the
    same exchange.
    """

    def __init__(self, exchange: Callable[[], object]) -> None:
        self.exchange = exchange

    def wait(self) -> None:
        self.exchange()


@contextmanager
def late() -> Iterator[None]:
    """Until an exchange is waited for, what it receives is NaN, and what it sends is read
    afterwards only.
    """

    def start(
        channel: Channel,
        transfer: Transfer,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
    ) -> None:
        group = channel.process_group
        arriving, leaving = (
            [sizes.get(rank, 0) for rank in range(group.size())]
            for sizes in (receive_bytes, send_bytes)
        )
        transfer.received.fill_(255)
        received, sent = transfer.received, transfer.sent
        transfer.works.append(
            LateWork(lambda: dist.all_to_all_single(received, sent, arriving, leaving, group=group))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "is_gloo", property(lambda channel: False))
        patch.setattr(Channel, "_start_all_to_all", start)
        yield


def strided(x_THD: torch.Tensor) -> torch.Tensor:
    """The same values, heads before rows in memory."""
    return x_THD.transpose(0, 1).contiguous().transpose(0, 1)


class Stack:
    """Two layers; in ping-pong, of two nano-batches, each with plans of its own."""

    def __init__(self, rank: int, world: int, way: str, seed: int) -> None:
        random_ = random.Random(seed)
        self.rank = rank
        self.plans = [
            some_plan(random_, way, world) for _ in range(1 + way.startswith("ping-pong"))
        ]
        self.seed = seed

    def computed(
        self, lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> list[torch.Tensor]:
        """Outputs, and gradients of what the layers are given."""
        random_ = torch.Generator().manual_seed(100 * self.seed + self.rank)
        leaves, upstream, halves = [], [], []
        for plan in self.plans:
            tokens = int(plan.layout.query_tokens[self.rank])
            # q of all heads, k and v; v of one head that all share, expanded.
            x = torch.randn(tokens, HEADS + KEY_HEADS + 1, DIM, generator=random_).requires_grad_()
            leaves.append(x)
            upstream.append(lay_out(torch.randn(tokens, HEADS, DIM, generator=random_)))
            halves.append((x, parts_of(plan, self.rank, SCORES, dtype=torch.float32)))

        def layers(x: torch.Tensor, parts: tuple[Any, ...]) -> torch.Tensor:
            q, k, v = x[:, :HEADS], x[:, HEADS:-1], x[:, -1:].expand(-1, KEY_HEADS, -1)
            for _ in range(2):
                q, k, v = (lay_out(one) for one in (q, k, v))
                q = compute_core_attention(Inputs(q, k, v), LayerExchange(*parts))
                k, v = q[:, ::2], q[:, 1::2]
            return q

        if len(halves) == 1:
            outs = [layers(*halves[0])]
        else:
            first, second = halves
            outs = list(run_nano_batches(lambda: layers(*first), lambda: layers(*second), "cpu"))
        torch.autograd.backward(outs, upstream)
        return [
            *(out.detach() for out in outs),
            *(leaf.grad for leaf in leaves if leaf.grad is not None),
        ]


def differing(rank: int, world: int, way: str, seeds: range) -> list[str]:
    """Conditions under which anything differs from what was found at first."""
    found = []
    for seed in seeds:
        stack = Stack(rank, world, way, seed)
        expected = stack.computed(torch.Tensor.contiguous)
        assert all(bool(x.isfinite().all()) for x in expected)
        conditions: dict[str, Any] = {
            f"jitter {repeat}": jitter(rank, repeat) for repeat in range(REPEATS)
        }
        conditions |= {
            "late": late(),
            "poisoned": poisoned(),
            "as given": nullcontext(),
            "strided": nullcontext(),
        }
        for name, condition in conditions.items():
            with condition:
                lay_out = {"as given": lambda x: x, "strided": strided}.get(
                    name, torch.Tensor.contiguous
                )
                results = stack.computed(lay_out)
            if not all(itertools.starmap(torch.equal, zip(expected, results, strict=True))):
                found.append(f"seed {seed}: {name}")
    return found


@pytest.mark.parametrize(
    ("world", "way"), in_turn(itertools.product((2, 3), WAYS), 99, [(3, "relays")])
)
def test_gradients_are_the_same_to_the_last_bit(
    rank_pool: Callable[[int], RankPool], world: int, way: str
) -> None:
    assert rank_pool(world)(differing, world, way, range(3)) == [[]] * world
