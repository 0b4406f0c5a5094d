"""FlashAttention 4 compiles nothing after the first step; a stand-in counts compilations."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_distca.kernels as kernels
from hf_distca.config import DistCAConfig
from hf_distca.kernels import KernelRequest, ScoreOptions, TaskBatch, flash
from hf_distca.kernels import check as variants
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout

CPU = torch.device("cpu")
LLAMA = KernelRequest(CPU, torch.bfloat16, 128, 128, ScoreOptions(0.1), 4)
CASES = {
    "plain": LLAMA,
    "window": LLAMA._replace(scores=ScoreOptions(0.1, window=700)),
    "window of less than a block, softcap": LLAMA._replace(
        scores=ScoreOptions(0.1, window=5, softcap=30.0)
    ),
    "narrow heads": LLAMA._replace(head_dim=64, value_head_dim=64, gqa_ratio=1),
    "widths that differ": LLAMA._replace(head_dim=72),
    "wide heads with a window": LLAMA._replace(
        head_dim=256, value_head_dim=256, scores=ScoreOptions(0.1, window=700)
    ),
}
BLOCK = 128


class Interface:
    """Imitate FlashAttention 4.0.0b36: compile keys hold what differs between calls of a layer."""

    BIN_BATCH_SEARCH_THRESH = 256

    def __init__(self, warning: str | None = None) -> None:
        def compiled(cache: dict[Any, None], options: dict[str, Any], *blocks: str) -> None:
            q, k, v = (options[name] for name in "qkv")
            long = len(options["cu_seqlens_q"]) - 1 > self.BIN_BATCH_SEARCH_THRESH
            single = [options[name] <= BLOCK for name in blocks]
            kind = (
                q.dtype,
                q.shape[2],
                v.shape[2],
                q.shape[1] // k.shape[1],
                options["softcap"],
                options.get("deterministic"),
            )
            if (
                key := (*kind, options["window_size_left"] is None, long, *single)
            ) not in cache and warning is not None:
                warnings.warn(warning, UserWarning, stacklevel=2)
            cache[key] = None

        def forward(**options: Any) -> tuple[Any, ...]:
            compiled(forward.compile_cache.cache, options, "max_seqlen_q")
            q, v = options["q"], options["v"]
            return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(
                q.shape[1::-1], dtype=torch.float32
            )

        def backward(**options: Any) -> tuple[Any, ...]:
            compiled(backward.compile_cache.cache, options, "max_seqlen_q", "max_seqlen_k")
            return tuple(torch.empty_like(options[name]) for name in "qkv")

        forward.compile_cache = SimpleNamespace(cache={})
        backward.compile_cache = SimpleNamespace(cache={})
        self._flash_attn_fwd, self._flash_attn_bwd = forward, backward


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that installs an object as the package, with nothing compiled yet."""

    def taken(module: Any) -> None:
        monkeypatch.setattr(flash, "_import_once", lambda name: module)
        monkeypatch.setitem(sys.modules, flash.INTERFACE_4, module)
        monkeypatch.setattr(variants, "_ahead", 0)

    variants._compile_once.cache_clear()
    return taken


@pytest.fixture
def package(take: Callable[[Any], None]) -> Iterator[Any]:
    """Install the stand-in, which launches nothing."""
    take(module := Interface())
    with FakeTensorMode():
        yield module


def attend(case: KernelRequest, tasks: TaskBatch, rows: int, keys: int, key_heads: int = 2) -> None:
    """Run one layer of tasks forward and backward."""
    heads = case.gqa_ratio * key_heads
    q, do = (
        torch.empty(rows, heads, n, dtype=case.dtype) for n in (case.head_dim, case.value_head_dim)
    )
    k, v = (
        torch.empty(keys, key_heads, n, dtype=case.dtype)
        for n in (case.head_dim, case.value_head_dim)
    )
    outputs = flash.FLASH_ATTN_4.forward(Operands(q, k, v), tasks, case.scores)
    flash.FLASH_ATTN_4.backward(BackwardInputs(do, q, *outputs, k, v), tasks, case.scores)


