"""Every fast kernel of the device compared with float32: outputs, log-sum-exps and gradients.

On a GPU, this also runs the tests of the kernels, which compare with float64 and with `sdpa` in the
same dtype.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_setting import Setting, free
from gpu_workloads import Batch, Variant, iterate_variants, make_batch
from hf_distca.kernels import Kernel, ScoreOptions, TaskBatch
from hf_distca.kernels.base import BackwardInputs, KernelRequest, Operands
from hf_distca.kernels.efficient import EFFICIENT
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4
from hf_distca.kernels.plain_torch import ReferenceKernel
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

TESTS = Path(__file__).parents[2] / "tests" / "kernels" / "test_cuda_kernels.py"
SCORES = {
    "plain": ScoreOptions(1.0),
    "window of 300": ScoreOptions(1.0, window=300),
    "softcap": ScoreOptions(1.0, softcap=2.0),
    "window and softcap": ScoreOptions(1.0, window=300, softcap=2.0),
}
# Heads, width and score options of models that need more than plain attention.
MODELS = {
    "gpt-oss": ((64, 8, 64), ScoreOptions(64**-0.5, window=128)),
    "Gemma 3": ((8, 4, 256), ScoreOptions(256**-0.5, window=1024)),
    "Gemma 2": ((8, 4, 256), ScoreOptions(256**-0.5, window=1024, softcap=50.0)),
    "Mistral": ((32, 8, 128), ScoreOptions(128**-0.5, window=1000)),
    "512 wide": ((8, 4, 512), ScoreOptions(512**-0.5)),
    "512 wide, window": ((8, 4, 512), ScoreOptions(512**-0.5, window=1000)),
}
# Seconds to compile FlashAttention 4, which a new case may need.
COMPILE_SECONDS = 25.0
# Largest relative error (norms), in units of the last place of the dtype.
UNITS = 2.0


def make_batches(quick: bool) -> dict[str, Batch]:
    """Make whole documents, slices with separate keys, and slices that share keys."""
    n = 1 if quick else 4
    shared = TaskBatch(
        (0, 128 * n, 384 * n), (128 * n, 256 * n, 77 * n), (0, 0, 0), (128 * n, 384 * n, 461 * n)
    )
    return {
        "documents": make_batch([(333 * n, 333 * n), (1, 1), (128 * n, 128 * n), (77, 77)]),
        "slices": make_batch([(128, 500 * n), (64 * n, 700 * n), (1, 90)]),
        "shared keys": Batch(shared, 461 * n, 461 * n),
    }


def make_random_pools(
    batch: Batch, heads: tuple[int, int, int], like: dict[str, Any]
) -> list[torch.Tensor]:
    """Make random q, k, v and gradient of the output."""
    query, key, width = heads
    sizes = ((batch.rows, query), (batch.keys, key), (batch.keys, key), (batch.rows, query))
    return [torch.randn(*size, width, **like) for size in sizes]


def compute_results(
    kernel: Kernel, pools: list[torch.Tensor], tasks: TaskBatch, scores: ScoreOptions
) -> dict[str, torch.Tensor]:
    q_THD, k_TKD, v_TKV, do_THV = pools
    o_THV, lse_TH = kernel.forward(Operands(q_THD, k_TKD, v_TKV), tasks, scores)
    grads = kernel.backward(
        BackwardInputs(do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV), tasks, scores
    )
    return {"o": o_THV, "lse": lse_TH, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def compute_with_sinks(
    kernel: Kernel, pools: list[torch.Tensor], sink_H: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Compute the same results with attention sinks, by a call of core attention on one rank whose
    tokens are one document.
    """
    *leaves, sink_H = (x.detach().clone().requires_grad_() for x in (*pools[:3], sink_H))
    route = Route.build(Plan.make_local(Layout.from_lengths([[len(leaves[0])]])), 0)
    server = AttentionServer(kernel, ScoreOptions(leaves[0].shape[2] ** -0.5), Meter())
    o_THV = compute_core_attention(
        Inputs(*leaves, sink_H=sink_H), LayerExchange(route, AttentionGroup(), server)
    )
    grads = torch.autograd.grad(o_THV, [*leaves, sink_H], pools[3])
    return {"o": o_THV.detach(), **dict(zip(("dq", "dk", "dv", "dsink"), grads, strict=True))}


def compute_relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)
    )


