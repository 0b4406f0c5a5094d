"""Checks of a model and of ranks before training. The result of each check is a `Finding`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State"]

State = Literal["good", "note", "bad"]  # bad: training fails, or nothing is balanced


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        section: subject of the check.
        name: object of the check, such as a package or a setting.
        value: the result, in words.
        state: the verdict.
        todo: advice; None if there is nothing to do.
    """

    section: str
    name: str
    value: str
    state: State = "good"
    todo: str | None = None
