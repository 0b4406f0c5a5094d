"""Kernels of fla (flash-linear-attention) and mamba-ssm with packed and cut documents.

Triton's interpreter replaces a GPU. All other tests need an environment without these packages,
which transformers would call on a CPU as well, so install them in a separate folder:

    pip install --no-deps --target FOLDER fla-core triton einops
    PYTHONPATH=FOLDER MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
        pip install --no-build-isolation --no-deps --no-binary mamba-ssm --target FOLDER mamba-ssm
    PYTHONPATH=FOLDER pytest -n 0 -m slow tests/models/test_kernels_of_packages.py
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compare import Outcome, difference
from cut import Case, Parts, Share, compare, run_whole, share
from tiny import class_of

from hf_distca.borrowed import is_of_package
from ranks import RankPool

# The package of a model type, and the function that calls it.
RULES = {
    "olmo_hybrid": ("fla", "torch_chunk_gated_delta_rule"),
    "kimi_linear": ("fla", "chunk_kimi_delta_attention"),
    "nemotron_h": ("mamba_ssm", "mamba2_chunk_scan"),
}
# The interpreter takes seconds for each segment.
PACKED: Parts = (((0, 0, 40), (1, 0, 1), (2, 0, 9)),)
CUT: Parts = (((0, 0, 17), (0, 29, 40), (1, 0, 1)), ((0, 17, 29), (2, 0, 9)))


class Int(int):
    """An integer with the method `to`, which kernels call on indices of ranges."""

    def to(self, _: Any) -> Int:
        return self


def count(*bounds: int) -> Iterator[Int]:
    return map(Int, builtins.range(*bounds))


def share_with_package(rank: int, case: Case) -> Share | str:
    """Run `share` with kernels of a package, in a process with TRITON_INTERPRET=1."""
    from triton.runtime.autotuner import Autotuner

    # Without a GPU, autotuning cannot time its settings.
    Autotuner._bench = lambda *_, **__: [0.0] * 3
    package, function = RULES[case.model_type]
    prepare_fla() if package == "fla" else prepare_mamba()
    module = importlib.import_module(class_of(case.model_type).__module__)
    assert is_of_package(getattr(module, function).__wrapped__)
    return share(rank, case)


def prepare_fla() -> None:
    for name in ("chunk_delta_h", "chunk_o", "chunk_scaled_dot_kkt"):
        importlib.import_module(f"fla.ops.common.{name}").range = count


def prepare_mamba() -> None:
    """Import the package without its compiled parts: the scan of Mamba 1, and a fused kernel."""
    sys.modules["selective_scan_cuda"] = ModuleType("selective_scan_cuda")
    torch.cuda.device = lambda _: nullcontext()
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=8)
    del importlib.import_module(
        "mamba_ssm.ops.triton.ssd_combined"
    ).mamba_split_conv1d_scan_combined


def run_without_packages(rank: int, case: Case) -> Outcome:
    """Run each document alone, with the functions of transformers."""
    sys.modules |= {"fla": None, "mamba_ssm": None}  # type: ignore[dict-item]
    return run_whole(case.model_type, "sdpa", case.dtype, case.lengths)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [PACKED, CUT], ids=["packed", "cut over two ranks"])
@pytest.mark.parametrize("model_type", RULES)
def test_kernels_of_packages_equal_functions_of_transformers(
    model_type: str, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(RULES[model_type][0]) is None:
        pytest.skip(f"needs {RULES[model_type][0]}, installed as stated at the top of this file")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Case(model_type, torch.float32, parts, numbered=len(parts) > 1)
    oracle, pool = RankPool(1), RankPool(len(parts))
    try:
        want, rounded = (
            oracle(run_without_packages, replace(case, dtype=dtype))[0]
            for dtype in (torch.float64, torch.float32)
        )
        value, what, shares = compare(pool, case, want, share_with_package)
    finally:
        oracle.close()
        pool.close()
    assert value <= 2 * difference(rounded, want)[0], f"{what} differs by {value:.1e}"
    assert bool(shares[0].state_exchanges) == (len(parts) > 1)