def compare(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    errors = {name: compute_relative_error(found[name], expected[name]) for name in expected}
    bound = UNITS * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    return {
        "errors": errors,
        "bound": bound,
        "passed": all(error <= bound for error in errors.values()),
    }


def check_case(
    variant: Variant, kernel: Kernel, setting: Setting, case: tuple[Any, ...]
) -> dict[str, Any]:
    dtype, heads, name, scores = case
    reason = kernel.unsupported_reason(
        KernelRequest(setting.device, dtype, heads[2], heads[2], scores)
    )
    row: dict[str, Any] = {
        "kernel": variant.label,
        "dtype": str(dtype),
        "heads": heads,
        "scores": name,
        "batches": {},
    }
    if reason is not None:
        return {**row, "unsupported": reason}
    try:
        for label, batch in make_batches(setting.quick).items():
            pools = make_random_pools(batch, heads, {"dtype": dtype, "device": setting.device})
            wide = [x.float() for x in pools]
            expected = compute_results(ReferenceKernel(), wide, batch.tasks, scores)
            row["batches"][label] = compare(
                compute_results(kernel, pools, batch.tasks, scores), expected, dtype
            )
        if name in ("plain", "gpt-oss"):
            pools = make_random_pools(
                make_batch([(200, 200)]), heads, {"dtype": dtype, "device": setting.device}
            )
            sink_H = torch.randn(heads[0], dtype=dtype, device=setting.device)
            exact = compute_with_sinks(
                ReferenceKernel(), [x.float() for x in pools], sink_H.float()
            )
            row["batches"]["sinks"] = compare(
                compute_with_sinks(kernel, pools, sink_H), exact, dtype
            )
    except Exception as error:  # a case that fails is also a result
        row["failed"] = f"{type(error).__name__}: {error}"[:500]
    return row


def check_models(setting: Setting) -> list[dict[str, Any]]:
    """Compare shapes of models in every kernel that supports them; a window with sinks is that of
    gpt-oss.
    """
    rows = []
    for variant in iterate_variants(
        setting, (CUDA, EFFICIENT, FLASH_ATTN_4) if setting.device.type == "cuda" else None
    ):
        for name, (heads, scores) in MODELS.items():
            compiles = COMPILE_SECONDS * (variant.kernel is FLASH_ATTN_4)
            if setting.has_time_for(f"{variant.label} {name}", cpu=5.0, gpu=1.0 + compiles):
                case = (setting.dtype, heads, name, scores)
                with variant.active() as kernel:
                    rows.append(check_case(variant, kernel, setting, case))
    return rows


def run(setting: Setting) -> None:
    """Record shapes of models, then a list of cases, the number that passed, and the end of the
    tests' output.
    """
    torch.manual_seed(0)
    if not setting.quick:
        setting.put(models=check_models(setting))
    gpu = setting.device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float16) if gpu else (torch.float32, torch.bfloat16)
    widths = setting.size(quick=(64,), cpu=(64, 128), gpu=(64, 96, 128, 256, 512))
    counts = setting.size(quick=((4, 2),), cpu=((4, 2),), gpu=((32, 8), (8, 8)))
    cases: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for variant in iterate_variants(setting):
        for dtype, width, heads, name in itertools.product(dtypes, widths, counts, SCORES):
            scores = replace(SCORES[name], scale=width**-0.5)
            compiles = COMPILE_SECONDS * (variant.kernel is FLASH_ATTN_4)
            label = f"{variant.label} {dtype} {width} {heads} {name}"
            if not setting.has_time_for(label, gpu=compiles):
                continue
            case = (dtype, (*heads, width), name, scores)
            with variant.active() as kernel:
                cases.append(check_case(variant, kernel, setting, case))
        free(setting.device)
        setting.put(cases=cases)
    rows = [row for row in cases if "unsupported" not in row]
    good = [
        row
        for row in rows
        if "failed" not in row and all(b["passed"] for b in row["batches"].values())
    ]
    setting.put(cases=cases, compared=len(rows), passed=len(good))
    if gpu and setting.has_time_for("tests/kernels/test_cuda_kernels.py", gpu=20.0):
        setting.put(pytest=run_tests(setting.started + setting.seconds - time.monotonic()))


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the tests of the kernels without pytest's settings, because versions may differ."""
    options = "-m pytest -q --maxfail=5 -p no:cacheprovider -c /dev/null --rootdir"
    command = [sys.executable, *options.split(), str(TESTS.parents[2]), str(TESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else str(error.stdout)
        result: Any = f"stopped after {seconds:.0f} s"
    else:
        result, output = done.returncode, done.stdout[-3000:] + done.stderr[-1000:]
    return {"command": command, "result": result, "output": output[-4000:]}
