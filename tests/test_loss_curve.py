"""The benchmark of loss curves, for a few steps. A scale of attention that is wrong by 1 % puts
them 4e-5 apart.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scripts
from pages import words_of


@pytest.mark.slow
def test_losses_are_those_of_sdpa(tmp_path: Path) -> None:
    small = [
        "--steps",
        "8",
        "--tokens",
        "128",
        "--layers",
        "1",
        "--picture",
        "curves.png",
        "--json",
        "out.json",
    ]
    scripts.run([*words_of("python benchmarks/steps/loss_curve.py"), *small], tmp_path, timeout=250)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["exchanges"] > 0
    assert set(found["apart"]) == {"sdpa, other order", "distca, in order", "distca, dealt"}
    assert max(found["apart"].values()) < 5e-6
    assert (tmp_path / "curves.png").exists()
