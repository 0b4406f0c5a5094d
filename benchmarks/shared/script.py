"""Functions that all scripts use: options, tables and output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from machine import describe


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Make a parser with the docstring of a script and ``--json [FILE]``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    text = "write JSON to FILE, or to standard output"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
    return parser


def add_option(parser: argparse.ArgumentParser, name: str, default: Any, text: str) -> None:
    """Add an option with the type of its default; a list as default allows several values."""
    several = isinstance(default, list)
    kind = type(default[0] if several else default)
    text = f"{text} (default: %(default)s)"
    parser.add_argument(name, type=kind, default=default, nargs="+" if several else None, help=text)


def output_result(
    arguments: argparse.Namespace,
    result: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    **setting: Any,
) -> None:
    """Print a result, or with ``--json`` write it as JSON with the machine and the options."""
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    result = {"machine": describe(), "setting": setting | options, **result}
    if arguments.json is None:
        show(result)
        return
    text = json.dumps(result, indent=1, default=str)
    if arguments.json == "-":
        print(text)
    else:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")


def end(misses: Sequence[str]) -> None:
    """Exit with status 1 and print these lines, if there are any."""
    if misses:
        sys.exit("\n".join(misses))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    texts: int = 1,
    width: int = 150,
    **style: Any,
) -> None:
    """Print a table. The first `texts` columns are left-aligned, the others right-aligned."""
    table = Table(title=title, **style)
    for place, name in enumerate(columns):
        justify: Literal["left", "right"] = "left" if place < texts else "right"
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
