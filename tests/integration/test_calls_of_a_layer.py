"""The number of Python calls in a layer is bounded, on one rank and on two that move work."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_parity import build_model

import hf_distca
from benchmark_modules import import_benchmark
from handles import make_handle
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import UnsupportedError
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.hooks.attention import distca_attention
from ranks import RankPools
from tiny_runs import pack, settings

SOURCE = str(Path(hf_distca.__file__).parent)


def test_python_calls_of_a_layer_are_bounded() -> None:
    """A thread has a stack without the calls of pytest."""
    host_calls = import_benchmark("host_calls")
    hf_distca.configure()
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(host_calls.measure_calls, 2).result()
    assert found["bare: a layer"] > 100, "a layer was counted"
    assert found["beyond bare: a layer"] <= 210
    assert found["beyond bare: a step besides"] <= 465


def count_frames(rank: int) -> list[int]:
    """Count the library's calls between the attention of one layer and of the next, while work
    moves.
    """
    hf_distca.configure(settings())
    model = build_model(2, "distca", torch.float32)
    batch = pack(*([150, 33, 64], [1, 7, 1])[rank])
    counts: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            if frame.f_code.co_name == "attend_or_hide":
                counts.append(0)
            elif counts:
                counts[-1] += 1

    for _ in range(2):  # the first forward fills caches
        counts.clear()
        sys.setprofile(note)
        try:
            model(**batch, use_cache=False)
        finally:
            sys.setprofile(None)
    return counts


def test_python_calls_of_a_layer_with_moves_are_bounded(rank_pool: RankPools) -> None:
    for first, later in rank_pool(2)(count_frames):
        assert 100 < later <= 160, "a layer was counted"
        assert first <= 900


def test_layers_called_with_other_arguments_get_their_own_call_plans() -> None:
    """Layers of a micro-batch share preparations only if their arguments are the same."""
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
        handle: MaskStandIn, given: dict[str, Any], dtype: torch.dtype = torch.float32
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
    assert len(shared.batch.call_plans) == len(calls) + 1
    assert attend(shared, {}).equal(alone[0])
    for window in (True, 0, [3]):
        with pytest.raises(UnsupportedError, match="sliding_window"):
            attend(shared, {"sliding_window": window})
