"""The greedy behind `balance`: levels for ranks to end at, the moves that bring them there, and the plan that these make.

Ranks above the tolerated band come down to their level, ranks below come up to it, ranks inside are left alone. The moves
themselves are in `schedule.moves`. Every rank computes the plan for itself, so sums are made in a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.heads import Heads
from hf_distca.schedule.layout import IntArray, Layout, repeated
from hf_distca.schedule.moves import END, HIGH, PIECE, SERVER, START, Book, Goal, Loads, Pieces, Prices, make_moves
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.waves import TransientBytes

__all__ = ["Bound", "Greedy", "levels_of"]

# Levels are set inside the tolerated band, because slices end on tiles and seldom move exactly what was wanted.
_INNER_BAND = 0.7


class Bound(NamedTuple):
    """Transient bytes that a tile of moved rows may take with its keys, and those of a row and of a key."""

    most: float
    row: float
    key: float

    @classmethod
    def of(cls, most: int | None, transient: TransientBytes) -> Self:
        """None for no bound."""
        return cls(math.inf if most is None else float(most), float(transient.query), float(transient.key))


def levels_of(seconds: FloatArray, ranks: Ranks, tolerance: float) -> FloatArray:
    """Seconds of a rank at places `FLOOR` to `CAP`: the edges of the band around the mean, and where ranks outside it should end.

    What one side sheds the other takes: the side with more to do stops inside its edge, the other goes further.

    Args:
        seconds: what each rank takes for its work.
        ranks: what they are like; what a rank sheds is work of so many seconds times its speed.
        tolerance: half the width of the band, as a part of the mean.
    """
    speeds, mean = ranks.each(len(seconds)), ranks.level(seconds.tolist())
    low, high = mean * (1 - tolerance * _INNER_BAND), mean * (1 + tolerance * _INNER_BAND)
    pairs = list(zip(seconds.tolist(), speeds, strict=True))
    surplus = math.fsum((taken - high) * speed for taken, speed in pairs if taken > high)
    deficit = math.fsum((low - taken) * speed for taken, speed in pairs if taken < low)
    if surplus >= deficit:
        low = min(_filled(pairs, surplus), mean)
    else:
        high = max(-_filled([(-taken, speed) for taken, speed in pairs], deficit), mean)
    return np.array([mean * (1 - tolerance), low, mean, high, mean * (1 + tolerance)])


def _filled(pairs: list[tuple[float, float]], amount: float) -> float:
    """The level that `amount` poured over the lowest ranks reaches, given as (seconds, speed)."""
    total = width = level = 0.0
    ordered = sorted(pairs)
    for count, (taken, speed) in enumerate(ordered, 1):
        total += taken * speed
        width += speed
        level = (amount + total) / width
        if count == len(ordered) or level <= ordered[count][0]:
            break
    return level


@dataclass(frozen=True)
class Greedy:
    """Makes plans for a layout.

    Attributes:
        layout: of all ranks.
        heads: documents that may be split by heads.
        ranks: what they are like, with nodes only if these make a difference.
        bound: on transient bytes.
        window: of the plans.
    """

    layout: Layout
    heads: Heads
    ranks: Ranks
    bound: Bound
    window: int | None

    def even_out(self, prices: Prices, seconds: FloatArray, levels: FloatArray) -> Plan:
        """The plan that evens out what ranks take.

        Args:
            prices: of slices.
            seconds: what each rank takes if nothing moves; shape (ranks,).
            levels: what they should end at; see `levels_of`.
        """
        ranks = self.ranks
        speeds = ranks.each(len(seconds))
        pairs = zip(seconds.tolist(), speeds, strict=True)
        surplus = math.fsum((taken - levels[HIGH]) * speed for taken, speed in pairs if taken > levels[HIGH])
        goal = Goal(levels, levels, float(surplus), float(ranks.work(seconds.tolist())), *self.bound)
        row, before = _pieces(self.layout, self.heads)
        order, room = np.argsort(-seconds, kind="stable"), 4 * len(seconds) + 64
        while True:
            pieces = before._replace(start=before.start.copy(), end=before.end.copy())
            loads = Loads(seconds.copy(), np.array(speeds), order, ranks.per_node or 0)
            book = Book(np.empty((room, 4), np.int64), np.empty((room, 3), np.int64), np.full(len(pieces.first), -1))
            count = make_moves(pieces, prices, loads, goal._replace(levels=levels.copy()), book)
            if count >= 0:
                return _plan(self.layout, self.heads, (row, pieces), book.moves[:count], self.window)
            room *= 4


def _pieces(layout: Layout, heads: Heads) -> tuple[IntArray, Pieces]:
    """The pieces that ranks compute before anything moves, deepest first, and the segment of each."""
    rows = np.flatnonzero(layout.queries)
    rows = rows[np.lexsort((layout.place[rows], -layout.end[rows], layout.rank[rows]))]
    parts = heads.groups + 1 if heads.groups > 1 else 1
    apart = heads.documents[layout.place[rows]] if heads.groups > 1 else np.zeros(len(rows), dtype=np.bool_)
    index, group = repeated(apart, heads.groups)
    row = rows[index]
    number, home = layout.place[row] * parts + group, layout.rank[row]
    # Chains of pieces of documents that lie on several ranks.
    first, after = np.full(len(layout.documents) * parts, -1), np.full(len(row), -1)
    chained = np.flatnonzero(layout.spans[layout.place[row]])
    chained = chained[np.argsort(number[chained], kind="stable")]
    same = number[chained][1:] == number[chained][:-1]
    after[chained[:-1][same]] = chained[1:][same]
    begins = np.append(True, ~same)[: len(chained)]
    first[number[chained[begins]]] = chained[begins]
    offsets = np.searchsorted(home, np.arange(layout.world_size + 1))
    part = np.where(group > 0, 1.0 / heads.groups, 1.0)
    return row, Pieces(number, layout.start[row], layout.end[row], home, part, after, offsets, first)


def _plan(layout: Layout, heads: Heads, left: tuple[IntArray, Pieces], moves: IntArray, window: int | None) -> Plan:
    """What was moved, and what is left of the pieces, with the segment of each. Neighbours on one server are one task."""
    row, pieces = left
    parts = heads.groups + 1 if heads.groups > 1 else 1
    moved = moves[:, PIECE]
    # A document of which no group is moved is not split.
    apart = np.zeros(len(layout.documents), dtype=np.bool_)
    if parts > 1:
        apart[layout.place[row[moved[pieces.number[moved] % parts > 0]]]] = True
    place, group = layout.place[row], pieces.number % parts
    stays = (pieces.start < pieces.end) & (apart[place] | (group <= 1))
    piece = np.concatenate([moved, np.flatnonzero(stays)])
    start = np.concatenate([moves[:, START], pieces.start[stays]])
    end = np.concatenate([moves[:, END], pieces.end[stays]])
    home = pieces.home[piece]
    server = np.concatenate([moves[:, SERVER], pieces.home[stays]])
    split = bool(apart.any())
    number = layout.documents[place[piece]]
    if split:
        number = number * parts + np.where(apart[place[piece]], group[piece], 0)
    order = np.lexsort((start, number))
    piece, start, end, home, server, number = (column[order] for column in (piece, start, end, home, server, number))
    joins = (piece[1:] == piece[:-1]) & (server[1:] == server[:-1])
    begin = np.flatnonzero(np.append(True, ~joins)[: len(piece)])
    last = np.append(begin[1:], len(piece))[: len(begin)] - 1
    made = layout.split(apart, heads.groups) if split else layout
    return Plan(made, number[begin], start[begin], end[last], home[begin], server[begin], window)
