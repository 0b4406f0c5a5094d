"""Which keys a task needs, for compiled functions."""

from __future__ import annotations

from hf_distca.schedule.compiled import compiled

__all__ = ["first_key"]


@compiled
def first_key(start: int, window: int) -> int:
    """The first key that a task from `start` on needs; `window` is 0 for none."""
    return 0 if window == 0 else max(start - (window - 1), 0)
