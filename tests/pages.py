"""The pages of the project, and the commands in them."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/placements/README.md"),
    *("benchmarks/README.md", "benchmarks/simulated/README.md"),
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
)
_BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)
_PRINTED = re.compile(r"```bash\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)
_FILES = re.compile("(configs|examples|benchmarks|tests)/")
_INLINE = re.compile(r"`((?:python|hf-distca|accelerate|pytest|make|mkdocs) [^`]*)`")


@cache
def commands() -> frozenset[str]:
    """Return every command, without the remark behind it."""
    texts = [(ROOT / page).read_text() for page in PAGES]
    blocks = [
        line.split(" # ")[0].strip()
        for text in texts
        for block in _BASH.findall(text)
        for line in block.splitlines()
    ]
    return frozenset(
        command
        for command in (*blocks, *(found for text in texts for found in _INLINE.findall(text)))
        if command
    )


def printed(page: str) -> list[tuple[list[str], str]]:
    """Return the commands of each block of a page that is followed by their output, with that
    output.
    """
    return [
        (block.splitlines(), text.rstrip())
        for block, text in _PRINTED.findall((ROOT / page).read_text())
    ]


def on_a_page(command: str) -> str:
    """Check that a page has exactly this command, and return it.

    Raises:
        AssertionError: if no page has it.
    """
    if command not in commands():
        raise AssertionError(f"no page has the command {command!r}")
    return command


def words_of(command: str) -> list[str]:
    """Return the words of a command on a page. Paths of the repository's files are absolute."""
    return [
        str(ROOT / word) if _FILES.match(word) else word for word in shlex.split(on_a_page(command))
    ]
