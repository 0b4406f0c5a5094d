"""Whether the tasks of a plan compute every query token exactly once: the loop behind `schedule.plan`. All of it is compiled."""

from __future__ import annotations

from typing import NamedTuple

from hf_distca.schedule.index import FINE, IntArray

__all__ = ["AGAIN", "EMPTY", "FINE", "ORDER", "OUTSIDE", "SERVER", "TOO_FEW", "TOO_LONG", "Tasks"]

# What may be wrong with tasks; of several things that are, the first is said.
ORDER, SERVER, EMPTY, TOO_LONG, OUTSIDE, AGAIN, TOO_FEW = range(FINE + 1, FINE + 8)


class Tasks(NamedTuple):
    """The columns of a plan as compiled functions take them, and of each task the place of its document in the layout."""

    document: IntArray
    start: IntArray
    end: IntArray
    home: IntArray
    server: IntArray
    place: IntArray
