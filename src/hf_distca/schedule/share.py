"""A rank's share of a plan as numbers: rows to send and receive, pools of keys, and tasks to run.

`runtime.route` makes objects from these numbers. All rows between two ranks travel in order of
document, head group and position, so messages need no headers.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hf_distca.schedule.layout import IntArray, enumerate_ranges, mark_changes
from hf_distca.schedule.plan import KeyTransfers, Plan, Relays
from hf_distca.schedule.relays import with_relay_hops

Columns = tuple[list[int], ...]
# A message: sent runs (rank, first row, number of rows) and received rows (rank, number of rows).
RankMessage = tuple[Columns, Columns]


class RelayDuty(NamedTuple):
    """The second hop of keys, on one rank.

    Attributes:
        pieces: runs of the first hop that this rank forwards. Columns: section of the received
            message, first row in the section, number of rows, first row in the pool.
        keys: message of the second hop, with rows of these runs to send, and keys to receive from
            relays.
        gradients: message of key gradients, with rows of the pool whose gradients go back to
            relays, and gradients to receive.
    """

    pieces: Columns
    keys: RankMessage
    gradients: RankMessage


class ExchangeShare(NamedTuple):
    """The part of one rank in a dispatch and a return.

    Attributes:
        queries: message of query rows, with rows of this rank to send, and rows to receive.
        own_queries: query rows of this rank that run on its own pool. Columns: rank, first row,
            number of rows.
        keys: message of keys in the first hop, with keys of this rank to send, and keys to receive.
        pool: the keys that tasks need. Columns: section of the received message (-1 for keys of
            this rank), first row in the section, number of rows.
        gradients: message of key gradients, with rows of the pool whose gradients go back, and
            gradients to receive.
        pool_tasks: tasks on the pool. Columns: first query row, number of query rows, first key,
            number of keys.
        relay_duty: the second hop; None if the plan has no relays.
    """

    queries: RankMessage
    own_queries: Columns
    keys: RankMessage
    pool: Columns
    gradients: RankMessage
    pool_tasks: Columns
    relay_duty: RelayDuty | None = None


def compute_share(
    plan: Plan, rank: int
) -> tuple[Columns, ExchangeShare | None, ExchangeShare | None]:
    """Compute the share of one rank.

    Returns:
        Three results. The first is the tasks on this rank's own tensors, in columns: first query
            row, number of query rows, first key, number of keys. The second is the exchange, or
            None if the plan has no exchange. The third is an exchange of this rank with itself, for
            head groups that need only its own keys, or None without such groups.
    """
    layout = plan.layout
    is_concerned = np.zeros(len(layout.documents), dtype=np.bool_)
    is_concerned[plan.place[(plan.server == rank) | (plan.home == rank)]] = True
    is_concerned[layout.place[layout.offsets[rank] : layout.offsets[rank + 1]]] = True
    tasks = np.flatnonzero(is_concerned[plan.place])
    is_local = (plan.server[tasks] == rank) & ~plan.needs_exchange[tasks]
    in_groups = is_local & (plan.heads[tasks] < 1)
    rows = _TokenRows.select_queries(plan, tasks[is_local & ~in_groups], groups=1)
    rows = rows.select(np.argsort(rows.row))
    return (
        _merge_tasks(rows, rows.row - rows.start, rows.row - layout.context_tokens[rank]),
        _compute_exchange(plan, rank, tasks, tasks[~is_local], plan.relays) if plan.moved else None,
        _compute_exchange(plan, rank, tasks[in_groups], tasks[in_groups], None)
        if in_groups.any()
        else None,
    )


class _TokenRows(NamedTuple):
    """Runs of query rows or keys, in order of `number` and `start`.

    Attributes:
        number: document number of the run. Each head group has its own document number.
        start: document position of the first row.
        row: index of the first row in a tensor with one row per token and head group.
        rows: number of rows.
        source: the rank that holds the rows.
        server: the rank that needs the rows.
        relay: the rank that forwards the rows; equal to `server` if no rank forwards them.
        first_key: position of the first key that the rows need.
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
    def select_tokens(
        cls, plan: Plan, tokens: KeyTransfers, relay: IntArray, first_key: IntArray, groups: int
    ) -> Self:
        """Select the rows of tokens. If a document number stands for one head group, each token has
        one row. Otherwise, each token has one row for each head group.
        """
        layout, (document, start, end, source, server) = plan.layout, tokens
        group = document % (groups + 1) if groups > 1 else np.ones_like(document)
        index, part = enumerate_ranges(
            np.where(group > 0, group, 1), np.where(group > 0, group, groups) + 1
        )
        segment = layout.by_document[layout.find_segments(layout.find_places(document), start)]
        row = (layout.token[segment] - layout.start[segment] + start)[index] * groups + part - 1
        others = map(itemgetter(index), (end - start, source, server, relay, first_key))
        rows = cls((document - group)[index] + part, start[index], row, *others)
        return rows.select(np.lexsort((rows.start, rows.number)))

    @classmethod
    def select_queries(cls, plan: Plan, tasks: IntArray, groups: int) -> Self:
        """Select the query rows of tasks."""
        columns = (plan.document, plan.start, plan.end, plan.home, plan.server)
        rows = KeyTransfers(*map(itemgetter(tasks), columns))
        return cls.select_tokens(plan, rows, rows.server, plan.first_key[tasks], groups)

    @classmethod
    def select_keys(cls, plan: Plan, tasks: IntArray, rank: int, relays: Relays | None) -> Self:
        """Select the keys that tasks need, if a rank holds, needs or forwards these keys."""
        keys, relay = with_relay_hops(plan.layout, plan.list_key_transfers(tasks), relays)
        # A relay gets its keys in the first hop. Keys without a relay, and keys that their relay
        # holds itself, reach all servers in the first hop.
        relay = np.where(
            (relay < 0) | (relay == keys.source) | (keys.source == keys.server), keys.server, relay
        )
        rows = np.flatnonzero((keys.source == rank) | (keys.server == rank) | (relay == rank))
        keys = KeyTransfers(*map(itemgetter(rows), keys))
        return cls.select_tokens(plan, keys, relay[rows], keys.start, plan.layout.groups)

    def select(self, which: npt.NDArray[Any]) -> Self:
        """Select rows by a mask or by their indices."""
        return type(self)(*map(itemgetter(which), self))


