"""What one rank does under a plan, in numbers: rows that it sends and gets, pools of keys, and the tasks that it runs.

`runtime.route` makes objects of the numbers. All that travels between two ranks goes in order of document, head group and
position, so that sender and receiver need not tell each other what comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np

from hf_distca.schedule.layout import BoolArray, IntArray, expanded
from hf_distca.schedule.plan import Plan, Relays
from hf_distca.schedule.relays import routed

__all__ = ["share_of"]


def share_of(plan: Plan, rank: int, waves: IntArray | None = None, wave: int = 0) -> list[int]:
    """The numbers of one rank. Each section is how many rows it has, and the rows one after another.

    1. Tasks on this rank's own tensors: first query row, query rows, first key, keys.
    2. A wave: see `_Wave.numbers`.
    3. If this rank runs head groups on keys of its own alone: no task, and a wave of these.

    Args:
        plan: what is to be done.
        rank: the one that does it.
        waves: of each task the wave in which it travels; None if there is one wave.
        wave: the one that is wanted.
    """
    tasks = _Tasks.of(plan, rank)
    travels = np.ones(len(tasks.rows), dtype=np.bool_) if waves is None else waves[tasks.rows] == wave
    grouped = plan.layout.groups > 1
    groups = (plan.document[tasks.rows] % (plan.layout.groups + 1) > 0) & grouped
    here = tasks.here
    numbers = _section(tasks.on_own_tensors(here & ~groups))
    numbers += _Wave(plan, rank, tasks, travels, travels & ~here, plan.relays).numbers()
    kept = here & groups
    if kept.any():
        numbers += [0, *_Wave(plan, rank, tasks, kept, kept, None).numbers()]
    return numbers


class _Tasks(NamedTuple):
    """The tasks of all documents that concern a rank.

    Attributes:
        rows: rows of the plan.
        first: the first key that each needs.
        place: of tasks of this rank, the token of document position 0 if all of the document lay in one run with the task.
        segment: rows of the layout that tasks lie in.
        here: whether this rank runs a task on keys that lie in one run of its own tokens with it.
        context: tokens of context of this rank.
        plan: the plan.
    """

    rows: IntArray
    first: IntArray
    place: IntArray
    segment: IntArray
    here: BoolArray
    context: int
    plan: Plan

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Self:
        """Those of a rank."""
        layout = plan.layout
        concerned = np.zeros(len(layout.documents), dtype=np.bool_)
        concerned[plan.place[(plan.server == rank) | (plan.home == rank)]] = True
        concerned[layout.place[layout.offsets[rank] : layout.offsets[rank + 1]]] = True
        rows = np.flatnonzero(concerned[plan.place])
        start = plan.start[rows]
        segment = layout.by_document[layout.segment_of(plan.place[rows], start)]
        first = np.zeros_like(start) if plan.window is None else np.maximum(start - (plan.window - 1), 0)
        here = (plan.home[rows] == rank) & (plan.server[rows] == rank) & (first >= layout.run[segment])
        place = layout.token[segment] - layout.start[segment]
        return cls(rows, first, place, segment, here, int(layout.context_tokens[rank]), plan)

    def on_own_tensors(self, which: BoolArray) -> IntArray:
        """Some of them as first query row, query rows, first key, keys."""
        index = np.flatnonzero(which)
        index = index[np.lexsort((self.plan.start[self.rows[index]], self.segment[index]))]
        rows, place = self.rows[index], self.place[index]
        start, document = self.plan.start[rows], self.plan.document[rows]
        begin, total = _joined(start, self.plan.end[rows] - start, document, place)
        first, start, place = self.first[index][begin], start[begin], place[begin]
        return np.stack([place + start - self.context, total, place + first, start + total - first], axis=1)


@dataclass(frozen=True)
class _Wave:
    """One dispatch and one return of a rank.

    Attributes:
        plan, rank, tasks: whose they are.
        need: of tasks, whether their keys travel with this wave.
        travel: whether they run on pools.
        relays: keys that are passed on.
    """

    plan: Plan
    rank: int
    tasks: _Tasks
    need: BoolArray
    travel: BoolArray
    relays: Relays | None

    def numbers(self) -> list[int]:
        """All sections of a wave, in this order.

        Query rows to other ranks: rank, first row, rows. Query rows that come: rank, rows. Query rows of this rank's own: rank,
        first row, rows. Keys to other ranks, and those that come. The pool: section of the message or -1, first row, rows.
        Gradients of keys to other ranks, from the pool, and those that come. Tasks on the pools. With relays: keys of the first
        message that are passed on: section, first row, rows, row of the pool; to and from whom; and their gradients, likewise.
        """
        rank, rows, keys = self.rank, self._queries, self._keys
        away = rows.home != rows.server
        sent = (rows.home == rank) & away
        arrived = rows.server == rank
        coming = arrived & away
        at_home = arrived & ~away
        numbers = _section(self._runs(rows.server, rows.token, rows.rows, rows.part, sent))
        numbers += _section(_totals(rows.home[coming], rows.rows[coming]))
        numbers += _section(self._runs(rows.server, rows.token, rows.rows, rows.part, at_home))
        first_hop, second_hop = keys.relay < 0, keys.relay >= 0
        travels = keys.source != keys.server
        leaving = travels & first_hop & (keys.source == rank)
        pool = np.flatnonzero((keys.server == rank) & np.isin(keys.number, rows.number[arrived]))
        sender = np.where(second_hop, keys.relay, keys.source)[pool]
        offset = _offsets(keys.rows[pool])
        came = first_hop[pool] & (sender != rank)
        passed_came = second_hop[pool]
        to_first = _section(self._runs(keys.server, keys.token, keys.rows, keys.part, leaving))
        from_first = _section(_totals(sender[came], keys.rows[pool][came]))
        numbers += to_first + from_first
        # Sections of the messages: what comes from each rank in the first hop, and then in the second.
        chain = np.where(passed_came, sender + self.plan.layout.world_size, np.where(came, sender, -1))
        row = _offsets_by(chain, keys.rows[pool])
        names = np.unique(chain[chain >= 0])
        section = np.where(chain >= 0, np.searchsorted(names, chain), -1)
        start = np.where(chain >= 0, row, keys.token[pool])
        begin, total = _joined(start, keys.rows[pool], section, np.where(chain >= 0, 0, keys.part[pool]))
        own_row = keys.token[pool] * self.plan.layout.groups + keys.part[pool] - 1
        first = np.where(chain >= 0, row, own_row)
        numbers += _section(np.stack([section[begin], first[begin], total], axis=1))
        numbers += _section(_back(sender, offset, keys.rows[pool], came))
        numbers += _section(_totals(keys.server[leaving], keys.rows[leaving]))
        numbers += _section(self._arrived(rows, arrived, (keys.number[pool], keys.start[pool], offset)))
        if self.relays is None:
            return numbers
        passing = np.flatnonzero((keys.relay == rank) & travels)
        # What is passed on of a piece of the pool is what the server with the longest need gets.
        pool_row = np.searchsorted(_order_key(keys, pool), _order_key(keys, passing))
        most = np.zeros(len(pool), dtype=np.int64)
        np.maximum.at(most, pool_row, keys.rows[passing])
        some = most > 0
        place = _offsets(most)
        numbers += _section(np.stack([section[some], row[some], most[some], offset[some]], axis=1))
        order = np.argsort(keys.server[passing], kind="stable")
        server, start, count = keys.server[passing][order], place[pool_row][order], keys.rows[passing][order]
        begin, total = _joined(start, count, server)
        passed_to = _section(np.stack([server[begin], start[begin], total], axis=1))
        passed_from = _section(_totals(sender[passed_came], keys.rows[pool][passed_came]))
        numbers += passed_to + passed_from
        numbers += _section(_back(sender, offset, keys.rows[pool], passed_came))
        return numbers + _section(_totals(server, count))

    @cached_property
    def _queries(self) -> _QueryRows:
        """Rows of tasks on pools that this rank is the home or the server of, in order of number and position."""
        plan, tasks = self.plan, self.tasks
        rows = tasks.rows
        index = np.flatnonzero(self.travel & ((plan.server[rows] == self.rank) | (plan.home[rows] == self.rank)))
        number, index, part = self._by_group(plan.document[rows[index]], index)
        order = np.lexsort((plan.start[rows[index]], number))
        number, index, part = number[order], index[order], part[order]
        row = rows[index]
        start = plan.start[row]
        token = tasks.place[index] + start - tasks.context
        count = plan.end[row] - start
        return _QueryRows(number, part, start, tasks.first[index], token, count, plan.home[row], plan.server[row])

    @cached_property
    def _keys(self) -> _KeyRows:
        """Keys that this rank sends, passes on, gets or has for itself, in order of number and position."""
        plan, layout = self.plan, self.plan.layout
        rows = self.tasks.rows[self.need]
        rows = rows[np.argsort(plan.server[rows], kind="stable")]
        columns = plan.server[rows], plan.document[rows], plan.start[rows], plan.end[rows]
        keys, relay = routed(layout.needed_keys(*columns, window=plan.window), self.relays)
        # Relays get theirs in the first hop, and keys of their own go to all in it.
        direct = (relay == keys.server) | (relay == keys.source) | (keys.source == keys.server)
        relay = np.where(direct, -1, relay)
        mine = (keys.source == self.rank) | (keys.server == self.rank) | (relay == self.rank)
        index = np.flatnonzero(mine)
        number, index, part = self._by_group(keys.document[index], index)
        order = np.lexsort((keys.start[index], number))
        number, index, part = number[order], index[order], part[order]
        document, start, end, source, server = (column[index] for column in keys)
        segment = layout.by_document[layout.segment_of(layout.place_of(document), start)]
        token = layout.token[segment] + start - layout.start[segment]
        return _KeyRows(number, part, start, token, end - start, source, server, relay[index])

    def _by_group(self, document: IntArray, index: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Rows of documents once for each head group: a number by document and group, the row, the group from 1."""
        groups = self.plan.layout.groups
        if groups == 1:
            return document, index, np.ones_like(document)
        group = document % (groups + 1)
        row, part = expanded(np.where(group > 0, group, 1), np.where(group > 0, group, groups) + 1)
        return (document - group)[row] + part, index[row], part

    def _runs(self, rank: IntArray, token: IntArray, rows: IntArray, part: IntArray, which: BoolArray) -> IntArray:
        """Runs of rows of this rank's own tensors, by the rank that gets them: rank, first row, rows."""
        index = np.flatnonzero(which)
        index = index[np.argsort(rank[index], kind="stable")]
        rank, token, rows, part = (column[index] for column in (rank, token, rows, part))
        begin, total = _joined(token, rows, rank, part)
        return np.stack([rank[begin], token[begin] * self.plan.layout.groups + part[begin] - 1, total], axis=1)

    def _arrived(self, rows: _QueryRows, arrived: BoolArray, pool: tuple[IntArray, IntArray, IntArray]) -> IntArray:
        """Tasks on pools, those of this rank first: first query row, query rows, first key, keys."""
        index = np.flatnonzero(arrived)
        home = rows.home[index]
        index = index[np.argsort(np.where(home == self.rank, -1, home), kind="stable")]
        number, start, first, count = (column[index] for column in (rows.number, rows.start, rows.first, rows.rows))
        pool_number, pool_start, offset = pool
        width = int(self.plan.layout.longest) + 1
        names = np.unique(pool_number)
        piece = np.searchsorted(
            np.searchsorted(names, pool_number) * width + pool_start, np.searchsorted(names, number) * width + first, side="right"
        )
        place = offset[piece - 1] - pool_start[piece - 1]
        begin, total = _joined(start, count, number, place)
        first, start, place = first[begin], start[begin], place[begin]
        return np.stack([_offsets(total), total, place + first, start + total - first], axis=1)


