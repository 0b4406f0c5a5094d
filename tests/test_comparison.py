"""Predicted figures on the pages that compare ways, computed again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmark_modules import import_benchmark
from pages import ROOT

PLACEMENT = ROOT / "benchmarks" / "placements" / "long_tail_8_ranks.json"
# Names on the page of long documents, and on the comparison page.
NAMES = {
    "data parallel, as given": ("data parallel, as given", "packed rows"),
    "hf-distca, as given": ("hf-distca, as given", "hf-distca, groups of up to 512 ranks"),
    "hf-distca, dealt": ("hf-distca, dealt", "hf-distca, dealt"),
    "context parallel": ("context parallelism", "all-gather over 8"),
    "Ulysses": ("Ulysses", "Ulysses over 8"),
}


def read_rows(page: Path, heading: str) -> dict[str, list[str]]:
    """Read the tables below a heading, and return the cells of each row by its first cell."""
    part = page.read_text().split(f"{heading}\n")[1]
    lines = re.findall(r"^\| (.*) \|$", part, re.MULTILINE)
    cells = [line.replace("*", "").replace("`", "").split(" | ") for line in lines]
    return {first: rest for first, *rest in reversed(cells)}


def test_both_pages_show_the_computed_predictions() -> None:
    ways: dict[str, dict[str, Any]] = import_benchmark("context_parallel").measure(PLACEMENT)[
        "ways"
    ]
    long = read_rows(
        ROOT / "docs" / "long_documents.md", "## Compared with context parallelism and Ulysses"
    )
    page = read_rows(ROOT / "docs" / "comparison.md", "### In numbers")
    for way, (name, row) in NAMES.items():
        _, slowest, sent = ways[way].values()
        assert long[name][1:] == [f"{slowest:.2f}", f"{sent:.2f}" if sent else "0"], name
        assert page[row][0] == (f"{sent:.2f}" if sent else "0"), row
        if row != "all-gather over 8":
            assert page[row][1] == f"{1 - 1 / slowest:.0%}".replace("%", " %"), row


def test_bound_of_batch_rebalance_follows_from_the_longest_document() -> None:
    ranks = json.loads(PLACEMENT.read_text())["lengths"]
    lengths = np.concatenate(ranks)
    fair = (lengths * (lengths + 1.0) / 2).sum() / len(ranks)
    assert f"{lengths.max() ** 2 / 2 / fair:.2f}" == "2.98"
    page = read_rows(ROOT / "docs" / "comparison.md", "### In numbers")
    bound = f"{1 - fair / (lengths.max() ** 2 / 2):.0%}".replace("%", " %")
    assert page["batch_rebalance"][1] == f"at least {bound}"
