"""benchmarks/steps/peers.py: ways that are exact have the losses of one process, others do not, and
what it starts in vain says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scripts
from pages import words_of

EXACT = 1e-6  # relative, float32


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = words_of("python benchmarks/steps/peers.py --picture peers.png")
    small = ("--tokens", "512", "--layers", "1", "--rounds", "1", "--steps", "1", "--ranks", "2")
    scripts.run([*command, *small, "--json", "peers.json", *options], folder, timeout=180)
    assert (folder / "peers.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((folder / "peers.json").read_text())
    return found


@pytest.mark.slow
def test_data_parallel_ways_have_the_losses_of_one_process(tmp_path: Path) -> None:
    found = run(tmp_path, "--ways", "packed, sdpa", "padded", "hf-distca, ")
    rows = {row["way"]: row for row in found["rows"]}
    assert set(rows) == {
        "packed, sdpa",
        "batch_rebalance, padded",
        "hf-distca, as given",
        "hf-distca, dealt",
    }
    for way, row in rows.items():
        assert max(row["first_loss_difference"], row["later_loss_difference"]) < EXACT, way
        padded = "padded" in way
        assert (sum(row["tokens"]) > 512) == padded, way
        assert (sum(row["attention"]) / 2 == pytest.approx(1)) != padded, way
    assert max(rows["packed, sdpa"]["attention"]) > 1.5
    assert "UnsupportedError" in found["refused"]["hf-distca, a Bloom"]


@pytest.mark.slow  # DeepSpeed is imported anew for each of them
@pytest.mark.timeout(300)
def test_ways_that_share_sequences(tmp_path: Path) -> None:
    found = run(tmp_path, "--ways", "Ulysses", "accelerate", "torch")
    rows = {row["way"]: row for row in found["rows"]}
    whole, packed = rows["Ulysses, a document a micro-batch"], rows["Ulysses, packed"]
    assert max(whole["first_loss_difference"], whole["later_loss_difference"]) < EXACT
    assert packed["first_loss_difference"] > 1e-4
    assert {name: error.split(":")[0] for name, error in found["refused"].items()} == {
        "accelerate, ParallelismConfig(cp_size=2)": "ValueError",
        "torch, context_parallel, sdpa": "NotImplementedError",
        "torch, context parallelism, flex_attention": "NotImplementedError",
        "Ulysses, one head on 2 ranks": "ValueError",
    }
    later = {name: figures["later_loss_difference"] for name, figures in found["by_guide"].items()}
    assert later["Ulysses by its guide, ZeRO-3"] < EXACT
    assert later["Ulysses by its guide, ZeRO-2"] > 1e-4
