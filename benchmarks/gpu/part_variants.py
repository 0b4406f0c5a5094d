"""FlashAttention 4 compiles ahead: seconds, functions, and whether calls of random layouts compile
any more. Batches with gaps.

A batch whose tasks leave rows and keys out, as where documents' work was moved, runs as one call
over whole pools, in which gaps are sequences of their own; or, where an op takes no such sequences,
with gathered copies. Both ways are timed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpu_setting import Setting, seconds_of, synchronize
from gpu_workloads import Batch, Calls, Variant, batch_of, fastest
from hf_distca.kernels import Case, Scores, TaskBatch, unusable_reason, variants
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4
from hf_distca.kernels.varlen import VarlenKernel
from hf_distca.schedule.cost import AttentionShape

SHAPE = AttentionShape(32, 8, 128, 128, 2)
KINDS = {"plain": Scores(128**-0.5), "window of 4096": Scores(128**-0.5, window=4096)}
# Documents of a rank of Llama-8B with some 64K tokens, of which some were moved: so many, the
# longest, the longest gap.
TIMED = {"40 of up to 2.4K": (40, 2400, 2000), "10 of up to 8K": (10, 8000, 8000)}


def layouts(draw: np.random.Generator, count: int, most: int) -> Iterator[Batch]:
    """Batches that plans may have, from one token to thousands of sequences, with and without keys
    before their rows.
    """
    yield from (
        batch_of(sizes)
        for sizes in ([(1, 1)], [(1, most)], [(128, 128)], [(7, 7)] * 256, [(7, 7)] * 257)
    )
    for _ in range(count):
        tasks = int(draw.choice([1, 2, 5, 20, 100, 400]))
        longest = (
            int(draw.choice([3, 150, most // 8])) if tasks <= 20 else int(draw.choice([3, 60]))
        )
        rows = draw.integers(1, longest + 1, tasks)
        before = np.where(
            draw.random(tasks) < 0.5, draw.integers(0, most if tasks <= 20 else 100, tasks), 0
        )
        yield batch_of([(int(n), int(n + m)) for n, m in zip(rows, before, strict=True)])


def with_gaps(draw: np.random.Generator, documents: int, longest: int, gap: int) -> Batch:
    """Documents in order; before about half of them are rows and keys of no task."""
    rows = keys = 0
    columns: list[tuple[int, int, int, int]] = []
    for _ in range(documents):
        if draw.random() < 0.5:
            left_out = int(draw.integers(1, gap + 1))
            rows, keys = rows + left_out, keys + left_out
        length = int(draw.integers(1, longest + 1))
        columns.append((rows, length, keys, length))
        rows, keys = rows + length, keys + length
    return Batch(
        TaskBatch(*(tuple(column) for column in zip(*columns, strict=True))), rows + gap, keys + gap
    )


def one_kind(setting: Setting, variant: Variant, scores: Scores) -> dict[str, Any]:
    """Compile what a kind of layers may need, as the first plan does; then run layouts and count
    what they compile.
    """
    case = Case(
        setting.device,
        setting.dtype,
        SHAPE.head_dim,
        SHAPE.value_head_dim,
        scores,
        SHAPE.heads_per_key_head,
    )
    ahead = seconds_of_first(setting, lambda: variants.compile_failure_reason(variant.kernel, case))
    reason, before, run = unusable_reason(variant.kernel, case), variants.count_late_compiles(), 0
    for batch in layouts(
        np.random.default_rng(7), *setting.size(quick=(3, 64), cpu=(10, 500), gpu=(25, 9000))
    ):
        calls = Calls(SHAPE, setting, [batch])
        calls.scores = scores
        calls.backward(variant.kernel, batch, calls.forward(variant.kernel, batch))
        run += 1
    synchronize(setting.device)
    late = variants.count_late_compiles() - before
    return {"compile_seconds": ahead, "refused": reason, "layouts": run, "late_compiles": late}


def seconds_of_first(setting: Setting, call: Callable[[], object]) -> float:
    """Seconds of a call that is made once."""
    synchronize(setting.device)
    started = time.perf_counter()
    call()
    synchronize(setting.device)
    return time.perf_counter() - started


def without_gaps(kernel: VarlenKernel) -> VarlenKernel:
    """The same kernel, whose calls take gathered copies where a batch has gaps."""
    op = copy.copy(kernel._op)  # noqa: SLF001
    op.takes_gaps = False
    return VarlenKernel(op, kernel.name)


def gaps(setting: Setting, kernel: VarlenKernel) -> list[dict[str, Any]]:
    """Seconds of batches with gaps, forward and backward, as sequences without keys and with
    gathered copies.
    """
    found = []
    for label, sizes in TIMED.items():
        row: dict[str, Any] = {"kernel": kernel.name, "documents": label}
        for way, one in (("as sequences", kernel), ("gathered copies", without_gaps(kernel))):
            batch = with_gaps(np.random.default_rng(11), *sizes)
            calls = Calls(SHAPE, setting, [batch])
            outputs = calls.forward(one, batch)
            forward = seconds_of(lambda c=calls, k=one, b=batch: c.forward(k, b), setting.device)
            backward = seconds_of(
                lambda c=calls, k=one, b=batch, o=outputs: c.backward(k, b, o), setting.device
            )
            row[way] = {"forward": forward, "backward": backward}
        found.append(row)
    return found


def run(setting: Setting) -> None:
    """Put kinds of layers, then batches with gaps."""
    torch.manual_seed(0)
    variant, kinds = fastest(setting), {}
    for name, scores in KINDS.items():
        if setting.time_for(name, setting.size(quick=0.0, cpu=5.0, gpu=20.0)):
            kinds[name] = one_kind(setting, variant, scores)
            setting.put(kernel=variant.label, kinds=kinds)
    rows: list[dict[str, Any]] = []
    for kernel in (FLASH_ATTN_4, CUDA) if setting.device.type == "cuda" else ():
        case = Case(setting.device, setting.dtype, 128, 128, KINDS["plain"])
        if kernel.unsupported_reason(case) is None and setting.time_for(
            f"gaps, {kernel.name}", 3.0
        ):
            rows += gaps(setting, kernel)
            setting.put(gaps=rows)
