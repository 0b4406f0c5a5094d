"""A rank's share of a plan, in numbers: rows to send and receive, pools of keys, and tasks to run.

`runtime.route` makes objects of the numbers. All rows between two ranks travel in order of
document, head group and position, so that messages need no description.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.layout import IntArray, changes, expanded
from hf_distca.schedule.plan import KeyTransfers, Plan, Relays
from hf_distca.schedule.relays import routed
from hf_distca.schedule.waves import Waves

__all__ = ["Columns", "RankMessage", "Passing", "WaveShare", "share_of"]

Columns = tuple[list[int], ...]
# Runs that are sent: rank, first row, rows. And what comes: rank, rows.
RankMessage = tuple[Columns, Columns]


class Passing(NamedTuple):
    """The second hop of keys.

    Attributes:
        pieces: forwarded runs of the first hop: section, first row, rows, row of the pool.
        keys: rows of these runs to send, and keys that come from relays.
        way_back: gradients of these keys, rows of the pool, and gradients that come.
    """

    pieces: Columns
    keys: RankMessage
    way_back: RankMessage


class WaveShare(NamedTuple):
    """A dispatch and a return of one rank.

    Attributes:
        queries: query rows of this rank to send, and query rows that come.
        own_queries: query rows of this rank that run on its own pool: rank, first row, rows.
        keys: keys of this rank to send, and keys that come in the first hop.
        pool: the keys that tasks need: section of the received message, or -1 for keys of this
            rank; first row, rows.
        way_back: gradients of keys that came, rows of the pool, and gradients that come.
        arrived: tasks on the pool: first query row, query rows, first key, keys.
        passing: the second hop, if the plan has relays.
    """

    queries: RankMessage
    own_queries: Columns
    keys: RankMessage
    pool: Columns
    way_back: RankMessage
    arrived: Columns
    passing: Passing | None = None


def share_of(waves: Waves, rank: int) -> tuple[Columns, list[WaveShare], WaveShare | None]:
    """Compute the share of one rank.

    Args:
        waves: waves of the plan.
        rank: the rank.

    Returns:
        Tasks on this rank's own tensors: first query row, query rows, first key, keys. All waves.
        And a wave that needs nothing from other ranks: head groups on keys of this rank alone, if
            it runs any.
    """
    plan, layout = waves.plan, waves.plan.layout
    concerned = np.zeros(len(layout.documents), dtype=np.bool_)
    concerned[plan.place[(plan.server == rank) | (plan.home == rank)]] = True
    concerned[layout.place[layout.offsets[rank] : layout.offsets[rank + 1]]] = True
    tasks = np.flatnonzero(concerned[plan.place])
    here = (plan.server[tasks] == rank) & ~plan.travels[tasks]
    in_groups = here & (plan.heads[tasks] < 1)
    in_waves = [waves.number[tasks] == wave for wave in range(waves.count * plan.moved)]
    shares = [_wave(plan, rank, tasks[some], tasks[some & ~here], plan.relays) for some in in_waves]
    local_wave = _wave(plan, rank, tasks[in_groups], tasks[in_groups], None) if in_groups.any() else None
    rows = _TokenRows.of_tasks(plan, tasks[here & ~in_groups], groups=1)
    rows = rows.some(np.argsort(rows.row))
    return _batch(rows, rows.row - rows.start, rows.row - layout.context_tokens[rank]), shares, local_wave


class _TokenRows(NamedTuple):
    """Query rows or keys, in order of number and position.

    Attributes:
        number, start: document and head group, and the document position.
        row, rows: the first row in a tensor whose rows are head groups, and the number of rows.
        source, server: the rank that has them, and the rank that needs them.
        relay: the rank that forwards them; the server if none does.
        first_key: position of the first key that they need.
    """

    number: IntArray
    start: IntArray
    row: IntArray
    rows: IntArray
    source: IntArray
    server: IntArray
    relay: IntArray
    first_key: IntArray

    @classmethod
    def of(cls, plan: Plan, tokens: KeyTransfers, relay: IntArray, first_key: IntArray, groups: int) -> Self:
        """Select tokens of documents, with all of so many head groups or of one."""
        layout, (document, start, end, source, server) = plan.layout, tokens
        group = document % (groups + 1) if groups > 1 else np.ones_like(document)
        index, part = expanded(np.where(group > 0, group, 1), np.where(group > 0, group, groups) + 1)
        segment = layout.by_document[layout.segment_of(layout.place_of(document), start)]
        row = (layout.token[segment] - layout.start[segment] + start)[index] * groups + part - 1
        others = (column[index] for column in (end - start, source, server, relay, first_key))
        rows = cls((document - group)[index] + part, start[index], row, *others)
        return rows.some(np.lexsort((rows.start, rows.number)))

    @classmethod
    def of_tasks(cls, plan: Plan, tasks: IntArray, groups: int) -> Self:
        """Select the query rows of tasks."""
        server, columns = plan.server[tasks], (plan.document, plan.start, plan.end, plan.home, plan.server)
        return cls.of(plan, KeyTransfers(*(column[tasks] for column in columns)), server, plan.first_key[tasks], groups)

    @classmethod
    def of_keys(cls, plan: Plan, tasks: IntArray, rank: int, relays: Relays | None) -> Self:
        """Select the keys that tasks need, as far as a rank sends,
        forwards, gets, or holds them for itself.
        """
        keys, relay = routed(plan.key_transfers(tasks), relays)
        # Relays get theirs in the first hop, and keys of their own go to all in it.
        relay = np.where((relay < 0) | (relay == keys.source) | (keys.source == keys.server), keys.server, relay)
        some = np.flatnonzero((keys.source == rank) | (keys.server == rank) | (relay == rank))
        keys = KeyTransfers(*(column[some] for column in keys))
        return cls.of(plan, keys, relay[some], keys.start, plan.layout.groups)

    def some(self, which: npt.NDArray[Any]) -> Self:
        """Select some of the rows."""
        return type(self)(*(column[which] for column in self))


def _wave(plan: Plan, rank: int, need: IntArray, run: IntArray, relays: Relays | None) -> WaveShare:
    """Compute a wave that carries the keys of the tasks `need`; the tasks `run` run on pools."""
    layout, groups = plan.layout, plan.layout.groups
    queries = _TokenRows.of_tasks(plan, run[(plan.server[run] == rank) | (plan.home[run] == rank)], groups)
    queries = queries._replace(row=queries.row - layout.context_tokens[rank] * groups)
    keys, arrived = _TokenRows.of_keys(plan, need, rank, relays), queries.some(queries.server == rank)
    pool = keys.some((keys.server == rank) & np.isin(keys.number, arrived.number))
    in_pool = pool._replace(row=_before(pool.rows))
    direct = pool.relay == rank
    # Sections of the second hop come after those of the first.
    sender = np.where(direct, np.where(pool.source == rank, -1, pool.source), pool.relay + layout.world_size)
    section, received = _sections(sender, pool.rows)
    local = section < 0
    leaving = keys.some((keys.source == rank) & (keys.server != rank) & (keys.relay == keys.server))
    there, back = _exchange(leaving, in_pool.some(direct & ~local), groups)
    own_first = arrived.some(np.argsort(np.where(arrived.source == rank, -1, arrived.source), kind="stable"))
    place = (in_pool.row - pool.start)[_piece(pool, own_first.number, own_first.first_key)]
    own_queries = arrived.some(arrived.source == rank)
    wave = WaveShare(
        _exchange(queries.some(queries.server != rank), arrived.some(arrived.source != rank), groups)[0],
        _runs(own_queries.server, own_queries.row, own_queries.rows, groups),
        there,
        _runs(section, np.where(local, pool.row, received), pool.rows, np.where(local, groups, 1)),
        back,
        _batch(own_first, place, _before(own_first.rows)),
    )
    if relays is None:
        return wave
    passed = keys.some((keys.relay == rank) & (keys.server != rank))
    # Each run of the pool is passed on as far as the server needs it that needs most of it.
    piece, most = _piece(pool, passed.number, passed.start), np.zeros_like(pool.rows)
    np.maximum.at(most, piece, passed.rows)
    some = most > 0
    pieces = _lists(section[some], received[some], most[some], in_pool.row[some])
    relayed = in_pool._replace(source=pool.relay).some(~direct)
    return wave._replace(passing=Passing(pieces, *_exchange(passed._replace(row=_before(most)[piece]), relayed)))


def _piece(pool: _TokenRows, number: IntArray, position: IntArray) -> IntArray:
    """Find the row of a pool that holds the key of each position."""
    fresh, width = changes(pool.number), int(max(pool.start.max(initial=0), position.max(initial=0))) + 1
    wanted = np.searchsorted(pool.number[fresh], number) * width + position
    return np.searchsorted((np.cumsum(fresh) - 1) * width + pool.start, wanted, side="right") - 1


def _batch(rows: _TokenRows, place: IntArray, query: IntArray) -> Columns:
    """Merge tasks that follow each other: first query row, query rows, first key, keys.

    Args:
        rows: the query rows.
        place: place where keys of position 0 would lie, if all keys lay in one run.
        query: place of the query rows.
    """
    end = rows.start + rows.rows
    fresh = changes(rows.number, place)
    fresh[1:] |= rows.start[1:] != end[:-1]
    start, end, first_key = rows.start[fresh], end[np.append(fresh, True)[1:]], rows.first_key[fresh]
    return _lists(query[fresh], end - start, place[fresh] + first_key, end - first_key)


def _exchange(sent: _TokenRows, comes: _TokenRows, step: int = 1) -> tuple[RankMessage, RankMessage]:
    """Describe a message of sent rows, `step` apart, and received
    rows; and the message of the way back.
    """
    there = _runs_to(sent.server, sent, step), _totals(comes.source, comes.rows)
    return there, (_runs_to(comes.source, comes, 1), _totals(sent.server, sent.rows))


def _runs_to(rank: IntArray, rows: _TokenRows, step: int) -> Columns:
    """Group runs by destination rank: rank, first row, rows."""
    order = np.argsort(rank, kind="stable")
    return _runs(rank[order], rows.row[order], rows.rows[order], step)


def _runs(key: IntArray, first: IntArray, rows: IntArray, step: IntArray | int) -> Columns:
    """Join consecutive rows that are `step` apart: key of a run, first row, rows."""
    fresh = changes(key)
    fresh[1:] |= first[1:] != (first + step * rows)[:-1]
    begin = np.flatnonzero(fresh)
    return _lists(key[begin], first[begin], np.add.reduceat(rows, begin) if len(begin) else rows)


def _totals(rank: IntArray, rows: IntArray) -> Columns:
    """Sum rows by rank, of ranks that have any: rank, rows."""
    total = np.bincount(rank, weights=rows).astype(np.int64)
    ranks = np.flatnonzero(total)
    return _lists(ranks, total[ranks])


def _sections(sender: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Number the senders of consecutive received rows, and the rows
    within each section; -1 without a sender.
    """
    section = np.unique(np.append(-1, sender), return_inverse=True)[1][1:] - 1
    order = np.argsort(section, kind="stable")
    before, row = _before(rows[order]), np.empty_like(rows)
    row[order] = before - before[np.searchsorted(section[order], section[order])]
    return section, row


def _before(rows: IntArray) -> IntArray:
    """Return the number of rows before each."""
    return np.cumsum(rows) - rows


def _lists(*columns: IntArray) -> Columns:
    return tuple(column.tolist() for column in columns)
