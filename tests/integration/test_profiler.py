"""The marks of core attention in torch's profiler."""

from __future__ import annotations

import pytest
import torch
from test_parity import build_model
from test_pingpong import PLACEMENTS, configure, make_batch
from torch.profiler import ProfilerActivity, profile

import hf_distca
from hf_distca.runtime import meter
from ranks import RankPools

LAYERS = 2


def profile_step(rank: int, ping_pong: bool) -> dict[str, int]:
    configure(ping_pong=ping_pong)
    model = build_model(2, "distca", torch.float32)
    batch = make_batch(PLACEMENTS["skewed"][rank])
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        model(**batch, use_cache=False).logits.sum().backward()
    return {
        event.key.removeprefix("hf_distca: "): event.count
        for event in recorded.key_averages()
        if event.key.startswith("hf_distca: ")
    }


@pytest.mark.parametrize("ping_pong", [False, True])
def test_the_profiler_shows_dispatch_server_and_return(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    """Each half of each layer has the marks once forward and once backward."""
    each = LAYERS * 2 * (2 if ping_pong else 1)
    for marks in rank_pool(2)(profile_step, ping_pong):
        server = marks.pop("server")
        assert server >= each
        names = ("dispatch", "return", "wait for dispatch", "wait for return")
        assert marks == dict.fromkeys(names, each)


def test_no_marks_are_made_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(2, "distca", torch.float32)
    hf_distca.configure()
    monkeypatch.setattr(meter, "record_function", pytest.fail)
    model(**make_batch([[3]])).logits.sum().backward()
