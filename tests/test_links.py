"""Links of the pages that the documentation's own build does not check: those beside the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"),
    *("benchmarks/placements/README.md", "benchmarks/simulated/README.md"),
)


def linked(text: str) -> list[str]:
    """Files that a page links to."""
    return [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    path = ROOT / page
    assert [
        target for target in linked(path.read_text()) if not (path.parent / target).exists()
    ] == []


def test_the_first_page_is_short_and_begins_with_code() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert text.splitlines().index("```diff") < 15


def test_the_limitations_lead_to_what_tests_prove() -> None:
    _, limitations = (ROOT / "README.md").read_text().split("\n## What it is not\n")
    assert "docs/what_tests_prove.md" in linked(limitations.split("\n## ")[0])
