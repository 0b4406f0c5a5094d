"""The calls from collator to kernel are those in docs/architecture.md, and are bounded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from test_parity import build_model

import hf_distca
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import pack, settings

ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src" / "hf_distca")


def read_listed_calls() -> list[str]:
    section = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .split("## From collator to kernel, call by call")[1]
        .split("\n## ")[0]
    )
    return re.findall(r"^\d+\. `([\w.]+)`$", section, re.MULTILINE)


def trace_calls(rank: int) -> list[str]:
    """Return the library's functions up to the first kernel call, in order of their last runs."""
    hf_distca.configure(settings())
    model = build_model(2, "distca", torch.float32)
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            seen.append(frame.f_code.co_qualname)
            if seen[-1] == "CpuKernel.forward":
                sys.setprofile(None)

    sys.setprofile(note)
    try:
        model(**pack(*([96], [16, 16])[rank]), use_cache=False)
    finally:
        sys.setprofile(None)
    return [name for place, name in enumerate(seen) if name not in seen[place + 1 :]]


def count_calls_of_first_layers(rank: int) -> list[int]:
    """Count the library's calls in the first layer of four micro-batches whose plans move work."""
    hf_distca.configure(settings())
    model = build_model(2, "distca", torch.float32)
    counts = [0]
    inside = False

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside
        if not frame.f_code.co_filename.startswith(SOURCE) or event not in ("call", "return"):
            return
        if frame.f_code.co_name == "distca_attention":
            inside = event == "call"
            sys.setprofile(count if inside else None)
        counts[-1] += inside and event == "call"

    for _ in range(4):
        lengths = ([512], [32] * 16)[rank]
        batch = pack(*lengths)
        sys.setprofile(count)
        model(**batch, use_cache=False).loss.backward()
        sys.setprofile(None)
        counts.append(0)
    assert current_session().meter.sent_bytes > 0
    return counts[:-1]


def test_calls_listed_on_the_architecture_page_run_in_that_order(rank_pool: RankPools) -> None:
    names = read_listed_calls()
    assert len(names) <= 24
    for seen in rank_pool(2)(trace_calls):
        assert [name for name in seen if name in names] == names


def test_python_calls_of_a_first_layer_are_bounded(rank_pool: RankPools) -> None:
    """The first micro-batch does not count, because imports and caches are new."""
    for _, *later in rank_pool(2)(count_calls_of_first_layers):
        assert 400 < min(later) <= max(later) <= 900
