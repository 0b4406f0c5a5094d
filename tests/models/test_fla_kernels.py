"""Kernels of fla (flash-linear-attention) in models whose documents are packed, and cut over two ranks.

Triton's interpreter stands in for a GPU. All other tests need an environment without fla, which transformers would call on a CPU
as well, so install it in a folder of its own:

    pip install --no-deps --target FOLDER fla-core triton einops
    PYTHONPATH=FOLDER pytest -n 0 -m slow tests/models/test_fla_kernels.py
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import Outcome, difference
from cut import CUT, Case, Parts, Share, compare, share, whole_documents
from tiny import class_of

from hf_distca.borrowed import is_of_package
from ranks import RankPool

RULES = {"olmo_hybrid": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}
PACKED: Parts = (((0, 0, 61), (1, 0, 9), (2, 0, 1), (3, 0, 14)),)


class Int(int):
    """What a range in a kernel gives: under the interpreter plain integers, which have no `to`."""

    def to(self, _: Any) -> Int:
        return self


def integers(*bounds: int) -> Iterator[Int]:
    return map(Int, builtins.range(*bounds))


def share_with_fla(rank: int, case: Case) -> Share | str:
    """As `share`, where models run fla's kernels, in a process that was started with TRITON_INTERPRET=1."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda *_, **__: [0.0] * 3  # there is no GPU on which one of its settings would be the fastest
    for name in ("chunk_delta_h", "chunk_o", "chunk_scaled_dot_kkt"):
        importlib.import_module(f"fla.ops.common.{name}").range = integers
    module = importlib.import_module(class_of(case.model_type).__module__)
    assert is_of_package(getattr(module, RULES[case.model_type]).__wrapped__)
    return share(rank, case)


def whole_without_fla(rank: int, case: Case) -> Outcome:
    """Each document alone, with the functions of transformers."""
    sys.modules["fla"] = None  # type: ignore[assignment]
    return whole_documents(case.model_type, "sdpa", case.dtype, case.lengths)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [PACKED, CUT], ids=["packed", "cut over two ranks"])
@pytest.mark.parametrize("model_type", RULES)
@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs fla-core and triton, as said above")
def test_kernels_of_fla_equal_whole_documents_without_it(model_type: str, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = Case(model_type, torch.float32, parts, numbered=len(parts) > 1)
    oracle, pool = RankPool(1), RankPool(len(parts))
    try:
        want, rounded = (oracle(whole_without_fla, replace(case, dtype=dtype))[0] for dtype in (torch.float64, torch.float32))
        value, what, shares = compare(pool, case, want, share_with_fla)
    finally:
        oracle.close()
        pool.close()
    assert value <= 2 * difference(rounded, want)[0], f"{what} differs by {value:.1e}"
    assert bool(shares[0].state_exchanges) == (len(parts) > 1)
