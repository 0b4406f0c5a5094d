"""Where the result of a benchmark goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json [FILE]``."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON to FILE, or to standard output",
    )


def put_out(
    result: dict[str, Any], target: str | None, show: Callable[[dict[str, Any]], None]
) -> None:
    """Show the result if there is no target, else write it there as JSON; ``-`` is standard
    output.
    """
    if target is None:
        show(result)
    elif target == "-":
        print(json.dumps(result, indent=1))
    else:
        Path(target).write_text(json.dumps(result, indent=1))