class _QueryRows(NamedTuple):
    """Query rows of tasks: number by document and group, the group from 1, position, first key, token, rows, home, server."""

    number: IntArray
    part: IntArray
    start: IntArray
    first: IntArray
    token: IntArray
    rows: IntArray
    home: IntArray
    server: IntArray


class _KeyRows(NamedTuple):
    """Keys: as `_QueryRows`; with who holds them, who needs them, and the relay in between or -1."""

    number: IntArray
    part: IntArray
    start: IntArray
    token: IntArray
    rows: IntArray
    source: IntArray
    server: IntArray
    relay: IntArray


def _order_key(keys: _KeyRows, index: IntArray) -> IntArray:
    """What some keys are in order of."""
    names = np.unique(keys.number)
    return np.asarray(np.searchsorted(names, keys.number[index]) * (int(keys.start.max(initial=0)) + 1) + keys.start[index])


def _joined(start: IntArray, rows: IntArray, *same: IntArray) -> tuple[IntArray, IntArray]:
    """Where runs begin, and their rows: a row joins the one before if it starts where that ends and these columns are equal."""
    fresh = start[1:] != start[:-1] + rows[:-1]
    for column in same:
        fresh |= column[1:] != column[:-1]
    begin = np.flatnonzero(np.append(True, fresh)[: len(start)])
    return begin, np.add.reduceat(rows, begin) if len(begin) else rows