def _compute_exchange(
    plan: Plan, rank: int, needed_tasks: IntArray, run_tasks: IntArray, relays: Relays | None
) -> ExchangeShare:
    """Compute the share of one rank in an exchange that carries the keys of `needed_tasks`. Of
    these tasks, only `run_tasks` run on pools.
    """
    layout, groups = plan.layout, plan.layout.groups
    queries = _TokenRows.select_queries(
        plan, run_tasks[(plan.server[run_tasks] == rank) | (plan.home[run_tasks] == rank)], groups
    )
    queries = queries._replace(row=queries.row - layout.context_tokens[rank] * groups)
    keys = _TokenRows.select_keys(plan, needed_tasks, rank, relays)
    pool_tasks = queries.select(queries.server == rank)
    pool = keys.select((keys.server == rank) & np.isin(keys.number, pool_tasks.number))
    in_pool = pool._replace(row=_sum_rows_before(pool.rows))
    direct = pool.relay == rank
    section, section_rows = _number_sections(
        # The sections of the second hop come after the sections of the first hop.
        np.where(
            direct, np.where(pool.source == rank, -1, pool.source), pool.relay + layout.world_size
        ),
        pool.rows,
    )
    local = section < 0
    key_message, gradient_message = _describe_exchange(
        keys.select((keys.source == rank) & (keys.server != rank) & (keys.relay == keys.server)),
        in_pool.select(direct & ~local),
        groups,
    )
    own_first = pool_tasks.select(
        np.argsort(np.where(pool_tasks.source == rank, -1, pool_tasks.source), kind="stable")
    )
    place = (in_pool.row - pool.start)[_find_pool_rows(pool, own_first.number, own_first.first_key)]
    own_queries = pool_tasks.select(pool_tasks.source == rank)
    share = ExchangeShare(
        _describe_exchange(
            queries.select(queries.server != rank),
            pool_tasks.select(pool_tasks.source != rank),
            groups,
        )[0],
        _join_runs(own_queries.server, own_queries.row, own_queries.rows, groups),
        key_message,
        _join_runs(
            section, np.where(local, pool.row, section_rows), pool.rows, np.where(local, groups, 1)
        ),
        gradient_message,
        _merge_tasks(own_first, place, _sum_rows_before(own_first.rows)),
    )
    if relays is None:
        return share
    relayed_keys = keys.select((keys.relay == rank) & (keys.server != rank))
    # Servers may need more or fewer rows of the same run. Forward as many as any server needs.
    pool_row = _find_pool_rows(pool, relayed_keys.number, relayed_keys.start)
    relayed_rows = np.zeros_like(pool.rows)
    np.maximum.at(relayed_rows, pool_row, relayed_keys.rows)
    columns = (section, section_rows, relayed_rows, in_pool.row)
    return share._replace(
        relay_duty=RelayDuty(
            _to_lists(*(column[relayed_rows > 0] for column in columns)),
            *_describe_exchange(
                relayed_keys._replace(row=_sum_rows_before(relayed_rows)[pool_row]),
                in_pool._replace(source=pool.relay).select(~direct),
            ),
        )
    )


