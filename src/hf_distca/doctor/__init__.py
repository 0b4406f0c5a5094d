"""What keeps a model or ranks from training: each thing that was looked at is a `Finding`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "State"]


class State(StrEnum):
    """How a finding is."""

    good = "good"
    note = "note"
    bad = "bad"  # training under distca fails, or nothing is balanced


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
        section: what it is about.
        name: what was looked at.
        value: what was found.
        state: how that is.
        todo: what to do about it, None if there is nothing.
    """

    section: str
    name: str
    value: str
    state: State = State.good
    todo: str | None = None
