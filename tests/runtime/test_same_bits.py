"""Results are bitwise equal for any timing of messages, content of fresh memory and strides.

Two layers run on random plans. Upstream gradients are random, too: those of a sum are all 1, which
would hide rows that change places. Each condition was tried with changes of the source, and each of
these changes makes a test fail:

- late: a missing wait (`Transfer.wait` returns at once; `Call.collect` uses rows before they come),
  or a buffer that is reused while its message may still travel (`launch` packs into memory of the
  exchange before).
- jitter: sums in the order of arrival (`add_rows` takes sections in any order), which three ranks
  show and two cannot.
- poisoned: a buffer that is not wholly written, or that is summed into without zeros
  (`KeyRelay.add_copies` with `new_empty`).
- strided: rows that are wrongly taken as contiguous (`compute_core_attention`, or backward of
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
from layer_exchanges import DIM, make_parts
from some_relays import draw_relays
from test_core_attention import (
    HEADS,
    KEY_HEADS,
    SCORES,
    draw_case,
    draw_head_groups,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.channel import Channel, Transfer
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.pingpong import run_nano_batches
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from ranks import RankPools
from turns import in_turn

WAYS = ("plain", "relays", "head groups", "ping-pong", "ping-pong with relays")
REPEATS = 4


def draw_plan(random_: random.Random, way: str, world: int) -> Plan:
    """Draw a plan without context that moves something; `way` asks for relays or head groups."""
    while True:
        ranks, context, tasks = draw_case(random_, world)
        if any(context):
            continue
        layout = Layout.from_segments(ranks)
        if way == "head groups":
            split, tasks = draw_head_groups(random_, ranks)
            layout = layout.split_heads(np.isin(layout.documents, split), KEY_HEADS)
        plan = Plan.from_tasks(layout, tasks)
        if "relays" in way:
            plan = replace(plan, relays=draw_relays(random_, plan))
        if (
            plan.moved
            and ("relays" not in way or plan.relays is not None)
            and (way != "head groups" or plan.layout.groups > 1)
        ):
            return plan


class Poisoned(TorchDispatchMode):
    """Set all bits of fresh memory to 1, which is NaN in every floating dtype."""

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
    assert mode.filled, "no memory was filled"


@contextmanager
def jitter(rank: int, repeat: int) -> Iterator[None]:
    """Delay each launch and each wait of a rank by a random time."""
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
    """Read and write messages as late as possible: when they are waited for.

    Ranks launch and wait in the same order, so all ranks then exchange the same messages.
    """

    def __init__(self, exchange: Callable[[], object]) -> None:
        self.exchange = exchange

    def wait(self) -> None:
        self.exchange()


@contextmanager
def late() -> Iterator[None]:
    """Fill what an exchange receives with NaN until its wait, and read what it sends only then."""

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
    """Return the same values with heads before rows in memory."""
    return x_THD.transpose(0, 1).contiguous().transpose(0, 1)


class Stack:
    """Two layers with one plan, or in ping-pong with one plan per nano-batch."""

    def __init__(self, rank: int, world: int, way: str, seed: int) -> None:
        random_ = random.Random(seed)
        self.rank = rank
        self.plans = [
            draw_plan(random_, way, world) for _ in range(1 + way.startswith("ping-pong"))
        ]
        self.seed = seed

    def compute(
        self, lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> list[torch.Tensor]:
        """Return the outputs and the gradients of the inputs."""
        random_ = torch.Generator().manual_seed(100 * self.seed + self.rank)
        leaves, upstream, halves = [], [], []
        for plan in self.plans:
            tokens = int(plan.layout.query_tokens[self.rank])
            # q of all heads, k of all key heads, and one head of v, expanded to all.
            x = torch.randn(tokens, HEADS + KEY_HEADS + 1, DIM, generator=random_).requires_grad_()
            leaves.append(x)
            upstream.append(lay_out(torch.randn(tokens, HEADS, DIM, generator=random_)))
            halves.append((x, make_parts(plan, self.rank, SCORES, dtype=torch.float32)))

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


def list_differing_conditions(rank: int, world: int, way: str, seeds: range) -> list[str]:
    """List the conditions under which a result differs from the first run."""
    found = []
    for seed in seeds:
        stack = Stack(rank, world, way, seed)
        expected = stack.compute(torch.Tensor.contiguous)
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
                results = stack.compute(lay_out)
            if not all(itertools.starmap(torch.equal, zip(expected, results, strict=True))):
                found.append(f"seed {seed}: {name}")
    return found


@pytest.mark.parametrize(
    ("world", "way"), in_turn(itertools.product((2, 3), WAYS), 99, [(3, "relays")])
)
def test_results_are_bitwise_equal_under_all_conditions(
    rank_pool: RankPools, world: int, way: str
) -> None:
    assert rank_pool(world)(list_differing_conditions, world, way, range(3)) == [[]] * world
