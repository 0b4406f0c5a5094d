"""Tables and numbers of the page that report.py writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Figures = dict[str, Any]
# Dense bfloat16 of an H100 SXM and an H200, NVIDIA's data sheets.
PEAK_FLOPS = 989e12


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return [
        "| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)
    ] + [""]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def tera(value: float) -> str:
    return f"{value / 1e12:.4g}"
