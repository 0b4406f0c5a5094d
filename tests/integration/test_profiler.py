"""What torch's profiler shows of core attention."""

from __future__ import annotations

import pytest
import torch
from test_parity import model_for
from test_pingpong import PLACEMENTS, batch_of, configure
from torch.profiler import ProfilerActivity, profile

import hf_distca
from hf_distca.runtime import meter
from ranks import RankPools

LAYERS = 2


def profiled(rank: int, ping_pong: bool) -> dict[str, int]:
    configure(ping_pong=ping_pong)
    model = model_for(2, "distca", torch.float32)
    batch = batch_of(PLACEMENTS["skewed"][rank])
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
    """Of each layer, forward and backward, by half."""
    each = LAYERS * 2 * (2 if ping_pong else 1)
    for marks in rank_pool(2)(profiled, ping_pong):
        server = marks.pop("server")
        assert server >= each
        names = ("dispatch", "return", "wait for dispatch", "wait for return")
        assert marks == dict.fromkeys(names, each)


def test_without_a_profiler_there_are_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_for(2, "distca", torch.float32)
    hf_distca.configure()
    monkeypatch.setattr(meter, "record_function", pytest.fail)
    model(**batch_of([[3]])).logits.sum().backward()
