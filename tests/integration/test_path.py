"""The path from collator to kernel is the one that docs/architecture.md lists, and a first layer
takes a bounded number of Python calls.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from test_parity import model_for

import hf_distca
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import pack, settings

ROOT = Path(__file__).parents[2]
SOURCE = str(ROOT / "src" / "hf_distca")


def listed() -> list[str]:
    section = (
        (ROOT / "docs" / "architecture.md")
        .read_text()
        .split("## From collator to kernel, call by call")[1]
        .split("\n## ")[0]
    )
    return re.findall(r"^\d+\. `([\w.]+)`$", section, re.MULTILINE)


def called(rank: int) -> list[str]:
    """The functions of the library that run from the collator to the first kernel call, each where
    it runs last.
    """
    hf_distca.configure(settings())
    model = model_for(2, "distca", torch.float32)
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


def calls_of_first_layers(rank: int) -> list[int]:
    """The functions of the library that run in the first layer of each of four micro-batches, whose
    plans move work.
    """
    hf_distca.configure(settings())
    model = model_for(2, "distca", torch.float32)
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


def test_the_listed_calls_run_in_their_order(rank_pool: RankPools) -> None:
    names = listed()
    assert len(names) <= 24
    for seen in rank_pool(2)(called):
        assert [name for name in seen if name in names] == names


def test_python_calls_of_a_first_layer_are_bounded(rank_pool: RankPools) -> None:
    """The first micro-batch may import, and makes what later ones find."""
    for _, *later in rank_pool(2)(calls_of_first_layers):
        assert 400 < min(later) <= max(later) <= 900
