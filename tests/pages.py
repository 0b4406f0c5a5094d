"""The pages that a user reads, and the commands in them."""

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
    """Every command, without the remark behind it."""
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
    """What a page says that commands print: the commands of each block, and the text right below
    it.
    """
    return [
        (block.splitlines(), text.rstrip())
        for block, text in _PRINTED.findall((ROOT / page).read_text())
    ]


def on_a_page(command: str) -> str:
    """The command, word for word that of a page: tests name so what they run.

    Raises:
        AssertionError: if no page has it.
    """
    if command not in commands():
        raise AssertionError(f"no page has the command {command!r}")
    return command


def words_of(command: str) -> list[str]:
    """The words of a command that a page has, with the paths of the repository's files."""
    return [
        str(ROOT / word) if _FILES.match(word) else word for word in shlex.split(on_a_page(command))
    ]
