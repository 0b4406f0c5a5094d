"""That ranks take the same kernel, by the clock of the first one: on CPUs, with kernels that take
as long as they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_distca.kernels import TaskBatch
from hf_distca.kernels.base import Grads, Operands, Outputs, Saved
from hf_distca.kernels.plain_torch import ReferenceKernel
from hf_distca.measure import calibrate as module
from hf_distca.measure.calibrate import find_fastest_kernel
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPool

NAMES = ("auto", "a", "b", "c")
CPU = torch.device("cpu")


class Slow(ReferenceKernel):
    """Takes `seconds` of a clock for a pair of a row and a key, and computes nothing."""

    def __init__(self, name: str, seconds: float, clock: list[float]) -> None:
        self.name, self.seconds, self.clock = name, seconds, clock  # type: ignore[misc]

    def forward(self, pools: Operands, tasks: TaskBatch, scores: Any) -> Any:
        self.clock[0] += self.seconds * sum(map(int.__mul__, tasks.query_length, tasks.key_length))
        return Outputs(torch.zeros_like(pools.q_THD), pools.q_THD[..., 0].float())

    def backward(self, pools: Saved, tasks: TaskBatch, scores: Any) -> Any:
        self.clock[0] += (
            2.5 * self.seconds * sum(map(int.__mul__, tasks.query_length, tasks.key_length))
        )
        return Grads(*pools.operands)


def chosen(rank: int, seconds: list[dict[str, float]]) -> tuple[str | None, float]:
    """What a rank takes whose kernels take so long, and how long that took."""
    clock = [0.0]
    kernels = [Slow(name, one, clock) for name, one in seconds[rank].items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "list_runnable", lambda *case: kernels)
        group = AttentionGroup.find_or_create(timeout_seconds=30)
        return find_fastest_kernel(
            AttentionShape(2, 1, 8, 8, 2), NAMES, torch.bfloat16, CPU, group, clock=lambda: clock[0]
        ), clock[0]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # The second rank's clock does not count.
        ([{"a": 3e-6, "b": 2e-6, "c": 4e-6}, {"a": 1e-6, "b": 9e-6, "c": 9e-6}], "b"),
        # What does not run on a rank is taken by none.
        ([{"a": 3e-6, "b": 2e-6, "c": 4e-6}, {"a": 1e-6, "c": 1e-6}], "a"),
        ([{"a": 3e-6}, {"b": 1e-6}], None),
        # The first of several that take as long.
        ([{"b": 2**-20, "a": 2**-20}, {"a": 1.0, "b": 1.0}], "a"),
    ],
)
def test_all_ranks_take_the_fastest_of_the_first(
    rank_pool: Callable[[int], RankPool], seconds: list[dict[str, float]], expected: str | None
) -> None:
    (one, taken), (other, untimed) = rank_pool(2)(chosen, seconds)
    assert one == other == expected
    assert (taken > 0) == (len(seconds[0]) > 1)
    assert untimed == 0, "one rank measures"