def run(case: KernelRequest, lengths: list[list[int]]) -> None:
    """Run a layer on all ranks of a plan: own tasks and arrived tasks, also by head groups."""
    layout = Layout.from_lengths(lengths)
    shape = AttentionShape(4 * case.gqa_ratio, 4, case.head_dim, case.value_head_dim, 2)
    cost = replace(CostModel.make_analytic(shape, device_type="cuda"), window=case.scores.window)
    plan = balance(layout, cost, DistCAConfig(min_gain=0.0))
    for rank in range(plan.layout.world_size):
        route = Route.build(plan, rank)
        tokens = int(plan.layout.query_tokens[rank] + plan.layout.context_tokens[rank])
        batches = [(route.local_tasks, tokens, tokens, 4)]
        for pooled in (*([] if route.local_pooled is None else [route.local_pooled]), route.pooled):
            pools = pooled.query_pool.rows, pooled.key_pool.rows
            batches.append((pooled.tasks, *pools, 4 // route.groups))
        for batch in batches:
            if len(batch[0]):
                attend(case, *batch)


def make_batch(lengths: tuple[int, ...], keys: int = 0) -> tuple[TaskBatch, int, int]:
    """Make a batch of documents in a row; each has `keys` more keys before those of its rows."""
    starts, key_starts = (
        [sum(n + more for n in lengths[:i]) for i in range(len(lengths))] for more in (0, keys)
    )
    tasks = TaskBatch(starts, lengths, key_starts, [n + keys for n in lengths])
    return tasks, sum(lengths), sum(lengths) + keys * len(lengths)


DOCUMENTS = st.one_of(st.integers(1, 3), st.integers(1, 300), st.integers(1, 40_000))
RANKS = st.lists(st.lists(DOCUMENTS, min_size=1, max_size=5), min_size=1, max_size=4)
MANY = st.tuples(st.integers(250, 300), st.integers(1, 3))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_of_random_layouts_compile_nothing_late(case: KernelRequest) -> None:
    assert variants.compile_failure_reason(flash.FLASH_ATTN_4, case) is None

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(RANKS, MANY)
    def check(lengths: list[list[int]], many: tuple[int, int]) -> None:
        run(case, lengths)
        run(case, [[40_000], [many[1]] * many[0]])
        assert variants.count_late_compiles() == 0

    check()
    for tasks in (
        make_batch((1,)),
        make_batch((128,)),
        make_batch((64, 1)),
        make_batch((1,), 127),
        make_batch((1,) * 300),
        make_batch((1,), 9000),
    ):
        for key_heads in (1, 2, 8):
            attend(case, *tasks, key_heads)
    assert variants.count_late_compiles() == 0


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("left_out", ["windows", "long calls", "blocks"])
def test_a_step_compiles_variants_that_were_not_compiled_ahead(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["window"]
    if left_out == "long calls":
        monkeypatch.setattr(variants, "_list_sequence_counts", lambda: (2,))
    if left_out == "blocks":
        monkeypatch.setattr(
            flash.FLASH_ATTN_4._op, "_package", flash.replace(flash._FLASH_ATTN_4, least_longest=0)
        )
    variants.compile_variants(flash.FLASH_ATTN_4, CASES["plain"] if left_out == "windows" else case)
    attend(case, *make_batch((900,)))
    attend(case, *make_batch((900,) * 2 + (1,) * 300))
    attend(case, *make_batch((1,)))
    assert variants.count_late_compiles() > 0


def test_compilation_ahead_is_logged_and_its_warnings_are_hidden(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, take: Callable[[Any], None]
) -> None:
    take(Interface(warning="a compiler's own"))
    monkeypatch.setattr(kernels, "_logged", set())
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        for _ in range(2):
            assert variants.compile_failure_reason(flash.FLASH_ATTN_4, CASES["window"]) is None
    begin, end = (record.getMessage() for record in caplog.records)
    named = "heads of 128, 4 query heads a key head, with window"
    assert begin == f"kernel 'flash_attn_4' compiles its variants for {named}, on all ranks at once"
    assert "compiled or loaded 8 functions for heads of 128" in end
    assert variants.count_late_compiles() == 0
    with pytest.warns(UserWarning, match="a compiler's own"):
        attend(CASES["narrow heads"], *make_batch((10,)))
    assert variants.count_late_compiles() == 2


def test_a_failed_compilation_is_a_reason_against_the_kernel(take: Callable[[Any], None]) -> None:
    interface = Interface()
    plain = interface._flash_attn_bwd

    def backward(**options: Any) -> Any:
        if len(options["cu_seqlens_q"]) > 100:
            raise RuntimeError("no table")
        return plain(**options)

    interface._flash_attn_bwd = backward
    take(interface)
    assert (
        variants.compile_failure_reason(flash.FLASH_ATTN_4, LLAMA)
        == "it cannot be compiled on cpu (RuntimeError: no table)"
    )
    assert variants.compile_failure_reason(flash.CUDA, LLAMA) is None


@pytest.mark.parametrize(("set_before", "expected"), [(None, "1"), ("0", "0")])
def test_the_import_enables_the_disk_cache_unless_it_is_set(
    set_before: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, seen = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", []
    monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.delenv(name)
    if set_before is not None:
        monkeypatch.setenv(name, set_before)
    monkeypatch.setattr(flash, "import_module", lambda module: seen.append(flash.os.environ[name]))
    flash._import_once.__wrapped__(flash.INTERFACE_4)
    assert seen == [expected]
