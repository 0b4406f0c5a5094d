"""Links of the pages lead to files, and the README is short."""

from __future__ import annotations

import re

import pytest

from pages import PAGES, ROOT


def list_linked_files(text: str) -> list[str]:
    """List the files that a page links to."""
    return [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text, folder = (ROOT / page).read_text(), (ROOT / page).parent
    files = re.findall(r"(?:configs|examples|benchmarks|tests|docs)/[\w./-]+\.\w+", text)
    assert [name for name in list_linked_files(text) if not (folder / name).exists()] == []
    assert [name for name in files if not any((at / name).exists() for at in (ROOT, folder))] == []


def test_readme_is_short_and_begins_with_code() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert text.splitlines().index("```diff") < 15
    _, limitations = text.split("\n## What it is not\n")
    assert "docs/what_tests_prove.md" in list_linked_files(limitations.split("\n## ")[0])
