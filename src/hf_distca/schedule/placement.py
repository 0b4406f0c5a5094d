"""Files that say on which ranks documents lie, for the command line and the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_distca.errors import LayoutError
from hf_distca.schedule.layout import Layout


def read_placement(path: Path) -> Layout:
    """Read a placement from a JSON file.

    Raises:
        LayoutError: if the file is not a placement. The message names the file and the mistake.
        OSError: if the file cannot be read.
    """
    return parse_placement(path.read_bytes(), str(path))


def parse_placement(text: bytes, name: str) -> Layout:
    """Read a placement from JSON.

    Args:
        text: the JSON, in UTF-8.
        name: source of the text, for errors.

    Raises:
        LayoutError: if the text is not a placement. The message names the mistake.
    """
    try:
        data = json.loads(text.decode("utf-8"))
    except ValueError as error:
        raise LayoutError(f"{name} is not JSON: {error}.") from error
    return build_layout(data, name)


def build_layout(data: Any, name: str) -> Layout:
    """Make the layout of a placement that was read from JSON.

    For `name` and errors see `parse_placement`.
    """
    keys = [key for key in ("rank_segments", "lengths") if isinstance(data, dict) and key in data]
    if len(keys) != 1:
        raise LayoutError(
            f"{name} must be a JSON object with either 'rank_segments' or 'lengths', but it has"
            f" {keys or 'neither'}."
        )
    ranks = data[keys[0]]
    if (
        not isinstance(ranks, list)
        or not all(isinstance(rank, list) for rank in ranks)
        or not ranks
    ):
        raise LayoutError(f"{name}: {keys[0]!r} must be a list with one list per rank.")
    try:
        if keys[0] == "lengths":
            return Layout.from_lengths(
                [[require_whole_number(length) for length in rank] for rank in ranks]
            )
        return Layout.from_segments([[_parse_segment(row) for row in rank] for rank in ranks])
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def _parse_segment(row: Any) -> tuple[int, int, int]:
    if not isinstance(row, Sequence) or len(row) not in (3, 4):
        raise LayoutError(
            f"segment {row!r} must be [document, start, end] or [document, start, end, document"
            " length]."
        )
    document, start, end, *length = (require_whole_number(value) for value in row)
    if length and end > length[0]:
        raise LayoutError(
            f"segment {row!r} ends at {end}, but the document has only {length[0]} tokens."
        )
    return document, start, end - start


def require_whole_number(value: Any) -> int:
    """Check that a number from a file is an integer that fits in 64 bits, and return it.

    Raises:
        LayoutError: if it is not such an integer.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise LayoutError(f"{value!r} must be an integer.")
    if abs(value) >= 2**63:
        raise LayoutError(
            f"{value} is too large: lengths, positions and document numbers must be below 2**48."
        )
    return value
