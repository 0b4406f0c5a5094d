"""The Python calls that one more layer adds to a step of one rank, beside a bare attention
function, are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import hf_distca
from benchmark_modules import import_benchmark
from handles import make_handle
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import UnsupportedError
from hf_distca.integration.handle import AttentionHandle
from hf_distca.integration.hooks.attention import distca_attention


@pytest.fixture
def calls() -> Callable[[int], dict[str, float]]:
    """The counter of `benchmarks/host/host_calls.py`, by number of documents, not on the deep stack
    of pytest.
    """
    host_calls = import_benchmark("host_calls")
    hf_distca.configure()

    def counter(documents: int) -> dict[str, float]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(host_calls.measure_calls, documents).result()

    return counter


def test_python_calls_of_a_layer_are_bounded(calls: Callable[[int], dict[str, float]]) -> None:
    found = calls(2)
    assert found["bare: a layer"] > 100, "a layer was counted"
    assert found["beyond bare: a layer"] <= 220
    assert found["beyond bare: a step besides"] <= 470


def test_layers_that_are_called_otherwise_share_nothing() -> None:
    """What the first layer of a micro-batch found out is for those alone that are called as it
    was.
    """
    module, q, k, v = (
        torch.nn.Linear(1, 1).train(),
        *(torch.randn(1, heads, 24, 8) for heads in (4, 2, 2)),
    )
    calls: list[dict[str, Any]] = [
        {},
        {"scaling": 0.7},
        {"sliding_window": 3},
        {"sliding_window": 1},
        {"softcap": 2.0},
    ]

    def attend(
        handle: AttentionHandle, given: dict[str, Any], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        states = (x.to(dtype) for x in (q, k, v))
        return distca_attention(
            module, *states, handle, distca_documents=PackedDocuments((16, 8)), **given
        )[0]

    hf_distca.configure()
    shared = make_handle(1, 24)
    together = [attend(shared, given) for given in calls] + [attend(shared, {}, torch.float64)]
    alone = [attend(make_handle(1, 24), given) for given in calls] + [
        attend(make_handle(1, 24), {}, torch.float64)
    ]
    assert all(map(torch.equal, together, alone))
    assert len(shared.layer_setups) == len(calls) + 1
    assert attend(shared, {}).equal(alone[0])
    for window in (True, 0, [3]):
        with pytest.raises(UnsupportedError, match="sliding_window"):
            attend(shared, {"sliding_window": window})