def _find_pool_rows(pool: _TokenRows, number: IntArray, position: IntArray) -> IntArray:
    """Find the row of `pool` that holds each key, given by its number and position."""
    starts_run = mark_changes(pool.number)
    width = int(max(pool.start.max(initial=0), position.max(initial=0))) + 1
    wanted = np.searchsorted(pool.number[starts_run], number) * width + position
    return (
        np.searchsorted((np.cumsum(starts_run) - 1) * width + pool.start, wanted, side="right") - 1
    )


def _merge_tasks(rows: _TokenRows, place: IntArray, query: IntArray) -> Columns:
    """Merge tasks whose query rows follow each other.

    Args:
        rows: the query rows.
        place: row where the key of position 0 would lie, if all keys lay in one run.
        query: row of the first query.

    Returns:
        First query row, number of query rows, first key and number of keys of each task.
    """
    end = rows.start + rows.rows
    starts_run = mark_changes(rows.number, place)
    starts_run[1:] |= rows.start[1:] != end[:-1]
    start = rows.start[starts_run]
    end = end[np.append(starts_run, True)[1:]]
    first_key = rows.first_key[starts_run]
    return _to_lists(query[starts_run], end - start, place[starts_run] + first_key, end - first_key)


def _describe_exchange(
    sent: _TokenRows, received: _TokenRows, step: int = 1
) -> tuple[RankMessage, RankMessage]:
    """Describe a message: rows to send, which lie `step` rows apart in their tensor, and rows to
    receive.

    Return this message, and the message of the gradients that go back.
    """
    message = _group_runs(sent.server, sent, step), _sum_rows(received.source, received.rows)
    return message, (_group_runs(received.source, received, 1), _sum_rows(sent.server, sent.rows))


def _group_runs(rank: IntArray, rows: _TokenRows, step: int) -> Columns:
    """Group runs by destination rank. Return columns: rank, first row, number of rows."""
    order = np.argsort(rank, kind="stable")
    return _join_runs(rank[order], rows.row[order], rows.rows[order], step)


def _join_runs(key: IntArray, first: IntArray, rows: IntArray, step: IntArray | int) -> Columns:
    """Join neighbouring runs if they have equal numbers in `key` (such as ranks), and if their rows
    follow each other at distance `step` in their tensor.

    Return columns: number in `key`, first row, number of rows.
    """
    starts_run = mark_changes(key)
    starts_run[1:] |= first[1:] != (first + step * rows)[:-1]
    begin = np.flatnonzero(starts_run)
    return _to_lists(key[begin], first[begin], np.add.reduceat(rows, begin) if len(begin) else rows)


def _sum_rows(rank: IntArray, rows: IntArray) -> Columns:
    """Sum rows by rank. Return columns: rank, number of rows. Ranks without rows are left out."""
    total = np.bincount(rank, weights=rows).astype(np.int64)
    ranks = np.flatnonzero(total)
    return _to_lists(ranks, total[ranks])


def _number_sections(sender: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Find the section of each run of received rows, and the run's first row in the section.

    There is one section for each sender. Runs with the sender -1 are in section -1.
    """
    section = np.unique(np.append(-1, sender), return_inverse=True)[1][1:] - 1
    order = np.argsort(section, kind="stable")
    before = _sum_rows_before(rows[order])
    row = np.empty_like(rows)
    row[order] = before - before[np.searchsorted(section[order], section[order])]
    return section, row


def _sum_rows_before(rows: IntArray) -> IntArray:
    """Return the number of rows before each entry."""
    return np.cumsum(rows) - rows


def _to_lists(*columns: IntArray) -> Columns:
    return tuple(map(np.ndarray.tolist, columns))