def _offsets(rows: IntArray) -> IntArray:
    """Rows before each."""
    return np.cumsum(rows) - rows


def _offsets_by(chain: IntArray, rows: IntArray) -> IntArray:
    """Rows before each of the same chain."""
    order = np.argsort(chain, kind="stable")
    sorted_chain, before = chain[order], _offsets(rows[order])
    offsets = np.empty_like(rows)
    offsets[order] = before - before[np.searchsorted(sorted_chain, sorted_chain)] if len(rows) else before
    return offsets


def _totals(rank: IntArray, rows: IntArray) -> IntArray:
    """Rows by rank, of those that have any: rank, rows."""
    total = np.bincount(rank, weights=rows).astype(np.int64)
    ranks = np.flatnonzero(total)
    return np.stack([ranks, total[ranks]], axis=1)


def _back(sender: IntArray, offset: IntArray, rows: IntArray, which: BoolArray) -> IntArray:
    """Runs of pool rows by the rank that sent them: rank, first row, rows."""
    index = np.flatnonzero(which)
    index = index[np.argsort(sender[index], kind="stable")]
    begin, total = _joined(offset[index], rows[index], sender[index])
    return np.stack([sender[index][begin], offset[index][begin], total], axis=1)


def _section(rows: IntArray) -> list[int]:
    return [len(rows), *rows.reshape(-1).tolist()]
