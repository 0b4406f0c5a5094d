"""Predicted figures of the pages that compare ways, computed anew."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_modules import import_benchmark
from pages import ROOT

PLACEMENT = ROOT / "benchmarks" / "placements" / "long_tail_8_ranks.json"
# Names on the page of long documents, and of the comparison.
NAMES = {
    "data parallel, as given": ("data parallel, as given", "packed rows"),
    "hf-distca, as given": ("hf-distca, as given", "hf-distca, groups of up to 512 ranks"),
    "hf-distca, dealt": ("hf-distca, dealt", "hf-distca, dealt"),
    "context parallel": ("context parallelism", "all-gather over 8"),
    "Ulysses": ("Ulysses", "Ulysses over 8"),
}


def rows_of(page: Path, heading: str) -> dict[str, list[str]]:
    """Cells of the tables below a heading, by the first."""
    part = page.read_text().split(f"{heading}\n")[1]
    lines = re.findall(r"^\| (.*) \|$", part, re.MULTILINE)
    cells = [line.replace("*", "").replace("`", "").split(" | ") for line in lines]
    return {first: rest for first, *rest in reversed(cells)}


def test_predictions_of_both_pages() -> None:
    ways: dict[str, dict[str, Any]] = import_benchmark("context_parallel").measure(PLACEMENT)[
        "ways"
    ]
    long = rows_of(
        ROOT / "docs" / "long_documents.md", "## Compared with context parallelism and Ulysses"
    )
    page = rows_of(ROOT / "docs" / "comparison.md", "### In numbers")
    for way, (name, row) in NAMES.items():
        _, slowest, sent = ways[way].values()
        assert long[name][1:] == [f"{slowest:.2f}", f"{sent:.2f}" if sent else "0"], name
        assert page[row][0] == (f"{sent:.2f}" if sent else "0"), row
        if row != "all-gather over 8":
            assert page[row][1] == f"{1 - 1 / slowest:.0%}".replace("%", " %"), row


def test_whole_documents_leave_the_longest_alone() -> None:
    ranks = json.loads(PLACEMENT.read_text())["lengths"]
    lengths = np.concatenate(ranks)
    fair = (lengths * (lengths + 1.0) / 2).sum() / len(ranks)
    assert f"{lengths.max() ** 2 / 2 / fair:.2f}" == "2.98"
    page = rows_of(ROOT / "docs" / "comparison.md", "### In numbers")
    bound = f"{1 - fair / (lengths.max() ** 2 / 2):.0%}".replace("%", " %")
    assert page["batch_rebalance"][1] == f"at least {bound}"
