"""Hybrids in bfloat16, packed under distca with the kernels of fla and mamba-ssm, compared with
float32 without these packages.

Modeling modules look for both packages when they are imported, so runs without the packages have
separate processes. Of mamba-ssm, only what Triton compiles is needed: its sources install that with
`MAMBA_SKIP_CUDA_BUILD=TRUE`.
"""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from gpu_setting import Setting
from part_families import ABOVE, TESTS, TIMES, compare_norms, judge_all

PACKAGES = ("fla", "mamba_ssm")


def hide_packages() -> None:
    for package in PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment]


def show_packages() -> None:
    """Make mamba-ssm importable without a build of its CUDA parts, and limit kernels to their first
    setting: compiling all settings takes minutes for each family.
    """
    try:
        autotuner = importlib.import_module("triton.runtime.autotuner")
    except ImportError:
        return
    autotuner.Autotuner._bench = lambda *_, **__: [0.0] * 3  # noqa: SLF001
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    try:
        scans = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    except Exception:  # its imports for other models can fail in any way; rows of families show it
        return
    del scans.mamba_split_conv1d_scan_combined


def compute(
    model_type: str, implementation: str, dtype: torch.dtype, how: str, device: torch.device
) -> tuple[Any, list[str]]:
    """Compute logits and gradients; list the functions that come from a package."""
    sys.path[:0] = [str(TESTS), str(TESTS / "models")]
    import compare
    import tiny

    from hf_distca.borrowed import is_of_package
    from hf_distca.hybrids.recurrent_layers import RECURRENT_MODULES

    with compare.quiet():
        model = tiny.build(model_type, implementation, dtype).to(device)
        documents = [document.to(device) for document in compare.documents(compare.PACKED)]
        with torch.device(device):
            outcome = getattr(compare, how)(model, documents)
    result = SimpleNamespace(
        logits=[logits.cpu() for logits in outcome.logits],
        grads={name: None if grad is None else grad.cpu() for name, grad in outcome.grads.items()},
    )
    module = importlib.import_module(tiny.class_of(model_type).__module__)
    functions = [
        name
        for name in RECURRENT_MODULES[model_type][1]
        if is_of_package(getattr(getattr(module, name, None), "__wrapped__", None))
    ]
    return result, functions


# Each process compiles one kernel after another, so several processes use the host's cores.
PROCESSES = 6


def run(setting: Setting) -> None:
    """Record one row per family."""
    from hf_distca.hybrids.recurrent_layers import RECURRENT_MODULES

    context, count = get_context("spawn"), setting.size(quick=1, cpu=1, gpu=PROCESSES)
    with (
        ProcessPoolExecutor(2 if count > 1 else 1, context, hide_packages) as without,
        ProcessPoolExecutor(count, context, show_packages) as with_packages,
    ):
        names = list(RECURRENT_MODULES)[: setting.size(quick=1, cpu=3, gpu=99)]
        half = (torch.bfloat16, "packed", setting.device)
        jobs = {
            name: (
                with_packages.submit(compute, name, "distca", *half),
                *(
                    without.submit(compute, name, "eager", dtype, "alone", setting.device)
                    for dtype in (torch.float32, torch.bfloat16)
                ),
            )
            for name in names
        }
        for name, futures in jobs.items():
            try:
                outcomes = [future.result(max(setting.left(), 0.0)) for future in futures]
            except TimeoutError:
                setting.put(left_out=[*setting.figures.get("left_out", []), name])
                continue
            except Exception as error:  # a family that fails is also a result
                row: dict[str, Any] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            else:
                row = judge(*outcomes)
            setting.add("rows", {"family": name, **row})
        for pool in (without, with_packages):
            pool.shutdown(wait=False, cancel_futures=True)
    judge_all(setting)


Outcome = tuple[Any, list[str]]


def judge(found: Outcome, expected: Outcome, plain: Outcome) -> dict[str, Any]:
    """Compute how far distca and eager attention are from float32."""
    row = {
        "distca": compare_norms(found[0], expected[0]),
        "eager": compare_norms(plain[0], expected[0]),
    }
    passed = all(
        row["distca"][figure] <= TIMES * row["eager"][figure] + ABOVE for figure in row["eager"]
    )
    return {"functions": found[1], **row, "passed": passed}
