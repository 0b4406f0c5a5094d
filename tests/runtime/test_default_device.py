"""Tensors do not follow the default device, here "meta", where no value can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_exchanges import DIM, make_parts
from torch.utils._device import _device_constructors

from hf_distca.kernels import ScoreOptions
from hf_distca.kernels.cpu import CpuKernel, _make_block_mask
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import CATask, Plan
from ranks import RankPools

ROOMS = Path(__file__).parents[2] / "src" / "hf_distca"
FILES = sorted(path for room in ("kernels", "runtime") for path in (ROOMS / room).glob("*.py"))
FOLLOW_THE_DEFAULT = {function.__name__ for function in _device_constructors()}
HEADS, KEY_HEADS = 4, 2

# Short documents that share a call, and a long one whose slices are moved.
ROWS = [[(0, 0, 64)], [(1, 0, 20), (2, 0, 18)]]
TASKS = [(0, 0, 32, 0, 0), (0, 32, 64, 0, 1), (1, 0, 20, 1, 1), (2, 0, 18, 1, 1)]


def find_tensor_calls(path: Path) -> Iterator[ast.Call]:
    """Find calls of torch functions that follow the default device, also through `partial`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.args[0] if getattr(node.func, "id", None) == "partial" else node.func
            named = isinstance(function, ast.Attribute) and function.attr in FOLLOW_THE_DEFAULT
            if named and ast.unparse(function.value) == "torch":
                yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_functions_that_make_tensors_name_a_device(path: Path) -> None:
    named = [(call, {keyword.arg for keyword in call.keywords}) for call in find_tensor_calls(path)]
    assert not [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call, words in named
        if not words & {"device", None}
    ]


def run_step(rank: int, window: int | None, device: str | None) -> list[object]:
    """Gather numbers and texts, then run a layer forward and backward on the CPU."""
    generator = torch.Generator().manual_seed(rank)
    tokens = sum(length for *_, length in ROWS[rank])
    q, k, v, do = (
        torch.randn(tokens, heads, DIM, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _make_block_mask.cache_clear()
    torch.set_default_device(device)
    try:
        group = AttentionGroup.create(timeout_seconds=30)
        numbers = [np.arange(length) for length in (3, 150 + rank, 150 + 400 * rank)]
        gathered = [
            [row.tolist() for row in group.gather(one, activity="gathering")] for one in numbers
        ]
        texts = group.gather_text(f"rank {rank}", activity="gathering texts")
        plan = Plan.from_tasks(
            Layout.from_segments(ROWS, [0, 0]), [CATask(*task) for task in TASKS], window
        )
        scores = ScoreOptions(0.2, window)
        parts = make_parts(plan, rank, scores, kernel=CpuKernel(), group=group)
        out = compute_core_attention(Inputs(*leaves), LayerExchange(*parts))
        out.backward(do)
    finally:
        torch.set_default_device(None)
    return [
        gathered,
        texts,
        *(x.detach().numpy() for x in (out, *(leaf.grad for leaf in leaves))),
    ]


@pytest.mark.parametrize("window", [None, 7])
def test_the_default_device_does_not_change_a_step(
    rank_pool: RankPools, window: int | None
) -> None:
    plain, other = (rank_pool(2)(run_step, window, device) for device in (None, "meta"))
    for mine, expected in zip(other, plain, strict=True):
        assert mine[:2] == expected[:2]
        for found, wanted in zip(mine[2:], expected[2:], strict=True):
            np.testing.assert_array_equal(found, wanted)
