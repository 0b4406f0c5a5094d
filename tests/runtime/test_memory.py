"""Bytes that core attention keeps for backward, needs within a call, or leaks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_exchanges import DIM, make_parts
from test_core_attention import draw_case

from hf_distca.config import DistCAConfig
from hf_distca.kernels import ScoreOptions
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel, TransientBytes
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import count_transient_bytes
from hf_distca.schedule.plan import CATask, Plan
from live_bytes import LiveBytes, OutsideKernel
from ranks import RankPools
from turns import in_turn

HEADS, KEY_HEADS = 2, 1
# Bytes of anchors and their gradients.
SMALL = 64
LONG = 4096
SKEWED = {
    2: [[LONG], [LONG // 8] * 8],
    4: [[LONG], [LONG // 16] * 16, [LONG // 2] * 2, [100] * 40 + [96]],
}


def make_shape(dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(HEADS, KEY_HEADS, DIM, DIM, dtype.itemsize)


_CALLS = itertools.count()


class Call:
    """One call of core attention on one rank, with its bytes."""

    def __init__(self, plan: Plan, rank: int, dtype: torch.dtype) -> None:
        self.live = LiveBytes()
        scores = ScoreOptions(DIM**-0.5, plan.window)
        self.route, self.group, server = make_parts(plan, rank, scores, dtype=dtype)
        self.kernel, self.meter = OutsideKernel(server.kernel, self.live), server.meter
        self.server = replace(server, kernel=self.kernel)
        self.estimate = count_transient_bytes(plan, TransientBytes.from_shape(make_shape(dtype)))
        # Unique: calls that ended early have left messages under other labels.
        self.label = f"call {next(_CALLS)}"
        rows, context = int(plan.layout.query_tokens[rank]), int(plan.layout.context_tokens[rank])
        generator = torch.Generator().manual_seed(rank)
        shapes = [(rows, HEADS, DIM), *[(context + rows, KEY_HEADS, DIM)] * 2, (rows, HEADS, DIM)]
        *self.leaves, self.do = (
            torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes
        )
        for leaf in self.leaves:
            leaf.requires_grad_()

    def forward(self) -> torch.Tensor:
        exchange = LayerExchange(self.route, self.group, self.server, label=self.label)
        return compute_core_attention(Inputs(*self.leaves), exchange)

    def grads(self, out: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.do, **options)


def measure(rank: int, plan: Plan, dtype: torch.dtype) -> dict[str, Any]:
    """Measure the bytes kept for backward, and the peak above the bytes that remain."""
    call = Call(plan, rank, dtype)
    with call.live:
        out = call.forward()
        expected = out.nbytes + out.shape[0] * HEADS * max(4, dtype.itemsize)
        kept = call.live.settle(expected + SMALL)
        transient = call.live.take_peak() - kept
        grads = call.grads(out, retain_graph=True)  # the log-sum-exp stays, as it does at the peak
        remains = call.live.settle(expected + SMALL + sum(grad.nbytes for grad in grads))
        backward = call.live.take_peak() - remains
        del out
    # The rank's own key gradients are float32 while they are summed.
    own = 0 if dtype.itemsize >= 4 else sum(2 * grad.nbytes for grad in grads[1:])
    return {
        "kept": kept,
        "transient": max(transient, backward - own, 0),
        "estimate": int(call.estimate[rank]),
        "sent": call.meter.sent_bytes,
        "grads": [grad.double().abs().sum().item() for grad in grads],
    }


def make_balanced_plan(lengths: list[list[int]], bound: int | None = None) -> Plan:
    config = DistCAConfig(tile=16, max_transient_bytes=bound)
    return balance(
        Layout.from_lengths(lengths), CostModel.make_of_pairs(make_shape(torch.float32)), config
    )


@pytest.mark.parametrize("world", in_turn([2, 4], 2))
def test_kept_bytes_are_balanced_and_transient_bytes_are_bounded(
    rank_pool: RankPools, world: int
) -> None:
    pool = rank_pool(world)
    local = pool(measure, Plan.make_local(Layout.from_lengths(SKEWED[world])), torch.float32)
    free = pool(measure, make_balanced_plan(SKEWED[world]), torch.float32)
    bound = max(result["transient"] for result in free) // 3
    bounded = pool(measure, make_balanced_plan(SKEWED[world], bound), torch.float32)
    # o and the log-sum-exp; q, k and v existed before.
    expected = LONG * (HEADS * DIM + HEADS) * 4
    for results in (local, free, bounded):
        kept = [result["kept"] for result in results]
        assert all(expected <= bytes_ <= expected + SMALL for bytes_ in kept), kept
        assert max(kept) * world / sum(kept) <= 1.05
    assert 0 < max(result["transient"] for result in bounded) <= bound
    for one, other in zip(free, bounded, strict=True):
        assert one["grads"] == pytest.approx(other["grads"], rel=1e-4)


@pytest.mark.parametrize("dtype", in_turn([torch.float32, torch.bfloat16], 2), ids=str)
def test_transient_bytes_do_not_exceed_the_estimate(
    rank_pool: RankPools, dtype: torch.dtype
) -> None:
    pool = rank_pool(3)

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.randoms(use_true_random=False),
        st.sampled_from([None, None, 9, 40]),
    )
    def check(random_: Any, window: int | None) -> None:
        ranks, context, tasks = draw_case(random_, 3)
        plan = Plan.from_tasks(Layout.from_segments(ranks, context), tasks, window)
        for result in pool(measure, plan, dtype):
            # Sections of messages are padded to 16 bytes.
            assert (
                not plan.moved or result["transient"] <= result["estimate"] + 12 * 16 * 3 + SMALL
            ), (
                ranks,
                context,
                tasks,
            )

    check()


def test_many_slices_of_a_document_take_one_copy_of_its_prefix(rank_pool: RankPools) -> None:
    layout = Layout.from_lengths([[640], [640]])
    cuts = range(0, 641, 64)
    alternating = [CATask(0, a, a + 64, 0, 1 if a % 128 else 0) for a in cuts[:-1]]
    at_once = [CATask(0, 0, 320, 0, 0), CATask(0, 320, 640, 0, 1)]
    results = []
    for tasks in (alternating, at_once):
        plan = Plan.from_tasks(layout, [*tasks, CATask(1, 0, 640, 1, 1)])
        results.append(rank_pool(2)(measure, plan, torch.float32))
    for many, one in zip(*results, strict=True):
        assert many["sent"] == one["sent"]
        # Rows that do not lie in one run are copied.
        assert many["transient"] <= one["transient"] + 320 * HEADS * DIM * 4


def measure_bfloat16_error(rank: int, plan: Plan) -> float:
    """Return the larger of the relative errors of dk and dv."""
    rounded, exact = Call(plan, rank, torch.bfloat16), Call(plan, rank, torch.float64)
    with torch.no_grad():
        for leaf, source in zip(
            [*exact.leaves, exact.do], [*rounded.leaves, rounded.do], strict=True
        ):
            leaf.copy_(source)
    pairs = zip(rounded.grads(rounded.forward())[1:], exact.grads(exact.forward())[1:], strict=True)
    return max(
        (
            ((got.double() - want).norm() / want.norm()).item()
            for got, want in pairs
            if want.numel()
        ),
        default=0.0,
    )


def test_gradients_of_copies_are_summed_in_float32(rank_pool: RankPools) -> None:
    # Successive slices go to different ranks, so every key has a copy on all ranks.
    tasks = [CATask(0, a, a + 32, 0, (a // 32) % 4) for a in range(0, 1024, 32)]
    layout = Layout.from_lengths([[1024], [], [], []])
    error = rank_pool(4)(measure_bfloat16_error, Plan.from_tasks(layout, tasks))
    alone = rank_pool(4)(measure_bfloat16_error, Plan.make_local(layout))
    # Each copy's gradient and the final sum are rounded to bfloat16; partial sums are not.
    assert max(error) < 1.5 * max(alone), (error, alone)


def drop_calls(rank: int, plan: Plan) -> None:
    call = Call(plan, rank, torch.float64)
    expected = call.grads(call.forward())
    with call.live:
        out = call.forward()
        kept = out.nbytes + out.shape[0] * HEADS * 8
        assert kept <= call.live.settle(kept + SMALL) <= kept + SMALL
        del out
        assert call.live.settle() == 0, "a forward without backward leaves nothing"
        out = call.forward()
        for _ in range(3):
            grads = call.grads(out, retain_graph=True)
            for got, want in zip(grads, expected, strict=True):
                torch.testing.assert_close(got, want)
            del got, grads
            assert call.live.settle(kept + SMALL) <= kept + SMALL, (
                "backward leaves nothing but the graph"
            )


class Broken:
    """A kernel that fails at its n-th call."""

    name = "broken"

    def __init__(self, kernel: Any, calls: int) -> None:
        self.kernel, self.calls = kernel, calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise ArithmeticError("out of luck")

    def forward(self, *arguments: Any) -> Any:
        self._count()
        return self.kernel.forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self._count()
        return self.kernel.backward(*arguments)


def fail_calls(rank: int, plan: Plan) -> int:
    call = Call(plan, rank, torch.float64)
    expected, server = call.grads(call.forward()), call.server
    calls = 2  # kernel calls in each direction: local tasks and arrived tasks
    with call.live:
        for number in range(1, 2 * calls + 1):
            call.server = replace(server, kernel=Broken(call.kernel, number))
            out, before = None, 0
            try:
                out = call.forward()
                before = out.nbytes + out.shape[0] * HEADS * 8 + SMALL
                call.grads(out)
            except ArithmeticError:
                pass
            else:
                raise AssertionError("the kernel should have failed")
            assert call.live.settle(before) <= before, f"failure at kernel call {number}"
            del out
            assert call.live.settle() == 0
            # A rank whose kernel fails leaves the group, so that no other rank waits for it.
            assert call.group.has_left
            call.group = AttentionGroup.find_or_create(timeout_seconds=60)
            call.server = server
            for got, want in zip(call.grads(call.forward()), expected, strict=True):
                torch.testing.assert_close(got, want)
            del got
    return calls


@pytest.mark.parametrize("function", [drop_calls, pytest.param(fail_calls, marks=pytest.mark.slow)])
def test_calls_that_end_early_leave_no_bytes(
    rank_pool: RankPools, function: Callable[..., Any]
) -> None:
    plan = make_balanced_plan([[640], [64] * 10])
    assert plan.moved
    rank_pool(2)(function, plan)
