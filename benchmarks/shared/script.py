"""What scripts share: options, tables, and where the result goes."""

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
    """Make a parser with a script's docstring and ``--json [FILE]``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    text = "write JSON to FILE, or to standard output"
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
    return parser


def add_option(parser: argparse.ArgumentParser, name: str, default: Any, text: str) -> None:
    """Add an option that takes a value like its default; if that is a list, one or several."""
    several = isinstance(default, list)
    kind = type(default[0] if several else default)
    text = f"{text} (default: %(default)s)"
    parser.add_argument(name, type=kind, default=default, nargs="+" if several else None, help=text)


def put_out(
    arguments: argparse.Namespace,
    result: dict[str, Any],
    show: Callable[[dict[str, Any]], None],
    **setting: Any,
) -> None:
    """Show a result, or write it as JSON to where ``--json`` says, with machine and setting."""
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
    """End with 1 and these lines, if there are any."""
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
    """Print a table, the first `texts` columns to the left and the others to the right."""
    table = Table(title=title, **style)
    for place, name in enumerate(columns):
        justify: Literal["left", "right"] = "left" if place < texts else "right"
        table.add_column(name, justify=justify)
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)
